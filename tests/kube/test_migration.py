"""Migrates a Java fleet to Rota under load and back, with the commands of docs/migration.md.

In each settled state every queue has exactly one reader, and messages that were committed by then are never repeated.
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
from kube.pages import ROOT, Shell, a_shell, blocks, typed_commands
from kube.template_group import a_template, send_repeatedly
from rota.brokers.rocketmq import admin
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.ranges import from_ranges

pytestmark = [pytest.mark.usefixtures("crds"), pytest.mark.timeout(600)]

PAGE = ROOT / "docs/migration.md"
JAVA, MANIFEST, *_ = [[*yaml.safe_load_all(text)] for text in blocks(PAGE, "yaml")]
(BODY,) = [resource for resource in MANIFEST if resource["kind"] == "ConsumerGroup"]
NAME, GROUP = BODY["metadata"]["name"], BODY["spec"]["group"]
(TOPIC,) = [subscription["topic"] for subscription in BODY["spec"]["subscriptions"]]
BROKER = "broker-0"
QUEUES = 8
WINDOW = 160  # messages
THEIRS = "app=orders-java"


class ReceivedMessage(NamedTuple):
    """A message that a reader received."""

    number: int
    queue: int
    offset: int
    reader: str


class Migration:
    """The Java fleet and Rota's group, the messages sent, and the readers that received them."""

    def __init__(self, api: Api, namespace: str, brokers: admin.AdminClient, folder: Path) -> None:
        self.api = api
        self.namespace = namespace
        self._brokers = brokers
        self._folder = folder
        self.ours = 0  # members of Rota's group
        self.theirs = 0  # Java consumers
        self.sent = 0
        self.repeats: list[int] = []  # repeated messages, at each change
        self._committed_up_to = 0  # messages up to this one are committed
        self._known_repeats: set[int] = set()  # messages that were repeated before that
        self._read: dict[Path, int] = {}
        self._received: list[ReceivedMessage] = []
        self._shares: dict[str, list[int]] = {}  # the queues that each Java pod reports

    # Messages.

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Send numbered messages until the block ends."""

        async def send() -> None:
            await self._brokers.send(TOPIC, b"%d" % (self.sent + 1))
            self.sent += 1

        async with send_repeatedly(send):
            yield

    def _read_logs(self) -> None:
        """Read the new lines of the apps' and Java consumers' logs."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as log:
                log.seek(self._read.get(path, 0))
                new = log.read().rpartition(b"\n")[0]
                self._read[path] = self._read.get(path, 0) + len(new) + bool(new)
            for line in [json.loads(line) for line in new.splitlines() if line.startswith(b"{")]:
                self._record(path.stem, line)

    def _record(self, pod: str, line: dict[str, Any]) -> None:
        if line.get("event") == "rebalance" and line["topic"] == TOPIC:
            self._shares[pod] = [int(queue.partition(":")[2]) for queue in line["queues"].split()]
        logged = line.get("messages") or [line] * (line.get("event") == "message")
        reader = line.get("name", pod).partition("/")[0]  # the apps of Rota's members add the process
        self._received += [
            ReceivedMessage(message["number"], message["queue"], message["offset"], reader) for message in logged
        ]

    # State.

    async def _pods(self, label: str) -> set[str]:
        pods = await self.api.list(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=label)
        return {pod["metadata"]["name"] for pod in pods}

    async def _assigned_queues(self) -> list[int]:
        """Return the queues that the assignment gives to existing pods; deleted pods keep their entries for a while."""
        try:
            config_map = await self.api.get(f"/api/v1/namespaces/{self.namespace}/configmaps/{NAME}-rota")
        except ApiError:  # not created yet
            return []
        document = json.loads(config_map["data"]["assignment.json"])
        running_pods = await self._pods(f"rota.dev/group={NAME}")
        shares = [
            from_ranges(share.get("queues", {})) for name, share in document["members"].items() if name in running_pods
        ]
        return [queue.id for share in shares for queue in share if queue.topic == TOPIC]

    async def group(self) -> Object:
        return await self.api.get(f"/apis/rota.dev/v1alpha1/namespaces/{self.namespace}/consumergroups/{NAME}")

    async def _settled(self) -> bool:
        """Whether the operator and the Java consumers know all consumers, and each queue has one owner."""
        self._read_logs()
        java_pods = await self._pods(THEIRS)
        if len(java_pods) != self.theirs or len(await self._pods(f"rota.dev/group={NAME}")) != self.ours:
            return False
        group = await self.group()
        by_type = conditions(group)
        unmanaged = by_type.get("UnmanagedConsumers", {}).get("message", "0").partition(" ")[0]
        has_only_unmanaged = by_type.get("Ready", {}).get("message", "").startswith("Only unmanaged consumers")
        is_settled = int(unmanaged) == self.theirs and (at_rest(group, self.ours) if self.ours else has_only_unmanaged)
        owned = [queue for pod in java_pods for queue in self._shares.get(pod, ())] + await self._assigned_queues()
        return is_settled and sorted(owned) == [*range(QUEUES)]

    async def check_settled(self) -> None:
        """Wait until all is settled; then each queue has one reader, and each message arrives once."""
        await self._soon(self._settled)
        window = range(self.sent + 2, self.sent + 2 + WINDOW)  # one message may be in flight

        async def all_came() -> bool:
            self._read_logs()
            return {message.number for message in self._received} >= {*range(1, window.stop)}

        await self._soon(all_came)
        readers: dict[int, set[str]] = defaultdict(set)
        for message in self._received:
            if message.number in window:
                readers[message.queue].add(message.reader)
        assert {queue: len(queue_readers) for queue, queue_readers in readers.items()} == dict.fromkeys(
            range(QUEUES), 1
        ), readers
        repeated = {
            number for number, times in Counter(message.number for message in self._received).items() if times > 1
        }
        assert {number for number in repeated if number in window} == set(), "repeated after all was settled"
        assert {number for number in repeated if number <= self._committed_up_to} == self._known_repeats, (
            "repeated after its commit"
        )
        self.repeats.append(len(repeated - self._known_repeats))
        self._known_repeats, self._committed_up_to = repeated, window.stop - 1
        received = [*self._received]
        await self._soon(lambda: self._committed(received))

    async def _committed(self, received: Sequence[ReceivedMessage]) -> bool:
        """Whether the group has committed all these messages."""
        progress = await self._brokers.group_offsets(GROUP, BROKER, [TOPIC])
        committed = {queue.id: offsets.committed_offset for queue, offsets in progress.items()}
        return all(committed.get(message.queue, 0) > message.offset for message in received)

    async def _soon(self, is_so: Callable[[], Any]) -> None:
        try:
            await soon(is_so)
        except TimeoutError as error:
            error.add_note(f"expected: {self.ours} of ours, {self.theirs} Java; {await self._pods('')}")
            error.add_note(f"Java: {self._shares}; ours: {await self._assigned_queues()}")
            error.add_note(f"{(await self.group()).get('status')}")
            raise


# The page's manifests, adapted to the ground.


def java_fleet(rocketmq: RocketMQ, node: LocalNode, folder: Path) -> Object:
    """Return the page's Deployment of Java consumers, with pods that run on the ground."""
    (body,) = JAVA
    words = [f"nameServer={rocketmq.name_server}", f"group={GROUP}", f"topic={TOPIC}", "instance=$(POD_NAME)"]
    argv = rocketmq.java("PushConsumer", *words, path=java.class_path(java.classes()), level="WARN")
    command_line = f'exec "$@" >> {shlex.quote(str(folder))}/"$POD_NAME".jsonl'
    env = [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    app = {"name": "app", "image": "java", "env": env, "command": ["sh", "-c", command_line, "sh", *map(str, argv)]}
    spec = {"nodeSelector": node.selector, "tolerations": node.tolerations, "containers": [app]}
    body["spec"]["template"]["spec"] = spec
    return dict(body)


def manifest(rocketmq: RocketMQ, node: LocalNode, folder: Path) -> str:
    """Return the page's group with the ground's broker, and apps that log their deliveries."""
    spec = BODY["spec"]
    spec["broker"]["rocketmq"]["nameServers"] = [rocketmq.name_server]
    spec["template"] = a_template(node, folder)
    return yaml.safe_dump_all(MANIFEST)


@pytest.fixture
async def shell(
    control_plane: Cluster, namespace: str, rocketmq: RocketMQ, addresses: Callable[[], str], tmp_path: Path
) -> AsyncIterator[Shell]:
    """Run an operator, and a shell with a kubeconfig and the operator's address."""
    config = tmp_path / "kubeconfig"
    address = addresses()
    config.write_bytes(control_plane.kubeconfig.read_bytes())
    path = f"{Path(sys.executable).parent}:{program('kubectl').parent}:{os.environ['PATH']}"
    variables = {"KUBECONFIG": str(config), "ROTA_OPERATOR": f"http://{address}:8080", "PATH": path}
    variables["ROTA_NAME_SERVER"] = rocketmq.name_server
    async with (
        an_operator(control_plane.kubeconfig, namespace, address, tmp_path / "operator.log"),
        a_shell(tmp_path, variables) as terminal,
    ):
        await terminal.run(f"kubectl config set-context --current --namespace={namespace}")
        yield terminal


@pytest.fixture
async def move(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> AsyncIterator[Migration]:
    """Run the Java fleet under load, and write the page's manifest."""
    rocketmq.create_topic(TOPIC, QUEUES)
    (tmp_path / "orders.yaml").write_text(manifest(rocketmq, local_node, tmp_path))
    fleet = java_fleet(rocketmq, local_node, tmp_path)
    await api.create(f"/apis/apps/v1/namespaces/{namespace}/deployments", fleet)
    brokers = admin.AdminClient(ConnectionConfig([rocketmq.name_server]))
    migration = Migration(api, namespace, brokers, tmp_path)
    migration.theirs = fleet["spec"]["replicas"]
    async with migration.load():
        yield migration
    await brokers.close()


@pytest.mark.slow("a Java fleet migrates to Rota and back by the commands of docs/migration.md")
async def test_migration_of_a_java_fleet_and_back_works_as_documented(move: Migration, shell: Shell) -> None:
    for command in typed_commands(PAGE):
        await shell.run_as_shown(command)
        if scaled := re.search(r"scale (cg|deploy)/\S+ --replicas=(\d+)", command.command):
            setattr(move, "ours" if scaled[1] == "cg" else "theirs", int(scaled[2]))
        if scaled or command.command.startswith("kubectl apply"):
            await move.check_settled()
    print(f"{move.sent} messages; repeated at each step: {move.repeats}")
