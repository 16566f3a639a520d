"""Schedules periodic polls: each step polls some members, each cycle all of them; a slow member delays no other."""

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from rota.kube.client.objects import ObjectKey
from rota.kube.state.group import Group

STEP_SECONDS = 1.0

Groups = Callable[[], Mapping[ObjectKey, Group]]


class PollTurn(NamedTuple):
    """A member to be read in this step."""

    group_key: ObjectKey
    group: Group
    name: str
    uid: str  # of its pod


class PollSchedule(NamedTuple):
    """How often members are read."""

    members_per_step: int  # approximately, within the limits of a cycle's length
    min_steps: int  # least number of steps in a cycle
    max_steps: int = sys.maxsize

    def steps(self, members: int) -> int:
        """Return the number of steps in a cycle over this many members."""
        return min(max(self.min_steps, math.ceil(members / self.members_per_step)), self.max_steps)

    def due(self, turns: Iterable[PollTurn], members: int, step: int) -> Iterator[PollTurn]:
        """Yield the turns that fall into this step of a cycle over this many members."""
        steps = self.steps(members)
        return (turn for turn in turns if hash(turn.uid) % steps == step % steps)


def running_members(groups: Mapping[ObjectKey, Group]) -> Iterator[PollTurn]:
    """Yield the members whose sidecar has started and whose pod has not ended."""
    for key, group in groups.items():
        for name, pod_state in group.pods.items():
            if pod_state.pod.started and not pod_state.pod.ended:
                yield PollTurn(key, group, name, pod_state.pod.metadata.uid)


def count_pods(groups: Mapping[ObjectKey, Group]) -> int:
    """Return the number of pods in all groups."""
    return sum(len(group.pods) for group in groups.values())


async def poll_members(
    due: Callable[[int], Iterable[PollTurn]], read: Callable[[PollTurn], Coroutine[Any, Any, None]]
) -> None:
    """In each step, forever, read the members that are `due`; skip a member whose previous read still runs."""
    reading: set[str] = set()

    async def read_member(turn: PollTurn) -> None:
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
