"""The status of a ConsumerGroup: the fields that `kubectl get` and the operator's next plans read."""

from collections.abc import Mapping, Sequence
from typing import Any

from rota.documents import Assignment
from rota.handover import Act
from rota.planner import record
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.status import causes


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

    `is_settled`: no queue or member is in transition. `idle` is the number of members without a queue, `unowned` the
    number of queues without an owner.
    """
    snapshot = situation.snapshot
    fields = {
        "observedGeneration": snapshot.observed_generation,
        "conditions": conditions,
        "replicas": sum(not pod.ended for pod in snapshot.pods),
        "selector": f"rota.dev/group={snapshot.group.partition('/')[2]}",
        "members": len(situation.counted_members),
        "queues": len(situation.queues),
        # Never lower than before, even without an assignment: `record.find_damage` detects a lost assignment by it.
        "generation": max(document.generation, record.plausible_generation(snapshot.status.get("generation"))),
        "strategy": document.strategy or None,
        "lag": snapshot.lag,
        "lastRebalance": _last_rebalance(situation, draft, is_settled=is_settled),
        "idleMembers": idle,
        "unownedQueues": unowned,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _last_rebalance(situation: Situation, draft: Draft, *, is_settled: bool) -> Mapping[str, Any] | None:
    """Return the last rebalance: it starts with a document that moves queues, and has `seconds` once it is over."""
    ongoing = situation.snapshot.ongoing_rebalance
    moved = len(draft.with_acts(Act.GRANT, Act.FORCE))
    if draft.with_acts(*causes.MOVING_ACTS):
        if ongoing:
            return {**ongoing, "moved": ongoing["moved"] + moved}
        return {
            "reason": str(causes.rebalance_cause(situation, draft).reason),
            "at": situation.formatted_now,
            "moved": moved,
        }
    if ongoing and is_settled:
        return {**ongoing, "seconds": round(max(situation.seconds_since(ongoing["at"]), 0.0), 3)}
    return situation.snapshot.last_rebalance
