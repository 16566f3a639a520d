"""Requests to the operator over any connection: decoded responses, and refusals as one sentence."""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TypeVar

import msgspec

T = TypeVar("T")
# Sends a path and its query; returns the status and body of the response.
SendRequest = Callable[[str, Mapping[str, str]], Awaitable[tuple[int, bytes]]]
MAX_RESPONSE_BYTES = 64 << 20  # bytes of a decompressed response: a group of 100,000 queues has about 30 MB


class InvalidResponseError(ValueError):
    """Raised if the operator gives no valid response; `--watch` tries again."""


class NoConnectionError(InvalidResponseError):
    """Raised if the operator cannot be reached through the cluster.

    Commands that have the option --operator add to the message that it may be given instead.
    """


class _OperatorError(msgspec.Struct):
    """An error response of the operator."""

    error: str


async def fetch_response(send: SendRequest, path: str, params: Mapping[str, str], response_type: type[T]) -> T:
    """Send a request, return the decoded response; raise InvalidResponseError with the operator's error message."""
    status, body = await send(path, params)
    if status == HTTPStatus.OK:
        return _decode(body, response_type)
    raise InvalidResponseError(_decode(body, _OperatorError, f"status {status}").error)


def _decode(body: bytes, response_type: type[T], detail: str = "") -> T:
    """Decode a body. If it is invalid, the message has `detail`; without that, the decoder's message."""
    try:
        return msgspec.json.decode(body, type=response_type)
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"The response is not from an operator of this version ({detail or error})"
        raise InvalidResponseError(f"{problem}; check the address and the operator's version") from None
