"""Waiting for a condition, in tests and at start: never a fixed sleep."""

import asyncio
import ssl
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_SECONDS = 180.0  # for what must happen at some time: it only keeps a broken test from hanging

T = TypeVar("T")


def answers(url: str, trust: ssl.SSLContext | None = None) -> bool:
    """Whether a server says yes to this URL."""
    try:
        with urllib.request.urlopen(url, timeout=2, context=trust) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def eventually(ask: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """Return the first answer that is true."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {answer!r} after {seconds:.0f} s")
        time.sleep(0.02)
    return answer


async def soon(ask: Callable[[], Awaitable[T]], seconds: float = PATIENCE_SECONDS) -> T:
    """Return the first answer that is true, of something that has to be awaited."""
    deadline = time.monotonic() + seconds
    while not (answer := await ask()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {answer!r} after {seconds:.0f} s")
        await asyncio.sleep(0.02)
    return answer
