"""Journal records of a plan: members, decisions and verdicts."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rota.documents import Assignment, Share
from rota.handover import State
from rota.model import Holder, Queue
from rota.planner.moves import Decision, Draft
from rota.planner.record import owners
from rota.planner.situation import Situation
from rota.planner.snapshot import Plan, Snapshot
from rota.planner.status import causes, conditions
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.spec import GroupSpec, policy_body
from rota.timestamps import format_time


def records(situation: Situation, draft: Draft, document: Assignment) -> list[dict[str, object]]:
    """Return the journal records about a document that is written now."""
    group, at, generation = situation.snapshot.group, format_time(situation.now), document.generation
    cause = causes.cause(situation, draft)
    members = {
        pod.name: {"uid": pod.uid, "standing": str(situation.standings[pod.name])} for pod in situation.snapshot.pods
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
            members=len(situation.counted),
            queues=len(situation.queues),
            held=str(draft.held.reason) if draft.held else None,
        ),
        *(
            journal_record(
                "handover",
                group,
                at,
                generation=generation,
                act=str(similar[0].act),
                proof=str(similar[0].known),
                state=str(similar[0].state),
                **_party("from", similar[0].holder),
                **_party("to", similar[0].to),
                queues=to_ranges(decision.queue for decision in similar),
            )
            for similar in _alike(draft.of(*causes.MOVING))
        ),
    ]


def verdict_records(situation: Situation, status_now: Mapping[str, Any]) -> list[dict[str, object]]:
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
        if condition["type"] not in conditions.DERIVED
        and previous.get(condition["type"]) != (condition["status"], condition["reason"])
    ]


def _party(role: str, holder: Holder | None) -> dict[str, str]:
    return {role: holder.name, f"{role}Uid": holder.uid} if holder else {}


def _alike(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Group decisions that differ only in the queue."""

    def kind(decision: Decision) -> tuple[str, str, State, Holder, Holder]:
        nobody = Holder("", "")
        return decision.act, decision.known, decision.state, decision.holder or nobody, decision.to or nobody

    return [list(similar) for _, similar in groupby(sorted(decisions, key=kind), key=kind)]


def owners_record(
    snapshot: Snapshot, plan: Plan, document: Assignment, spec: GroupSpec, now: float
) -> dict[str, object]:
    """Return the journal record about a stored document: queues by owner, in transition, and unowned."""
    assigned = {*owners(document), *document.releasing, *(document.everyone or ()), *plan.foreign}
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
        members=_members(snapshot, plan, document),
        releasing=[
            {"from": holder.name, "fromUid": holder.uid, "to": to, "queues": to_ranges(queues)}
            for (holder, to), queues in _transfers(document).items()
        ],
        unowned=to_ranges(routed - assigned),
    )


def _members(snapshot: Snapshot, plan: Plan, document: Assignment) -> dict[str, dict[str, object]]:
    """Return state and queues of every pod, also of deleted pods that are still on record."""
    members: dict[str, dict[str, object]] = {}
    pods = {pod.name: pod for pod in snapshot.pods}
    for name in sorted({*pods, *document.members}):
        pod, share = pods.get(name), document.members.get(name)
        uid = share.uid if share else pod.uid if pod else ""
        is_present = pod is not None and pod.uid == uid
        members[name] = {
            "uid": uid,
            "standing": str(plan.standings.get(name, "Ended")) if is_present else "Ended",
            "queues": to_ranges((share or Share(uid)).queues),
            **({"room": pod.room} if pod and is_present and pod.room else {}),
        }
    return members


def _transfers(document: Assignment) -> Mapping[tuple[Holder, str | None], list[Queue]]:
    """Group queues in transition by holder and next owner."""
    transfers: defaultdict[tuple[Holder, str | None], list[Queue]] = defaultdict(list)
    for queue, release in document.releasing.items():
        transfers[release.holder, release.to].append(queue)
    return transfers
