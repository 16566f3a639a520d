"""A group whose pods Rota runs: real sidecars and apps, as processes of a node that runs no containers."""

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
QUEUES, PAUSE = 8, 0.01
GROUP = "shipping"


@asynccontextmanager
async def again_and_again(send: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Send meanwhile, with small pauses."""
    over = asyncio.Event()

    async def work() -> None:
        while not over.is_set():
            await send()
            await asyncio.sleep(PAUSE)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        over.set()
        await task


class TemplateGroup:
    """A group whose pods Rota runs, and what it is sent."""

    def __init__(self, api: Api, namespace: str, brokers: AdminClient, topic: str, log: Path) -> None:
        self.api, self.namespace, self.brokers, self._topic, self._log = api, namespace, brokers, topic, log
        self.where = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}"
        self.path = f"{self.where}/consumergroups/{GROUP}"
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self.rules = log.with_name("rules.json")  # what the apps do; see tests/sidecar/app.py
        self.sent = 0

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send numbered messages meanwhile, and wait until they have been delivered."""

        async def send() -> None:
            await self.brokers.send(self._topic, b"%d" % (self.sent + 1))
            self.sent += 1

        async with again_and_again(send):
            yield
        await self.soon(self.delivered_all)

    async def send(self, queue: Queue) -> int:
        """Send a message to this queue, and return its number."""
        self.sent += 1
        await self.brokers.send(self._topic, b"%d" % self.sent, queue=queue)
        return self.sent

    def lines(self) -> list[dict[str, Any]]:
        """Return what apps have noted of messages."""
        lines = whole_lines(self._log) if self._log.exists() else []
        return [note for note in map(json.loads, lines) if "name" in note]

    def deliveries(self) -> Counter[int]:
        """Return how often each message came to an app that was done with it."""
        return Counter(number for by_app in self.deliveries_by_app().values() for number in by_app.elements())

    def deliveries_by_app(self) -> dict[str, Counter[int]]:
        """Return the same for each app that was done with something."""
        lines, found = self.lines(), defaultdict[str, Counter[int]](Counter)
        done = {it["name"] for it in lines if it.get("status") == 204}
        for it in lines:
            if it["name"] in done:
                found[it["name"].partition("/")[0]].update(message["number"] for message in it.get("messages", ()))
        return found

    async def delivered_all(self) -> bool:
        return self.deliveries().keys() == {*range(1, self.sent + 1)}

    async def soon(self, ask: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until something is so; if it never is, tell what is."""
        try:
            await soon(ask, seconds)
        except TimeoutError as error:
            missing = {*range(1, self.sent + 1)} - self.deliveries().keys()
            error.add_note(f"{(await self.api.get(self.path)).get('status')=}\n{sorted(missing)[:20]=} of {self.sent}")
            error.add_note(f"{[(it['metadata']['name'], it['status']) for it in await self.pods()]}")
            raise

    async def pods(self) -> list[Object]:
        return await self.api.list(self.pods_path)

    async def works(self, members: int) -> None:
        """Wait until so many members work all queues, and nothing goes on."""

        async def settled() -> bool:
            group = await self.api.get(self.path)
            whole = at_rest(group, members) and not group["status"]["unownedQueues"]
            return whole and len(await self.pods()) == members

        await self.soon(settled)

    async def document(self) -> Object:
        """Return the assignment as it is stored."""
        found = await self.api.get(f"/api/v1/namespaces/{self.namespace}/configmaps/{GROUP}-rota")
        document: Object = json.loads(found["data"]["assignment.json"])
        return document

    async def shares(self) -> list[list[Queue]]:
        """Return what the document gives to each member of ours, retries aside."""
        shares = (await self.document())["members"].values()
        return [[it for it in from_ranges(share.get("queues", {})) if it.topic == self._topic] for share in shares]

    async def owns(self, many: int) -> bool:
        """Whether so many queues are given to our members."""
        return sum(map(len, await self.shares())) == many

    async def moved_for(self, *reasons: str) -> None:
        """Wait until queues were moved for one of these, and the group is at rest again."""

        async def moved() -> bool:
            last = (await self.api.get(self.path))["status"].get("lastRebalance") or {}
            return last.get("reason") in reasons and "seconds" in last

        await self.soon(moved)

    async def has_event(self, reason: str) -> bool:
        """Whether people were told of this."""
        events = await self.api.list(f"/api/v1/namespaces/{self.namespace}/events")
        return any(it["reason"] == reason for it in events)

    async def follow(self, policy: str, strategy: str = "", **options: Any) -> None:
        """Let the group have another policy; one with a strategy is made first."""
        if strategy:
            made = _made("RebalancePolicy", policy, strategy=strategy, options=options)
            await self.api.create(f"{self.where}/rebalancepolicies", made)
        await self.api.patch(self.path, {"spec": {"policyRef": {"name": policy}}})

    async def scale(self, replicas: int) -> None:
        """Change how many pods there are, as `kubectl scale` does."""
        await self.api.patch(f"{self.path}/scale", {"spec": {"replicas": replicas}})


def a_template(node: LocalNode, folder: Path, *, asks: bool = False) -> Object:
    """Return pods of an app that notes what it gets, or asks for, in a file that all of them share."""
    local = {"name": "ROTA_LOCAL", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    files = [str(folder / "deliveries.jsonl"), str(folder / "rules.json")]
    command = [sys.executable, str(APP), "$(ROTA_LOCAL)", *(["9912", *files, "asks"] if asks else ["8080", *files])]
    app = {"name": "app", "image": "python", "env": [local], "command": command}
    where = {"nodeSelector": node.selector, "tolerations": node.tolerations}
    return {"spec": {**where, "containers": [app]}}


@asynccontextmanager
async def a_shop(
    api: Api, namespace: str, rocketmq: RocketMQ, node: LocalNode, folder: Path, *, topic: str = GROUP, **spec: Any
) -> AsyncIterator[TemplateGroup]:
    """Make the topic, the policy and the group; take the group away in the end, and its pods with it."""
    rocketmq.create_topic(topic, QUEUES)
    brokers = AdminClient(ConnectionConfig([rocketmq.name_server]))
    shop = TemplateGroup(api, namespace, brokers, topic, folder / "deliveries.jsonl")
    await api.create(f"{shop.where}/rebalancepolicies", _made("RebalancePolicy", "sticky", strategy="Sticky"))
    group = {
        "broker": {"rocketmq": {"nameServers": [rocketmq.name_server]}},
        "subscriptions": [{"topic": topic}],
        "startFrom": {"position": "Earliest"},
        "policyRef": {"name": "sticky"},
        "replicas": 2,
        "template": a_template(node, folder),
        **spec,
    }
    await api.create(f"{shop.where}/consumergroups", _made("ConsumerGroup", GROUP, **group))
    yield shop
    await api.delete(shop.path)

    async def gone() -> bool:
        return not await shop.pods()

    await soon(gone)
    await brokers.close()


def _made(kind: str, name: str, **spec: Any) -> Object:
    return {"apiVersion": "rota.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
