"""The strategy library: who shall own which queue.

A strategy is a total, deterministic function from a roster to owners. There are two ways in:
`STRATEGIES[name](roster, **options)` answers an int32 array over `roster.queues` (-1: nobody); `allocate(...)` takes
and gives plain names and tuples.
"""

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rota.model import Present, Queue, Roster
from rota.strategies.averagely import averagely, averagely_by_circle
from rota.strategies.balanced import balanced
from rota.strategies.by_config import by_config
from rota.strategies.by_machine_room import by_machine_room
from rota.strategies.consistent_hash import consistent_hash
from rota.strategies.custom import Strategy, custom
from rota.strategies.machine_room_nearby import machine_room_nearby, nearest_first
from rota.strategies.sticky import sticky

STRATEGIES: dict[str, Strategy] = {
    "Averagely": averagely,
    "AveragelyByCircle": averagely_by_circle,
    "ByConfig": by_config,
    "ByMachineRoom": by_machine_room,
    "MachineRoomNearby": machine_room_nearby,
    "ConsistentHash": consistent_hash,
    "Sticky": sticky,
    "Balanced": balanced,
    "Custom": custom,
}

REFERENCE_NAMES = {
    "AVG": "Averagely",
    "AVG_BY_CIRCLE": "AveragelyByCircle",
    "CONFIG": "ByConfig",
    "MACHINE_ROOM": "ByMachineRoom",
    "MACHINE_ROOM_NEARBY": "MachineRoomNearby",
    "CONSISTENT_HASH": "ConsistentHash",
}


def named(name: str) -> str:
    """Return the strategy's name as policies spell it; the reference client's names are understood too."""
    known = REFERENCE_NAMES.get(name, name)
    if known not in STRATEGIES:
        raise ValueError(f"There is no strategy {name!r}: choose one of {', '.join(STRATEGIES)}")
    return known


def prepared(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """Return a function of the roster alone: the strategy with its options, which are checked by name."""
    strategy = STRATEGIES[named(name)]
    given = dict(options or {})
    if strategy is machine_room_nearby:
        inner = given.pop("inner", "Averagely")
        given["inner"] = inner if callable(inner) else prepared(inner, given.pop("innerOptions", None))
    parameters = list(inspect.signature(strategy).parameters.values())[1:]
    for option in given:
        if option not in {parameter.name for parameter in parameters}:
            has = ", ".join(parameter.name for parameter in parameters) or "none"
            raise ValueError(f"Strategy {named(name)} has no option {option} (it has: {has})")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in given:
            raise ValueError(f"Strategy {named(name)} needs the option {parameter.name}")
    return partial(strategy, **given)


def allocate(
    strategy: str,
    queues: Iterable[tuple[str, str, int]],
    members: Iterable[str],
    *,
    options: Mapping[str, Any] | None = None,
    current: Present | None = None,
) -> dict[str, list[Queue]]:
    """Return every member's queues, in the reference client's order.

    >>> allocate("AVG", [("orders", "broker-a", n) for n in range(3)], ["m1", "m2"])["m2"]
    [Queue(topic='orders', broker='broker-a', id=2)]
    """
    roster = Roster.of(queues, members, current)
    given = dict(options or {})
    if named(strategy) == "ByConfig" and "queues" in given:
        return _one_list_for_all(roster, given)
    shares = roster.assignment(prepared(strategy, given)(roster).tolist())
    if named(strategy) == "MachineRoomNearby":
        for member, share in shares.items():
            share.sort(key=partial(nearest_first, given["memberRooms"][member], given["queueRooms"]))
    return shares


def _one_list_for_all(roster: Roster, options: Mapping[str, Any]) -> dict[str, list[Queue]]:
    """Answer as the reference's CONFIG does: the same list to everybody, which is no assignment and no owners array."""
    if set(options) != {"queues"}:
        raise ValueError("Strategy ByConfig takes either the option queues (one list for all) or members, not both")
    listed = [Queue(*queue) for queue in options["queues"]]
    return {member: list(listed) for member in roster.members}
