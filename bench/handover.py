"""Handovers under load: the whole of Rota beside the Java push consumer, on one broker, in one run.

Ours is all that there is: an API server, the operator, pods of a sidecar and an app each, as processes. It is known of
each message when it reached which member; a queue has moved where another member goes on with it.
"""

import asyncio
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import Row, Sample
from ground import peers
from ground.api import Api, Object
from ground.controlplane import ControlPlane
from ground.instance import Instance, temporary
from ground.local import LocalNode
from ground.ours import at_rest, define, made
from ground.poll import eventually, soon
from ground.rocketmq import RocketMQ

QUEUES, RATE, SECONDS = 16, 2000, 60
ROOT = Path(__file__).parent.parent
WHERE = "/apis/rota.dev/v1alpha1/namespaces/default"


class Came(NamedTuple):
    """A message as it came to a member."""

    at: float
    number: int
    queue: int
    member: str


class Outcome(NamedTuple):
    """What a run was like: messages that came twice or never, and the pauses of queues."""

    twice: int
    lost: int
    moved: list[float]
    stayed: float


def rows() -> Iterator[Row]:
    """Grow and shrink a fleet under load, then kill a member of an Orderly one."""
    with temporary("bench-handover") as instance:
        rocketmq = RocketMQ(instance)
        rocketmq.up()
        for topic in ("ours", "java", "orderly", "orderlyjava"):
            rocketmq.create_topic(topic, QUEUES)
        plane = ControlPlane(instance)
        plane.up()
        node = LocalNode(instance, plane)
        node.up()
        yield from asyncio.run(_ours(instance, plane, node, rocketmq))


async def _ours(instance: Instance, plane: ControlPlane, node: LocalNode, rocketmq: RocketMQ) -> list[Row]:
    async with Api.connect(plane.kubeconfig) as api, _operator(instance, plane, api):
        fleet = Fleet(api, instance, node, rocketmq)
        ours = await fleet.grows_and_shrinks("ours")
        theirs = await asyncio.to_thread(_java, rocketmq)
        pause = await fleet.loses_one("orderly")
        killed = await asyncio.to_thread(_java_orderly, rocketmq)
    told = "2 members become 3, then 2, under {:,} messages a second: {} twice, {} lost (Java: {} twice, {} lost)"
    what = told.format(RATE, ours.twice, ours.lost, theirs.twice, theirs.lost)
    return [
        Row(f"{what}; pause of a queue that moves", Sample(ours.moved), Sample(theirs.moved), "0, 0, ≤ 1 s"),
        Row("the longest pause of a queue that does not move", Sample([ours.stayed]), Sample([theirs.stayed]), "none"),
        Row("an Orderly member is killed: its queues at work again", Sample(pause), Sample(killed), "≤ 3 s"),
    ]


@asynccontextmanager
async def _operator(instance: Instance, plane: ControlPlane, api: Api) -> AsyncIterator[None]:
    await define(api)
    argv = [sys.executable, "-m", "rota.cli", "operator", "--address", instance.address(200)]
    instance.start("operator", argv, env={"KUBECONFIG": str(plane.kubeconfig)})
    await api.create(f"{WHERE}/rebalancepolicies", made("RebalancePolicy", "sticky", strategy="Sticky"))
    try:
        yield
    finally:
        instance.stop("operator")


class Fleet:
    """Groups whose pods Rota runs."""

    def __init__(self, api: Api, instance: Instance, node: LocalNode, rocketmq: RocketMQ) -> None:
        """Make none yet."""
        self._api, self._node, self._rocketmq = api, node, rocketmq
        self._folder = instance.folder / "deliveries"
        self._folder.mkdir()

    async def grows_and_shrinks(self, group: str) -> Outcome:
        """Make a fleet of two; send to it while it becomes three, and two again."""
        await self._make(group, 2)
        producer = peers.producer(self._rocketmq, group, RATE * SECONDS, rate=RATE, size=1024)
        await asyncio.sleep(SECONDS / 3)
        await self._scale(group, 3)
        await self._works(group, 3)
        await asyncio.sleep(SECONDS / 6)
        await self._scale(group, 2)
        await self._works(group, 2)
        await asyncio.to_thread(eventually, lambda: producer.done, 2 * SECONDS)
        await asyncio.sleep(3)
        await self._api.delete(f"{WHERE}/consumergroups/{group}")
        await soon(lambda: self._pods_are(group, 0), 60)
        return _outcome(self._came(group), RATE * SECONDS)

    async def loses_one(self, group: str) -> list[float]:
        """Make an Orderly fleet of two, and end the processes of one, with its pod; return its queues' pauses."""
        await self._make(group, 2, ordering="Orderly")
        producer = peers.producer(self._rocketmq, group, 200 * 30, rate=200, size=100, sharded=True)
        await asyncio.sleep(10)
        victim = (await self._pods(group))[0]["metadata"]["name"]
        await self._api.delete(f"/api/v1/namespaces/default/pods/{victim}", {"gracePeriodSeconds": 0})
        await asyncio.to_thread(eventually, lambda: producer.done, 90)
        await asyncio.sleep(3)
        return _outcome(self._came(group), 200 * 30, lost=victim).moved

    async def _make(self, group: str, replicas: int, **spec: Any) -> None:
        env = {"ROTA_LOCAL": "status.podIP", "POD_NAME": "metadata.name"}
        app = {
            "name": "app",
            "image": "python",
            "workingDir": str(ROOT),
            "command": [
                sys.executable,
                "-m",
                "bench.app",
                "$(ROTA_LOCAL)",
                "8080",
                f"{self._folder}/{group}@$(POD_NAME)",
            ],
            "env": [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in env.items()],
            "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        }
        where = {"nodeSelector": self._node.selector, "tolerations": self._node.tolerations}
        body = made(
            "ConsumerGroup",
            group,
            broker={"rocketmq": {"nameServers": [self._rocketmq.name_server]}},
            subscriptions=[{"topic": group}],
            startFrom={"position": "Earliest"},
            policyRef={"name": "sticky"},
            replicas=replicas,
            template={"spec": {**where, "containers": [app]}},
            **spec,
        )
        await self._api.create(f"{WHERE}/consumergroups", body)
        await self._works(group, replicas)

    async def _scale(self, group: str, replicas: int) -> None:
        await self._api.patch(f"{WHERE}/consumergroups/{group}", {"spec": {"replicas": replicas}})

    async def _works(self, group: str, members: int) -> None:
        """Wait until so many members work, and nothing goes on."""

        async def settled() -> bool:
            found = await self._api.get(f"{WHERE}/consumergroups/{group}")
            return at_rest(found, members) and await self._pods_are(group, members)

        await soon(settled, 120)

    async def _pods(self, group: str) -> list[Object]:
        return await self._api.list("/api/v1/namespaces/default/pods", labelSelector=f"rota.dev/group={group}")

    async def _pods_are(self, group: str, number: int) -> bool:
        return len(await self._pods(group)) == number

    def _came(self, group: str) -> list[Came]:
        return [
            Came(int(at) / 1e6, int(number), int(queue), path.name.partition("@")[2])
            for path in self._folder.glob(f"{group}@*")
            for at, number, queue, _ in map(str.split, path.read_text().splitlines())
        ]


# The peer.


def _java(rocketmq: RocketMQ) -> Outcome:
    consumers = [peers.push_consumer(rocketmq, "java", "java", instance=f"c{number}") for number in range(2)]
    eventually(lambda: all(it.lines("rebalance") for it in consumers), 60)
    producer = peers.producer(rocketmq, "java", RATE * SECONDS, rate=RATE, size=1024)
    time.sleep(SECONDS / 3)
    third = peers.push_consumer(rocketmq, "java", "java", instance="c2")
    time.sleep(SECONDS / 3)
    third.stop()
    eventually(lambda: producer.done, 2 * SECONDS)
    time.sleep(3)
    for consumer in consumers:
        consumer.stop()
    return _outcome(_told([*consumers, third]), RATE * SECONDS)


def _java_orderly(rocketmq: RocketMQ) -> list[float]:
    topic = "orderlyjava"
    consumers = [
        peers.push_consumer(rocketmq, topic, topic, instance=f"c{number}", orderly=True) for number in range(2)
    ]
    eventually(lambda: all(it.lines("rebalance") for it in consumers), 60)
    time.sleep(25)  # until the first one has given up the queues that the second one got
    producer = peers.producer(rocketmq, topic, 200 * 90, rate=200, size=100, sharded=True)
    time.sleep(10)
    rocketmq.instance.kill(consumers[0].program)
    eventually(lambda: producer.done, 120)
    time.sleep(3)
    consumers[1].stop()
    return _outcome(_told(consumers), 200 * 90, lost=consumers[0].program).moved


def _told(consumers: Iterable[peers.Peer]) -> list[Came]:
    return [
        Came(line["at"] / 1e6, line["number"], line["queue"], consumer.program)
        for consumer in consumers
        for line in consumer.lines("message")
        if not re.match("%RETRY%", line["topic"])
    ]


# What a run was like.


def _outcome(came: list[Came], sent: int, lost: str = "") -> Outcome:
    """Look at the time between two messages of a queue; where the member changes, the queue has moved.

    With a member that was lost only its queues count. The time that lies between two messages anyway is left in.
    """
    times = Counter(it.number for it in came)
    queues: dict[int, list[Came]] = defaultdict(list)
    for it in sorted(came):
        queues[it.queue].append(it)
    moved: list[float] = []
    stayed = 0.0
    for its in queues.values():
        moves = [after.at - before.at for before, after in pairwise(its) if _is_move(before, after, lost)]
        moved += moves
        if not moves:
            stayed = max(stayed, *(after.at - before.at for before, after in pairwise(_warm(its))))
    return Outcome(sum(many - 1 for many in times.values()), sent - len(times), moved or [0.0], stayed)


def _is_move(before: Came, after: Came, lost: str) -> bool:
    return before.member != after.member and lost in {"", before.member}


def _warm(its: list[Came]) -> list[Came]:
    """Leave out the first quarter: there a new Java still compiles."""
    return its[len(its) // 4 :]
