"""Polls what every member's deliveries came to, periodically and slowly: it decides nothing about queues."""

import asyncio
import math
from collections.abc import Callable, Mapping

from rota.kube.client.objects import Key, Pod
from rota.kube.members.report_client import Endpoint, Reports
from rota.kube.state.group import Group

STEP_SECONDS = 1.0
MEMBERS_PER_STEP = 50  # of all groups
SHORTEST_ROUND_STEPS = 15
REVISION_LABELS = ("pod-template-hash", "controller-revision-hash")  # of Deployments, and of StatefulSets


async def poll_deliveries(
    groups: Callable[[], Mapping[Key, Group]], reports: Reports, on_change: Callable[[Key], None]
) -> None:
    """Read the deliveries of all members for ever; `on_change` is called for a group whose problem changed."""
    loop = asyncio.get_running_loop()
    step = 0
    while True:
        await asyncio.sleep(STEP_SECONDS)
        step += 1
        current = groups()
        steps = round_steps(sum(len(group.pods) for group in current.values()))
        due = [
            (group, known.pod)
            for group in current.values()
            for known in group.pods.values()
            if hash(known.pod.metadata.uid) % steps == step % steps and known.pod.started and not known.pod.ended
        ]
        await asyncio.gather(*(_read(group, pod, reports) for group, pod in due))
        for key, group in current.items():
            if step % steps == 0:
                running = {known.pod.metadata.uid for known in group.pods.values() if not known.pod.ended}
                group.deliveries.forget(running, group.topics)
            if group.deliveries.judge(loop.time()):
                on_change(key)


def round_steps(members: int) -> int:
    """Return in how many steps so many members are read once."""
    return max(SHORTEST_ROUND_STEPS, math.ceil(members / MEMBERS_PER_STEP))


async def _read(group: Group, pod: Pod, reports: Reports) -> None:
    uid, group_deliveries = pod.metadata.uid, group.deliveries
    deliveries = await reports.read_deliveries(Endpoint.of(pod, group.uid))
    known = group.pods.get(pod.metadata.name)
    is_current = known is not None and known.pod.metadata.uid == uid and group.deliveries is group_deliveries
    if deliveries and is_current:
        now = asyncio.get_running_loop().time()
        group_deliveries.take(uid, _revision_of(pod), deliveries, group.topics, now)


def _revision_of(pod: Pod) -> str:
    """Return which version of its template a pod was made from; empty for a pod without a controller."""
    labels = pod.metadata.labels
    return next((labels[name] for name in REVISION_LABELS if name in labels), "")
