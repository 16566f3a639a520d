"""Sends requests to the operator at the address that the user gave (`--operator`), not through the cluster."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp

from rota.cli.client.requests import MAX_RESPONSE_BYTES, OperatorRequestError, SendRequest
from rota.http_client import BodyTooLargeError, describe_failure, is_redirect, read_body
from rota.model import single_line

RESPONSE_TIMEOUT_SECONDS = 10.0


def _validate_address(address: str) -> str:
    """Return the address without a trailing slash; raise ValueError if it is invalid."""
    if "@" in address:  # the message must not repeat a password
        raise ValueError("--operator must not contain a user name or password; write http://HOST:PORT")
    try:
        parts = urlsplit(address)
        is_http = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        is_http = False
    if not is_http or parts.query or parts.fragment or not address.isprintable() or " " in address:
        problem = f"--operator {single_line(address, 100)!r} is not a valid address; write it as http://127.0.0.1:8080"
        raise ValueError(problem)
    return address.rstrip("/")


@asynccontextmanager
async def connect_directly(operator: str) -> AsyncIterator[SendRequest]:
    """Yield a function that sends requests to the operator at the address that the user gave by --operator."""
    address = _validate_address(operator)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=RESPONSE_TIMEOUT_SECONDS)) as session:

        async def send(path: str, params: Mapping[str, str]) -> tuple[int, bytes]:
            try:
                async with session.get(address + path, params=params, allow_redirects=False) as response:
                    return response.status, await _read_response(response, address)
            except OperatorRequestError:  # a ValueError, too, but its message is complete
                raise
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                hint = "start the operator, or give another --operator"
                problem = f"The operator does not answer at {address}: {_describe_error(error)}; {hint}"
                raise OperatorRequestError(problem) from None

        yield send


async def _read_response(response: aiohttp.ClientResponse, address: str) -> bytes:
    """Return the body of a response; raise OperatorRequestError if it is too large when decompressed, or a redirect."""
    if is_redirect(response.status):
        location = single_line(response.headers.get("location", "nowhere"), 100)
        problem = f"{address} redirects to {location}; redirects are not followed, so give that address as --operator"
        raise OperatorRequestError(problem)
    try:
        return await read_body(response, MAX_RESPONSE_BYTES)
    except BodyTooLargeError:
        problem = f"The response of {address} is larger than {MAX_RESPONSE_BYTES >> 20} MiB; is it Rota's operator?"
        raise OperatorRequestError(problem) from None


def _describe_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {RESPONSE_TIMEOUT_SECONDS:g} s"
    return describe_failure(error)
