"""Asyncio helpers: clock, stalls, timers, pauses, limits, reading, background tasks, shielded writes, restarts."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from threading import Thread
from typing import Any, TypeVar, TypeVarTuple, Unpack

MIN_RESTART_PAUSE_SECONDS = 0.5
MAX_RESTART_PAUSE_SECONDS = 30.0
RECOVERED_AFTER_SECONDS = 60.0  # a restarted task that has run this long has recovered
ITEMS_PER_TURN = 16  # items that are processed in one turn of the event loop
RETRY_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after the first, second, … failure in a row; then the last
RECEIVE_BUFFER_BYTES = 256 * 1024  # as many as asyncio reads at once into bytes
STALL_SECONDS = 5.0  # if the event loop ran nothing for longer, the process was stalled

CallbackArgs = TypeVarTuple("CallbackArgs")
T = TypeVar("T")

_log = logging.getLogger(__name__)
_receive_buffer = memoryview(bytearray(RECEIVE_BUFFER_BYTES))


def loop_time() -> float:
    """Return the time on the event loop's clock, in seconds: it never jumps, and its origin is arbitrary."""
    return asyncio.get_running_loop().time()


def retry_pause(failures: int) -> float:
    """Return the seconds to wait after the last of `failures` failures in a row."""
    return RETRY_PAUSES_SECONDS[min(failures, len(RETRY_PAUSES_SECONDS)) - 1]


def call_after_pending_input(
    when: float, callback: Callable[[Unpack[CallbackArgs]], object], *args: *CallbackArgs
) -> asyncio.TimerHandle:
    """Call at a time, after all input that has arrived by then was read.

    A process that was stopped for a while wakes up past the deadline, with a response that arrived in time still
    unread: without the delay, the deadline would count as missed. `cancel` does not stop a call whose time has come.
    """
    loop = asyncio.get_running_loop()
    # Turn 1 of the event loop: the timer is due, but the sockets may have been polled too early. Turn 2 reads pending
    # input. Turn 3 runs the callback.
    return loop.call_at(when, loop.call_soon, loop.call_soon, callback, *args)


class ReceiverProtocol(asyncio.BufferedProtocol, ABC):
    """A protocol like asyncio.Protocol, whose received bytes arrive in a buffer that all connections share.

    With asyncio.Protocol, each read of a socket allocates 256 KiB first, which costs more than the read itself. The
    event loop passes the bytes on right after it has filled the buffer, with and without TLS, so no two connections of
    a loop use it at the same time. A process may have one such loop only.
    """

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return the buffer for the next read."""
        return _receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on the bytes of a read."""
        self.data_received(bytes(_receive_buffer[:nbytes]))

    @abstractmethod
    def data_received(self, data: bytes) -> None:
        """Process received bytes."""


class StallDetector:
    """Detects from a clock's readings that the process stood still: its event loop was blocked, or its node suspended.

    Call `observe` at intervals well below STALL_SECONDS. Before a delivery or a commit, call `is_overdue` as well:
    after a stall another member may own the queue, and the next `observe` may come later than the delivery.
    """

    def __init__(self, now: float) -> None:
        self._observed_at = now
        self.awake_since = now  # end of the last stall

    def is_overdue(self, now: float) -> bool:
        """Whether the process has stood still since the last `observe`."""
        return now - self._observed_at > STALL_SECONDS

    def observe(self, now: float) -> float:
        """Record that the process runs; return for how many seconds it stood still, 0 if it was not stalled."""
        stalled_seconds = now - self._observed_at if self.is_overdue(now) else 0.0
        self._observed_at = now
        if stalled_seconds:
            self.awake_since = now
        return stalled_seconds


class RateLimitedCall:
    """Calls a function when requested, at most once per interval; requests during the interval become one call."""

    def __init__(self, callback: Callable[[], object], interval_seconds: float) -> None:
        self._callback = callback
        self._interval_seconds = interval_seconds
        self._next_allowed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Call the function as soon as the interval allows it."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._next_allowed_at), self._run)

    def _run(self) -> None:
        self._timer = None
        self._next_allowed_at = asyncio.get_running_loop().time() + self._interval_seconds
        self._callback()


class BackgroundTasks:
    """Coroutines that run without a caller that waits for them, until they end or all are cancelled."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str | None = None) -> "asyncio.Task[None]":
        """Run a coroutine as a task."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Cancel everything that runs."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


async def shield_until_done(write: Coroutine[None, None, T]) -> T:
    """Wait for a write to end, also if the caller is cancelled: its next steps never overlap with the write."""
    task = asyncio.ensure_future(write)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def call_in_thread(timeout_seconds: float, function: Callable[[], object]) -> None:
    """Run a blocking call in a thread and wait for it up to the timeout; a call that hangs does not block an exit."""
    thread = Thread(target=function, name="call", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, timeout_seconds)


async def yield_periodically(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and let other tasks of the event loop run before every ITEMS_PER_TURN items."""
    for number, item in enumerate(items):
        if not number % ITEMS_PER_TURN:
            await asyncio.sleep(0)
        yield item


async def supervise(
    name: str,
    run: Callable[[], Coroutine[Any, Any, object]],
    on_state_change: Callable[[str, Exception | None], None] = lambda *_: None,
) -> None:
    """Run a task until it returns; restart it after each failure, with pauses that double up to a limit.

    `on_state_change` is called with the name and the error of each failure, and with None once the task has run for
    RECOVERED_AFTER_SECONDS or has returned.
    """
    loop = asyncio.get_running_loop()
    pause = MIN_RESTART_PAUSE_SECONDS
    while True:
        started = loop.time()
        recovery = loop.call_later(RECOVERED_AFTER_SECONDS, on_state_change, name, None)
        try:
            await run()
        except Exception as error:  # noqa: BLE001 - whatever it was, the task is restarted
            if loop.time() - started > RECOVERED_AFTER_SECONDS:
                pause = MIN_RESTART_PAUSE_SECONDS
            _log.exception("The task %s failed; it is restarted in %g s", name, pause)
            on_state_change(name, error)
        else:
            on_state_change(name, None)
            return
        finally:
            recovery.cancel()
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_RESTART_PAUSE_SECONDS)
