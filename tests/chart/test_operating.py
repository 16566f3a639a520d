"""The operator as the chart starts it: its command, its settings, its rights, asked where its probes ask."""

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
    """Make a group whose Secret is not there, and return its path."""
    broker = {"nameServers": ["127.0.0.1:1"], "credentialsSecret": {"name": "acl"}}
    spec = {"broker": {"rocketmq": broker}, "subscriptions": [{"topic": "orders"}]}
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"
    body = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": name}}
    await api.create(groups, {**body, "spec": spec})
    return f"{groups}/{name}"


async def is_looked_after(api: Api, group: str) -> None:
    """Wait until an operator has said what it thinks of a group."""

    async def told() -> bool:
        conditions = (await api.get(group)).get("status", {}).get("conditions") or []
        return any(NO_SECRET in one["message"] for one in conditions)

    await soon(told)


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
        await is_looked_after(api, await a_group(api, namespace))
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{release.namespace}/leases/{release.name}"
        assert (await api.get(lease))["spec"]["holderIdentity"] == "rota-0"
        for probe in ("startup", "liveness", "readiness"):
            asked = rendered.container[f"{probe}Probe"]["httpGet"]
            await asyncio.to_thread(
                eventually, partial(answers, f"https://{address}:8080{asked['path']}", unverified())
            )
        tried = await asyncio.to_thread(release.try_out, tmp_path, api.access.server, f"https://{address}:8080")
        assert (tried.returncode, tried.stderr) == (0, "")
        operator.terminate()
        assert await asyncio.wait_for(operator.wait(), PATIENCE_SECONDS) == 0
    assert "is forbidden: User" not in log_of(kubeconfig).read_text()  # a namespace that ends is forbidden to everybody
    written = [json.loads(line) for line in journal_of(kubeconfig).read_text().splitlines()]
    assert any(NO_SECRET in it.get("message", "") for it in written if it["kind"] == "verdict")
    assert not (await api.get(lease))["spec"]["holderIdentity"]  # given back, so that another leads at once


@pytest.mark.slow("a namespace that the chart names is deleted and made again")
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
        await is_looked_after(api, await a_group(api, namespace))
        await api.delete(f"/api/v1/namespaces/{doomed}")
        await soon(partial(is_gone, api, f"/api/v1/namespaces/{doomed}"))
        await is_looked_after(api, await a_group(api, namespace, "billing"))
    async with start():
        await is_looked_after(api, await a_group(api, namespace, "invoices"))
        for probe in ("healthz", "readyz"):
            await asyncio.to_thread(eventually, partial(answers, f"https://{address}:8080/{probe}", unverified()))
        await api.create("/api/v1/namespaces", {"metadata": {"name": doomed}})
        release.install(**values)
        await is_looked_after(api, await a_group(api, doomed))
    await api.delete(f"/api/v1/namespaces/{doomed}")
