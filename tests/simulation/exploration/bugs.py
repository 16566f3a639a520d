"""Bugs planted on purpose which only an exploration meets, or in what only its world has."""

from dataclasses import replace

import pytest

from rota import planner
from rota.documents import Assignment
from rota.handover import HolderEvidence
from rota.model import Queue
from rota.planner import PodSnapshot, moves
from rota.planner.members import incarnations
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.sidecar.member import queue_lifecycle
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import LeaseEvent, LeaseState
from simulation.exploration import operators
from simulation.exploration.processes import Process, Processes


def answers_of_an_earlier_life_accepted(patch: pytest.MonkeyPatch) -> None:
    """A member takes any answer about a queue for one about its present life."""
    right = Member.on_event

    def wrong(it: Member, event: LeaseEvent, queue: Queue, life: int, *times: float) -> Effects:
        present = it.leases.get(queue)
        return right(it, event, queue, present.number if present else life, *times)

    patch.setattr(Member, "on_event", wrong)


def failed_reader_counts_as_released(patch: pytest.MonkeyPatch) -> None:
    """A queue whose reader fails is released at once, though deliveries of it are open."""
    patch.setitem(
        queue_lifecycle.TRANSITIONS, (LeaseState.RUNNING, LeaseEvent.READER_FAILED), (LeaseState.RELEASED, ())
    )


def conflicts_ignored(patch: pytest.MonkeyPatch) -> None:
    """The record is written, whoever has written it meanwhile."""
    patch.setattr(operators, "accepted", lambda *_: True)


def member_forgets(patch: pytest.MonkeyPatch) -> None:
    """A restarted member begins with any document that its volume shows."""
    right = Processes.start

    def wrong(it: Processes, name: str, uid: str, disk: tuple[int, bool, int]) -> Process:
        return right(it, name, uid, (0, False, disk[2]))

    patch.setattr(Processes, "start", wrong)


def start_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Each process of a pod has the number of the first one, as where the counter is not on the disk."""
    right = Processes.start

    def wrong(it: Processes, name: str, uid: str, disk: tuple[int, bool, int]) -> Process:
        return right(it, name, uid, (*disk[:2], min(disk[2], 1)))

    patch.setattr(Processes, "start", wrong)


def incarnation_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A process consumes what a document gives to an earlier one of its pod."""
    patch.setattr(Member, "needs_takeover", False)


def share_without_incarnation(patch: pytest.MonkeyPatch) -> None:
    """A document's shares name no incarnation, though it says that they do."""
    right = moves.next_document

    def wrong(it: Situation, draft: Draft) -> Assignment:
        document = right(it, draft)
        members = {name: replace(share, incarnation=0) for name, share in document.members.items()}
        return replace(document, members=members)

    patch.setattr(planner, "next_document", wrong)


def incarnations_proved_by_any_generation(patch: pytest.MonkeyPatch) -> None:
    """The end of a process proves something though its pod has obeyed no document that names incarnations."""
    right = incarnations.evidence_of

    def wrong(document: Assignment, pod: PodSnapshot, incarnation: int) -> HolderEvidence:
        return right(replace(document, incarnations_since=min(document.incarnations_since, 1)), pod, incarnation)

    patch.setattr(incarnations, "evidence_of", wrong)
