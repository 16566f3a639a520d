"""Telling people what was decided of a group, its status and its Events, and seeing to its Deployment.

Both go on beside the rounds, and beside each other: an API server that takes its time with what people read, or a
webhook that hangs, holds up no queue. What comes meanwhile is told at once after: the newest status, and all Events.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from rota.kube.client.api import Api, ApiError, Stale, Unanswered
from rota.kube.client.objects import Custom
from rota.kube.reconcile import apply
from rota.kube.state.group import Group
from rota.kube.state.member_problems import unauthenticated
from rota.kube.workload.deployments import Fleets
from rota.kube.workload.member_keys import REWRITE_SECONDS
from rota.logs import of_group
from rota.planner import Event, Plan

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds after failures in a row
MOST_EVENTS = 50  # that wait to be told; older ones are only missed by people
AT_ONCE = 15  # words, and fleets, that are under way: who has much to tell leaves room for documents

_log = logging.getLogger(__name__)

Start = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Deciding(NamedTuple):
    """What is needed of whoever decides about groups."""

    start: Start
    wants: Callable[[Group, Custom], None]  # takes the group as it was written
    again: Callable[[float], None]  # looks at the group again, in so many seconds
    words: asyncio.Semaphore  # of AT_ONCE, for all groups
    fleets: asyncio.Semaphore  # one apart: a webhook that hangs holds up nobody's status


class Work:
    """What is done once at a time, and once more where that was asked for meanwhile."""

    def __init__(self, start: Start, do: Callable[[], Awaitable[None]]) -> None:
        """Do nothing yet."""
        self._start, self._do = start, do
        self._going: asyncio.Task[None] | None = None
        self._more = False

    def ask(self) -> None:
        """Have it done."""
        self._more = True
        if self._going is None:
            self._going = self._start(self._run())

    def rest(self) -> None:
        """Do it no more."""
        self._more = False
        if self._going:
            self._going.cancel()
            self._going = None

    async def _run(self) -> None:
        while self._more:
            self._more = False
            await self._do()
        self._going = None


class Telling:
    """Tells of one group."""

    def __init__(self, api: Api, fleets: Fleets, group: Group, deciding: Deciding) -> None:
        """Tell nothing yet."""
        self._api, self._fleets, self._group, self._deciding = api, fleets, group, deciding
        self._status: Mapping[str, Any] | None = None
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._people, self._fleet = Work(deciding.start, self._tell), Work(deciding.start, self._keep)
        self._failures: Counter[str] = Counter()
        self._counts = _none()

    def take(self, plan: Plan, now: float, *, whole: bool) -> None:
        """Take what is to be told; `whole`: the plan was carried out, so the fleet is seen to, too."""
        if self._group.pace.tell(plan.status, self._group.written, now):
            self._status = plan.status
        self._events += plan.events
        if self._status is not None or self._events:
            self._people.ask()
        if whole:
            self._fleet.ask()

    def rest(self) -> None:
        """Tell nothing of it any more: somebody else does, or it is gone."""
        self._people.rest()
        self._fleet.rest()
        self._status = None
        self._events.clear()
        self._failures.clear()

    def take_counts(self) -> Counter[str]:
        """Return how often something was written since this was last asked, by kind; others count their own kinds."""
        counts, self._counts = self._counts, _none()
        return counts

    async def _tell(self) -> None:
        try:
            while self._status is not None or self._events:
                async with self._deciding.words:
                    await self._tell_next()
        except Exception as error:  # noqa: BLE001 - of one group; a status is written again
            self._again("told of", error)
        else:
            self._failures["told of"] = 0

    async def _tell_next(self) -> None:
        """Tell the newest status, and the oldest Event: neither waits for all of the others."""
        status, self._status = self._status, None
        if status is not None:
            await self._write(status)
        if self._events:
            await apply.tell(self._api, self._group, self._events.popleft())
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
        before = self._group.fleet
        try:
            async with self._deciding.fleets:
                writes = await self._fleets.keep(self._group)
        except Exception as error:  # noqa: BLE001 - of one group; it is seen to again
            self._again("seen to", error)
            return
        self._counts["deployment"] += writes
        if self._group.key_problems or unauthenticated(self._group.pods):
            self._deciding.again(REWRITE_SECONDS)
        self._failures["seen to"] = 0
        if before != self._group.fleet:  # which is to be told; in other words of the same, no sooner than others fail
            reasons = [[it.reason for it in told] for told in (before, self._group.fleet)]
            self._deciding.again(0.0 if reasons[0] != reasons[1] else PAUSES[0])

    def _again(self, what: str, error: Exception) -> None:
        """Have it done again later; that somebody else has written meanwhile is no failure, the first time."""
        stale, first = isinstance(error, Stale), not self._failures[what]
        pause = self._pause(what)
        seconds = 0.0 if stale and first else pause
        if not stale:
            expected = isinstance(error, ApiError | Unanswered)
            fields = of_group(self._group.namespace, self._group.name, seconds=seconds)
            _log.warning("The group is %s again: %s", what, error, exc_info=None if expected else error, extra=fields)
        self._deciding.again(seconds)

    def _pause(self, what: str) -> float:
        """Count one more failure in a row; return the seconds to wait after it."""
        self._failures[what] += 1
        return PAUSES[min(self._failures[what], len(PAUSES)) - 1]


def _none() -> Counter[str]:
    return Counter(dict.fromkeys(("configmap", "poke", "status", "event", "deployment"), 0))
