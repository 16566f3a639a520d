"""Bugs that are planted on purpose, one at a time: the simulation must find each."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rota import handover, planner
from rota.documents import decode_assignment
from rota.handover import Act, DesiredChange, HolderEvidence, OwnershipState, Proof
from rota.kube.reconcile.assignment_writer import PendingPlan
from rota.kube.reconcile.reconciler import QueuedGroup, Reconciler
from rota.kube.state.stored_assignment import AssignmentState
from rota.planner import budget, moves, record, subscribed_queues
from rota.planner.members import member_states
from rota.planner.members.holder_proofs import HolderProofs
from rota.planner.snapshot import DecodedReport
from rota.reports import Report
from rota.sidecar.member import member, queue_lifecycle
from rota.sidecar.member.member import Effects, Member
from simulation import fleet, server
from simulation.sidecar import Disk

Plant = Callable[[pytest.MonkeyPatch], None]


def grant_without_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """A queue is granted before its holder has acknowledged the release."""
    patch.setitem(handover.TRANSITIONS, (OwnershipState.RELEASING, Proof.NONE, DesiredChange.MOVE), Act.GRANT)


def revoke_skipped(patch: pytest.MonkeyPatch) -> None:
    """A queue moves in one step although the group is Cooperative."""
    patch.setitem(handover.TRANSITIONS, (OwnershipState.OWNED, Proof.NONE, DesiredChange.MOVE), Act.GRANT)


def draining_counts_as_released(patch: pytest.MonkeyPatch) -> None:
    """Queues under `releasing` of a report are ignored."""
    patch.setattr(DecodedReport, "active_queues", DecodedReport.held_queues)


def idle_counts_as_released(patch: pytest.MonkeyPatch) -> None:
    """An idle queue counts as released although its member may not have read the assignment yet."""
    original = handover.find_proof

    def mutant(queue: Any, holder: Any, revocation: Any, evidence: HolderEvidence, rules: Any) -> Proof:
        return original(queue, holder, revocation or handover.Revocation(0, 0.0), evidence, rules)

    patch.setattr(moves, "find_proof", mutant)


def any_generation_acknowledges(patch: pytest.MonkeyPatch) -> None:
    """A report of any generation proves a release."""
    patch.setattr(HolderEvidence, "has_obeyed", lambda evidence, _holder, _generation: evidence.report is not None)


def unfinished_drain_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A terminating member counts as drained as soon as its drain has started."""
    patch.setattr(Report, "is_drained", property(lambda report: report.final))


def absence_is_an_end(patch: pytest.MonkeyPatch) -> None:
    """A pod that is not listed counts as ended."""
    original = HolderProofs.evidence_of

    def mutant(proofs: HolderProofs, holder: Any, incarnation: int = 0) -> HolderEvidence:
        pod = proofs.pods.get(holder.name)
        return original(proofs, holder, incarnation) if pod and pod.uid == holder.uid else HolderEvidence(ended=True)

    patch.setattr(HolderProofs, "evidence_of", mutant)
    patch.setattr(member_states, "awaits_namesake", lambda *_: False)


def a_crash_is_an_end(patch: pytest.MonkeyPatch) -> None:
    """A pod that is not ready counts as ended."""
    original = planner.PodSnapshot.evidence.fget  # type: ignore[attr-defined]
    patch.setattr(
        planner.PodSnapshot, "evidence", property(lambda pod: replace(original(pod), ended=pod.ended or not pod.ready))
    )


def lost_at_once(patch: pytest.MonkeyPatch) -> None:
    """A member counts as lost after one failed request."""
    patch.setattr(HolderEvidence, "is_lost", lambda evidence, _after, _asked=0.0: evidence.unreachable_for > 0)


def conflicts_ignored(patch: pytest.MonkeyPatch) -> None:
    """A write replaces the ConfigMap although another operator has written meanwhile."""
    original = server.Api.write_config_map

    def mutant(api: server.Api, data: Mapping[str, str | bytes], settings: str, _based_on: int | None) -> None:
        original(api, data, settings, api.config_map.version if api.config_map else None)

    patch.setattr(server.Api, "write_config_map", mutant)


def barrier_ignored(patch: pytest.MonkeyPatch) -> None:
    """After the assignment was lost, queues without a known consumer are granted at once."""
    patch.setattr(record, "barrier_proof", lambda *_: Proof.RELEASED)
    patch.setattr(HolderProofs, "unrecorded_drains", {})


def recovery_below_what_was_seen(patch: pytest.MonkeyPatch) -> None:
    """A rebuilt assignment starts again at generation 1."""
    original = record.rebuild_assignment
    patch.setattr(
        record, "rebuild_assignment", lambda snapshot, now: replace(original(snapshot, now), generation=1, barrier=1)
    )


def restored_copies_trusted(patch: pytest.MonkeyPatch) -> None:
    """An assignment that a user restored is planned with reports that are older than it."""
    patch.setattr(AssignmentState, "is_own", True)


def budget_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Moves are not counted."""
    patch.setattr(budget, "updated_spent", lambda *_: ())


def shrinks_on_a_partial_view(patch: pytest.MonkeyPatch) -> None:
    """A queue is dropped as soon as one route response lacks it."""
    patch.setattr(subscribed_queues, "SHRINK_PATIENCE_SECONDS", 0.0)


def no_view_is_no_queues(patch: pytest.MonkeyPatch) -> None:
    """A topic without a route response has no queues."""
    original = subscribed_queues.SubscribedQueues._queues_of

    def mutant(subscribed: subscribed_queues.SubscribedQueues, topic: str) -> Any:
        return original(subscribed, topic) if subscribed.snapshot.views.get(topic) else []

    patch.setattr(subscribed_queues.SubscribedQueues, "_queues_of", mutant)


def lower_generations_obeyed(patch: pytest.MonkeyPatch) -> None:
    """A member obeys every mounted document."""
    patch.setattr(member.Member, "_why_rejected", lambda *_: None)


def member_forgets(patch: pytest.MonkeyPatch) -> None:
    """A restarted member obeys any document that its volume shows."""
    patch.setattr(fleet, "Disk", _Forgetful)


def sent_before_stored(patch: pytest.MonkeyPatch) -> None:
    """The operator sends a plan's document to the members before it is stored."""
    original = Reconciler._write_assignment

    async def mutant(reconciler: Reconciler, queued: QueuedGroup, pending: PendingPlan) -> None:
        reconciler._send_assignment(queued.group, pending.plan)
        await original(reconciler, queued, pending)

    patch.setattr(Reconciler, "_write_assignment", mutant)


def sent_documents_always_obeyed(patch: pytest.MonkeyPatch) -> None:
    """A member obeys every document that the operator has sent, also one that arrives after a newer one."""

    def mutant(consumer: Member, text: str | bytes, now: float) -> Effects:
        return consumer._obey_assignment(decode_assignment(text), now)

    patch.setattr(Member, "apply_sent_assignment", mutant)


def final_drain_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A finally drained member consumes its assignment again."""
    original = member.Member._assigned_queues

    def mutant(consumer: member.Member) -> Any:
        consumer._is_draining = False
        return original(consumer)

    patch.setattr(member.Member, "_assigned_queues", mutant)


def released_before_empty(patch: pytest.MonkeyPatch) -> None:
    """A member reports a queue as released while deliveries are open."""
    for state in (
        queue_lifecycle.LeaseState.RUNNING,
        queue_lifecycle.LeaseState.STARTING,
        queue_lifecycle.LeaseState.STUCK,
    ):
        row = (queue_lifecycle.LeaseState.RELEASED, (queue_lifecycle.LeaseAction.STOP,))
        patch.setitem(queue_lifecycle.TRANSITIONS, (state, queue_lifecycle.LeaseEvent.REVOKED), row)


def namesakes_are_one(patch: pytest.MonkeyPatch) -> None:
    """A recreated pod consumes the queues of its namesake."""
    original = member.Member._assigned_queues

    def mutant(consumer: member.Member) -> Any:
        share = consumer._assignment.members.get(consumer.name) if consumer._assignment else None
        uid, consumer.uid = consumer.uid, share.uid if share else consumer.uid
        queues = original(consumer)
        consumer.uid = uid
        return queues

    patch.setattr(member.Member, "_assigned_queues", mutant)


def orphans_wait_for_gates(patch: pytest.MonkeyPatch) -> None:
    """A queue is not granted after its holder has ended."""
    patch.setitem(handover.TRANSITIONS, (OwnershipState.OWNED, Proof.ENDED, DesiredChange.MOVE), Act.KEEP)


def written_at_every_reconcile(patch: pytest.MonkeyPatch) -> None:
    """Every reconcile writes a document."""
    patch.setattr(planner, "_needs_write", lambda *_: True)


def requeued_all_the_time(patch: pytest.MonkeyPatch) -> None:
    """Every plan requests another reconcile at once."""
    patch.setattr(planner.pokes, "seconds_until_next_poke", lambda *_: 0.0)


def locks_are_trusted_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A member delivers in order under an expired lock."""
    patch.setattr(queue_lifecycle, "LOCK_TRUST_SECONDS", 1e6)
    patch.setattr(queue_lifecycle, "LOCK_EXPIRY_SECONDS", 2e6)
    patch.setattr(queue_lifecycle, "LOCK_HOLD_SECONDS", 0.0)


# The bugs that the simulation finds. It cannot find `absence_is_an_end`: that needs a list of pods older than the one
# that a new leader reads. The exploration has such a list.
BUGS: tuple[Plant, ...] = (
    grant_without_acknowledgement,
    revoke_skipped,
    draining_counts_as_released,
    idle_counts_as_released,
    any_generation_acknowledges,
    unfinished_drain_is_enough,
    a_crash_is_an_end,
    lost_at_once,
    conflicts_ignored,
    barrier_ignored,
    recovery_below_what_was_seen,
    restored_copies_trusted,
    budget_forgotten,
    shrinks_on_a_partial_view,
    no_view_is_no_queues,
    lower_generations_obeyed,
    member_forgets,
    sent_before_stored,
    sent_documents_always_obeyed,
    final_drain_forgotten,
    released_before_empty,
    namesakes_are_one,
    orphans_wait_for_gates,
    written_at_every_reconcile,
    requeued_all_the_time,
    locks_are_trusted_for_ever,
)


class _Forgetful(Disk):
    """An emptyDir volume that stores nothing."""

    @property
    def obeyed(self) -> int:
        """Return no generation."""
        return 0

    @obeyed.setter
    def obeyed(self, _: int) -> None:
        """Ignore the generation."""


@contextmanager
def planted(bug: Plant) -> Iterator[None]:
    """Apply a bug inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        yield


__all__ = ["BUGS", "planted"]
