"""A group at work on a real node: its pods, what they do with messages, and the judgement of what came."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from typing import Any, NamedTuple

from e2e.deliveries import Moves, Notes, Traffic, moves
from e2e.release import SECONDS, SHOP, Installed
from e2e.watching import Watch, decided, documents, ended
from ground.cluster import NodeCluster
from ground.node import RealNode
from ground.ours import at_rest
from ground.poll import eventually
from ground.rocketmq import RocketMQ
from rota.documents import Assignment
from sidecar.checker import Fact, Story, violations
from sidecar.pods import APP

NAME = "shipping"  # of the group and its topic
QUEUES, MEMBERS = 16, 3
IN_FLIGHT = 16  # messages that are at one app at a time, as the group has it by default
# Seconds that apps and members have to be done with a message: a bound for what hangs, on machines of any speed. How
# long a queue waits for its next member is told, and for `make compare` to judge: a slow machine takes over a minute.
PATIENCE = 60.0
IN_ORDER = 30.0  # the same of an Orderly group, which may have no more
WORK = {"seconds": 0.03}  # what an app does with a message: so some are in flight when something happens
SETTINGS = {
    "messageDelayLevel": " ".join(["1s"] * 18),  # when messages are tried again
    "enablePropertyFilter": True,  # for SQL92
}
POLICY = {
    "kind": "RebalancePolicy",
    "metadata": {"name": "steady"},
    "spec": {"strategy": "Sticky", "handover": {"drainTimeout": f"{PATIENCE:.0f}s"}},
}
# Each container of an app has a log of its own, and each pod rules of its own as soon as somebody writes them.
COMMAND = """
cd /deliveries
ln -s rules.json "$0.json"
exec python app.py 127.0.0.1 8080 "$0@`date +%s%N`.jsonl" "$0.json"
"""


@dataclass(slots=True)
class Limits:
    """What an event under load may cost at most."""

    twice: int  # messages that are delivered again


class Verdict(NamedTuple):
    """What became of messages in one event."""

    what: str
    sent: int
    lost: int
    twice: int
    moves: Moves

    def __str__(self) -> str:
        """Return a line for people."""
        pause = f"{self.moves.many} moves, paused {self.moves.middle:.2f} s, at most {self.moves.longest:.2f} s"
        return f"{self.what}: {self.sent} sent, {self.lost} lost, {self.twice} twice; {pause}"


VERDICTS: list[Verdict] = []  # told at the end


def broker_of(node: NodeCluster) -> RocketMQ:
    """Return a broker that pods of the node can reach; nothing of it runs yet."""
    return RocketMQ(node.instance, address=node.address, prefix=node.prefix, settings=SETTINGS)


class Consumers:
    """A group of pods that Rota runs, on a broker of the node's."""

    def __init__(self, installed: Installed, broker: RocketMQ, folder: Path) -> None:
        """Have a topic, and look at the group that consumes it; apps note what they get in that folder."""
        installed.ensure()  # before that there are no groups to look at
        broker.create_topic(NAME, QUEUES)
        folder.chmod(0o777)
        self.installed, self.broker, self._folder = installed, broker, folder
        self.members = MEMBERS
        self._notes = Notes(folder, NAME)
        self._traffic = Traffic(broker.name_server, NAME, NAME, QUEUES)
        ours, named = f"--selector=rota.dev/group={NAME}", f"--field-selector=metadata.name={NAME}"
        self._groups, self._records, self._pods = self._watches = [
            Watch(installed.node, kind, f"--namespace={SHOP}", which)
            for kind, which in (("consumergroups", named), ("configmaps", ours), ("pods", ours))
        ]
        self._noted: list[Fact] = []
        self._lingering: set[str] = set()
        copy(APP, folder / "app.py")

    def up(self, *, orderly: bool = False) -> None:
        """Make the group, or make it what it was in the beginning, and wait until it is at rest."""
        self.renew()  # the API server ends each watch after half an hour or more
        if orderly != self._notes.orderly:  # nobody delivers as before when the first message is looked at
            self.gone()
        self._notes.orderly = orderly
        self.members = MEMBERS
        self.rules(WORK)
        self.installed.apply(POLICY, self._group())
        self.works()

    def gone(self) -> None:
        """Have no group, nor any of its pods."""
        shop = self.installed.shop
        shop("delete", "cg", NAME, "--ignore-not-found", "--cascade=foreground", f"--timeout={SECONDS}s")
        eventually(lambda: not shop("get", "pods", f"--selector=rota.dev/group={NAME}", "-o", "name"), SECONDS)

    def look_on(self) -> None:
        """Look by other watches, and wait until the group is at rest."""
        self.renew()
        self.works()

    def renew(self) -> None:
        """Look by other watches."""
        for it in self._watches:
            it.renew()

    def end(self) -> None:
        """Look no more."""
        for it in self._watches:
            it.end()

    # What is done to it.

    def scale(self, members: int) -> None:
        """Have other members, by kubectl."""
        self.members = members
        self.installed.shop("scale", f"cg/{NAME}", f"--replicas={members}")

    def roll(self) -> None:
        """Have all pods replaced, as by a new version of the app."""
        changed = {"spec": {"template": {"metadata": {"annotations": {"rolled": str(time.monotonic())}}}}}
        self.installed.shop("patch", "cg", NAME, "--type=merge", "-p", json.dumps(changed))

    def rules(self, *rules: dict[str, Any], pod: str = "rules") -> None:
        """Say what the apps do from now on, or one pod's; see tests/sidecar/app.py."""
        fresh = self._folder / f"{pod}.new"
        fresh.write_text(json.dumps(rules))
        fresh.rename(self._folder / f"{pod}.json")

    def no_rules(self, pod: str) -> None:
        """Have a pod's app do again what all do."""
        fresh = self._folder / f"{pod}.new"
        fresh.symlink_to("rules.json")
        fresh.rename(self._folder / f"{pod}.json")

    def note(self, kind: str, member: str = "") -> None:
        """Note what just befell a member, for the checker."""
        self._noted.append(Fact(time.monotonic(), kind, member))

    @contextmanager
    def lingering(self, pod: str) -> Iterator[None]:
        """Tell the checker that a pod is gone before it has ended: until it has, its queues are nobody else's."""
        self._lingering.add(pod)
        yield
        self.note("ended", pod)

    @contextmanager
    def without_broker(self, pod: str) -> Iterator[None]:
        """Let a pod reach no broker; what it did last, others do not know."""
        self.note("apart", pod)
        with self._cut(pod, self.broker.address):
            yield
        self.note("together", pod)

    @contextmanager
    def unheard(self, pod: str) -> Iterator[None]:
        """Let no operator that is there now hear a pod."""
        with ExitStack() as cuts:
            for operator in self.installed.addresses():
                cuts.enter_context(self._cut(pod, operator))
            yield

    def _cut(self, pod: str, address: str) -> AbstractContextManager[None]:
        node = self.installed.node
        assert isinstance(node, RealNode), "a test that cuts the network needs the marker own_node"
        return node.cut(self.status(pod)["podIP"], address)

    def kill_broker(self) -> None:
        """Kill the broker, which forgets what it was told last."""
        self.broker.kill_broker(0)
        self.note("broker")
        self._traffic.commits.clear()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Begin a rebalance that goes on until this is over: apps hold what they were given, and a member comes."""
        self.rules({"act": "hold"})
        try:
            self.scale(self.members + 1)
            eventually(lambda: self.document().releasing, SECONDS)
            yield
            assert self.document().releasing, "the rebalance was over before"
        finally:
            self.rules(WORK)

    # What is seen of it.

    def pods(self) -> list[str]:
        """Return its pods."""
        return sorted(self._pods.now())

    def status(self, pod: str) -> dict[str, Any]:
        """Return a pod's status."""
        found: dict[str, Any] = self._pods.now()[pod]["status"]
        return found

    def document(self) -> Assignment:
        """Return the latest document."""
        *_, latest = documents(self._records.seen())
        return latest

    def last_cause(self) -> str:
        """Return why queues moved the last time."""
        return str(self._groups.now()[NAME]["status"]["lastRebalance"]["reason"])

    def works(self) -> None:
        """Wait until all members work all there is, and nothing goes on."""
        eventually(self._settled, SECONDS)

    def _settled(self) -> bool:
        group, pods, members = self._groups.now().get(NAME, {}), self.pods(), self.members
        if group.get("spec", {}).get("replicas") != members or len(pods) != members or not at_rest(group, members):
            return False
        if group["status"]["observedGeneration"] != group["metadata"]["generation"]:
            return False
        document = self.document()
        shares = [share.queues for share in document.members.values()]
        all_work = pods == sorted(document.members) and all(shares)
        return all_work and not document.releasing and sum(map(len, shares)) == QUEUES + 1  # that of retries comes late

    def story(self) -> str:
        """Return all that can be known, for people who look for what went wrong."""
        logs = ("logs", f"--selector=rota.dev/group={NAME}", "--all-containers", "--prefix", "--tail=-1")
        told = [self.installed.story(), self.installed.shop(*logs, check=False)]
        return "\n".join([*told, *map(str, documents(self._records.seen())), *map(str, self._noted)])

    # What becomes of messages.

    @contextmanager
    def under_load(self, what: str, twice: int = 0, *, loses_rights: bool = False) -> Iterator[Limits]:
        """Have an event happen while messages flow; fail if one is lost, or if a limit is exceeded.

        An event whose duplicates depend on its duration raises the limit it is given. `loses_rights`: operators lose
        rights before they end.
        """
        limits = Limits(twice)
        begun = time.monotonic()
        with self._traffic.flowing():
            self.goes_on()
            yield limits
            self.goes_on()
        with suppress(TimeoutError):  # what is not done by then is lost, and the checker says so
            eventually(lambda: not self._undone(begun), SECONDS)
        self._judge(what, begun, limits)
        is_forbidden = "is forbidden: User" in self.installed.log()
        assert loses_rights or not is_forbidden, "an operator has tried what it has no right to"

    def sent_count(self) -> int:
        """Return how many messages were sent so far."""
        return len(self._traffic.sent)

    def goes_on(self) -> None:
        """Wait until each queue's next messages are done."""
        begun = len(self._traffic.sent)

        def taken() -> list[int]:
            return [it.number for it in self._traffic.sent[begun:] if it.acked]

        eventually(lambda: len(taken()) >= 2 * QUEUES, SECONDS)
        wanted = {*taken()}
        eventually(lambda: wanted <= self._notes.done(), SECONDS)

    def _undone(self, begun: float) -> set[int]:
        return {it.number for it in self._traffic.sent if it.acked and it.at >= begun} - self._notes.done()

    def _judge(self, what: str, begun: float, limits: Limits) -> None:
        """Ask the checker about all since then, and all that came again since then."""
        every = self._notes.delivered()
        numbers = {it.number for it in every if it.begin >= begun}
        delivered = [it for it in every if it.number in numbers]
        again = [number for number, times in Counter(it.number for it in delivered if it.done).items() if times > 1]
        gone = [*ended(self._pods.seen())]
        story = Story(
            sent=[it for it in self._traffic.sent if it.at >= begun],
            delivered=delivered,
            facts=[
                *decided(documents(self._records.seen())),
                *(it for it in gone if it.member not in self._lingering),
                *self._notes.died(),
                *self._noted,
            ],
            commits=[it for it in self._traffic.commits if it.at >= begun],
            orderly=self._notes.orderly,
            timeout=self._patience,
        )
        found = violations(story)
        sent, done = {it.number for it in story.sent if it.acked}, {it.number for it in delivered if it.done}
        verdict = Verdict(what, len(sent), len(sent - done), len(again), moves(delivered))
        VERDICTS.append(verdict)
        assert not found, "\n".join([f"{what}: {len(found)} promises were broken", *found[:20]])
        too_many = f"{what}: {len(again)} messages came twice, of at most {limits.twice}: {again[:20]}"
        assert len(again) <= limits.twice, too_many

    @property
    def _patience(self) -> float:
        return IN_ORDER if self._notes.orderly else PATIENCE

    def _group(self) -> dict[str, Any]:
        name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        app = {
            "name": "app",
            "image": "rota.local/sidecar:test",
            "command": ["sh", "-c", COMMAND, "$(POD_NAME)"],
            "env": [name],
            "resources": {"requests": {"cpu": "20m"}},  # else it starves while ten pods start on two cores
            "volumeMounts": [{"name": "deliveries", "mountPath": "/deliveries"}],
        }
        volume = {"name": "deliveries", "hostPath": {"path": str(self._folder)}}
        spec = {
            "broker": {"rocketmq": {"nameServers": [self.broker.name_server]}},
            "subscriptions": [{"topic": NAME}],
            "startFrom": {"position": "Earliest"},
            "ordering": "Orderly" if self._notes.orderly else "Concurrent",
            "delivery": {"push": {"timeout": f"{self._patience:.0f}s"}},
            "policyRef": {"name": "steady"},
            "replicas": self.members,
            "rollout": {"maxSurge": 2},
            "sidecar": {"resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}},
            "template": {"spec": {"containers": [app], "volumes": [volume]}},
        }
        return {"kind": "ConsumerGroup", "metadata": {"name": NAME}, "spec": spec}
