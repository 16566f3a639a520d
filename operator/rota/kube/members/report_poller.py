"""Polls members' reports periodically, to detect silent members.

Members whose reports could change the next plan (`Group.members_to_poll`) have long polls (`report_watchers`) instead.

Up to 50 pods of all groups are polled every five seconds: by the time Kubernetes gives up a node, the silence of its
members is known and `lostAfter` (docs/policies.md) has passed. 600 and more pods are polled once a minute, because each
read opens a connection.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rota.aio import loop_time
from rota.kube.client.objects import ObjectKey
from rota.kube.members.polling_schedule import GetGroups, PollSchedule, PollTurn, run_polls
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.model import Queue

SCHEDULE = PollSchedule(members_per_step=10, min_steps=5, max_steps=60)  # a step takes a second


async def poll_reports(get_groups: GetGroups, reports: ReportClient, on_change: Callable[[ObjectKey], None]) -> None:
    """Poll the reports of all members forever; call `on_change` for each group whose plan may change."""

    def select_due(step: int) -> Iterable[PollTurn]:
        return [turn for turn in SCHEDULE.due_members(get_groups(), step) if not _has_long_poll(turn)]

    await run_polls(select_due, partial(_poll_member, reports, on_change))


def _has_long_poll(turn: PollTurn) -> bool:
    """Whether the plan names the member (`report_watchers`); Broadcasting members are polled anyway, for offsets."""
    return turn.name in turn.group.members_to_poll and not turn.group.stored_assignment.is_broadcasting


async def _poll_member(reports: ReportClient, on_change: Callable[[ObjectKey], None], turn: PollTurn) -> None:
    pod_state = turn.pod_state
    if pod_state is None:
        return
    member = Endpoint.from_pod(pod_state.pod, turn.group.uid)
    offsets: Mapping[Queue, int | None] | None = None
    if turn.group.stored_assignment.is_broadcasting:
        response, offsets = await reports.read_with_offsets(member)
    else:
        response = await reports.read(member)
    if turn.group.pods.get(turn.name) is not pod_state:  # deleted or replaced during the read
        return
    pod_state.offsets = offsets
    if pod_state.record_report(response.report, loop_time(), response.silent_since, response.ignored_reason):
        on_change(turn.group_key)
