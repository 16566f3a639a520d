"""What the journal keeps of a plan: members, decisions and verdicts."""

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


def records(it: Situation, draft: Draft, document: Assignment) -> list[dict[str, object]]:
    """Return the journal's lines about a document that is written now."""
    group, at, generation = it.snapshot.group, format_time(it.now), document.generation
    why = causes.cause(it, draft)
    members = {pod.name: {"uid": pod.uid, "standing": str(it.standings[pod.name])} for pod in it.snapshot.pods}
    return [
        journal_record("membership", group, at, generation=generation, members=members),
        journal_record(
            "plan",
            group,
            at,
            generation=generation,
            strategy=document.strategy,
            reason=str(why.reason),
            message=why.message,
            members=len(it.counted),
            queues=len(it.queues),
            held=str(draft.held.reason) if draft.held else None,
        ),
        *(
            journal_record(
                "handover",
                group,
                at,
                generation=generation,
                act=str(some[0].act),
                proof=str(some[0].known),
                state=str(some[0].state),
                **_party("from", some[0].holder),
                **_party("to", some[0].to),
                queues=to_ranges(one.queue for one in some),
            )
            for some in _alike(draft.of(*causes.MOVING))
        ),
    ]


def verdict_records(it: Situation, status_now: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the journal's lines about conditions whose state or reason is not what it was."""
    published = it.snapshot.status.get("conditions") or []
    before = {one["type"]: (one.get("status"), one.get("reason")) for one in published}
    return [
        journal_record(
            "verdict",
            it.snapshot.group,
            format_time(it.now),
            condition=one["type"],
            status=one["status"],
            reason=one["reason"],
            message=one["message"],
        )
        for one in status_now["conditions"]
        if one["type"] not in conditions.DERIVED and before.get(one["type"]) != (one["status"], one["reason"])
    ]


def _party(what: str, holder: Holder | None) -> dict[str, str]:
    return {what: holder.name, f"{what}Uid": holder.uid} if holder else {}


def _alike(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Put together what differs only in the queue."""

    def kind(one: Decision) -> tuple[str, str, State, Holder, Holder]:
        nobody = Holder("", "")
        return one.act, one.known, one.state, one.holder or nobody, one.to or nobody

    return [list(some) for _, some in groupby(sorted(decisions, key=kind), key=kind)]


def beginning(snapshot: Snapshot, plan: Plan, document: Assignment, spec: GroupSpec, now: float) -> dict[str, object]:
    """Return the journal's line about a document that stands: what is whose, on its way, or nobody's."""
    given = {*owners(document), *document.releasing, *(document.everyone or ()), *plan.foreign}
    there = {queue for view in snapshot.views.values() if view for queue in view.queues}
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
            for (holder, to), queues in _ways(document).items()
        ],
        unowned=to_ranges(there - given),
    )


def _members(snapshot: Snapshot, plan: Plan, document: Assignment) -> dict[str, dict[str, object]]:
    """Say of every pod how it stands and what it owns; one that is gone may be on record yet."""
    found: dict[str, dict[str, object]] = {}
    pods = {pod.name: pod for pod in snapshot.pods}
    for name in sorted({*pods, *document.members}):
        pod, share = pods.get(name), document.members.get(name)
        uid = share.uid if share else pod.uid if pod else ""
        there = pod is not None and pod.uid == uid
        found[name] = {
            "uid": uid,
            "standing": str(plan.standings.get(name, "Ended")) if there else "Ended",
            "queues": to_ranges((share or Share(uid)).queues),
            **({"room": pod.room} if pod and there and pod.room else {}),
        }
    return found


def _ways(document: Assignment) -> Mapping[tuple[Holder, str | None], list[Queue]]:
    """Put together what is on one way."""
    found: defaultdict[tuple[Holder, str | None], list[Queue]] = defaultdict(list)
    for queue, release in document.releasing.items():
        found[release.holder, release.to].append(queue)
    return found
