"""The operator's API client and watches against a real API server, also one that is suspended."""

import asyncio
import logging
import signal

import aiohttp
import pytest

from ground import api as ground
from ground.cluster import Cluster
from ground.controlplane import ControlPlane
from ground.instance import Instance
from ground.poll import soon
from kube.members import a_pod
from kube.world import a_group
from logins import an_api
from rota.documents import PLAIN_KEY
from rota.kube import informers
from rota.kube.client import api as ours
from rota.kube.client.informer import Informer
from rota.kube.client.objects import ConfigMap, CustomResource, Pod
from rota.kube.client.paths import GROUPS
from rota.kube.http import operator_probes
from unit.kube.client.test_informer import SeenObjects


async def test_watch_detects_a_stalled_api_server_and_still_delivers_later_changes(
    api: ground.Api,
    namespace: str,
    control_plane: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ours, "_WATCH_TIMEOUT", aiohttp.ClientTimeout(total=None, sock_connect=1, sock_read=1))
    caplog.set_level(logging.INFO, "rota.kube.client.informer")
    if not isinstance(control_plane, ControlPlane):
        pytest.skip("This cluster is not ours to stop")
    server = control_plane.instance.process("kube-apiserver")
    assert server
    pods = SeenObjects()
    async with an_api(control_plane.kubeconfig) as client:
        informer = Informer(client, "pods", namespace, Pod, pods)
        following = asyncio.create_task(informer.run())
        await soon(lambda: _is(informer.listed.is_set()))
        server.signal(signal.SIGSTOP)
        try:
            await soon(lambda: _is("The watch of" in caplog.text))
        finally:
            server.signal(signal.SIGCONT)
        await api.create(f"/api/v1/namespaces/{namespace}/pods", a_pod("orders-a", "orders"))
        await soon(lambda: _is("orders-a" in pods.present))
        await api.delete(f"/api/v1/namespaces/{namespace}/pods/orders-a", {"gracePeriodSeconds": 0})
        await soon(lambda: _is(not pods.present))
        following.cancel()


@pytest.mark.usefixtures("crds")
async def test_watch_events_that_were_lost_are_recovered_by_a_relist(
    api: ground.Api, namespace: str, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kopf watches groups and policies; an event that its watch loses is recovered by the next relist only."""
    monkeypatch.setattr(informers, "RESYNC_SECONDS", 0.2)
    seen = SeenObjects()

    def subscriptions() -> str:
        return str(seen.present["late"].spec["subscriptions"]) if "late" in seen.present else ""

    async with an_api(control_plane.kubeconfig) as client:
        groups = Informer(client, GROUPS, namespace, CustomResource, seen)
        watched: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        watched.set_result([namespace])
        following = asyncio.create_task(informers.watch_custom_resources([], [groups], watched))
        await groups.listed.wait()
        collection = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"
        await api.create(collection, a_group("late"))
        await soon(lambda: _is("orders" in subscriptions()))
        await api.patch(f"{collection}/late", {"spec": {"subscriptions": [{"topic": "bills"}]}})
        await soon(lambda: _is("bills" in subscriptions()))
        await api.delete(f"{collection}/late")
        await soon(lambda: _is(not seen.present))
        following.cancel()


async def test_watch_whose_events_were_lost_reports_a_deletion_with_the_version_of_the_list(
    api: ground.Api, namespace: str, control_plane: Cluster
) -> None:
    """A write after the last observed version would make a deletion with that version look outdated."""
    seen = SeenObjects()
    collection = f"/api/v1/namespaces/{namespace}/configmaps"
    assignment = {"metadata": {"name": "orders-rota"}, "data": {"assignment.json": "{}"}}
    await api.create(collection, assignment)
    async with an_api(control_plane.kubeconfig) as client:
        informer = Informer(client, "configmaps", namespace, ConfigMap, seen)
        await informer.relist()
        written = await api.patch(f"{collection}/orders-rota", {"data": {"assignment.json": "{}\n"}})
        await api.delete(f"{collection}/orders-rota")
        await informer.relist()
    (deleted,) = [config_map for config_map in seen.deleted if config_map.metadata.name == "orders-rota"]
    assert deleted.metadata.version_number > int(written["metadata"]["resourceVersion"])


async def test_health_endpoint_fails_once_a_watch_is_silent_for_too_long(
    instance: Instance, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = instance.address()
    async with an_api(control_plane.kubeconfig) as client, aiohttp.ClientSession() as session:
        pods = Informer(client, "pods", "", Pod, SeenObjects())
        port = instance.port("a page of ours", 18080)
        serving = await operator_probes.ProbeServer([pods], lambda: True).serve(address, port)

        async def get_text(page: str) -> tuple[int, str]:
            async with session.get(f"http://{address}:{port}/{page}") as response:
                return response.status, await response.text()

        assert await get_text("readyz") == (503, "not listed yet: /api/v1/pods\n")
        assert await get_text("healthz") == (200, "leader\n")
        await pods.relist()
        assert await get_text("readyz") == (200, "ready\n")
        monkeypatch.setattr(operator_probes, "MAX_WATCH_SILENCE_SECONDS", -1.0)
        status, text = await get_text("healthz")
        assert (status, "/api/v1/pods" in text) == (503, True)
        await serving.aclose()


async def test_api_client_lists_a_collection_in_pages_of_a_limited_size(
    api: ground.Api, namespace: str, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty ConfigMaps of 1 MiB once came in one response."""
    monkeypatch.setattr(ours, "MAX_PAGE_BYTES", 250_000)
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    names = [f"large-{number:02}" for number in range(20)]
    for name in names:
        size = 100_000 if int(name[-2:]) < 10 else 10
        await api.create(
            path, {"metadata": {"name": name, "labels": {"size": "large"}}, "data": {PLAIN_KEY: "a" * size}}
        )
    labelled = {"labelSelector": "size=large"}
    async with an_api(control_plane.kubeconfig) as client:
        pages = [page.objects async for page in client.pages(path, ConfigMap, labelled)]
        assert [config_map.metadata.name for page in pages for config_map in page] == names
        assert max(sum(config_map.size_bytes for config_map in page) for page in pages) <= 250_000
        assert max(map(len, pages)) > 2  # small objects share a page again
        monkeypatch.setattr(ours, "MAX_PAGE_BYTES", 50_000)
        assert [config_map.metadata.name for config_map in (await client.list(path, ConfigMap, labelled))[0]] == names
        monkeypatch.setattr(ours, "MAX_OBJECT_BYTES", 50_000)
        with pytest.raises(ours.NoResponseError, match="is too large"):
            await client.list(path, ConfigMap, labelled)


async def _is(value: bool) -> bool:  # noqa: FBT001 - it is what is asked
    return value
