"""Watches members' reports by long polls: all awaited members, or else one member for brokers' notices.

The planner names the awaited members: their reports could change the next plan. A broker notifies every member when a
consumer of its group joins or leaves; one standing long poll per group passes that on, and the operator then asks the
brokers for the group's consumers at once, before the next periodic poll.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import NamedTuple

from rota.aio import supervise
from rota.http_server import AdmissionLimit
from rota.kube.members.report_client import STANDING_WAIT_SECONDS, WAIT_SECONDS, Endpoint, ReportClient
from rota.kube.state.group import Group

UNHEARD_SECONDS = 1.0  # before a member that did not respond is polled again
MAX_STANDING_POLLS = 1000  # of all groups; beyond that, unmanaged consumers are found by the periodic poll alone


class WatcherEvents(NamedTuple):
    """The callbacks of a group's watchers."""

    news: Callable[[], None]  # a member's report changed, or the member became silent
    consumers_changed: Callable[[], None]  # a member reports that consumers of the group joined or left


class ReportWatchers:
    """The long polls of one group's members."""

    def __init__(
        self, group: Group, reports: ReportClient, events: WatcherEvents, standing_polls: AdmissionLimit
    ) -> None:
        """Start no poll yet; `standing_polls` limits the standing polls of all groups together."""
        self._group, self._reports, self._events = group, reports, events
        self._standing_polls = standing_polls
        self._standing: str | None = None  # the member that is polled for brokers' notices
        self._standing_poll: asyncio.Task[None] | None = None
        self._by_pod: dict[str, asyncio.Task[None]] = {}

    def listen(self) -> None:
        """Poll every awaited member; if no member is awaited, keep a standing poll of one for brokers' notices."""
        for name in sorted(self._group.awaited):  # the order of a set differs between processes
            if name not in self._by_pod or self._by_pod[name].done():
                listener = _start(name, partial(self._listen, name, WAIT_SECONDS, partial(self._is_awaited, name)))
                self._by_pod[name] = listener
                listener.add_done_callback(partial(self._forget, name))
        self._keep_standing_poll()

    def interrupt(self, name: str) -> None:
        """Cancel a member's polls: a member may hold a long poll to its end, which hides that it has become silent."""
        if listener := self._by_pod.pop(name, None):
            listener.cancel()
        if name == self._standing:
            self._end_standing_poll()

    def rest(self) -> None:
        """Cancel all polls of the group."""
        self._end_standing_poll()
        for name in list(self._by_pod):
            self.interrupt(name)

    def _keep_standing_poll(self) -> None:
        standing = self._choose_standing()
        if standing != self._standing:
            self._end_standing_poll()
        if standing and (self._standing_poll is None or self._standing_poll.done()):
            self._standing = standing
            self._standing_poll = _start(standing, partial(self._listen_for_notices, standing))

    def _end_standing_poll(self) -> None:
        """Cancel the standing poll; an awaited member gets a shorter poll instead, which detects its silence sooner."""
        if self._standing_poll:
            self._standing_poll.cancel()
        self._standing = self._standing_poll = None

    def _choose_standing(self) -> str | None:
        """Return the member that reports brokers' notices; keep the present one as long as it can."""
        if self._group.awaited or self._group.record.broadcasting:  # brokers do not notify Broadcasting members
            return None
        pods = self._group.pods
        current = pods.get(self._standing) if self._standing else None
        if current and current.can_report_notices:
            return self._standing
        return min((name for name, pod in pods.items() if pod.can_report_notices), default=None)

    def _forget(self, name: str, listener: "asyncio.Task[None]") -> None:
        """Forget a finished poll, unless a newer poll has replaced it."""
        if self._by_pod.get(name) is listener:
            del self._by_pod[name]

    def _is_awaited(self, name: str) -> bool:
        return name in self._group.awaited

    def _is_standing(self, name: str) -> bool:
        return name == self._standing

    async def _listen_for_notices(self, name: str) -> None:
        with self._standing_polls.admit() as is_admitted:
            if is_admitted:
                await self._listen(name, STANDING_WAIT_SECONDS, partial(self._is_standing, name))

    async def _listen(self, name: str, seconds: int, is_wanted: Callable[[], bool]) -> None:
        revision: int | None = None
        loop = asyncio.get_running_loop()
        while is_wanted() and (pod_state := self._group.pods.get(name)):
            member = Endpoint.of(pod_state.pod, self._group.uid)
            started = loop.time()
            if revision is None:
                report, asked_at, doubt = await self._reports.read(member)
            else:
                report, asked_at, doubt = await self._reports.next(member, revision, seconds)
            has_changed = report is not None and report.revision != revision
            revision = report.revision if report else None
            pod_state = self._group.pods.get(name)
            if pod_state and pod_state.pod.metadata.uid == member.uid:
                if pod_state.hear(report, loop.time(), asked_at, doubt):
                    self._events.news()
                if pod_state.take_notice():
                    self._events.consumers_changed()
            # A member that already holds too many long polls responds at once: wait before the next one.
            if report is None or (not has_changed and loop.time() - started < UNHEARD_SECONDS):
                await asyncio.sleep(UNHEARD_SECONDS)


def _start(name: str, watch: Callable[[], Coroutine[None, None, None]]) -> "asyncio.Task[None]":
    return asyncio.get_running_loop().create_task(supervise(f"report watcher of {name}", watch), name=f"hear {name}")
