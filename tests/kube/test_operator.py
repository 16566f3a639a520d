"""The operator as a process: kopf, Lease, a real broker; what it leaves on people's objects, and how it ends."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import kopf
import pytest

from ground.api import Api, ApiError
from ground.controlplane import Cluster
from ground.poll import soon
from ground.rocketmq import RocketMQ
from kube.members import Fleet, a_node
from rota.kube import run
from rota.kube.brain import Brain

pytestmark = pytest.mark.usefixtures("crds", "node")

GROUP = "billing"


@pytest.fixture(scope="module")
async def node(api: Api) -> AsyncIterator[None]:
    async with a_node(api):
        yield


@asynccontextmanager
async def an_operator(
    kubeconfig: Path, namespace: str, address: str, log: Path, *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an operator for one namespace; it is killed if it still runs at the end."""
    name = log.stem
    argv = [sys.executable, "-m", "rota.cli", "operator", "--namespace", namespace, "--own-namespace", namespace]
    with log.open("w") as told:
        process = await asyncio.create_subprocess_exec(
            *argv,
            "--identity",
            name,
            "--address",
            address,
            "--journal",
            str(log.with_suffix("")),
            *options,
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stderr=told,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def leader(api: Api, namespace: str) -> str:
    try:
        lease = await api.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/rota")
    except ApiError:
        return ""
    return str(lease["spec"].get("holderIdentity") or "")


def plans_in(folder: Path) -> int:
    """Count the plans in the journals of all operators."""
    return sum(path.read_text().count('"kind":"plan"') for path in folder.glob("*/date=*/*.jsonl"))


@pytest.fixture
async def fleet(api: Api, namespace: str, addresses: Callable[[], str]) -> AsyncIterator[Fleet]:
    async with Fleet(api, namespace, GROUP, addresses) as members:
        yield members


async def test_two_replicas_one_leads_and_the_other_goes_on(
    fleet: Fleet, control_plane: Cluster, rocketmq: RocketMQ, tmp_path: Path
) -> None:
    api, namespace = fleet.api, fleet.namespace
    rocketmq.create_topic("billing", 6)
    group = {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "ConsumerGroup",
        "metadata": {"name": GROUP},
        "spec": {
            "broker": {"rocketmq": {"nameServers": [rocketmq.name_server]}},
            "subscriptions": [{"topic": "billing"}],
        },
    }
    where = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"
    made = await api.create(where, group)
    kubeconfig = control_plane.kubeconfig
    async with an_operator(kubeconfig, namespace, fleet.addresses(), tmp_path / "first.log") as first:

        async def leads(name: str) -> bool:
            return await leader(api, namespace) == name

        async def shared(*shares: int) -> bool:
            return sorted(fleet.shares.values()) == sorted(shares)

        await soon(lambda: leads("first"), 60)
        async with an_operator(kubeconfig, namespace, fleet.addresses(), tmp_path / "second.log") as second:
            await fleet.add("billing-a", "billing-b")
            await soon(lambda: shared(3, 3), 60)
            first.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(first.wait(), 30) == 0, (tmp_path / "first.log").read_text()
            await soon(lambda: leads("second"), 60)
            await fleet.add("billing-c")
            await soon(lambda: shared(2, 2, 2), 60)
            now = await api.get(f"{where}/{GROUP}")
            assert now["spec"] == made["spec"]
            assert "annotations" not in now["metadata"]
            assert "finalizers" not in now["metadata"]

            async def told() -> bool:  # who is ended may not have told its last; people are told last
                status = (await api.get(f"{where}/{GROUP}"))["status"]
                return 0 < plans_in(tmp_path) <= int(status["generation"])

            await soon(told, 60)
            second.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(second.wait(), 30) == 0, (tmp_path / "second.log").read_text()
        await soon(lambda: leads(""))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), r"Nothing can be answered at [\d.]+, port 8080: Address already in use; give another --address or --port"),
        (("--address", "192.0.2.1"), r"Nothing can be answered at 192.0.2.1, port 8080: .*; give another .*"),
        (("--journal", "/dev/null/a"), "--journal /dev/null/a: nothing can be written there: .*; give another folder"),
        (("--journal-limit", "much"), r"--journal-limit 'much'.*"),
        (("--namespace", "Shop"), "--namespace 'Shop' is no name; give one that kubectl get namespaces shows"),
    ],
)
async def test_an_operator_that_cannot_be_run_so_says_it_in_one_sentence(
    control_plane: Cluster, addresses: Callable[[], str], tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    address, log = addresses(), tmp_path / "operator.log"
    with socket.create_server((address, 8080)):
        async with an_operator(control_plane.kubeconfig, "default", address, log, *options) as process:
            assert await asyncio.wait_for(process.wait(), 60) == 2
    assert re.fullmatch(f"rota: {sentence}\n", log.read_text())


async def test_an_operator_that_cannot_watch_any_more_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ended(**_: object) -> None:
        raise OSError("404 page not found")  # as kopf does once the kinds are deleted

    monkeypatch.setattr(kopf, "spawn_tasks", ended)
    stop = asyncio.Event()
    assert await run._kopf(object.__new__(Brain), (), lambda _: None, stop) == 1
    assert stop.is_set()
    assert caplog.messages == [
        "Groups and policies cannot be watched any more, so this operator ends: 404 page not found"
    ]
