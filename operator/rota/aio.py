"""Asyncio helpers: timers, rate limits, shielded writes and supervised tasks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from threading import Thread
from typing import Any, TypeVar, TypeVarTuple, Unpack

FIRST_RESTART_SECONDS = 0.5
LONGEST_RESTART_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a restarted task that has run this long has recovered
ITEMS_PER_TURN = 16  # items that are processed in one turn of the event loop

Given = TypeVarTuple("Given")
T = TypeVar("T")

_log = logging.getLogger(__name__)


def call_after_all(when: float, do: Callable[[Unpack[Given]], object], *args: *Given) -> asyncio.TimerHandle:
    """Call at a time, after all input that has arrived by then was read; may still call just after `cancel`.

    A process that was stopped for a while wakes up past the deadline, with a response that arrived in time still
    unread.
    """
    loop = asyncio.get_running_loop()
    # The turn after the timer's reads pending input; the callback runs in the turn after that.
    return loop.call_at(when, loop.call_soon, loop.call_soon, do, *args)


class RateLimitedCall:
    """Calls a function when requested, at most once per interval; requests during the interval become one call."""

    def __init__(self, call: Callable[[], object], seconds: float) -> None:
        self._call, self._seconds = call, seconds
        self._earliest = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Call the function as soon as the interval allows it."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._earliest), self._run)

    def _run(self) -> None:
        self._timer = None
        self._earliest = asyncio.get_running_loop().time() + self._seconds
        self._call()


async def shield_until_done(work: Coroutine[None, None, T]) -> T:
    """Wait for a write to end, also when cancelled: otherwise it would go on unobserved, past the following steps."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def call_for_at_most(seconds: float, call: Callable[[], object]) -> None:
    """Run a blocking call in a thread and wait up to `seconds`; a call that hangs does not keep the process alive."""
    thread = Thread(target=call, name="call", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, seconds)


async def yield_periodically(many: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and let other tasks of the event loop run before every ITEMS_PER_TURN items."""
    for number, item in enumerate(many):
        if not number % ITEMS_PER_TURN:
            await asyncio.sleep(0)
        yield item


async def supervise(
    name: str,
    work: Callable[[], Coroutine[Any, Any, object]],
    report: Callable[[str, Exception | None], None] = lambda *_: None,
) -> None:
    """Run `work` until it returns; when it fails, restart it after a pause that doubles up to LONGEST_RESTART_SECONDS.

    `report` is called with the name and the error of each failure, and with None once the task has run for
    STEADY_SECONDS or has returned.
    """
    loop = asyncio.get_running_loop()
    pause = FIRST_RESTART_SECONDS
    while True:
        started = loop.time()
        recovery = loop.call_later(STEADY_SECONDS, report, name, None)
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it was, the task is restarted
            if loop.time() - started > STEADY_SECONDS:
                pause = FIRST_RESTART_SECONDS
            _log.exception("The task %s failed; it is restarted in %g s", name, pause)
            report(name, error)
        else:
            report(name, None)
            return
        finally:
            recovery.cancel()
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_RESTART_SECONDS)
