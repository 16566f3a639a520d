"""Work queue: a group that has changed, or is due, is reconciled soon, in a task of its own.

A change during a reconcile causes one more. No group waits for another.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any

from rota.kube.client.api import ApiError, ConflictError, NoResponseError
from rota.kube.client.objects import Key
from rota.kube.reconcile.reconciler import GroupTask
from rota.kube.reconcile.status_publisher import PAUSES
from rota.logs import of_group

SETTLE_SECONDS = 0.02  # so that changes in quick succession cause one reconcile

_log = logging.getLogger(__name__)


@dataclass
class QueuedGroup(GroupTask):
    """A group in the queue."""

    again: asyncio.TimerHandle | None = None
    running: bool = False
    woken: float = inf  # seconds until the next reconcile, if one was requested while this one runs
    failures: int = 0

    def rest(self) -> None:
        """Cancel the timer, the report watchers and the publishing of status."""
        if self.again:
            self.again.cancel()
            self.again = None
        self.group.awaited = frozenset()
        self.listeners.rest()
        self.telling.rest()


class WorkQueue:
    """Runs reconciles while this operator leads, and what they start."""

    def __init__(self, reconcile: Callable[[GroupTask], Awaitable[float]]) -> None:
        """`reconcile` returns the seconds until its next call for the group."""
        self._reconcile = reconcile
        self.tasks: dict[Key, QueuedGroup] = {}
        self.leads = False
        self._running: set[asyncio.Task[None]] = set()

    def wake(self, key: Key, seconds: float = SETTLE_SECONDS) -> None:
        """Reconcile a group soon; all calls until then cause one reconcile."""
        task = self.tasks.get(key)
        if task is None or not self.leads or task.group.body is None or seconds == inf:
            return
        if task.running:
            task.woken = min(task.woken, seconds)
            return
        loop, seconds = asyncio.get_running_loop(), max(seconds, SETTLE_SECONDS)
        if task.again:
            if task.again.when() <= loop.time() + seconds:
                return
            task.again.cancel()
        task.again = loop.call_later(seconds, self._begin, key, task)

    def _begin(self, key: Key, task: QueuedGroup) -> None:
        task.again, task.running, task.woken = None, True, inf
        self.start(self._run(key, task), f"group {task.group.spelled}")

    async def _run(self, key: Key, task: QueuedGroup) -> None:
        delay, failures = PAUSES[min(task.failures, len(PAUSES) - 1)], task.failures
        task.failures += 1
        try:
            delay = await self._reconcile(task)
            task.failures = 0
        except ConflictError:
            delay = delay if failures else 0.0
        except (ApiError, NoResponseError) as error:
            _log.warning("A reconcile failed, and is repeated: %s", error, extra=of_group(*key, seconds=delay))
        except Exception:  # noqa: BLE001 - affects one group; the others continue
            _log.exception("A reconcile failed, and is repeated", extra=of_group(*key, seconds=delay))
        finally:
            task.running = False
        self.wake(key, min(delay, task.woken))

    def start(self, work: Coroutine[Any, Any, None], name: str = "") -> "asyncio.Task[None]":
        """Run a coroutine until it ends or the queue is closed."""
        task = asyncio.get_running_loop().create_task(work, name=name or None)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Cancel everything that runs."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
