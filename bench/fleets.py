"""Two fleets that go through the same events under the same load: Rota's, and one of Java push consumers.

Rota's fleet is complete: an API server, the operator, and pods with a sidecar and a small app, as processes of the
local node (on a real node: `bench.node`). Both fleets consume from one broker, which `standing` starts and stops.
"""

import asyncio
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from compiled import compiled_package
from ground import peers
from ground.api import Api, Object
from ground.controlplane import ControlPlane
from ground.deliveries import ASIDE, Came, noted
from ground.instance import Instance, temporary
from ground.local import LocalNode
from ground.ours import at_rest, define, made
from ground.poll import eventually, soon
from ground.rocketmq import RocketMQ

ROOT = Path(__file__).parents[1]
WHERE = "/apis/rota.dev/v1alpha1/namespaces/default"
PODS = "/api/v1/namespaces/default/pods"
PATIENCE = 120.0


class ComparedFleet(Protocol):
    """A group of members that consume the topic of its name; `struck` is the member that was acted on."""

    topic: str
    struck: str

    def make(self, members: int) -> None:
        """Start members, and wait until they own all queues."""

    def scale(self, members: int) -> None:
        """Change the number of members; the system decides which of them end."""

    def crash(self) -> None:
        """Kill all processes of a member; its node starts them again."""

    def lose(self) -> None:
        """Kill all processes of a member, for good."""

    def freeze(self) -> None:
        """Stop all processes of a member; their connections stay open."""

    def thaw(self) -> None:
        """Continue the processes of a frozen member."""

    def roll(self) -> None:
        """Replace all members, one after another; each new member starts before the old one ends."""

    def twin(self) -> None:
        """Start another member with exactly the configuration of an existing one."""

    def queues(self, number: int) -> None:
        """Change the topic's number of queues."""

    def came(self) -> list[Came]:
        """Return all deliveries so far."""

    def noted(self) -> int:
        """Return the size of the delivery logs, which grow while messages are delivered."""

    def end(self) -> None:
        """End all members."""


class Ground(ABC):
    """The environment of both fleets: a broker, and a cluster with an operator."""

    rocketmq: RocketMQ
    api: Api

    def __init__(self, instance: Instance) -> None:
        """Start nothing yet: `rocketmq` and `api` are usable after `up`."""
        self.instance = instance
        self.deliveries = instance.folder / "deliveries"
        self.runner = asyncio.Runner()

    @abstractmethod
    def up(self) -> None:
        """Start broker, cluster and operator."""

    @abstractmethod
    def pods(self, log: str) -> Object:
        """Return a pod spec whose app logs deliveries to that file; `$(POD_NAME)` stands for the pod's name."""

    @abstractmethod
    def signal(self, pod: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a pod."""

    def connect(self, kubeconfig: Path) -> None:
        """Connect to the API server, and create the CRDs and the policy of the groups."""
        self.runner.run(self._connect(kubeconfig))

    def down(self) -> None:
        """Close the connection to the API server; the instance stops the processes."""
        self.runner.run(self.api.__aexit__(None, None, None))
        self.runner.close()

    async def _connect(self, kubeconfig: Path) -> None:
        self.api = await Api.connect(kubeconfig).__aenter__()
        await define(self.api)
        await self.api.create(f"{WHERE}/rebalancepolicies", made("RebalancePolicy", "sticky", strategy="Sticky"))


class LocalGround(Ground):
    """A control plane whose pods are processes of this machine."""

    program: tuple[str, ...] = ("-m", "rota.cli")  # the operator's, for Python

    def __init__(self, instance: Instance) -> None:
        """Start nothing yet."""
        super().__init__(instance)
        self.rocketmq = RocketMQ(instance)
        self._plane = ControlPlane(instance)
        # The sidecars' image has compiled modules, so pods use these, too.
        self._node = LocalNode(instance, self._plane, options=[f"--variable=PYTHONPATH={compiled_package()}"])

    def up(self) -> None:
        """Start broker, API server, node and operator."""
        self.deliveries.mkdir()
        self.rocketmq.up()
        self._plane.up()
        self._node.up()
        self.connect(self._plane.kubeconfig)
        argv = [sys.executable, *self.program, "operator", "--address", self.instance.address(200)]
        self.instance.start("operator", argv, env={"KUBECONFIG": str(self._plane.kubeconfig)})

    def down(self) -> None:
        """Stop the operator while the API server still runs, so that it can release its Lease."""
        self.instance.stop("operator")
        super().down()

    def pods(self, log: str) -> Object:
        """Return a spec whose app is a process of this machine."""
        argv = [sys.executable, "-m", "bench.app", "$(ROTA_LOCAL)", "8080", f"{self.deliveries}/{log}"]
        app = app_container("python", argv) | {"workingDir": str(ROOT)}
        return {"nodeSelector": self._node.selector, "tolerations": self._node.tolerations, "containers": [app]}

    def signal(self, pod: str, number: signal.Signals) -> None:
        """Send the signal to the pod's processes."""
        self._node.signal("default", pod, number)


def app_container(image: str, argv: list[str]) -> Object:
    """Return an app's container, which is ready as soon as the app listens."""
    env = {"ROTA_LOCAL": "status.podIP", "POD_NAME": "metadata.name"}
    return {
        "name": "app",
        "image": image,
        "command": argv,
        "env": [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in env.items()],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
    }


@contextmanager
def standing(name: str, kind: Callable[[Instance], Ground] = LocalGround) -> Iterator[Ground]:
    """Start the environment, and stop it afterwards."""
    with temporary(name) as instance:
        ground = kind(instance)
        ground.up()
        try:
            yield ground
        finally:
            ground.down()


class Rota:
    """A group managed by Rota, with default settings and the strategy Sticky."""

    def __init__(self, ground: Ground, name: str, queues: int, *, orderly: bool = False) -> None:
        """Make nothing but the topic yet."""
        self.topic = f"{name}-rota"
        self.struck = ""
        self._ground = ground
        self._ordering = "Orderly" if orderly else "Concurrent"
        self._path = f"{WHERE}/consumergroups/{self.topic}"
        ground.rocketmq.create_topic(self.topic, queues)

    def make(self, members: int) -> None:
        """Create the group, and wait until it is at rest."""
        broker = {"rocketmq": {"nameServers": [self._ground.rocketmq.name_server]}}
        body = made(
            "ConsumerGroup",
            self.topic,
            broker=broker,
            subscriptions=[{"topic": self.topic}],
            policyRef={"name": "sticky"},
            ordering=self._ordering,
            replicas=members,
            template={"spec": self._ground.pods(f"{self.topic}@$(POD_NAME)")},
        )
        self._run(self._ground.api.create(f"{WHERE}/consumergroups", body))
        self._run(soon(lambda: self._is_at_rest(members), PATIENCE))

    def scale(self, members: int) -> None:
        """Patch the group's replicas."""
        self._patch({"replicas": members})

    def crash(self) -> None:
        """Kill sidecar and app; the node restarts them, as a kubelet does."""
        self._signal(signal.SIGKILL)

    def lose(self) -> None:
        """Delete a pod without a grace period, which kills its processes; the Deployment replaces the pod."""
        self.struck = self._first_pod_name()
        self._run(self._ground.api.delete(f"{PODS}/{self.struck}", {"gracePeriodSeconds": 0}))

    def freeze(self) -> None:
        """Stop sidecar and app."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue sidecar and app."""
        self._signal(signal.SIGCONT)

    def roll(self) -> None:
        """Change the template: the Deployment replaces the pods."""
        self._patch({"template": {"metadata": {"annotations": {"rolled": "once"}}}})

    def twin(self) -> None:
        """Start another pod: it has the same template as all other pods of the group."""
        self.scale(len(self._run(self._pods())) + 1)

    def queues(self, number: int) -> None:
        """Change the topic; the operator polls its route every 5 s."""
        self._ground.rocketmq.create_topic(self.topic, number)

    def came(self) -> list[Came]:
        """Read the apps' logs."""
        deliveries: list[Came] = []
        for path in self._notes():
            deliveries += noted(path.name.partition("@")[2], path)
        return deliveries

    def noted(self) -> int:
        """Measure the apps' logs."""
        return sum(path.stat().st_size for path in self._notes())

    def end(self) -> None:
        """Delete the group."""
        self._run(self._ground.api.delete(self._path))
        self._run(soon(self._has_no_pods, PATIENCE))

    async def _is_at_rest(self, members: int) -> bool:
        group = await self._ground.api.get(self._path)
        return at_rest(group, members) and len(await self._pods()) == members

    async def _has_no_pods(self) -> bool:
        return not await self._pods()

    async def _pods(self) -> list[Object]:
        return await self._ground.api.list(PODS, labelSelector=f"rota.dev/group={self.topic}")

    def _first_pod_name(self) -> str:
        return min(str(pod["metadata"]["name"]) for pod in self._run(self._pods()))

    def _patch(self, spec: Object) -> None:
        self._run(self._ground.api.patch(self._path, {"spec": spec}))

    def _signal(self, number: signal.Signals) -> None:
        self.struck = self.struck or self._first_pod_name()
        self._ground.signal(self.struck, number)

    def _notes(self) -> list[Path]:
        return sorted(self._ground.deliveries.glob(f"{self.topic}@*"))

    def _run(self, work: Any) -> Any:
        return self._ground.runner.run(work)


class Java:
    """Java push consumers, each a process; each computes its share of the queues itself."""

    def __init__(self, ground: Ground, name: str, queues: int, *, orderly: bool = False) -> None:
        """Make nothing but the topic yet."""
        self.topic = f"{name}-java"
        self.struck = ""
        self._rocketmq = ground.rocketmq
        self._queues = queues
        self._orderly = orderly
        self._all: list[peers.Peer] = []
        self._running: list[peers.Peer] = []
        ground.rocketmq.create_topic(self.topic, queues)

    def make(self, members: int) -> None:
        """Start consumers until they own all queues; Orderly ones then still have to get each other's locks."""
        self.scale(members)
        eventually(self._share_all, PATIENCE)
        if self._orderly:
            time.sleep(25)

    def scale(self, members: int) -> None:
        """Start consumers concurrently, or stop the youngest ones gracefully."""
        while len(self._running) < members:
            self._start(f"c{len(self._all)}")
        while len(self._running) > members:
            self._running.pop().stop()

    def crash(self) -> None:
        """Kill a process and start another one, as a kubelet does."""
        self.lose()
        self._start(f"c{len(self._all)}")

    def lose(self) -> None:
        """Kill a process, and start no other one."""
        peer = self._running.pop(0)
        self.struck = peer.program
        self._rocketmq.instance.kill(peer.program)

    def freeze(self) -> None:
        """Send SIGSTOP to a process."""
        self.struck = self._running[0].program
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the stopped process."""
        self._signal(signal.SIGCONT)

    def roll(self) -> None:
        """Start a consumer, then stop an old one, as a Deployment does, until all are replaced."""
        for old in [*self._running]:
            self._start(f"c{len(self._all)}")
            eventually(lambda: self._running[-1].lines("rebalance"), PATIENCE)
            old.stop()
            self._running.remove(old)

    def twin(self) -> None:
        """Start another process with the youngest consumer's instance name, and thus its client id."""
        self._start(f"c{len(self._all) - 1}")

    def queues(self, number: int) -> None:
        """Change the topic; each consumer polls its route every 30 s, and rebalances every 20 s."""
        self._rocketmq.create_topic(self.topic, number)

    def came(self) -> list[Came]:
        """Read the consumers' logs."""
        return [
            Came(
                line["at"] / 1e6,
                line["number"],
                ASIDE if line["reconsumeTimes"] else line["queue"],
                peer.program,
                line["born"] / 1e3,
            )
            for peer in self._all
            for line in peer.lines("message")
        ]

    def noted(self) -> int:
        """Measure the consumers' logs."""
        return sum(peer.instance.log(peer.program).stat().st_size for peer in self._all)

    def end(self) -> None:
        """Stop the remaining consumers."""
        while self._running:
            self._running.pop().stop()

    def _start(self, instance: str) -> None:
        peer = peers.push_consumer(self._rocketmq, self.topic, self.topic, instance=instance, orderly=self._orderly)
        self._all.append(peer)
        self._running.append(peer)

    def _share_all(self) -> bool:
        queues: list[str] = []
        for peer in self._running:
            assignments = [line for line in peer.lines("rebalance") if line["topic"] == self.topic]
            if not assignments:
                return False
            queues += assignments[-1]["queues"].split()
        return len(queues) == self._queues == len(set(queues))

    def _signal(self, number: signal.Signals) -> None:
        process = self._rocketmq.instance.process(self.struck)
        assert process is not None  # noqa: S101 - it was running when it was chosen
        process.signal(number)
