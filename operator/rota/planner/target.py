"""Desired owners of queues: the policy's strategy, applied to a roster."""

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
    """Return the owners that the policy's strategy wants; input that it cannot use is a ValueError."""
    return prepared(policy.strategy, resolve_options(policy, roster, inputs))(roster)


def share_with_unmanaged(roster: Roster, unmanaged: Collection[str], client_ids: Mapping[str, str]) -> Owners:
    """Return the share of our members while unmanaged consumers are in the group.

    Each unmanaged consumer computes Averagely by itself, over all client ids in order. Only if the operator does the
    same, with the client ids of our members at the broker, is no queue read twice. A member that is not in `client_ids`
    has its name as client id.
    """
    ours = {client_ids.get(name, name): index for index, name in enumerate(roster.members)}
    all_clients = Roster.of(roster.queues, [*ours, *distinct_client_ids(unmanaged)])
    own_indexes = [ours.get(client, NO_OWNER) for client in all_clients.members]
    owners_among_all = prepared(UNMANAGED_POLICY.strategy)(all_clients)  # indexes of clients, members or not
    return np.array(own_indexes, dtype=np.int32)[owners_among_all]


def distinct_client_ids(ids: Collection[str]) -> Iterator[str]:
    """Yield client ids as distinct roster members: the reference client counts an id twice if brokers list it twice.

    There, the first position of an id gets a share, and the shares of later positions have no owner. So a later
    position gets a name here that sorts right behind the first one, and that no consumer has.
    """
    occurrences = Counter[str]()
    for client in ids:
        yield client + "\0" * occurrences[client]
        occurrences[client] += 1


def resolve_options(policy: PolicySpec, roster: Roster, inputs: StrategyInputs) -> dict[str, Any]:
    """Return a policy's options as the strategy takes them: with this roster's members and queues."""
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
    """Return the limit of moves; while weights cannot be measured, one queue for each idle member."""
    budget = policy.budget.max_moves if policy.budget else None
    if inputs.queue_weights is not None:
        return budget
    members_with_queues = set(roster.owners) - {NO_OWNER}
    idle = len(roster.members) - len(members_with_queues)
    return idle if budget is None else min(idle, budget)


def _rooms_by_broker(brokers: Collection[BrokerRoom]) -> dict[str, str]:
    return {entry.broker: entry.room for entry in brokers}


def _configured_queues(members: Collection[ConfiguredMember], roster: Roster) -> dict[str, list[Queue]]:
    """Return the existing queues configured for each member; a configured range may be far wider."""
    by_run = {(run.topic, run.broker): roster.queues[run.start : run.stop] for run in roster.runs}
    configured: dict[str, list[Queue]] = {}
    for entry in members:
        if entry.index >= len(roster.members):  # the group has fewer members at present
            continue
        queues: list[Queue] = []
        for block in entry.queues:
            queues += _queues_in_range(block, by_run.get((block.topic, block.broker), ()))
        configured[roster.members[entry.index]] = queues
    return configured


def _queues_in_range(block: QueueRange, queues: Sequence[Queue]) -> Iterator[Queue]:
    """Yield the queues in a range; `queues` are neighbours, sorted by id."""
    for first, last in parse_spans(block.ids):
        start = bisect_left(queues, first, key=lambda queue: queue.id)
        yield from queues[start : bisect_right(queues, last, key=lambda queue: queue.id)]
