"""Journal records of a plan: members, decisions and conditions."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rota.documents import Assignment, Share
from rota.handover import OwnershipState
from rota.model import Holder, Queue
from rota.planner.moves import Decision, Draft
from rota.planner.record import owners_of
from rota.planner.situation import Situation
from rota.planner.snapshot import Plan, Snapshot
from rota.planner.status import causes, conditions
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.spec import GroupSpec, policy_body
from rota.timestamps import format_time


def document_records(situation: Situation, draft: Draft, document: Assignment) -> list[dict[str, object]]:
    """Return the journal records about a document that is written now."""
    group = situation.snapshot.group
    at = format_time(situation.now)
    generation = document.generation
    cause = causes.rebalance_cause(situation, draft)
    members = {
        pod.name: {"uid": pod.uid, "standing": str(situation.member_states[pod.name])}
        for pod in situation.snapshot.pods
    }
    return [
        journal_record("membership", group, at, generation=generation, members=members),
        journal_record(
            "plan",
            group,
            at,
            generation=generation,
            strategy=document.strategy,
            reason=str(cause.reason),
            message=cause.message,
            members=len(situation.counted_members),
            queues=len(situation.queues),
            held=str(draft.hold.reason) if draft.hold else None,
        ),
        *(
            journal_record(
                "handover",
                group,
                at,
                generation=generation,
                act=str(similar[0].act),
                proof=str(similar[0].proof),
                state=str(similar[0].state),
                **_holder_fields("from", similar[0].holder),
                **_holder_fields("to", similar[0].next_owner),
                queues=to_ranges(decision.queue for decision in similar),
            )
            for similar in _group_similar(draft.with_acts(*causes.MOVING_ACTS))
        ),
    ]


def condition_records(situation: Situation, status_now: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the journal records about conditions with a new status or reason."""
    published = situation.snapshot.status.get("conditions") or []
    previous = {condition["type"]: (condition.get("status"), condition.get("reason")) for condition in published}
    return [
        journal_record(
            "verdict",
            situation.snapshot.group,
            format_time(situation.now),
            condition=condition["type"],
            status=condition["status"],
            reason=condition["reason"],
            message=condition["message"],
        )
        for condition in status_now["conditions"]
        if condition["type"] not in conditions.DERIVED_CONDITIONS
        and previous.get(condition["type"]) != (condition["status"], condition["reason"])
    ]


def _holder_fields(role: str, holder: Holder | None) -> dict[str, str]:
    return {role: holder.name, f"{role}Uid": holder.uid} if holder else {}


def _group_similar(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Group decisions that differ only in the queue."""

    def kind(decision: Decision) -> tuple[str, str, OwnershipState, Holder, Holder]:
        none = Holder("", "")
        return decision.act, decision.proof, decision.state, decision.holder or none, decision.next_owner or none

    return [list(similar) for _, similar in groupby(sorted(decisions, key=kind), key=kind)]


def owners_record(
    snapshot: Snapshot, plan: Plan, document: Assignment, spec: GroupSpec, now: float
) -> dict[str, object]:
    """Return the journal record about a stored document: queues by owner, in transition, and unowned."""
    assigned = {*owners_of(document), *document.releasing, *(document.everyone or ()), *plan.unmanaged_queues}
    routed = {queue for view in snapshot.views.values() if view for queue in view.queues}
    return journal_record(
        "owners",
        snapshot.group,
        format_time(now),
        generation=document.generation,
        model=spec.message_model,
        ordering=spec.ordering,
        startFrom=spec.start_from.position,
        policy=spec.policy_ref.name if spec.policy_ref else None,
        rules=policy_body(snapshot.policy) if snapshot.policy else {},
        members=_member_fields(snapshot, plan, document),
        releasing=[
            {"from": holder.name, "fromUid": holder.uid, "to": to, "queues": to_ranges(queues)}
            for (holder, to), queues in _queues_by_transfer(document).items()
        ],
        unowned=to_ranges(routed - assigned),
    )


def _member_fields(snapshot: Snapshot, plan: Plan, document: Assignment) -> dict[str, dict[str, object]]:
    """Return state and queues of every pod, also of deleted pods that are still on record."""
    members: dict[str, dict[str, object]] = {}
    pods = {pod.name: pod for pod in snapshot.pods}
    for name in sorted({*pods, *document.members}):
        pod = pods.get(name)
        share = document.members.get(name)
        uid = pod.uid if pod else ""
        if share:
            uid = share.uid
        is_present = pod is not None and pod.uid == uid
        members[name] = {
            "uid": uid,
            "standing": str(plan.member_states.get(name, "Ended")) if is_present else "Ended",
            "queues": to_ranges((share or Share(uid)).queues),
            **({"room": pod.room} if pod and is_present and pod.room else {}),
        }
    return members


def _queues_by_transfer(document: Assignment) -> Mapping[tuple[Holder, str | None], list[Queue]]:
    """Group queues in transition by holder and next owner."""
    transfers: defaultdict[tuple[Holder, str | None], list[Queue]] = defaultdict(list)
    for queue, release in document.releasing.items():
        transfers[release.holder, release.to].append(queue)
    return transfers
