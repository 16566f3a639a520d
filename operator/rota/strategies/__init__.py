"""The strategy library: which member should own which queue, and why.

A strategy is a deterministic function. Its input is a roster (`rota.model.Roster`: the queues, the members that may own
them, and the present owners), its result an owner for each queue. The planner and tools call it in three ways:

- `STRATEGIES[name](roster, **options)` returns an int32 array over `roster.queues`: a member's index; -1: no owner;
- `allocate(...)` takes and returns plain names and tuples;
- `explain(...)` returns a sentence with the reason for a queue's owner.

"The reference" in this package is RocketMQ's Java client: the strategies in REFERENCE_NAMES give the same owners.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat, starmap
from typing import Any

from rota.garbage_collection import paused_garbage_collection
from rota.model import PresentOwners, Queue, Roster
from rota.strategies import input_checks
from rota.strategies.arrays import Owners, index_by_item
from rota.strategies.averagely import averagely, averagely_by_circle, why_averagely, why_averagely_by_circle
from rota.strategies.balanced import balanced, why_balanced
from rota.strategies.by_config import by_config, why_by_config
from rota.strategies.by_machine_room import by_machine_room, why_by_machine_room
from rota.strategies.consistent_hash import consistent_hash, why_consistent_hash
from rota.strategies.custom import Strategy, custom, why_custom
from rota.strategies.machine_room_nearby import machine_room_nearby, nearby_sort_key, why_machine_room_nearby
from rota.strategies.phrases import NO_PREVIOUS_OWNER, describe_change
from rota.strategies.sticky import sticky, why_sticky


def nearby(
    roster: Roster,
    *,
    inner: str | Strategy = "Averagely",
    innerOptions: Mapping[str, Any] | None = None,
    queueRooms: Mapping[str, str],
    memberRooms: Mapping[str, str],
) -> Owners:
    """Apply the strategy `inner`, a name or a function, to each machine room separately."""
    if callable(inner) and innerOptions is not None:
        raise ValueError("Option innerOptions requires option inner to be a strategy's name")
    strategy = inner if callable(inner) else prepared(inner, innerOptions)
    return machine_room_nearby(roster, inner=strategy, queueRooms=queueRooms, memberRooms=memberRooms)


STRATEGIES: dict[str, Strategy] = {
    "Averagely": averagely,
    "AveragelyByCircle": averagely_by_circle,
    "ByConfig": by_config,
    "ByMachineRoom": by_machine_room,
    "MachineRoomNearby": nearby,
    "ConsistentHash": consistent_hash,
    "Sticky": sticky,
    "Balanced": balanced,
    "Custom": custom,
}

# Functions of roster, owners, queues (as indices) and the strategy's options; each yields a reason for each queue.
REASONS: dict[str, Callable[..., Iterator[str]]] = {
    "Averagely": why_averagely,
    "AveragelyByCircle": why_averagely_by_circle,
    "ByConfig": why_by_config,
    "ByMachineRoom": why_by_machine_room,
    "MachineRoomNearby": why_machine_room_nearby,
    "ConsistentHash": why_consistent_hash,
    "Sticky": why_sticky,
    "Balanced": why_balanced,
    "Custom": why_custom,
}

REFERENCE_NAMES = {
    "AVG": "Averagely",
    "AVG_BY_CIRCLE": "AveragelyByCircle",
    "CONFIG": "ByConfig",
    "MACHINE_ROOM": "ByMachineRoom",
    "MACHINE_ROOM_NEARBY": "MachineRoomNearby",
    "CONSISTENT_HASH": "ConsistentHash",
}


def named(name: object) -> str:
    """Return the strategy's name as policies spell it; the reference client's names are accepted, too."""
    own_name = REFERENCE_NAMES.get(name, name) if isinstance(name, str) else ""
    if own_name not in STRATEGIES:
        raise ValueError(f"Unknown strategy {name!r}; choose one of {', '.join(STRATEGIES)}")
    return own_name


def prepared(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """Return the strategy with its options, as a function of the roster alone; raise ValueError for wrong options."""
    strategy = STRATEGIES[named(name)]
    chosen = dict(input_checks.check_mapping("The options", options))
    if strategy is nearby:  # check the inner strategy's options here, before a roster exists
        inner = chosen.pop("inner", "Averagely")
        chosen["inner"] = inner if callable(inner) else prepared(inner, chosen.pop("innerOptions", None))
    _roster, *parameters = inspect.signature(strategy).parameters.values()
    known_options = [parameter.name for parameter in parameters]
    for option in chosen:
        if option not in known_options:
            known = ", ".join(known_options) or "none"
            raise ValueError(f"Strategy {named(name)} has no option {option} (it has: {known})")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in chosen:
            raise ValueError(f"Strategy {named(name)} needs the option {parameter.name}")
    return partial(strategy, **chosen)


def allocate(
    strategy: str,
    queues: Iterable[tuple[str, str, int]] | None,
    members: Iterable[str] | None,
    *,
    options: Mapping[str, Any] | None = None,
    current: PresentOwners | None = None,
) -> dict[str, list[Queue]]:
    """Return every member's queues, in the reference client's order.

    >>> allocate("AVG", [("orders", "broker-a", n) for n in range(3)], ["m1", "m2"])["m2"]
    [Queue(topic='orders', broker='broker-a', id=2)]
    """
    with paused_garbage_collection():
        roster = Roster.of(
            input_checks.check_queues("The list of queues", () if queues is None else queues),
            input_checks.check_names("The list of members", () if members is None else members),
            input_checks.check_texts("The mapping of present owners", current),
        )
    chosen = dict(input_checks.check_mapping("The options", options))
    if named(strategy) == "ByConfig" and "queues" in chosen:
        return _one_list_for_all(roster, chosen)
    queues_by_member = roster.assignment(prepared(strategy, chosen)(roster).tolist())
    if named(strategy) == "MachineRoomNearby":
        for member, owned in queues_by_member.items():
            owned.sort(key=partial(nearby_sort_key, chosen["memberRooms"][member], chosen["queueRooms"]))
    return queues_by_member


def explain(
    strategy: str, roster: Roster, owners: Owners, queue: tuple[str, str, int], options: Mapping[str, Any] | None = None
) -> str:
    """Return a sentence with the reason for a queue's owner; `owners` is the result of the strategy.

    >>> roster = Roster.of([("orders", "broker-a", n) for n in range(3)], ["m1", "m2"])
    >>> explain("Averagely", roster, averagely(roster), ("orders", "broker-a", 2))
    'orders/broker-a/2 goes to m2: m2 is member 2 of 2, whose block of orders is broker-a/2'
    """
    return explain_all(strategy, roster, owners, [queue], options)[0]


def explain_all(
    strategy: str,
    roster: Roster,
    owners: Owners,
    queues: Iterable[tuple[str, str, int]],
    options: Mapping[str, Any] | None = None,
    *,
    present: Mapping[Queue, str] | None = None,
) -> list[str]:
    """Return the sentence that `explain` returns, for each of these queues.

    The strategy runs again, since the reasons are those of its own result; if `owners` differ, the sentence says so.
    `present` has the owners that the roster was made from, including owners that are no longer members.
    """
    index_by_queue = index_by_item(roster.queues)
    indices: list[int] = []
    for queue in starmap(Queue, queues):
        if queue not in index_by_queue:
            raise ValueError(f"There is no queue {queue} among these {len(index_by_queue)}")
        indices.append(index_by_queue[queue])
    # Options are used twice below, and an iterator of queues could be read once only.
    if named(strategy) == "ByConfig" and options and isinstance(options.get("members"), Mapping):
        options = {**options, "members": {member: list(queues) for member, queues in options["members"].items()}}
    computed = prepared(strategy, options)(roster)
    reasons = _reasons(strategy, roster, computed, indices, options)
    sentences: list[str] = []
    for index, reason in zip(indices, reasons, strict=True):
        change = describe_change(roster, owners, index)
        former_owner = (present or {}).get(roster.queues[index])
        if owners[index] == computed[index]:
            sentences.append(f"{change}: {_name_former_owner(reason, former_owner)}")
        else:
            sentences.append(f"{change}, which is not what {strategy} returns")
    return sentences


def _name_former_owner(reason: str, owner: str | None) -> str:
    """Replace "it had no owner" in a reason by the queue's former owner, which no strategy knows: it is no member."""
    return reason.replace(NO_PREVIOUS_OWNER, f"its owner {owner} is no longer a member", 1) if owner else reason


def _reasons(
    strategy: str, roster: Roster, owners: Owners, queues: Sequence[int], options: Mapping[str, Any] | None
) -> Iterator[str]:
    chosen = dict(options or {})
    if named(strategy) == "MachineRoomNearby":  # its reasons take the inner strategy's reasons instead of the strategy
        inner = chosen.get("inner", "Averagely")
        inner_options = chosen.pop("innerOptions", None)
        chosen["inner"] = _no_reason if callable(inner) else partial(_reasons, inner, options=inner_options)
    return REASONS[named(strategy)](roster, owners, queues, **chosen)


def _no_reason(_roster: Roster, _owners: Owners, queues: Sequence[int]) -> Iterator[str]:
    return repeat("the inner strategy chose it and gives no reason", len(queues))


def _one_list_for_all(roster: Roster, options: Mapping[str, Any]) -> dict[str, list[Queue]]:
    """Return the same queues for each member, as the reference's CONFIG does: each queue has several owners."""
    if set(options) != {"queues"}:
        raise ValueError("Strategy ByConfig takes either the option queues (one list for all) or members, not both")
    listed = input_checks.check_queues("Option queues", options["queues"])
    return {member: list(listed) for member in roster.members}
