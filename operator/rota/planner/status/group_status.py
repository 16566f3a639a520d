"""The status of a group, as `kubectl get` reads it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rota.documents import Assignment
from rota.handover import Act
from rota.planner import record
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.status import causes
from rota.timestamps import format_time


def build_status(
    situation: Situation,
    draft: Draft,
    document: Assignment,
    *,
    conditions: Sequence[Mapping[str, Any]],
    is_settled: bool,
    idle: int,
    unowned: int,
) -> dict[str, Any]:
    """Return the group's status; equal snapshots give equal statuses, so a status is written only after a change.

    `is_settled`: no queue or member is in transition. `idle` members own no queue, `unowned` queues have no owner.
    """
    snapshot = situation.snapshot
    fields = {
        "observedGeneration": snapshot.observed_generation,
        "conditions": conditions,
        "replicas": sum(not pod.ended for pod in snapshot.pods),
        "selector": f"rota.dev/group={snapshot.group.partition('/')[2]}",
        "members": len(situation.counted_members),
        "queues": len(situation.queues),
        # Never lower than before, also without an assignment: a lower one proves that the stored assignment was lost.
        "generation": max(document.generation, record.plausible_generation(snapshot.status.get("generation"))),
        "strategy": document.strategy or None,
        "lag": snapshot.lag,
        "lastRebalance": _last_rebalance(situation, draft, is_settled=is_settled),
        "idleMembers": idle,
        "unownedQueues": unowned,
    }
    return {name: value for name, value in fields.items() if value is not None}


def count_idle_members(situation: Situation, document: Assignment) -> int:
    """Return how many members own no queue; in Broadcasting groups none."""
    if document.everyone is not None:
        return 0
    owners_by_queue = situation.owners if document is situation.document else record.owners_of(document)
    owners = set(owners_by_queue.values())
    return sum(situation.pods[name].holder not in owners for name in situation.counted_members)


def count_in_transition(assignment: Assignment, waiting_members: int) -> int:
    """Return the number of queues in transition plus members that have not obeyed: Progressing names the sum."""
    return sum(release.to is not None for release in assignment.releasing.values()) + waiting_members


def _last_rebalance(situation: Situation, draft: Draft, *, is_settled: bool) -> dict[str, Any] | None:
    """Return the last rebalance: it starts with a document; once all members obey, it is over and has `seconds`."""
    last: dict[str, Any] | None = situation.snapshot.status.get("lastRebalance")
    moved = len(draft.with_acts(Act.GRANT, Act.FORCE))
    if draft.with_acts(*causes.MOVING_ACTS):
        if last and "seconds" not in last:
            return {**last, "moved": last["moved"] + moved}
        return {
            "reason": str(causes.rebalance_cause(situation, draft).reason),
            "at": format_time(situation.now),
            "moved": moved,
        }
    if last and "seconds" not in last and is_settled:
        return {**last, "seconds": round(max(record.seconds_since(last["at"], situation.now), 0.0), 3)}
    return last
