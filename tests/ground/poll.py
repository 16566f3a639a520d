"""Waiting for a condition, in tests and at start: never a fixed sleep."""

import asyncio
import ssl
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_SECONDS = 180.0  # for events without a deadline: it only keeps a broken test from hanging
SHORTEST_PAUSE = 0.01  # seconds between two attempts
LONGEST_PAUSE = 0.25

T = TypeVar("T")


def answers(url: str, trust: ssl.SSLContext | None = None) -> bool:
    """Whether the server responds to this URL with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=2, context=trust) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def eventually(ask: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """Return the first true result of `ask`."""
    started = time.monotonic()
    while not (answer := ask()):
        time.sleep(_pause(started, seconds, answer))
    return answer


async def soon(ask: Callable[[], Awaitable[T]], seconds: float = PATIENCE_SECONDS) -> T:
    """Return the first true result of `ask`, which is awaited."""
    started = time.monotonic()
    while not (answer := await ask()):  # noqa: ASYNC110 - the polled state sets no event
        await asyncio.sleep(_pause(started, seconds, answer))
    return answer


def _pause(started: float, seconds: float, answer: object) -> float:
    """Return the seconds until the next attempt, a tenth of the time waited: attempts load servers. Raise at last."""
    waited = time.monotonic() - started
    if waited > seconds:
        raise TimeoutError(f"still {answer!r} after {seconds:.0f} s")
    return min(SHORTEST_PAUSE + waited / 10, LONGEST_PAUSE)
