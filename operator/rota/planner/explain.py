"""Explanations of queue ownership in a live group."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rota.model import NO_OWNER, Holder, Queue, Roster
from rota.planner.moves import compute_desired_owners, measurements_of
from rota.planner.situation import Situation
from rota.planner.status.problems import describe_unmanaged
from rota.planner.target import distinct_client_ids, resolve_options
from rota.spec import PolicySpec
from rota.strategies import explain_all


class Explanation(NamedTuple):
    """The owner of a queue (None: no owner) and the sentence that explains it."""

    queue: Queue
    owner: str | None
    sentence: str


def explain_queues(situation: Situation, requested: Sequence[Queue]) -> list[Explanation]:
    """Explain these queues, or one queue of each member if none is requested; an unknown queue is a ValueError."""
    everyone = situation.document.everyone
    queues = list(requested) or _example_queues(situation)
    explainable = _explainable_queues(situation)
    unknown = next((queue for queue in queues if queue not in explainable), None)
    if unknown:
        raise ValueError(f"There is no queue {unknown} among the group's {len(explainable)}")
    if everyone is not None:
        return [
            Explanation(queue, None, f"{queue} is read by every member: the group is Broadcasting") for queue in queues
        ]
    group_queues = set(situation.queues)
    reasons = _strategy_reasons(
        situation, [queue for queue in queues if queue in situation.owners and queue in group_queues]
    )
    return [_explain_queue(situation, queue, reasons.get(queue, "")) for queue in queues]


def _explainable_queues(situation: Situation) -> set[Queue]:
    """Return the queues that can be explained: current ones, and former ones that are still on record."""
    views = situation.snapshot.views.values() if situation.snapshot.must_release_all else ()
    routed = {queue for view in views if view for queue in view.queues}
    return {
        *situation.queues,
        *situation.owners,
        *situation.document.releasing,
        *(situation.document.everyone or ()),
    } | routed


def _explain_queue(situation: Situation, queue: Queue, reason: str) -> Explanation:
    owner = situation.owners.get(queue)
    release = situation.document.releasing.get(queue)
    if release:
        successor = f"{release.to} gets it next" if release.to else "no member gets it next"
        return Explanation(queue, None, f"{queue} is being handed over: {release.holder.name} releases it, {successor}")
    if owner is None:
        return Explanation(queue, None, f"{queue} has no owner{_describe_no_owner(situation)}")
    return Explanation(
        queue, owner.name, reason or f"{queue} is still with {owner.name}: {_describe_stay(situation, queue, owner)}"
    )


def _describe_no_owner(situation: Situation) -> str:
    if situation.snapshot.must_release_all:
        return f": {_release_all_reason(situation)}"
    return (
        f" among the members: {describe_unmanaged(situation.snapshot.unmanaged_consumers)}"
        if situation.snapshot.unmanaged_consumers
        else ""
    )


def _release_all_reason(situation: Situation) -> str:
    return (
        "an older ConsumerGroup has the same consumer group"
        if situation.snapshot.is_duplicate
        else "the group is paused"
    )


def _describe_stay(situation: Situation, queue: Queue, owner: Holder) -> str:
    """Return why a queue has not moved, if not because of the strategy."""
    if situation.snapshot.spec is None:
        return "the group's spec is invalid, so the present assignment stays in force"
    if situation.snapshot.must_release_all:
        return f"{_release_all_reason(situation)}, so {owner.name} must release it"
    if queue not in situation.queues:
        return "the group no longer consumes it, so it is to be released"
    if not situation.counted_members:
        return "no member can take it over"
    pod = situation.pods.get(owner.name)
    is_owner = pod is not None and pod.holder == owner
    state = situation.member_states[owner.name] if is_owner else "missing"
    return f"that member is {state} and has not released it yet"


def _example_queues(situation: Situation) -> list[Queue]:
    """Return the first queue of each member; only the first queue in a Broadcasting group."""
    if situation.document.everyone is not None:
        return [*situation.document.everyone[:1]]
    examples: dict[Holder, Queue] = {}
    for queue, holder in sorted(situation.owners.items()):
        if queue in situation.queues:
            examples.setdefault(holder, queue)
    return list(examples.values())


def _strategy_reasons(situation: Situation, queues: Sequence[Queue]) -> dict[Queue, str]:
    """Return the strategy's explanations of the present owners, compared with the owners it would choose now."""
    desired = compute_desired_owners(situation)
    if desired.roster is None or not queues:
        return {}
    no_policy = (
        "the policy is missing or invalid, so the present assignment stays in force"
        if situation.snapshot.policy is None
        else ""
    )
    obstacle = (
        desired.problem.message if desired.problem else no_policy if not situation.snapshot.unmanaged_consumers else ""
    )
    if obstacle:
        return {queue: f"{queue} stays with {situation.owners[queue].name}: {obstacle}" for queue in queues}
    names = [*desired.roster.members]
    names_by_client: dict[str, str] = {}
    roster = desired.roster
    policy = situation.policy
    unmanaged = situation.snapshot.unmanaged_consumers or ()
    if unmanaged:
        ids = {name: situation.pods[name].client_id or name for name in situation.counted_members}
        names_by_client = {client: name for name, client in ids.items()}
        current = {queue: ids[holder.name] for queue, holder in situation.owners.items() if holder.name in ids}
        roster = Roster.of(situation.queues, [*names_by_client, *distinct_client_ids(unmanaged)], current)
        policy = PolicySpec()
        names = [names_by_client.get(client, client) for client in roster.members]
    indexes = {name: index for index, name in enumerate(names)}
    queue_owners = [situation.owners.get(queue) for queue in roster.queues]
    owners = np.array([indexes.get(holder.name, NO_OWNER) if holder else NO_OWNER for holder in queue_owners], np.int32)
    owner_names = {queue: holder.name for queue, holder in situation.owners.items()}
    explained = [queue for queue in queues if situation.owners[queue].name in indexes]
    strategy_options = resolve_options(policy, roster, measurements_of(situation))
    sentences = explain_all(policy.strategy, roster, owners, explained, strategy_options, present=owner_names)
    return dict(zip(explained, [_with_member_names(sentence, names_by_client) for sentence in sentences], strict=True))


def _with_member_names(sentence: str, names_by_client: Mapping[str, str]) -> str:
    """Replace client ids by member names, longest id first: an id may be a prefix of another one."""
    for client in sorted(names_by_client, key=len, reverse=True):
        sentence = sentence.replace(client, names_by_client[client])
    return sentence
