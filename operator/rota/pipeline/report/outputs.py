"""Writer of a recommendation: tables, manifests and a report for users, made of simulation results, in one folder."""

from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame

from rota.model import plain
from rota.pipeline.common.schemas import RECORDED
from rota.pipeline.recommend.cost_weights import LEAST_GAIN, Weights
from rota.pipeline.recommend.policy_manifests import check, manifests
from rota.pipeline.recommend.ranking import costs, recommend_policies
from rota.pipeline.report.html import report
from rota.pipeline.report.report_data import SHOWN, Findings, findings
from rota.spec import PolicySpec

REPORT = "report.html"


def write_recommendation(
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
    """Write `costs/` and `chosen/` (Parquet), `policies/*.yaml` and `report.html`; return the report's data."""
    check(policies)
    weights = weights or Weights()
    simulated = {str(row["policy"]) for row in results.select("policy").distinct().collect()} - {RECORDED}
    for name in sorted(simulated - policies.keys()):
        raise ValueError(f"Policy {plain(name, 60)} was simulated, but is in none of the files; give its file, too")
    spark = results.sparkSession
    costs(results, weights).write.mode("overwrite").parquet(str(folder / "costs"))
    written_costs = spark.read.parquet(str(folder / "costs"))
    recommend_policies(written_costs, results, least).write.mode("overwrite").parquet(str(folder / "chosen"))
    recommendations = spark.read.parquet(str(folder / "chosen"))
    recommendation = findings(
        results=results,
        series=series,
        costs=written_costs,
        chosen=recommendations,
        policies={name: policy for name, policy in policies.items() if name in simulated},
        weights=weights,
        least=least,
        shown=shown,
    )
    manifests(recommendations, policies, folder / "policies")
    (folder / REPORT).write_text(report(recommendation, now), encoding="utf-8")
    return recommendation
