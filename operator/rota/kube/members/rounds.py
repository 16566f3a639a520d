"""Reads members by turns: some in each step, each member once a round; a member that is slow delays no other one."""

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from rota.kube.client.objects import Key
from rota.kube.state.group import Group

STEP_SECONDS = 1.0

Groups = Callable[[], Mapping[Key, Group]]


class Turn(NamedTuple):
    """A member that is read now."""

    key: Key
    group: Group
    name: str
    uid: str  # of its pod


class Rounds(NamedTuple):
    """How often members are read."""

    members_per_step: int  # about so many, as long as a round is neither too short nor too long
    shortest: int  # steps of a round
    longest: int = sys.maxsize

    def steps(self, members: int) -> int:
        """Return in how many steps so many members are read once."""
        return min(max(self.shortest, math.ceil(members / self.members_per_step)), self.longest)

    def due(self, turns: Iterable[Turn], members: int, step: int) -> Iterator[Turn]:
        """Yield those of some turns that fall into this step of a round over so many members."""
        steps = self.steps(members)
        return (turn for turn in turns if hash(turn.uid) % steps == step % steps)


def running_members(groups: Mapping[Key, Group]) -> Iterator[Turn]:
    """Yield the members whose sidecar has started, and whose pod has not ended."""
    for key, group in groups.items():
        for name, known in group.pods.items():
            if known.pod.started and not known.pod.ended:
                yield Turn(key, group, name, known.pod.metadata.uid)


def count_pods(groups: Mapping[Key, Group]) -> int:
    """Return how many pods all groups have."""
    return sum(len(group.pods) for group in groups.values())


async def read_by_turns(
    due: Callable[[int], Iterable[Turn]], read: Callable[[Turn], Coroutine[Any, Any, None]]
) -> None:
    """Read for ever the members that are `due` in each step; one whose last read still goes on is passed over."""
    reading: set[str] = set()

    async def read_member(turn: Turn) -> None:
        try:
            await read(turn)
        finally:
            reading.discard(turn.uid)

    async with asyncio.TaskGroup() as tasks:
        for step in count(1):
            await asyncio.sleep(STEP_SECONDS)
            for turn in due(step):
                if turn.uid not in reading:
                    reading.add(turn.uid)
                    tasks.create_task(read_member(turn))
