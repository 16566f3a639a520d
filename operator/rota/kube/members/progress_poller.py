"""Polls members' progress on their queues: offsets that a crash would repeat, and where new readers started.

A small fleet is polled every five seconds, a large one at a fixed number of members per second. Members that have just
taken over queues are polled more often, for a minute.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from rota.kube.client.objects import ObjectKey
from rota.kube.members.polling_schedule import Groups, PollSchedule, PollTurn, count_pods, poll_members, running_members
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.state.group import Group
from rota.redelivery import Redelivery

SCHEDULE = PollSchedule(members_per_step=10, min_steps=5)
URGENT_SCHEDULE = PollSchedule(members_per_step=10, min_steps=1)  # for members that have just taken over queues
MAX_PAGES_PER_TURN = 8  # pages of one member per turn; its next turn continues there
MAX_TRACKED_QUEUES = 50_000  # remembered for all groups; each takes about 400 bytes

OnRedelivered = Callable[[ObjectKey, list[Redelivery]], None]


class ProgressPoller:
    """Polls the progress of all members in turn, and reports redeliveries."""

    def __init__(self, groups: Groups, reports: ReportClient, on_redelivered: OnRedelivered) -> None:
        """`on_redelivered` is called with the messages that were redelivered because a queue has a new reader."""
        self._groups = groups
        self._reports = reports
        self._on_redelivered = on_redelivered
        self._tracked_groups: Mapping[ObjectKey, Group] = {}

    async def run(self) -> None:
        """Poll forever."""
        await poll_members(self._due, self._read_member)

    def _due(self, step: int) -> Iterable[PollTurn]:
        """Return the members due in this step; members that have just taken over queues get additional turns."""
        groups = self._tracked_groups = dict[ObjectKey, Group]()
        for key, group in self._groups().items():
            if group.stored_assignment.is_broadcasting:
                group.pods.delivery_tracker.clear()  # every member reads every queue, so queues are never taken over
            else:
                groups[key] = group
        members = [turn for turn in running_members(groups) if turn.group.pods[turn.name].decoded_report]
        urgent = list(_urgent_turns(groups, members))
        return [*SCHEDULE.due(members, count_pods(groups), step), *URGENT_SCHEDULE.due(urgent, len(urgent), step)]

    async def _read_member(self, turn: PollTurn) -> None:
        pods = turn.group.pods
        pod_state = pods.get(turn.name)
        if pod_state is None or pod_state.pod.metadata.uid != turn.uid:
            return
        member = Endpoint.from_pod(pod_state.pod, turn.group.uid)
        start = pod_state.next_progress_index
        pod_state.next_progress_index = 0
        for _ in range(MAX_PAGES_PER_TURN):
            page = await self._reports.read_progress(member, start)
            if page is None or pods.get(turn.name) is not pod_state:
                return
            redelivered = pods.record_progress(
                turn.name, page, _now(), max_tracked_queues=len(pods.delivery_tracker.by_queue) + self._free_capacity
            )
            if redelivered:
                self._on_redelivered(turn.group_key, redelivered)
            if page.next_start is None or page.next_start <= start:
                return
            start = page.next_start
        pod_state.next_progress_index = start

    @property
    def _free_capacity(self) -> int:
        """The number of further queues that may be remembered, for all groups together."""
        return MAX_TRACKED_QUEUES - sum(
            len(group.pods.delivery_tracker.by_queue) for group in self._tracked_groups.values()
        )


def _urgent_turns(groups: Mapping[ObjectKey, Group], members: Iterable[PollTurn]) -> Iterator[PollTurn]:
    names = {key: group.pods.members_taking_over(_now()) for key, group in groups.items()}
    for turn in members:
        if turn.name in names[turn.group_key] and turn.group.pods[turn.name].unreachable_since is None:
            yield turn


def _now() -> float:
    return asyncio.get_running_loop().time()
