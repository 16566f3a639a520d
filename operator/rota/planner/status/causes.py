"""Cause of a rebalance, for its Event, the status, metrics and the journal.

It is found by comparing the stored assignment with the snapshot: the first difference in a fixed order counts.
"""

from collections.abc import Iterable, Mapping, Sequence

from rota.handover import Act, OwnershipState
from rota.model import Finding, Queue, Reason, reason_named
from rota.planner.members.member_states import MemberState
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.status import conditions
from rota.planner.status.problems import describe_unmanaged, join_findings
from rota.sentences import join_names, pluralize

MOVING_ACTS = (Act.REVOKE, Act.RETURN, Act.GRANT, Act.FORCE, Act.DROP)
_REASON_OF_LEAVER: Mapping[MemberState, Reason] = {
    MemberState.ENDED: Reason.MEMBER_TERMINATED,
    MemberState.RESTARTING: Reason.MEMBER_RESTARTED,
    MemberState.LOST: Reason.MEMBER_LOST,
    MemberState.LEAVING: Reason.MEMBER_LEFT,
    MemberState.OUT: Reason.MEMBER_UNREADY,
    MemberState.CUT_OFF: Reason.BROKER_UNREACHABLE,
}
_SENTENCES = {
    Reason.MEMBER_TERMINATED: "{} ended",
    Reason.MEMBER_RESTARTED: "the sidecar of {} restarted",
    Reason.MEMBER_LOST: "{} {is} not ready and {does} not respond",
    Reason.MEMBER_LEFT: "{} {is} leaving",
    Reason.MEMBER_UNREADY: "{} {has} not been ready for longer than {its} grace",
    Reason.BROKER_UNREACHABLE: "{} cannot reach a broker that other members reach",
    Reason.MEMBER_JOINED: "{} joined",
}
_SINGULAR = {"is": "is", "has": "has", "does": "does", "its": "its"}
_PLURAL = {"is": "are", "has": "have", "does": "do", "its": "their"}


def rebalance_cause(situation: Situation, draft: Draft) -> Finding:
    """Return why this plan changes the assignment: the first difference found, in the order of the checks below."""
    if situation.snapshot.spec and situation.snapshot.spec.paused:
        return Finding(Reason.GROUP_PAUSED, "The group is paused")
    if situation.snapshot.is_duplicate:
        return Finding(Reason.DUPLICATE_CONSUMER_GROUP, "An older ConsumerGroup has the same consumer group")
    if not situation.owners and not situation.document.releasing:
        # A rebuilt assignment, or the first one after Broadcasting, may have no owners either. Both have a barrier, and
        # count as a first assignment.
        if situation.document.generation > 1 and not situation.document.barrier:
            return Finding(Reason.GROUP_RESUMED, "No queue had an owner")
        return Finding(Reason.FIRST_ASSIGNMENT, "A new group")
    return (
        _cause_by_leavers(situation)
        or _cause_by_unmanaged(situation)
        or _cause_by_queues(situation)
        or _cause_by_joiners(situation, draft)
        or _cause_by_rules(situation, draft)
    )


def _cause_by_leavers(situation: Situation) -> Finding | None:
    """Return the cause if holders of queues are not counted any more: the first reason in the table, all sentences."""
    findings = []
    for state, reason in _REASON_OF_LEAVER.items():
        if leavers := situation.holder_names_by_state.get(state):
            findings.append(_members_cause(reason, leavers))
    return join_findings(findings) if findings else None


def _cause_by_unmanaged(situation: Situation) -> Finding | None:
    """Return the cause if unmanaged consumers came or went.

    This check comes before that of queues: otherwise the queues of consumers that went would look like added ones.
    """
    consumers = situation.snapshot.unmanaged_consumers
    was_published = conditions.has_condition(situation.snapshot.status, Reason.UNMANAGED_CONSUMERS)
    if consumers is None or bool(consumers) == was_published:
        return None
    all_left = "No unmanaged consumer is in the group any more: the policy shares all queues again"
    return Finding(Reason.UNMANAGED_CONSUMERS, describe_unmanaged(consumers) if consumers else all_left)


def _cause_by_queues(situation: Situation) -> Finding | None:
    """Return the cause if queues came or went.

    - QueuesAdded or QueuesRemoved: of topics that were subscribed before and still are.
    - SubscriptionChanged: of a topic that is new in the subscription, or no longer in it.
    """
    subscribed = situation.subscribed
    # `unassigned`: to be consumed, but not in the assignment; `unsubscribed`: in it, but not to be consumed any more.
    # The assignment does not have the queues of unmanaged consumers, so an unassigned queue need not be a new one.
    added = set() if situation.snapshot.unmanaged_consumers else set(subscribed.unassigned)
    removed = set(subscribed.unsubscribed)
    if not (added or removed):
        return None
    topics = _topics_of(subscribed.queues)
    assigned_topics = {*subscribed.assigned_by_topic, subscribed.retry_topic}
    if not (_topics_of(added) <= assigned_topics and _topics_of(removed) <= topics):
        return Finding(Reason.SUBSCRIPTION_CHANGED, f"The subscription is now {join_names(sorted(topics))}")
    if added:
        return Finding(Reason.QUEUES_ADDED, f"{pluralize(len(added), 'queue')} added: {_join_queues(added)}")
    return Finding(Reason.QUEUES_REMOVED, f"{pluralize(len(removed), 'queue')} removed: {_join_queues(removed)}")


def _topics_of(queues: Iterable[Queue]) -> set[str]:
    return {queue.topic for queue in queues}


def _cause_by_joiners(situation: Situation, draft: Draft) -> Finding | None:
    """Return the cause if members joined: those without queues that are new in the assignment, or get queues now."""
    if draft.strategy != situation.document.strategy:
        return None  # the new strategy may be why an idle member gets queues
    document = situation.document
    next_owners = {decision.next_owner for decision in draft.decisions}
    names = [
        holder.name
        for holder in situation.idle_members(document)
        if holder in next_owners or holder not in document.entry_holders
    ]
    return _members_cause(Reason.MEMBER_JOINED, names) if names else None


def _cause_by_rules(situation: Situation, draft: Draft) -> Finding:
    """Return the cause of a change with the same members and queues: another strategy, or other inputs."""
    moving = draft.with_acts(*MOVING_ACTS)
    if situation.snapshot.unmanaged_consumers and (moving or draft.strategy != situation.document.strategy):
        return Finding(Reason.UNMANAGED_CONSUMERS, describe_unmanaged(situation.snapshot.unmanaged_consumers))
    if draft.strategy != situation.document.strategy:
        return Finding(Reason.POLICY_CHANGED, f"The strategy is now {draft.strategy}")
    if moving:
        rebalance = situation.snapshot.ongoing_rebalance
        ongoing = reason_named(rebalance.get("reason")) if rebalance else None
        # Only queues that this rebalance revoked earlier are granted or dropped now.
        if ongoing and all(decision.state is OwnershipState.RELEASING for decision in moving):
            return Finding(ongoing, f"The rebalance that began with {ongoing} continues")
        return Finding(Reason.LOAD_SHIFTED, "The weights of queues or the rooms of members changed")
    return Finding(Reason.SETTINGS_CHANGED, "The group's settings or members changed; no queue moves")


def _members_cause(reason: Reason, names: Sequence[str]) -> Finding:
    verbs = _SINGULAR if len(names) == 1 else _PLURAL
    return Finding(reason, _SENTENCES[reason].format(join_names(names), **verbs))


def _join_queues(queues: Iterable[Queue]) -> str:
    return join_names(list(map(str, sorted(queues))))
