"""Results of a simulation into what is to be done: tables, manifests, and a report for people, all in one folder."""

from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame

from rota.model import plain
from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.recommend.cost_weights import LEAST_GAIN, Weights
from rota.pipeline.recommend.policy_manifests import check, manifests
from rota.pipeline.recommend.ranking import chosen, costs
from rota.pipeline.report.html import report
from rota.pipeline.report.report_data import SHOWN, Findings, findings
from rota.spec import PolicySpec

REPORT = "report.html"


def advise(
    results: DataFrame,
    series: DataFrame,
    policies: Mapping[str, PolicySpec],
    folder: Path,
    now: float,
    *,
    weights: Weights | None = None,
    least: float = LEAST_GAIN,
    shown: int = SHOWN,
) -> Findings:
    """Write `costs/` and `chosen/` (Parquet), `policies/*.yaml` and `report.html`; return what the report tells."""
    check(policies)
    weights = weights or Weights()
    tried = {str(row["policy"]) for row in results.select("policy").distinct().collect()} - {RECORDED}
    for name in sorted(tried - policies.keys()):
        raise ValueError(f"Policy {plain(name, 60)} was simulated, but is in none of the files; give its file, too")
    spark = results.sparkSession
    costs(results, weights).write.mode("overwrite").parquet(str(folder / "costs"))
    told = spark.read.parquet(str(folder / "costs"))
    chosen(told, results, least).write.mode("overwrite").parquet(str(folder / "chosen"))
    use = spark.read.parquet(str(folder / "chosen"))
    found = findings(
        results=results,
        series=series,
        costs=told,
        chosen=use,
        policies={name: policy for name, policy in policies.items() if name in tried},
        weights=weights,
        least=least,
        shown=shown,
    )
    manifests(use, policies, folder / "policies")
    (folder / REPORT).write_text(report(found, now), encoding="utf-8")
    return found
