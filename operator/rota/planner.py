"""The decision: who shall own what, without I/O or clock."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rota.documents import ids_of
from rota.model import NOBODY, Queue, Roster
from rota.spec import BrokerRoom, ConfiguredMember, PolicySpec, QueueRange
from rota.strategies import prepared
from rota.strategies.arrays import Owners


def target(policy: PolicySpec, roster: Roster, member_rooms: Mapping[str, str] | None = None) -> Owners:
    """Return the owners that the policy's strategy wants; what it cannot work with is a sentence."""
    return prepared(policy.strategy, _options(policy, roster, member_rooms or {}))(roster)


def beside_foreigners(roster: Roster, foreigners: Collection[str], client_ids: Mapping[str, str]) -> Owners:
    """Return our own members' share while consumers that are not Rota's are in the group.

    Those compute Averagely over all client ids in their order, each alone; only if we do the same, with the ids under
    which our members are known at the broker, is no queue read twice.
    """
    ours = {client_ids.get(name, name): index for index, name in enumerate(roster.members)}
    everybody = Roster.of(roster.queues, [*ours, *foreigners])
    back = [ours.get(client, NOBODY) for client in everybody.members]
    return np.array(back, dtype=np.int32)[prepared("Averagely")(everybody)]


def _options(policy: PolicySpec, roster: Roster, member_rooms: Mapping[str, str]) -> dict[str, Any]:
    """Say a policy's options as the strategy takes them: with this roster's members and queues."""
    given = policy.options
    match policy.strategy:
        case "ByConfig" if given.by_config:
            options: dict[str, Any] = {"members": _configured(given.by_config.members, roster)}
        case "ByMachineRoom" if given.by_machine_room:
            options = {"rooms": given.by_machine_room.rooms}
        case "MachineRoomNearby" if given.machine_room_nearby:
            rooms = _rooms(given.machine_room_nearby.brokers)
            options = {"inner": given.machine_room_nearby.inner, "queueRooms": rooms, "memberRooms": member_rooms}
        case "ConsistentHash" if given.consistent_hash:
            options = {"virtualNodes": given.consistent_hash.virtual_nodes}
        case "Balanced":
            rooms = _rooms(given.balanced.brokers if given.balanced else ())
            most = policy.budget.max_moves if policy.budget else None
            options = {"queueRooms": rooms, "memberRooms": member_rooms, "maxMoves": most}
        case "Custom" if given.custom:
            options = {"name": given.custom.name, "options": given.custom.options}
        case _:
            options = {}
    return options


def _rooms(brokers: Collection[BrokerRoom]) -> dict[str, str]:
    return {entry.broker: entry.room for entry in brokers}


def _configured(members: Collection[ConfiguredMember], roster: Roster) -> dict[str, list[Queue]]:
    return {
        roster.members[entry.index]: [queue for some in entry.queues for queue in _named(some)]
        for entry in members
        if entry.index < len(roster.members)
    }


def _named(some: QueueRange) -> list[Queue]:
    return [Queue(some.topic, some.broker, number) for number in ids_of(some.ids)]
