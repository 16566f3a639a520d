"""Bugs planted on purpose, one at a time: what a simulation that cannot find them is worth is nothing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rota import handover, planner
from rota.handover import Act, DesiredChange, HolderEvidence, OwnershipState, Proof
from rota.planner import moves, record
from rota.planner import situation as situations
from rota.planner.members import member_states
from rota.planner.snapshot import DecodedReport
from rota.reports import Report
from rota.sidecar.member import member, queue_lifecycle
from simulation import fleet, server

Plant = Callable[[pytest.MonkeyPatch], None]


def grant_without_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """A queue is granted while its holder has said nothing yet."""
    patch.setitem(handover.TRANSITIONS, (OwnershipState.RELEASING, Proof.NONE, DesiredChange.MOVE), Act.GRANT)


def revoke_skipped(patch: pytest.MonkeyPatch) -> None:
    """A queue moves in one step, though the group is Cooperative."""
    patch.setitem(handover.TRANSITIONS, (OwnershipState.OWNED, Proof.NONE, DesiredChange.MOVE), Act.GRANT)


def draining_counts_as_released(patch: pytest.MonkeyPatch) -> None:
    """What a report lists under `releasing` is not looked at."""
    patch.setattr(DecodedReport, "active_queues", DecodedReport.held_queues)


def idle_counts_as_released(patch: pytest.MonkeyPatch) -> None:
    """That a member does not work a queue is proof, though it may not have seen yet that it should."""
    right = handover.find_proof

    def wrong(queue: Any, holder: Any, taken: Any, seen: HolderEvidence, rules: Any) -> Proof:
        return right(queue, holder, taken or handover.Revocation(0, 0.0), seen, rules)

    patch.setattr(moves, "find_proof", wrong)


def any_generation_acknowledges(patch: pytest.MonkeyPatch) -> None:
    """A report proves a release, whichever generation its member obeys."""
    patch.setattr(HolderEvidence, "has_obeyed", lambda seen, _holder, _generation: seen.report is not None)


def unfinished_drain_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A terminating member has released everything as soon as its drain has begun."""
    patch.setattr(Report, "is_drained", property(lambda report: report.final))


def absence_is_an_end(patch: pytest.MonkeyPatch) -> None:
    """A pod that is not seen is taken for ended."""
    right = situations.Situation.evidence_of

    def wrong(it: situations.Situation, holder: Any, incarnation: int = 0) -> HolderEvidence:
        pod = it.pods.get(holder.name)
        return right(it, holder, incarnation) if pod and pod.uid == holder.uid else HolderEvidence(ended=True)

    patch.setattr(situations.Situation, "evidence_of", wrong)
    patch.setattr(member_states, "awaits_namesake", lambda *_: False)


def a_crash_is_an_end(patch: pytest.MonkeyPatch) -> None:
    """A pod that is not ready is taken for ended."""
    right = planner.PodSnapshot.evidence.fget  # type: ignore[attr-defined]
    patch.setattr(
        planner.PodSnapshot, "evidence", property(lambda pod: replace(right(pod), ended=pod.ended or not pod.ready))
    )


def lost_at_once(patch: pytest.MonkeyPatch) -> None:
    """Who cannot be heard for a moment is overruled."""
    patch.setattr(HolderEvidence, "is_lost", lambda seen, _after, _asked=0.0: seen.unreachable_for > 0)


def conflicts_ignored(patch: pytest.MonkeyPatch) -> None:
    """The record is written, whoever has written it meanwhile."""
    right = server.Api.write_record

    def wrong(api: server.Api, data: Mapping[str, str | bytes], settings: str, _based_on: int | None) -> None:
        right(api, data, settings, api.record.version if api.record else None)

    patch.setattr(server.Api, "write_record", wrong)


def barrier_ignored(patch: pytest.MonkeyPatch) -> None:
    """After the record was lost, what nobody is known to work is granted at once."""
    patch.setattr(record, "barrier_proof", lambda *_: Proof.RELEASED)
    patch.setattr(situations.Situation, "unrecorded_drains", {})


def recovery_below_what_was_seen(patch: pytest.MonkeyPatch) -> None:
    """A lost record starts again at generation 1."""
    right = record.rebuild_assignment
    patch.setattr(
        record, "rebuild_assignment", lambda snapshot, now: replace(right(snapshot, now), generation=1, barrier=1)
    )


def budget_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What was moved is not counted."""
    patch.setattr(moves, "_updated_spent", lambda *_: ())


def shrinks_on_a_partial_view(patch: pytest.MonkeyPatch) -> None:
    """A queue that one answer does not name is given up."""
    patch.setattr(situations, "SHRINK_PATIENCE_SECONDS", 0.0)


def no_view_is_no_queues(patch: pytest.MonkeyPatch) -> None:
    """A topic without an answer has no queues."""
    right = situations.Situation._queues_of

    def wrong(it: situations.Situation, topic: str) -> Any:
        return right(it, topic) if it.snapshot.views.get(topic) else []

    patch.setattr(situations.Situation, "_queues_of", wrong)


def lower_generations_obeyed(patch: pytest.MonkeyPatch) -> None:
    """A member obeys whatever document it is shown."""
    patch.setattr(member.Member, "_why_rejected", lambda *_: None)


def member_forgets(patch: pytest.MonkeyPatch) -> None:
    """A restarted member begins with any document that its volume shows."""
    patch.setattr(fleet, "Disk", _Forgetful)


def final_drain_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A finally drained member takes up what it is shown."""
    right = member.Member._assigned_queues

    def wrong(it: member.Member) -> Any:
        it._is_draining = False
        return right(it)

    patch.setattr(member.Member, "_assigned_queues", wrong)


def released_before_empty(patch: pytest.MonkeyPatch) -> None:
    """A member says that it has released what it still delivers from."""
    for state in (
        queue_lifecycle.LeaseState.RUNNING,
        queue_lifecycle.LeaseState.STARTING,
        queue_lifecycle.LeaseState.STUCK,
    ):
        row = (queue_lifecycle.LeaseState.RELEASED, (queue_lifecycle.LeaseAction.STOP,))
        patch.setitem(queue_lifecycle.TRANSITIONS, (state, queue_lifecycle.LeaseEvent.REVOKED), row)


def namesakes_are_one(patch: pytest.MonkeyPatch) -> None:
    """A pod made anew under its name works what the old one was given."""
    right = member.Member._assigned_queues

    def wrong(it: member.Member) -> Any:
        share = it._assignment.members.get(it.name) if it._assignment else None
        uid, it.uid = it.uid, share.uid if share else it.uid
        found = right(it)
        it.uid = uid
        return found

    patch.setattr(member.Member, "_assigned_queues", wrong)


def orphans_wait_for_gates(patch: pytest.MonkeyPatch) -> None:
    """A queue whose holder has ended is not granted."""
    patch.setitem(handover.TRANSITIONS, (OwnershipState.OWNED, Proof.ENDED, DesiredChange.MOVE), Act.KEEP)


def never_satisfied(patch: pytest.MonkeyPatch) -> None:
    """A document is written whenever one looks."""
    patch.setattr(planner, "_needs_write", lambda *_: True)


def looks_all_the_time(patch: pytest.MonkeyPatch) -> None:
    """It is worth looking again at once, always."""
    patch.setattr(planner.pokes, "seconds_until_next_poke", lambda *_: 0.0)


def locks_are_trusted_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A member delivers in order under a lock that has run out."""
    patch.setattr(queue_lifecycle, "LOCK_TRUST_SECONDS", 1e6)
    patch.setattr(queue_lifecycle, "LOCK_EXPIRY_SECONDS", 2e6)
    patch.setattr(queue_lifecycle, "LOCK_HOLD_SECONDS", 0.0)


# What the simulation finds. `absence_is_an_end` it does not: a leader that begins lists all pods, and only a view older
# than that leads there; the exploration has one.
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
    budget_forgotten,
    shrinks_on_a_partial_view,
    no_view_is_no_queues,
    lower_generations_obeyed,
    member_forgets,
    final_drain_forgotten,
    released_before_empty,
    namesakes_are_one,
    orphans_wait_for_gates,
    never_satisfied,
    looks_all_the_time,
    locks_are_trusted_for_ever,
)


class _Forgetful(fleet.Disk):
    """An emptyDir that keeps nothing."""

    @property
    def obeyed(self) -> int:
        """Return nothing."""
        return 0

    @obeyed.setter
    def obeyed(self, _: int) -> None:
        """Forget it."""


@contextmanager
def planted(bug: Plant) -> Iterator[None]:
    """Work with a bug, and without it again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        yield


__all__ = ["BUGS", "planted"]
