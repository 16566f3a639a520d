"""Polls members' progress on their queues: offsets that a crash would repeat, and where new readers started.

A small fleet is polled every five seconds, a large one at a fixed number of members per second. Members that have just
taken over queues are polled more often, for a minute.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from rota.kube.client.objects import Key
from rota.kube.members.report_client import Endpoint, ReportClient
from rota.kube.members.rounds import Groups, Rounds, Turn, count_pods, read_by_turns, running_members
from rota.kube.state.group import Group
from rota.redelivery import Redelivered

ROUNDS = Rounds(members_per_step=10, shortest=5)
URGENT_ROUNDS = Rounds(members_per_step=10, shortest=1)  # for members that have just taken over queues
PAGES_AT_ONCE = 8  # pages of one member per turn; its next turn continues there
MAX_QUEUES = 50_000  # remembered for all groups; each takes about 400 bytes

OnRedelivered = Callable[[Key, list[Redelivered]], None]


class ProgressPoller:
    """Polls the progress of all members in turn, and reports redeliveries."""

    def __init__(self, groups: Groups, reports: ReportClient, on_redelivered: OnRedelivered) -> None:
        """`on_redelivered` is called with the messages that were redelivered because a queue has a new reader."""
        self._groups, self._reports, self._on_redelivered = groups, reports, on_redelivered
        self._clustering: Mapping[Key, Group] = {}

    async def run(self) -> None:
        """Poll forever."""
        await read_by_turns(self._due, self._read)

    def _due(self, step: int) -> Iterable[Turn]:
        """Return the members due in this step; members that have just taken over queues get additional turns."""
        groups = self._clustering = dict[Key, Group]()
        for key, group in self._groups().items():
            if group.record.broadcasting:
                group.pods.given.clear()  # every member reads every queue, so queues are never taken over
            else:
                groups[key] = group
        members = [turn for turn in running_members(groups) if turn.group.pods[turn.name].heard]
        urgent = list(_taking_over(groups, members))
        return [*ROUNDS.due(members, count_pods(groups), step), *URGENT_ROUNDS.due(urgent, len(urgent), step)]

    async def _read(self, turn: Turn) -> None:
        pods = turn.group.pods
        pod_state = pods.get(turn.name)
        if pod_state is None or pod_state.pod.metadata.uid != turn.uid:
            return
        member = Endpoint.of(pod_state.pod, turn.group.uid)
        start, pod_state.next_page = pod_state.next_page, 0
        for _ in range(PAGES_AT_ONCE):
            page = await self._reports.read_progress(member, start)
            if page is None or pods.get(turn.name) is not pod_state:
                return
            redelivered = pods.take_page(turn.name, page, _now(), most=len(pods.given.by_queue) + self._room)
            if redelivered:
                self._on_redelivered(turn.key, redelivered)
            if page.next is None or page.next <= start:
                return
            start = page.next
        pod_state.next_page = start

    @property
    def _room(self) -> int:
        """The number of further queues that may be remembered, for all groups together."""
        return MAX_QUEUES - sum(len(group.pods.given.by_queue) for group in self._clustering.values())


def _taking_over(groups: Mapping[Key, Group], members: Iterable[Turn]) -> Iterator[Turn]:
    names = {key: group.pods.taking_over(_now()) for key, group in groups.items()}
    for turn in members:
        if turn.name in names[turn.key] and turn.group.pods[turn.name].unheard_since is None:
            yield turn


def _now() -> float:
    return asyncio.get_running_loop().time()
