"""Tests the gates that hold back a rebalance: reason, message and requeue time."""

from typing import Any

import pytest

from rota.gates import GateFacts, Hold, first_hold
from rota.model import Reason


@pytest.mark.parametrize(
    ("facts", "reason", "message", "seconds"),
    [
        ({"moves": 0}, Reason.NOTHING_WOULD_CHANGE, "Every queue is with the member that the policy chooses", None),
        ({"paused": True}, Reason.PAUSED, "The policy is paused; 2 queues will move once it is resumed", None),
        (
            {"missing_metadata": ("a",)},
            Reason.BROKER_METADATA_UNAVAILABLE,
            "The broker returned no metadata of a; no queue moves until it does",
            None,
        ),
        (
            {"members_in_transition": ("m3",), "transition_seconds_left": 0.4},
            Reason.MEMBERS_STILL_JOINING,
            "Waiting for m3 to join or leave; 2 queues will move then",
            0.4,
        ),
        (
            {"queues_releasing": 3, "release_seconds_left": 0.4},
            Reason.HANDOVER_IN_FLIGHT,
            "3 queues are still being released; 2 queues will move then",
            0.4,
        ),
        (
            {"moves_left": 0, "budget_refill_seconds": 60.0},
            Reason.BUDGET_SPENT,
            "The budget is used up; 2 queues will move as it is refilled",
            60.0,
        ),
        (
            {"debounce": 0.5, "seconds_since_write": 0.25},
            Reason.DEBOUNCE,
            "An assignment was just written; 2 queues will move after the debounce time",
            0.25,
        ),
    ],
)
def test_gate_returns_reason_message_and_requeue_time(
    facts: dict[str, Any], reason: Reason, message: str, seconds: float | None
) -> None:
    hold = first_hold(GateFacts(**{"moves": 2} | facts))
    assert hold == Hold(reason, message, seconds)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"seconds_since_write": 0.0},
        {"debounce": 0.5, "seconds_since_write": 0.5},
        {"debounce": 0.5, "seconds_since_write": 0.7},
        {"members_in_transition": ("m3",)},
        {"members_in_transition": ("m3",), "transition_seconds_left": -1.0},
        {"transition_seconds_left": 20.0},
        {"queues_releasing": 1},
        {"queues_releasing": 1, "release_seconds_left": -1.0},
        {"release_seconds_left": 35.0},
        {"moves_left": 1, "budget_refill_seconds": 60.0},
    ],
    ids=str,
)
def test_gate_whose_condition_is_past_or_absent_holds_no_move(facts: dict[str, Any]) -> None:
    assert first_hold(GateFacts(moves=1, **facts)) is None


def test_gate_precedence_runs_from_no_change_and_pause_to_debounce() -> None:
    facts: dict[str, Any] = {
        "debounce": 0.5,
        "seconds_since_write": 0.0,
        "moves_left": 0,
        "queues_releasing": 1,
        "release_seconds_left": 35.0,
        "members_in_transition": ("m3",),
        "transition_seconds_left": 20.0,
        "missing_metadata": ("orders",),
        "paused": True,
        "moves": 0,
    }
    reasons = []
    for fact, passing_value in (
        ("moves", 1),
        ("paused", False),
        ("missing_metadata", ()),
        ("members_in_transition", ()),
        ("queues_releasing", 0),
        ("moves_left", None),
        ("debounce", 0.0),
    ):
        hold = first_hold(GateFacts(**facts))
        reasons.append(hold and hold.reason)
        facts[fact] = passing_value
    assert reasons == [
        Reason.NOTHING_WOULD_CHANGE,
        Reason.PAUSED,
        Reason.BROKER_METADATA_UNAVAILABLE,
        Reason.MEMBERS_STILL_JOINING,
        Reason.HANDOVER_IN_FLIGHT,
        Reason.BUDGET_SPENT,
        Reason.DEBOUNCE,
    ]
    assert first_hold(GateFacts(**facts)) is None


def test_budget_of_zero_moves_has_no_requeue_time() -> None:
    assert first_hold(GateFacts(moves=2, moves_left=0, budget_refill_seconds=None)) == Hold(
        Reason.BUDGET_SPENT, "budget.maxMoves is 0; 2 queues will move once it is raised"
    )


def test_budget_spent_is_requeued_when_it_refills_even_at_once() -> None:
    assert first_hold(GateFacts(moves=1, moves_left=0)) == Hold(
        Reason.BUDGET_SPENT, "The budget is used up; 1 queue will move as it is refilled", 0.0
    )


@pytest.mark.parametrize(
    ("names", "beginning"),
    [
        (("a", "b", "c"), "The broker returned no metadata of a, b, c; "),
        (("a", "b", "c", "d", "e"), "The broker returned no metadata of a, b, c and 2 more; "),
    ],
)
def test_gate_message_truncates_long_name_lists(names: tuple[str, ...], beginning: str) -> None:
    hold = first_hold(GateFacts(moves=1, missing_metadata=names))
    assert hold
    assert hold.message.startswith(beginning)


def test_gate_message_uses_singular_for_one_queue() -> None:
    hold = first_hold(GateFacts(moves=1, queues_releasing=1, release_seconds_left=9.0))
    assert hold
    assert hold.message == "1 queue is still being released; 1 queue will move then"
