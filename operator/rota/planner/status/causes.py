"""Cause of a rebalance, for its Event, the status, metrics and the journal."""

from collections.abc import Iterable, Mapping, Sequence

from rota.handover import Act, State
from rota.model import Holder, Queue, Reason, Verdict, reason_named
from rota.planner.members import incarnations
from rota.planner.members.standings import MemberState
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.status import conditions
from rota.planner.status.problems import describe_unmanaged
from rota.sentences import count, listed

MOVING = (Act.REVOKE, Act.RETURN, Act.GRANT, Act.FORCE, Act.DROP)
_REASON_OF_LEAVER: Mapping[MemberState | None, Reason] = {
    MemberState.ENDED: Reason.MEMBER_ENDED,
    MemberState.RESTARTING: Reason.MEMBER_RESTARTED,
    MemberState.LOST: Reason.MEMBER_LOST,
    MemberState.LEAVING: Reason.MEMBER_LEFT,
    MemberState.OUT: Reason.MEMBER_UNREADY,
    MemberState.CUT_OFF: Reason.BROKER_UNREACHABLE,
}
_SENTENCES = {
    Reason.MEMBER_ENDED: "{} ended",
    Reason.MEMBER_RESTARTED: "the sidecar of {} restarted",
    Reason.MEMBER_LOST: "{} {is} not ready and cannot be heard",
    Reason.MEMBER_LEFT: "{} {is} leaving",
    Reason.MEMBER_UNREADY: "{} {has} not been ready for longer than {its} grace",
    Reason.BROKER_UNREACHABLE: "{} cannot reach a broker that others reach",
    Reason.MEMBER_JOINED: "{} joined",
}


def cause(situation: Situation, draft: Draft) -> Verdict:
    """Return why queues change hands now: the first difference between the stored assignment and the snapshot."""
    if situation.snapshot.spec and situation.snapshot.spec.paused:
        return Verdict(Reason.GROUP_PAUSED, "The group is paused")
    if situation.snapshot.is_duplicate:
        return Verdict(Reason.CLAIMED_TWICE, "An older ConsumerGroup has the same consumer group")
    if not situation.owned and not situation.document.releasing:
        if situation.document.generation > 1 and not situation.document.barrier:
            return Verdict(Reason.GROUP_RESUMED, "Nobody owned a queue")
        return Verdict(Reason.FIRST_ASSIGNMENT, "A new group")
    return (
        _of_leavers(situation)
        or _of_unmanaged(situation)
        or _of_queues(situation)
        or _of_joiners(situation)
        or _of_rules(situation, draft)
    )


def _of_leavers(situation: Situation) -> Verdict | None:
    holders = {*situation.owned.values(), *(release.holder for release in situation.document.releasing.values())}
    reasons = {holder: _REASON_OF_LEAVER.get(_standing(situation, holder)) for holder in holders}
    verdicts = [
        _of_members(reason, names)
        for reason in _REASON_OF_LEAVER.values()
        if (names := sorted(holder.name for holder, holder_reason in reasons.items() if holder_reason is reason))
    ]
    if not verdicts:
        return None
    return Verdict(verdicts[0].reason, "; ".join(verdict.message for verdict in verdicts))


def _standing(situation: Situation, holder: Holder) -> MemberState | None:
    """Return the standing of a holder; None if its pod is not among the group's pods and is not known to have ended."""
    if situation.seen(holder).ended:
        return MemberState.ENDED
    pod = situation.pods.get(holder.name)
    if pod is None or pod.uid != holder.uid:
        return None
    has_restarted = situation.standings[pod.name].counts and incarnations.has_restarted(situation.document, pod)
    return MemberState.RESTARTING if has_restarted else situation.standings[pod.name]


def _of_unmanaged(situation: Situation) -> Verdict | None:
    """Return the cause if unmanaged consumers came or went; their unassigned queues would look like new ones."""
    consumers = situation.snapshot.foreigners
    if consumers is None or bool(consumers) == conditions.holds(situation.snapshot.status, Reason.FOREIGN_MEMBERS):
        return None
    all_left = "No consumer that is not Rota's is in the group any more: the policy shares all queues again"
    return Verdict(Reason.FOREIGN_MEMBERS, describe_unmanaged(consumers) if consumers else all_left)


def _of_queues(situation: Situation) -> Verdict | None:
    recorded = {queue for topic in situation.on_record.values() for queue in topic}
    group_queues = set(situation.queues)
    added = set() if situation.snapshot.foreigners else group_queues - recorded
    removed = recorded - group_queues
    if added and {queue.topic for queue in added} <= {*situation.on_record, situation.retries}:
        return Verdict(Reason.QUEUES_ADDED, f"{count(len(added), 'queue')} more: {_some(added)}")
    topics = {queue.topic for queue in group_queues}
    if removed and {queue.topic for queue in removed} <= topics:
        return Verdict(Reason.QUEUES_REMOVED, f"{count(len(removed), 'queue')} less: {_some(removed)}")
    if added or removed:
        return Verdict(Reason.SUBSCRIPTION_CHANGED, f"The subscription is now {listed(sorted(topics))}")
    return None


def _of_joiners(situation: Situation) -> Verdict | None:
    owners = set(situation.owned.values())
    names = [name for name in situation.counted if situation.pods[name].holder not in owners]
    return _of_members(Reason.MEMBER_JOINED, names) if names else None


def _of_rules(situation: Situation, draft: Draft) -> Verdict:
    moving = [decision for decision in draft.decisions if decision.act in MOVING]
    if situation.snapshot.foreigners and (moving or draft.strategy != situation.document.strategy):
        return Verdict(Reason.FOREIGN_MEMBERS, describe_unmanaged(situation.snapshot.foreigners))
    if draft.strategy != situation.document.strategy:
        return Verdict(Reason.POLICY_CHANGED, f"The strategy is now {draft.strategy}")
    if moving:
        begun = _begun(situation) if all(decision.state is State.RELEASING for decision in moving) else None
        if begun:  # the same rebalance: queues revoked earlier are granted now
            return Verdict(begun, f"What {begun} began goes on")
        return Verdict(Reason.LOAD_SHIFTED, "What queues weigh, or who is where, has changed")
    return Verdict(Reason.SETTINGS_CHANGED, "The group's settings or members changed; no queue moves")


def _begun(situation: Situation) -> Reason | None:
    """Return the reason of the rebalance under way; None without one."""
    last = situation.snapshot.status.get("lastRebalance") or {}
    return reason_named(last.get("reason")) if "seconds" not in last else None


def _of_members(reason: Reason, names: Sequence[str]) -> Verdict:
    singular, plural = {"is": "is", "has": "has", "its": "its"}, {"is": "are", "has": "have", "its": "their"}
    return Verdict(reason, _SENTENCES[reason].format(listed(names), **(singular if len(names) == 1 else plural)))


def _some(queues: Iterable[Queue]) -> str:
    return listed([str(queue) for queue in sorted(queues)])
