"""Gates: the checks that can hold a rebalance back. Each returns its reason, and when to check again.

They hold back revokes only. A queue is always granted once its holder has released it, has ended or is lost: a gate
would only leave it without a consumer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rota.model import Reason
from rota.sentences import join_names, pluralize


class Hold(NamedTuple):
    """Why a rebalance is held back; after `seconds_left` it may be allowed even if nothing else changes."""

    reason: Reason
    message: str
    seconds_left: float | None = None  # None: only a user or a broker can end the hold


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFacts:
    """The input of the gates."""

    moves: int  # queues that the rebalance would move from one member to another
    is_policy_valid: bool = True
    paused: bool = False
    missing_metadata: tuple[str, ...] = ()  # what brokers did not return: topics, or the group's consumers
    debounce: float = 0.0  # seconds to wait after each written assignment
    seconds_since_write: float = float("inf")
    members_in_transition: tuple[str, ...] = ()  # members that are joining or leaving
    transition_seconds_left: float = 0.0  # seconds until the earliest of their timeouts
    queues_releasing: int = 0  # queues that their holders still have to release
    release_seconds_left: float = 0.0  # seconds until the rebalance no longer waits for these queues
    moves_left: int | None = None  # None: no limit
    budget_refill_seconds: float | None = 0.0  # seconds until the budget allows more moves; None: it never does


def invalid_policy(facts: GateFacts) -> Hold | None:
    """Hold if the policy is invalid: neither the desired owners nor the limits of moves are known."""
    if not facts.is_policy_valid:
        message = "The policy is missing or invalid; every queue stays with its owner until that is corrected"
        return Hold(Reason.INVALID_POLICY, message)
    return None


def nothing_would_change(facts: GateFacts) -> Hold | None:
    """Hold if every queue is with the member that the policy gives it to."""
    if not facts.moves:
        return Hold(Reason.NOTHING_WOULD_CHANGE, "Every queue is with the member that the policy chooses")
    return None


def paused(facts: GateFacts) -> Hold | None:
    """Hold if the policy is paused: no queue is moved until a user resumes it."""
    if facts.paused:
        return Hold(Reason.PAUSED, f"The policy is paused; {_describe_moves(facts.moves)} once it is resumed")
    return None


def metadata_missing(facts: GateFacts) -> Hold | None:
    """Hold while queues of a topic, or the group's consumers, are unknown: that must not change ownership."""
    if facts.missing_metadata:
        names = join_names(facts.missing_metadata)
        message = f"The broker returned no metadata of {names}; no queue moves until it does"
        return Hold(Reason.BROKER_METADATA_UNAVAILABLE, message)
    return None


def debounce(facts: GateFacts) -> Hold | None:
    """Hold for the policy's debounce time after each document."""
    remaining = facts.debounce - facts.seconds_since_write
    if remaining > 0:
        message = f"An assignment was just written; {_describe_moves(facts.moves)} after the debounce time"
        return Hold(Reason.DEBOUNCE, message, remaining)
    return None


def members_joining_or_leaving(facts: GateFacts) -> Hold | None:
    """Hold while members join or leave.

    Otherwise a rollout would move queues twice for each pod: when the old one leaves, and when the new one joins.
    """
    if facts.members_in_transition and facts.transition_seconds_left > 0:
        names = join_names(facts.members_in_transition)
        message = f"Waiting for {names} to join or leave; {_describe_moves(facts.moves)} then"
        return Hold(Reason.MEMBERS_STILL_JOINING, message, facts.transition_seconds_left)
    return None


def handover_in_flight(facts: GateFacts) -> Hold | None:
    """Hold while other queues are being released, for at most `release_seconds_left`."""
    if facts.queues_releasing and facts.release_seconds_left > 0:
        verb = "is" if facts.queues_releasing == 1 else "are"
        subject = f"{pluralize(facts.queues_releasing, 'queue')} {verb}"
        message = f"{subject} still being released; {_describe_moves(facts.moves)} then"
        return Hold(Reason.HANDOVER_IN_FLIGHT, message, facts.release_seconds_left)
    return None


def budget_spent(facts: GateFacts) -> Hold | None:
    """Hold while the policy's budget of moves is used up."""
    if facts.moves_left is not None and facts.moves_left <= 0:
        if facts.budget_refill_seconds is None:
            message = f"budget.maxMoves is 0; {_describe_moves(facts.moves)} once it is raised"
            return Hold(Reason.BUDGET_SPENT, message)
        message = f"The budget is used up; {_describe_moves(facts.moves)} as it is refilled"
        return Hold(Reason.BUDGET_SPENT, message, facts.budget_refill_seconds)
    return None


# Users read about the first gate that holds. Gates that hold until something changes come before temporary ones;
# `budget_spent` is temporary unless the budget is 0.
GATES: tuple[Callable[[GateFacts], Hold | None], ...] = (
    invalid_policy,
    nothing_would_change,
    paused,
    metadata_missing,
    members_joining_or_leaving,
    handover_in_flight,
    budget_spent,
    debounce,
)


def first_hold(facts: GateFacts) -> Hold | None:
    """Return the first gate that holds, or None if the rebalance may go ahead."""
    for gate in GATES:
        if hold := gate(facts):
            return hold
    return None


def _describe_moves(count: int) -> str:
    return f"{pluralize(count, 'queue')} will move"
