"""Requests to the operator over any connection: decodes responses, and raises failures as one sentence for the user."""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TypeVar

import msgspec

T = TypeVar("T")
# Sends a path and its query; returns the status and body of the response.
SendRequest = Callable[[str, Mapping[str, str]], Awaitable[tuple[int, bytes]]]
MAX_RESPONSE_BYTES = 64 << 20  # limit of a decompressed response: a group of 100,000 queues has about 30 MB


class OperatorRequestError(ValueError):
    """Raised if a request to the operator fails, or its response is invalid; `--watch` tries again."""


class NoConnectionError(OperatorRequestError):
    """Raised if the operator cannot be reached through the cluster.

    Commands with the option --operator append to the message that the option may be given instead.
    """


class _OperatorError(msgspec.Struct):
    """An error response of the operator."""

    error: str


async def fetch_response(send: SendRequest, path: str, params: Mapping[str, str], response_type: type[T]) -> T:
    """Send a request and decode the response; raise OperatorRequestError with the message of an error response."""
    status, body = await send(path, params)
    if status == HTTPStatus.OK:
        return _decode(body, response_type)
    raise OperatorRequestError(_decode(body, _OperatorError, f"status {status}").error)


def _decode(body: bytes, response_type: type[T], detail: str = "") -> T:
    """Decode a body; the error for an invalid one quotes `detail` or, if it is empty, the decoder's message."""
    try:
        return msgspec.json.decode(body, type=response_type)
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"The response is not from an operator of this version ({detail or error})"
        raise OperatorRequestError(f"{problem}; check the address and the operator's version") from None
