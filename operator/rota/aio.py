"""Waiting, as it is to be done by a process that may stand still, and by tasks that may be cancelled."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from threading import Thread
from typing import Any, TypeVar, TypeVarTuple, Unpack

FIRST_RESTART_SECONDS = 0.5
LONGEST_RESTART_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a task that has run for so long after a failure has recovered
GENTLY = 16  # items that are worked on in one turn of the loop

Given = TypeVarTuple("Given")
T = TypeVar("T")

_log = logging.getLogger(__name__)


def call_after_all(when: float, do: Callable[[Unpack[Given]], object], *given: *Given) -> asyncio.TimerHandle:
    """Call at a time, once everything that has come by then was read; just after `cancel` it may be called, too.

    Who was stopped for a while wakes up to find that a time is over before it has looked at what came meanwhile: the
    answer that was in time lies unread.
    """
    loop = asyncio.get_running_loop()
    # The first turn of the loop after the timer's looks at what has come; the second one calls.
    return loop.call_at(when, loop.call_soon, loop.call_soon, do, *given)


class RateLimitedCall:
    """Calls a function at once when asked to, but at most once in some seconds; what is asked meanwhile is one call."""

    def __init__(self, call: Callable[[], object], seconds: float) -> None:
        self._call, self._seconds = call, seconds
        self._earliest = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Call the function as soon as that is allowed."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._earliest), self._run)

    def _run(self) -> None:
        self._timer = None
        self._earliest = asyncio.get_running_loop().time() + self._seconds
        self._call()


async def to_the_end(work: Coroutine[None, None, T]) -> T:
    """Wait for what writes, also when cancelled: else it would go on unseen, past what comes after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def call_for_at_most(seconds: float, call: Callable[[], object]) -> None:
    """Make a call that blocks, in a thread, and wait for it so long; one that hangs does not keep the process alive."""
    thread = Thread(target=call, name="call", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, seconds)


async def gently(many: Iterable[T]) -> AsyncIterator[T]:
    """Yield one after the other, and let others on now and then: work on all of them takes a while."""
    for number, it in enumerate(many):
        if not number % GENTLY:
            await asyncio.sleep(0)
        yield it


async def supervise(
    name: str,
    work: Callable[[], Coroutine[Any, Any, object]],
    report: Callable[[str, Exception | None], None] = lambda *_: None,
) -> None:
    """Run `work` until it returns; when it fails, restart it, at first soon, then less and less often.

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
