"""A group with a pod template: real sidecars and apps, run as processes by a node without containers."""

import asyncio
import json
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ground.api import Api, Object
from ground.deliveries import whole_lines
from ground.local import LocalNode
from ground.ours import at_rest
from ground.poll import PATIENCE_SECONDS, soon
from ground.rocketmq import RocketMQ
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.model import Queue
from rota.ranges import from_ranges

APP = Path(__file__).parents[1] / "sidecar/app.py"
QUEUES = 8
PAUSE_SECONDS = 0.01
GROUP = "shipping"


@asynccontextmanager
async def send_repeatedly(send: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Send until the block ends, with small pauses."""
    over = asyncio.Event()

    async def send_until_over() -> None:
        while not over.is_set():
            await send()
            await asyncio.sleep(PAUSE_SECONDS)

    task = asyncio.create_task(send_until_over())
    try:
        yield
    finally:
        over.set()
        await task


class TemplateGroup:
    """A group with a pod template, its topic, and the deliveries to its apps."""

    def __init__(self, api: Api, namespace: str, brokers: AdminClient, topic: str, log: Path) -> None:
        self.api = api
        self.namespace = namespace
        self.brokers = brokers
        self._topic = topic
        self._log = log
        self.api_path = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}"
        self.path = f"{self.api_path}/consumergroups/{GROUP}"
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self.rules = log.with_name("rules.json")  # the behaviour of the apps; see tests/sidecar/app.py
        self.sent = 0

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send numbered messages until the block ends, then wait until all are delivered."""

        async def send() -> None:
            await self.brokers.send(self._topic, b"%d" % (self.sent + 1))
            self.sent += 1

        async with send_repeatedly(send):
            yield
        await self.soon(self.has_delivered_all)

    async def send(self, queue: Queue) -> int:
        """Send a message to this queue, and return its number."""
        self.sent += 1
        await self.brokers.send(self._topic, b"%d" % self.sent, queue=queue)
        return self.sent

    def lines(self) -> list[dict[str, Any]]:
        """Return the deliveries that apps have logged."""
        lines = whole_lines(self._log) if self._log.exists() else []
        return [note for note in map(json.loads, lines) if "name" in note]

    def deliveries(self) -> Counter[int]:
        """Return how often each message was delivered to an app that acknowledged at least one delivery."""
        return Counter(number for by_app in self.deliveries_by_app().values() for number in by_app.elements())

    def deliveries_by_app(self) -> dict[str, Counter[int]]:
        """Return the same counts for each of these apps."""
        lines = self.lines()
        counts = defaultdict[str, Counter[int]](Counter)
        acknowledged_names = {line["name"] for line in lines if line.get("status") == 204}
        for line in lines:
            if line["name"] in acknowledged_names:
                counts[line["name"].partition("/")[0]].update(message["number"] for message in line.get("messages", ()))
        return counts

    async def has_delivered_all(self) -> bool:
        return self.deliveries().keys() == {*range(1, self.sent + 1)}

    async def soon(self, is_so: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until the condition holds; on timeout, add status, missing messages and pods to the error."""
        try:
            await soon(is_so, seconds)
        except TimeoutError as error:
            missing = {*range(1, self.sent + 1)} - self.deliveries().keys()
            error.add_note(f"{(await self.api.get(self.path)).get('status')=}\n{sorted(missing)[:20]=} of {self.sent}")
            error.add_note(f"{[(pod['metadata']['name'], pod['status']) for pod in await self.pods()]}")
            raise

    async def pods(self) -> list[Object]:
        return await self.api.list(self.pods_path)

    async def wait_for_members(self, count: int) -> None:
        """Wait until this number of members owns all queues and the group is at rest."""

        async def settled() -> bool:
            group = await self.api.get(self.path)
            whole = at_rest(group, count) and not group["status"]["unownedQueues"]
            return whole and len(await self.pods()) == count

        await self.soon(settled)

    async def document(self) -> Object:
        """Return the stored assignment."""
        config_map = await self.api.get(f"/api/v1/namespaces/{self.namespace}/configmaps/{GROUP}-rota")
        document: Object = json.loads(config_map["data"]["assignment.json"])
        return document

    async def shares(self) -> list[list[Queue]]:
        """Return the topic's queues that the assignment gives to each member, without retry topics."""
        shares = (await self.document())["members"].values()
        return [
            [queue for queue in from_ranges(share.get("queues", {})) if queue.topic == self._topic] for share in shares
        ]

    async def has_assigned(self, count: int) -> bool:
        """Whether the assignment gives this number of the topic's queues to members."""
        return sum(map(len, await self.shares())) == count

    async def wait_for_rebalance(self, *reasons: str) -> None:
        """Wait until a rebalance for one of these reasons has completed."""

        async def moved() -> bool:
            last = (await self.api.get(self.path))["status"].get("lastRebalance") or {}
            return last.get("reason") in reasons and "seconds" in last

        await self.soon(moved)

    async def has_event(self, reason: str) -> bool:
        """Whether an Event with this reason exists."""
        events = await self.api.list(f"/api/v1/namespaces/{self.namespace}/events")
        return any(event["reason"] == reason for event in events)

    async def set_policy(self, policy: str, strategy: str = "", **options: Any) -> None:
        """Set the group's policy; with a strategy, create the policy first."""
        if strategy:
            new_policy = _custom_resource("RebalancePolicy", policy, strategy=strategy, options=options)
            await self.api.create(f"{self.api_path}/rebalancepolicies", new_policy)
        await self.api.patch(self.path, {"spec": {"policyRef": {"name": policy}}})

    async def scale(self, replicas: int) -> None:
        """Set the number of pods, as `kubectl scale` does."""
        await self.api.patch(f"{self.path}/scale", {"spec": {"replicas": replicas}})


def a_template(node: LocalNode, folder: Path, *, pulls: bool = False) -> Object:
    """Return a pod template of an app that logs its deliveries in a file for all pods; `pulls`: by long poll."""
    local = {"name": "ROTA_LOCAL", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    files = [str(folder / "deliveries.jsonl"), str(folder / "rules.json")]
    arguments = ["9912", *files, "pull"] if pulls else ["8080", *files]
    command = [sys.executable, str(APP), "$(ROTA_LOCAL)", *arguments]
    app = {"name": "app", "image": "python", "env": [local], "command": command}
    scheduling = {"nodeSelector": node.selector, "tolerations": node.tolerations}
    return {"spec": {**scheduling, "containers": [app]}}


@asynccontextmanager
async def a_template_group(
    api: Api, namespace: str, rocketmq: RocketMQ, node: LocalNode, folder: Path, *, topic: str = GROUP, **spec: Any
) -> AsyncIterator[TemplateGroup]:
    """Create the topic, the policy and the group; at the end delete the group, and wait until its pods are deleted."""
    rocketmq.create_topic(topic, QUEUES)
    brokers = AdminClient(ConnectionConfig([rocketmq.name_server]))
    fleet = TemplateGroup(api, namespace, brokers, topic, folder / "deliveries.jsonl")
    await api.create(
        f"{fleet.api_path}/rebalancepolicies", _custom_resource("RebalancePolicy", "sticky", strategy="Sticky")
    )
    group = {
        "broker": {"rocketmq": {"nameServers": [rocketmq.name_server]}},
        "subscriptions": [{"topic": topic}],
        "startFrom": {"position": "Earliest"},
        "policyRef": {"name": "sticky"},
        "replicas": 2,
        "template": a_template(node, folder),
        **spec,
    }
    await api.create(f"{fleet.api_path}/consumergroups", _custom_resource("ConsumerGroup", GROUP, **group))
    yield fleet
    await api.delete(fleet.path)

    async def has_no_pods() -> bool:
        return not await fleet.pods()

    await soon(has_no_pods)
    await brokers.close()


def _custom_resource(kind: str, name: str, **spec: Any) -> Object:
    return {"apiVersion": "rota.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
