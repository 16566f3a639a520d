"""The Lease on a real API server: its holder, and when another operator may take it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ground.api import Api as GroundApi
from ground.cluster import Cluster
from logins import an_api
from rota.kube.client import leader_election
from rota.kube.client.api import Api
from rota.kube.client.leader_election import POD_UID_ANNOTATION, LeaderElector

Start = Callable[..., Any]


@pytest.fixture
async def client(control_plane: Cluster) -> AsyncIterator[Api]:
    async with an_api(control_plane.kubeconfig) as client:
        yield client


@asynccontextmanager
async def leading(client: Api, namespace: str, name: str, uid: str = "") -> AsyncIterator[asyncio.Event]:
    """Run a candidate; the event is set when it leads."""
    leads = asyncio.Event()
    leader = LeaderElector(
        client,
        namespace,
        name,
        lambda is_leading: leads.set() if is_leading else None,
        "rota",
        annotations=lambda: {POD_UID_ANNOTATION: uid} if uid else {},
    )
    running = asyncio.create_task(leader.run())
    yield leads
    running.cancel()
    await asyncio.wait([running])


async def create_lease_of_ended_operator(api: GroundApi, namespace: str, annotations: dict[str, str]) -> None:
    """Write the Lease of an operator that ended without releasing it, valid for another hour."""
    spec = {"holderIdentity": "rota-0", "leaseDurationSeconds": 3600, "renewTime": "2026-11-28T08:00:00.000000Z"}
    body = {"metadata": {"name": "rota", "annotations": annotations}, "spec": spec}
    await api.create(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases", body)


async def a_pod(api: GroundApi, namespace: str) -> str:
    """Create the pod rota-0, and return its uid."""
    container = {"name": "operator", "image": "rota"}
    body = {"metadata": {"name": "rota-0"}, "spec": {"containers": [container]}}
    pod = await api.create(f"/api/v1/namespaces/{namespace}/pods", body)
    return str(pod["metadata"]["uid"])


@pytest.mark.parametrize("namesake", [False, True], ids=["no such pod", "another pod has its name"])
async def test_leader_election_takes_the_lease_of_a_holder_whose_pod_does_not_exist(
    api: GroundApi, client: Api, namespace: str, *, namesake: bool
) -> None:
    if namesake:
        await a_pod(api, namespace)
    await create_lease_of_ended_operator(api, namespace, {POD_UID_ANNOTATION: "uid-of-a-deleted-pod"})
    async with leading(client, namespace, "rota-1", uid="uid-1") as leads:
        await leads.wait()
        lease = await api.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/rota")
        assert lease["spec"]["holderIdentity"] == "rota-1"
        assert lease["metadata"]["annotations"] == {POD_UID_ANNOTATION: "uid-1"}


@pytest.mark.parametrize("annotated", [True, False], ids=["its pod exists", "it runs outside a pod"])
async def test_leader_election_waits_for_a_holder_that_may_still_run(
    api: GroundApi, client: Api, namespace: str, monkeypatch: pytest.MonkeyPatch, *, annotated: bool
) -> None:
    checked = asyncio.Event()
    has_ended = LeaderElector._holder_has_ended

    async def check_and_notify(leader: LeaderElector, lease: leader_election.Lease) -> bool:
        ended = await has_ended(leader, lease)
        checked.set()
        return ended

    monkeypatch.setattr(leader_election, "CHECK_HOLDER_SECONDS", 0.0)
    monkeypatch.setattr(LeaderElector, "_holder_has_ended", check_and_notify)
    annotations = {POD_UID_ANNOTATION: await a_pod(api, namespace)} if annotated else {}
    await create_lease_of_ended_operator(api, namespace, annotations)
    async with leading(client, namespace, "rota-1", uid="uid-1") as leads:
        await checked.wait()
        checked.clear()
        await checked.wait()
        assert not leads.is_set()
