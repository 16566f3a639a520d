"""Bugs planted on purpose which only an exploration meets, or in what only its world has."""

import pytest

from rota.model import Queue
from rota.sidecar.member import queue_lifecycle
from rota.sidecar.member.member import Member, Step
from rota.sidecar.member.queue_lifecycle import Event, State
from simulation.exploration import operators
from simulation.exploration.processes import Process, Processes


def answers_of_an_earlier_life_accepted(patch: pytest.MonkeyPatch) -> None:
    """A member takes any answer about a queue for one about its present life."""
    right = Member.happened

    def wrong(it: Member, event: Event, queue: Queue, life: int, *times: float) -> Step:
        present = it.lives.get(queue)
        return right(it, event, queue, present.number if present else life, *times)

    patch.setattr(Member, "happened", wrong)


def failed_reader_counts_as_released(patch: pytest.MonkeyPatch) -> None:
    """A queue whose reader fails is released at once, though deliveries of it are open."""
    patch.setitem(queue_lifecycle.TABLE, (State.RUNNING, Event.READER_FAILED), (State.RELEASED, ()))


def conflicts_ignored(patch: pytest.MonkeyPatch) -> None:
    """The record is written, whoever has written it meanwhile."""
    patch.setattr(operators, "accepted", lambda *_: True)


def member_forgets(patch: pytest.MonkeyPatch) -> None:
    """A restarted member begins with any document that its volume shows."""
    right = Processes.start

    def wrong(it: Processes, name: str, uid: str, _disk: tuple[int, bool]) -> Process:
        return right(it, name, uid, (0, False))

    patch.setattr(Processes, "start", wrong)
