"""Tests details of the strategies: thresholds, ties, accepted and rejected options, and the reasons they give."""

import gc
import hashlib
import sys
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from builders import a_roster
from rota.model import Queue, Roster, single_line
from rota.strategies import STRATEGIES, allocate, explain, prepared
from rota.strategies.arrays import count_equal_before, indices_of_runs
from rota.strategies.balanced import replace_implausible
from rota.strategies.by_machine_room import room_of
from rota.strategies.consistent_hash import ring_position
from rota.strategies.custom import check_owners
from rota.strategies.scales import Scales

ORDERS = [("orders", "broker-a", number) for number in range(8)]
ROOMS = {"queueRooms": {"broker-a": "east"}, "memberRooms": {"m0": "west", "m1": "east", "m2": "east"}}


def explain_owner(strategy: str, roster: Roster, queue: int, **options: Any) -> str:
    owners = prepared(strategy, options)(roster)
    return explain(strategy, roster, owners, roster.queues[queue], options)


# Options.


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("Averagely", {"queues": []}, r"Strategy Averagely has no option queues \(it has: none\)"),
        ("ByConfig", {"queue": []}, r"Strategy ByConfig has no option queue \(it has: members\)"),
        ("ConsistentHash", {"nodes": 1}, r"Strategy ConsistentHash has no option nodes \(it has: virtualNodes, hash\)"),
        ("ConsistentHash", {"virtualNodes": 2.5}, "Option virtualNodes must be a whole number from 0 up, not 2.5"),
        ("ConsistentHash", {"virtualNodes": "10"}, "Option virtualNodes must be a whole number from 0 up, not '10'"),
        ("Balanced", {"maxMoves": 1.5}, "Option maxMoves must be a whole number from 0 up, not 1.5"),
        ("ByMachineRoom", {"rooms": ["east", 2]}, "Option rooms must be a list of room names"),
        ("MachineRoomNearby", {"inner": "Evenly"}, "Unknown strategy 'Evenly'; choose one of Averagely"),
    ],
)
def test_strategy_rejects_invalid_options_with_a_sentence(
    strategy: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        allocate(strategy, ORDERS, ["m0", "m1"], options=options)


def test_machine_room_nearby_inner_strategy_may_be_a_function_or_have_options() -> None:
    inner = {"inner": STRATEGIES["AveragelyByCircle"]}
    by_function = allocate("MachineRoomNearby", ORDERS, ["m0", "m1", "m2"], options=ROOMS | inner)
    by_name = allocate("MachineRoomNearby", ORDERS, ["m0", "m1", "m2"], options=ROOMS | {"inner": "AVG_BY_CIRCLE"})
    assert by_function == by_name
    assert [queue.id for queue in by_name["m1"]] == [0, 2, 4, 6]
    assert explain_owner("MachineRoomNearby", a_roster(), 0, **ROOMS).endswith(
        "whose block of orders is broker-a/0 to broker-a/3"
    )
    hashed = {"inner": "ConsistentHash", "innerOptions": {"virtualNodes": 5}}
    assert "the next of the 10 virtual nodes on the ring is one of the 5 of m" in explain_owner(
        "MachineRoomNearby", a_roster(), 0, **ROOMS, **hashed
    )


def test_machine_room_nearby_called_directly_takes_the_same_inner_strategies() -> None:
    nearby = STRATEGIES["MachineRoomNearby"]
    hashed = {"inner": "ConsistentHash", "innerOptions": {"virtualNodes": 5}}
    for options in (ROOMS, ROOMS | hashed):
        assert nearby(a_roster(), **options).tolist() == prepared("MachineRoomNearby", options)(a_roster()).tolist()


def install_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **functions: str) -> None:
    """Install a package with one strategy for each name and function body."""
    lines = [f"def {name}(roster, **options):\n    {body}\n" for name, body in functions.items()]
    (tmp_path / "plugins.py").write_text("".join(lines))
    metadata_folder = tmp_path / "plugins-1.0.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    entry_points = [f"{name} = plugins:{name}\n" for name in functions]
    (metadata_folder / "entry_points.txt").write_text(
        "[rota.strategies]\n" + "".join(entry_points) + "torn = plugins:missing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plugins", raising=False)  # another test may have imported it


def test_custom_strategy_cannot_modify_the_callers_roster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = "roster.owners[0] = 1; "
    install_strategies(tmp_path, monkeypatch, inplace=write + "return roster.owners", throws=write + "raise KeyError")
    roster = a_roster(3, 2, {0: "m0", 1: "m1"})
    assert prepared("Custom", {"name": "inplace"})(roster).tolist() == [1, 1, -1]
    with pytest.raises(ValueError, match="KeyError"):
        prepared("Custom", {"name": "throws"})(roster)
    assert roster.owners.tolist() == [0, 1, -1]


def test_custom_strategy_error_text_is_one_stable_line() -> None:
    line = single_line(f"{object()!r}\nsecond \ud800 line " + 1000 * "x")
    assert line.startswith("<object object at 0x…> second ? line xxx")
    assert len(line) == 301


def test_custom_strategy_from_an_entry_point_is_loaded_with_options_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "return [options['owner']] * len(roster.queues)"
    install_strategies(tmp_path, monkeypatch, same=body, broken="raise KeyError('east')")
    options: dict[str, Any] = {"name": "same", "options": {"owner": 1}}
    assert prepared("Custom", options)(a_roster()).tolist() == [1] * 8
    reason = explain_owner("Custom", a_roster(), 0, **options)
    assert reason == "orders/broker-a/0 goes to m1: the custom strategy same chose it and gives no reason"
    for wrong_options, sentence in (
        ({"name": "broken"}, "Custom strategy broken failed: KeyError: 'east'"),
        ({"name": "torn"}, "Custom strategy torn cannot be loaded: AttributeError: "),
        ({"name": "other"}, r"There is no custom strategy other: .*\(offered: broken, same, torn\)"),
        (
            {"name": "same", "options": {"owner": 3}},
            r"Custom strategy same gives queue .*/0 to member number 3, but members are numbered 0 to 2 \(-1: no owner",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            prepared("Custom", wrong_options)(a_roster())


# Blocks, circles, rings.


def test_strategy_ranks_number_equal_keys_in_their_order() -> None:
    groups = np.arange(3000) * 7 % 3
    expected = [int((groups[:index] == group).sum()) for index, group in enumerate(groups)]
    ranks = count_equal_before(groups)
    assert ranks.tolist() == expected
    assert ranks.dtype == indices_of_runs([]).dtype == np.int64, "they are used as indices"


DEALT = "goes to it when queues are dealt in turn"
TWO_TOPICS = [(topic, "b", number) for topic in ("orders", "payments") for number in range(3)]


@pytest.mark.parametrize(
    ("strategy", "queue", "reason"),
    [
        ("Averagely", 2, "m1 is member 2 of 2, whose block of orders is b/2"),
        ("Averagely", 3, "m0 is member 1 of 2, whose block of payments is b/0 to b/1"),
        ("AveragelyByCircle", 4, f"m1 is member 2 of 2, and queue 2 of 3 of payments {DEALT}"),
    ],
)
def test_explain_counts_positions_within_the_topic_of_the_queue(strategy: str, queue: int, reason: str) -> None:
    assert f": {reason}$" in explain_owner(strategy, Roster.of(TWO_TOPICS, ["m0", "m1"]), queue) + "$"


AMONG_ONE = "goes to m1: its room east has 1 of 2 members; among them "


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [
        ("ByConfig", {"members": {"m1": [("orders", "east@b", 0)]}}, "goes to m1: the policy names it for m1"),
        (
            "ByMachineRoom",
            {"rooms": []},
            "belongs to no member: room east is not among the policy's rooms: none",
        ),
        (
            "MachineRoomNearby",
            {"queueRooms": {"east@b": "east"}, "memberRooms": {"m0": "west", "m1": "west"}},
            "goes to m0: its room east has no member; among all m0 is member 1 of 2, whose block of orders is east@b/0",
        ),
        (
            "MachineRoomNearby",
            {"queueRooms": {"east@b": "east"}, "memberRooms": {"m0": "west", "m1": "east"}},
            f"{AMONG_ONE}m1 is member 1 of 1, whose block of orders is east@b/0",
        ),
    ],
)
def test_explain_names_rooms_and_members(strategy: str, options: dict[str, Any], reason: str) -> None:
    roster = Roster.of([("orders", "east@b", 0)], ["m0", "m1"])
    assert explain_owner(strategy, roster, 0, **options) == f"orders/east@b/0 {reason}"


@pytest.mark.parametrize(
    ("broker", "room"),
    [("east@b", "east"), ("east@b@@", "east"), ("@b", ""), ("east@", None), ("@", None), ("a@b@c", None), ("", None)],
)
def test_by_machine_room_parses_the_brokers_room_as_java_does(broker: str, room: str | None) -> None:
    assert room_of(broker) == room


def test_consistent_hash_collision_on_the_ring_goes_to_the_last_member() -> None:
    positions = {f"m{member}-{node}": (member * node * node + node) % 7 for member in range(3) for node in range(200)}
    member_at = {
        position: name.partition("-")[0] for name, position in positions.items()
    }  # on a collision the last member wins
    queues = [("orders", "broker-a", number) for number in range(7)]
    hashed = {"virtualNodes": 200, "hash": lambda key: positions.get(key, int(key[-2]) if key.endswith("]") else 0)}
    shares = allocate("ConsistentHash", queues, ["m0", "m1", "m2"], options=hashed)
    owners = {queue.id: name for name, share in shares.items() for queue in share}
    next_positions = {
        number: min((position for position in member_at if position >= number), default=min(member_at))
        for number in range(7)
    }
    assert owners == {number: member_at[position] for number, position in next_positions.items()}


def test_consistent_hash_has_ten_virtual_nodes_by_default() -> None:
    members = [f"m{number}" for number in range(9)]
    queues = [("orders", "broker-a", number) for number in range(90)]
    shares = {
        number: allocate("ConsistentHash", queues, members, options={"virtualNodes": number}) for number in (9, 10, 11)
    }
    default = allocate("ConsistentHash", queues, members)
    assert {number: share == default for number, share in shares.items()} == {9: False, 10: True, 11: False}


def test_consistent_hash_of_an_unencodable_name_is_as_in_java() -> None:
    assert ring_position("\ud800") == ring_position("?")


def test_consistent_hash_works_where_md5_is_forbidden_for_security(monkeypatch: pytest.MonkeyPatch) -> None:
    def restricted_md5(data: bytes, *, usedforsecurity: bool = True) -> Any:
        if usedforsecurity:
            raise ValueError("disabled for FIPS")
        return hashlib.md5(data, usedforsecurity=False)

    expected = ring_position("orders")
    monkeypatch.setattr(sys.modules[ring_position.__module__], "md5", restricted_md5)
    assert ring_position("orders") == expected


def test_machine_room_nearby_deals_unowned_queues_around_within_the_room() -> None:
    owners = prepared("MachineRoomNearby", ROOMS | {"inner": "Sticky"})(a_roster())
    assert owners.tolist() == [1, 2, 1, 2, 1, 2, 1, 2]


def test_machine_room_nearby_leaves_queues_unowned_if_its_inner_strategy_does() -> None:
    inner = {"inner": "ConsistentHash", "innerOptions": {"virtualNodes": 0}}
    assert prepared("MachineRoomNearby", ROOMS | inner)(a_roster()).tolist() == [-1] * 8


def test_custom_strategy_result_that_is_no_array_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^Custom strategy mine must return one member index for each of 3 queues"):
        check_owners("Custom strategy mine", [[0], [0, 1], [0]], a_roster(3, 2))


# Sticky.


def test_sticky_reason_counts_only_ordinary_queues() -> None:
    queues = [*ORDERS[:5], ("%RETRY%shop", "broker-a", 0)]
    current = dict.fromkeys([Queue(*queue) for queue in [*ORDERS[:2], queues[-1]]], "m0") | {Queue(*ORDERS[2]): "m1"}
    roster = Roster.of(queues, ["m0", "m1"], current)
    even_share = "(an even share is 2 or 3, retries apart)"
    ordinary = [number for number, queue in enumerate(roster.queues) if queue.topic == "orders"]
    reasons = [explain_owner("Sticky", roster, number).partition(": ")[2] for number in ordinary]
    assert reasons[:3] == [f"m0 keeps all of its 2 queues {even_share}"] * 2 + [
        f"m1 keeps all of its 1 queue {even_share}"
    ]
    assert reasons[3].startswith("it had no owner; m")


def test_sticky_spreads_retry_queues_after_the_others() -> None:
    retry = Queue("%RETRY%shop", "broker-a", 0)
    orders = [Queue(*queue) for queue in ORDERS[:4]]
    current = {retry: "m0", orders[0]: "m0"} | dict.fromkeys(orders[1:], "m1")
    shares = allocate("Sticky", [*orders, retry], ["m0", "m1"], current=current)
    assert shares == {"m0": [retry, orders[0], orders[3]], "m1": orders[1:3]}
    shares = allocate("Sticky", [*orders[:3], retry], ["m0", "m1"], current=current | {orders[1]: "m0"})
    assert shares == {"m0": orders[:2], "m1": [retry, orders[2]]}


# Scales of Balanced: small fleets with results that can be checked by hand.

Rooms = Sequence[str | None]


def decided_scales(
    weights: list[int],
    capacities: list[float],
    current: list[int] | None = None,
    max_moves: int | None = None,
    *,
    rooms: tuple[Rooms, Rooms] = ((), ()),
) -> Scales:
    """Return scales that have decided; `rooms`: of the queues, and of the members."""
    given_queue_rooms, given_member_rooms = rooms
    queue_rooms = list(given_queue_rooms or [None] * len(weights))
    member_rooms = list(given_member_rooms or [None] * len(capacities))
    scales = Scales(weights, capacities, queue_rooms, member_rooms)
    scales.decide(current or [-1] * len(weights), max_moves)
    return scales


def steps_of(scales: Scales) -> str:
    return " ".join(
        scales.placements[queue].step.name if queue in scales.placements else "-" for queue in range(len(scales.owners))
    )


@pytest.mark.parametrize(
    ("weights", "capacities", "current", "max_moves", "owners", "expected_steps"),
    [
        ([5, 4, 3, 3, 2, 1], [1.0, 1.0], None, None, [0, 1, 1, 0, 1, 0], " ".join(["EMPTIEST"] * 6)),
        ([5, 4, 3, 3, 2, 1], [2.0, 1.0], None, None, [0, 1, 0, 0, 1, 0], " ".join(["EMPTIEST"] * 6)),
        ([1] * 6, [1.0] * 3, [0] * 6, None, [2, 0, 0, 1, 2, 1], "EVEN - - EVEN IDLE IDLE"),
        ([1] * 6, [1.0] * 3, [0] * 6, 3, [0, 0, 0, 1, 2, 1], "- - - EVEN IDLE IDLE"),
        ([1] * 6, [1.0] * 3, [0] * 6, 1, [0, 0, 0, 0, 0, 1], "- - - - - IDLE"),
        ([1] * 6, [1.0] * 3, [0] * 6, 0, [0] * 6, "- - - - - -"),
        ([5, 4, 3, 3, 2, 1], [1.0, 1.0], [0] * 6, None, [1, 1, 0, 0, 0, 0], "IDLE EVEN - - - -"),
        ([9, 1, 1, 1], [1.0] * 3, [0, 0, 1, 1], None, [2, 0, 1, 1], "IDLE - - -"),
        ([1, 2, 3, 3, 4, 5], [1.0, 1.0], None, None, [0, 1, 1, 0, 1, 0], " ".join(["EMPTIEST"] * 6)),
        ([9, 1, 1, 1], [1.0] * 3, [0, 1, 1, 1], None, [0, 1, 1, 2], "- - - IDLE"),
        ([1], [1.0] * 3, [0], None, [0], "-"),
        ([1] * 2, [1.0] * 3, [0] * 2, None, [1, 0], "IDLE -"),
        ([1] * 3, [1.0] * 3, [0] * 3, None, [2, 0, 1], "IDLE - IDLE"),
        ([1] * 6, [1.0] * 3, [0, 0, 1, 1, 1, 1], None, [0, 0, 2, 1, 1, 2], "- - EVEN - - IDLE"),
        (
            [1] * 10,
            [1.0] * 5,
            [0] * 6 + [1] * 4,
            None,
            [3, 0, 0, 4, 3, 2, 4, 1, 1, 2],
            "EVEN - - IDLE IDLE IDLE EVEN - - EVEN",
        ),
        ([5, 4, 1], [1.0, 1.0], [0, 0, 1], None, [0, 1, 1], "- EVEN -"),
        ([9, 1], [1.0, 10.0], [0, 1], None, [0, 1], "- -"),
        ([6, 5, 4, 3, 2, 1], [1.0, 3.0], [0] * 6, None, [1, 1, 1, 0, 0, 1], "IDLE EVEN EVEN - - EVEN"),
        ([6, 5, 4, 3, 2, 1], [3.0, 1.0], [1] * 6, None, [0, 0, 0, 1, 1, 0], "IDLE EVEN EVEN - - EVEN"),
        ([7, 5, 3, 2, 2, 1, 1], [2.0, 1.0, 4.0], [0] * 7, None, [1, 2, 2, 0, 0, 0, 2], "IDLE IDLE EVEN - - - EVEN"),
        ([7, 5, 3, 2, 2, 1, 1], [2.0, 1.0, 4.0], [2] * 7, None, [0, 2, 1, 2, 2, 2, 2], "IDLE - IDLE - - - -"),
    ],
)
def test_balanced_results_for_small_fleets_match_hand_calculation(
    weights: list[int],
    capacities: list[float],
    current: list[int] | None,
    max_moves: int | None,
    *,
    owners: list[int],
    expected_steps: str,
) -> None:
    scales = decided_scales(weights, capacities, current, max_moves)
    assert (scales.owners, steps_of(scales)) == (owners, expected_steps)


@pytest.mark.parametrize(("east", "west", "count_of_m0"), [(23, 20, 23), (24, 20, 23), (100, 90, 100), (103, 90, 101)])
def test_balanced_moves_a_queue_out_of_its_room_only_above_a_tenth_of_the_mean(
    east: int, west: int, count_of_m0: int
) -> None:
    rooms = (["e"] * east + ["w"] * west, ["e", "w"])
    scales = decided_scales([1] * (east + west), [1.0, 1.0], [0] * east + [1] * west, rooms=rooms)
    assert scales.queue_counts == [count_of_m0, east + west - count_of_m0]


def test_balanced_assigns_queues_within_their_room_up_to_a_tenth_over_the_mean() -> None:
    scales = decided_scales([1] * 20, [1.0, 1.0], rooms=(["e"] * 20, ["e", "w"]))
    assert scales.queue_counts == [11, 9]
    assert steps_of(scales) == " ".join(["HOME"] * 11 + ["EMPTIEST"] * 9)


@pytest.mark.parametrize(
    ("weights", "capacities", "queue_rooms", "owners", "expected_steps"),
    [
        ([100, 1], [1.0, 1.0], ["e", "e"], [0, 1], "HOME EMPTIEST"),
        ([10, 6, 9], [1.0, 1.0], ["e", "e", "w"], [0, 0, 1], "HOME CHEAPEST HOME"),
        ([1] * 30, [2.0, 1.0], ["e"] * 30, [0] * 21 + [1] * 9, " ".join(["HOME"] * 21 + ["EVEN"] + ["EMPTIEST"] * 8)),
        ([1, 1], [1.0, 1.0], [None, "n"], [0, 1], "EMPTIEST EMPTIEST"),
    ],
)
def test_balanced_results_for_two_rooms_match_hand_calculation(
    weights: list[int], capacities: list[float], queue_rooms: list[str | None], owners: list[int], expected_steps: str
) -> None:
    scales = decided_scales(weights, capacities, rooms=(queue_rooms, ["e", "w"]))
    assert (scales.owners, steps_of(scales)) == (owners, expected_steps)


def test_balanced_repeats_its_passes_until_each_queue_is_in_its_room() -> None:
    scales = decided_scales([1] * 3, [1.0, 1.0], [1, 0, 0], rooms=(["w", "e", "e"], ["w", "e"]))
    assert scales.owners == [0, 1, 1]


def test_balanced_counts_a_member_as_remote_only_if_both_rooms_are_known() -> None:
    scales = Scales([1, 1], [1.0, 1.0, 1.0], ["e", None], [None, "e", "w"])
    assert [scales.room_mismatch(member, queue) for queue in (0, 1) for member in (0, 1, 2)] == [0, 0, 1, 0, 0, 0]


def test_balanced_replaces_invalid_weights_and_capacities() -> None:
    assert replace_implausible([1.0, 1.0, -0.5]) == [1.0, 1.0, 1.0]
    roster = a_roster(4, 2)
    owners = STRATEGIES["Balanced"](roster, memberWeights={"m0": 1e-9, "m1": 2000.0})
    assert np.bincount(owners, minlength=2).tolist() == [1, 3], "even the weakest member gets a queue"
    sentence = explain_owner("Balanced", roster, 1, memberWeights={"m0": 1e-9, "m1": -1.0})
    assert sentence.endswith("the capacity of m1 has the implausible value -1 and counts as 1e-09")
    zero_weights = dict.fromkeys(roster.queues, 0.0)
    assert np.bincount(STRATEGIES["Balanced"](roster, queueWeights=zero_weights)).tolist() == [2, 2]


def test_balanced_gives_retry_queues_negligible_weight_whatever_was_measured() -> None:
    queues = [*ORDERS[:4], *(("%RETRY%shop", "broker-a", number) for number in range(3))]
    roster = Roster.of(queues, ["m0", "m1"])
    weights = {queue: 1000.0 if queue.topic.startswith("%") else 1.0 for queue in roster.queues}
    owners = STRATEGIES["Balanced"](roster, queueWeights=weights)
    ordinary_owners = [
        owner for queue, owner in zip(roster.queues, owners.tolist(), strict=True) if queue.topic == "orders"
    ]
    assert np.bincount(ordinary_owners).tolist() == [2, 2]


def test_balanced_gives_retry_queues_less_weight_than_queues_without_traffic() -> None:
    retry = [Queue("%RETRY%shop", "broker-a", number) for number in range(2)]
    quiet = dict.fromkeys([Queue(*queue) for queue in ORDERS[:2]], 0.0)
    options = {"queueWeights": quiet}
    shares = allocate("Balanced", [*quiet, *retry], ["m0", "m1"], options=options, current=dict.fromkeys(retry, "m0"))
    assert sorted(sum(queue in quiet for queue in share) for share in shares.values()) == [1, 1]


def test_balanced_reason_for_a_single_member_says_there_is_no_other() -> None:
    roster = Roster.of(ORDERS[:2], ["m0"], dict.fromkeys([Queue(*queue) for queue in ORDERS[:2]], "m0"))
    assert explain_owner("Balanced", roster, 0, memberWeights={"gone": 2.0}).endswith(
        f"counted; {unknown_capacities('m0')}"
    )
    sentence = explain_owner("Balanced", roster, 0)
    assert (
        sentence
        == "orders/broker-a/0 stays with m0: there is no other member; no weights are known, so queues are counted"
    )


@pytest.mark.parametrize(("fuller", "emptier", "counts"), [(102, 100, [102, 100]), (100, 98, [99, 99])])
def test_balanced_moves_only_for_a_difference_of_a_fiftieth_of_the_mean(
    fuller: int, emptier: int, counts: list[int]
) -> None:
    scales = decided_scales([1] * (fuller + emptier), [1.0, 1.0], [0] * fuller + [1] * emptier)
    assert scales.queue_counts == counts


@pytest.mark.parametrize("seed", range(40))
def test_balanced_finds_the_emptiest_member_of_each_room_after_any_query(seed: int) -> None:
    weights = [1 + seed * number * number % 13 for number in range(12)]
    capacities = [1.0 + seed * number % 3 for number in range(4)]
    member_rooms: list[str | None] = [None, "e", "e", None] if seed % 2 else ["e"] * 4
    scales = decided_scales(
        weights, capacities, [seed * number % 5 - 1 for number in range(12)], rooms=((), member_rooms)
    )

    def by_fullness(member: int) -> tuple[float, float, int]:
        return scales.fullness(member), -capacities[member], member

    for excluded in (0, 1, -1, 2, 2, 3, -1):
        emptiest = {}
        for member in sorted(range(4), key=by_fullness, reverse=True):
            if member != excluded:
                emptiest[member_rooms[member]] = member
        assert sorted(scales.candidates(excluded)) == sorted(emptiest.values())


OWNED = {0: "m0", 1: "m1", 2: "m1", 3: "m1", 4: "m2"}
TO_M0 = dict.fromkeys(range(5), "m0")


def unknown_capacities(*names: str) -> str:
    return "; ".join(f"the capacity of {name} is unknown and counts as 1" for name in names)


@pytest.mark.parametrize(
    ("owned", "queue", "options", "sentence"),
    [
        ({}, 0, {}, f"m0 was the emptiest (0 queues); {unknown_capacities('m0')}"),
        ({}, 0, ROOMS, f"m1 in its own room east had no queue yet; {unknown_capacities('m1')}"),
        ({0: "m1", 1: "m2"}, 2, ROOMS, f"m0 in room west was the emptiest (0 queues); {unknown_capacities('m0')}"),
        (
            TO_M0,
            4,
            {},
            f"m1 was idle, and m0 (5 queues) was the fullest that could spare one; {unknown_capacities('m1', 'm0')}",
        ),
        (
            TO_M0,
            0,
            {},
            f"with m1 (1 queue) the fleet is more even than with m0 (3 queues); {unknown_capacities('m1', 'm0')}",
        ),
        (
            OWNED,
            4,
            {"maxMoves": 0},
            f"it is the only queue of m2, and a member's last queue is never taken; {unknown_capacities('m2')}",
        ),
        (
            {0: "m0", 1: "m0", 2: "m1", 3: "m1", 4: "m2"},
            1,
            {},
            f"(m0 has 2 queues, m2 1 queue); {unknown_capacities('m0', 'm2')}",
        ),
    ],
)
def test_balanced_reason_marks_every_unknown_capacity_it_mentions(
    owned: dict[int, str], queue: int, options: dict[str, Any], sentence: str
) -> None:
    roster = a_roster(5, 3, owned)
    measured = {"queueWeights": dict.fromkeys(roster.queues, 1.0), "memberWeights": {"gone": 2.0}}
    assert explain_owner("Balanced", roster, queue, **options, **measured).endswith(sentence)


def test_balanced_reason_says_when_the_home_room_fits_and_when_leaving_costs() -> None:
    queues = [Queue("orders", broker, number) for broker, number in (("e", 0), ("e", 1), ("w", 0))]
    roster = Roster.of(queues, ["m0", "m1"])
    options = {
        "queueRooms": {"e": "east", "w": "west"},
        "memberRooms": {"m0": "east", "m1": "west"},
        "queueWeights": dict(zip(queues, (10.0, 6.0, 9.0), strict=True)),
    }
    costly = "m0 in its own room east (80% of its share) is the best choice"
    assert costly in explain_owner("Balanced", roster, 1, **options)
    with_unknown = explain_owner("Balanced", roster, 1, **options, memberWeights={"gone": 2.0})
    assert with_unknown.endswith(f"by load and room; {unknown_capacities('m0')}")
    fitting = options | {"queueWeights": dict(zip(queues, (5.0, 4.0, 9.0), strict=True))}
    assert "m0 in its own room east had capacity for it (56% of its share)" in explain_owner(
        "Balanced", roster, 1, **fitting
    )
    unknown = {**options, "memberRooms": {"m1": "west"}}
    assert "None" not in explain_owner("Balanced", roster, 0, **unknown)
    assert " in " not in explain_owner("Balanced", roster, 2, **{**unknown, "queueRooms": {}})


def test_balanced_reason_leaves_retry_queues_out_of_its_counts() -> None:
    retry = Queue("%RETRY%shop", "broker-a", 0)
    roster = Roster.of(
        [*ORDERS[:4], retry], ["m0", "m1"], {Queue(*ORDERS[0]): "m0", Queue(*ORDERS[1]): "m0", retry: "m1"}
    )
    measured = {"queueWeights": {retry: 5.0}}
    ordinary, retry_number = (roster.queues.index(queue) for queue in (Queue(*ORDERS[0]), retry))
    assert explain_owner("Balanced", roster, ordinary, **measured).endswith(
        "; no weights are known, so queues are counted"
    )
    assert explain_owner("Balanced", roster, retry_number, **measured).endswith(
        "; a retry queue has a negligible weight"
    )
    assert "(m0 has 2 queues, m1 2 queues)" in explain_owner("Balanced", roster, ordinary, **measured)


def test_balanced_reason_gives_loads_as_percentage_of_each_members_share() -> None:
    roster = a_roster(6, 2, {0: "m0", 1: "m0", 2: "m0", 3: "m0", 4: "m1", 5: "m1"})
    assert "(m0 has 100% of its share, m1 100% of its share)" in explain_owner(
        "Balanced", roster, 0, memberWeights={"m0": 4.0, "m1": 2.0}
    )


def test_balanced_reason_names_the_best_taker_among_several_rooms() -> None:
    owners = {"east-b": "m0", "west-b": "m1", "north-b": "m2"}
    queues = [
        ("orders", broker, number)
        for broker, count in zip(owners, (42, 40, 41), strict=True)
        for number in range(count)
    ]
    roster = Roster.of(queues, ["m0", "m1", "m2"], {queue: owners[queue[1]] for queue in queues})
    rooms = {"m0": "east", "m1": "west", "m2": "north"}
    sentence = explain_owner(
        "Balanced", roster, 0, queueRooms={f"{room}-b": room for room in rooms.values()}, memberRooms=rooms
    )
    assert (
        "more even with m1, the emptiest of the others in room west, but not by enough to leave room east" in sentence
    )
    small = Roster.of(ORDERS[:5], ["m0", "m1", "m2"], {Queue(*queue): f"m{queue[2] // 2}" for queue in ORDERS[:5]})
    assert "moving it to m2, the emptiest of the others in room north" in explain_owner(
        "Balanced", small, 0, memberRooms=rooms
    )


def test_balanced_capacity_is_at_least_a_thousandth_of_a_typical_one() -> None:
    measured = {"m0": 1e-12, "m1": 1.0, "m2": 1.0}
    sentence = explain_owner("Balanced", a_roster(5, 3, OWNED), 0, maxMoves=0, memberWeights=measured)
    assert "the capacity of m0 has the implausible value 1e-12 and counts as 0.001" in sentence


def test_balanced_ignores_measured_retry_weights_when_placing_other_queues() -> None:
    retry = [Queue("%RETRY%shop", "broker-a", number) for number in range(10)]
    ordinary = dict(zip([Queue(*queue) for queue in ORDERS[:5]], (4.0, 1.0, 1.0, 1.0, 1.0), strict=True))
    roster = Roster.of([*ordinary, *retry], ["m0", "m1"])
    shares = roster.assignment(
        prepared("Balanced", {"queueWeights": ordinary | dict.fromkeys(retry, 1e9)})(roster).tolist()
    )
    assert sorted(sum(queue in ordinary for queue in share) for share in shares.values()) == [1, 4]


def test_sticky_deals_around_also_if_one_member_needs_most_queues() -> None:
    members = [f"m{number:02}" for number in range(60)]
    queues = [Queue("orders", "broker-a", number) for number in range(3000)]
    owned = 59 * 49
    current = {queue: members[1 + queue.id // 49] for queue in queues[:owned]}
    shares = allocate("Sticky", queues, members, current=current)
    assert shares["m00"] == [queues[owned], *queues[owned + 60 :]]
    assert [shares[name][-1] for name in members[1:]] == queues[owned + 1 : owned + 60]


@pytest.mark.parametrize(("carried", "owner"), [(10, 1), (15, 0)])
def test_balanced_places_an_unowned_queue_where_it_adds_least_cost(carried: int, owner: int) -> None:
    rooms: tuple[Rooms, Rooms] = ((), ("e", "w"))
    scales = decided_scales([1, carried, 5], [1.0, 4.0], [0, 1, -1], 0, rooms=rooms)
    assert scales.owners == [0, 1, owner]


@pytest.mark.parametrize("seed", range(30))
def test_balanced_candidates_include_the_queue_whose_move_gains_most(seed: int) -> None:
    random = Random(seed)
    weights = [random.randint(1, 1000) for _ in range(60)]
    rooms: list[str | None] = [random.choice(["e", "w"]) for _ in weights]
    scales = Scales(weights, [1.0, 2.0, 1.5], rooms, ["e", "w", "e"])
    scales._assign_unowned([random.randrange(3) for _ in weights])
    for giver, taker in permutations(range(3), 2):
        for room in ("e", "w"):
            queues = [queue for queue, owner in enumerate(scales.owners) if (owner, rooms[queue]) == (giver, room)]
            candidates = [queue for queue in scales._best_queues(giver, taker) if rooms[queue] == room]
            least_change = min(scales.cost_change(queue, taker) for queue in queues)
            assert min(scales.cost_change(queue, taker) for queue in candidates) == least_change


@pytest.mark.parametrize("was_enabled", [True, False])
def test_strategy_library_leaves_garbage_collection_as_it_was(*, was_enabled: bool) -> None:
    try:
        if not was_enabled:
            gc.disable()
        assert allocate("AVG", [("orders", "broker-a", 0)], ["m1"])
        with pytest.raises(ValueError, match="not a queue"):
            allocate("AVG", [("orders", "broker-a", -1)], ["m1"])
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
