"""Whether advice helps: policies advised from the first half of histories, compared on the second half.

Costs are points a day, of all groups together. `ROTA_BENCH_GROUPS` (40) is the number of groups of each fleet,
`ROTA_BENCH_HOURS` (48) the length of their histories, and `ROTA_BENCH_RATES` a file of recorded message rates: with it,
histories with these rates are tested, too. `ROTA_BENCH_RATES_SCALE` (100) multiplies them.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.backtest import (
    ADVISED,
    BEST_IN_HINDSIGHT,
    BacktestSummary,
    add_summaries,
    backtest_history,
    backtest_lines,
    summarize,
)
from rota.pipeline.recommend.cost_weights import MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.rates import RecordedRates, read_rates
from rota.spec import PolicySpec, parse_policy

SEEDS = (1, 2, 3)
POLICIES: Mapping[str, PolicySpec] = {
    strategy.lower(): parse_policy({"spec": {"strategy": strategy}})
    for strategy in ("Averagely", "AveragelyByCircle", "Sticky", "Balanced")
}


@dataclass(frozen=True)
class AdviceRow:
    """One line of the table: two costs or two numbers, and their ratio."""

    what: str
    ours: float
    peer: float | None = None

    def __str__(self) -> str:
        """Format the row as a line of a Markdown table."""
        peer = "" if self.peer is None else f"{self.peer:,.0f}"
        ratio = f"{self.ours / self.peer:.2f}" if self.peer else ""
        return f"| {self.what} | {self.ours:,.0f} | {peer} | {ratio} | |"


def rows() -> Iterator[AdviceRow]:
    """Test advice on synthetic fleets of several seeds, and with recorded rates if there is a file of them."""
    groups = int(os.environ.get("ROTA_BENCH_GROUPS", "40"))
    hours = float(os.environ.get("ROTA_BENCH_HOURS", "48"))
    fleets = {f"synthetic, seed {seed}": _backtest(groups, hours, seed) for seed in SEEDS}
    yield from _fleet_rows(fleets, "synthetic")
    if path := os.environ.get("ROTA_BENCH_RATES"):
        rates = read_rates(Path(path), float(os.environ.get("ROTA_BENCH_RATES_SCALE", "100")))
        fleets = {f"recorded rates, seed {seed}": _backtest(groups, hours, seed, rates) for seed in SEEDS}
        yield from _fleet_rows(fleets, "recorded rates")


def _backtest(groups: int, hours: float, seed: int, rates: RecordedRates | None = None) -> BacktestSummary:
    histories = (generate_history(number, seed, hours, rates=rates) for number in range(groups))
    tested = (backtest_history(history, POLICIES, CostWeights(), MIN_GAIN_FRACTION) for history in histories)
    return summarize(tested, POLICIES)


def _fleet_rows(fleets: Mapping[str, BacktestSummary], title: str) -> Iterator[AdviceRow]:
    for name, summary in fleets.items():
        what = f"{name}, {summary.groups} groups"
        yield AdviceRow(f"{what}: cost as advised, peer: without a change", summary.advised, summary.recorded)
        yield AdviceRow(f"{what}: wrong changes, peer: all changes", summary.wrong, summary.changes)
    total = reduce(add_summaries, fleets.values())
    what = f"{title}, all {total.groups} groups"
    for line in backtest_lines(total):
        if line.name != BEST_IN_HINDSIGHT:
            choice = {ADVISED: "as advised", RECORDED_POLICY: "without a change"}.get(line.name, f"{line.name} for all")
            yield AdviceRow(f"{what}: cost {choice}, peer: best of each group in hindsight", line.cost, total.best)
    yield AdviceRow(f"{what}: points lost by wrong changes, peer: saved by the others", total.loss, total.saved)
