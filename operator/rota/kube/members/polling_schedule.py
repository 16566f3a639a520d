"""Schedules the periodic polls of this package: each step polls some members, each cycle polls all members once.

A step takes one second. A member's step within the cycle follows from the hash of its pod's uid: so polls are spread
evenly, and a member keeps its step when others join or leave, unless the length of the cycle changes. Polls run
concurrently, so a slow member delays no other.
"""

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from rota.kube.client.objects import ObjectKey
from rota.kube.state.group import Group
from rota.kube.state.pod_state import PodState
from rota.model import Holder

STEP_SECONDS = 1.0

GetGroups = Callable[[], Mapping[ObjectKey, Group]]  # returns the groups to poll: none while another operator leads


class PollTurn(NamedTuple):
    """A member to be polled in this step."""

    group_key: ObjectKey
    group: Group
    name: str
    uid: str  # of its pod

    @property
    def pod_state(self) -> PodState | None:
        """The member's state; None if it was deleted or replaced since this turn was scheduled."""
        return self.group.pods.find(Holder(self.name, self.uid))


class PollSchedule(NamedTuple):
    """How often members are polled."""

    members_per_step: int  # mean number of members in a step, unless the cycle is limited by min_steps or max_steps
    min_steps: int  # the shortest cycle, in steps (seconds)
    max_steps: int = sys.maxsize  # the longest cycle, in steps

    def cycle_steps(self, member_count: int) -> int:
        """Return the number of steps in a cycle over this many members."""
        steps = math.ceil(member_count / self.members_per_step)
        return min(max(steps, self.min_steps), self.max_steps)

    def select_due(self, turns: Sequence[PollTurn], step: int) -> Iterator[PollTurn]:
        """Yield the turns that fall into this step of a cycle over these turns."""
        steps = self.cycle_steps(len(turns))
        return (turn for turn in turns if _is_due(turn.uid, steps, step))

    def due_members(self, groups: Mapping[ObjectKey, Group], step: int) -> Iterator[PollTurn]:
        """Yield the running members that fall into this step of a cycle over all pods of the groups."""
        steps = self.cycle_steps(count_pods(groups))
        for key, group in groups.items():
            for name, pod_state in group.pods.items():
                uid = pod_state.pod.metadata.uid
                # In this order: few of maybe 10,000 pods are due, and `is_running` takes several times as long.
                if _is_due(uid, steps, step) and pod_state.pod.is_running:
                    yield PollTurn(key, group, name, uid)


def _is_due(uid: str, cycle_steps: int, step: int) -> bool:
    return hash(uid) % cycle_steps == step % cycle_steps


def count_pods(groups: Mapping[ObjectKey, Group]) -> int:
    """Return the number of pods in all groups."""
    return sum(len(group.pods) for group in groups.values())


async def run_polls(
    select_due: Callable[[int], Iterable[PollTurn]], poll: Callable[[PollTurn], Coroutine[Any, Any, None]]
) -> None:
    """In each step, forever, poll the members that are due; skip a member whose previous poll still runs."""
    polled_uids: set[str] = set()  # of pods whose poll still runs

    async def poll_member(turn: PollTurn) -> None:
        try:
            await poll(turn)
        finally:
            polled_uids.discard(turn.uid)

    async with asyncio.TaskGroup() as tasks:
        for step in count(1):
            await asyncio.sleep(STEP_SECONDS)
            for turn in select_due(step):
                if turn.uid not in polled_uids:
                    polled_uids.add(turn.uid)
                    tasks.create_task(poll_member(turn))
