"""MachineRoomNearby: the queues of each machine room go to the members in this room, by another strategy, `inner`.

It is MACHINE_ROOM_NEARBY of RocketMQ's Java client ("the reference" below). A queue is in its broker's room.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rota.model import NO_OWNER, Queue, Roster, Run, java_sort_key
from rota.strategies import input_checks
from rota.strategies.arrays import Owners, current_owners, indices_of_runs, no_owners
from rota.strategies.averagely import averagely
from rota.strategies.custom import check_owners


def machine_room_nearby(
    roster: Roster,
    *,
    inner: Callable[[Roster], Owners] = averagely,
    queueRooms: Mapping[str, str],
    memberRooms: Mapping[str, str],
) -> Owners:
    """Let `inner` assign each room's queues to the room's members; all members share a room that has no member.

    Rooms that have no member are assigned separately, each from the start. So the queues that are left over after an
    even division go to the same members each time: with Averagely to those with the lowest names.
    """
    by_room = _runs_by_room(roster, input_checks.check_texts("Option queueRooms", queueRooms))
    members_by_room = _members_by_room(roster, input_checks.check_texts("Option memberRooms", memberRooms))
    all_members = list(range(len(roster.members)))
    owners = no_owners(len(roster.queues))
    for room, runs in by_room.items():
        members = members_by_room.get(room, all_members)
        original_indexes = np.array([*members, NO_OWNER])  # the index NO_OWNER (-1) selects the last entry
        room_roster = _restrict(roster, runs, members)
        room_owners = check_owners("The inner strategy of MachineRoomNearby", inner(room_roster), room_roster)
        owners[indices_of_runs(runs)] = original_indexes[room_owners]
    return owners


def why_machine_room_nearby(
    roster: Roster,
    owners: Owners,
    queues: Sequence[int],
    *,
    inner: Callable[[Roster, Owners, Sequence[int]], Iterator[str]],
    queueRooms: Mapping[str, str],
    memberRooms: Mapping[str, str],
) -> Iterator[str]:
    """Yield a sentence for each queue (an index): its room and that room's members, then the reason from `inner`."""
    members_by_room = _members_by_room(roster, memberRooms)
    all_members = list(range(len(roster.members)))
    reasons: dict[int, str] = {}
    for room, runs in _runs_by_room(roster, queueRooms).items():
        members = members_by_room.get(room, all_members)
        room_queues = indices_of_runs(runs)
        explained = np.flatnonzero(np.isin(room_queues, queues))  # indices in `room_queues`
        room_owners = _index_map(roster, members)[owners[room_queues]]
        inner_reasons = inner(_restrict(roster, runs, members), room_owners, explained.tolist())
        own_members = f"has {len(members)} of {len(all_members)} members; among them"
        sharing = own_members if room in members_by_room else "has no member; among all"
        for queue, reason in zip(room_queues[explained].tolist(), inner_reasons, strict=True):
            reasons[queue] = f"its room {room} {sharing} {reason}"
    yield from (reasons[queue] for queue in queues)


def nearby_sort_key(home: str, rooms: Mapping[str, str], queue: Queue) -> tuple[bool, bytes]:
    """Return the key by which the reference sorts the queues of a member in room `home`: this room first.

    `strategies.allocate` returns each member's queues in this order.
    """
    room = rooms[queue.broker]
    return room != home, java_sort_key(room)


def _runs_by_room(roster: Roster, rooms: Mapping[str, str]) -> dict[str, list[Run]]:
    """Return the runs of each room; a run is the adjacent queues of one topic on one broker."""
    runs: dict[str, list[Run]] = {}
    for run in roster.runs:
        room = rooms.get(run.broker)
        if not room:
            raise ValueError(
                f"Queue {roster.queues[run.start]} has no room: give broker {run.broker} one in queueRooms"
            )
        runs.setdefault(room, []).append(run)
    return runs


def _members_by_room(roster: Roster, rooms: Mapping[str, str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for index, member in enumerate(roster.members):
        room = rooms.get(member)
        if not room:
            raise ValueError(f"Member {member} has no room; label its node, or pass --rooms to rota plan")
        members.setdefault(room, []).append(index)
    return members


def _restrict(roster: Roster, runs: Sequence[Run], members: Sequence[int]) -> Roster:
    """Return a roster of these runs and members only; their order stays, so `Roster.of` need not sort them again."""
    adjacent_runs: list[Run] = []
    queues: list[Queue] = []
    start = 0
    for run in runs:
        queues += roster.queues[run.start : run.stop]
        stop = start + run.stop - run.start
        adjacent_runs.append(run._replace(start=start, stop=stop))
        start = stop
    present_owners = current_owners(roster)[indices_of_runs(runs)]
    restricted_owners = _index_map(roster, members)[present_owners]
    return Roster(
        tuple(queues),
        tuple(roster.members[index] for index in members),
        array("i", restricted_owners.tobytes()),
        tuple(adjacent_runs),
    )


def _index_map(roster: Roster, members: Sequence[int]) -> Owners:
    """Return for each member of the roster its index among `members`, or NO_OWNER.

    One more entry follows, with NO_OWNER: the index NO_OWNER, -1, selects it.
    """
    indexes = no_owners(len(roster.members) + 1)
    indexes[list(members)] = np.arange(len(members))
    return indexes
