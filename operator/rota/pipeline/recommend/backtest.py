"""Backtest of advice: policies are recommended from the first half of each history, and compared in the second half.

    first half ───> costs ──choose_policy──> the advised policy ─┐
    second half ──> costs of the recorded and every policy ──────┴──> regret, wrong changes

*Advice* is the recommended policy of each group. *Regret* is what the advised policies cost more than the best ones in
hindsight. A change is *wrong* if the advised policy
costs more in the second half than the recorded one, or cannot be used there.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from rota.pipeline.common.history_sources import source_of
from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.cost_weights import CostWeights
from rota.pipeline.recommend.group_costs import (
    COST_DECIMALS,
    PolicyRow,
    choose_policy,
    compute_measures,
    cost_policies,
    find_row,
)
from rota.pipeline.recommend.history_halves import cut_history
from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.replay.policy_replay import replay_policies
from rota.spec import PolicySpec

ADVISED = "as advised"  # each group with the policy that its first half recommends; the blank prevents a name clash
BEST_IN_HINDSIGHT = "best in hindsight"  # each group with the policy that costs least in its second half

BacktestRow = dict[str, Any]  # a row of `schemas.BACKTEST`, without the column `cut`: the end of the first half


def judge_advice(
    first_half: Sequence[PolicyRow], second_half: Sequence[PolicyRow], weights: CostWeights, min_gain: float
) -> BacktestRow:
    """Return a group's row; the arguments are rows of RESULTS of its halves, one for each policy.

    Unless the recorded policy has a cost in both halves, the row has a problem, and no costs.
    """
    advice = choose_policy(_cost(first_half, weights), min_gain)
    ranked = _cost(second_half, weights)
    costs: dict[str, float] = {}
    for candidate in ranked:
        if candidate["cost"] is not None:
            costs[candidate["policy"]] = candidate["cost"]
    recorded = costs.get(RECORDED_POLICY)
    row: BacktestRow = {"group": advice["group"], "source": str(source_of(advice["group"]))}
    if advice["cost_now"] is None or recorded is None:
        problem = _recorded_problem(first_half) or _recorded_problem(second_half)
        return row | {"problem": problem or "The cost of the recorded policy is unknown"}
    use = advice["use"]  # the policy to use, which may be the recorded one
    cheapest = find_row(ranked, "rank", 1)
    assert cheapest is not None  # noqa: S101 - the recorded policy has a rank at least
    best = cheapest["policy"]
    advised = costs.get(use, recorded)  # the operator rejects a policy that it cannot use, and the group keeps its own
    return row | {
        "hours": _recorded_result(second_half)["hours"],
        "use": use,
        "change": advice["change"],
        "wrong": advice["change"] and (use not in costs or _costs_more(advised, recorded)),
        "best": best,
        "cost_recorded": recorded,
        "cost_advised": advised,
        "cost_best": costs[best],
        "costs": costs,
    }


def _cost(results: Iterable[PolicyRow], weights: CostWeights) -> list[dict[str, Any]]:
    return cost_policies(map(compute_measures, results), weights)


def _costs_more(cost: float, reference: float) -> bool:
    return round(cost, COST_DECIMALS) > round(reference, COST_DECIMALS)


def _recorded_result(half: Iterable[PolicyRow]) -> PolicyRow:
    """Return the result of the recorded policy; an empty one if there is none."""
    return find_row(half, "policy", RECORDED_POLICY) or {}


def _recorded_problem(half: Iterable[PolicyRow]) -> str | None:
    return _recorded_result(half).get("problem")


def backtest_history(
    history: GroupHistory, policies: Mapping[str, PolicySpec], weights: CostWeights, min_gain: float
) -> BacktestRow:
    """Return the row of a history's group, computed in this process; raise ValueError if the history is too short."""
    halves = cut_history(history)
    tried: dict[str, PolicySpec | None] = {RECORDED_POLICY: None, **policies}
    first_half = _replay_half(halves.first, tried)
    second_half = _replay_half(halves.second, tried)
    return judge_advice(first_half, second_half, weights, min_gain)


def _replay_half(half: GroupHistory, policies: Mapping[str, PolicySpec | None]) -> list[PolicyRow]:
    results: list[PolicyRow] = []
    for name, result in replay_policies(half, policies).items():
        results.append(result | {"group": half.group, "policy": name})
    return results


class BacktestSummary(Struct, frozen=True, kw_only=True):
    """Sums of a backtest over groups; costs are points a day.

    In the cost of a policy, a group that cannot use it counts with the cost of its recorded policy.
    """

    groups: int = 0  # tested groups
    untested: int = 0  # groups with a problem, such as a short history
    longest: float = 0.0  # hours of the longest second half
    changes: int = 0  # groups that were advised to change
    wrong: int = 0  # changes that cost more than no change, or to a policy that could not be used
    unusable: int = 0  # the wrong changes to a policy that could not be used
    loss: float = 0.0  # points that wrong changes cost more than no change
    saved: float = 0.0  # points that the other changes saved
    recorded: float = 0.0  # cost of the recorded policies
    advised: float = 0.0  # cost of the advised policies
    best: float = 0.0  # cost of the best policy of each group in hindsight
    costs: dict[str, float] = {}  # by policy: the cost if all groups used it
    usable: dict[str, int] = {}  # by policy: the number of groups that can use it
    sources: dict[str, int] = {}  # by HistorySource: the number of groups

    @property
    def best_single(self) -> str | None:
        """The policy that costs least in hindsight if all groups use it; None if no group can use any."""
        usable = filter(self.usable.get, self.costs)
        return min(usable, key=lambda name: (self.costs[name], name), default=None)


def summarize(rows: Iterable[Mapping[str, Any]], policies: Iterable[str]) -> BacktestSummary:
    """Return the sums of rows of BACKTEST; `policies` are the names of the tested policies without the recorded one."""
    names = list(policies)
    summary = BacktestSummary()
    for row in rows:
        summary = add_summaries(summary, _summarize_row(row, names))
    return summary


def _summarize_row(row: Mapping[str, Any], policies: Sequence[str]) -> BacktestSummary:
    if row.get("problem"):
        return BacktestSummary(untested=1)
    recorded = row["cost_recorded"]
    saved = recorded - row["cost_advised"]
    costs: dict[str, float] = {}
    usable: dict[str, int] = {}
    for name in policies:
        costs[name] = row["costs"].get(name, recorded)
        if name in row["costs"]:
            usable[name] = 1
    return BacktestSummary(
        groups=1,
        longest=row["hours"],
        changes=int(row["change"]),
        wrong=int(row["wrong"]),
        unusable=int(row["use"] not in row["costs"]),
        loss=-saved if row["wrong"] else 0.0,
        saved=0.0 if row["wrong"] else saved,
        recorded=recorded,
        advised=row["cost_advised"],
        best=row["cost_best"],
        costs=costs,
        usable=usable,
        sources={row["source"]: 1},
    )


def add_summaries(summary: BacktestSummary, addend: BacktestSummary) -> BacktestSummary:
    """Return the sums of two disjoint sets of groups, for which the same policies were tested."""
    fields: dict[str, Any] = {}
    for name in BacktestSummary.__struct_fields__:
        value = getattr(summary, name)
        added = getattr(addend, name)
        if isinstance(value, dict):
            counts = Counter(value)
            counts.update(added)
            fields[name] = dict(counts)
        elif name == "longest":
            fields[name] = max(value, added)
        else:
            fields[name] = value + added
    return BacktestSummary(**fields)


class BacktestLine(NamedTuple):
    """Costs of one choice of policies for all groups, in points a day."""

    name: str  # a policy's, RECORDED_POLICY, ADVISED or BEST_IN_HINDSIGHT
    cost: float
    regret: float  # what it costs more than the best policy of each group in hindsight
    beyond_best_single: float | None  # cost minus that of the best single policy; None: there is no such policy
    unusable: int  # groups that cannot use it


def backtest_lines(summary: BacktestSummary) -> list[BacktestLine]:
    """Return a line for each choice of policies, the cheapest first; choices at the same cost in a fixed order."""
    single = summary.best_single
    best_single_cost = None if single is None else summary.costs[single]
    costs = {BEST_IN_HINDSIGHT: summary.best, ADVISED: summary.advised, RECORDED_POLICY: summary.recorded}
    for name in sorted(summary.costs):
        if summary.usable.get(name):
            costs[name] = summary.costs[name]
    lines: list[BacktestLine] = []
    for name, cost in sorted(costs.items(), key=lambda item: round(item[1], COST_DECIMALS)):
        unusable = summary.groups - summary.usable[name] if name in summary.usable else 0
        beyond_best_single = None if best_single_cost is None else cost - best_single_cost
        lines.append(BacktestLine(name, cost, cost - summary.best, beyond_best_single, unusable))
    return lines
