"""Budget of voluntary moves: at most `maxMoves` in a sliding window of `per` seconds.

A move is voluntary if only the policy wants it. The document records their times and numbers (`Assignment.spent`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from rota.planner.situation import Situation


class BudgetLeft(NamedTuple):
    """What is left of a budget."""

    moves: int | None  # None: no limit
    refill_seconds: float | None  # seconds until more moves are allowed; None: never


def budget_left(situation: Situation) -> BudgetLeft:
    """Return the policy's remaining budget; a move no longer counts once it has left the window."""
    budget = situation.policy.budget
    if budget is None:
        return BudgetLeft(moves=None, refill_seconds=0.0)
    if not budget.max_moves:
        return BudgetLeft(moves=0, refill_seconds=None)
    spent = _moves_in_window(situation)
    spent_moves = 0
    refill_seconds = float(budget.per)  # until a move that is made now leaves the window
    for at, count in spent:
        spent_moves += count
        refill_seconds = min(refill_seconds, budget.per - situation.seconds_since(at))
    return BudgetLeft(max(budget.max_moves - spent_moves, 0), refill_seconds)


def updated_spent(situation: Situation, voluntary_moves: int) -> tuple[tuple[str, int], ...]:
    """Return `spent` for the next document: the moves in the window, and those that this document makes."""
    if situation.snapshot.policy is None:  # the policy is missing or invalid, its budget unknown: keep all moves
        return tuple(_recorded_moves(situation))
    spent = _moves_in_window(situation)
    if situation.policy.budget and voluntary_moves:
        spent.append((situation.formatted_now, voluntary_moves))
    return tuple(spent)


def _moves_in_window(situation: Situation) -> list[tuple[str, int]]:
    """Return the document's moves that count in the budget."""
    per = situation.policy.budget.per if situation.policy.budget else 0.0
    return [(at, count) for at, count in _recorded_moves(situation) if situation.seconds_since(at) < per]


def _recorded_moves(situation: Situation) -> Iterator[tuple[str, int]]:
    """Yield the document's moves; a future time, from a wrong clock, counts as now."""
    for at, count in situation.document.spent:
        yield min(at, situation.formatted_now), count
