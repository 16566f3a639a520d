"""Journal records of a plan (members, handovers, conditions) and of a stored document (the owners of all queues).

The fields are those of `rota.records`; the pipeline reads them back.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
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


def document_records(situation: Situation, draft: Draft, document: Assignment) -> Iterator[dict[str, object]]:
    """Yield the journal records about a document that is written now."""
    group = situation.snapshot.group
    at = situation.formatted_now
    generation = document.generation
    cause = causes.rebalance_cause(situation, draft)
    states = situation.member_states
    # `standing` is the member state; names in the journal do not change.
    members = {pod.name: {"uid": pod.uid, "standing": str(states[pod.name])} for pod in situation.snapshot.pods}
    yield journal_record("membership", group, at, generation=generation, members=members)
    yield journal_record(
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
    )
    yield from _handover_records(draft, group, at, generation)


def _handover_records(draft: Draft, group: str, at: str, generation: int) -> Iterator[dict[str, object]]:
    """Yield one record for all queues with the same act (`handover.py:Act`), proof, state, holder and next owner."""

    def all_but_queue(decision: Decision) -> tuple[str, str, OwnershipState, Holder, Holder]:
        none = Holder("", "")  # stands for None, which cannot be sorted
        return decision.act, decision.proof, decision.state, decision.holder or none, decision.next_owner or none

    moving = sorted(draft.with_acts(*causes.MOVING_ACTS), key=all_but_queue)
    for _, group_of_similar in groupby(moving, key=all_but_queue):
        similar = list(group_of_similar)
        yield journal_record(
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


def condition_records(situation: Situation, status_now: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """Yield the journal records about conditions with a new status or reason."""
    published = situation.snapshot.published_conditions
    for condition in status_now["conditions"]:
        previous = published.get(condition["type"], {})
        is_unchanged = (previous.get("status"), previous.get("reason")) == (condition["status"], condition["reason"])
        # Derived conditions need no record: they follow from the others.
        if condition["type"] in conditions.DERIVED_CONDITIONS or is_unchanged:
            continue
        yield journal_record(
            "verdict",  # a condition's new status (in `offsets` records, `verdicts` counts lag states)
            situation.snapshot.group,
            situation.formatted_now,
            condition=condition["type"],
            status=condition["status"],
            reason=condition["reason"],
            message=condition["message"],
        )


def _holder_fields(role: str, holder: Holder | None) -> dict[str, str]:
    return {role: holder.name, f"{role}Uid": holder.uid} if holder else {}


def owners_record(
    snapshot: Snapshot, plan: Plan, document: Assignment, spec: GroupSpec, now: float
) -> dict[str, object]:
    """Return the journal record about a stored document: queues by owner, in transition, and unowned.

    `unowned` are queues that no member owns, nor an unmanaged consumer.
    """
    # `document.everyone` has all queues of a Broadcasting group, and is None for other groups.
    assigned = {*owners_of(document), *document.releasing, *(document.everyone or ()), *plan.unmanaged_queues}
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
        releasing=list(_transfers(document)),
        unowned=to_ranges(snapshot.routed_queues - assigned),
    )


def _member_fields(snapshot: Snapshot, plan: Plan, document: Assignment) -> dict[str, dict[str, object]]:
    """Return member state and queues of every pod, also of deleted pods that the document still names."""
    members: dict[str, dict[str, object]] = {}
    pods = snapshot.pods_by_name
    for name in sorted({*pods, *document.members}):
        pod = pods.get(name)
        share = document.members.get(name) or Share(pods[name].uid)
        is_present = pod is not None and pod.uid == share.uid
        members[name] = {
            "uid": share.uid,
            "standing": str(plan.member_states.get(name, "Ended")) if is_present else "Ended",
            "queues": to_ranges(share.queues),
            **({"room": pod.room} if pod and is_present and pod.room else {}),
        }
    return members


def _transfers(document: Assignment) -> Iterator[dict[str, object]]:
    """Yield one entry for all queues being released with the same holder and next owner."""
    queues_by_transfer: defaultdict[tuple[Holder, str | None], list[Queue]] = defaultdict(list)
    for queue, release in document.releasing.items():
        queues_by_transfer[release.holder, release.to].append(queue)
    for (holder, to), queues in queues_by_transfer.items():
        yield {"from": holder.name, "fromUid": holder.uid, "to": to, "queues": to_ranges(queues)}
