"""Hearing everybody in turn: of a member that nothing is awaited of, only this tells that something is wrong.

A small fleet is heard every five seconds: that a member is silent is known, then, when its node is given up, and
`lostAfter` has run by that time. A large one is heard once a minute, for each report is a connection.
"""

import asyncio
import math
from collections.abc import Callable, Mapping

from rota.kube.client.objects import Key
from rota.kube.members.report_client import Endpoint, Reports
from rota.kube.state.group import Group
from rota.model import Queue

STEP_SECONDS = 1.0  # in each of which some are asked
AT_A_STEP = 10  # about so many, as long as a round is neither too short nor too long
SHORTEST, LONGEST = 5, 60  # rounds, in steps


async def hear_all(groups: Callable[[], Mapping[Key, Group]], reports: Reports, news: Callable[[Key], None]) -> None:
    """Read the reports of all members for ever, some at a time; `news` is told of groups where one says otherwise."""
    step = 0
    while True:
        await asyncio.sleep(STEP_SECONDS)
        step += 1
        there = groups()
        steps = a_round(sum(len(group.pods) for group in there.values()))
        asked = [
            (key, group, name)
            for key, group in there.items()
            for name, known in group.pods.items()
            if hash(known.pod.metadata.uid) % steps == step % steps
            and known.pod.started
            and not known.pod.ended
            and (name not in group.awaited or group.record.broadcasting)
        ]
        await asyncio.gather(*(_hear(key, group, name, reports, news) for key, group, name in asked))


def a_round(members: int) -> int:
    """Return in how many steps so many members are asked once."""
    return min(max(SHORTEST, math.ceil(members / AT_A_STEP)), LONGEST)


async def _hear(key: Key, group: Group, name: str, reports: Reports, news: Callable[[Key], None]) -> None:
    known = group.pods.get(name)
    if known is None:
        return
    uid, member = known.pod.metadata.uid, Endpoint.of(known.pod, group.uid)
    offsets: Mapping[Queue, int | None] | None = None
    if group.record.broadcasting:
        answer, offsets = await reports.read_with_offsets(member)
    else:
        answer = await reports.read(member)
    still = group.pods.get(name)
    if still is None or still.pod.metadata.uid != uid:
        return
    still.offsets = offsets
    if still.hear(answer.report, asyncio.get_running_loop().time(), answer.asked, answer.doubt):
        news(key)
