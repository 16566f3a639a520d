"""How HTTP clients treat answers of servers that may be hostile: redirects, compression and long bodies."""

import math
from contextlib import AbstractAsyncContextManager, nullcontext
from http import HTTPStatus
from typing import Final

from aiohttp import ClientResponse

NOT_COMPRESSED: Final = {"Accept-Encoding": "identity"}


class TooLongError(ValueError):
    """The body exceeds the client's limit."""


def is_redirect(status: int) -> bool:
    """Whether an answer sends the client to another address."""
    return HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST


def is_compressed(response: ClientResponse) -> bool:
    """Whether the body is packed, although the client asked for one that is not."""
    return response.headers.get("Content-Encoding", "identity").strip().lower() != "identity"


async def read_body(
    response: ClientResponse,
    limit_bytes: float,
    large_bytes: float = math.inf,
    large_at_once: AbstractAsyncContextManager[object] | None = None,
) -> bytes:
    """Return the body, unpacked if the session unpacks; raise TooLongError as soon as it exceeds the limit.

    What exceeds `large_bytes` is read on while holding `large_at_once`, such as a semaphore.
    """
    body = bytearray()
    await _read_until(response, body, large_bytes, limit_bytes)
    if len(body) > large_bytes:
        async with large_at_once or nullcontext():
            await _read_until(response, body, limit_bytes, limit_bytes)
    return bytes(body)


async def _read_until(response: ClientResponse, body: bytearray, pause_bytes: float, limit_bytes: float) -> None:
    """Read on until the end, or until the body exceeds `pause_bytes`."""
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise TooLongError(f"The answer is longer than {limit_bytes} bytes")
        if len(body) > pause_bytes:
            return
