"""Watches members' reports by long polls.

The planner names the members whose reports could change the next plan (`Group.members_to_poll`): these are polled. If
it names none, one member of the group has a *standing* long poll. A broker sends every member a notice when a consumer
of its group joins or leaves, and reports count these notices. The standing poll detects them, and the operator asks the
brokers for the group's consumers at once, before the next regular poll.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import NamedTuple

from rota.aio import supervise
from rota.http_server import AdmissionLimit
from rota.kube.members.report_client import LONG_POLL_SECONDS, Endpoint, ReportClient
from rota.kube.state.group import Group

STANDING_POLL_SECONDS = 30  # how long a member holds the standing poll without a notice: the most that sidecars allow
RETRY_SECONDS = 1.0  # pause before a member that did not respond is polled again
MAX_STANDING_POLLS = 1000  # of all groups; in further groups, only the periodic poll of brokers detects new consumers


class WatcherEvents(NamedTuple):
    """The callbacks of a group's watchers."""

    on_report_change: Callable[[str], None]  # called with a member whose report may change the plan, or that is silent
    on_consumers_change: Callable[[], None]  # called when a member reports that consumers of the group joined or left


class ReportWatchers:
    """The long polls of one group's members."""

    def __init__(self, group: Group, reports: ReportClient, events: WatcherEvents, poll_limit: AdmissionLimit) -> None:
        """`poll_limit` limits the standing polls of all groups together. `update_polls` starts the first polls."""
        self._group = group
        self._reports = reports
        self._events = events
        self._standing_poll_limit = poll_limit
        self._standing_member: str | None = None  # the member that is polled for brokers' notices
        self._standing_poll: asyncio.Task[None] | None = None
        self._polls_by_pod: dict[str, asyncio.Task[None]] = {}

    def update_polls(self) -> None:
        """Poll the members that the plan names; if it names none, keep a standing poll of one member."""
        for name in sorted(self._group.members_to_poll):  # sorted: in the same order in every process
            is_polled = name in self._polls_by_pod and not self._polls_by_pod[name].done()
            if not is_polled:
                poll = partial(self._poll_member, name, LONG_POLL_SECONDS, partial(self._must_poll, name))
                task = _start_poll(name, poll)
                self._polls_by_pod[name] = task
                task.add_done_callback(partial(self._forget, name))
        self._keep_standing_poll()

    def cancel_polls(self, name: str) -> None:
        """Cancel a member's polls: called when its pod becomes unready.

        An open long poll ends only after up to STANDING_POLL_SECONDS; until then a hung member looks like a waiting
        one.
        """
        if task := self._polls_by_pod.pop(name, None):
            task.cancel()
        if name == self._standing_member:
            self._end_standing_poll()

    def stop(self) -> None:
        """Cancel all polls of the group."""
        self._end_standing_poll()
        for name in list(self._polls_by_pod):
            self.cancel_polls(name)

    def _keep_standing_poll(self) -> None:
        standing = self._choose_standing_member()
        if standing != self._standing_member:
            self._end_standing_poll()
        if standing and (self._standing_poll is None or self._standing_poll.done()):
            self._standing_member = standing
            self._standing_poll = _start_poll(standing, partial(self._poll_for_notices, standing))

    def _end_standing_poll(self) -> None:
        """Cancel the standing poll. The members that a plan names have shorter polls, which detect silence sooner."""
        if self._standing_poll:
            self._standing_poll.cancel()
        self._standing_member = self._standing_poll = None

    def _choose_standing_member(self) -> str | None:
        """Return the member to poll for brokers' notices, or None; keep the present one while it can report them."""
        # Brokers do not notify Broadcasting members.
        if self._group.members_to_poll or self._group.stored_assignment.is_broadcasting:
            return None
        pods = self._group.pods
        current = pods.get(self._standing_member) if self._standing_member else None
        if current and current.can_report_notices:
            return self._standing_member
        return min((name for name, pod in pods.items() if pod.can_report_notices), default=None)

    def _forget(self, name: str, task: "asyncio.Task[None]") -> None:
        """Forget a finished poll, unless a newer poll of the member has replaced it."""
        if self._polls_by_pod.get(name) is task:
            del self._polls_by_pod[name]

    def _must_poll(self, name: str) -> bool:
        return name in self._group.members_to_poll

    def _is_standing(self, name: str) -> bool:
        return name == self._standing_member

    async def _poll_for_notices(self, name: str) -> None:
        """Poll a member for notices, or end at once if the limit is reached: the next `update_polls` tries again."""
        with self._standing_poll_limit.admit() as is_admitted:
            if is_admitted:
                await self._poll_member(name, STANDING_POLL_SECONDS, partial(self._is_standing, name))

    async def _poll_member(self, name: str, seconds: int, is_wanted: Callable[[], bool]) -> None:
        """Read a member's report at once, then by long polls, as long as `is_wanted()` and the pod exists."""
        revision: int | None = None  # revision of the last report; None: read the next report at once
        loop = asyncio.get_running_loop()
        while is_wanted() and (pod_state := self._group.pods.get(name)):
            member = Endpoint.from_pod(pod_state.pod, self._group.uid)
            started = loop.time()
            if revision is None:
                response = await self._reports.read(member)
            else:
                response = await self._reports.long_poll(member, revision, seconds)
            report = response.report
            has_changed = report is not None and report.revision != revision
            revision = report.revision if report else None
            pod_state = self._group.pods.get(name)
            if pod_state and pod_state.pod.metadata.uid == member.uid:
                if pod_state.record_report(report, loop.time(), response.silent_since, response.ignored_reason):
                    self._events.on_report_change(name)
                if pod_state.take_new_notices():
                    self._events.on_consumers_change()
            # A member that already holds too many long polls responds at once: wait before the next one.
            if report is None or (not has_changed and loop.time() - started < RETRY_SECONDS):
                await asyncio.sleep(RETRY_SECONDS)


def _start_poll(name: str, watch: Callable[[], Coroutine[None, None, None]]) -> "asyncio.Task[None]":
    supervised = supervise(f"report watcher of {name}", watch)
    return asyncio.get_running_loop().create_task(supervised, name=f"report watcher of {name}")
