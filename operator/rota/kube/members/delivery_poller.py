"""Polls every member's delivery counters periodically, and slowly: no decision about queues depends on them."""

from collections.abc import Callable, Iterable
from functools import partial

from rota.aio import loop_time
from rota.kube.client.objects import ObjectKey, Pod
from rota.kube.members.polling_schedule import GetGroups, PollSchedule, PollTurn, count_pods, run_polls
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.state.group import Group

# A step takes one second: each member is polled every 15 s or, with more than 750 pods in all groups, less often.
SCHEDULE = PollSchedule(members_per_step=50, min_steps=15)
REVISION_LABELS = ("pod-template-hash", "controller-revision-hash")  # of pods of Deployments; of StatefulSets


async def poll_deliveries(get_groups: GetGroups, reports: ReportClient, on_change: Callable[[ObjectKey], None]) -> None:
    """Poll the deliveries of all members forever; call `on_change` for each group whose delivery problem changed."""

    def select_due(step: int) -> Iterable[PollTurn]:
        """Return the members that are due; first update all delivery problems, which also begin and end with time."""
        groups = get_groups()
        now = loop_time()
        is_start_of_cycle = step % SCHEDULE.cycle_steps(count_pods(groups)) == 0
        for key, group in groups.items():
            if is_start_of_cycle:
                _forget_ended(group)
            if group.deliveries.update_problem(now):
                on_change(key)
        return SCHEDULE.due_members(groups, step)

    await run_polls(select_due, partial(_poll_member, reports))


def _forget_ended(group: Group) -> None:
    running_uids = {state.pod.metadata.uid for state in group.pods.values() if not state.pod.ended}
    group.deliveries.retain_only(running_uids, group.topics)


async def _poll_member(reports: ReportClient, turn: PollTurn) -> None:
    group = turn.group
    totals = group.deliveries
    pod_state = turn.pod_state
    if pod_state is None:  # the pod was deleted or replaced since this turn was scheduled
        return
    deliveries = await reports.read_deliveries(Endpoint.from_pod(pod_state.pod, group.uid))
    # During the read, the pod may have been replaced, or leadership lost, which resets the group's totals.
    is_current = group.pods.get(turn.name) is pod_state and group.deliveries is totals
    if deliveries and is_current:
        now = loop_time()
        totals.record(turn.uid, _revision_of(pod_state.pod), deliveries, group.topics, now)


def _revision_of(pod: Pod) -> str:
    """Return the revision of the pod template that a pod was created from; empty for a pod without a controller."""
    labels = pod.metadata.labels
    return next((labels[name] for name in REVISION_LABELS if name in labels), "")
