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
from rota.cli.console.formatting import say
from rota.cli.console.inputs import text_of
from rota.pipeline.recommend.cost_weights import Weights, read
from rota.sentences import count
from rota.spec import PolicySpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rota.pipeline.report.report_data import Findings


def weights_of(file: str | None) -> Weights:
    """Read the cost weights from a file; without a file, return the defaults."""
    return Weights() if file is None else read(text_of(file), file)


def check_simulation(source: str, policies: Mapping[str, PolicySpec], days: int | None) -> None:
    """If the source is a simulation, raise ValueError for options or policies that do not match it."""
    at = Path(source)
    if is_simulation(at):
        if days:
            raise ValueError(f"--days is for a journal or a lake; {source} was simulated already: give it to simulate")
        check_simulated(at, policies)


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
    from rota.pipeline.report.outputs import REPORT, write_recommendation

    folder, at = Path(to), Path(source)
    stored = is_simulation(at)
    if stored:
        progress(f"reading {source}")
        simulation = read_simulation(spark, at)
    else:
        simulation = run_simulation(spark, progress, policies, folder, source=source, days=days)
    progress(f"comparing costs, and writing {folder}")
    advice_options = {"weights": options["weights"], "least": options["least_gain"] / 100, "shown": options["top"]}
    findings = write_recommendation(
        simulation.results, simulation.series, policies, folder, time.time(), **advice_options
    )
    if stored and folder.resolve() != at.resolve():
        _forget(folder)
    _print_result(findings)
    say(f"The report is {folder / REPORT}; what to apply is in {folder / 'policies'}")


def _forget(folder: Path) -> None:
    """Remove an earlier simulation from a folder: the new report there is not about it."""
    for name in ("results", "series"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _print_result(findings: "Findings") -> None:
    from rota.pipeline.recommend.ranking import EACH
    from rota.pipeline.report.formatting import percent, played_for, relative_change, unusable
    from rota.pipeline.report.report_data import best_for_all, leading, sums_of

    examined, best, now, each = findings.looked, best_for_all(findings), sums_of(findings), sums_of(findings, EACH)
    judged = examined.groups - examined.unjudged
    if now is None or each is None:
        say("There is nothing to recommend: nobody can say what the groups cost now")
    else:
        gain = f", together {relative_change(now['cost'], each['cost'])} cost" if examined.changing else ""
        first = leading(findings)
        of_that = f", of that {percent(first.share)} is group {first.group}" if first else ""
        say(f"{examined.changing} of {count(judged, 'group')} would gain by another policy{gain}{of_that}")
        say(played_for(examined.longest))
    if best is not None and now is not None:
        stay = f"; {count(best['unusable'], 'group')} cannot use it, and would stay" if best["unusable"] else ""
        say(f"One policy for all: {best['policy']}, {relative_change(now['cost'], best['cost'])} cost than now{stay}")
    elif now is not None and now["cost"]:
        say("No single policy is better for all of them")
    for row in findings.problems:
        say(unusable(row, examined.groups))
