"""The API server as the operator asks and follows it: a server that stands still."""

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
    seen: set[str] = set()
    async with an_api(control_plane.kubeconfig) as client:
        told = Informer(
            client,
            "pods",
            namespace,
            Pod,
            on_upsert=lambda pod: seen.add(pod.metadata.name),
            on_delete=lambda pod: seen.remove(pod.metadata.name),
        )
        following = asyncio.create_task(told.run())
        await soon(lambda: _is(told.listed.is_set()))
        server.signal(signal.SIGSTOP)
        try:
            await soon(lambda: _is("The watch of" in caplog.text))
        finally:
            server.signal(signal.SIGCONT)
        await api.create(f"/api/v1/namespaces/{namespace}/pods", a_pod("orders-a", "orders"))
        await soon(lambda: _is("orders-a" in seen))
        await api.delete(f"/api/v1/namespaces/{namespace}/pods/orders-a", {"gracePeriodSeconds": 0})
        await soon(lambda: _is(not seen))
        following.cancel()


@pytest.mark.usefixtures("crds")
async def test_watch_events_that_were_lost_are_recovered_by_a_relist(
    api: ground.Api, namespace: str, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and policies are kopf's to watch; an event that is lost there is lost until then."""
    monkeypatch.setattr(informers, "RESYNC_SECONDS", 0.2)
    seen: dict[str, str] = {}
    async with an_api(control_plane.kubeconfig) as client:
        groups = Informer(
            client,
            GROUPS,
            namespace,
            CustomResource,
            on_upsert=lambda it: seen.update({it.metadata.name: str(it.spec["subscriptions"])}),
            on_delete=lambda it: seen.__delitem__(it.metadata.name),
        )
        watched: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        watched.set_result([namespace])
        following = asyncio.create_task(informers.watch_custom_resources([], [groups], watched))
        await groups.listed.wait()
        where = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"
        await api.create(where, a_group("late"))
        await soon(lambda: _is("orders" in seen.get("late", "")))
        await api.patch(f"{where}/late", {"spec": {"subscriptions": [{"topic": "bills"}]}})
        await soon(lambda: _is("bills" in seen.get("late", "")))
        await api.delete(f"{where}/late")
        await soon(lambda: _is(not seen))
        following.cancel()


async def test_watch_whose_events_were_lost_reports_a_deletion_with_the_version_of_the_list(
    api: ground.Api, namespace: str, control_plane: Cluster
) -> None:
    """The deleted object may have been written after it was last seen: by that version the deletion would be older."""
    gone = list[ConfigMap]()
    where = f"/api/v1/namespaces/{namespace}/configmaps"
    record = {"metadata": {"name": "orders-rota"}, "data": {"assignment.json": "{}"}}
    await api.create(where, record)
    async with an_api(control_plane.kubeconfig) as client:
        records = Informer(client, "configmaps", namespace, ConfigMap, on_upsert=lambda _: None, on_delete=gone.append)
        await records.relist()
        written = await api.patch(f"{where}/orders-rota", {"data": {"assignment.json": "{}\n"}})
        await api.delete(f"{where}/orders-rota")
        await records.relist()
    (deleted,) = [it for it in gone if it.metadata.name == "orders-rota"]
    assert deleted.metadata.version_number > int(written["metadata"]["resourceVersion"])


async def test_health_endpoint_fails_once_a_watch_is_silent_for_too_long(
    instance: Instance, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = instance.address()
    async with an_api(control_plane.kubeconfig) as client, aiohttp.ClientSession() as session:
        pods = Informer(client, "pods", "", Pod, on_upsert=lambda _: None, on_delete=lambda _: None)
        port = instance.port("a page of ours", 18080)
        serving = await operator_probes.ProbeServer([pods], lambda: True).serve(address, port)

        async def asked(what: str) -> tuple[int, str]:
            async with session.get(f"http://{address}:{port}/{what}") as answer:
                return answer.status, await answer.text()

        assert await asked("readyz") == (503, "not listed yet: /api/v1/pods\n")
        assert await asked("healthz") == (200, "leader\n")
        await pods.relist()
        assert await asked("readyz") == (200, "ready\n")
        monkeypatch.setattr(operator_probes, "MAX_WATCH_SILENCE_SECONDS", -1.0)
        status, text = await asked("healthz")
        assert (status, "/api/v1/pods" in text) == (503, True)
        await serving.aclose()


async def test_api_client_lists_a_collection_in_pages_of_a_limited_size(
    api: ground.Api, namespace: str, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty ConfigMaps of 1 MiB were one response."""
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
        pages = [operator_probes.objects async for operator_probes in client.pages(path, ConfigMap, labelled)]
        assert [it.metadata.name for operator_probes in pages for it in operator_probes] == names
        assert max(sum(it.size_bytes for it in operator_probes) for operator_probes in pages) <= 250_000
        assert max(map(len, pages)) > 2  # small objects come together again
        monkeypatch.setattr(ours, "MAX_PAGE_BYTES", 50_000)
        assert [it.metadata.name for it in (await client.list(path, ConfigMap, labelled))[0]] == names
        monkeypatch.setattr(ours, "MAX_OBJECT_BYTES", 50_000)
        with pytest.raises(ours.NoResponseError, match="is too large"):
            await client.list(path, ConfigMap, labelled)


async def _is(value: bool) -> bool:  # noqa: FBT001 - it is what is asked
    return value
