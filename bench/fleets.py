"""Two fleets that do the same things under the same load: Rota's, and one of Java push consumers.

Rota is all that there is of it: an API server, the operator, pods of a sidecar and a small app each, as processes of
the local node (on a real one: `bench.node`). Both kinds work on one broker, which stands as long as `standing` does.
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
    """A group of members that work the topic of its name; `struck` is the one that something was done to."""

    topic: str
    struck: str

    def make(self, members: int) -> None:
        """Start so many members, and wait until they share all queues."""

    def scale(self, members: int) -> None:
        """Have so many members; the system decides which go."""

    def crash(self) -> None:
        """Kill all of a member at once; its node starts it again."""

    def lose(self) -> None:
        """Kill all of a member at once, for good."""

    def freeze(self) -> None:
        """Have all of a member stand still, its connections open."""

    def thaw(self) -> None:
        """Have it go on."""

    def roll(self) -> None:
        """Replace all members, one after another; the new one starts before the old one goes."""

    def twin(self) -> None:
        """Start one more member that is configured exactly as another one."""

    def queues(self, number: int) -> None:
        """Have so many queues in the topic."""

    def came(self) -> list[Came]:
        """Return every message that came to a member so far."""

    def noted(self) -> int:
        """Return how much was noted of that: it grows while something comes."""

    def end(self) -> None:
        """End all members."""


class Ground(ABC):
    """What both stand on: a broker, and a cluster with an operator."""

    rocketmq: RocketMQ
    api: Api

    def __init__(self, instance: Instance) -> None:
        """Describe it; broker and API server are there once it is up."""
        self.instance = instance
        self.deliveries = instance.folder / "deliveries"
        self.runner = asyncio.Runner()

    @abstractmethod
    def up(self) -> None:
        """Start all of it."""

    @abstractmethod
    def pods(self, log: str) -> Object:
        """Return the spec of pods whose app notes what comes in that file; `$(POD_NAME)` is the pod's."""

    @abstractmethod
    def signal(self, pod: str, number: signal.Signals) -> None:
        """Signal all of a pod."""

    def connect(self, kubeconfig: Path) -> None:
        """Reach the API server, and have the policy that the groups go by."""
        self.runner.run(self._connect(kubeconfig))

    def down(self) -> None:
        """End what does not end with the instance."""
        self.runner.run(self.api.__aexit__(None, None, None))
        self.runner.close()

    async def _connect(self, kubeconfig: Path) -> None:
        self.api = await Api.connect(kubeconfig).__aenter__()
        await define(self.api)
        await self.api.create(f"{WHERE}/rebalancepolicies", made("RebalancePolicy", "sticky", strategy="Sticky"))


class LocalGround(Ground):
    """A control plane, with pods that are processes of this machine."""

    program: tuple[str, ...] = ("-m", "rota.cli")  # the operator's, for Python

    def __init__(self, instance: Instance) -> None:
        """Describe it."""
        super().__init__(instance)
        self.rocketmq = RocketMQ(instance)
        self._plane = ControlPlane(instance)
        self._node = LocalNode(instance, self._plane)

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
        """End the operator, while it can still say goodbye."""
        self.instance.stop("operator")
        super().down()

    def pods(self, log: str) -> Object:
        """Have the app as a process."""
        argv = [sys.executable, "-m", "bench.app", "$(ROTA_LOCAL)", "8080", f"{self.deliveries}/{log}"]
        app = an_app("python", argv) | {"workingDir": str(ROOT)}
        return {"nodeSelector": self._node.selector, "tolerations": self._node.tolerations, "containers": [app]}

    def signal(self, pod: str, number: signal.Signals) -> None:
        """Signal its processes."""
        self._node.signal("default", pod, number)


def an_app(image: str, argv: list[str]) -> Object:
    """Return the container of an app that is ready when it listens."""
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
    """Stand it all up, and take it down."""
    with temporary(name) as instance:
        ground = kind(instance)
        ground.up()
        try:
            yield ground
        finally:
            ground.down()


class Rota:
    """A group whose pods Rota runs, of default settings and Sticky."""

    def __init__(self, ground: Ground, name: str, queues: int, *, orderly: bool = False) -> None:
        """Make nothing but the topic yet."""
        self.topic, self.struck = f"{name}-rota", ""
        self._ground, self._ordering = ground, "Orderly" if orderly else "Concurrent"
        self._path = f"{WHERE}/consumergroups/{self.topic}"
        ground.rocketmq.create_topic(self.topic, queues)

    def make(self, members: int) -> None:
        """Apply the group."""
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
        self._run(soon(lambda: self._works(members), PATIENCE))

    def scale(self, members: int) -> None:
        """Scale the group."""
        self._patch({"replicas": members})

    def crash(self) -> None:
        """Kill sidecar and app; the node starts them again, as a kubelet does."""
        self._signal(signal.SIGKILL)

    def lose(self) -> None:
        """Delete a pod without any grace: that kills its processes. The Deployment makes another one."""
        self.struck = self._some_pod()
        self._run(self._ground.api.delete(f"{PODS}/{self.struck}", {"gracePeriodSeconds": 0}))

    def freeze(self) -> None:
        """Stop sidecar and app."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def roll(self) -> None:
        """Change the template: the Deployment replaces the pods."""
        self._patch({"template": {"metadata": {"annotations": {"rolled": "once"}}}})

    def twin(self) -> None:
        """Start one more pod: those of a group share a template, so it is configured as all others are."""
        self.scale(len(self._run(self._pods())) + 1)

    def queues(self, number: int) -> None:
        """Change the topic; the operator looks at it every 5 s."""
        self._ground.rocketmq.create_topic(self.topic, number)

    def came(self) -> list[Came]:
        """Read the apps' notes."""
        return [it for path in self._notes() for it in noted(path.name.partition("@")[2], path)]

    def noted(self) -> int:
        """Measure the apps' notes."""
        return sum(path.stat().st_size for path in self._notes())

    def end(self) -> None:
        """Delete the group."""
        self._run(self._ground.api.delete(self._path))
        self._run(soon(self._gone, PATIENCE))

    async def _works(self, members: int) -> bool:
        found = await self._ground.api.get(self._path)
        return at_rest(found, members) and len(await self._pods()) == members

    async def _gone(self) -> bool:
        return not await self._pods()

    async def _pods(self) -> list[Object]:
        return await self._ground.api.list(PODS, labelSelector=f"rota.dev/group={self.topic}")

    def _some_pod(self) -> str:
        return min(str(it["metadata"]["name"]) for it in self._run(self._pods()))

    def _patch(self, spec: Object) -> None:
        self._run(self._ground.api.patch(self._path, {"spec": spec}))

    def _signal(self, number: signal.Signals) -> None:
        self.struck = self.struck or self._some_pod()
        self._ground.signal(self.struck, number)

    def _notes(self) -> list[Path]:
        return sorted(self._ground.deliveries.glob(f"{self.topic}@*"))

    def _run(self, work: Any) -> Any:
        return self._ground.runner.run(work)


class Java:
    """Push consumers, each a process; they decide alone."""

    def __init__(self, ground: Ground, name: str, queues: int, *, orderly: bool = False) -> None:
        """Make nothing but the topic yet."""
        self.topic, self.struck = f"{name}-java", ""
        self._rocketmq, self._queues, self._orderly = ground.rocketmq, queues, orderly
        self._all: list[peers.Peer] = []
        self._here: list[peers.Peer] = []
        ground.rocketmq.create_topic(self.topic, queues)

    def make(self, members: int) -> None:
        """Start them; an Orderly one has a queue no sooner than another one has given it up."""
        self.scale(members)
        eventually(self._share_all, PATIENCE)
        if self._orderly:
            time.sleep(25)

    def scale(self, members: int) -> None:
        """Start some side by side, or end the youngest in good order."""
        while len(self._here) < members:
            self._start(f"c{len(self._all)}")
        while len(self._here) > members:
            self._here.pop().stop()

    def crash(self) -> None:
        """Kill the process and start another one, as a kubelet does."""
        self.lose()
        self._start(f"c{len(self._all)}")

    def lose(self) -> None:
        """Kill the process, and start no other one."""
        gone = self._here.pop(0)
        self.struck = gone.program
        self._rocketmq.instance.kill(gone.program)

    def freeze(self) -> None:
        """Stop the process."""
        self.struck = self._here[0].program
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def roll(self) -> None:
        """Do as a Deployment does: start one, and end an old one when the new one has begun."""
        for old in [*self._here]:
            self._start(f"c{len(self._all)}")
            eventually(lambda: self._here[-1].lines("rebalance"), PATIENCE)
            old.stop()
            self._here.remove(old)

    def twin(self) -> None:
        """Start another process with the client id of the youngest: its instance name."""
        self._start(f"c{len(self._all) - 1}")

    def queues(self, number: int) -> None:
        """Change the topic; each looks at it every 30 s, and shares it out every 20 s."""
        self._rocketmq.create_topic(self.topic, number)

    def came(self) -> list[Came]:
        """Read what they have told."""
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
        """Measure what they have told."""
        return sum(peer.instance.log(peer.program).stat().st_size for peer in self._all)

    def end(self) -> None:
        """End all that are left."""
        while self._here:
            self._here.pop().stop()

    def _start(self, instance: str) -> None:
        peer = peers.push_consumer(self._rocketmq, self.topic, self.topic, instance=instance, orderly=self._orderly)
        self._all.append(peer)
        self._here.append(peer)

    def _share_all(self) -> bool:
        shares = [[it for it in peer.lines("rebalance") if it["topic"] == self.topic][-1:] for peer in self._here]
        queues = [queue for told in shares for it in told for queue in it["queues"].split()]
        return all(shares) and len(queues) == self._queues == len(set(queues))

    def _signal(self, number: signal.Signals) -> None:
        process = self._rocketmq.instance.process(self.struck)
        assert process is not None  # noqa: S101 - it was there when it was chosen
        process.signal(number)
