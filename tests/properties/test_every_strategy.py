"""Properties of every strategy on every roster, and of single strategies."""

import itertools
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from builders import BROKERS, TOPICS, a_roster, rosters
from rota.model import NO_OWNER, RETRY_TOPIC_PREFIX, Roster
from rota.strategies import STRATEGIES, allocate, explain_all, prepared

QUEUE_ROOMS = {broker: broker.partition("@")[0] for broker in BROKERS}
MEMBER_ROOMS = {f"m{number}": f"room{number % 3}" for number in range(9)}
OPTIONS: dict[str, dict[str, Any]] = {
    "Averagely": {},
    "AveragelyByCircle": {},
    "ByConfig": {"members": {"m0": [("orders", "plain", 0)], "gone": [("orders", "plain", 1)]}},
    "ByMachineRoom": {"rooms": ["room1"]},
    "MachineRoomNearby": {"inner": "Sticky", "queueRooms": QUEUE_ROOMS, "memberRooms": MEMBER_ROOMS},
    "ConsistentHash": {},
    "Sticky": {},
    "Balanced": {"queueRooms": QUEUE_ROOMS, "memberRooms": MEMBER_ROOMS},
}
COMPLETE = sorted(set(OPTIONS) - {"ByConfig", "ByMachineRoom"})  # these two may leave queues without an owner
weights = st.one_of(st.none(), st.sampled_from([float("nan"), -1.0, 0.0, 1e12, float("inf")]), st.floats(0, 100))


def counts(roster: Roster, owners: Any, *, only: str = "") -> list[int]:
    """Return how many queues each member owns."""
    owned = Counter(int(owner) for queue, owner in zip(roster.queues, owners, strict=True) if only in queue.topic)
    return [owned[member] for member in range(len(roster.members))]


def counts_without_retry(roster: Roster, owners: Any) -> list[int]:
    """Return how many queues each member owns, without those of retry topics."""
    retry_counts = counts(roster, owners, only=RETRY_TOPIC_PREFIX)
    return [total - retry for total, retry in zip(counts(roster, owners), retry_counts, strict=True)]


def moves(roster: Roster, owners: Any) -> int:
    """Return how many queues are moved away from a present member."""
    return sum(previous not in {NO_OWNER, new} for previous, new in zip(roster.owners, owners, strict=True))


@pytest.mark.parametrize("name", sorted(OPTIONS))
@given(roster=rosters())
def test_strategy_assigns_every_queue_to_a_known_member_or_none(name: str, roster: Roster) -> None:
    owners = STRATEGIES[name](roster, **OPTIONS[name])
    assert owners.dtype == np.int32
    assert len(owners) == len(roster.queues)
    assert all(NO_OWNER <= owner < len(roster.members) for owner in owners)
    if name in COMPLETE:
        assert NO_OWNER not in owners


@pytest.mark.parametrize("name", sorted(OPTIONS))
@given(roster=rosters(), chance=st.randoms())
def test_strategy_result_is_independent_of_input_order(name: str, roster: Roster, chance: Any) -> None:
    queues, members = list(roster.queues), list(roster.members)
    current = {queue: members[owner] for queue, owner in zip(queues, roster.owners, strict=True) if owner >= 0}
    expected = allocate(name, queues, members, options=OPTIONS[name], current=current)
    chance.shuffle(queues)
    chance.shuffle(members)
    assert allocate(name, queues, members, options=OPTIONS[name], current=current) == expected


@pytest.mark.parametrize("name", sorted(OPTIONS))
@given(roster=rosters())
def test_strategy_keeps_its_own_result_as_current_owners(name: str, roster: Roster) -> None:
    first = prepared(name, OPTIONS[name])(roster)
    current = {queue: roster.members[owner] for queue, owner in zip(roster.queues, first, strict=True) if owner >= 0}
    again = prepared(name, OPTIONS[name])(Roster.of(roster.queues, roster.members, current))
    assert list(again) == list(first)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@given(roster=rosters())
def test_strategy_explanation_of_every_queue_names_its_owner(name: str, roster: Roster) -> None:
    owners = prepared(name, OPTIONS[name])(roster)
    sentences = explain_all(name, roster, owners, roster.queues, OPTIONS[name])
    for queue, previous, new, sentence in zip(roster.queues, roster.owners, owners, sentences, strict=True):
        owner = "no member" if new == NO_OWNER else roster.members[new]
        move = rf"(from m\d )?to {owner}" if previous != new else f"(stays with|belongs to) {owner}"
        assert re.fullmatch(rf"{re.escape(str(queue))} (goes )?{move}: \S.*", sentence)


@pytest.mark.parametrize("name", ["Averagely", "AveragelyByCircle"])
@given(roster=rosters())
def test_averagely_spreads_each_topic_evenly(name: str, roster: Roster) -> None:
    owners = STRATEGIES[name](roster)
    for topic in TOPICS:
        owned = counts(roster, owners, only=topic)
        assert max(owned) - min(owned) <= 1


@given(roster=rosters())
def test_sticky_spreads_all_topics_evenly_with_and_without_retry_queues(roster: Roster) -> None:
    owners = STRATEGIES["Sticky"](roster)
    all_counts = counts(roster, owners)
    message_counts = counts_without_retry(roster, owners)
    assert max(all_counts) - min(all_counts) <= 1
    assert max(message_counts) - min(message_counts) <= 1


@given(roster=rosters(topics=("orders", "payments"), largest=1))
def test_sticky_needs_the_fewest_moves_of_all_even_assignments(roster: Roster) -> None:
    members, queues = len(roster.members), len(roster.queues)
    assume(members**queues <= 2_000)  # all assignments are tried
    even_moves = []
    for assignment in itertools.product(range(members), repeat=queues):
        owned = counts(roster, assignment)
        if max(owned) - min(owned) <= 1:
            even_moves.append(moves(roster, assignment))
    assert moves(roster, STRATEGIES["Sticky"](roster)) == min(even_moves)


@given(roster=rosters())
def test_sticky_adds_no_queue_to_a_member_that_loses_one(roster: Roster) -> None:
    owners = STRATEGIES["Sticky"](roster)
    owned = counts(roster, owners)
    for member in range(len(roster.members)):
        lost = sum(previous == member != new for previous, new in zip(roster.owners, owners, strict=True))
        if lost and not any(queue.topic.startswith(RETRY_TOPIC_PREFIX) for queue in roster.queues):
            assert owned[member] == counts(roster, roster.owners)[member] - lost


@given(roster=rosters(), budget=st.integers(0, 8), data=st.data())
def test_balanced_keeps_its_move_budget_and_leaves_no_member_idle_for_any_weights(
    roster: Roster, budget: int, data: st.DataObject
) -> None:
    queue_weights = {queue: data.draw(weights) for queue in roster.queues}
    member_weights = {member: data.draw(weights) for member in roster.members}
    options = {"queueWeights": queue_weights, "memberWeights": member_weights}
    limited = STRATEGIES["Balanced"](roster, **options, maxMoves=budget)
    assert moves(roster, limited) <= budget
    unlimited_counts = counts(roster, STRATEGIES["Balanced"](roster, **options))
    assert 0 not in unlimited_counts or max(unlimited_counts) <= 1


@given(roster=rosters())
def test_balanced_without_weights_spreads_queue_counts_evenly_despite_retry_queues(roster: Roster) -> None:
    owners = STRATEGIES["Balanced"](roster)
    message_counts = counts_without_retry(roster, owners)
    assert max(message_counts) - min(message_counts) <= 1


@given(roster=rosters(), capacity=st.one_of(st.sampled_from([0.7, 1.1, 3.3]), st.floats(0.01, 100)))
def test_balanced_terminates_when_rounding_makes_equal_placements_look_unequal(roster: Roster, capacity: float) -> None:
    owners = STRATEGIES["Balanced"](roster, memberWeights=dict.fromkeys(roster.members, capacity))
    message_counts = counts_without_retry(roster, owners)
    assert max(message_counts) - min(message_counts) <= 1


@given(roster=rosters(), data=st.data())
def test_balanced_keeps_its_own_result_for_any_weights(roster: Roster, data: st.DataObject) -> None:
    options = {
        "queueWeights": {queue: data.draw(weights) for queue in roster.queues},
        "memberWeights": {member: data.draw(weights) for member in roster.members},
        "queueRooms": QUEUE_ROOMS,
        "memberRooms": MEMBER_ROOMS,
    }
    first = STRATEGIES["Balanced"](roster, **options)
    current = {queue: roster.members[owner] for queue, owner in zip(roster.queues, first, strict=True)}
    again = STRATEGIES["Balanced"](Roster.of(roster.queues, roster.members, current), **options)
    assert list(again) == list(first)


@given(weight=st.lists(st.floats(0.1, 10), min_size=2, max_size=20), budget=st.integers(0, 3), data=st.data())
def test_balanced_explanations_for_keeping_a_queue_hold_when_recomputed(
    weight: list[float], budget: int, data: st.DataObject
) -> None:
    members = data.draw(st.integers(2, 6))
    owned = {number: f"m{data.draw(st.integers(0, members - 1))}" for number in range(len(weight))}
    roster = a_roster(len(weight), members, owned)
    options = {"queueWeights": dict(zip(roster.queues, weight, strict=True)), "maxMoves": budget}
    owners = STRATEGIES["Balanced"](roster, **options)
    load = np.bincount(owners, weights=weight, minlength=members)
    fair = sum(weight) / members
    for number, sentence in enumerate(explain_all("Balanced", roster, owners, roster.queues, options)):
        for name, percent in re.findall(r"(m\d) (?:has )?(\d+)% of its share", sentence.partition("(")[2]):
            assert abs(load[int(name[1:])] / fair * 100 - int(percent)) < 1.5
        match = re.search(r"(m\d), the emptiest of the others, ", sentence)
        if match:
            present_owner = owners[number]
            candidate = int(match[1][1:])
            gap = (load[present_owner] - load[candidate]) / fair
            is_better = gap - weight[number] / fair > 0  # then the move reduces the sum of squared loads
            assert load[candidate] <= min(np.delete(load, present_owner)) + 0.01 * fair
            assert is_better == ("more even" not in sentence) or abs(gap - weight[number] / fair) < 0.01
            assert (gap < 0.03) or "almost as full" not in sentence


@given(queues=st.integers(1, 30), members=st.integers(1, 9))
def test_balanced_prefers_members_in_the_queues_machine_room(queues: int, members: int) -> None:
    queue_ids = [("orders", f"room{number % 2}@b", number) for number in range(2 * queues)]
    names = [f"m{number}" for number in range(2 * members)]
    queue_rooms = {"room0@b": "room0", "room1@b": "room1"}
    member_rooms = {name: f"room{number % 2}" for number, name in enumerate(names)}
    shares = allocate("Balanced", queue_ids, names, options={"queueRooms": queue_rooms, "memberRooms": member_rooms})
    assert all(queue_rooms[queue.broker] == member_rooms[member] for member, share in shares.items() for queue in share)


@given(weight=st.lists(st.floats(0.1, 10), min_size=1, max_size=30), members=st.integers(1, 6))
def test_balanced_load_differs_by_at_most_about_the_heaviest_queue(weight: list[float], members: int) -> None:
    roster = a_roster(len(weight), members)
    loads = [0.0] * members
    options = {"queueWeights": dict(zip(roster.queues, weight, strict=True))}
    for owner, queue_weight in zip(STRATEGIES["Balanced"](roster, **options), weight, strict=True):
        loads[owner] += queue_weight
    assert max(loads) - min(loads) <= max(weight) * 1.05 + sum(weight) / members * 0.05


@given(roster=rosters(), removed=st.integers(0, 8))
def test_consistent_hash_moves_only_the_queues_of_a_removed_member(roster: Roster, removed: int) -> None:
    if len(roster.members) < 2:
        return
    removed_member = roster.members[removed % len(roster.members)]
    previous_shares = allocate("ConsistentHash", roster.queues, roster.members)
    shares = allocate("ConsistentHash", roster.queues, [name for name in roster.members if name != removed_member])
    assert all(set(previous_shares[member]) <= set(shares[member]) for member in shares)
