"""The checks that can hold a rebalance back: a literal chain, each of which says why, and when to ask again.

They hold back revokes only. A queue that is released, ended or lost is always granted: a gate that kept one from
being worked would do harm and save nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rota.model import Reason
from rota.sentences import listed


class Held(NamedTuple):
    """That and why a rebalance is held back; `seconds`: time alone may lift it after so long."""

    reason: Reason
    message: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the gates look at."""

    wanted: int  # queues that would be taken from one member for another
    followed: bool = True  # there is a policy that can be followed
    paused: bool = False
    unseen: tuple[str, ...] = ()  # what there is no view of
    debounce: float = 0.0
    written: float = float("inf")  # seconds since the last document
    moving: tuple[str, ...] = ()  # members that come or go at this moment
    patience: float = 0.0  # how long until the first of them is no longer waited for
    releasing: int = 0  # queues under way
    release_time: float = 0.0  # how long they may still take before others need not wait for them
    budget: int | None = None  # moves left
    budget_back: float | None = 0.0  # seconds until there are more; None: it never has any


def no_policy(facts: Facts) -> Held | None:
    """Nobody can say what the policy wants, or how much of it at a time."""
    if not facts.followed:
        return Held(Reason.INVALID_POLICY, "The policy cannot be followed; who owns what stays as it is until it can")
    return None


def nothing_would_change(facts: Facts) -> Held | None:
    """Every queue is where it shall be."""
    if not facts.wanted:
        return Held(Reason.NOTHING_WOULD_CHANGE, "Every queue is where the policy wants it")
    return None


def paused(facts: Facts) -> Held | None:
    """The policy is paused: who owns what is frozen."""
    if facts.paused:
        return Held(Reason.PAUSED, f"The policy is paused; {_moves(facts.wanted)} when it no longer is")
    return None


def no_view(facts: Facts) -> Held | None:
    """Something could not be seen, and what is not seen changes nothing."""
    if facts.unseen:
        return Held(Reason.NO_VIEW, f"There is no view of {listed(facts.unseen)}; nothing moves until there is")
    return None


def debounce(facts: Facts) -> Held | None:
    """The last document is too young."""
    left = facts.debounce - facts.written
    if left > 0:
        return Held(Reason.DEBOUNCE, f"The last document was just written; {_moves(facts.wanted)} after it", left)
    return None


def members_still_joining(facts: Facts) -> Held | None:
    """Members come or go, so this would be undone at once: of a rollout's two steps only one needs to move anything."""
    if facts.moving and facts.patience > 0:
        told = f"Waiting for {listed(facts.moving)} to come or go; {_moves(facts.wanted)} then"
        return Held(Reason.MEMBERS_STILL_JOINING, told, facts.patience)
    return None


def handover_in_flight(facts: Facts) -> Held | None:
    """Queues are changing hands; others wait for them, but not for ever."""
    if facts.releasing and facts.release_time > 0:
        told = f"{_queues(facts.releasing)} still being released; {_moves(facts.wanted)} then"
        return Held(Reason.HANDOVER_IN_FLIGHT, told, facts.release_time)
    return None


def budget_spent(facts: Facts) -> Held | None:
    """The policy's budget of moves is used up for now."""
    if facts.budget is not None and facts.budget <= 0:
        if facts.budget_back is None:
            told = f"budget.maxMoves is 0; {_moves(facts.wanted)} once it is more"
            return Held(Reason.BUDGET_SPENT, told)
        told = f"The budget is spent; {_moves(facts.wanted)} as it comes back"
        return Held(Reason.BUDGET_SPENT, told, facts.budget_back)
    return None


Gate = Callable[[Facts], Held | None]

# In the order in which people should hear of them: first what they did themselves, then what passes.
CHAIN: tuple[Gate, ...] = (
    no_policy,
    nothing_would_change,
    paused,
    no_view,
    members_still_joining,
    handover_in_flight,
    budget_spent,
    debounce,
)


def held(facts: Facts) -> Held | None:
    """Return the first gate that holds, or None: go ahead."""
    return next((found for gate in CHAIN if (found := gate(facts))), None)


def _moves(count: int) -> str:
    return f"{count} queue{'s' * (count != 1)} will move"


def _queues(count: int) -> str:
    return "1 queue is" if count == 1 else f"{count} queues are"
