"""Writes a recommendation, made of simulation results: the marts, and a folder with manifests and the report."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame

from rota.pipeline.recommend.backtest_job import summarize_backtest
from rota.pipeline.recommend.cost_weights import MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.recommend.policy_manifests import check_policy_names, write_manifests
from rota.pipeline.recommend.ranking import compute_costs, recommend_policies
from rota.pipeline.replay.job import Simulation
from rota.pipeline.report.earlier_advice import EarlierAdvice, observe_advice
from rota.pipeline.report.html import render_report
from rota.pipeline.report.links import ReportLinks, check_url
from rota.pipeline.report.report_data import DEFAULT_PLOTS, Findings, collect_findings
from rota.spec import PolicySpec

REPORT_FILE = "report.html"
COSTS_TABLE = "marts/costs"
CHOSEN_TABLE = "marts/chosen"

TableWriter = Callable[[str, DataFrame], DataFrame]  # writes a table by its name, and returns it as it was written


def cache_table(_name: str, rows: DataFrame) -> DataFrame:
    """Return a table, and let Spark cache it: a TableWriter for callers that write nothing to a lake."""
    return rows.persist(StorageLevel.DISK_ONLY)


class ReportExtras(NamedTuple):
    """Inputs of the report's optional parts; a part whose input is None is left out."""

    page_url: str | None = None  # base URL of the operator's page, for links to each advised group
    board_url: str | None = None  # base URL of Grafana, for links to each advised group
    # The recommendations of an earlier run, read at a fixed table version, because this run overwrites the table.
    earlier: EarlierAdvice | None = None
    backtest: DataFrame | None = None  # rows of the mart backtest, for the same policies


def write_recommendation(  # noqa: PLR0913 - options of the command
    simulation: Simulation,
    policies: Mapping[str, PolicySpec],
    folder: Path,
    now: float,
    *,
    weights: CostWeights | None = None,
    min_gain: float = MIN_GAIN_FRACTION,
    max_plots: int = DEFAULT_PLOTS,
    write_table: TableWriter = cache_table,
    extras: ReportExtras | None = None,
) -> Findings:
    """Write costs, recommendations, and a folder with `policies/*.yaml` and `report.html`; return the report's data."""
    check_policy_names(policies)
    links = check_links(extras or ReportExtras())
    weights = weights or CostWeights()
    costs = write_table(COSTS_TABLE, compute_costs(simulation.results, weights))
    recommendations = write_table(CHOSEN_TABLE, recommend_policies(costs, simulation.results, min_gain))
    report_data = collect_findings(
        results=simulation.results,
        series=simulation.series,
        costs=costs,
        chosen=recommendations,
        policies=policies,
        weights=weights,
        min_gain=min_gain,
        max_plots=max_plots,
    )
    if extras:
        report_data = _add_extras(replace(report_data, links=links), extras, recommendations)
    folder.mkdir(parents=True, exist_ok=True)
    write_manifests(recommendations, policies, folder / "policies")
    (folder / REPORT_FILE).write_text(render_report(report_data, now), encoding="utf-8")
    return report_data


def check_links(extras: ReportExtras) -> ReportLinks:
    """Return the base URLs for links; raise ValueError with a sentence for one that is not a URL."""
    return ReportLinks(
        extras.page_url and check_url(extras.page_url, "--page-url"),
        extras.board_url and check_url(extras.board_url, "--board-url"),
    )


def _add_extras(data: Findings, extras: ReportExtras, recommendations: DataFrame) -> Findings:
    """Return the report's data with the parts that have an input."""
    if extras.earlier is not None:
        data = replace(data, observed=observe_advice(extras.earlier, recommendations, data.policies))
    if extras.backtest is not None:
        data = replace(data, backtest=summarize_backtest(extras.backtest, [*data.policies]))
    return data
