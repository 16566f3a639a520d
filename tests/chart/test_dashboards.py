"""The chart's dashboards and rules: their format, and that they use only existing metrics and labels."""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.charts import CHART, ROOT, Helm
from ground.api import Object
from ground.fixtures import skip_what_is_missing
from ground.prometheus import promtool
from kube.panels import expressions
from rota.cli.commands.pipeline.run import metrics as pipeline_metrics
from rota.kube.telemetry import operator_metrics
from rota.sidecar.status.sidecar_metrics import SidecarMetrics

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
FILE = CHART / "rules" / "rota.yaml"
RULES: Object = yaml.safe_load(FILE.read_text())
EVERY_RULE: list[Object] = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in EVERY_RULE if "alert" in rule]
SCALING = ROOT / "docs" / "examples" / "scaling"
RUNBOOK = "https://github.com/rota-dev/rota/blob/main/docs/runbook.md#"
PROMETHEUS = "--api-versions=monitoring.coreos.com/v1"
FILLED = {"namespace": "shop", "group": "orders", "topic": "orders"}

SCRAPED = frozenset({"namespace", "job", "instance", "pod"})  # labels that Prometheus adds to scraped series


def known_metrics() -> dict[str, frozenset[str]]:
    """Return the labels of all existing metrics, by name."""
    return {
        **operator_metric_labels(),
        **sidecar_metric_labels(),
        **pipeline_metric_labels(),
        **recorded_metric_labels(),
    }


def operator_metric_labels() -> dict[str, frozenset[str]]:
    return {metric.name: frozenset(metric.labels) for metric in operator_metrics.OperatorMetrics().metrics}


def sidecar_metric_labels() -> dict[str, frozenset[str]]:
    return {
        metric.name: frozenset({*metric.labels, "group"}) for metric in SidecarMetrics().metrics
    }  # of the PodMonitor


def pipeline_metric_labels() -> dict[str, frozenset[str]]:
    return {metric.name: frozenset(metric.labels) for metric in pipeline_metrics.METRICS}


def recorded_metric_labels() -> dict[str, frozenset[str]]:
    return {rule["record"]: frozenset(_grouped(rule["expr"])) for rule in EVERY_RULE if "record" in rule}


# Metric names and labels in expressions.

_STRING = r'"(?:[^"\\]|\\.)*"'


def _grouped(expr: str) -> set[str]:
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expr)
    return {label.strip() for labels in lists for label in labels.split(",") if label.strip()}


def _selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric, and the labels by which it is selected."""
    for name, matchers in re.findall(
        r"\b(rota_\w+|\w+(?::\w+)+)(?:\{((?:" + _STRING + r"|[^}\"])*)\})?", _without_created_labels(expr)
    ):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(_STRING, "", matchers)))


def _created_labels(expr: str) -> set[str]:
    """Return the quoted arguments of label_join and label_replace: among them are the labels that they create."""
    texts = re.findall(r", (" + _STRING + ")", expr) if "label_join(" in expr or "label_replace(" in expr else []
    return {text.strip('"') for text in texts}


def _without_created_labels(expr: str) -> str:
    return re.sub(r"(, " + _STRING + r")+\)", ")", expr)


def _labels(name: str, metrics: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    if name in metrics:
        return metrics[name] | SCRAPED
    return metrics[base] | SCRAPED | ({"le"} if name.endswith("_bucket") else set()) if base in metrics else None


def unknown_names(expr: str, metrics: Mapping[str, frozenset[str]], text: str = "") -> list[str]:
    """Return the unknown metrics and labels in an expression, and in a text that formats its result."""
    unknown = []
    available = _created_labels(expr)
    for name, matched in _selectors(expr):
        labels = _labels(name, metrics)
        if labels is None:
            unknown.append(name)
            continue
        available |= labels
        unknown += [f"{name}{{{label}}}" for label in sorted(matched - labels)]
    texts = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
    return unknown + sorted((_grouped(expr) | texts) - available)


@pytest.mark.parametrize(
    ("expr", "text", "unknown"),
    [
        ('sum by (topic) (rate(rota_group_lag{group="a"}[1m]))', "{{topic}}", []),
        ("rota_group_lags", "", ["rota_group_lags"]),
        ('rota_group_lag{queue="1"}', "", ["rota_group_lag{queue}"]),
        ("sum by (member) (rota_group_lag)", "", ["member"]),
        ("rota_generation", "{{ $labels.topic }}", ["topic"]),
        ("sum by (le) (rota_plan_duration_seconds_bucket)", "", []),
        ("sum by (le) (rota_generation)", "", ["le"]),
        ('label_join(rota_generation, "both", "/", "namespace", "group")', "{{both}}", []),
    ],
    ids=str,
)
def test_dashboard_check_finds_unknown_metrics_and_labels(expr: str, text: str, unknown: list[str]) -> None:
    assert unknown_names(expr, known_metrics(), text) == unknown


def values_of_key(value: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key anywhere in a board."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    for part in value if isinstance(value, list) else []:
        yield from values_of_key(part, key)


def read_board(board: Path) -> Object:
    body: Object = json.loads(board.read_text())
    return body


def panels(board: Path) -> list[Object]:
    return [panel for panel in read_board(board)["panels"] if panel["type"] != "row"]


on_each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)


def test_dashboard_files_are_group_operator_and_queues() -> None:
    assert [board.stem for board in BOARDS] == ["group", "operator", "queues"]


@on_each_board
def test_dashboard_has_the_common_settings(board: Path) -> None:
    body = read_board(board)
    assert (body["uid"], body["id"], body["tags"]) == (f"rota-{board.stem}", None, ["rota"])
    assert (body["refresh"], body["time"], body["graphTooltip"]) == ("30s", {"from": "now-1h", "to": "now"}, 1)
    assert "version" not in body


@on_each_board
def test_dashboard_data_source_is_a_variable(board: Path) -> None:
    used = list(values_of_key(read_board(board), "datasource"))
    assert used
    assert [source for source in used if source != {"type": "prometheus", "uid": "${datasource}"}] == []


@on_each_board
def test_dashboard_variables_narrow_from_namespace_to_topic_and_are_used(board: Path) -> None:
    names = [variable["name"] for variable in read_board(board)["templating"]["list"]]
    assert names == ["datasource", "namespace", "group", "topic"][: len(names)]
    assert [
        name for name in names if f"${name}" not in board.read_text() and f"${{{name}}}" not in board.read_text()
    ] == []


@on_each_board
def test_dashboard_panels_have_a_description_and_a_unit(board: Path) -> None:
    board_panels = panels(board)
    assert [panel["title"] for panel in board_panels if not panel["description"].endswith(".")] == []
    assert [panel["title"] for panel in board_panels if not panel["fieldConfig"]["defaults"].get("unit")] == []
    assert [panel["title"] for panel in board_panels if not panel["targets"]] == []
    titles = [(panel["title"], panel["description"]) for panel in board_panels]
    assert len(set(titles)) == len(titles)
    numbers = [panel["id"] for panel in read_board(board)["panels"]]
    assert len(set(numbers)) == len(numbers)


@on_each_board
def test_dashboard_panels_do_not_overlap(board: Path) -> None:
    occupied: set[tuple[int, int]] = set()
    for panel in read_board(board)["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & occupied, panel["title"]
        occupied |= cells


@on_each_board
def test_dashboard_time_ranges_are_grafana_variables(board: Path) -> None:
    spans = {span for expr in values_of_key(read_board(board), "expr") for span in re.findall(r"\[(.*?)\]", expr)}
    assert spans <= {"$__rate_interval", "$__range:"}


@on_each_board
def test_dashboard_graphs_are_annotated_with_rebalances(board: Path) -> None:
    (annotation,) = read_board(board)["annotations"]["list"]
    assert "changes(rota_generation{" in annotation["expr"]
    assert annotation["enable"]


@on_each_board
def test_dashboard_uses_only_existing_metrics_and_labels(board: Path) -> None:
    metrics = known_metrics()
    body = read_board(board)
    queries = [(target["expr"], target["legendFormat"]) for panel in panels(board) for target in panel["targets"]]
    queries += [(annotation["expr"], annotation["textFormat"]) for annotation in body["annotations"]["list"]]
    assert [name for expr, legend in queries for name in unknown_names(expr, metrics, legend)] == []
    for definition in [*values_of_key(body["templating"], "definition")]:
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", definition).groups()  # type: ignore[union-attr]
        assert unknown_names(f"count by ({label}) ({metric})", metrics) == []


def alert_id(alert: Object) -> str:
    return f"{alert['alert']} {alert['labels']['severity']}"


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.get("record") or alert_id(rule))
def test_alert_and_recording_rules_use_only_existing_metrics_and_labels(rule: Object) -> None:
    assert unknown_names(rule["expr"], known_metrics(), rule.get("annotations", {}).get("description", "")) == []


def test_prometheus_recording_rules_are_all_used() -> None:
    used = "\n".join(rule["expr"] for rule in EVERY_RULE)
    assert [name for name in recorded_metric_labels() if name not in used] == []


@pytest.mark.parametrize("alert", ALERTS, ids=alert_id)
def test_alert_has_a_severity_and_a_runbook_link(alert: Object) -> None:
    annotations = alert["annotations"]
    assert re.fullmatch(r"Rota[A-Za-z]+", alert["alert"])
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["for"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert "{{" not in annotations["summary"]
    assert annotations["runbook_url"] == RUNBOOK + alert["alert"].lower()


def test_alert_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    sections = re.findall(r"^## (Rota\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert sections == list(dict.fromkeys(alert["alert"] for alert in ALERTS))


def check_expressions(exprs: Iterable[str], folder: Path) -> None:
    """Let the real promtool parse expressions."""
    with skip_what_is_missing():
        tool = promtool()
    recording_rules = [{"record": f"asked:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    rules = folder / "asked.yaml"
    rules.write_text(json.dumps({"groups": [{"name": "asked", "rules": recording_rules}]}))
    process = subprocess.run([tool, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


@on_each_board
def test_dashboard_expressions_are_parsed_by_promtool(board: Path, tmp_path: Path) -> None:
    check_expressions((expr for _, expr in expressions(board, FILLED)), tmp_path)


def test_autoscaling_examples_query_existing_metrics(tmp_path: Path) -> None:
    (keda,) = yaml.safe_load_all((SCALING / "keda.yaml").read_text())
    autoscaler, adapter = yaml.safe_load_all((SCALING / "hpa.yaml").read_text())
    (trigger,) = keda["spec"]["triggers"]
    (rule,) = yaml.safe_load(adapter["data"]["config.yaml"])["externalRules"]
    matchers = 'namespace="shop", group="orders"'
    exprs = [trigger["metadata"]["query"], rule["metricsQuery"].replace("<<.LabelMatchers>>", matchers)]
    assert exprs[0] == exprs[1]
    check_expressions([*exprs, rule["seriesQuery"]], tmp_path)
    assert [name for expr in exprs for name in unknown_names(expr, known_metrics())] == []
    (metric,) = (metric_spec["external"]["metric"]["name"] for metric_spec in autoscaler["spec"]["metrics"])
    assert metric == rule["name"]["as"]
    assert keda["spec"]["scaleTargetRef"] == autoscaler["spec"]["scaleTargetRef"]


def test_chart_renders_dashboards_unchanged_and_rules_scoped_to_the_release(helm: Helm) -> None:
    rendered = helm.template(PROMETHEUS, dashboards={"enabled": True}, prometheusRule={"enabled": True})
    for board in BOARDS:
        assert json.loads(rendered[f"ConfigMap/rota-dashboard-{board.stem}"]["data"][board.name]) == read_board(board)
    text = FILE.read_text().replace("absent(rota_leader)", 'absent(rota_leader{namespace="rota-system"})')
    assert rendered["PrometheusRule"]["spec"] == yaml.safe_load(text)  # alert only on the release's own leader
