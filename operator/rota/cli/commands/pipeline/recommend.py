"""`rota pipeline recommend`: simulates policies, writes a recommendation for each group, and prints a summary."""

# ruff: noqa: PLC0415 - Spark is imported by the command that needs it

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rota.cli.commands.pipeline.opened_lake import OpenedLake
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.commands.pipeline.simulate import read_histories, run_simulation
from rota.cli.console.formatting import print_line
from rota.cli.console.inputs import read_text
from rota.cli.console.output import print_table
from rota.pipeline.recommend.cost_weights import CostWeights, parse_weights
from rota.sentences import pluralize
from rota.spec import PolicySpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rota.pipeline.recommend.backtest import BacktestSummary
    from rota.pipeline.replay.job import Simulation
    from rota.pipeline.report.earlier_advice import EarlierAdvice
    from rota.pipeline.report.report_data import Findings


def read_weights(file: str | None) -> CostWeights:
    """Read the cost weights from a file; without a file, return the defaults."""
    return CostWeights() if file is None else parse_weights(read_text(file), file)


def check_base_urls(page_url: str | None, board_url: str | None) -> None:
    """Raise ValueError if one of the URLs for the report's links is no base URL."""
    from rota.pipeline.report.outputs import ReportExtras, check_links

    check_links(ReportExtras(page_url, board_url))


def recommend(
    spark: "SparkSession",
    progress: Progress,
    *,
    opened: OpenedLake,
    policies: Mapping[str, PolicySpec],
    to: str,
    days: int | None,
    **options: Any,
) -> None:
    """Simulate, write the marts and the report's folder, and print the summary.

    `options` has the keys `weights` (of costs), `least_gain` (in percent, that justifies a change), `top` (number of
    groups with plots), `page_url` and `board_url` (for links), and `backtest` (whether to test the advice).
    """
    from rota.pipeline.report.outputs import REPORT_FILE

    earlier = read_earlier_advice(spark, opened)
    histories = read_histories(spark, progress, opened, days)
    simulation = run_simulation(progress, histories, policies, opened)
    findings = write_report(progress, histories, simulation, policies, opened=opened, earlier=earlier, to=to, **options)
    opened.publish()
    print_summary(findings)
    if findings.backtest is not None:
        _print_backtest(findings.backtest)
    folder = Path(to)
    print_line(f"The report is {folder / REPORT_FILE}; the manifests are in {folder / 'policies'}")


def write_report(
    progress: Progress,
    histories: "DataFrame",
    simulation: "Simulation",
    policies: Mapping[str, PolicySpec],
    *,
    opened: OpenedLake,
    earlier: "EarlierAdvice | None",
    to: str,
    **options: Any,
) -> "Findings":
    """Write the marts costs and chosen, and the report's folder; return the report's findings.

    If advice is to be tested, write the mart backtest, too.
    """
    from rota.pipeline.report.outputs import ReportExtras, write_recommendation

    min_gain = options["least_gain"] / 100
    backtest = None
    if options["backtest"]:
        progress("testing advice on the second half of each history")
        backtest = _run_backtest(histories, policies, options["weights"], min_gain, opened)
    progress(f"comparing costs, and writing {to}")
    return write_recommendation(
        simulation,
        policies,
        Path(to),
        time.time(),
        weights=options["weights"],
        min_gain=min_gain,
        max_plots=options["top"],
        write_table=opened.write,
        extras=ReportExtras(options["page_url"], options["board_url"], earlier, backtest),
    )


def read_earlier_advice(spark: "SparkSession", opened: OpenedLake) -> "EarlierAdvice | None":
    """Return the recommendations of an earlier run as the snapshot has them; None if there are none."""
    from rota.pipeline.report.earlier_advice import EarlierAdvice
    from rota.pipeline.report.outputs import CHOSEN_TABLE

    written_at = opened.written_at(CHOSEN_TABLE)
    return EarlierAdvice(opened.read(spark, CHOSEN_TABLE), written_at.timestamp()) if written_at else None


def _run_backtest(
    histories: "DataFrame",
    policies: Mapping[str, PolicySpec],
    weights: CostWeights,
    min_gain: float,
    opened: OpenedLake,
) -> "DataFrame":
    """Choose policies by the first half of each history, and compute their cost in the second half.

    Return the mart backtest as it was written.
    """
    from rota.pipeline.recommend.backtest_job import backtest_histories

    return opened.write("marts/backtest", backtest_histories(histories, policies, weights, min_gain))


def _print_backtest(summary: "BacktestSummary") -> None:
    """Print what each choice of policies would have cost in the second halves, and how good the advice was."""
    from rota.pipeline.report.sections.backtest_section import backtest_table, describe_backtest

    if summary.groups:
        print_table(backtest_table(summary))
    for sentence in describe_backtest(summary):
        print_line(sentence)


def print_summary(findings: "Findings") -> None:
    """Print what other policies would save, and which of them some groups cannot use."""
    from rota.pipeline.recommend.ranking import OWN_POLICIES
    from rota.pipeline.report.formatting import (
        compare_cost,
        describe_change,
        describe_history_length,
        describe_problem,
        format_percent,
    )
    from rota.pipeline.report.report_data import best_for_all, find_leading_group, sums_of

    scope = findings.scope
    best_single_policy = best_for_all(findings)
    present_sums = sums_of(findings)
    advised_sums = sums_of(findings, OWN_POLICIES)  # each group with the policy recommended for it
    judged_groups = scope.groups - scope.unjudged  # without groups whose present policy has no known cost
    if present_sums is None or advised_sums is None:
        print_line("There is nothing to recommend: the present cost of the groups is unknown")
    else:
        gain = ""
        if scope.changing:
            change = compare_cost(present_sums["cost"], advised_sums["cost"], "now")
            gain = f"; if each used its own, all together would cost {change}"
        if leading := find_leading_group(findings):  # gains more than all others together
            gain += f"; of that {format_percent(leading.gain_fraction)} is group {leading.group}"
        print_line(f"{scope.changing} of {pluralize(judged_groups, 'group')} would benefit from another policy{gain}")
        print_line(describe_history_length(scope.longest))
    if best_single_policy is not None and present_sums is not None:
        change = describe_change(present_sums["cost"], best_single_policy["cost"])
        advice = f"One policy for all: {best_single_policy['policy']}, {change} cost than now"
        if best_single_policy["unusable"]:
            advice += f"; {pluralize(best_single_policy['unusable'], 'group')} cannot use it, and would keep theirs"
        print_line(advice)
    elif present_sums is not None and present_sums["cost"]:
        min_gain = format_percent(findings.min_gain)
        print_line(f"No single policy would be better for all groups by {min_gain} or more")
    for row in findings.problems:
        print_line(describe_problem(row, scope.groups))
