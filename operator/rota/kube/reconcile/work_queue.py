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
from rota.kube.client.objects import ObjectKey
from rota.kube.reconcile.reconciler import GroupContext
from rota.kube.reconcile.status_publisher import RETRY_PAUSES_SECONDS
from rota.logs import group_fields

COALESCE_SECONDS = 0.02  # so that changes in quick succession cause one reconcile

_log = logging.getLogger(__name__)


@dataclass
class QueuedGroup(GroupContext):
    """A group in the queue."""

    timer: asyncio.TimerHandle | None = None
    is_running: bool = False
    requested_seconds: float = inf  # seconds until the next reconcile, if one was requested while this one runs
    failures: int = 0  # failed reconciles in a row

    def stop(self) -> None:
        """Cancel the timer, the report watchers and the publishing of status."""
        if self.timer:
            self.timer.cancel()
            self.timer = None
        self.group.members_to_poll = frozenset()
        self.watchers.stop()
        self.publisher.stop()


class WorkQueue:
    """Runs reconciles while this operator leads, and the coroutines that they start."""

    def __init__(self, reconcile: Callable[[GroupContext], Awaitable[float]]) -> None:
        """`reconcile` returns the seconds until its next call for the group."""
        self._reconcile = reconcile
        self.groups: dict[ObjectKey, QueuedGroup] = {}
        self.is_leading = False
        self._running_tasks: set[asyncio.Task[None]] = set()

    def enqueue(self, key: ObjectKey, seconds: float = COALESCE_SECONDS) -> None:
        """Reconcile a group soon; all calls until then cause one reconcile."""
        queued = self.groups.get(key)
        if queued is None or not self.is_leading or queued.group.body is None or seconds == inf:
            return
        if queued.is_running:
            queued.requested_seconds = min(queued.requested_seconds, seconds)
            return
        loop = asyncio.get_running_loop()
        seconds = max(seconds, COALESCE_SECONDS)
        if queued.timer:
            if queued.timer.when() <= loop.time() + seconds:
                return
            queued.timer.cancel()
        queued.timer = loop.call_later(seconds, self._start_reconcile, key, queued)

    def _start_reconcile(self, key: ObjectKey, queued: QueuedGroup) -> None:
        queued.timer = None
        queued.is_running = True
        queued.requested_seconds = inf
        self.start_task(self._reconcile_group(key, queued), f"group {queued.group.namespaced_name}")

    async def _reconcile_group(self, key: ObjectKey, queued: QueuedGroup) -> None:
        earlier_failures = queued.failures  # in a row
        delay = RETRY_PAUSES_SECONDS[min(earlier_failures, len(RETRY_PAUSES_SECONDS) - 1)]
        queued.failures += 1
        try:
            delay = await self._reconcile(queued)
            queued.failures = 0
        except ConflictError:  # at first without a pause: another client has written, and the next read shows it
            delay = delay if earlier_failures else 0.0
        except (ApiError, NoResponseError) as error:
            _log.warning("Reconcile failed; retrying: %s", error, extra=group_fields(*key, seconds=delay))
        except Exception:  # noqa: BLE001 - affects one group; the others continue
            _log.exception("Reconcile failed unexpectedly; retrying", extra=group_fields(*key, seconds=delay))
        finally:
            queued.is_running = False
        self.enqueue(key, min(delay, queued.requested_seconds))

    def start_task(self, work: Coroutine[Any, Any, None], name: str = "") -> "asyncio.Task[None]":
        """Run a coroutine until it ends or the queue is closed."""
        task = asyncio.get_running_loop().create_task(work, name=name or None)
        self._running_tasks.add(task)
        task.add_done_callback(self._running_tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel everything that runs."""
        for task in self._running_tasks:
            task.cancel()
        await asyncio.gather(*self._running_tasks, return_exceptions=True)
