"""Injected pod templates on a real API server: accepted, validated, defaulted, and rolled out only after changes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from ground.api import Api, ApiError, Object
from ground.cluster import Cluster
from ground.poll import soon
from rota.cli import main
from rota.kube.client.objects import CustomResource
from rota.kube.workload.deployment_manifest import build_manifest
from rota.kube.workload.injection import inject, remove_sidecar
from rota.kube.workload.sidecar_container import SidecarSpec
from rota.spec import GroupSpec, parse_group

FLEET = Path(__file__).parents[2] / "docs" / "examples" / "fleet.yaml"
ALL = SidecarSpec(
    image="sidecar:1",
    credentials_secret="acl",  # noqa: S106 - the name of a Secret
    ca_secret="ca",  # noqa: S106 - the same
    client_certificate_secret="client",  # noqa: S106 - the same
)
RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}


def an_app(**fields: Any) -> Object:
    return {"name": "app", "image": "app", **fields}


def a_workload(kind: str, *containers: Object, **spec: Any) -> Object:
    labels = {"app": "shop"}
    pods = {"metadata": {"labels": labels}, "spec": {"containers": [*containers], "terminationGracePeriodSeconds": 60}}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "shop"},
        "spec": {"selector": {"matchLabels": labels}, "template": pods, **spec},
    }


def workloads_path(namespace: str, kind: str = "deployments") -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/{kind}"


DEPLOYMENT = a_workload("Deployment", an_app(), strategy={"type": "Recreate"})
DATA = {"name": "data", "mountPath": "/var/lib/rota"}
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
STATEFUL_SET = a_workload(
    "StatefulSet",
    an_app(volumeMounts=[DATA]),
    serviceName="shop",
    volumeClaimTemplates=[{"metadata": {"name": "data"}, "spec": CLAIM}],
)


@pytest.mark.parametrize("workload", [DEPLOYMENT, STATEFUL_SET, a_workload("DaemonSet", an_app())])
def test_injection_output_is_accepted_by_the_api_server_without_a_warning(
    control_plane: Cluster, namespace: str, tmp_path: Path, workload: Object
) -> None:
    options = ["--group", "orders", "--credentials-secret", "acl", "--ca-secret", "ca", "-f", "-"]
    ran = CliRunner().invoke(main, ["inject", *options], input=yaml.safe_dump(workload))
    assert ran.exit_code == 0, ran.output
    file = tmp_path / "injected.yaml"
    file.write_text(ran.stdout)
    how = ("--server-side", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "-n", namespace)
    assert "serverside-applied" in control_plane.kubectl("apply", *how, "-f", str(file))


async def test_injection_is_reversible_after_api_server_defaulting(api: Api, namespace: str) -> None:
    plain = await api.create(workloads_path(namespace), DEPLOYMENT, **STRICT)
    spec = DEPLOYMENT["spec"]
    body = DEPLOYMENT | {"spec": {**spec, "template": inject(spec["template"], "orders", ALL)}}
    made = await api.create(workloads_path(namespace), body, **STRICT)
    assert remove_sidecar(made["spec"]["template"]) == plain["spec"]["template"]
    assert inject(made["spec"]["template"], "orders", ALL)["spec"].keys() == made["spec"]["template"]["spec"].keys()


# Pods.


def a_pod(**security: Any) -> Object:
    made = inject({"spec": {"containers": [an_app(securityContext=security)]}}, "orders", ALL)
    return {"apiVersion": "v1", "kind": "Pod", **made, "metadata": made["metadata"] | {"name": "shop"}}


@pytest.fixture
async def strict(api: Api, namespace: str) -> str:
    """Let the namespace accept restricted pods only, and wait until it accepts pods."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})

    async def has_account() -> bool:
        return bool(await api.list(f"/api/v1/namespaces/{namespace}/serviceaccounts"))

    await soon(has_account)
    return f"/api/v1/namespaces/{namespace}/pods"


async def test_sidecar_is_accepted_in_a_restricted_namespace(api: Api, strict: str) -> None:
    assert await api.create(strict, a_pod(**RESTRICTED), **STRICT)
    with pytest.raises(ApiError, match="violates PodSecurity") as rejected:  # because of the app, not of the sidecar
        await api.create(strict, a_pod(), **STRICT)
    assert 'container "app"' in str(rejected.value)
    assert "rota-sidecar" not in str(rejected.value)


async def test_sidecar_gets_no_token_and_the_app_keeps_its_own(api: Api, strict: str) -> None:
    spec = (await api.create(strict, a_pod(**RESTRICTED), **STRICT))["spec"]
    mounts = [
        [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == TOKEN]
        for container in (*spec["containers"], *spec["initContainers"])
    ]
    assert [len(token_mounts) for token_mounts in mounts] == [1, 1]
    assert mounts[0][0].startswith("kube-api-access-")
    assert mounts[1] == ["rota-no-token"]


# The Deployment of a group.


async def a_fleet(api: Api, namespace: str) -> tuple[CustomResource, GroupSpec]:
    """Create the group of docs/examples/fleet.yaml, without pods: nothing here would run them."""
    body = yaml.safe_load(FLEET.read_text())
    body["spec"]["replicas"] = 0
    made = await api.create(f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups", body)
    return msgspec.convert(made, CustomResource), parse_group(made)


def deployment_of(group: tuple[CustomResource, GroupSpec], image: str, existing: Object | None = None) -> Object:
    body, spec = group
    return build_manifest(body, spec, SidecarSpec.from_spec(spec, image, 30.0), existing)


async def apply(api: Api, body: Object) -> Object:
    path = f"{workloads_path(body['metadata']['namespace'])}/{body['metadata']['name']}"
    return await api.patch(path, body, "apply", fieldManager="rota", fieldValidation="Strict")


@pytest.mark.usefixtures("crds")
async def test_upgrade_of_the_operator_does_not_roll_out_deployments(api: Api, namespace: str) -> None:
    fleet = await a_fleet(api, namespace)
    first = await apply(api, deployment_of(fleet, "sidecar:1"))
    assert first["metadata"]["generation"] == 1
    second = await apply(api, deployment_of(fleet, "sidecar:1", first))
    third = await apply(api, deployment_of(fleet, "sidecar:2", second))
    assert third["spec"] == second["spec"] == first["spec"]
    assert third["metadata"]["generation"] == 1
    fourth = await apply(api, deployment_of(fleet, "sidecar:2"))  # as after a change of the template
    assert fourth["metadata"]["generation"] == 2
    assert fourth["spec"]["template"]["metadata"]["annotations"]["rota.dev/sidecar"] == "sidecar:2"


@pytest.mark.usefixtures("crds")
async def test_deployment_applied_twice_unchanged_is_written_once(api: Api, namespace: str) -> None:
    fleet = await a_fleet(api, namespace)
    created = await apply(api, deployment_of(fleet, "sidecar:1"))

    async def is_unchanged() -> bool:  # as soon as the Deployment controller has no more writes
        first = await apply(api, deployment_of(fleet, "sidecar:2", created))
        again = await apply(api, deployment_of(fleet, "sidecar:2", first))
        return bool(again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"])

    await soon(is_unchanged)
