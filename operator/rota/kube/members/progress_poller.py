"""Reads how far members are with their queues: what crashes would repeat, and where new readers of queues began.

A small fleet is read every five seconds, a large one some members a second. Members that have just taken over queues
have turns of their own, for a minute.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from rota.kube.client.objects import Key
from rota.kube.members.report_client import Endpoint, Reports
from rota.kube.members.rounds import Groups, Rounds, Turn, count_pods, read_by_turns, running_members
from rota.kube.state.group import Group
from rota.redelivery import Redelivered

ROUNDS = Rounds(members_per_step=10, shortest=5)
URGENT_ROUNDS = Rounds(members_per_step=10, shortest=1)  # of members that have just taken over queues
PAGES_AT_ONCE = 8  # of one member; the next ones come with its next turn
MAX_QUEUES = 50_000  # that are kept of all groups; each takes about 400 bytes

OnRedelivered = Callable[[Key, list[Redelivered]], None]


class ProgressPoller:
    """Reads the progress of all members that own queues, by turns."""

    def __init__(self, groups: Groups, reports: Reports, on_redelivered: OnRedelivered) -> None:
        """`on_redelivered` is called with what came again because of a new reader."""
        self._groups, self._reports, self._on_redelivered = groups, reports, on_redelivered
        self._clustering: Mapping[Key, Group] = {}

    async def run(self) -> None:
        """Read for ever."""
        await read_by_turns(self._due, self._read)

    def _due(self, step: int) -> Iterable[Turn]:
        """Return the members whose turn it is, and of those that have just taken over queues some more."""
        groups = self._clustering = dict[Key, Group]()
        for key, group in self._groups().items():
            if group.record.broadcasting:
                group.pods.given.clear()  # every member reads every queue: none takes a queue over
            else:
                groups[key] = group
        members = [turn for turn in running_members(groups) if turn.group.pods[turn.name].heard]
        urgent = list(_taking_over(groups, members))
        return [*ROUNDS.due(members, count_pods(groups), step), *URGENT_ROUNDS.due(urgent, len(urgent), step)]

    async def _read(self, turn: Turn) -> None:
        pods = turn.group.pods
        known = pods.get(turn.name)
        if known is None or known.pod.metadata.uid != turn.uid:
            return
        member = Endpoint.of(known.pod, turn.group.uid)
        start, known.next_page = known.next_page, 0
        for _ in range(PAGES_AT_ONCE):
            page = await self._reports.read_progress(member, start)
            if page is None or pods.get(turn.name) is not known:
                return
            redelivered = pods.take_page(turn.name, page, _now(), most=len(pods.given.by_queue) + self._room)
            if redelivered:
                self._on_redelivered(turn.key, redelivered)
            if page.next is None or page.next <= start:
                return
            start = page.next
        known.next_page = start

    @property
    def _room(self) -> int:
        """How many more queues may be kept of all groups."""
        return MAX_QUEUES - sum(len(group.pods.given.by_queue) for group in self._clustering.values())


def _taking_over(groups: Mapping[Key, Group], members: Iterable[Turn]) -> Iterator[Turn]:
    names = {key: group.pods.taking_over(_now()) for key, group in groups.items()}
    for turn in members:
        if turn.name in names[turn.key] and turn.group.pods[turn.name].unheard_since is None:
            yield turn


def _now() -> float:
    return asyncio.get_running_loop().time()
