"""Asking the operator over HTTP, straight at its address or through the cluster; its answers come as values."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from rota.http_client import TooLongError, is_redirect, read_body
from rota.model import plain

T = TypeVar("T")
Ask = Callable[[str, Mapping[str, str]], Awaitable[tuple[int, bytes]]]  # a path and its query -> status and body

SECONDS = 10.0  # for one answer
MOST = 64 << 20  # bytes of one, unpacked: a group of 100,000 queues has some 30 MB


class NoAnswer(ValueError):  # noqa: N818 - it is what happened
    """The operator could not be asked, or its answer is none; who watches may ask again."""


class _Refusal(msgspec.Struct):
    """How the operator says no."""

    error: str


def way(operator: str | None, namespace: str, lease: str) -> AbstractAsyncContextManager[Ask]:
    """Return the way to the operator: its address, or where its Lease says who leads."""
    if operator is not None:
        return _straight(_address(operator))
    from rota.cli import cluster  # noqa: PLC0415 - Kubernetes only for those who need it

    return cluster.through(namespace, lease)


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
async def _straight(address: str) -> AsyncIterator[Ask]:
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


def _why(error: Any) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came for {SECONDS:g} s"
    if isinstance(error, aiohttp.ClientSSLError):  # its numbers are not the system's
        return f"it does not speak https, or its certificate is not trusted ({_of_ssl(error)})"
    if isinstance(error, aiohttp.ClientConnectorError):
        return _of_the_system(error.os_error)
    return str(error) or type(error).__name__


def _of_ssl(error: Any) -> str:
    found = getattr(error, "os_error", None) or getattr(error, "certificate_error", error)
    return getattr(found, "verify_message", None) or getattr(found, "reason", None) or type(found).__name__


def _of_the_system(error: OSError) -> str:
    """Return a system's word for what is wrong; asyncio hides it behind addresses."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
