"""Requests to the operator at its own address."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp

from rota.cli.client.requests import MOST, Ask, NoAnswer
from rota.http_client import TooLongError, describe_failure, is_redirect, read_body
from rota.model import plain

SECONDS = 10.0  # for one answer


def _address(given: str) -> str:
    """Return an address without the slash at its end."""
    if "@" in given:  # a password is not repeated
        raise ValueError("--operator has a name or a password in it, which it takes none of; write http://HOST:PORT")
    try:
        parts = urlsplit(given)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good or parts.query or parts.fragment or not given.isprintable() or " " in given:
        raise ValueError(f"--operator {plain(given, 100)!r} is no address; write it as http://127.0.0.1:8080")
    return given.rstrip("/")


@asynccontextmanager
async def direct(operator: str) -> AsyncIterator[Ask]:
    """Yield what asks the operator at an address that a user named."""
    address = _address(operator)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:

        async def ask(path: str, params: Mapping[str, str]) -> tuple[int, bytes]:
            try:
                async with session.get(address + path, params=params, allow_redirects=False) as told:
                    return told.status, await _whole(told, address)
            except NoAnswer:
                raise
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                hint = "start the operator, or give another --operator"
                raise NoAnswer(f"The operator does not answer at {address}: {_why(error)}; {hint}") from None

        yield ask


async def _whole(told: aiohttp.ClientResponse, address: str) -> bytes:
    """Return an answer's body; it may be packed, and far larger than what comes."""
    if is_redirect(told.status):
        where = plain(told.headers.get("location", "nowhere"), 100)
        raise NoAnswer(f"Who answers at {address} sends on to {where}, which is not followed; give that as --operator")
    try:
        return await read_body(told, MOST)
    except TooLongError:
        raise NoAnswer(f"The answer at {address} is larger than {MOST >> 20} MiB; is it Rota's operator?") from None


def _why(error: Exception) -> str:
    return f"nothing came for {SECONDS:g} s" if isinstance(error, TimeoutError) else describe_failure(error)
