"""Reads how far members are with their queues: what crashes would repeat, and where new readers of queues began.

A small fleet is read every five seconds, a large one a few members a second; members that have just taken over queues
are read at once.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping

from rota.kube.client.objects import Key
from rota.kube.members.report_client import Endpoint, Reports
from rota.kube.state.group import Group
from rota.redelivery import Redelivered

STEP_SECONDS = 1.0  # in each of which some members are read
MEMBERS_IN_A_STEP = 10
SHORTEST_ROUND = 5  # steps
PAGES_AT_ONCE = 8  # of one member; the next ones come with its next turn
MAX_QUEUES = 50_000  # that are kept of all groups; each takes about 400 bytes
MAX_QUEUES_OF_GROUP = 10_000

Groups = Callable[[], Mapping[Key, Group]]
News = Callable[[Key, list[Redelivered]], None]


class ProgressPoller:
    """Reads the progress of all members that own queues, some at a time."""

    def __init__(self, groups: Groups, reports: Reports, news: News) -> None:
        """`news` is called with what came again because of a new reader."""
        self._groups, self._reports, self._news = groups, reports, news

    async def run(self) -> None:
        """Read for ever."""
        step = 0
        while True:
            await asyncio.sleep(STEP_SECONDS)
            step += 1
            groups = {key: group for key, group in self._groups().items() if not group.record.broadcasting}
            steps = max(SHORTEST_ROUND, math.ceil(sum(len(it.pods) for it in groups.values()) / MEMBERS_IN_A_STEP))
            kept = sum(len(it.pods.given.by_queue) for it in groups.values())
            due = [(key, group, name) for key, group in groups.items() for name in _due(group, step, steps)]
            await asyncio.gather(*(self._read(*it, MAX_QUEUES - kept) for it in due))

    async def _read(self, key: Key, group: Group, name: str, room: int) -> None:
        known = group.pods.get(name)
        if known is None:
            return
        uid, member = known.pod.metadata.uid, Endpoint.of(known.pod, group.uid)
        start, known.next_page = known.next_page, 0
        for _ in range(PAGES_AT_ONCE):
            page = await self._reports.read_progress(member, start)
            still = group.pods.get(name)
            if page is None or still is None or still.pod.metadata.uid != uid:
                return
            most = min(len(group.pods.given.by_queue) + room, MAX_QUEUES_OF_GROUP)
            redelivered = group.pods.take_page(name, page, _now(), most=most)
            if redelivered:
                self._news(key, redelivered)
            if page.next is None or page.next <= start:
                return
            start = page.next
        known.next_page = start


def _due(group: Group, step: int, steps: int) -> Iterator[str]:
    """Yield the members whose turn it is, and those that have just taken over queues."""
    taking_over = group.pods.taking_over(_now())
    for name, known in group.pods.items():
        has_turn = hash(known.pod.metadata.uid) % steps == step % steps
        is_urgent = name in taking_over and known.unheard_since is None
        if known.pod.started and not known.pod.ended and known.heard and (has_turn or is_urgent):
            yield name


def _now() -> float:
    return asyncio.get_running_loop().time()
