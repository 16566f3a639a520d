"""Cost of one group's policies, and the policy to recommend, from its simulation results; without Spark.

The cost is the sum of the measures, each times its weight. Counts and durations are measured per day, and imbalance and
lag as means over the history; so histories of different lengths are comparable. A measure that is unknown for one
policy of a group is ignored for all policies of that group: otherwise the policy with the unknown value would look
cheapest.

    rows of RESULTS ──compute_measures──> measures ──cost_policies──> costs, ranks ──choose_policy──> row of CHOSEN
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, log2
from typing import Any

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.cost_weights import LAG_UNIT_MESSAGES, MEASURES, CostWeights
from rota.pipeline.recommend.explanation import explain_recommendation

COST_DECIMALS = 9  # decimal places in comparisons of sums
COST_COLUMNS = [f"cost_{name}" for name in MEASURES]

_COUNTED = {  # measures that are counted per day, and the column of RESULTS from which each comes
    "moves": "moves",
    "pause": "pause_seconds",
    "duplicates": "duplicates",
    "idle": "idle_member_hours",
    "unowned": "unowned_queue_seconds",
}

PolicyRow = Mapping[str, Any]  # a row about one group and one policy


def compute_measures(result: PolicyRow) -> dict[str, Any]:
    """Return the measures of one group and policy from its row of RESULTS; None: unknown."""
    measures: dict[str, float | None] = {}
    for name, column in _COUNTED.items():
        measures[name] = _per_day(result[column], result["hours"])
    imbalance = result["imbalance"]
    doublings = [_count_doublings(result["lag_mean"]), _count_doublings(result["lag_peak"])]
    measures["imbalance"] = None if imbalance is None else imbalance - 1  # 1 is even
    measures["lag"] = None if None in doublings else sum(filter(None, doublings)) / 2
    measures["lag_mean"] = result["lag_mean"]  # `lag_mean` and `lag_peak` are for reports, not for the cost
    measures["lag_peak"] = result["lag_peak"]
    row: dict[str, Any] = {}
    for name in ("group", "policy", "strategy", "problem"):
        row[name] = result[name]
    for name, value in measures.items():
        row[name] = _finite_or_none(value)
    return row


def _per_day(value: float | None, hours: float | None) -> float | None:
    return value * 24 / hours if hours and value is not None else None


def _count_doublings(lag: float | None) -> float | None:
    """Return how often the lag doubles, counted from LAG_UNIT_MESSAGES: 0 without lag, 1 at one unit, 2 at three."""
    known = _finite_or_none(lag)
    return None if known is None else log2(1 + known / LAG_UNIT_MESSAGES)


def _finite_or_none(value: float | None) -> float | None:
    """Return a measure; None if it is NaN or infinite, 0 if it is negative."""
    return max(float(value), 0.0) if value is not None and isfinite(value) else None


def cost_policies(measured: Iterable[PolicyRow], weights: CostWeights) -> list[dict[str, Any]]:
    """Add `cost`, its parts and `rank` to a group's rows of measures; for a policy with a problem they are None."""
    rows = list(map(dict, measured))
    usable = [row for row in rows if row["problem"] is None]
    known = {name for name in MEASURES if all(row[name] is not None for row in usable)}
    for row in rows:
        row.update(dict.fromkeys(["cost", "rank", *COST_COLUMNS]))
    for row in usable:
        parts = {f"cost_{name}": row[name] * weights.weight_of(name) for name in MEASURES if name in known}
        row.update(parts, cost=sum(parts.values(), 0.0))
    for rank, row in enumerate(sorted(usable, key=_rank_order), 1):
        row["rank"] = rank
    return rows


def _rank_order(row: PolicyRow) -> tuple[float, bool, bool, float, str]:
    """Order by cost. Ties go to the policy in use, then to fewer moves, then to the name."""
    moves = row["moves"]
    is_other = row["policy"] != RECORDED_POLICY
    return round(row["cost"], COST_DECIMALS), is_other, moves is None, moves or 0.0, row["policy"]


def find_row(rows: Iterable[PolicyRow], column: str, value: object) -> PolicyRow | None:
    """Return the first row with this value in a column; None if there is none."""
    return next((row for row in rows if row[column] == value), None)


def choose_policy(costs: Sequence[PolicyRow], min_gain: float) -> dict[str, Any]:
    """Return a group's row of CHOSEN from its rows of costs; a change needs a gain of at least `min_gain`.

    The column `gain` is None if the cost of the current policy is unknown, and 0 without a change. The explanation gets
    the gain of the cheapest policy even if it is too small for a change.
    """
    current = find_row(costs, "policy", RECORDED_POLICY)
    cheapest = find_row(costs, "rank", 1)
    cost_now = current["cost"] if current else None
    best = cheapest["policy"] if cheapest else None
    gain: float | None = None
    if cost_now is not None:
        gain = (cost_now - cheapest["cost"]) / cost_now if cheapest and cost_now else 0.0
    change = gain is not None and best != RECORDED_POLICY and round(gain, COST_DECIMALS) >= min_gain
    return {
        "group": costs[0]["group"],
        "strategy": current["strategy"] if current else None,
        "use": best if change else RECORDED_POLICY,
        "change": change,
        "best": best,
        "cost_now": cost_now,
        "cost_then": cheapest["cost"] if change and cheapest else cost_now,
        "gain": 0.0 if gain is not None and not change else gain,
        "evidence": explain_recommendation(current, cheapest, gain, min_gain, change=change),
    }
