"""asyncio on virtual time, for the operator's own code."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import Any, TypeVar, cast

from simulation.clock import Process
from simulation.judge import Broken

T = TypeVar("T")


class VirtualLoop:
    """asyncio on a process of a simulated world: it stands still while that is frozen, and ends with it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = cast("asyncio.AbstractEventLoop", self)  # what of it is never asked for is not there

    def time(self) -> float:
        return self._process.clock.now

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(0.0, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.time() + delay, callback, args, self._loop, context)
        self._process.after(delay, partial(self._run, handle))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self._loop)

    def create_task(self, coro: Coroutine[Any, Any, T], **named: Any) -> "asyncio.Task[T]":
        task = asyncio.Task(coro, loop=self._loop, **named)
        task.add_done_callback(_broken)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "exception" in context:  # tasks of a process that was killed are no news
            raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _run(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            with self.running():
                handle._run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the loop that runs."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)


def _broken(task: "asyncio.Task[Any]") -> None:
    """Let what the judge finds end the run, wherever it was found."""
    if not task.cancelled() and isinstance(task.exception(), Broken):
        raise cast("Broken", task.exception())
