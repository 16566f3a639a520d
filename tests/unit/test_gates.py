"""What holds a rebalance back, what people are told then, and when to ask again."""

from typing import Any

import pytest

from rota.gates import GateFacts, Hold, first_hold
from rota.model import Reason


@pytest.mark.parametrize(
    ("facts", "reason", "told", "seconds"),
    [
        ({"wanted": 0}, Reason.NOTHING_WOULD_CHANGE, "Every queue is where the policy wants it", None),
        ({"paused": True}, Reason.PAUSED, "The policy is paused; 2 queues will move when it no longer is", None),
        ({"unseen": ("a",)}, Reason.NO_VIEW, "There is no view of a; nothing moves until there is", None),
        (
            {"moving": ("m3",), "patience": 0.4},
            Reason.MEMBERS_STILL_JOINING,
            "Waiting for m3 to come or go; 2 queues will move then",
            0.4,
        ),
        (
            {"releasing": 3, "release_time": 0.4},
            Reason.HANDOVER_IN_FLIGHT,
            "3 queues are still being released; 2 queues will move then",
            0.4,
        ),
        (
            {"budget": 0, "budget_back": 60.0},
            Reason.BUDGET_SPENT,
            "The budget is spent; 2 queues will move as it comes back",
            60.0,
        ),
        (
            {"debounce": 0.5, "written": 0.25},
            Reason.DEBOUNCE,
            "The last document was just written; 2 queues will move after it",
            0.25,
        ),
    ],
)
def test_gate_returns_reason_message_and_requeue_time(
    facts: dict[str, Any], reason: Reason, told: str, seconds: float | None
) -> None:
    found = first_hold(GateFacts(**{"wanted": 2} | facts))
    assert found == Hold(reason, told, seconds)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"written": 0.0},
        {"debounce": 0.5, "written": 0.5},
        {"debounce": 0.5, "written": 0.7},
        {"moving": ("m3",)},
        {"moving": ("m3",), "patience": -1.0},
        {"patience": 20.0},
        {"releasing": 1},
        {"releasing": 1, "release_time": -1.0},
        {"release_time": 35.0},
        {"budget": 1, "budget_back": 60.0},
    ],
    ids=str,
)
def test_gate_whose_condition_is_past_or_absent_holds_no_move(facts: dict[str, Any]) -> None:
    assert first_hold(GateFacts(wanted=1, **facts)) is None


def test_gate_precedence_runs_from_no_change_and_pause_to_debounce() -> None:
    everything: dict[str, Any] = {
        "debounce": 0.5,
        "written": 0.0,
        "budget": 0,
        "releasing": 1,
        "release_time": 35.0,
        "moving": ("m3",),
        "patience": 20.0,
        "unseen": ("orders",),
        "paused": True,
        "wanted": 0,
    }
    told = []
    for fact, passed in (
        ("wanted", 1),
        ("paused", False),
        ("unseen", ()),
        ("moving", ()),
        ("releasing", 0),
        ("budget", None),
        ("debounce", 0.0),
    ):
        found = first_hold(GateFacts(**everything))
        told.append(found and found.reason)
        everything[fact] = passed
    assert told == [
        Reason.NOTHING_WOULD_CHANGE,
        Reason.PAUSED,
        Reason.NO_VIEW,
        Reason.MEMBERS_STILL_JOINING,
        Reason.HANDOVER_IN_FLIGHT,
        Reason.BUDGET_SPENT,
        Reason.DEBOUNCE,
    ]
    assert first_hold(GateFacts(**everything)) is None


def test_budget_of_zero_moves_has_no_requeue_time() -> None:
    assert first_hold(GateFacts(wanted=2, budget=0, budget_back=None)) == Hold(
        Reason.BUDGET_SPENT, "budget.maxMoves is 0; 2 queues will move once it is more"
    )


def test_budget_spent_is_requeued_when_it_refills_even_at_once() -> None:
    assert first_hold(GateFacts(wanted=1, budget=0)) == Hold(
        Reason.BUDGET_SPENT, "The budget is spent; 1 queue will move as it comes back", 0.0
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("a", "b", "c"), "There is no view of a, b, c; "),
        (("a", "b", "c", "d", "e"), "There is no view of a, b, c and 2 more; "),
    ],
)
def test_gate_message_truncates_long_name_lists(names: tuple[str, ...], told: str) -> None:
    found = first_hold(GateFacts(wanted=1, unseen=names))
    assert found
    assert found.message.startswith(told)


def test_gate_message_uses_singular_for_one_queue() -> None:
    found = first_hold(GateFacts(wanted=1, releasing=1, release_time=9.0))
    assert found
    assert found.message == "1 queue is still being released; 1 queue will move then"
