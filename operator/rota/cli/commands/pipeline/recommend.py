"""`rota pipeline recommend`: its input files and its summary."""

# ruff: noqa: PLC0415 - Spark is imported by the command that needs it

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rota.cli.commands.pipeline.output_paths import is_simulation
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.commands.pipeline.simulate import check_simulated, read_simulation, run_simulation
from rota.cli.console.formatting import print_line
from rota.cli.console.inputs import read_text
from rota.pipeline.recommend.cost_weights import CostWeights, parse_weights
from rota.sentences import pluralize
from rota.spec import PolicySpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rota.pipeline.report.report_data import Findings


def read_weights(file: str | None) -> CostWeights:
    """Read the cost weights from a file; without a file, return the defaults."""
    return CostWeights() if file is None else parse_weights(read_text(file), file)


def check_simulation(source: str, policies: Mapping[str, PolicySpec], days: int | None) -> None:
    """If the source is a simulation, raise ValueError for options or policies that do not match it."""
    if not is_simulation(Path(source)):
        return
    if days:
        finished = f"{source} is a finished simulation: use --days with simulate"
        raise ValueError(f"--days works with a journal or a lake; {finished}")
    check_simulated(Path(source), policies)


def recommend(
    spark: "SparkSession",
    progress: Progress,
    *,
    source: str,
    policies: Mapping[str, PolicySpec],
    to: str,
    days: int | None,
    **options: Any,
) -> None:
    """Simulate unless the source is a simulation, write the report and tables to a folder, and print the summary.

    `options` holds the cost weights, the least gain in percent that justifies a change, and the number of groups with
    plots.
    """
    from rota.pipeline.report.outputs import REPORT_FILE, write_recommendation

    folder = Path(to)
    is_simulated = is_simulation(Path(source))
    if is_simulated:
        progress(f"reading {source}")
        simulation = read_simulation(spark, Path(source))
    else:
        simulation = run_simulation(spark, progress, policies, folder, source=source, days=days)
    progress(f"comparing costs, and writing {folder}")
    report_data = write_recommendation(
        simulation.results,
        simulation.series,
        policies,
        folder,
        time.time(),
        weights=options["weights"],
        min_gain=options["least_gain"] / 100,
        max_plots=options["top"],
    )
    # The report in another folder is not about the tables of an earlier simulation there, so remove those.
    if is_simulated and folder.resolve() != Path(source).resolve():
        for name in ("results", "series"):
            shutil.rmtree(folder / name, ignore_errors=True)
    _print_summary(report_data)
    print_line(f"The report is {folder / REPORT_FILE}; the manifests are in {folder / 'policies'}")


def _print_summary(findings: "Findings") -> None:
    from rota.pipeline.recommend.ranking import OWN_POLICIES
    from rota.pipeline.report.formatting import (
        describe_change,
        describe_history_length,
        describe_problem,
        format_percent,
    )
    from rota.pipeline.report.report_data import best_for_all, find_leading_group, sums_of

    examined = findings.scope
    best = best_for_all(findings)
    present = sums_of(findings)
    improved = sums_of(findings, OWN_POLICIES)
    judged = examined.groups - examined.unjudged
    if present is None or improved is None:
        print_line("There is nothing to recommend: the present cost of the groups is unknown")
    else:
        gain = f", together {describe_change(present['cost'], improved['cost'])} cost" if examined.changing else ""
        if first := find_leading_group(findings):
            gain += f", of that {format_percent(first.gain_fraction)} is group {first.group}"
        print_line(f"{examined.changing} of {pluralize(judged, 'group')} would benefit from another policy{gain}")
        print_line(describe_history_length(examined.longest))
    if best is not None and present is not None:
        advice = f"One policy for all: {best['policy']}, {describe_change(present['cost'], best['cost'])} cost than now"
        if best["unusable"]:
            advice += f"; {pluralize(best['unusable'], 'group')} cannot use it, and would keep theirs"
        print_line(advice)
    elif present is not None and present["cost"]:
        print_line("No single policy is better for all groups")
    for row in findings.problems:
        print_line(describe_problem(row, examined.groups))
