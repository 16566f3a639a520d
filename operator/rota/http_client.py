"""HTTP client helpers for servers that may be hostile: redirects, compression and limits of bodies."""

import math
import os
from contextlib import AbstractAsyncContextManager, nullcontext
from http import HTTPStatus
from typing import Any, Final

from aiohttp import (
    ClientConnectorError,
    ClientHttpProxyError,
    ClientProxyConnectionError,
    ClientResponse,
    ClientResponseError,
    ClientSSLError,
)

UNCOMPRESSED_HEADERS: Final = {"Accept-Encoding": "identity"}


class BodyTooLargeError(ValueError):
    """The body exceeds the client's limit."""


def is_redirect(status: int) -> bool:
    """Whether a response sends the client to another address."""
    return HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST


def is_compressed(response: ClientResponse) -> bool:
    """Whether the body is compressed: a server may do that although the client sent UNCOMPRESSED_HEADERS."""
    return response.headers.get("Content-Encoding", "identity").strip().lower() != "identity"


def describe_failure(error: Exception) -> str:
    """Return why a request got no response, in the words of the operating system if it has some."""
    if isinstance(error, TimeoutError):
        return "it did not respond in time"
    if isinstance(error, ClientResponseError):  # its text has the URL, which may contain a proxy's password
        prefix = "the proxy refused with " if isinstance(error, ClientHttpProxyError) else ""
        return f"{prefix}{error.status} {error.message}".strip()
    if isinstance(error, ClientProxyConnectionError):
        return f"the proxy {error.host}:{error.port} does not respond ({_describe_system_error(error.os_error)})"
    if isinstance(error, ClientSSLError):
        return f"it does not support TLS, or its certificate is not trusted ({_describe_tls_error(error)})"
    if isinstance(error, ClientConnectorError):
        return _describe_system_error(error.os_error)
    return str(error) or type(error).__name__


def _describe_tls_error(error: Any) -> str:
    """Return the reason of a TLS error; its `errno` is no error number of the system."""
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", error)
    return getattr(cause, "verify_message", None) or getattr(cause, "reason", None) or type(cause).__name__


def _describe_system_error(error: OSError) -> str:
    """Return the system's text for an error: asyncio's text starts with addresses.

    Errors of name resolution have negative numbers, for which the system has no text.
    """
    return os.strerror(error.errno) if error.errno and error.errno > 0 else (error.strerror or str(error))


async def read_body(
    response: ClientResponse,
    max_bytes: float,
    large_body_bytes: float = math.inf,
    large_body_slot: AbstractAsyncContextManager[object] | None = None,
) -> bytes:
    """Return the body, decompressed if the session does that; raise BodyTooLargeError if it exceeds the limit.

    A body that is larger than `large_body_bytes` is read to its end only while `large_body_slot` is held (such as a
    semaphore, so that few large bodies are in memory at a time).
    """
    body = bytearray()
    await _read_until(response, body, large_body_bytes, max_bytes)
    if len(body) > large_body_bytes:
        async with large_body_slot or nullcontext():
            await _read_until(response, body, max_bytes, max_bytes)
    return bytes(body)


async def _read_until(response: ClientResponse, body: bytearray, pause_bytes: float, max_bytes: float) -> None:
    """Read until the end, or until the body exceeds `pause_bytes`."""
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLargeError(f"The response is larger than {max_bytes} bytes")
        if len(body) > pause_bytes:
            return
