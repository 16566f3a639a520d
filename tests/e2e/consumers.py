"""A group that consumes on a real node: its pods, their handling of messages, and the check of deliveries."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from typing import Any, NamedTuple

from e2e.deliveries import AppLogs, Handovers, Traffic, measure_handovers
from e2e.release import GROUP_NAMESPACE, TIMEOUT_SECONDS, Installation
from e2e.watching import Watch, documents, ownership_facts, pod_ends
from ground.cluster import NodeCluster
from ground.node import RealNode
from ground.ours import at_rest
from ground.poll import eventually
from ground.rocketmq import RocketMQ
from rota.documents import Assignment
from sidecar.checker import Fact, FleetHistory, violations
from sidecar.pods import APP

NAME = "shipping"  # of the group and its topic
GROUP_SELECTOR = f"--selector=rota.dev/group={NAME}"
QUEUES = 16
MEMBERS = 3
IN_FLIGHT = 16  # messages at one app at a time, by default
# Time limit for an app and its member to handle a message: detects hanging parts on machines of any speed. The pause of
# a queue during a handover is only printed; `make compare` judges it. A slow machine takes over a minute.
HANDLING_SECONDS = 60.0
ORDERLY_HANDLING_SECONDS = 30.0  # the limit of an Orderly group
APP_RULES = {"seconds": 0.03}  # of an app for each message: some messages are in flight at each event
SETTINGS = {
    "messageDelayLevel": " ".join(["1s"] * 18),  # delays of retries
    "enablePropertyFilter": True,  # for SQL92
}
POLICY = {
    "kind": "RebalancePolicy",
    "metadata": {"name": "steady"},
    "spec": {"strategy": "Sticky", "handover": {"drainTimeout": f"{HANDLING_SECONDS:.0f}s"}},
}
# Each container has a log of its own. A pod uses the common rules until a test writes rules of its own.
COMMAND = """
cd /deliveries
ln -s rules.json "$0.json"
exec python app.py 127.0.0.1 8080 "$0@`date +%s%N`.jsonl" "$0.json"
"""


@dataclass(slots=True)
class Limits:
    """The limits of an event under load."""

    duplicates: int  # messages delivered more than once


class EventResult(NamedTuple):
    """How many messages were sent, lost and duplicated during one event, with the handovers."""

    event: str
    sent: int
    lost: int
    duplicated: int
    handovers: Handovers

    def __str__(self) -> str:
        """Return one line for the summary."""
        handovers = self.handovers
        pauses = f"paused {handovers.median_seconds:.2f} s, at most {handovers.max_seconds:.2f} s"
        counts = f"{self.sent} sent, {self.lost} lost, {self.duplicated} twice"
        return f"{self.event}: {counts}; {handovers.total} moves, {pauses}"


RESULTS: list[EventResult] = []  # printed at the end


def broker_of(node: NodeCluster) -> RocketMQ:
    """Return a broker that pods of the node can reach; it is not started yet."""
    return RocketMQ(node.instance, address=node.address, prefix=node.prefix, settings=SETTINGS)


class Consumers:
    """A group with pods that Rota runs, and a broker on the node."""

    def __init__(self, installation: Installation, broker: RocketMQ, folder: Path) -> None:
        """Create the topic, and watch the group that consumes it; apps write their logs to the folder."""
        installation.ensure_installed()  # the watches need the CRDs
        broker.create_topic(NAME, QUEUES)
        folder.chmod(0o777)
        self.installation = installation
        self.broker = broker
        self._folder = folder
        self.members = MEMBERS
        self._app_logs = AppLogs(folder, NAME)
        self._traffic = Traffic(broker.name_server, NAME, NAME, QUEUES)
        namespace = f"--namespace={GROUP_NAMESPACE}"
        self._groups = Watch(installation.node, "consumergroups", namespace, f"--field-selector=metadata.name={NAME}")
        self._config_maps = Watch(installation.node, "configmaps", namespace, GROUP_SELECTOR)
        self._pods = Watch(installation.node, "pods", namespace, GROUP_SELECTOR)
        self._watches = (self._groups, self._config_maps, self._pods)
        self._facts: list[Fact] = []
        self._lingering: set[str] = set()
        copy(APP, folder / "app.py")

    def reset(self, *, orderly: bool = False) -> None:
        """Create the group, or restore its first state, and wait until it is settled."""
        self.restart_watches()  # the API server ends each watch after half an hour or more
        if orderly != self._app_logs.orderly:  # no pod may still deliver in the previous ordering
            self.delete_group()
        self._app_logs.orderly = orderly
        self.members = MEMBERS
        self.set_rules(APP_RULES)
        self.installation.apply(POLICY, self._group())
        self.wait_settled()

    def delete_group(self) -> None:
        """Delete the group and wait until its pods are deleted."""
        group_kubectl = self.installation.group_kubectl
        group_kubectl(
            "delete", "cg", NAME, "--ignore-not-found", "--cascade=foreground", f"--timeout={TIMEOUT_SECONDS}s"
        )
        eventually(lambda: not group_kubectl("get", "pods", GROUP_SELECTOR, "-o", "name"), TIMEOUT_SECONDS)

    def resume_watching(self) -> None:
        """Restart the watches, and wait until the group is settled."""
        self.restart_watches()
        self.wait_settled()

    def restart_watches(self) -> None:
        """Restart all watches."""
        for watch in self._watches:
            watch.restart()

    def stop_watches(self) -> None:
        """Stop all watches."""
        for watch in self._watches:
            watch.stop()

    # Actions.

    def scale(self, members: int) -> None:
        """Change the number of members, by kubectl."""
        self.members = members
        self.installation.group_kubectl("scale", f"cg/{NAME}", f"--replicas={members}")

    def roll(self) -> None:
        """Start a rolling update, as a new version of the app does."""
        changed = {"spec": {"template": {"metadata": {"annotations": {"rolled": str(time.monotonic())}}}}}
        self.installation.group_kubectl("patch", "cg", NAME, "--type=merge", "-p", json.dumps(changed))

    def set_rules(self, *rules: dict[str, Any], pod: str = "rules") -> None:
        """Set the rules of all apps, or of one pod's app; see tests/sidecar/app.py."""
        new_file = self._folder / f"{pod}.new"
        new_file.write_text(json.dumps(rules))
        new_file.rename(self._folder / f"{pod}.json")

    def clear_rules(self, pod: str) -> None:
        """Let a pod's app follow the common rules again."""
        new_file = self._folder / f"{pod}.new"
        new_file.symlink_to("rules.json")
        new_file.rename(self._folder / f"{pod}.json")

    def record_fact(self, kind: str, member: str = "") -> None:
        """Record an event of a member for the checker."""
        self._facts.append(Fact(time.monotonic(), kind, member))

    @contextmanager
    def expect_lingering(self, pod: str) -> Iterator[None]:
        """Expect that a pod is deleted before it has ended; until its end, the checker treats it as an owner."""
        self._lingering.add(pod)
        yield
        self.record_fact("ended", pod)

    @contextmanager
    def without_broker(self, pod: str) -> Iterator[None]:
        """Cut off a pod from the broker; its last commits may be missing there."""
        self.record_fact("disconnected", pod)
        with self._cut_network(pod, self.broker.address):
            yield
        self.record_fact("reconnected", pod)

    @contextmanager
    def without_operators(self, pod: str) -> Iterator[None]:
        """Cut off a pod from all operators that run now."""
        with ExitStack() as cuts:
            for operator in self.installation.addresses():
                cuts.enter_context(self._cut_network(pod, operator))
            yield

    def _cut_network(self, pod: str, address: str) -> AbstractContextManager[None]:
        node = self.installation.node
        assert isinstance(node, RealNode), "a test that cuts the network needs the marker own_node"
        return node.cut(self.status(pod)["podIP"], address)

    def kill_broker(self) -> None:
        """Kill the broker; it loses its latest commits."""
        self.broker.kill_broker(0)
        self.record_fact("broker")
        self._traffic.commits.clear()

    @contextmanager
    def during_rebalance(self) -> Iterator[None]:
        """Keep a rebalance in progress inside the context: apps hold their messages, and a member joins."""
        self.set_rules({"act": "hold"})
        try:
            self.scale(self.members + 1)
            eventually(lambda: self.document().releasing, TIMEOUT_SECONDS)
            yield
            assert self.document().releasing, "the rebalance was over before"
        finally:
            self.set_rules(APP_RULES)

    # State.

    def pods(self) -> list[str]:
        """Return the names of the group's pods."""
        return sorted(self._pods.current())

    def status(self, pod: str) -> dict[str, Any]:
        """Return a pod's status."""
        status: dict[str, Any] = self._pods.current()[pod]["status"]
        return status

    def document(self) -> Assignment:
        """Return the latest assignment."""
        *_, latest = documents(self._config_maps.versions())
        return latest

    def last_reason(self) -> str:
        """Return the reason of the last rebalance."""
        return str(self._groups.current()[NAME]["status"]["lastRebalance"]["reason"])

    def wait_settled(self) -> None:
        """Wait until all members consume, all queues have owners, and no handover is in progress."""
        eventually(self._settled, TIMEOUT_SECONDS)

    def _settled(self) -> bool:
        group = self._groups.current().get(NAME, {})
        pods = self.pods()
        members = self.members
        if group.get("spec", {}).get("replicas") != members or len(pods) != members or not at_rest(group, members):
            return False
        if group["status"]["observedGeneration"] != group["metadata"]["generation"]:
            return False
        document = self.document()
        shares = [share.queues for share in document.members.values()]
        all_consume = pods == sorted(document.members) and all(shares)
        owned = sum(map(len, shares))
        return all_consume and not document.releasing and owned == QUEUES + 1  # the retry queue is created late

    def diagnostics(self) -> str:
        """Return logs, assignments and facts, for the analysis of a failure."""
        logs = ("logs", GROUP_SELECTOR, "--all-containers", "--prefix", "--tail=-1")
        texts = [self.installation.diagnostics(), self.installation.group_kubectl(*logs, check=False)]
        return "\n".join([*texts, *map(str, documents(self._config_maps.versions())), *map(str, self._facts)])

    # Messages.

    @contextmanager
    def under_load(self, event: str, duplicates: int = 0, *, loses_rights: bool = False) -> Iterator[Limits]:
        """Run an event while messages flow; fail if a message is lost, or if a limit is exceeded.

        If the duplicates of an event depend on its duration, it raises the yielded limit. `loses_rights`: operators
        lose rights before they end.
        """
        limits = Limits(duplicates)
        started_at = time.monotonic()
        with self._traffic.flowing():
            self.wait_for_progress()
            yield limits
            self.wait_for_progress()
        with suppress(TimeoutError):  # the checker reports unfinished messages as lost
            eventually(lambda: not self._unfinished(started_at), TIMEOUT_SECONDS)
        self._verify(event, started_at, limits)
        is_forbidden = "is forbidden: User" in self.installation.log()
        assert loses_rights or not is_forbidden, "an operator has sent a request without the right to it"

    def sent_count(self) -> int:
        """Return the number of messages sent so far."""
        return len(self._traffic.sent)

    def wait_for_progress(self) -> None:
        """Wait until apps have handled the next messages of each queue."""
        first = len(self._traffic.sent)

        def acknowledged() -> list[int]:
            return [message.number for message in self._traffic.sent[first:] if message.acked]

        eventually(lambda: len(acknowledged()) >= 2 * QUEUES, TIMEOUT_SECONDS)
        expected = {*acknowledged()}
        eventually(lambda: expected <= self._app_logs.done(), TIMEOUT_SECONDS)

    def _unfinished(self, started_at: float) -> set[int]:
        sent = {message.number for message in self._traffic.sent if message.acked and message.at >= started_at}
        return sent - self._app_logs.done()

    def _verify(self, event: str, started_at: float, limits: Limits) -> None:
        """Check all messages sent since then, and all messages delivered since then."""
        all_deliveries = self._app_logs.delivered()
        numbers = {delivery.number for delivery in all_deliveries if delivery.begin >= started_at}
        delivered = [delivery for delivery in all_deliveries if delivery.number in numbers]
        done_counts = Counter(delivery.number for delivery in delivered if delivery.done)
        duplicated = [number for number, count in done_counts.items() if count > 1]
        ends = [*pod_ends(self._pods.versions())]
        history = FleetHistory(
            sent=[message for message in self._traffic.sent if message.at >= started_at],
            delivered=delivered,
            facts=[
                *ownership_facts(documents(self._config_maps.versions())),
                *(end for end in ends if end.member not in self._lingering),
                *self._app_logs.app_ends(),
                *self._facts,
            ],
            commits=[commit for commit in self._traffic.commits if commit.at >= started_at],
            orderly=self._app_logs.orderly,
            timeout=self._handling_seconds,
        )
        broken_promises = violations(history)
        sent = {message.number for message in history.sent if message.acked}
        lost = sent - done_counts.keys()
        result = EventResult(event, len(sent), len(lost), len(duplicated), measure_handovers(delivered))
        RESULTS.append(result)
        summary = f"{event}: {len(broken_promises)} promises were broken"
        assert not broken_promises, "\n".join([summary, *broken_promises[:20]])
        too_many = f"{event}: {len(duplicated)} messages came twice, of at most {limits.duplicates}: {duplicated[:20]}"
        assert len(duplicated) <= limits.duplicates, too_many

    @property
    def _handling_seconds(self) -> float:
        return ORDERLY_HANDLING_SECONDS if self._app_logs.orderly else HANDLING_SECONDS

    def _group(self) -> dict[str, Any]:
        name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        app = {
            "name": "app",
            "image": "rota.local/sidecar:test",
            "command": ["sh", "-c", COMMAND, "$(POD_NAME)"],
            "env": [name],
            "resources": {
                "requests": {"cpu": "20m"}
            },  # without a request the app starves while ten pods start on two cores
            "volumeMounts": [{"name": "deliveries", "mountPath": "/deliveries"}],
        }
        volume = {"name": "deliveries", "hostPath": {"path": str(self._folder)}}
        spec = {
            "broker": {"rocketmq": {"nameServers": [self.broker.name_server]}},
            "subscriptions": [{"topic": NAME}],
            "startFrom": {"position": "Earliest"},
            "ordering": "Orderly" if self._app_logs.orderly else "Concurrent",
            "delivery": {"push": {"timeout": f"{self._handling_seconds:.0f}s"}},
            "policyRef": {"name": "steady"},
            "replicas": self.members,
            "rollout": {"maxSurge": 2},
            "sidecar": {"resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}},
            "template": {"spec": {"containers": [app], "volumes": [volume]}},
        }
        return {"kind": "ConsumerGroup", "metadata": {"name": NAME}, "spec": spec}
