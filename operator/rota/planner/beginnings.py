"""Who owns what and by which rules, as the journal keeps it now and then: whoever reads it may begin there."""

from collections import defaultdict
from collections.abc import Mapping

from rota.documents import Assignment, Share
from rota.model import Holder, Queue
from rota.planner.record import owners, written
from rota.planner.world import Plan, Snapshot
from rota.ranges import to_ranges
from rota.records import journal_record
from rota.spec import GroupSpec, policy_body


def beginning(snapshot: Snapshot, plan: Plan, document: Assignment, spec: GroupSpec, now: float) -> dict[str, object]:
    """Return the journal's line about a document that stands: what is whose, on its way, or nobody's."""
    given = {*owners(document), *document.releasing, *(document.everyone or ()), *plan.foreign}
    there = {queue for view in snapshot.views.values() if view for queue in view.queues}
    return journal_record(
        "owners",
        snapshot.group,
        written(now),
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
