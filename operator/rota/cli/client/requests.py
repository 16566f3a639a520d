"""Requests to the operator over any connection: decoded responses, and refusals as one sentence."""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TypeVar

import msgspec

T = TypeVar("T")
Ask = Callable[[str, Mapping[str, str]], Awaitable[tuple[int, bytes]]]  # a path and its query -> status and body
MOST = 64 << 20  # bytes of a decompressed response: a group of 100,000 queues has about 30 MB


class InvalidResponseError(ValueError):
    """Raised if the operator gives no valid response; `--watch` tries again."""


class _Refusal(msgspec.Struct):
    """An error response of the operator."""

    error: str


async def answer(ask: Ask, path: str, params: Mapping[str, str], kind: type[T]) -> T:
    """Send a request, return the decoded response; raise InvalidResponseError with the operator's error message."""
    status, body = await ask(path, params)
    if status == HTTPStatus.OK:
        return _read(body, kind)
    raise InvalidResponseError(_read(body, _Refusal, f"it says {status}").error)


def _read(body: bytes, kind: type[T], reason: str = "") -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        detail = reason or str(error)
        raise InvalidResponseError(
            f"Who answers there is something else ({detail}); is it Rota's operator of this version?"
        ) from None
