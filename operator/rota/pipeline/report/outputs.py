"""Writer of a recommendation: tables, manifests and a report for users, made of simulation results, in one folder."""

from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame

from rota.model import single_line
from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.pipeline.recommend.cost_weights import MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.recommend.policy_manifests import check_policy_names, write_manifests
from rota.pipeline.recommend.ranking import compute_costs, recommend_policies
from rota.pipeline.report.html import render_report
from rota.pipeline.report.report_data import DEFAULT_PLOTS, Findings, collect_findings
from rota.spec import PolicySpec

REPORT_FILE = "report.html"


def write_recommendation(
    results: DataFrame,
    series: DataFrame,
    policies: Mapping[str, PolicySpec],
    folder: Path,
    now: float,
    *,
    weights: CostWeights | None = None,
    min_gain: float = MIN_GAIN_FRACTION,
    max_plots: int = DEFAULT_PLOTS,
) -> Findings:
    """Write `costs/` and `chosen/` (Parquet), `policies/*.yaml` and `report.html`; return the report's data."""
    check_policy_names(policies)
    weights = weights or CostWeights()
    simulated = {str(row["policy"]) for row in results.select("policy").distinct().collect()} - {RECORDED_POLICY}
    for name in sorted(simulated - policies.keys()):
        raise ValueError(f"Policy {single_line(name, 60)} was simulated, but is missing in --policies; add its file")
    spark = results.sparkSession
    compute_costs(results, weights).write.mode("overwrite").parquet(str(folder / "costs"))
    written_costs = spark.read.parquet(str(folder / "costs"))
    recommend_policies(written_costs, results, min_gain).write.mode("overwrite").parquet(str(folder / "chosen"))
    recommendations = spark.read.parquet(str(folder / "chosen"))
    report_data = collect_findings(
        results=results,
        series=series,
        costs=written_costs,
        chosen=recommendations,
        policies={name: policy for name, policy in policies.items() if name in simulated},
        weights=weights,
        min_gain=min_gain,
        max_plots=max_plots,
    )
    write_manifests(recommendations, policies, folder / "policies")
    (folder / REPORT_FILE).write_text(render_report(report_data, now), encoding="utf-8")
    return report_data
