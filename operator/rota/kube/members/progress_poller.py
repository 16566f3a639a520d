"""Polls members' progress in their queues, to count the messages that are delivered again when a reader is replaced.

A queue's reader is the sidecar process that consumes it. If a reader ends before it has committed all messages that it
gave to the app, the next reader delivers the rest again. Progress pages have the offsets by which `rota.redelivery`
counts these messages: what a reader gave to the app and committed, and where the next one started.

A small fleet is polled every five seconds, a large one at a fixed number of members per second. Members that have just
taken over queues are polled more often, for a minute.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from rota.aio import loop_time
from rota.kube.client.objects import ObjectKey
from rota.kube.members.polling_schedule import GetGroups, PollSchedule, PollTurn, run_polls
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.state.group import Group
from rota.redelivery import Redelivery

SCHEDULE = PollSchedule(members_per_step=10, min_steps=5)  # a step takes a second
URGENT_SCHEDULE = PollSchedule(members_per_step=10, min_steps=1)  # for members that have just taken over queues
MAX_PAGES_PER_TURN = 8  # pages of one member per turn; its next turn continues after the last page
MAX_TRACKED_QUEUES = 50_000  # queues remembered for all groups together; a queue takes about 400 bytes

OnRedelivered = Callable[[ObjectKey, list[Redelivery]], None]


class ProgressPoller:
    """Polls the progress of all members in turn, and reports redeliveries."""

    def __init__(self, get_groups: GetGroups, reports: ReportClient, on_redelivered: OnRedelivered) -> None:
        """`on_redelivered` is called with the messages that were redelivered because queues have other readers."""
        self._get_groups = get_groups
        self._reports = reports
        self._on_redelivered = on_redelivered
        self._tracked_groups: Mapping[ObjectKey, Group] = {}

    async def run(self) -> None:
        """Poll forever."""
        await run_polls(self._select_due, self._poll_member)

    def _select_due(self, step: int) -> Iterable[PollTurn]:
        """Return the turns due, with additional turns for members that took over queues; update the tracked groups."""
        groups: dict[ObjectKey, Group] = {}
        for key, group in self._get_groups().items():
            if group.stored_assignment.is_broadcasting:
                group.pods.delivery_tracker.clear()  # every member reads every queue, so queues are never taken over
            else:
                groups[key] = group
        self._tracked_groups = groups
        due = [turn for turn in SCHEDULE.due_members(groups, step) if turn.group.pods[turn.name].decoded_report]
        return [*due, *URGENT_SCHEDULE.select_due(list(_urgent_turns(groups)), step)]

    async def _poll_member(self, turn: PollTurn) -> None:
        pods = turn.group.pods
        pod_state = turn.pod_state
        if pod_state is None:
            return
        member = Endpoint.from_pod(pod_state.pod, turn.group.uid)
        start = pod_state.next_progress_start
        pod_state.next_progress_start = 0  # after the last page, or a failure; set below if pages are left
        for _ in range(MAX_PAGES_PER_TURN):
            page = await self._reports.read_progress(member, start)
            if page is None or pods.get(turn.name) is not pod_state:
                return
            limit = self._max_tracked_queues(turn.group)
            redelivered = pods.record_progress(turn.name, page, loop_time(), max_queues=limit)
            if redelivered:
                self._on_redelivered(turn.group_key, redelivered)
            if page.next_start is None or page.next_start <= start:  # the last page, or an invalid next one
                return
            start = page.next_start
        pod_state.next_progress_start = start

    def _max_tracked_queues(self, group: Group) -> int:
        """Return how many queues of a group may be remembered: all that other groups leave of MAX_TRACKED_QUEUES."""
        total = sum(len(tracked.pods.delivery_tracker.by_queue) for tracked in self._tracked_groups.values())
        return MAX_TRACKED_QUEUES - total + len(group.pods.delivery_tracker.by_queue)


def _urgent_turns(groups: Mapping[ObjectKey, Group]) -> Iterator[PollTurn]:
    """Yield the members that respond and have just taken over queues."""
    for key, group in groups.items():
        for name in sorted(group.pods.members_taking_over(loop_time())):
            state = group.pods.get(name)
            if state and state.pod.is_running and state.decoded_report and state.unreachable_since is None:
                yield PollTurn(key, group, name, state.pod.metadata.uid)
