"""Publisher of a group's status and Events, which also maintains its Deployment.

Both run concurrently with reconciles and with each other, so a slow API server or a hanging webhook delays no handover.
The newest status and all Events that arrive during a write are written right after it.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from rota.kube.client.api import Api, ApiError, ConflictError, NoResponseError
from rota.kube.client.objects import Custom
from rota.kube.reconcile import apply
from rota.kube.state.group import Group
from rota.kube.state.member_problems import unauthenticated_pods
from rota.kube.workload.deployments import Deployments
from rota.kube.workload.member_keys import REWRITE_SECONDS
from rota.logs import of_group
from rota.planner import Event, Plan

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds to wait after consecutive failures
MOST_EVENTS = 50  # that wait to be written; older ones are dropped: only users read them
AT_ONCE = 15  # concurrent status and Event writes, and Deployment writes: leaves capacity for assignments

_log = logging.getLogger(__name__)

Start = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class PublisherHooks(NamedTuple):
    """Callbacks and limits that the controller provides."""

    start: Start
    wants: Callable[[Group, Custom], None]  # handles the ConsumerGroup as it was written
    again: Callable[[float], None]  # reconciles the group in so many seconds
    words: asyncio.Semaphore  # limits status and Event writes of all groups to AT_ONCE
    fleets: asyncio.Semaphore  # likewise for Deployments: a hanging webhook delays no status


class CoalescingTask:
    """A coalescing task: runs once at a time, and once more if that was requested meanwhile."""

    def __init__(self, start: Start, do: Callable[[], Awaitable[None]]) -> None:
        self._start, self._do = start, do
        self._going: asyncio.Task[None] | None = None
        self._more = False

    def ask(self) -> None:
        """Request a run."""
        self._more = True
        if self._going is None:
            self._going = self._start(self._run())

    def rest(self) -> None:
        """Cancel the current run and the requested one."""
        self._more = False
        if self._going:
            self._going.cancel()
            self._going = None

    async def _run(self) -> None:
        while self._more:
            self._more = False
            await self._do()
        self._going = None


class StatusPublisher:
    """Publishes the status and Events of one group, and maintains its Deployment."""

    def __init__(self, api: Api, fleets: Deployments, group: Group, deciding: PublisherHooks) -> None:
        self._api, self._fleets, self._group, self._deciding = api, fleets, group, deciding
        self._status: Mapping[str, Any] | None = None
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._people, self._fleet = (
            CoalescingTask(deciding.start, self._tell),
            CoalescingTask(deciding.start, self._keep),
        )
        self._failures: Counter[str] = Counter()
        self._counts = _zero_writes()

    def take(self, plan: Plan, now: float, *, whole: bool) -> None:
        """Publish a plan's status and Events; `whole`: the plan was carried out, so the Deployment is updated, too."""
        if self._group.pace.tell(plan.status, self._group.written, now):
            self._status = plan.status
        self._events += plan.events
        if self._status is not None or self._events:
            self._people.ask()
        if whole:
            self._fleet.ask()

    def rest(self) -> None:
        """Stop publishing: another operator leads, or the group was deleted."""
        self._people.rest()
        self._fleet.rest()
        self._status = None
        self._events.clear()
        self._failures.clear()

    def take_counts(self) -> Counter[str]:
        """Return the writes since the last call, by kind; the reconciler adds those of ConfigMap and pokes."""
        counts, self._counts = self._counts, _zero_writes()
        return counts

    async def _tell(self) -> None:
        try:
            while self._status is not None or self._events:
                async with self._deciding.words:
                    await self._tell_next()
        except Exception as error:  # noqa: BLE001 - affects one group; the status is written again
            self._again("told of", error)
        else:
            self._failures["told of"] = 0

    async def _tell_next(self) -> None:
        """Write the newest status and the oldest Event, so that the status does not wait for all Events."""
        status, self._status = self._status, None
        if status is not None:
            await self._write(status)
        if self._events:
            await apply.record_event(self._api, self._group, self._events.popleft())
            self._counts["event"] += 1

    async def _write(self, status: Mapping[str, Any]) -> None:
        group, pace, now = self._group, self._group.pace, asyncio.get_running_loop().time
        try:
            written = await apply.write_status(self._api, group, status)
        except Exception:
            pace.untaken(status, now())
            raise
        self._counts["status"] += 1
        if written is None:
            pace.untaken(status, now())
            self._deciding.again(max(self._pause("taken"), pace.seconds(group.written, now())))
            return
        self._failures["taken"] = 0
        pace.taken(status)
        if group.is_before(written.metadata):
            self._deciding.wants(group, written)

    async def _keep(self) -> None:
        previous = self._group.fleet
        try:
            async with self._deciding.fleets:
                writes = await self._fleets.keep(self._group)
        except Exception as error:  # noqa: BLE001 - affects one group; the Deployment is updated again
            self._again("seen to", error)
            return
        self._counts["deployment"] += writes
        if self._group.key_problems or unauthenticated_pods(self._group.pods):
            self._deciding.again(REWRITE_SECONDS)
        self._failures["seen to"] = 0
        if previous != self._group.fleet:  # publish it; if only a message differs, no sooner than after a failure
            reasons = [[verdict.reason for verdict in verdicts] for verdicts in (previous, self._group.fleet)]
            self._deciding.again(0.0 if reasons[0] != reasons[1] else PAUSES[0])

    def _again(self, step: str, error: Exception) -> None:
        """Repeat a failed step later; at once after a first conflict, which means that another writer came first."""
        stale, first = isinstance(error, ConflictError), not self._failures[step]
        pause = self._pause(step)
        seconds = 0.0 if stale and first else pause
        if not stale:
            expected = isinstance(error, ApiError | NoResponseError)
            fields = of_group(self._group.namespace, self._group.name, seconds=seconds)
            _log.warning("The group is %s again: %s", step, error, exc_info=None if expected else error, extra=fields)
        self._deciding.again(seconds)

    def _pause(self, step: str) -> float:
        """Count one more failure in a row; return the seconds to wait after it."""
        self._failures[step] += 1
        return PAUSES[min(self._failures[step], len(PAUSES)) - 1]


def _zero_writes() -> Counter[str]:
    return Counter(dict.fromkeys(("configmap", "poke", "status", "event", "deployment"), 0))
