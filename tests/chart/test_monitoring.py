"""Monitors, rules, dashboards and the page's certificate that the chart renders, without a cluster."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chart.charts import CHART, EVERYTHING, PROMETHEUS, Helm, HelmError, Rendered


@pytest.fixture(scope="module")
def everything(helm: Helm) -> Rendered:
    return helm.template(PROMETHEUS, **EVERYTHING)


def test_metrics_of_the_operator_are_scraped_by_a_service_monitor(everything: Rendered) -> None:
    monitor = everything["ServiceMonitor"]
    assert monitor["metadata"]["labels"]["prometheus"] == "main"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == ("http", "/metrics", "15s")
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"insecureSkipVerify": True})
    assert endpoint["authorization"] == {"credentials": {"name": "rota-metrics", "key": "token"}}


def test_metrics_are_scraped_with_the_certificate_of_a_secret_or_without_tls(helm: Helm) -> None:
    def endpoint(**page: str) -> Any:
        rendered = helm.template(PROMETHEUS, serviceMonitor={"enabled": True}, page=page)
        return rendered["ServiceMonitor"]["spec"]["endpoints"][0]

    assert endpoint(tlsSecret="page")["tlsConfig"] == {
        "serverName": "rota.rota-system.svc",
        "ca": {"secret": {"name": "page", "key": "ca.crt"}},
    }
    assert not {"scheme", "tlsConfig", "authorization"} & endpoint(auth="None").keys()


def test_metrics_are_scraped_with_a_token_of_the_chart_or_of_a_secret(helm: Helm) -> None:
    with_own_token = helm.template(PROMETHEUS, serviceMonitor={"enabled": True})
    (secret,) = (body for body in with_own_token.by_kind["Secret"] if body["metadata"]["name"] == "rota-metrics")
    assert secret["type"] == "kubernetes.io/service-account-token"
    assert secret["metadata"]["annotations"] == {"kubernetes.io/service-account.name": "rota-metrics"}
    (binding,) = (
        body for body in with_own_token.by_kind["ClusterRoleBinding"] if body["metadata"]["name"] == "rota-metrics"
    )
    assert binding["roleRef"]["name"] == "rota-metrics-reader"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "rota-metrics", "namespace": "rota-system"}]
    with_secret = helm.template(PROMETHEUS, serviceMonitor={"enabled": True, "tokenSecret": "mine"})
    (endpoint,) = with_secret["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"]["name"] == "mine"
    without_auth = helm.template(PROMETHEUS, serviceMonitor={"enabled": True}, page={"auth": "None"})
    for rendered in (with_secret, without_auth):
        names = {body["metadata"]["name"] for kind in ("Secret", "ServiceAccount") for body in rendered.by_kind[kind]}
        assert not {"rota-metrics", "mine"} & names


def test_page_has_the_certificate_of_a_secret(helm: Helm) -> None:
    rendered = helm.template(page={"tlsSecret": "page"})
    assert rendered.env["ROTA_PAGE_TLS"] == "/etc/rota/tls"
    pod = rendered["Deployment"]["spec"]["template"]["spec"]
    assert {"name": "tls", "secret": {"secretName": "page"}} in pod["volumes"]
    assert {"name": "tls", "mountPath": "/etc/rota/tls", "readOnly": True} in rendered.container["volumeMounts"]
    assert "ROTA_PAGE_TLS" not in helm.template().env
    with pytest.raises(HelmError, match=r"page\.tlsSecret is for page\.auth Kubernetes"):
        helm.template(page={"auth": "None", "tlsSecret": "page"})


def test_metrics_of_members_are_scraped_by_a_pod_monitor(everything: Rendered, helm: Helm) -> None:
    monitor = everything["PodMonitor"]
    assert monitor["metadata"]["labels"]["prometheus"] == "main"
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert expression["key"] == "rota.dev/group"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("rota-report", "/metrics")
    restricted = helm.template(PROMETHEUS, podMonitor={"enabled": True}, watchNamespaces=["shop"])
    assert restricted["PodMonitor"]["spec"]["namespaceSelector"] == {"matchNames": ["shop"]}


def test_chart_renders_rule_and_dashboard_files_unchanged(helm: Helm, tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "rota", ignore=shutil.ignore_patterns("rules", "dashboards"))
    alert = {"alert": "A", "annotations": {"summary": "{{ $labels.group }}"}}
    rules = {"groups": [{"name": "a", "rules": [alert]}]}
    board = {"title": "Groups", "legend": "{{group}}"}
    for name, body in (("rules/groups.yaml", rules), ("dashboards/groups.json", board)):
        (chart / name).parent.mkdir()
        (chart / name).write_text(json.dumps(body, indent=2))
    assert helm.template(chart=chart).by_kind.keys().isdisjoint({"PrometheusRule", "ConfigMap"})
    rendered = helm.template(
        PROMETHEUS,
        chart=chart,
        prometheusRule={"enabled": True, "labels": {"prometheus": "main"}},
        dashboards={"enabled": True, "annotations": {"folder": "Rota"}},
    )
    rule = rendered["PrometheusRule/rota-groups"]
    config_map = rendered["ConfigMap/rota-dashboard-groups"]
    assert rule["spec"] == rules
    assert rule["metadata"]["labels"]["prometheus"] == "main"
    assert json.loads(config_map["data"]["groups.json"]) == board
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["metadata"]["annotations"] == {"folder": "Rota"}
