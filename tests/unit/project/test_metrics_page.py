"""Tests docs/metrics.md against the metrics in the code, from which its tables are generated.

`.venv/bin/python tests/unit/project/test_metrics_page.py` generates them again.
"""

import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
import yaml

from rota.cli.commands.pipeline.run.metrics import METRICS as PIPELINE_METRICS
from rota.kube.telemetry.group_gauges import GROUP_LABELS
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.metrics import Metric
from rota.model import Reason, ReasonKind, reasons_of_kind
from rota.sidecar.status.sidecar_metrics import SidecarMetrics

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "metrics.md"

Metrics = Iterable[Metric]
ALL_METRICS = (*OperatorMetrics().metrics, *SidecarMetrics().metrics, *PIPELINE_METRICS)


def table(metrics: Metrics, common: Collection[str] = GROUP_LABELS) -> str:
    """Return a table of metrics; the text above it names the labels that all of them have."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels if label not in common)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"


def tables() -> dict[str, str]:
    """Return the page's tables by their headings."""
    operator = OperatorMetrics().metrics
    return {
        "Of each group": table(metric for metric in operator if metric.labels[:2] == GROUP_LABELS),
        "Of the operator": table(metric for metric in operator if metric.labels[:2] != GROUP_LABELS),
        "Of each member": table(SidecarMetrics().metrics),
        "Of the pipeline": table(PIPELINE_METRICS, common=["lake"]),
    }


def page() -> str:
    """Return the page with generated tables."""
    text = PAGE.read_text()
    for heading, table_text in tables().items():
        pattern = re.compile(rf"^## {heading}\n(.*?)^\| metric .*?(?=^[^|]|\Z)", re.DOTALL | re.MULTILINE)
        section = pattern.search(text)
        assert section, heading
        text = f"{text[: section.start()]}## {heading}\n{section[1]}{table_text}{text[section.end() :]}"
    return text


def test_alert_for_a_group_that_is_not_ready_ignores_just_the_harmless_problems() -> None:
    rules = (ROOT / "charts" / "rota" / "rules" / "rota.yaml").read_text()
    (ignored,) = re.findall(r'rota_group_problem\{reason!~"(.*?)"\}', rules)
    assert set(ignored.split("|")) == {
        *reasons_of_kind(ReasonKind.HARMLESS),
        Reason.QUEUES_UNOWNED,
    }  # QueuesUnowned has its own alert


def test_docs_metrics_tables_match_the_metrics() -> None:
    assert PAGE.read_text() == page(), f"generate them again: python {Path(__file__).relative_to(ROOT)}"


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.name)
def test_metrics_names_and_help_follow_prometheus_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"rota_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".")
    assert "|" not in metric.help, "the help text is a cell of a table"
    assert len(set(metric.labels)) == len(metric.labels)


def test_metrics_names_are_unique() -> None:
    names = [metric.name for metric in ALL_METRICS]
    assert sorted(names) == sorted(set(names))


def test_docs_metrics_page_names_only_existing_metrics() -> None:
    existing = {metric.name for metric in ALL_METRICS}
    names_on_page = set(re.findall(r"\brota_[a-z_]+", PAGE.read_text()))
    without_suffixes = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names_on_page} - {"rota_dev_group"}
    assert without_suffixes - existing == set()


def test_docs_metrics_page_prometheus_samples_are_valid_yaml() -> None:
    samples = [
        yaml.safe_load(block)
        for block in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert "scrape_configs" in samples[-1]


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE.write_text(page())} characters\n")
