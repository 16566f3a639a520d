"""Watches members' reports by long polls: of those from which something is awaited, and of one for brokers' notices.

A broker notifies every member when a consumer of its group comes or goes. One standing long poll per group carries
that to the operator, so that it asks the brokers for the group's consumers at once and not with the next periodic poll.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import NamedTuple

from rota.aio import supervise
from rota.http_server import AdmissionLimit
from rota.kube.members.report_client import STANDING_WAIT_SECONDS, WAIT_SECONDS, Endpoint, Reports
from rota.kube.state.group import Group

UNHEARD_SECONDS = 1.0  # before a member that could not be heard is asked again
MAX_STANDING_POLLS = 1000  # of all groups; beyond that, unmanaged consumers are found by the periodic poll alone


class WatcherEvents(NamedTuple):
    """What a group's watchers call."""

    news: Callable[[], None]  # a member reports something else
    consumers_changed: Callable[[], None]  # a member reports that consumers of the group came or went


class Listeners:
    """Those who listen to the members of one group."""

    def __init__(self, group: Group, reports: Reports, events: WatcherEvents, standing_polls: AdmissionLimit) -> None:
        """Listen to nobody yet; `standing_polls` limits the standing polls of all groups together."""
        self._group, self._reports, self._events = group, reports, events
        self._standing_polls = standing_polls
        self._standing: str | None = None  # the member that is polled for brokers' notices
        self._standing_poll: asyncio.Task[None] | None = None
        self._by_pod: dict[str, asyncio.Task[None]] = {}

    def listen(self) -> None:
        """Listen to everybody of whom something is awaited; if there is nobody, to one member for brokers' notices."""
        for name in sorted(self._group.awaited):  # a set has an order of its own in each process
            if name not in self._by_pod or self._by_pod[name].done():
                listener = _start(name, partial(self._listen, name, WAIT_SECONDS, partial(self._is_awaited, name)))
                self._by_pod[name] = listener
                listener.add_done_callback(partial(self._forget, name))
        self._keep_standing_poll()

    def interrupt(self, name: str) -> None:
        """End a poll that it is right to leave unanswered: it would hide that nobody answers."""
        if listener := self._by_pod.pop(name, None):
            listener.cancel()
        if name == self._standing:
            self._end_standing_poll()

    def rest(self) -> None:
        """Listen to nobody any more."""
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
        """End the standing poll; that of an awaited member ends sooner, so that its silence is noticed sooner."""
        if self._standing_poll:
            self._standing_poll.cancel()
        self._standing = self._standing_poll = None

    def _choose_standing(self) -> str | None:
        """Return the member that carries brokers' notices: the same one for as long as it can."""
        if self._group.awaited or self._group.record.broadcasting:  # brokers do not notify members of the latter
            return None
        pods = self._group.pods
        before = pods.get(self._standing) if self._standing else None
        if before and before.can_report_notices:
            return self._standing
        return min((name for name, known in pods.items() if known.can_report_notices), default=None)

    def _forget(self, name: str, listener: "asyncio.Task[None]") -> None:
        """Forget a listener that has ended, unless another one has taken its place."""
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
        after: int | None = None
        loop = asyncio.get_running_loop()
        while is_wanted() and (known := self._group.pods.get(name)):
            member = Endpoint.of(known.pod, self._group.uid)
            started = loop.time()
            if after is None:
                report, asked, doubt = await self._reports.read(member)
            else:
                report, asked, doubt = await self._reports.next(member, after, seconds)
            has_news = report is not None and report.revision != after
            after = report.revision if report else None
            known = self._group.pods.get(name)
            if known and known.pod.metadata.uid == member.uid:
                if known.hear(report, loop.time(), asked, doubt):
                    self._events.news()
                if known.take_notice():
                    self._events.consumers_changed()
            # A member at which too many wait already answers a long poll at once.
            if report is None or (not has_news and loop.time() - started < UNHEARD_SECONDS):
                await asyncio.sleep(UNHEARD_SECONDS)


def _start(name: str, watch: Callable[[], Coroutine[None, None, None]]) -> "asyncio.Task[None]":
    return asyncio.get_running_loop().create_task(supervise(f"report watcher of {name}", watch), name=f"hear {name}")
