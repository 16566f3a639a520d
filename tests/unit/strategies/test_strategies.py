"""Tests particular results and errors of the strategies; tests/properties has the properties of all strategies."""

import sys
from fractions import Fraction
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import a_roster
from rota.model import Queue, Roster
from rota.strategies import allocate, explain, explain_all, named, prepared
from rota.strategies.arrays import current_owners
from rota.strategies.averagely import averagely
from rota.strategies.balanced import replace_implausible
from rota.strategies.custom import check_owners

ORDERS = [("orders", "broker-a", number) for number in range(8)]
NEAR = {"queueRooms": {"broker-a": "x"}, "memberRooms": {"a": "x"}}


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
def test_strategy_shares_equal_those_of_the_classic_client(
    strategy: str, queues: int, members: int, shares: list[int]
) -> None:
    owners = prepared(strategy)(a_roster(queues, members))
    assert sorted(np.bincount(owners, minlength=members), reverse=True) == shares


@pytest.mark.parametrize("strategy", ["Sticky", "Balanced"])
def test_strategy_leaves_no_member_idle_with_two_small_topics(strategy: str) -> None:
    queues = [(topic, "b", number) for topic in ("one", "two") for number in range(2)]
    assert [len(share) for share in allocate(strategy, queues, ["m0", "m1", "m2", "m3"]).values()] == [1, 1, 1, 1]


def test_sticky_takes_one_queue_from_each_owner_for_a_new_member() -> None:
    roster = a_roster(6, 3, {0: "m0", 1: "m0", 2: "m0", 3: "m1", 4: "m1", 5: "m1"})
    assert list(prepared("Sticky")(roster)) == [0, 0, 2, 1, 1, 2]


def test_strategy_accepts_names_of_the_reference_client() -> None:
    assert allocate("AVG", ORDERS, ["a", "b"]) == allocate("Averagely", ORDERS, ["a", "b"])
    assert named("CONSISTENT_HASH") == "ConsistentHash"


def test_by_config_queues_option_gives_every_member_the_same_list() -> None:
    shares = allocate("CONFIG", ORDERS, ["a", "b"], options={"queues": ORDERS[:2]})
    assert shares["a"] == shares["b"] == ORDERS[:2]


@pytest.mark.parametrize(
    ("strategy", "queues", "members", "options", "sentence"),
    [
        ("Averagely", [], ["a"], {}, "The list of queues is empty"),
        ("Averagely", ORDERS, [], {}, "The list of members is empty"),
        ("Averagely", None, ["a"], {}, "The list of queues is empty"),
        ("Averagely", ORDERS, None, {}, "The list of members is empty"),
        ("Averagely", ORDERS, ["a", "a"], {}, "Member a is listed twice"),
        ("Averagely", ORDERS, ["a", ""], {}, "A member's name is empty"),
        ("Averagely", [*ORDERS, ORDERS[3]], ["a"], {}, "Queue orders/broker-a/3 is listed twice"),
        ("Evenly", ORDERS, ["a"], {}, "Unknown strategy 'Evenly'; choose one of Averagely"),
        ("Sticky", ORDERS, ["a"], {"fast": 1}, r"Strategy Sticky has no option fast \(it has: none\)"),
        ("ByConfig", ORDERS, ["a"], {}, "Strategy ByConfig needs the option members"),
        ("ByConfig", ORDERS, ["a"], {"members": {"a": ORDERS[:1], "b": ORDERS[:1]}}, "Queue .* for a and for b"),
        ("ByConfig", ORDERS, ["a"], {"members": {}, "queues": []}, "Strategy ByConfig takes either the option queues"),
        ("ByMachineRoom", ORDERS, ["a"], {"rooms": "room1"}, "Option rooms must be a list"),
        ("ConsistentHash", ORDERS, ["a"], {"virtualNodes": -1}, "Option virtualNodes must be a whole number"),
        ("ConsistentHash", ORDERS, ["a"], {"virtualNodes": True}, "Option virtualNodes must be a whole number"),
        ("ConsistentHash", ORDERS, ["a"], {"virtualNodes": 1001}, "Option virtualNodes may be at most 1000, not 1001"),
        ("Balanced", ORDERS, ["a"], {"maxMoves": -1}, "Option maxMoves must be a whole number"),
        ("MachineRoomNearby", ORDERS, ["a"], {"queueRooms": {}, "memberRooms": {}}, "Queue .* has no room"),
        (
            "MachineRoomNearby",
            ORDERS,
            ["a"],
            {"queueRooms": {"broker-a": "x"}, "memberRooms": {}},
            "Member a has no room",
        ),
        ("Averagely", [("orders", "a")], ["a"], {}, r"\('orders', 'a'\) is not a queue: give "),
        ("Averagely", [None], ["a"], {}, "None is not a queue"),
        ("Averagely", ["abc"], ["a"], {}, "'abc' is not a queue"),
        ("Averagely", [("t", "b", -1)], ["a"], {}, ".* is not a queue"),
        ("Averagely", [("t", "b", 1.5)], ["a"], {}, ".* is not a queue"),
        ("Averagely", [("t", "b", "0")], ["a"], {}, ".* is not a queue"),
        ("Averagely", [(None, "b", 0)], ["a"], {}, ".* is not a queue"),
        ("Averagely", [("t", 5, 0)], ["a"], {}, ".* is not a queue"),
        ("Averagely", [("t", "b", True)], ["a"], {}, ".* is not a queue"),
        ("Averagely", [*ORDERS, ("orders", "b", -1)], ["a"], {}, r"\('orders', 'b', -1\) is not a queue"),
        ("Averagely", [*ORDERS, ("orders", "b", 0, 0)], ["a"], {}, r"\('orders', 'b', 0, 0\) is not a queue"),
        ("Averagely", [*ORDERS, ("orders", 5, 0)], ["a"], {}, r"\('orders', 5, 0\) is not a queue"),
        ("Averagely", [*ORDERS, (None, "b", 0)], ["a"], {}, r"\(None, 'b', 0\) is not a queue"),
        ("Averagely", 5, ["a"], {}, "The list of queues must be a list of queues, not 5"),
        ("Averagely", ORDERS, "abc", {}, "The list of members must be a list of names, not 'abc'"),
        ("Averagely", ORDERS, 3, {}, "The list of members must be a list of names, not 3"),
        ("Averagely", ORDERS, [None], {}, "The list of members has None, which is not a string"),
        ("Averagely", ORDERS, ["a", 1], {}, "The list of members has 1, which is not a string"),
        ("Averagely", ORDERS, [b"a"], {}, "The list of members has b'a', which is not a string"),
        ("Averagely", ORDERS, ["a"], [1], r"The options must be a mapping, not \[1\]"),
        (["Averagely"], ORDERS, ["a"], {}, r"Unknown strategy \['Averagely'\]; choose one of"),
        ("ByConfig", ORDERS, ["a"], {"members": None}, "Option members must be a mapping"),
        ("ByConfig", ORDERS, ["a"], {"members": ["a"]}, "Option members must be a mapping"),
        ("ByConfig", ORDERS, ["a"], {"members": {"a": None}}, "Option members, for a, must be a list of queues"),
        ("ByConfig", ORDERS, ["a"], {"members": {"a": [("t", "b")]}}, ".* is not a queue"),
        ("ByConfig", ORDERS, ["a"], {"queues": None}, "Option queues must be a list of queues"),
        ("ByMachineRoom", ORDERS, ["a"], {"rooms": None}, "Option rooms must be a list"),
        ("ByMachineRoom", ORDERS, ["a"], {"rooms": 5}, "Option rooms must be a list"),
        ("MachineRoomNearby", ORDERS, ["a"], {"queueRooms": [], "memberRooms": {}}, "Option queueRooms must be a map"),
        ("MachineRoomNearby", ORDERS, ["a"], {"queueRooms": None, "memberRooms": None}, "Queue .* has no room"),
        ("MachineRoomNearby", ORDERS, ["a"], NEAR | {"memberRooms": {"a": ["x"]}}, "Option memberRooms has .* for a"),
        ("MachineRoomNearby", ORDERS, ["a"], NEAR | {"inner": 5}, "Unknown strategy 5"),
        ("MachineRoomNearby", ORDERS, ["a"], NEAR | {"innerOptions": [5]}, "The options must be a mapping"),
        ("MachineRoomNearby", ORDERS, ["a"], NEAR | {"inner": lambda _: [7] * 8}, "The inner strategy .* number 7"),
        (
            "MachineRoomNearby",
            ORDERS,
            ["a"],
            NEAR | {"inner": averagely, "innerOptions": {}},
            "Option innerOptions requires option inner to be a strategy's name",
        ),
        ("MachineRoomNearby", ORDERS, ["a"], NEAR | {"inner": lambda _: None}, "The inner strategy .* must return"),
        ("Balanced", ORDERS, ["a"], {"queueWeights": [1.0]}, "Option queueWeights must be a mapping"),
        ("Balanced", ORDERS, ["a"], {"queueWeights": {ORDERS[0]: "1"}}, "Option queueWeights has .1. for orders"),
        ("Balanced", ORDERS, ["a"], {"memberWeights": {"a": [1]}}, r"Option memberWeights has \[1\] for a"),
        (
            "Balanced",
            ORDERS,
            ["a"],
            {"memberRooms": {"a": [1]}},
            r"Option memberRooms has \[1\] for a, which is not a string",
        ),
        (
            "Balanced",
            ORDERS,
            ["a"],
            {"memberWeights": {"a": True}},
            "Option memberWeights has True for a, which is not a n",
        ),
        ("Balanced", ORDERS, ["a"], {"memberRooms": {"abc": [1]}}, r"Option memberRooms has \[1\] for abc, which"),
        (
            "Balanced",
            ORDERS,
            ["a"],
            {"queueWeights": {(1, 2): "x"}},
            r"Option queueWeights has 'x' for \(1, 2\), which",
        ),
        ("Balanced", ORDERS, ["a"], {"queueWeights": {5: "x"}}, r"Option queueWeights has 'x' for 5, which"),
        ("ConsistentHash", ORDERS, ["a"], {"hash": lambda _: None}, "Option hash must return integers"),
        ("ConsistentHash", ORDERS, ["a"], {"hash": 5}, "Option hash must be a function"),
        ("ConsistentHash", ORDERS, ["a"], {"hash": str}, "Option hash must return integers"),
        ("ConsistentHash", ORDERS, ["a"], {"hash": lambda _: 2**64}, "Option hash must return integers"),
        ("Custom", ORDERS, ["a"], {"name": ["mine"]}, r"There is no custom strategy \['mine'\]"),
        ("Custom", ORDERS, ["a"], {"name": "mine"}, r"There is no custom strategy mine: .*\(offered: none\)"),
    ],
)
def test_strategy_rejects_invalid_input_with_a_sentence(
    strategy: str, queues: Any, members: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        allocate(strategy, queues, members, options=options)


@pytest.mark.parametrize(
    ("current", "sentence"),
    [
        ([("orders", "broker-a", 0)], "The mapping of present owners must be a mapping"),
        ({ORDERS[0]: ["a"]}, r"The mapping of present owners has \['a'\] for orders/broker-a/0, which is not a string"),
    ],
)
def test_strategy_rejects_invalid_current_owners_with_a_sentence(current: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        allocate("Averagely", ORDERS, ["a"], current=current)


def test_strategy_accepts_queues_of_any_usual_kind() -> None:
    class Name(str):
        __slots__ = ()

    expected = allocate("Averagely", ORDERS, ["a", "b"])
    lists = [[topic, broker, number] for topic, broker, number in ORDERS]
    ids_of_numpy = [(topic, broker, np.int32(number)) for topic, broker, number in ORDERS]
    subclassed = [(Name(topic), broker, number) for topic, broker, number in ORDERS]
    kinds: tuple[Any, ...] = (lists, ids_of_numpy, subclassed, [*map(Queue._make, ORDERS)], iter(ORDERS))
    for queues in kinds:
        assert allocate("Averagely", queues, ["a", "b"]) == expected


def test_strategy_checks_queues_of_builtin_types_without_parsing_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("rota.strategies.input_checks._parse_queue")
    queues: list[Any] = [ORDERS[0], [*ORDERS[1]], Queue(*ORDERS[2])]  # the ids start at 0
    for kinds in (queues, *([queue] for queue in queues)):
        assert allocate("Averagely", kinds, ["a"])["a"] == [Queue(*queue) for queue in kinds]


def test_strategy_accepts_none_as_current_owner_and_1000_virtual_nodes() -> None:
    assert allocate("Sticky", ORDERS, ["a"], current={ORDERS[0]: None})["a"]  # type: ignore[arg-type]
    assert allocate("ConsistentHash", ORDERS, ["a"], options={"virtualNodes": 1000})["a"]


def test_roster_ignores_current_owners_and_queues_that_no_longer_exist() -> None:
    current = {ORDERS[0]: "gone", ("orders", "gone", 0): "a", ORDERS[1]: "b"}
    assert list(Roster.of(ORDERS[:2], ["a", "b"], current).owners) == [-1, 1]


@pytest.mark.parametrize("result", [None, "all of it", [0, 0], [[0], [0], [0]], [0.5, 1.0, 0.0], [0, 1, 2], [0, -2, 1]])
def test_custom_strategy_result_that_is_invalid_is_rejected(result: object) -> None:
    with pytest.raises(ValueError, match=r"^Custom strategy mine "):
        check_owners("Custom strategy mine", result, a_roster(3, 2))


class RaisingArray:
    """Raises an exception when NumPy converts it to an array."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __array__(self, *_: object, **__: object) -> None:
        raise self._error


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [TypeError("x"), RuntimeError("x"), ValueError("x"), SystemExit(0), GeneratorExit(), UnprintableError()]
)
def test_custom_strategy_exception_becomes_a_sentence(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def throw(*_: object) -> None:
        raise error

    error_name = type(error).__name__
    with pytest.raises(ValueError, match=rf"^Custom strategy mine must return one member .* queues: {error_name}"):
        check_owners("Custom strategy mine", RaisingArray(error), a_roster(3, 2))
    monkeypatch.setattr(sys.modules[check_owners.__module__], "load_strategy", lambda _name: throw)
    with pytest.raises(ValueError, match=rf"^Custom strategy mine failed: {error_name}"):
        allocate("Custom", ORDERS, ["a"], options={"name": "mine"})


def test_custom_strategy_module_that_exits_on_import_becomes_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_once.py").write_text("raise SystemExit(3)\n")
    point = EntryPoint("mine", "exits_at_once:mine", "rota.strategies")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules[check_owners.__module__], "entry_points", lambda **_: [point])
    with pytest.raises(ValueError, match=r"^Custom strategy mine cannot be loaded: SystemExit: 3$"):
        allocate("Custom", ORDERS, ["a"], options={"name": "mine"})


def test_custom_strategy_keyboard_interrupt_is_propagated() -> None:
    with pytest.raises(KeyboardInterrupt):
        check_owners("Custom strategy mine", RaisingArray(KeyboardInterrupt()), a_roster(3, 2))


def test_explain_accepts_every_input_that_can_be_allocated() -> None:
    roster = a_roster(2, 2)
    rooms = {"queueRooms": {"broker-a": "x"}, "memberRooms": {"m0": "x", "m1": "x"}}
    sentence = explain(
        "MachineRoomNearby", roster, prepared("Averagely")(roster), roster.queues[0], {"inner": averagely} | rooms
    )
    assert sentence.endswith("the inner strategy chose it and gives no reason")
    shares = {"members": {"m1": (queue for queue in roster.queues)}}
    assert explain("ByConfig", roster, np.array([1, 1]), roster.queues[0], shares).endswith(
        "the policy names it for m1"
    )
    weights = {roster.queues[0]: 10**400, roster.queues[1]: Fraction(1, 3)}
    owners = prepared("Balanced", {"queueWeights": weights})(roster)
    sentence = explain("Balanced", roster, owners, roster.queues[0], {"queueWeights": weights})
    assert "its weight has the implausible value over 1e308 and counts as" in sentence


def test_explain_names_an_absent_owner_only_if_it_is_given() -> None:
    roster = a_roster(2, 2)
    owners = prepared("Sticky")(roster)
    (with_owner,) = explain_all("Sticky", roster, owners, roster.queues[:1], present={roster.queues[0]: "old"})
    assert "its owner old is no longer a member" in with_owner
    (without_owner,) = explain_all("Sticky", roster, owners, roster.queues[:1])
    assert "old" not in without_owner
    assert "it had no owner" in without_owner


def test_roster_current_owners_array_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        current_owners(a_roster())[0] = 1


@pytest.mark.parametrize(
    ("queues", "members", "sentence"),
    [
        (None, ["m"], "The list of queues is empty"),
        ([("t", "b")], ["m"], r"\('t', 'b'\) is not a queue"),
        (["tb0"], ["m"], "'tb0' is not a queue"),
        (ORDERS, None, "The list of members is empty"),
        (ORDERS, [None], "Member name None is not a string"),
    ],
)
def test_roster_rejects_invalid_queues_and_members_with_a_sentence(queues: Any, members: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        Roster.of(queues, members)


def test_roster_takes_a_single_string_as_one_member() -> None:
    assert Roster.of(ORDERS, "abc").members == ("abc",)


def test_custom_strategy_result_that_is_valid_is_accepted() -> None:
    assert list(check_owners("Custom strategy mine", [1, 0, -1], a_roster(3, 2))) == [1, 0, -1]


def test_weight_that_is_implausible_is_replaced_by_a_typical_one() -> None:
    assert replace_implausible([1.0, 3.0, None, float("nan"), -5.0, float("inf")]) == [1.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    assert replace_implausible([1.0, 1.0, 1e12]) == [1.0, 1.0, 1000.0]
    assert replace_implausible([0.0, 0.0], min_share=0.5) == [0.5, 0.5]
    assert replace_implausible([None, None]) == [1.0, 1.0]


@pytest.mark.parametrize("weight", [1e308, 10**400, 5e-324, 0.0])
def test_balanced_treats_absurd_weights_common_to_all_as_equal(weight: float) -> None:
    weights = {"memberWeights": dict.fromkeys("ab", weight), "queueWeights": dict.fromkeys(ORDERS, weight)}
    shares = allocate("Balanced", ORDERS, ["a", "b"], options=weights)
    assert [len(share) for share in shares.values()] == [4, 4]


def explain_owner(strategy: str, roster: Roster, queue: int, **options: Any) -> str:
    """Return the sentence for a queue of `a_roster`, without the queue."""
    owners = prepared(strategy, options)(roster)
    sentence = explain(strategy, roster, owners, roster.queues[queue], options)
    assert sentence.startswith(f"{roster.queues[queue]} ")
    return sentence.removeprefix(f"{roster.queues[queue]} ")


ROOMS = {"queueRooms": {"broker-a": "east"}, "memberRooms": {"m0": "west", "m1": "east", "m2": "east"}}
FIRST = Queue("orders", "broker-a", 0)
RATES = {Queue("orders", "broker-a", number): rate for number, rate in enumerate([8.0, 1.0, 1.0, 1.0, 1.0])}


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("Averagely", {}, "goes to m1: m1 is member 2 of 3, whose block of orders is broker-a/3 to broker-a/5"),
        (
            "AveragelyByCircle",
            {},
            "goes to m0: m0 is member 1 of 3, and queue 4 of 8 of orders goes to it when queues are dealt in turn",
        ),
        ("ByConfig", {"members": {"m2": [ORDERS[3]]}}, "goes to m2: the policy names it for m2"),
        (
            "ByConfig",
            {"members": {"x": [ORDERS[3]]}},
            "belongs to no member: the policy names it for x, which is not a member",
        ),
        ("ByConfig", {"members": {}}, "belongs to no member: the policy names it for no present member"),
        (
            "ByMachineRoom",
            {"rooms": ["east"]},
            "belongs to no member: broker broker-a names no room (as room@broker would)",
        ),
        ("ConsistentHash", {}, "goes to m1: the next of the 30 virtual nodes on the ring is one of the 10 of m1"),
        ("ConsistentHash", {"virtualNodes": 0}, "belongs to no member: with virtualNodes 0 no member is on the ring"),
        ("Sticky", {}, "goes to m0: it had no owner; m0 had 0 queues (an even share is 2 or 3)"),
        (
            "MachineRoomNearby",
            ROOMS | {"inner": "AveragelyByCircle"},
            "goes to m2: its room east has 2 of 3 members; among them m2 is member 2 of 2, and queue 4 of 8 of orders",
        ),
    ],
)
def test_explain_gives_the_reason_of_each_strategy(strategy: str, options: dict[str, Any], sentence: str) -> None:
    assert explain_owner(strategy, a_roster(8, 3), 3, **options).startswith(sentence)


@pytest.mark.parametrize(
    ("broker", "sentence"),
    [
        (
            "east@b",
            "goes to m0: room east is in the policy, and m0 is member 1 of the 2 that share its queues",
        ),
        ("west@b", "belongs to no member: room west is not among the policy's rooms: east"),
    ],
)
def test_by_machine_room_names_the_brokers_room(broker: str, sentence: str) -> None:
    queue = Queue("orders", broker, 0)
    roster = Roster.of([queue], ["m0", "m1"])
    owners = prepared("ByMachineRoom", {"rooms": ["east"]})(roster)
    assert explain("ByMachineRoom", roster, owners, queue, {"rooms": ["east"]}).startswith(f"{queue} {sentence}")


def test_sticky_reason_counts_kept_queues_and_says_that_retry_queues_are_last() -> None:
    roster = a_roster(6, 2, dict.fromkeys(range(6), "m0"))
    assert explain_owner("Sticky", roster, 0) == "stays with m0: m0 keeps 3 of its 6 queues (an even share is 3)"
    assert (
        explain_owner("Sticky", roster, 5)
        == "goes from m0 to m1: m0 had 6 queues and keeps 3, m1 had 0 (an even share is 3)"
    )
    retry = Roster.of([*roster.queues, ("%RETRY%g", "broker-a", 0)], roster.members)
    assert "retry queues are spread after the others" in explain_owner("Sticky", retry, 0)


COUNTED = "; no weights are known, so queues are counted"
OWNED = {0: "m0", 1: "m1", 2: "m1", 3: "m1", 4: "m2"}
MORE_EVEN = "goes from m1 to m2: with m2 (25% of its share) the fleet is more even than with m1 (75% of its share)"


@pytest.mark.parametrize(
    ("owned", "queue", "options", "sentence"),
    [
        ({}, 0, {}, f"goes to m0: it had no owner; m0 was the emptiest (0 queues){COUNTED}"),
        ({}, 0, ROOMS, f"goes to m1: it had no owner; m1 in its own room east had no queue yet{COUNTED}"),
        ({}, 2, ROOMS, "goes to m0: it had no owner; its room east was full, and m0 in room west was the emptiest"),
        (
            OWNED,
            0,
            {"maxMoves": 0},
            "stays with m0: it is the only queue of m0, and a member's last queue is never taken",
        ),
        (OWNED, 1, {"queueWeights": RATES}, MORE_EVEN),
        (OWNED, 1, {"queueWeights": dict.fromkeys(RATES), "maxMoves": 0}, f"(m1 has 3 queues, m0 1 queue){COUNTED}"),
        (OWNED, 0, {"queueWeights": RATES | {FIRST: 1e9}}, "weight has the implausible value 1e+09 and counts as 1000"),
        (OWNED, 0, {"queueWeights": RATES | {FIRST: -5.0}}, "its weight has the implausible value -5 and counts as 1"),
        (OWNED, 0, {"queueWeights": RATES | {FIRST: None}}, "its weight is unknown and counts as 1"),
        (
            OWNED,
            0,
            {"memberWeights": {"m0": float("nan"), "m1": 2.0}},
            "the capacity of m0 has the implausible value nan and counts as 2",
        ),
        (OWNED, 0, {"memberWeights": {"m1": 2.0}}, "the capacity of m0 is unknown and counts as 2"),
    ],
)
def test_balanced_reason_gives_its_figures(
    owned: dict[int, str], queue: int, options: dict[str, Any], sentence: str
) -> None:
    assert sentence in explain_owner("Balanced", a_roster(5, 3, owned), queue, **options)


def test_balanced_reason_follows_its_steps_in_order() -> None:
    roster = a_roster(5, 3, dict.fromkeys(range(5), "m0"))
    first, second = "m1 was idle, and m0 (5 queues) was", "m2 was idle, and m0 (4 queues) was"
    assert f"goes from m0 to m1: {first} the fullest that could spare one" in explain_owner("Balanced", roster, 4)
    assert f"goes from m0 to m2: {second} the fullest that could spare one" in explain_owner("Balanced", roster, 3)
    third = "with m1 (1 queue) the fleet is more even than with m0 (3 queues)"
    assert f"goes from m0 to m1: {third}" in explain_owner("Balanced", roster, 0)


def test_balanced_reason_names_the_better_owner_when_max_moves_is_reached() -> None:
    roster = a_roster(5, 3, dict.fromkeys(range(5), "m0"))
    sentence = explain_owner("Balanced", roster, 0, maxMoves=1)
    reason = "it would be better with m2, the emptiest of the others, but maxMoves 1 allows no more moves"
    assert f"stays with m0: {reason} (m0 has 4 queues, m2 0 queues)" in sentence


def test_balanced_reason_says_that_members_are_too_nearly_equal() -> None:
    owned = {number: f"m{number % 2}" for number in range(202)} | {201: "m0"}
    sentence = explain_owner("Balanced", a_roster(202, 2, owned), 0, memberWeights={"m0": 1.0, "m1": 0.999})
    assert (
        "m1, the emptiest of the others, is almost as full, so a move is not worth it (m0 has 101% of its share"
        in sentence
    )


TWO_ROOMS = {
    "queueRooms": {"east-b": "east", "north-b": "north", "west-b": "west"},
    "memberRooms": {"m0": "east", "m1": "west"},
}


def explain_two_rooms(east: int, west: int, remote: int = 0) -> list[str]:
    """Explain all queues of two rooms: the member of each room owns its queues, except `remote` of them."""
    queues = [("orders", "east-b", number) for number in range(east)]
    queues += [("orders", "west-b", number) for number in range(west)]
    owners_by_broker = {"east-b": ("m0", "m1"), "west-b": ("m1", "m0")}
    roster = Roster.of(queues, ["m0", "m1"], {queue: owners_by_broker[queue[1]][queue[2] < remote] for queue in queues})
    owners = prepared("Balanced", TWO_ROOMS)(roster)
    return explain_all("Balanced", roster, owners, roster.queues, TWO_ROOMS)


def test_balanced_reason_says_that_a_queue_returns_to_its_room() -> None:
    sentences = explain_two_rooms(40, 40, remote=1)
    assert (
        "goes from m0 to m1: m1 in its own room west (40 queues) could take it from m0 (40 queues), which is in "
        "another room" in sentences[40]
    )


def test_balanced_reason_says_that_evenness_does_not_justify_leaving_a_room() -> None:
    sentences = explain_two_rooms(42, 40)
    reason = "the fleet would be more even with m1, the emptiest of the others in room west"
    assert (
        f"stays with m0: {reason}, but not by enough to leave room east (m0 has 42 queues, m1 40 queues)"
        in sentences[0]
    )


def test_balanced_reason_says_that_a_room_has_no_member() -> None:
    queues = [("orders", "east-b", 0), ("orders", "north-b", 0)]
    roster = Roster.of(queues, ["m0", "m1"])
    sentences = explain_all("Balanced", roster, prepared("Balanced", TWO_ROOMS)(roster), queues, TWO_ROOMS)
    assert (
        "it had no owner; its room north has no member, and m1 in room west was the emptiest (0 queues)" in sentences[1]
    )


def test_explain_gives_no_reason_for_an_owner_the_strategy_did_not_choose() -> None:
    roster = a_roster(2, 2)
    reversed_owners = prepared("Averagely")(roster)[::-1]
    assert explain("Averagely", roster, reversed_owners, roster.queues[0]) == (
        "orders/broker-a/0 goes to m1, which is not what Averagely returns"
    )


def test_explain_rejects_a_queue_outside_the_roster() -> None:
    roster = a_roster(2, 2)
    with pytest.raises(ValueError, match=r"^There is no queue orders/broker-a/7 among these 2"):
        explain("Averagely", roster, prepared("Averagely")(roster), ("orders", "broker-a", 7))


@pytest.mark.parametrize(("queues", "members", "capacity"), [(5, 2, 0.7), (7, 2, 1.1), (7, 3, 3.3), (8, 3, 0.7)])
def test_balanced_does_not_exchange_placements_of_equal_cost_for_ever(
    queues: int, members: int, capacity: float
) -> None:
    owners = prepared("Balanced", {"memberWeights": {f"m{number}": capacity for number in range(members)}})(
        a_roster(queues, members)
    )
    assert np.ptp(np.bincount(owners, minlength=members)) == 1
