"""ByMachineRoom: only queues of brokers named `room@broker` in the given rooms. The reference's MACHINE_ROOM."""

from collections.abc import Collection

import numpy as np

from rota.model import Roster, Run
from rota.strategies.arrays import Owners, blocks, nobody, of_runs


def by_machine_room(roster: Roster, *, rooms: Collection[str] = ()) -> Owners:
    """Give each member a block of the queues in these rooms; what is left over goes from the tail, one each.

    As in the reference the members' own rooms do not count, and queues outside the rooms are nobody's.
    """
    if isinstance(rooms, str) or not all(isinstance(room, str) for room in rooms):
        raise ValueError("Option rooms must be a list of room names")
    wanted = set(rooms)
    owners = nobody(len(roster.queues))
    for kept in _by_topic([run for run in roster.runs if room_of(run.broker) in wanted]):
        owners[kept] = _tailed(len(kept), len(roster.members))
    return owners


def room_of(broker: str) -> str | None:
    """Return the room in a broker's name; Java's split drops empty parts at the end, and so `room@` names no room."""
    parts = broker.split("@")
    while parts and not parts[-1]:
        parts.pop()
    return parts[0] if len(parts) == 2 else None  # noqa: PLR2004 - room and broker


def _by_topic(runs: list[Run]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    topics: dict[str, list[Run]] = {}
    for run in runs:
        topics.setdefault(run.topic, []).append(run)
    return [of_runs(of_topic) for of_topic in topics.values()]


def _tailed(queues: int, members: int) -> Owners:
    even = queues - queues % members
    return np.concatenate([blocks(even, members), np.arange(queues - even, dtype=np.int32)])
