"""The chart's dashboards and rules: what Grafana takes in, about metrics that exist."""

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

SCRAPED = frozenset({"namespace", "job", "instance", "pod"})  # what Prometheus puts to what it scrapes


def known_metrics() -> dict[str, frozenset[str]]:
    """Return the labels of every metric there is, by its name."""
    return {**of_the_operator(), **of_the_sidecar(), **recorded()}


def of_the_operator() -> dict[str, frozenset[str]]:
    return {metric.name: frozenset(metric.labels) for metric in operator_metrics.OperatorMetrics().metrics}


def of_the_sidecar() -> dict[str, frozenset[str]]:
    return {
        metric.name: frozenset({*metric.labels, "group"}) for metric in SidecarMetrics().metrics
    }  # of the PodMonitor


def recorded() -> dict[str, frozenset[str]]:
    return {rule["record"]: frozenset(_grouped(rule["expr"])) for rule in EVERY_RULE if "record" in rule}


# Expressions, as far as names and labels go.

_STRING = r'"(?:[^"\\]|\\.)*"'


def _grouped(expr: str) -> set[str]:
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expr)
    return {label.strip() for found in lists for label in found.split(",") if label.strip()}


def _selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric, and the labels by which it is chosen."""
    for name, chosen in re.findall(
        r"\b(rota_\w+|\w+(?::\w+)+)(?:\{((?:" + _STRING + r"|[^}\"])*)\})?", _without_made(expr)
    ):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(_STRING, "", chosen)))


def _made(expr: str) -> set[str]:
    """Return the labels that an expression makes itself; each is named first, behind what it is made of."""
    texts = re.findall(r", (" + _STRING + ")", expr) if "label_join(" in expr or "label_replace(" in expr else []
    return {text.strip('"') for text in texts}


def _without_made(expr: str) -> str:
    return re.sub(r"(, " + _STRING + r")+\)", ")", expr)


def _labels(name: str, known: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    if name in known:
        return known[name] | SCRAPED
    return known[base] | SCRAPED | ({"le"} if name.endswith("_bucket") else set()) if base in known else None


def wrong(expr: str, known: Mapping[str, frozenset[str]], told: str = "") -> list[str]:
    """Return what an expression, and a text about its result, name that is not there."""
    found, every = [], _made(expr)
    for name, chosen in _selectors(expr):
        labels = _labels(name, known)
        if labels is None:
            found.append(name)
            continue
        every |= labels
        found += [f"{name}{{{label}}}" for label in sorted(chosen - labels)]
    texts = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", told))
    return found + sorted((_grouped(expr) | texts) - every)


@pytest.mark.parametrize(
    ("expr", "told", "said"),
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
def test_dashboard_check_finds_unknown_metrics_and_labels(expr: str, told: str, said: list[str]) -> None:
    assert wrong(expr, known_metrics(), told) == said


def every(value: Any, key: str) -> Iterator[Any]:
    """Yield what stands anywhere in a board under a key."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    for part in value if isinstance(value, list) else []:
        yield from every(part, key)


def read(board: Path) -> Object:
    body: Object = json.loads(board.read_text())
    return body


def panels(board: Path) -> list[Object]:
    return [panel for panel in read(board)["panels"] if panel["type"] != "row"]


each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)


def test_dashboard_files_are_group_operator_and_queues() -> None:
    assert [board.stem for board in BOARDS] == ["group", "operator", "queues"]


@each_board
def test_dashboard_has_the_common_settings(board: Path) -> None:
    body = read(board)
    assert (body["uid"], body["id"], body["tags"]) == (f"rota-{board.stem}", None, ["rota"])
    assert (body["refresh"], body["time"], body["graphTooltip"]) == ("30s", {"from": "now-1h", "to": "now"}, 1)
    assert "version" not in body


@each_board
def test_dashboard_data_source_is_a_variable(board: Path) -> None:
    used = list(every(read(board), "datasource"))
    assert used
    assert [it for it in used if it != {"type": "prometheus", "uid": "${datasource}"}] == []


@each_board
def test_dashboard_variables_narrow_from_namespace_to_topic_and_are_used(board: Path) -> None:
    names = [variable["name"] for variable in read(board)["templating"]["list"]]
    assert names == ["datasource", "namespace", "group", "topic"][: len(names)]
    assert [
        name for name in names if f"${name}" not in board.read_text() and f"${{{name}}}" not in board.read_text()
    ] == []


@each_board
def test_dashboard_panels_have_a_description_and_a_unit(board: Path) -> None:
    shown = panels(board)
    assert [it["title"] for it in shown if not it["description"].endswith(".")] == []
    assert [it["title"] for it in shown if not it["fieldConfig"]["defaults"].get("unit")] == []
    assert [it["title"] for it in shown if not it["targets"]] == []
    titles = [(it["title"], it["description"]) for it in shown]
    assert len(set(titles)) == len(titles)
    numbers = [it["id"] for it in read(board)["panels"]]
    assert len(set(numbers)) == len(numbers)


@each_board
def test_dashboard_panels_do_not_overlap(board: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in read(board)["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@each_board
def test_dashboard_time_ranges_are_grafana_variables(board: Path) -> None:
    spans = {span for expr in every(read(board), "expr") for span in re.findall(r"\[(.*?)\]", expr)}
    assert spans <= {"$__rate_interval", "$__range:"}


@each_board
def test_dashboard_graphs_are_annotated_with_rebalances(board: Path) -> None:
    (annotation,) = read(board)["annotations"]["list"]
    assert "changes(rota_generation{" in annotation["expr"]
    assert annotation["enable"]


@each_board
def test_dashboard_uses_only_existing_metrics_and_labels(board: Path) -> None:
    known = known_metrics()
    body = read(board)
    asked = [(target["expr"], target["legendFormat"]) for panel in panels(board) for target in panel["targets"]]
    asked += [(it["expr"], it["textFormat"]) for it in body["annotations"]["list"]]
    assert [found for expr, told in asked for found in wrong(expr, known, told)] == []
    for definition in [*every(body["templating"], "definition")]:
        what, label = re.fullmatch(r"label_values\((.*), (\w+)\)", definition).groups()  # type: ignore[union-attr]
        assert wrong(f"count by ({label}) ({what})", known) == []


def named(alert: Object) -> str:
    return f"{alert['alert']} {alert['labels']['severity']}"


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.get("record") or named(rule))
def test_alert_and_recording_rules_use_only_existing_metrics_and_labels(rule: Object) -> None:
    assert wrong(rule["expr"], known_metrics(), rule.get("annotations", {}).get("description", "")) == []


def test_prometheus_recording_rules_are_all_used() -> None:
    used = "\n".join(rule["expr"] for rule in EVERY_RULE)
    assert [name for name in recorded() if name not in used] == []


@pytest.mark.parametrize("alert", ALERTS, ids=named)
def test_alert_has_a_severity_and_a_runbook_link(alert: Object) -> None:
    said = alert["annotations"]
    assert re.fullmatch(r"Rota[A-Za-z]+", alert["alert"])
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["for"]
    assert said.keys() == {"summary", "description", "runbook_url"}
    assert "{{" not in said["summary"]
    assert said["runbook_url"] == RUNBOOK + alert["alert"].lower()


def test_alert_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    sections = re.findall(r"^## (Rota\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert sections == list(dict.fromkeys(alert["alert"] for alert in ALERTS))


def understood(exprs: Iterable[str], folder: Path) -> None:
    """Let the real promtool parse expressions."""
    with skip_what_is_missing():
        tool = promtool()
    asked = [{"record": f"asked:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    rules = folder / "asked.yaml"
    rules.write_text(json.dumps({"groups": [{"name": "asked", "rules": asked}]}))
    told = subprocess.run([tool, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


@each_board
def test_dashboard_expressions_are_parsed_by_promtool(board: Path, tmp_path: Path) -> None:
    understood((expr for _, expr in expressions(board, FILLED)), tmp_path)


def test_autoscaling_examples_query_existing_metrics(tmp_path: Path) -> None:
    (keda,) = yaml.safe_load_all((SCALING / "keda.yaml").read_text())
    autoscaler, adapter = yaml.safe_load_all((SCALING / "hpa.yaml").read_text())
    (trigger,) = keda["spec"]["triggers"]
    (rule,) = yaml.safe_load(adapter["data"]["config.yaml"])["externalRules"]
    chosen = 'namespace="shop", group="orders"'
    exprs = [trigger["metadata"]["query"], rule["metricsQuery"].replace("<<.LabelMatchers>>", chosen)]
    assert exprs[0] == exprs[1]
    understood([*exprs, rule["seriesQuery"]], tmp_path)
    assert [found for expr in exprs for found in wrong(expr, known_metrics())] == []
    (metric,) = (it["external"]["metric"]["name"] for it in autoscaler["spec"]["metrics"])
    assert metric == rule["name"]["as"]
    assert keda["spec"]["scaleTargetRef"] == autoscaler["spec"]["scaleTargetRef"]


def test_chart_renders_dashboards_unchanged_and_rules_scoped_to_the_release(helm: Helm) -> None:
    rendered = helm.template(PROMETHEUS, dashboards={"enabled": True}, prometheusRule={"enabled": True})
    for board in BOARDS:
        assert json.loads(rendered[f"ConfigMap/rota-dashboard-{board.stem}"]["data"][board.name]) == read(board)
    text = FILE.read_text().replace("absent(rota_leader)", 'absent(rota_leader{namespace="rota-system"})')
    assert rendered["PrometheusRule"]["spec"] == yaml.safe_load(text)  # the leader is missed that is this release's
