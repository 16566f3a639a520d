"""Hearing everybody once a minute: of a member that nothing is awaited of, only this tells that something is wrong."""

import asyncio
from collections.abc import Callable, Mapping

from rota.kube.group import Group
from rota.kube.reports import Reports
from rota.model import Queue

EVERY_SECONDS = 60.0
STEPS = 60  # of which each asks some

Key = tuple[str, str]


async def hear_all(groups: Callable[[], Mapping[Key, Group]], reports: Reports, news: Callable[[Key], None]) -> None:
    """Read the reports of all members for ever, some at a time; `news` is told of groups where one says otherwise."""
    step = 0
    while True:
        await asyncio.sleep(EVERY_SECONDS / STEPS)
        step = (step + 1) % STEPS
        asked = [
            (key, group, name)
            for key, group in groups().items()
            for name, known in group.pods.items()
            if hash(known.pod.metadata.uid) % STEPS == step
            and known.pod.started
            and not known.pod.ended
            and (name not in group.awaited or group.everyones)
        ]
        await asyncio.gather(*(_hear(key, group, name, reports, news) for key, group, name in asked))


async def _hear(key: Key, group: Group, name: str, reports: Reports, news: Callable[[Key], None]) -> None:
    known = group.pods.get(name)
    if known is None:
        return
    uid = known.pod.metadata.uid
    offsets: Mapping[Queue, int | None] | None = None
    if group.everyones:
        (report, asked), offsets = await reports.read_with_offsets(known.pod.status.pod_ip, uid)
    else:
        report, asked = await reports.read(known.pod.status.pod_ip, uid)
    still = group.pods.get(name)
    if still is None or still.pod.metadata.uid != uid:
        return
    still.offsets = offsets
    if still.hear(report, asyncio.get_running_loop().time(), asked):
        news(key)
