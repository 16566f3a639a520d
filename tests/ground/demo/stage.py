"""The stage of the demo: a control plane with two nodes, a broker, the operator; and readings of the fleet's state."""

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
GROUP = "orders"
QUEUES = 12
RATE = 200
CALM = 10  # messages a second once the show is over, so that the apps' notes do not fill the disk
FOREVER = 10**8  # messages
NODES = ("node-a", "node-b")
GIVE_UP_SECONDS = 20  # seconds until Kubernetes evicts the pods of a silent node
PATIENCE_SECONDS = 120

Payload = dict[str, Any]


class Plane(ControlPlane):
    """A control plane that gives up a silent node sooner than after Kubernetes' 50 s: spectators wait for it."""

    def _run(self, part: str, flags: Flags) -> None:
        own: Flags = {"node-monitor-grace-period": f"{GIVE_UP_SECONDS}s"} if part == "kube-controller-manager" else {}
        super()._run(part, {**flags, **own})


class Stage:
    """Everything that runs; it belongs to an instance that ends with the demo."""

    def __init__(self, instance: Instance) -> None:
        """Describe the parts; the methods below start them one by one."""
        self.instance = instance
        self.cluster = Plane(instance)
        self.broker = RocketMQ(instance)
        self.nodes = [LocalNode(instance, self.cluster, name) for name in NODES]
        for node in self.nodes:
            node.label = "local"  # one label for both: a pod that asks for a local node may go to either
        self.address = f"http://{instance.address(99)}:8080"
        self._producer: Peer | None = None
        self._first = 0

    # Start.

    def up(self) -> None:
        """Start the cluster and the broker."""
        self.cluster.up()
        for node in self.nodes:
            node.up()
        self.broker.up()
        self.broker.create_topic(GROUP, QUEUES)
        self.broker.create_topic(f"%RETRY%{GROUP}", 1)  # else members notice it a minute later

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
        """Start the producer of numbered messages; it replaces a running producer and continues its numbers."""
        if self._producer:
            self._producer.stop()
            # Above every number that the previous producer sent.
            self._first = max(arrival.number for arrival in self.came()) + RATE
        self._producer = peers.producer(self.broker, GROUP, FOREVER - self._first, first=self._first, rate=rate)

    def apply(self) -> None:
        """Create the fleet of the example."""
        text = EXAMPLE.read_text().replace("rmq-namesrv:9876", self.broker.name_server)
        self.cluster.kubectl("apply", "-f", "-", feed=text.replace("/src/rota", str(ROOT)))

    # Read the state.

    def fleet(self) -> Payload:
        """Return the group as the operator's page presents it; empty while the operator does not answer."""
        try:
            with urllib.request.urlopen(f"{self.address}/v1/groups/default/{GROUP}", timeout=5) as answer:
                payload: Payload = json.load(answer)
        except OSError:
            return {}
        return payload

    def nodes_by_pod(self) -> dict[str, str]:
        """Return the node of each of the fleet's pods."""
        pods = json.loads(self.cluster.kubectl("get", "pods", "-l", f"rota.dev/group={GROUP}", "-o", "json"))["items"]
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods}

    def came(self) -> list[Came]:
        """Return every arrival that the apps have noted so far, including apps of deleted pods."""
        notes = self.instance.folder.glob(f"*/pods/default_{GROUP}-*/app.log")
        return [arrival for path in notes for arrival in noted(path.parent.name.removeprefix("default_"), path)]

    def sent(self) -> int:
        """Return how many messages the producer has reported as sent; it reports once a second."""
        reports = self._producer.lines("sent") if self._producer else []
        return int(reports[-1]["count"]) if reports else 0

    # Wait.

    def wait_for_rest(self, members: int, without: Collection[str] = ()) -> Payload:
        """Wait until exactly this many members consume all queues and no handover is in progress."""
        return self._until(lambda fleet: is_at_rest(fleet, members, without), f"{members} members at rest")

    def wait_for_takeover(self, members: int, without: Collection[str]) -> Payload:
        """Wait until this many other members are ready and own every queue."""

        def fits(fleet: Payload) -> bool:
            ready = {member["name"] for member in fleet["members"] if member["state"] == "Ready"}.difference(without)
            return len(ready) == members and {queue["owner"] for queue in fleet["queues"]} <= ready

        return self._until(fits, f"{members} others with all queues")

    def _until(self, fits: Callable[[Payload], bool], what: str) -> Payload:
        fleet: Payload = {}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ((fleet := self.fleet()) and fits(fleet)):
            if time.monotonic() > deadline:
                message = fleet.get("summary", {}).get("message", "the operator did not answer")
                logs = f"{self.instance.folder}/log"
                raise Missing(f"The group {GROUP} has not {what} after {PATIENCE_SECONDS} s: {message} (logs: {logs})")
            time.sleep(0.1)
        return fleet

    def wait_for_deliveries(self) -> set[int]:
        """Wait up to 30 s, as a retry takes 10 s, until every sent message has arrived; return the missing numbers."""
        sent = set(range(self.sent()))
        deadline = time.monotonic() + 30
        while missing := sent - {arrival.number for arrival in self.came()}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return missing

    def first_arrival(self) -> float:
        """Wait for the first message, and return the time of its arrival."""
        return min(arrival.at for arrival in eventually(self.came, PATIENCE_SECONDS))


def is_at_rest(fleet: Payload, members: int, without: Collection[str]) -> bool:
    """Whether exactly this many other members own all queues, as evenly as possible, and no handover is in progress."""
    counts = {member["name"]: member["queues"] for member in fleet["members"] if member["state"] == "Ready"}
    owned = all(queue["state"] == "Owned" and queue["owner"] in counts for queue in fleet["queues"])
    even = len(counts) == len(fleet["members"]) == members and max(counts.values()) - min(counts.values()) <= 1
    conditions = {condition["type"]: condition["status"] for condition in fleet["conditions"]}
    ready = (conditions.get("Ready"), conditions.get("Progressing")) == ("True", "False")
    over = not fleet["summary"]["moving"] and all(rebalance["seconds"] is not None for rebalance in fleet["rebalances"])
    return owned and even and ready and over and counts.keys().isdisjoint(without)
