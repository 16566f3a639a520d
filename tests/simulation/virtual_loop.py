"""An asyncio event loop on virtual time, for the operator's real code."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import Any, TypeVar, cast

from simulation.clock import Process
from simulation.judge import InvariantError

T = TypeVar("T")


class VirtualLoop:
    """The event loop of a simulated process: it stops while the process is frozen, and ends with it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = cast("asyncio.AbstractEventLoop", self)  # only the methods that are called exist

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
        task.add_done_callback(_raise_violation)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "exception" in context:  # pending tasks of a killed process are ignored
            raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _run(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            with self.running():
                handle._run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Set this loop as the running loop."""
        previous_loop = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(previous_loop)


def _raise_violation(task: "asyncio.Task[Any]") -> None:
    """Raise a violation that a task has hit, so that it ends the run."""
    if not task.cancelled() and isinstance(task.exception(), InvariantError):
        raise cast("InvariantError", task.exception())
