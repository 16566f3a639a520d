"""One request to the operator, whichever way it goes: its answer as a value, its refusal as a sentence."""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TypeVar

import msgspec

T = TypeVar("T")
Ask = Callable[[str, Mapping[str, str]], Awaitable[tuple[int, bytes]]]  # a path and its query -> status and body
MOST = 64 << 20  # bytes of an answer, unpacked: a group of 100,000 queues has some 30 MB


class NoAnswer(ValueError):  # noqa: N818 - it is what happened
    """The operator could not be asked, or its answer is none; who watches may ask again."""


class _Refusal(msgspec.Struct):
    """How the operator says no."""

    error: str


async def answer(ask: Ask, path: str, params: Mapping[str, str], kind: type[T]) -> T:
    """Ask, and return the value; what the operator refuses is its own sentence."""
    status, body = await ask(path, params)
    if status == HTTPStatus.OK:
        return _read(body, kind)
    raise NoAnswer(_read(body, _Refusal, f"it says {status}").error)


def _read(body: bytes, kind: type[T], why: str = "") -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        told = why or str(error)
        raise NoAnswer(
            f"Who answers there is something else ({told}); is it Rota's operator of this version?"
        ) from None
