"""What docs/metrics.md says is so: its tables are made of the metrics.

`.venv/bin/python tests/unit/project/test_metrics_page.py` makes them anew.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from rota.kube.telemetry.group_gauges import GROUP_LABELS
from rota.kube.telemetry.operator_metrics import OperatorMetrics as OfOperator
from rota.metrics import Metric
from rota.model import Reason, ReasonKind, reasons_of_kind
from rota.sidecar.status.sidecar_metrics import SidecarMetrics as OfSidecar

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "metrics.md"

Metrics = Iterable[Metric]


def table(metrics: Metrics) -> str:
    """Draw a table of metrics; labels that each of them has are left to the text above it."""
    rows = ["| metric | type | labels | what it tells |", "|---|---|---|---|"]
    for it in metrics:
        labels = ", ".join(f"`{label}`" for label in it.labels if label not in GROUP_LABELS)
        rows.append(f"| `{it.name}` | {it.kind} | {labels} | {it.help} |")
    return "\n".join(rows) + "\n"


def tables() -> dict[str, str]:
    """Return the page's tables by their headings."""
    operator = OfOperator().metrics
    return {
        "Of each group": table(it for it in operator if it.labels[:2] == GROUP_LABELS),
        "Of the operator": table(it for it in operator if it.labels[:2] != GROUP_LABELS),
        "Of each member": table(OfSidecar().metrics),
    }


def page() -> str:
    """Return the page with tables as they should be."""
    text = PAGE.read_text()
    for heading, drawn in tables().items():
        section = re.compile(rf"^## {heading}\n(.*?)^\| metric .*?(?=^[^|]|\Z)", re.DOTALL | re.MULTILINE)
        found = section.search(text)
        assert found, heading
        text = f"{text[: found.start()]}## {heading}\n{found[1]}{drawn}{text[found.end() :]}"
    return text


def test_alert_for_a_group_that_is_not_ready_ignores_just_the_harmless_problems() -> None:
    rules = (ROOT / "charts" / "rota" / "rules" / "rota.yaml").read_text()
    (ignored,) = re.findall(r'rota_group_problem\{reason!~"(.*?)"\}', rules)
    assert set(ignored.split("|")) == {
        *reasons_of_kind(ReasonKind.HARMLESS),
        Reason.QUEUES_UNOWNED,
    }  # which has an alert of its own


def test_docs_metrics_tables_match_the_metrics() -> None:
    assert PAGE.read_text() == page(), f"make them anew: python {Path(__file__).relative_to(ROOT)}"


@pytest.mark.parametrize("metric", [*OfOperator().metrics, *OfSidecar().metrics], ids=lambda it: it.name)
def test_metrics_names_and_help_follow_prometheus_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"rota_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".")
    assert "|" not in metric.help, "it stands in a table"
    assert len(set(metric.labels)) == len(metric.labels)


def test_metrics_names_are_unique() -> None:
    names = [it.name for it in (*OfOperator().metrics, *OfSidecar().metrics)]
    assert sorted(names) == sorted(set(names))


def test_docs_metrics_page_names_only_existing_metrics() -> None:
    known = {it.name for it in (*OfOperator().metrics, *OfSidecar().metrics)}
    named = set(re.findall(r"\brota_[a-z_]+", PAGE.read_text()))
    spoken = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} - {"rota_dev_group"}
    assert spoken - known == set()


def test_docs_metrics_page_prometheus_samples_are_valid_yaml() -> None:
    shown = [
        yaml.safe_load(it) for it in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert "scrape_configs" in shown[-1]


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE.write_text(page())} characters\n")
