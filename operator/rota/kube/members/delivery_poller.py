"""Polls every member's delivery counters periodically, and slowly: no decision about queues depends on them."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from rota.kube.client.objects import ObjectKey, Pod
from rota.kube.members.polling_schedule import Groups, PollSchedule, PollTurn, count_pods, poll_members, running_members
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.state.group import Group

SCHEDULE = PollSchedule(members_per_step=50, min_steps=15)
REVISION_LABELS = ("pod-template-hash", "controller-revision-hash")  # of Deployments; of StatefulSets


async def poll_deliveries(groups: Groups, reports: ReportClient, on_change: Callable[[ObjectKey], None]) -> None:
    """Poll the deliveries of all members forever; call `on_change` for each group whose delivery problem changed."""

    def due(step: int) -> Iterable[PollTurn]:
        current = groups()
        now = asyncio.get_running_loop().time()
        members = count_pods(current)
        for key, group in current.items():
            if step % SCHEDULE.steps(members) == 0:
                _forget_ended(group)
            if group.deliveries.update_problem(now):
                on_change(key)
        return SCHEDULE.due(running_members(current), members, step)

    await poll_members(due, partial(_read_member, reports))


def _forget_ended(group: Group) -> None:
    running = {member.pod.metadata.uid for member in group.pods.values() if not member.pod.ended}
    group.deliveries.retain_only(running, group.topics)


async def _read_member(reports: ReportClient, turn: PollTurn) -> None:
    group = turn.group
    group_deliveries = turn.group.deliveries
    member = group.pods.get(turn.name)
    if member is None or member.pod.metadata.uid != turn.uid:
        return
    deliveries = await reports.read_deliveries(Endpoint.from_pod(member.pod, group.uid))
    is_current = group.pods.get(turn.name) is member and group.deliveries is group_deliveries
    if deliveries and is_current:
        now = asyncio.get_running_loop().time()
        group_deliveries.record(turn.uid, _revision_of(member.pod), deliveries, group.topics, now)


def _revision_of(pod: Pod) -> str:
    """Return the revision of the pod template that a pod was created from; empty for a pod without a controller."""
    labels = pod.metadata.labels
    return next((labels[name] for name in REVISION_LABELS if name in labels), "")
