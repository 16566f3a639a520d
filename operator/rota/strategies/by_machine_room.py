"""ByMachineRoom: assigns only queues of brokers named `room@broker`, for the given rooms.

It is MACHINE_ROOM of RocketMQ's Java client.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from rota.model import NO_OWNER, Roster
from rota.strategies.arrays import Indices, Owners, blocks, indices_of_runs, no_owners


def by_machine_room(roster: Roster, *, rooms: Collection[str] = ()) -> Owners:
    """Give each member an equal block of a topic's queues in these rooms, and the rest one each to the first members.

    As in the reference, the members' own rooms do not count, and queues outside the rooms have no owner.
    """
    if not _is_list_of_names(rooms):
        raise ValueError("Option rooms must be a list of room names")
    chosen = set(rooms)
    owners = no_owners(len(roster.queues))
    runs_in_rooms = [run for run in roster.runs if room_of(run.broker) in chosen]
    for _, runs_of_topic in groupby(runs_in_rooms, key=attrgetter("topic")):
        indices = indices_of_runs(runs_of_topic)
        owners[indices] = _blocks_with_tail(len(indices), len(roster.members))
    return owners


def _is_list_of_names(option: object) -> bool:
    if isinstance(option, str) or not isinstance(option, Collection):
        return False
    return all(isinstance(name, str) for name in option)


def why_by_machine_room(
    roster: Roster, owners: Owners, queues: Sequence[int], *, rooms: Collection[str] = ()
) -> Iterator[str]:
    """Yield a sentence for each queue (an index): its broker's room, and the owner's place among the members."""
    for queue in queues:
        broker = roster.queues[queue].broker
        owner = owners[queue]
        room = room_of(broker)
        if room is None:
            yield f"broker {broker} names no room (as room@broker would)"
        elif owner == NO_OWNER:
            yield f"room {room} is not among the policy's rooms: {', '.join(rooms) or 'none'}"
        else:
            place = f"{roster.members[owner]} is member {owner + 1} of the {len(roster.members)} that share its queues"
            yield f"room {room} is in the policy, and {place} in blocks, topic by topic"


def room_of(broker: str) -> str | None:
    """Return the room in a broker's name; Java's split drops empty parts at the end, so `room@` names no room."""
    parts = broker.split("@")
    while parts and not parts[-1]:
        parts.pop()
    return parts[0] if len(parts) == 2 else None  # noqa: PLR2004 - room and broker


def _blocks_with_tail(queues: int, members: int) -> Indices:
    """Return each queue's member: blocks of equal size, then the last queues one each to the first members."""
    even = queues - queues % members
    return np.concatenate([blocks(even, members), np.arange(queues - even)])
