"""How HTTP clients treat answers of servers that may be hostile: redirects, compression and long bodies."""

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


async def read_body(response: ClientResponse, limit_bytes: float) -> bytes:
    """Return the body, unpacked if the session unpacks; raise TooLongError as soon as it exceeds the limit."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise TooLongError(f"The answer is longer than {limit_bytes} bytes")
    return bytes(body)
