"""What the policy wants: who shall own what."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rota.model import NOBODY, Queue, Roster
from rota.spec import BrokerRoom, ConfiguredMember, PolicySpec, QueueRange
from rota.spec.rules import spans
from rota.strategies import prepared
from rota.strategies.arrays import Owners


class Measured(NamedTuple):
    """What is known of queues and members besides their names."""

    member_rooms: Mapping[str, str] = {}
    queue_weights: Mapping[Queue, float] | None = {}  # None: could not be measured now
    member_weights: Mapping[str, float] = {}


def target(policy: PolicySpec, roster: Roster, measured: Measured = Measured()) -> Owners:  # noqa: B008 - a value
    """Return the owners that the policy's strategy wants; what it cannot work with is a sentence."""
    return prepared(policy.strategy, options(policy, roster, measured))(roster)


def beside_foreigners(roster: Roster, foreigners: Collection[str], client_ids: Mapping[str, str]) -> Owners:
    """Return our own members' share while consumers that are not Rota's are in the group.

    Those compute Averagely over all client ids in their order, each alone; only if we do the same, with the ids under
    which our members are known at the broker, is no queue read twice.
    """
    ours = {client_ids.get(name, name): index for index, name in enumerate(roster.members)}
    everybody = Roster.of(roster.queues, [*ours, *told_apart(foreigners)])
    back = [ours.get(client, NOBODY) for client in everybody.members]
    return np.array(back, dtype=np.int32)[prepared("Averagely")(everybody)]


def told_apart(ids: Collection[str]) -> Iterator[str]:
    """Yield ids as a roster can have them: those that brokers tell of twice are counted twice by the reference.

    There a share goes to the first of an id's places, and what would be a later one's is nobody's; so here a later one
    gets a name right behind the first, that nobody has.
    """
    times = Counter[str]()
    for client in ids:
        yield client + "\0" * times[client]
        times[client] += 1


def options(policy: PolicySpec, roster: Roster, measured: Measured) -> dict[str, Any]:
    """Say a policy's options as the strategy takes them: with this roster's members and queues."""
    given = policy.options
    match policy.strategy:
        case "ByConfig" if given.by_config:
            chosen: dict[str, Any] = {"members": _configured(given.by_config.members, roster)}
        case "ByMachineRoom" if given.by_machine_room:
            chosen = {"rooms": given.by_machine_room.rooms}
        case "MachineRoomNearby" if given.machine_room_nearby:
            rooms = _rooms(given.machine_room_nearby.brokers)
            chosen = {
                "inner": given.machine_room_nearby.inner,
                "queueRooms": rooms,
                "memberRooms": measured.member_rooms,
            }
        case "ConsistentHash" if given.consistent_hash:
            chosen = {"virtualNodes": given.consistent_hash.virtual_nodes}
        case "Balanced":
            chosen = {
                "queueWeights": measured.queue_weights or {},
                "memberWeights": measured.member_weights,
                "queueRooms": _rooms(given.balanced.brokers if given.balanced else ()),
                "memberRooms": measured.member_rooms,
                "maxMoves": _most_moves(policy, roster, measured),
            }
        case "Custom" if given.custom:
            chosen = {"name": given.custom.name, "options": given.custom.options}
        case _:
            chosen = {}
    return chosen


def _most_moves(policy: PolicySpec, roster: Roster, measured: Measured) -> int | None:
    """While the weights cannot be measured nothing is evened out by guesses: only idle members are fed."""
    budget = policy.budget.max_moves if policy.budget else None
    if measured.queue_weights is not None:
        return budget
    idle = len(roster.members) - len(set(roster.owners) - {NOBODY})
    return idle if budget is None else min(idle, budget)


def _rooms(brokers: Collection[BrokerRoom]) -> dict[str, str]:
    return {entry.broker: entry.room for entry in brokers}


def _configured(members: Collection[ConfiguredMember], roster: Roster) -> dict[str, list[Queue]]:
    """Say which of the queues that there are each member shall have: a range may be far wider."""
    there = {(run.topic, run.broker): roster.queues[run.start : run.stop] for run in roster.runs}
    return {
        roster.members[entry.index]: [
            queue for some in entry.queues for queue in _named(some, there.get((some.topic, some.broker), ()))
        ]
        for entry in members
        if entry.index < len(roster.members)
    }


def _named(some: QueueRange, there: Sequence[Queue]) -> Iterator[Queue]:
    """Yield those of neighbouring queues, sorted by id, that a range names."""
    for first, last in spans(some.ids):
        start = bisect_left(there, first, key=lambda queue: queue.id)
        yield from there[start : bisect_right(there, last, key=lambda queue: queue.id)]
