"""`rota pipeline recommend`: what it is given, and what it says."""

# ruff: noqa: PLC0415 - Spark is imported by the command that needs it

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rota.cli.folders import is_simulation
from rota.cli.given import text_of
from rota.cli.simulating import check_tried, lying, played, policies_of
from rota.cli.words import count, say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rota.pipeline.findings import Findings


def recommend(
    spark: "SparkSession",
    source: str,
    policies: str,
    to: str,
    *,
    weights: str | None,
    least_gain: float,
    top: int,
    days: int | None,
) -> None:
    """Simulate where that was not done yet, write everything to a folder, and say the answer."""
    from rota.pipeline.advice import REPORT, advise
    from rota.pipeline.ingest import opened
    from rota.pipeline.manifests import check
    from rota.pipeline.weights import Weights, read

    given = policies_of(policies)
    check(given)
    chosen = Weights() if weights is None else read(text_of(weights), weights)
    folder = Path(to)
    at = Path(source)
    if is_simulation(at):
        it = lying(spark, at)
        if days:
            raise ValueError(f"--days is for a journal or a lake; {source} was simulated already: give it to simulate")
        check_tried(at, given)
    else:
        it = played(spark, opened(spark, source, days), given, folder)
    found = advise(it.results, it.series, given, folder, time.time(), weights=chosen, least=least_gain / 100, shown=top)
    _tell(found)
    say(f"The report is {folder / REPORT}; what to apply is in {folder / 'policies'}")


def _tell(found: "Findings") -> None:
    from rota.pipeline.findings import best_for_all, now_of
    from rota.pipeline.recommend import EACH
    from rota.pipeline.words import less

    it, best, now, each = found.looked, best_for_all(found), now_of(found), now_of(found, EACH)
    judged = it.groups - it.unjudged
    if now is None or each is None:
        say("There is nothing to recommend: nobody can say what the groups cost now")
        return
    gain = f", together {less(now['cost'], each['cost'])} cost" if it.changing else ""
    say(f"{it.changing} of {count(judged, 'group')} would gain by another policy{gain}")
    if best is not None:
        say(f"One policy for all: {best['policy']}, {less(now['cost'], best['cost'])} cost than now")
    elif now["cost"]:
        say("No single policy is better for all of them")
