"""The operator as a process: kopf, Lease and a real broker; the fields that it writes to users' objects; its end."""

import asyncio
import gzip
import json
import re
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import kopf
import pytest
from kopf._cogs.aiokits import aiotasks, aiotoggles
from kopf._cogs.clients import api as kopf_api
from kopf._cogs.clients import fetching
from kopf._cogs.structs.references import Resource
from kopf._core.reactor import queueing

from ground.api import Api, ApiError, Object
from ground.cluster import Cluster
from ground.poll import PATIENCE_SECONDS, soon
from ground.rocketmq import RocketMQ
from ground.s3 import Bucket
from journal_segments import written_records
from kube.members import GroupMembers, a_node
from kube.operators import an_operator
from rota.kube import informers
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client import kopf_watch
from rota.kube.client.login.session import Login
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.object_store import open_store

pytestmark = pytest.mark.usefixtures("crds", "node")

GROUP = "billing"
SECURITY = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.fixture(scope="module")
async def node(api: Api) -> AsyncIterator[None]:
    async with a_node(api):
        yield


def unused_handlers() -> EventHandlers:
    unused: Any = None
    return EventHandlers(Controller(unused, unused, BrokerRegistry(unused), unused))


async def leader(api: Api, namespace: str) -> str:
    try:
        lease = await api.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/rota")
    except ApiError:
        return ""
    return str(lease["spec"].get("holderIdentity") or "")


def plans_in(folder: Path) -> int:
    """Count the plans in the journals of all operators."""
    records = {json.dumps(record) for journal in folder.iterdir() for record in written_records(journal)}
    return sum('"kind": "plan"' in record for record in records)


@pytest.fixture
async def fleet(api: Api, namespace: str, addresses: Callable[[], str]) -> AsyncIterator[GroupMembers]:
    async with GroupMembers(api, namespace, GROUP, addresses) as members:
        yield members


async def a_group(api: Api, collection: str, rocketmq: RocketMQ) -> Object:
    """Create a group whose topic has six queues."""
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
    return await api.create(collection, group)


async def test_signature_key_that_an_administrator_removes_is_replaced_while_members_go_on(
    fleet: GroupMembers, control_plane: Cluster, rocketmq: RocketMQ, tmp_path: Path
) -> None:
    api = fleet.api
    namespace = fleet.namespace
    await a_group(api, f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups", rocketmq)
    secrets = f"/api/v1/namespaces/{namespace}/secrets"

    async def shared(*shares: int) -> bool:
        return sorted(fleet.shares.values()) == sorted(shares)

    async def keys(secret: str) -> Object:
        try:
            return (await api.get(f"{secrets}/{secret}")).get("data") or {}
        except ApiError:
            return {}

    async with an_operator(control_plane.kubeconfig, namespace, fleet.addresses(), tmp_path / "operator.log"):
        await fleet.add("billing-a", "billing-b")
        await soon(lambda: shared(3, 3))
        operator_key = await keys("rota-operator-key")
        group_key = await keys(f"{GROUP}-rota-key")
        assert operator_key.keys() == {"current", "last", "changed"}
        assert group_key.keys() == {"current"}
        change, revoke = re.findall(r"^\$ kubectl (patch secret .*)$", SECURITY.read_text(), re.MULTILINE)
        control_plane.kubectl(*shlex.split(change.replace("rota-system", namespace)))

        async def both_are_valid() -> bool:
            operators = await keys("rota-operator-key")
            members = await keys(f"{GROUP}-rota-key")
            return (operators.get("previous"), members.get("previous")) == (
                operator_key["current"],
                group_key["current"],
            )

        await soon(both_are_valid)
        await fleet.add("billing-c")
        await soon(lambda: shared(2, 2, 2))
        changed = await keys("rota-operator-key")
        assert changed["current"] != operator_key["current"]
        control_plane.kubectl(*shlex.split(revoke.replace("rota-system", namespace)))

        async def only_current_is_valid() -> bool:
            operators = await keys("rota-operator-key")
            members = await keys(f"{GROUP}-rota-key")
            return (operators.get("current"), set(members)) == (changed["current"], {"current"})

        await soon(only_current_is_valid)
        await fleet.add("billing-d")
        await soon(lambda: shared(1, 1, 2, 2))


async def test_signature_key_of_a_new_group_is_written_before_its_assignment(
    fleet: GroupMembers, control_plane: Cluster, rocketmq: RocketMQ, tmp_path: Path
) -> None:
    """When pokes came first, most of a thousand new groups waited a quarter of an hour for their keys."""
    api = fleet.api
    namespace = fleet.namespace
    await a_group(api, f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups", rocketmq)
    await fleet.add("billing-a", "billing-b")
    core = f"/api/v1/namespaces/{namespace}"
    version = (await api.get(f"{core}/configmaps"))["metadata"]["resourceVersion"]

    async def created_at(kind: str, name: str) -> int:
        async for event in api.watch(f"{core}/{kind}", resourceVersion=version):
            metadata = event["object"]["metadata"]
            if metadata.get("name") == name:
                return int(metadata["resourceVersion"])
        raise AssertionError(f"{name} was not created")

    async with an_operator(control_plane.kubeconfig, namespace, fleet.addresses(), tmp_path / "operator.log"):
        key, assignment = await asyncio.gather(
            created_at("secrets", f"{GROUP}-rota-key"), created_at("configmaps", f"{GROUP}-rota")
        )
    assert key < assignment


async def test_leader_election_lets_the_second_replica_take_over(
    fleet: GroupMembers, control_plane: Cluster, rocketmq: RocketMQ, tmp_path: Path
) -> None:
    api = fleet.api
    namespace = fleet.namespace
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"
    created = await a_group(api, groups, rocketmq)
    kubeconfig = control_plane.kubeconfig
    async with an_operator(kubeconfig, namespace, fleet.addresses(), tmp_path / "first.log") as first:

        async def leads(name: str) -> bool:
            return await leader(api, namespace) == name

        async def shared(*shares: int) -> bool:
            return sorted(fleet.shares.values()) == sorted(shares)

        await soon(lambda: leads("first"))
        async with an_operator(kubeconfig, namespace, fleet.addresses(), tmp_path / "second.log") as second:
            await fleet.add("billing-a", "billing-b")
            await soon(lambda: shared(3, 3))
            first.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(first.wait(), PATIENCE_SECONDS) == 0, (tmp_path / "first.log").read_text()
            await soon(lambda: leads("second"))
            await fleet.add("billing-c")
            await soon(lambda: shared(2, 2, 2))
            current = await api.get(f"{groups}/{GROUP}")
            assert current["spec"] == created["spec"]
            assert "annotations" not in current["metadata"]
            assert "finalizers" not in current["metadata"]

            async def has_all_plans() -> bool:  # the ended operator may lack its last write; the status is written last
                status = (await api.get(f"{groups}/{GROUP}"))["status"]
                return 0 < plans_in(tmp_path) <= int(status["generation"])

            await soon(has_all_plans)
            second.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(second.wait(), PATIENCE_SECONDS) == 0, (tmp_path / "second.log").read_text()
        await soon(lambda: leads(""))


async def test_journal_in_a_bucket_has_what_an_operator_wrote_until_it_was_stopped(
    fleet: GroupMembers, control_plane: Cluster, rocketmq: RocketMQ, tmp_path: Path, bucket: Bucket
) -> None:
    namespace = fleet.namespace
    await a_group(fleet.api, f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups", rocketmq)
    log = tmp_path / "operator.log"
    with pytest.MonkeyPatch.context() as variables:
        for name, value in bucket.variables.items():
            variables.setenv(name, value)
        options = ("--journal", f"{bucket.uri}/journal", "--journal-spool", str(tmp_path / "spool"))
        async with an_operator(control_plane.kubeconfig, namespace, fleet.addresses(), log, *options) as operator:
            await fleet.add("billing-a", "billing-b")

            async def shared() -> bool:
                return sorted(fleet.shares.values()) == [3, 3]

            await soon(shared)
            operator.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(operator.wait(), PATIENCE_SECONDS) == 0, log.read_text()
        store = open_store(f"{bucket.uri}/journal")
    lines = [line for info in store.list_objects() for line in gzip.decompress(store.read(info.key)).splitlines()]
    assert {"membership", "plan", "owners"} <= {json.loads(line)["kind"] for line in lines}
    assert not [*(tmp_path / "spool").iterdir()]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), r"Cannot listen on [\d.]+, port 8080: Address already in use; give another --address or --port"),
        (("--address", "192.0.2.1"), r"Cannot listen on 192.0.2.1, port 8080: .*; give another .*"),
        (("--journal", "/dev/null/a"), "--journal /dev/null/a is not writable: .*; choose another folder"),
        (("--journal-limit", "much"), r"--journal-limit 'much'.*"),
        (
            ("--journal", "ftp://host/x"),
            "--journal: 'ftp://host/x' has the unknown scheme ftp; use s3://BUCKET/PREFIX.*",
        ),
        (
            ("--namespace", "Shop"),
            "--namespace 'Shop' is not a valid namespace name; .* lists them",
        ),
    ],
)
async def test_cli_operator_that_cannot_start_exits_with_one_sentence(
    control_plane: Cluster, addresses: Callable[[], str], tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    address = addresses()
    log = tmp_path / "operator.log"
    with socket.create_server((address, 8080)):
        async with an_operator(control_plane.kubeconfig, "default", address, log, *options) as process:
            assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 2
    assert re.fullmatch(f"rota: {sentence}\n", log.read_text())


async def test_watch_of_deep_objects_is_the_reported_error_although_other_tasks_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    async def watch() -> None:
        await began.wait()
        raise RecursionError

    async def spawn_tasks(**_: object) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(watch())]

    async def connect() -> None:
        await began.wait()
        await asyncio.sleep(0)
        raise OSError("connection refused")

    def start_tasks() -> None:
        tasks.extend([asyncio.create_task(connect()) for _ in range(20)])
        tasks.append(asyncio.create_task(asyncio.Event().wait()))
        began.set()

    monkeypatch.setattr(kopf, "spawn_tasks", spawn_tasks)
    stop = asyncio.Event()
    login = object.__new__(Login)
    code = await informers.run_kopf(login, unused_handlers(), (), stop=stop, on_started=start_tasks)
    assert code == informers.NESTED_TOO_DEEPLY
    assert not tasks[-1].done()
    tasks[-1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_watch_failure_ends_a_watch_that_is_just_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a watch once ignored its cancellation and opened another one; kopf waited forever, and watched nothing."""
    opened = asyncio.Event()

    async def list_nothing(**_: object) -> AsyncIterator[tuple[list[object], str]]:
        yield [], "1"

    async def never_respond(**_: object) -> None:
        opened.set()
        await asyncio.Event().wait()

    async def fail() -> None:
        await opened.wait()
        raise RecursionError

    monkeypatch.setattr(fetching, "fetch_objs", list_nothing)
    monkeypatch.setattr(kopf_api, "request", never_respond)
    watch = aiotasks.create_guarded_task(
        queueing.watcher(
            namespace=None,
            settings=kopf_watch.build_settings(),
            resource=Resource("rota.dev", "v1alpha1", "consumergroups", namespaced=True),
            processor=list_nothing,  # never called
            operator_paused=aiotoggles.ToggleSet(any),
        ),
        name="watcher for consumergroups",
    )
    foreign_task = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(RecursionError):
        await kopf_watch.run_tasks([asyncio.create_task(fail())])
    assert watch.done()
    assert not foreign_task.done(), "not a task of kopf"
    foreign_task.cancel()


async def test_watch_failure_ends_the_operator_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_to_spawn(**_: object) -> None:
        raise OSError("404 page not found")  # as kopf raises after the kinds are deleted

    monkeypatch.setattr(kopf, "spawn_tasks", fail_to_spawn)
    stop = asyncio.Event()
    assert await informers.run_kopf(object.__new__(Login), unused_handlers(), (), stop=stop) == 1
    assert stop.is_set()
    assert caplog.messages == [
        "Watching ConsumerGroups and RebalancePolicies failed, so the operator exits: 404 page not found"
    ]
