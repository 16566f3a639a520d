"""What the demo plays on: a control plane with two nodes, a broker, the operator; and what they tell of the fleet."""

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ground import peers
from ground.api import Api
from ground.controlplane import ControlPlane, Flags
from ground.deliveries import Came, noted
from ground.instance import Instance
from ground.local import LocalNode
from ground.ours import define
from ground.peers import Peer
from ground.poll import answers, eventually
from ground.report import Missing
from ground.rocketmq import RocketMQ

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/examples/ground/demo.yaml"
GROUP, QUEUES, RATE = "orders", 12, 200
CALM = 10  # messages a second once the show is over: what apps note fills no disk while nobody looks
FOREVER = 10**8  # messages
NODES = ("node-a", "node-b")
GIVES_UP = 20  # seconds
PATIENCE = 120

Told = dict[str, Any]


class Plane(ControlPlane):
    """A control plane that gives up a silent node sooner than after Kubernetes' 50 s: somebody is looking on."""

    def _run(self, part: str, flags: Flags) -> None:
        own: Flags = {"node-monitor-grace-period": f"{GIVES_UP}s"} if part == "kube-controller-manager" else {}
        super()._run(part, {**flags, **own})


class Stage:
    """Everything that runs, in an instance that ends with the demo."""

    def __init__(self, instance: Instance) -> None:
        """Describe it; the methods below start it part by part."""
        self.instance = instance
        self.cluster = Plane(instance)
        self.broker = RocketMQ(instance)
        self.nodes = [LocalNode(instance, self.cluster, name) for name in NODES]
        for node in self.nodes:
            node.label = "local"  # one label for both: a pod that asks for a local node may go to either
        self.address = f"http://{instance.address(99)}:8080"
        self._producer: Peer | None = None
        self._first = 0

    # Standing up.

    def up(self) -> None:
        """Start the cluster and the broker."""
        self.cluster.up()
        for node in self.nodes:
            node.up()
        self.broker.up()
        self.broker.create_topic(GROUP, QUEUES)
        self.broker.create_topic(f"%RETRY%{GROUP}", 1)  # else it is made with the first member, and seen a minute later

    def start_operator(self) -> None:
        """Define Rota's kinds, and start the operator as a process that has the cluster's kubeconfig."""
        asyncio.run(self._define())
        argv = [sys.executable, "-m", "rota.cli", "operator", "--address", self.instance.address(99)]
        self.instance.start("operator", argv, env={"KUBECONFIG": str(self.cluster.kubeconfig)})
        self.instance.wait("operator", lambda: answers(f"{self.address}/readyz"), 60, "The operator")

    async def _define(self) -> None:
        async with Api.connect(self.cluster.kubeconfig) as api:
            await define(api)

    def send(self, rate: int = RATE) -> None:
        """Start the producer, which numbers its messages; one that runs is ended, and this one goes on behind it."""
        if self._producer:
            self._producer.stop()
            self._first = max(it.number for it in self.came()) + RATE  # no number of the one before is given anew
        self._producer = peers.producer(self.broker, GROUP, FOREVER - self._first, first=self._first, rate=rate)

    def apply(self) -> None:
        """Make the fleet of the example."""
        text = EXAMPLE.read_text().replace("rmq-namesrv:9876", self.broker.name_server)
        self.cluster.kubectl("apply", "-f", "-", feed=text.replace("/src/rota", str(ROOT)))

    # What is told.

    def fleet(self) -> Told:
        """Return what the operator shows of the group; nothing while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.address}/v1/groups/default/{GROUP}", timeout=5) as answer:
                found: Told = json.load(answer)
        except OSError:
            return {}
        return found

    def where(self) -> dict[str, str]:
        """Return the node of each of the fleet's pods."""
        told = self.cluster.kubectl("get", "pods", "-l", f"rota.dev/group={GROUP}", "-o", "json")
        return {it["metadata"]["name"]: it["spec"].get("nodeName", "") for it in json.loads(told)["items"]}

    def came(self) -> list[Came]:
        """Return what all apps have noted so far, those that are gone too."""
        notes = self.instance.folder.glob(f"*/pods/default_{GROUP}-*/app.log")
        return [it for path in notes for it in noted(path.parent.name.removeprefix("default_"), path)]

    def sent(self) -> int:
        """Return how many messages the producer says it has sent: it says so once a second."""
        told = self._producer.lines("sent") if self._producer else []
        return int(told[-1]["count"]) if told else 0

    # Waiting.

    def settled(self, members: int, without: Collection[str] = ()) -> Told:
        """Wait until so many members work everything, nobody else is left, and nothing goes on."""
        return self._until(lambda it: calm(it, members, without), f"{members} members at rest")

    def taken_over(self, members: int, without: Collection[str]) -> Told:
        """Wait until so many others are ready, and none of those that are gone has a queue any more."""

        def fits(fleet: Told) -> bool:
            ready = {it["name"] for it in fleet["members"] if it["state"] == "Ready"}.difference(without)
            return len(ready) == members and {it["owner"] for it in fleet["queues"]} <= ready

        return self._until(fits, f"{members} others with all queues")

    def _until(self, fits: Callable[[Told], bool], what: str) -> Told:
        found: Told = {}
        deadline = time.monotonic() + PATIENCE
        while not ((found := self.fleet()) and fits(found)):
            if time.monotonic() > deadline:
                told = found.get("summary", {}).get("message", "the operator did not answer")
                logs = f"{self.instance.folder}/log"
                raise Missing(f"The group {GROUP} has not {what} after {PATIENCE} s: {told} (logs: {logs})")
            time.sleep(0.1)
        return found

    def delivered(self) -> set[int]:
        """Wait until all that was sent has come, and return what has not: a retry takes 10 s, so this may take 30."""
        sent = set(range(self.sent()))
        deadline = time.monotonic() + 30
        while missing := sent - {it.number for it in self.came()}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return missing

    def first(self) -> float:
        """Wait for the first message, and return when it came."""
        return min(it.at for it in eventually(self.came, PATIENCE))


def calm(fleet: Told, members: int, without: Collection[str]) -> bool:
    """Whether just so many others are there, work all queues, as evenly as can be, and nothing goes on."""
    has = {it["name"]: it["queues"] for it in fleet["members"] if it["state"] == "Ready"}
    owned = all(it["state"] == "Owned" and it["owner"] in has for it in fleet["queues"])
    even = len(has) == len(fleet["members"]) == members and max(has.values()) - min(has.values()) <= 1
    conditions = {it["type"]: it["status"] for it in fleet["conditions"]}
    at_rest = (conditions.get("Ready"), conditions.get("Progressing")) == ("True", "False")
    over = not fleet["summary"]["moving"] and all(it["seconds"] is not None for it in fleet["rebalances"])
    return owned and even and at_rest and over and has.keys().isdisjoint(without)
