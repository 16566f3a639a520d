"""Particular answers and mistakes of the strategy library; what holds for all is in tests/properties."""

from typing import Any

import numpy as np
import pytest

from builders import a_roster
from rota.model import Roster
from rota.strategies import allocate, named, prepared
from rota.strategies.balanced import trusted
from rota.strategies.custom import checked

ORDERS = [("orders", "broker-a", number) for number in range(8)]


@pytest.mark.parametrize(
    ("queues", "members", "shares"),
    [
        (16, 1, [16]),
        (16, 2, [8, 8]),
        (16, 3, [6, 5, 5]),
        (8, 2, [4, 4]),
        (7, 2, [4, 3]),
        (10, 3, [4, 3, 3]),
        (12, 5, [3, 3, 2, 2, 2]),
        (13, 5, [3, 3, 3, 2, 2]),
        (5, 1, [5]),
        (5, 2, [3, 2]),
    ],
)
@pytest.mark.parametrize("strategy", ["Averagely", "AveragelyByCircle", "Sticky", "Balanced"])
def test_the_figures_people_know_from_the_classic_client(
    strategy: str, queues: int, members: int, shares: list[int]
) -> None:
    owners = prepared(strategy)(a_roster(queues, members))
    assert sorted(np.bincount(owners, minlength=members), reverse=True) == shares


@pytest.mark.parametrize("strategy", ["Sticky", "Balanced"])
def test_two_small_topics_leave_nobody_idle_while_somebody_has_two(strategy: str) -> None:
    queues = [(topic, "b", number) for topic in ("one", "two") for number in range(2)]
    assert [len(share) for share in allocate(strategy, queues, ["m0", "m1", "m2", "m3"]).values()] == [1, 1, 1, 1]


def test_sticky_takes_one_queue_from_each_for_a_newcomer() -> None:
    roster = a_roster(6, 3, {0: "m0", 1: "m0", 2: "m0", 3: "m1", 4: "m1", 5: "m1"})
    assert list(prepared("Sticky")(roster)) == [0, 0, 2, 1, 1, 2]


def test_a_name_of_the_reference_client_is_understood() -> None:
    assert allocate("AVG", ORDERS, ["a", "b"]) == allocate("Averagely", ORDERS, ["a", "b"])
    assert named("CONSISTENT_HASH") == "ConsistentHash"


def test_the_reference_clients_one_list_for_all_is_answered_but_is_no_assignment() -> None:
    shares = allocate("CONFIG", ORDERS, ["a", "b"], options={"queues": ORDERS[:2]})
    assert shares["a"] == shares["b"] == ORDERS[:2]


@pytest.mark.parametrize(
    ("strategy", "queues", "members", "options", "sentence"),
    [
        ("Averagely", [], ["a"], {}, "There is nothing to assign"),
        ("Averagely", ORDERS, [], {}, "There is nobody to assign to"),
        ("Averagely", ORDERS, ["a", "a"], {}, "Member a is listed twice"),
        ("Averagely", ORDERS, ["a", ""], {}, "A member's name is empty"),
        ("Averagely", [*ORDERS, ORDERS[3]], ["a"], {}, "Queue orders/broker-a/3 is listed twice"),
        ("Evenly", ORDERS, ["a"], {}, "There is no strategy 'Evenly': choose one of Averagely"),
        ("Sticky", ORDERS, ["a"], {"fast": 1}, r"Strategy Sticky has no option fast \(it has: none\)"),
        ("ByConfig", ORDERS, ["a"], {}, "Strategy ByConfig needs the option members"),
        ("ByConfig", ORDERS, ["a"], {"members": {"a": ORDERS[:1], "b": ORDERS[:1]}}, "Queue .* for a and for b"),
        ("ByConfig", ORDERS, ["a"], {"members": {}, "queues": []}, "Strategy ByConfig takes either the option queues"),
        ("ByMachineRoom", ORDERS, ["a"], {"rooms": "room1"}, "Option rooms must be a list"),
        ("ConsistentHash", ORDERS, ["a"], {"virtualNodes": -1}, "Option virtualNodes must be a whole number"),
        ("ConsistentHash", ORDERS, ["a"], {"virtualNodes": True}, "Option virtualNodes must be a whole number"),
        ("Balanced", ORDERS, ["a"], {"maxMoves": -1}, "Option maxMoves must be a whole number"),
        ("MachineRoomNearby", ORDERS, ["a"], {"queueRooms": {}, "memberRooms": {}}, "Queue .* has no room"),
        (
            "MachineRoomNearby",
            ORDERS,
            ["a"],
            {"queueRooms": {"broker-a": "x"}, "memberRooms": {}},
            "Member a has no room",
        ),
        ("Custom", ORDERS, ["a"], {"name": "mine"}, r"There is no custom strategy mine: .*\(offered: none\)"),
    ],
)
def test_bad_input_is_a_sentence(
    strategy: str, queues: Any, members: list[str], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        allocate(strategy, queues, members, options=options)


def test_present_owners_that_are_gone_and_queues_that_are_gone_do_not_count() -> None:
    current = {ORDERS[0]: "gone", ("orders", "gone", 0): "a", ORDERS[1]: "b"}
    assert list(Roster.of(ORDERS[:2], ["a", "b"], current).owners) == [-1, 1]


@pytest.mark.parametrize("answer", [None, "all of it", [0, 0], [[0], [0], [0]], [0.5, 1.0, 0.0], [0, 1, 2], [0, -2, 1]])
def test_a_custom_strategys_nonsense_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match=r"^Custom strategy mine "):
        checked("mine", answer, a_roster(3, 2))


def test_a_custom_strategys_answer_is_taken() -> None:
    assert list(checked("mine", [1, 0, -1], a_roster(3, 2))) == [1, 0, -1]


def test_weights_that_lie_are_replaced_by_ordinary_ones() -> None:
    assert trusted([1.0, 3.0, None, float("nan"), -5.0, float("inf")]) == [1.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    assert trusted([1.0, 1.0, 1e12]) == [1.0, 1.0, 1000.0]
    assert trusted([0.0, 0.0], least=0.5) == [0.5, 0.5]
    assert trusted([None, None]) == [1.0, 1.0]
