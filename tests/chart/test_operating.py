"""The operator as the chart starts it: its command, settings, rights and probes."""

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from chart.charts import Release, as_its_account, journal_of, log_of, started
from ground.api import Api, Object
from ground.cluster import Cluster
from ground.instance import Instance
from ground.poll import PATIENCE_SECONDS, answers, eventually, soon
from kube.world import is_gone
from logins import unverified

NO_SECRET = "Secret acl, which spec.broker names, does not exist"


async def a_group(api: Api, namespace: str, name: str = "orders") -> str:
    """Create a group that names a missing Secret, and return the group's path."""
    broker = {"nameServers": ["127.0.0.1:1"], "credentialsSecret": {"name": "acl"}}
    spec = {"broker": {"rocketmq": broker}, "subscriptions": [{"topic": "orders"}]}
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"
    body = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": name}}
    await api.create(groups, {**body, "spec": spec})
    return f"{groups}/{name}"


async def wait_for_status(api: Api, group: str) -> None:
    """Wait until an operator has written the conditions of a group."""

    async def is_reported() -> bool:
        conditions = (await api.get(group)).get("status", {}).get("conditions") or []
        return any(NO_SECRET in condition["message"] for condition in conditions)

    await soon(is_reported)


MORE_RIGHTS = pytest.mark.slow("an operator with cluster-wide rights, as a process")


@pytest.mark.parametrize(
    "rights", ["least", pytest.param("namespaced", marks=MORE_RIGHTS), pytest.param("cluster-wide", marks=MORE_RIGHTS)]
)
async def test_chart_starts_an_operator_that_works_with_its_rights_and_probes(
    api: Api,
    control_plane: Cluster,
    instance: Instance,
    release: Release,
    namespace: str,
    *,
    tmp_path: Path,
    rights: str,
) -> None:
    values: Object = {} if rights == "cluster-wide" else {"watchNamespaces": [namespace]}
    if rights == "least":
        values["rbac"] = {"secrets": [namespace], "fleets": False}
    release.install(**values)
    rendered = release.template(**values)
    address = instance.address()
    fields = {"metadata.namespace": release.namespace, "metadata.name": "rota-0", "status.podIP": address}
    fields["metadata.uid"] = "uid-of-rota-0"
    kubeconfig = as_its_account(control_plane, release, tmp_path / "kubeconfig")
    async with started(rendered, kubeconfig, fields) as operator:
        await wait_for_status(api, await a_group(api, namespace))
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{release.namespace}/leases/{release.name}"
        assert (await api.get(lease))["spec"]["holderIdentity"] == "rota-0"
        for probe in ("startup", "liveness", "readiness"):
            request = rendered.container[f"{probe}Probe"]["httpGet"]
            await asyncio.to_thread(
                eventually, partial(answers, f"https://{address}:8080{request['path']}", unverified())
            )
        test_run = await asyncio.to_thread(release.try_out, tmp_path, api.access.server, f"https://{address}:8080")
        assert (test_run.returncode, test_run.stderr) == (0, "")
        operator.terminate()
        assert await asyncio.wait_for(operator.wait(), PATIENCE_SECONDS) == 0
    assert (
        "is forbidden: User" not in log_of(kubeconfig).read_text()
    )  # "User": in a namespace that ends all is forbidden
    records = [json.loads(line) for line in journal_of(kubeconfig).read_text().splitlines()]
    assert any(NO_SECRET in record.get("message", "") for record in records if record["kind"] == "verdict")
    assert not (await api.get(lease))["spec"]["holderIdentity"]  # released, so that another operator leads at once


@pytest.mark.slow("a namespace in the chart's values is deleted and created again")
async def test_namespace_deleted_while_watched_affects_no_other_and_is_served_when_recreated(
    api: Api, control_plane: Cluster, instance: Instance, release: Release, namespace: str, *, tmp_path: Path
) -> None:
    doomed = f"{namespace}-doomed"
    await api.create("/api/v1/namespaces", {"metadata": {"name": doomed}})
    values: Object = {"watchNamespaces": [doomed, namespace]}
    release.install(**values)
    address = f"{instance.block}.90.3"
    fields = {"metadata.namespace": release.namespace, "metadata.name": "rota-0", "status.podIP": address}
    fields["metadata.uid"] = "uid-of-rota-0"
    start = partial(
        started, release.template(**values), as_its_account(control_plane, release, tmp_path / "it"), fields
    )
    async with start():
        await wait_for_status(api, await a_group(api, namespace))
        await api.delete(f"/api/v1/namespaces/{doomed}")
        await soon(partial(is_gone, api, f"/api/v1/namespaces/{doomed}"))
        await wait_for_status(api, await a_group(api, namespace, "billing"))
    async with start():
        await wait_for_status(api, await a_group(api, namespace, "invoices"))
        for probe in ("healthz", "readyz"):
            await asyncio.to_thread(eventually, partial(answers, f"https://{address}:8080/{probe}", unverified()))
        await api.create("/api/v1/namespaces", {"metadata": {"name": doomed}})
        release.install(**values)
        await wait_for_status(api, await a_group(api, doomed))
    await api.delete(f"/api/v1/namespaces/{doomed}")
