"""Budget of voluntary moves: at most `maxMoves` in a sliding window of `per` seconds; the document records them."""

from typing import NamedTuple

from rota.planner.situation import Situation


class BudgetLeft(NamedTuple):
    """What is left of a budget."""

    moves: int | None  # None: no limit
    refill_seconds: float | None  # seconds until more moves are allowed; None: never


def budget_left(situation: Situation) -> BudgetLeft:
    """Return the policy's remaining budget; a move is refilled when it leaves the window."""
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
    """Return the spent moves for the next document: those in the window, and the present ones."""
    if situation.snapshot.policy is None:  # its budget is not known, so keep all moves
        return situation.document.spent
    spent = _moves_in_window(situation)
    if situation.policy.budget and voluntary_moves:
        spent.append((situation.formatted_now, voluntary_moves))
    return tuple(spent)


def _moves_in_window(situation: Situation) -> list[tuple[str, int]]:
    """Return the document's moves that count in the budget; a future time, from a wrong clock, counts as now."""
    per = situation.policy.budget.per if situation.policy.budget else 0.0
    moves = []
    for at, count in situation.document.spent:
        if situation.seconds_since(at) < per:
            moves.append((min(at, situation.formatted_now), count))
    return moves
