"""Why queues change hands: the reason of a rebalance, for its Event, the status, metrics and the journal."""

from collections.abc import Iterable, Mapping, Sequence

from rota.handover import Act, State
from rota.model import Holder, Queue, Reason, Verdict, reason_named
from rota.planner.members import incarnations
from rota.planner.members.standings import Standing
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.status import conditions
from rota.planner.status.problems import describe_unmanaged
from rota.sentences import count, listed

MOVING = (Act.REVOKE, Act.RETURN, Act.GRANT, Act.FORCE, Act.DROP)
_REASON_OF_LEAVER: Mapping[Standing | None, Reason] = {
    Standing.ENDED: Reason.MEMBER_ENDED,
    Standing.RESTARTING: Reason.MEMBER_RESTARTED,
    Standing.LOST: Reason.MEMBER_LOST,
    Standing.LEAVING: Reason.MEMBER_LEFT,
    Standing.OUT: Reason.MEMBER_UNREADY,
    Standing.CUT_OFF: Reason.BROKER_UNREACHABLE,
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


def cause(it: Situation, draft: Draft) -> Verdict:
    """Return why queues change hands now: the first difference between the stored assignment and the snapshot."""
    if it.snapshot.spec and it.snapshot.spec.paused:
        return Verdict(Reason.GROUP_PAUSED, "The group is paused")
    if it.snapshot.is_duplicate:
        return Verdict(Reason.CLAIMED_TWICE, "An older ConsumerGroup has the same consumer group")
    if not it.owned and not it.document.releasing:
        if it.document.generation > 1 and not it.document.barrier:
            return Verdict(Reason.GROUP_RESUMED, "Nobody owned a queue")
        return Verdict(Reason.FIRST_ASSIGNMENT, "A new group")
    return _of_leavers(it) or _of_unmanaged(it) or _of_queues(it) or _of_joiners(it) or _of_rules(it, draft)


def _of_leavers(it: Situation) -> Verdict | None:
    holders = {*it.owned.values(), *(release.holder for release in it.document.releasing.values())}
    reasons = {holder: _REASON_OF_LEAVER.get(_standing(it, holder)) for holder in holders}
    verdicts = [
        _of_members(reason, names)
        for reason in _REASON_OF_LEAVER.values()
        if (names := sorted(holder.name for holder, why in reasons.items() if why is reason))
    ]
    if not verdicts:
        return None
    return Verdict(verdicts[0].reason, "; ".join(verdict.message for verdict in verdicts))


def _standing(it: Situation, holder: Holder) -> Standing | None:
    """Return the standing of a holder; None if its pod is not among the group's pods and is not known to have ended."""
    if it.seen(holder).ended:
        return Standing.ENDED
    pod = it.pods.get(holder.name)
    if pod is None or pod.uid != holder.uid:
        return None
    has_restarted = it.standings[pod.name].counts and incarnations.has_restarted(it.document, pod)
    return Standing.RESTARTING if has_restarted else it.standings[pod.name]


def _of_unmanaged(it: Situation) -> Verdict | None:
    """Return that unmanaged consumers came or went: their queues, in no assignment, would look like new ones."""
    consumers = it.snapshot.foreigners
    if consumers is None or bool(consumers) == conditions.holds(it.snapshot.status, Reason.FOREIGN_MEMBERS):
        return None
    gone = "No consumer that is not Rota's is in the group any more: the policy shares all queues again"
    return Verdict(Reason.FOREIGN_MEMBERS, describe_unmanaged(consumers) if consumers else gone)


def _of_queues(it: Situation) -> Verdict | None:
    recorded = {queue for topic in it.on_record.values() for queue in topic}
    wanted = set(it.queues)
    added = set() if it.snapshot.foreigners else wanted - recorded
    removed = recorded - wanted
    if added and {queue.topic for queue in added} <= {*it.on_record, it.retries}:
        return Verdict(Reason.QUEUES_ADDED, f"{count(len(added), 'queue')} more: {_some(added)}")
    topics = {queue.topic for queue in wanted}
    if removed and {queue.topic for queue in removed} <= topics:
        return Verdict(Reason.QUEUES_REMOVED, f"{count(len(removed), 'queue')} less: {_some(removed)}")
    if added or removed:
        return Verdict(Reason.SUBSCRIPTION_CHANGED, f"The subscription is now {listed(sorted(topics))}")
    return None


def _of_joiners(it: Situation) -> Verdict | None:
    owners = set(it.owned.values())
    names = [name for name in it.counted if it.pods[name].holder not in owners]
    return _of_members(Reason.MEMBER_JOINED, names) if names else None


def _of_rules(it: Situation, draft: Draft) -> Verdict:
    moving = [decision for decision in draft.decisions if decision.act in MOVING]
    if it.snapshot.foreigners and (moving or draft.strategy != it.document.strategy):
        return Verdict(Reason.FOREIGN_MEMBERS, describe_unmanaged(it.snapshot.foreigners))
    if draft.strategy != it.document.strategy:
        return Verdict(Reason.POLICY_CHANGED, f"The strategy is now {draft.strategy}")
    if moving:
        begun = _begun(it) if all(decision.state is State.RELEASING for decision in moving) else None
        if begun:  # no news: queues that were revoked then are granted now
            return Verdict(begun, f"What {begun} began goes on")
        return Verdict(Reason.LOAD_SHIFTED, "What queues weigh, or who is where, has changed")
    return Verdict(Reason.SETTINGS_CHANGED, "The group's settings or members changed; no queue moves")


def _begun(it: Situation) -> Reason | None:
    """Return why the rebalance began that is still under way."""
    last = it.snapshot.status.get("lastRebalance") or {}
    return reason_named(last.get("reason")) if "seconds" not in last else None


def _of_members(reason: Reason, names: Sequence[str]) -> Verdict:
    one, several = {"is": "is", "has": "has", "its": "its"}, {"is": "are", "has": "have", "its": "their"}
    return Verdict(reason, _SENTENCES[reason].format(listed(names), **(one if len(names) == 1 else several)))


def _some(queues: Iterable[Queue]) -> str:
    return listed([str(queue) for queue in sorted(queues)])
