"""`rota pipeline recommend`: what it is given, and what it says."""

# ruff: noqa: PLC0415 - Spark is imported by the command that needs it

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rota.cli.commands.pipeline.output_paths import is_simulation
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.commands.pipeline.simulate import check_tried, lying, played
from rota.cli.console.formatting import say
from rota.cli.console.inputs import text_of
from rota.pipeline.recommend.cost_weights import Weights, read
from rota.sentences import count
from rota.spec import PolicySpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rota.pipeline.report.report_data import Findings


def weights_of(file: str | None) -> Weights:
    """Read a file with weights; without one, the defaults."""
    return Weights() if file is None else read(text_of(file), file)


def check_simulation(source: str, policies: Mapping[str, PolicySpec], days: int | None) -> None:
    """Refuse what does not go with a simulation, if the source is one."""
    at = Path(source)
    if is_simulation(at):
        if days:
            raise ValueError(f"--days is for a journal or a lake; {source} was simulated already: give it to simulate")
        check_tried(at, policies)


def recommend(
    spark: "SparkSession",
    progress: Progress,
    *,
    source: str,
    policies: Mapping[str, PolicySpec],
    to: str,
    days: int | None,
    **given: Any,
) -> None:
    """Simulate where that was not done yet, write everything to a folder, and say the answer.

    Given besides are what trouble costs, from which gain on in percent a change is worth it, and how many get plots.
    """
    from rota.pipeline.report.outputs import REPORT, advise

    folder, at = Path(to), Path(source)
    stored = is_simulation(at)
    if stored:
        progress(f"reading {source}")
        it = lying(spark, at)
    else:
        it = played(spark, progress, policies, folder, source=source, days=days)
    progress(f"comparing costs, and writing {folder}")
    how = {"weights": given["weights"], "least": given["least_gain"] / 100, "shown": given["top"]}
    found = advise(it.results, it.series, policies, folder, time.time(), **how)
    if stored and folder.resolve() != at.resolve():
        _forget(folder)
    _tell(found)
    say(f"The report is {folder / REPORT}; what to apply is in {folder / 'policies'}")


def _forget(folder: Path) -> None:
    """Remove a simulation that was made in a folder before: the report there is not about it any more."""
    for name in ("results", "series"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _tell(found: "Findings") -> None:
    from rota.pipeline.recommend.ranking import EACH
    from rota.pipeline.report.formatting import less, percent, played_for, unusable
    from rota.pipeline.report.report_data import best_for_all, leading, now_of

    it, best, now, each = found.looked, best_for_all(found), now_of(found), now_of(found, EACH)
    judged = it.groups - it.unjudged
    if now is None or each is None:
        say("There is nothing to recommend: nobody can say what the groups cost now")
    else:
        gain = f", together {less(now['cost'], each['cost'])} cost" if it.changing else ""
        first = leading(found)
        of_that = f", of that {percent(first.share)} is group {first.group}" if first else ""
        say(f"{it.changing} of {count(judged, 'group')} would gain by another policy{gain}{of_that}")
        say(played_for(it.longest))
    if best is not None and now is not None:
        stay = f"; {count(best['unusable'], 'group')} cannot use it, and would stay" if best["unusable"] else ""
        say(f"One policy for all: {best['policy']}, {less(now['cost'], best['cost'])} cost than now{stay}")
    elif now is not None and now["cost"]:
        say("No single policy is better for all of them")
    for row in found.problems:
        say(unusable(row, it.groups))
