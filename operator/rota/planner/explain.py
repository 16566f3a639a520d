"""Explanations of queue ownership in a live group, for the operator's page and API: one sentence for each queue."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rota.model import NO_OWNER, Holder, Queue, Roster
from rota.planner.moves import compute_desired_owners, strategy_inputs_of
from rota.planner.situation import Situation
from rota.planner.status.problems import describe_unmanaged
from rota.planner.target import UNMANAGED_POLICY, distinct_client_ids, resolve_options
from rota.spec import PolicySpec
from rota.strategies import explain_all


class Explanation(NamedTuple):
    """The owner of a queue (None: no owner) and the sentence that explains it."""

    queue: Queue
    owner: str | None
    sentence: str


def explain_queues(situation: Situation, requested: Sequence[Queue]) -> list[Explanation]:
    """Explain these queues, or one queue of each member if none is requested; raise ValueError for an unknown queue."""
    queues = list(requested) or _example_queues(situation)
    explainable = _explainable_queues(situation)
    for queue in queues:
        if queue not in explainable:
            raise ValueError(f"There is no queue {queue} among the group's {len(explainable)}")
    if situation.document.is_broadcasting:
        sentence = "is read by every member: the group is Broadcasting"
        return [Explanation(queue, None, f"{queue} {sentence}") for queue in queues]
    consumed_and_owned = situation.owners.keys() & set(situation.queues)
    placed_by_strategy = [queue for queue in queues if queue in consumed_and_owned]
    reasons = _strategy_reasons(situation, placed_by_strategy)
    return [_explain_queue(situation, queue, reasons.get(queue, "")) for queue in queues]


def _explainable_queues(situation: Situation) -> set[Queue]:
    """Return the queues that can be explained: current ones, and former ones that are still in the document."""
    document = situation.document  # `everyone`: the queues of a Broadcasting group, which all members read
    explainable = {*situation.queues, *situation.owners, *document.releasing, *(document.everyone or ())}
    if situation.snapshot.must_release_all:  # then `situation.queues` is empty, so take the queues of the routes
        explainable |= situation.snapshot.routed_queues
    return explainable


def _explain_queue(situation: Situation, queue: Queue, reason: str) -> Explanation:
    """Explain a queue; `reason` is the strategy's explanation, empty if no strategy keeps it with its owner."""
    owner = situation.owners.get(queue)
    release = situation.document.releasing.get(queue)
    if release:
        successor = f"{release.to} gets it next" if release.to else "no member gets it next"
        return Explanation(queue, None, f"{queue} is being handed over: {release.holder.name} releases it, {successor}")
    if owner is None:
        return Explanation(queue, None, f"{queue} has no owner{_describe_no_owner(situation)}")
    if reason:
        return Explanation(queue, owner.name, reason)
    stay = _describe_stay(situation, queue, owner)
    return Explanation(queue, owner.name, f"{queue} is still with {owner.name}: {stay}")


def _describe_no_owner(situation: Situation) -> str:
    if situation.snapshot.must_release_all:
        return f": {_release_all_reason(situation)}"
    if situation.snapshot.unmanaged_consumers:
        return f" among the members: {describe_unmanaged(situation.snapshot.unmanaged_consumers)}"
    return ""


def _release_all_reason(situation: Situation) -> str:
    if situation.snapshot.is_duplicate:
        return "an older ConsumerGroup has the same consumer group"
    return "the group is paused"


def _describe_stay(situation: Situation, queue: Queue, owner: Holder) -> str:
    """Return why a queue stays with its owner although no strategy keeps it there."""
    if situation.snapshot.spec is None:
        return "the group's spec is invalid, so the present assignment stays in force"
    if situation.snapshot.must_release_all:
        return f"{_release_all_reason(situation)}, so {owner.name} must release it"
    if queue not in situation.queues:
        return "the group no longer consumes it, so it is to be released"
    if not situation.counted_members:
        return "no member can take it over"
    pod = situation.pods.get(owner.name)
    is_same_pod = pod is not None and pod.holder == owner  # a recreated pod of this name is not the owner
    state = situation.member_states[owner.name] if is_same_pod else "missing"
    return f"that member is {state} and has not released it yet"


def _example_queues(situation: Situation) -> list[Queue]:
    """Return the first queue of each member; only the first queue in a Broadcasting group."""
    if situation.document.everyone is not None:
        return [*situation.document.everyone[:1]]
    examples: dict[Holder, Queue] = {}
    consumed = set(situation.queues)
    for queue, holder in sorted(situation.owners.items()):
        if queue in consumed:
            examples.setdefault(holder, queue)
    return list(examples.values())


def _strategy_reasons(situation: Situation, queues: Sequence[Queue]) -> dict[Queue, str]:
    """Return why each queue has its owner: the strategy's reason, or the obstacle that keeps it from deciding."""
    desired = compute_desired_owners(situation)
    if desired.roster is None or not queues:
        return {}
    obstacle = desired.problem.message if desired.problem else ""
    if not desired.problem and situation.snapshot.policy is None and not situation.snapshot.unmanaged_consumers:
        obstacle = "the policy is missing or invalid, so the present assignment stays in force"
    if obstacle:  # at present no strategy determines the owners
        return {queue: f"{queue} stays with {situation.owners[queue].name}: {obstacle}" for queue in queues}
    if situation.snapshot.unmanaged_consumers:
        return _reasons_with_unmanaged(situation, queues)
    return _reasons_of_policy(situation, queues, situation.policy, desired.roster, desired.roster.members)


def _reasons_with_unmanaged(situation: Situation, queues: Sequence[Queue]) -> dict[Queue, str]:
    """Explain owners by the strategy of unmanaged consumers: it runs over client ids; replace these by names."""
    ids = situation.client_ids
    unmanaged = distinct_client_ids(situation.snapshot.unmanaged_consumers or ())
    names_by_client = dict(zip(ids.values(), ids, strict=True))
    current = {queue: ids[holder.name] for queue, holder in situation.owners.items() if holder.name in ids}
    roster = Roster.of(situation.queues, [*names_by_client, *unmanaged], current)
    names = [names_by_client.get(client, client) for client in roster.members]
    reasons = _reasons_of_policy(situation, queues, UNMANAGED_POLICY, roster, names)
    return {queue: _with_member_names(sentence, names_by_client) for queue, sentence in reasons.items()}


def _reasons_of_policy(
    situation: Situation, queues: Sequence[Queue], policy: PolicySpec, roster: Roster, names: Sequence[str]
) -> dict[Queue, str]:
    """Return a strategy's explanations of the present owners; `names` has the member name of each roster member."""
    indexes = {name: index for index, name in enumerate(names)}
    owner_names = {queue: holder.name for queue, holder in situation.owners.items()}  # not all are in the roster
    owner_indexes = [indexes.get(owner_names.get(queue, ""), NO_OWNER) for queue in roster.queues]
    owners = np.array(owner_indexes, np.int32)
    explained = [queue for queue in queues if owner_names[queue] in indexes]
    strategy_options = resolve_options(policy, roster, strategy_inputs_of(situation))
    sentences = explain_all(policy.strategy, roster, owners, explained, strategy_options, present=owner_names)
    return dict(zip(explained, sentences, strict=True))


def _with_member_names(sentence: str, names_by_client: Mapping[str, str]) -> str:
    """Replace client ids by member names, longest id first: an id may be a prefix of another one."""
    for client in sorted(names_by_client, key=len, reverse=True):
        sentence = sentence.replace(client, names_by_client[client])
    return sentence
