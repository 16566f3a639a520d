"""The chart on a real API server: accepted without a warning, installed, upgraded, tested and removed."""

import base64
import json
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from chart.charts import Release
from chart.prometheus_kinds import DEFINITIONS
from ground.api import Api, Object
from ground.cluster import Cluster
from ground.instance import Instance
from ground.poll import soon
from rota.spec import parse_group

DRY = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--warnings-as-errors", "-f", "-")


def everything(namespace: str) -> Object:
    """Return values with every switch on, and a value for most settings."""
    return {
        "watchNamespaces": [namespace],
        "logLevel": "debug",
        "imagePullSecrets": [{"name": "pull"}],
        "journal": {"kind": "volume", "claim": {"storageClass": "shared"}},
        "tracing": {"endpoint": "https://collector:4318", "headersSecret": "otlp"},
        "serviceAccount": {"annotations": {"a": "b"}},
        "podAnnotations": {"a": "b"},
        "podLabels": {"a": "b"},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "networkPolicy": {"enabled": True, "scrapeFrom": ["monitoring"], "scrapeMembersFrom": ["monitoring"]},
        "serviceMonitor": {"enabled": True, "labels": {"a": "b"}},
        "podMonitor": {"enabled": True, "labels": {"a": "b"}},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraArgs": ["--no-fleets"],
        "podSecurityContext": {"fsGroup": 1000},
        "prometheusRule": {"enabled": True, "labels": {"a": "b"}},
        "dashboards": {"enabled": True, "annotations": {"a": "b"}},
    }


@pytest.mark.usefixtures("prometheus_kinds")
@pytest.mark.parametrize("case", ["default", "namespaced", "everything", "alone"])
def test_chart_objects_are_accepted_by_the_api_server_without_a_warning(
    control_plane: Cluster, release: Release, namespace: str, case: str
) -> None:
    values: dict[str, Object] = {
        "default": {},
        "namespaced": {"watchNamespaces": [namespace]},
        "everything": everything(namespace),
        "alone": {"replicas": 1, "journal": {"kind": "volume", "claim": {"accessModes": ["ReadWriteOnce"]}}},
    }
    rendered = release.template(**values[case])
    namespaces = {body["metadata"].get("namespace") for body in rendered.objects}
    assert namespaces <= {None, release.namespace, namespace, "kube-system"}
    lasting = [body for body in rendered.objects if body["kind"] != "Pod"]  # a pod needs an existing account
    applied = control_plane.kubectl(*DRY, feed=yaml.safe_dump_all(lasting)).splitlines()
    assert len(applied) == len(lasting)


async def test_install_creates_pods_in_a_restricted_namespace(
    api: Api, control_plane: Cluster, release: Release
) -> None:
    release.install()
    deployment = f"/apis/apps/v1/namespaces/{release.namespace}/deployments/{release.name}"

    async def has_pods(pods: int) -> bool:
        return bool((await api.get(deployment)).get("status", {}).get("replicas") == pods)

    await soon(lambda: has_pods(2))
    rendered = release.template()
    control_plane.kubectl("apply", "-f", "-", feed=json.dumps(rendered[f"ServiceAccount/{release.name}-test"]))
    assert control_plane.kubectl(*DRY, feed=json.dumps(rendered["Pod"]))
    release.install(replicas=3)
    await soon(lambda: has_pods(3))


@pytest.mark.usefixtures("prometheus_kinds")
async def test_upgrade_to_every_chart_switch_and_back_changes_no_selector(
    api: Api, release: Release, namespace: str
) -> None:
    release.install()
    release.install(**everything(namespace))
    release.install()
    claims = f"/api/v1/namespaces/{release.namespace}/persistentvolumeclaims"
    assert [claim["metadata"]["name"] for claim in await api.list(claims)] == [f"{release.name}-journal"]


@pytest.mark.usefixtures("prometheus_kinds")
async def test_install_gives_prometheus_a_token_that_may_read_metrics_and_nothing_else(
    api: Api, control_plane: Cluster, release: Release
) -> None:
    monitored = {"serviceMonitor": {"enabled": True}}
    release.install(**monitored)
    (endpoint,) = release.template(**monitored)["ServiceMonitor"]["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]

    async def token() -> str:
        secret = await api.get(f"/api/v1/namespaces/{release.namespace}/secrets/{credentials['name']}")
        return str(secret.get("data", {}).get(credentials["key"], ""))

    bearer = base64.b64decode(await soon(token)).decode()
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": bearer}}
    reviewed = await api.create("/apis/authentication.k8s.io/v1/tokenreviews", review)
    account = reviewed["status"]["user"]["username"]

    def may(*arguments: str) -> str:
        return control_plane.kubectl("auth", "can-i", *arguments, f"--as={account}", check=False).strip()

    assert may("get", "/metrics") == "yes"
    assert may("get", "secrets", "-n", release.namespace) == "no"
    assert may("get", "consumergroups.rota.dev", "-A") == "no"


async def test_uninstall_keeps_the_crds(api: Api, release: Release) -> None:
    release.install()
    definition = f"{DEFINITIONS}/consumergroups.rota.dev"
    metadata = (await api.get(definition))["metadata"]
    assert metadata["annotations"]["meta.helm.sh/release-name"] == release.name
    release.uninstall()
    assert (await api.get(definition))["metadata"]["uid"] == metadata["uid"]
    assert await api.list(f"/apis/apps/v1/namespaces/{release.namespace}/deployments") == []


# Notes.


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "manages groups in all namespaces."),
        ({"watchNamespaces": ["shop", "billing"]}, "manages groups in shop, billing."),
        ({"watchNamespaces": ["shop"]}, "kubectl apply -n shop -f"),
        ({"crds": {"install": False}}, "not part of this release"),
        ({}, "Every pod of the cluster can connect to the members' ports 9911 and 9913"),
        (
            {"page": {"auth": "None"}},
            "can connect to the operator's port 8080, which shows all groups (page.auth is None), and the members",
        ),
        ({"networkPolicy": {"enabled": True}}, "can connect to the ports 9911 and 9913 of members in all namespaces"),
        (
            {"networkPolicy": {"enabled": True, "memberNamespaces": ["shop"]}},
            "can connect to the ports 9911 and 9913 of members in namespaces other than shop",
        ),
        (
            {"watchNamespaces": ["shop", "billing"], "networkPolicy": {"enabled": True, "memberNamespaces": ["shop"]}},
            "can connect to the ports 9911 and 9913 of members in billing",
        ),
        ({"admissionPolicies": {"operator": False}}, "Only RBAC limits the operator's account"),
        ({"fullnameOverride": "brain"}, "export ROTA_LEASE=brain ROTA_OPERATOR_NAMESPACE="),
    ],
    ids=str,
)
def test_install_notes_describe_the_release(release: Release, values: Object, text: str) -> None:
    assert text in release.install("--dry-run=client", **values).partition("NOTES:\n")[2]


def test_install_notes_end_with_a_group_that_can_be_applied(
    control_plane: Cluster, release: Release, namespace: str
) -> None:
    notes = release.install(watchNamespaces=[namespace]).partition("NOTES:\n")[2]
    command, _, remainder = notes.partition("<<'EOF'\n")
    pasted = textwrap.dedent(remainder.partition("EOF\n")[0])
    assert command.split()[-6:] == ["kubectl", "apply", "-n", namespace, "-f", "-"]
    assert control_plane.kubectl("-n", namespace, *DRY, feed=pasted)
    assert parse_group(yaml.safe_load(pasted)).replicas == 3
    assert "{{" not in notes


# helm test.


@contextmanager
def serve_readiness(instance: Instance, status: int) -> Iterator[str]:
    """Serve an operator's readiness with this status, and yield the URL."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer((instance.address(), 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{instance.address()}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, "The API server knows Rota's kinds, and an operator is ready."),
        (503, "No operator is ready (HTTP Error 503: Service Unavailable); its logs say why"),
    ],
)
def test_chart_helm_test_reports_whether_the_operator_is_ready(
    api: Api, release: Release, instance: Instance, tmp_path: Path, *, status: int, text: str
) -> None:
    release.install()
    with serve_readiness(instance, status) as address:
        process = release.try_out(tmp_path, api.access.server, address)
    assert process.returncode == (status != 200)
    assert text in process.stdout + process.stderr


def test_chart_helm_test_reports_missing_crds(api: Api, release: Release, tmp_path: Path) -> None:
    release.install()
    process = release.try_out(tmp_path, f"{api.access.server}/nowhere", "")
    assert process.returncode == 1
    assert "does not know Rota's kinds (HTTP Error" in process.stderr
