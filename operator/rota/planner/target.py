"""Desired owners of queues: the policy's strategy, applied to a roster.

`moves.py` calls these functions for each plan; so do `rota plan` and the pipeline's synthetic histories. A roster has
sorted queues and members; owners are arrays with a member's index for each queue (`rota.model.Roster`).
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rota.model import NO_OWNER, Queue, Roster
from rota.spec import BrokerRoom, ConfiguredMember, PolicySpec, QueueRange
from rota.spec.rules import parse_spans
from rota.strategies import prepared
from rota.strategies.arrays import Owners

# The policy of unmanaged consumers: while a group has some, the operator must compute the same owners as they do.
UNMANAGED_POLICY = PolicySpec(strategy="Averagely")


class StrategyInputs(NamedTuple):
    """What strategies use besides the roster: machine rooms of members, and measured weights."""

    rooms_by_member: Mapping[str, str] = {}
    queue_weights: Mapping[Queue, float] | None = {}  # None: could not be measured now
    member_weights: Mapping[str, float] = {}


def compute_owners(policy: PolicySpec, roster: Roster, inputs: StrategyInputs = StrategyInputs()) -> Owners:  # noqa: B008 - a value
    """Return the owners that the policy's strategy wants; raise ValueError for input that it cannot use."""
    strategy = prepared(policy.strategy, resolve_options(policy, roster, inputs))
    return strategy(roster)


def share_with_unmanaged(roster: Roster, unmanaged: Collection[str], client_ids: Mapping[str, str]) -> Owners:
    """Return the share of our members while unmanaged consumers are in the group.

    Each unmanaged consumer computes Averagely by itself, over all client ids in order. Only if the operator does the
    same, with the client ids of our members at the broker, is no queue read twice. A member that is not in `client_ids`
    has its name as client id.
    """
    members_by_id = {client_ids.get(name, name): index for index, name in enumerate(roster.members)}
    # `Roster.of` sorts the client ids, as the clients do.
    all_clients = Roster.of(roster.queues, [*members_by_id, *distinct_client_ids(unmanaged)])
    averagely = prepared(UNMANAGED_POLICY.strategy)
    client_by_queue = averagely(all_clients)  # indexes in `all_clients.members`
    member_by_client = [members_by_id.get(client, NO_OWNER) for client in all_clients.members]
    return np.array(member_by_client, dtype=np.int32)[client_by_queue]


def distinct_client_ids(ids: Collection[str]) -> Iterator[str]:
    """Yield client ids as distinct roster members.

    If brokers list an id twice, the reference client counts two clients. The first one gets a share; the queues of the
    second one have no consumer. To compute the same owners, a repeated id becomes a name of its own: the id and a NUL,
    which sorts right after the id, and which no consumer has.
    """
    occurrences = Counter[str]()
    for client in ids:
        yield client + "\0" * occurrences[client]
        occurrences[client] += 1


def resolve_options(policy: PolicySpec, roster: Roster, inputs: StrategyInputs) -> dict[str, Any]:
    """Return a policy's options in the form that its strategy takes, for this roster's members and queues."""
    configured = policy.options
    match policy.strategy:
        case "ByConfig" if configured.by_config:
            chosen: dict[str, Any] = {"members": _configured_queues(configured.by_config.members, roster)}
        case "ByMachineRoom" if configured.by_machine_room:
            chosen = {"rooms": configured.by_machine_room.rooms}
        case "MachineRoomNearby" if configured.machine_room_nearby:
            nearby = configured.machine_room_nearby
            rooms = _rooms_by_broker(nearby.brokers)
            chosen = {"inner": nearby.inner, "queueRooms": rooms, "memberRooms": inputs.rooms_by_member}
        case "ConsistentHash" if configured.consistent_hash:
            chosen = {"virtualNodes": configured.consistent_hash.virtual_nodes}
        case "Balanced":
            chosen = {
                "queueWeights": inputs.queue_weights or {},
                "memberWeights": inputs.member_weights,
                "queueRooms": _rooms_by_broker(configured.balanced.brokers if configured.balanced else ()),
                "memberRooms": inputs.rooms_by_member,
                "maxMoves": _max_moves(policy, roster, inputs),
            }
        case "Custom" if configured.custom:
            chosen = {"name": configured.custom.name, "options": configured.custom.options}
        case _:
            chosen = {}
    return chosen


def _max_moves(policy: PolicySpec, roster: Roster, inputs: StrategyInputs) -> int | None:
    """Return how many queues Balanced may move; None: any number.

    While weights cannot be measured, no move is known to help. Then at most as many moves are allowed as there are idle
    members, so that each of them gets a queue.
    """
    budget = policy.budget.max_moves if policy.budget else None
    if inputs.queue_weights is not None:
        return budget
    members_with_queues = set(roster.owners) - {NO_OWNER}
    idle = len(roster.members) - len(members_with_queues)
    return idle if budget is None else min(idle, budget)


def _rooms_by_broker(brokers: Collection[BrokerRoom]) -> dict[str, str]:
    return {entry.broker: entry.room for entry in brokers}


def _configured_queues(members: Collection[ConfiguredMember], roster: Roster) -> dict[str, list[Queue]]:
    """Return each member's configured queues; ranges may also name queues that do not exist, which are left out."""
    # A run has all queues of one topic on one broker.
    by_topic_and_broker = {(run.topic, run.broker): roster.queues[run.start : run.stop] for run in roster.runs}
    configured: dict[str, list[Queue]] = {}
    for entry in members:
        if entry.index >= len(roster.members):  # the group has fewer members at present
            continue
        queues: list[Queue] = []
        for block in entry.queues:
            queues += _queues_in_range(block, by_topic_and_broker.get((block.topic, block.broker), ()))
        configured[roster.members[entry.index]] = queues
    return configured


def _queues_in_range(block: QueueRange, queues: Sequence[Queue]) -> Iterator[Queue]:
    """Yield those of `queues` in a range; all are of one topic and broker, sorted by id."""
    for first, last in parse_spans(block.ids):
        start = bisect_left(queues, first, key=lambda queue: queue.id)
        yield from queues[start : bisect_right(queues, last, key=lambda queue: queue.id)]
