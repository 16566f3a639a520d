"""Planted bugs that only an exploration can find, or that are planted in its model."""

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
from simulation.exploration import operators, pods
from simulation.exploration.documents import Document
from simulation.exploration.processes import DiskState, Process, Processes
from simulation.exploration.state import ExploredState


def responses_of_an_earlier_lease_accepted(patch: pytest.MonkeyPatch) -> None:
    """A member takes a response to an earlier lease of a queue for one to the present lease."""
    original = Member.on_event

    def mutant(member: Member, event: LeaseEvent, queue: Queue, lease_number: int, *times: float) -> Effects:
        present = member.leases.get(queue)
        return original(member, event, queue, present.number if present else lease_number, *times)

    patch.setattr(Member, "on_event", mutant)


def failed_reader_counts_as_released(patch: pytest.MonkeyPatch) -> None:
    """A queue is released at once when its reader fails, although deliveries are open."""
    patch.setitem(
        queue_lifecycle.TRANSITIONS, (LeaseState.RUNNING, LeaseEvent.READER_FAILED), (LeaseState.RELEASED, ())
    )


def conflicts_ignored(patch: pytest.MonkeyPatch) -> None:
    """A write replaces the stored assignment although another operator has written meanwhile."""
    patch.setattr(operators, "accepted", lambda *_: True)


def member_forgets(patch: pytest.MonkeyPatch) -> None:
    """A restarted member obeys any document that its volume shows."""
    original = Processes.start

    def mutant(processes: Processes, name: str, uid: str, disk: DiskState) -> Process:
        return original(processes, name, uid, DiskState(starts=disk.starts))

    patch.setattr(Processes, "start", mutant)


def write_in_flight_sent(patch: pytest.MonkeyPatch) -> None:
    """The operator sends the document of a write before it knows that the API server has accepted it."""
    original = pods.sendable_documents

    def mutant(state: ExploredState) -> list[Document]:
        return [*original(state), state.write.document] if state.write else original(state)

    patch.setattr(pods, "sendable_documents", mutant)


def sent_generation_not_stored(patch: pytest.MonkeyPatch) -> None:
    """A member obeys a sent document without storing its generation on the disk."""
    original = Member.apply_sent_assignment

    def mutant(member: Member, text: str | bytes, now: float) -> Effects:
        return replace(original(member, text, now), store_generation=None)

    patch.setattr(Member, "apply_sent_assignment", mutant)


def start_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Each process of a pod has the incarnation of the first, as without a counter on the disk."""
    original = Processes.start

    def mutant(processes: Processes, name: str, uid: str, disk: DiskState) -> Process:
        return original(processes, name, uid, disk._replace(starts=min(disk.starts, 1)))

    patch.setattr(Processes, "start", mutant)


def incarnation_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A process consumes the queues that a document assigns to an earlier process of its pod."""
    patch.setattr(Member, "needs_takeover", False)


def share_without_incarnation(patch: pytest.MonkeyPatch) -> None:
    """A document's shares have no incarnation, although the document declares incarnations."""
    original = moves.next_document

    def mutant(situation: Situation, draft: Draft) -> Assignment:
        document = original(situation, draft)
        members = {name: replace(share, incarnation=0) for name, share in document.members.items()}
        return replace(document, members=members)

    patch.setattr(planner, "next_document", mutant)


def incarnations_proved_by_any_generation(patch: pytest.MonkeyPatch) -> None:
    """The end of a process counts as proof although its pod has obeyed no document with incarnations."""
    original = incarnations.evidence_of

    def mutant(document: Assignment, pod: PodSnapshot, incarnation: int) -> HolderEvidence:
        return original(replace(document, incarnations_since=min(document.incarnations_since, 1)), pod, incarnation)

    patch.setattr(incarnations, "evidence_of", mutant)
