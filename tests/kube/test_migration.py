"""A Java fleet becomes a fleet of Rota's under load, and goes back, as docs/migration.md says: its commands are run.

Whenever all is settled, each queue has exactly one reader, and what was committed by then never comes again.
"""

import json
import os
import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ground import java
from ground.api import Api, ApiError, Object
from ground.cluster import Cluster
from ground.local import LocalNode
from ground.ours import at_rest, conditions
from ground.poll import soon
from ground.programs import program
from ground.rocketmq import RocketMQ
from kube.operators import an_operator
from kube.pages import ROOT, Shell, a_shell, blocks, typed
from kube.shop import a_template, again_and_again
from rota.brokers.rocketmq import admin
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.ranges import from_ranges

pytestmark = [pytest.mark.usefixtures("crds"), pytest.mark.timeout(600)]

PAGE = ROOT / "docs/migration.md"
JAVA, MANIFEST, *_ = [[*yaml.safe_load_all(text)] for text in blocks(PAGE, "yaml")]
(BODY,) = [it for it in MANIFEST if it["kind"] == "ConsumerGroup"]
NAME, GROUP = BODY["metadata"]["name"], BODY["spec"]["group"]
(TOPIC,) = [it["topic"] for it in BODY["spec"]["subscriptions"]]
BROKER, QUEUES, WINDOW = "broker-0", 8, 160
THEIRS = "app=orders-java"


class Came(NamedTuple):
    """A message that came to somebody."""

    number: int
    queue: int
    offset: int
    reader: str


class Move:
    """Both fleets, what they are sent, and what comes to whom."""

    def __init__(self, api: Api, namespace: str, brokers: admin.AdminClient, folder: Path) -> None:
        self.api, self.namespace, self._brokers, self._folder = api, namespace, brokers, folder
        self.ours, self.theirs, self.sent = 0, 0, 0
        self.twice: list[int] = []  # how many messages came again, at each change
        self._safe = 0  # what was sent up to this one is committed
        self._known: set[int] = set()  # what came again before that
        self._read: dict[Path, int] = {}
        self._came: list[Came] = []
        self._shares: dict[str, list[int]] = {}  # what Java consumers say they work, by pod

    # What is sent and what comes.

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Send numbered messages meanwhile."""

        async def send() -> None:
            await self._brokers.send(TOPIC, b"%d" % (self.sent + 1))
            self.sent += 1

        async with again_and_again(send):
            yield

    def _look(self) -> None:
        """Take in what apps and Java consumers have noted since the last look."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                new = log.read().rpartition(b"\n")[0]
                self._read[path] = self._read.get(path, 0) + len(new) + bool(new)
            for line in [json.loads(line) for line in new.splitlines() if line.startswith(b"{")]:
                self._take(path.stem, line)

    def _take(self, who: str, line: dict[str, Any]) -> None:
        if line.get("event") == "rebalance" and line["topic"] == TOPIC:
            self._shares[who] = [int(queue.partition(":")[2]) for queue in line["queues"].split()]
        told = line.get("messages") or [line] * (line.get("event") == "message")
        reader = line.get("name", who).partition("/")[0]  # of our apps, the process
        self._came += [Came(it["number"], it["queue"], it["offset"], reader) for it in told]

    # What is so.

    async def _pods(self, label: str) -> set[str]:
        found = await self.api.list(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=label)
        return {it["metadata"]["name"] for it in found}

    async def _shared_by_us(self) -> list[int]:
        """Return the queues that the document gives to pods that are there; others stay in it until they are needed."""
        try:
            found = await self.api.get(f"/api/v1/namespaces/{self.namespace}/configmaps/{NAME}-rota")
        except ApiError:  # it is not there yet
            return []
        document = json.loads(found["data"]["assignment.json"])
        there = await self._pods(f"rota.dev/group={NAME}")
        shares = [from_ranges(it.get("queues", {})) for name, it in document["members"].items() if name in there]
        return [queue.id for share in shares for queue in share if queue.topic == TOPIC]

    async def group(self) -> Object:
        return await self.api.get(f"/apis/rota.dev/v1alpha1/namespaces/{self.namespace}/consumergroups/{NAME}")

    async def _settled(self) -> bool:
        """Whether operator and Java consumers have seen who is there, and each queue is one's."""
        self._look()
        javas = await self._pods(THEIRS)
        if len(javas) != self.theirs or len(await self._pods(f"rota.dev/group={NAME}")) != self.ours:
            return False
        group = await self.group()
        told = conditions(group)
        foreign = told.get("UnmanagedConsumers", {}).get("message", "0").partition(" ")[0]
        only = told.get("Ready", {}).get("message", "").startswith("Only unmanaged consumers")
        seen = int(foreign) == self.theirs and (at_rest(group, self.ours) if self.ours else only)
        shared = [queue for pod in javas for queue in self._shares.get(pod, ())] + await self._shared_by_us()
        return seen and sorted(shared) == [*range(QUEUES)]

    async def settles(self) -> None:
        """Wait until all is settled; then each queue has one reader, and each message that is sent comes once."""
        await self._soon(self._settled)
        window = range(self.sent + 2, self.sent + 2 + WINDOW)  # one may be under way

        async def all_came() -> bool:
            self._look()
            return {it.number for it in self._came} >= {*range(1, window.stop)}

        await self._soon(all_came)
        readers: dict[int, set[str]] = defaultdict(set)
        for it in self._came:
            if it.number in window:
                readers[it.queue].add(it.reader)
        assert {queue: len(who) for queue, who in readers.items()} == dict.fromkeys(range(QUEUES), 1), readers
        again = {number for number, times in Counter(it.number for it in self._came).items() if times > 1}
        assert {number for number in again if number in window} == set(), "all was settled"
        assert {number for number in again if number <= self._safe} == self._known, "it was committed before"
        self.twice.append(len(again - self._known))
        self._known, self._safe = again, window.stop - 1
        came = [*self._came]
        await self._soon(lambda: self._committed(came))

    async def _committed(self, came: Sequence[Came]) -> bool:
        """Whether the group has committed all of this."""
        progress = await self._brokers.group_offsets(GROUP, BROKER, [TOPIC])
        committed = {queue.id: it.committed_offset for queue, it in progress.items()}
        return all(committed.get(it.queue, 0) > it.offset for it in came)

    async def _soon(self, ask: Callable[[], Any]) -> None:
        try:
            await soon(ask)
        except TimeoutError as error:
            error.add_note(f"wanted: {self.ours} of ours, {self.theirs} Java; {await self._pods('')}")
            error.add_note(f"Java: {self._shares}; ours: {await self._shared_by_us()}")
            error.add_note(f"{(await self.group()).get('status')}")
            raise


# The page's manifests, as they are on the ground.


def java_fleet(rocketmq: RocketMQ, node: LocalNode, folder: Path) -> Object:
    """Return the page's Deployment of Java consumers, whose pods are ours."""
    (body,) = JAVA
    words = [f"nameServer={rocketmq.name_server}", f"group={GROUP}", f"topic={TOPIC}", "instance=$(POD_NAME)"]
    argv = rocketmq.java("PushConsumer", *words, path=java.class_path(java.classes()), level="WARN")
    told = f'exec "$@" >> {shlex.quote(str(folder))}/"$POD_NAME".jsonl'
    env = [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    app = {"name": "app", "image": "java", "env": env, "command": ["sh", "-c", told, "sh", *map(str, argv)]}
    spec = {"nodeSelector": node.selector, "tolerations": node.tolerations, "containers": [app]}
    body["spec"]["template"]["spec"] = spec
    return dict(body)


def manifest(rocketmq: RocketMQ, node: LocalNode, folder: Path) -> str:
    """Return the page's group with the ground's broker, and apps that note what they get."""
    spec = BODY["spec"]
    spec["broker"]["rocketmq"]["nameServers"] = [rocketmq.name_server]
    spec["template"] = a_template(node, folder)
    return yaml.safe_dump_all(MANIFEST)


@pytest.fixture
async def shell(
    control_plane: Cluster, namespace: str, rocketmq: RocketMQ, addresses: Callable[[], str], tmp_path: Path
) -> AsyncIterator[Shell]:
    """Run an operator, and a shell of somebody who has a kubeconfig and knows where the operator is."""
    config, address = tmp_path / "kubeconfig", addresses()
    config.write_bytes(control_plane.kubeconfig.read_bytes())
    path = f"{Path(sys.executable).parent}:{program('kubectl').parent}:{os.environ['PATH']}"
    variables = {"KUBECONFIG": str(config), "ROTA_OPERATOR": f"http://{address}:8080", "PATH": path}
    variables["ROTA_NAME_SERVER"] = rocketmq.name_server
    async with (
        an_operator(control_plane.kubeconfig, namespace, address, tmp_path / "operator.log"),
        a_shell(tmp_path, variables) as found,
    ):
        await found.run(f"kubectl config set-context --current --namespace={namespace}")
        yield found


@pytest.fixture
async def move(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> AsyncIterator[Move]:
    """Have the Java fleet work under load, and the page's manifest lie there."""
    rocketmq.create_topic(TOPIC, QUEUES)
    (tmp_path / "orders.yaml").write_text(manifest(rocketmq, local_node, tmp_path))
    fleet = java_fleet(rocketmq, local_node, tmp_path)
    await api.create(f"/apis/apps/v1/namespaces/{namespace}/deployments", fleet)
    brokers = admin.AdminClient(ConnectionConfig([rocketmq.name_server]))
    found = Move(api, namespace, brokers, tmp_path)
    found.theirs = fleet["spec"]["replicas"]
    async with found.load():
        yield found
    await brokers.close()


@pytest.mark.slow("a Java fleet moves to Rota and back by docs/migration.md, typed")
async def test_migration_of_a_java_fleet_and_back_works_as_documented(move: Move, shell: Shell) -> None:
    for it in typed(PAGE):
        await shell.follow(it)
        if scaled := re.search(r"scale (cg|deploy)/\S+ --replicas=(\d+)", it.command):
            setattr(move, "ours" if scaled[1] == "cg" else "theirs", int(scaled[2]))
        if scaled or it.command.startswith("kubectl apply"):
            await move.settles()
    print(f"{move.sent} messages; at each step came again: {move.twice}")
