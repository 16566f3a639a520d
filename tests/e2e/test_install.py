"""From the chart and the Dockerfile to groups that are looked after: installed as people install it, on a real node."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chart.charts import CHART, STRICT, Helm, Refused
from ground import peers
from ground.node import RealNode
from ground.ours import at_rest, conditions
from ground.poll import eventually
from ground.rocketmq import RocketMQ

pytestmark = pytest.mark.node

SECONDS = 120
QUEUES, MESSAGES = 8, 1000
WAIT = ("--wait", f"--timeout={SECONDS}s")
HOME, SHOP = "rota-system", "shop"  # where the operator is, and where groups are
EVENTS = f"--field-selector=involvedObject.name={SHOP}"
LASTING = ("crd/consumergroups.rota.dev", "crd/rebalancepolicies.rota.dev", f"cg/{SHOP}")
LEFT = {"configmap/kube-root-ca.crt", "serviceaccount/default", "lease.coordination.k8s.io/rota"}  # the README says so

POLICY = {"kind": "RebalancePolicy", "metadata": {"name": "steady"}, "spec": {"strategy": "Sticky"}}
SECRET = {"kind": "Secret", "metadata": {"name": "acl"}, "stringData": {"accessKey": "shop", "secretKey": "12345678"}}
GROUP = {
    "kind": "ConsumerGroup",
    "metadata": {"name": SHOP},
    "spec": {
        "broker": {"rocketmq": {"nameServers": ["127.0.0.1:9876"], "credentialsSecret": {"name": "acl"}}},
        "subscriptions": [{"topic": "orders"}],
        "policyRef": {"name": "steady"},
        "replicas": 0,
        "template": {"spec": {"containers": [{"name": "app", "image": "app"}]}},
    },
}
# What an app of the tests does: it notes what it gets where all pods of the node note it.
APP = """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
log = os.open("/deliveries/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
class App(BaseHTTPRequestHandler):
    def do_POST(self):
        os.write(log, self.rfile.read(int(self.headers["content-length"])) + b"\\n")
        self.send_response(204)
        self.end_headers()
HTTPServer(("127.0.0.1", 8080), App).serve_forever()
"""
VERSIONS = {"Secret": "v1", "ConsumerGroup": "rota.dev/v1alpha1", "RebalancePolicy": "rota.dev/v1alpha1"}


@dataclass(frozen=True)
class Installed:
    """The release, and a namespace with a group that it looks after."""

    node: RealNode
    helm: Helm

    def release(self, command: str, *options: str, values: dict[str, Any] | None = None) -> str:
        """Run a command of helm about the release."""
        where = ("--kubeconfig", self.node.kubeconfig, "--namespace", HOME)
        return self.helm(command, "rota", *options, *where, values=values)

    def home(self, *arguments: str, check: bool = True) -> str:
        """Run kubectl where the operator is."""
        return self.node.kubectl("--namespace", HOME, *arguments, check=check).strip()

    def shop(self, *arguments: str, feed: str | None = None, check: bool = True) -> str:
        """Run kubectl where the group is."""
        return self.node.kubectl("--namespace", SHOP, *arguments, feed=feed, check=check).strip()

    def rota(self, *arguments: str) -> Any:
        """Ask the operator by a command of ours, through the API server, as people with a kubeconfig do."""
        argv = [sys.executable, "-m", "rota.cli", *arguments, "-o", "json"]
        env = {**os.environ, "KUBECONFIG": str(self.node.kubeconfig)}
        asked = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert asked.returncode == 0, asked.stderr
        return json.loads(asked.stdout)

    def pods(self) -> set[str]:
        return {*self.home("get", "pods", "-l", "app.kubernetes.io/component=operator", "-o", "name").split()}

    def leader(self) -> str:
        """Return the pod that the Lease names, or "" if it names none."""
        holder = self.home("get", "lease", "rota", "-o", "jsonpath={.spec.holderIdentity}", check=False)
        return f"pod/{holder}" if holder else ""

    def conditions(self) -> dict[str, tuple[str, str]]:
        """Return status and reason of the group's conditions, by type."""
        found = json.loads(self.shop("get", "cg", SHOP, "-o", "json", check=False) or "{}")
        return {kind: (one["status"], one["reason"]) for kind, one in conditions(found).items()}

    def log(self) -> str:
        """Return what all operators that there are have logged."""
        return "\n".join(self.home("logs", pod, check=False) for pod in sorted(self.pods()))

    def story(self) -> str:
        """Return all that can be known, for people who look for what went wrong."""
        return f"{self.leader()=}\n{self.conditions()=}\n{self.home('describe', 'pods')}\n{self.log()}"

    def ids(self) -> list[str]:
        """Return by what those that shall outlive the release are told from later ones of the same names."""
        return [self.shop("get", one, "-o", "jsonpath={.metadata.uid}") for one in LASTING]

    def left(self) -> set[str]:
        """Return all that is in the operator's namespace, of whatever kind."""
        kinds = self.home("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        lasting = [kind for kind in kinds if not kind.startswith("events")]
        return {*self.home("get", ",".join(lasting), "-o", "name").split()}


@pytest.fixture(scope="module")
def installed(real_node: RealNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Install the chart as its README says, with an image of the Dockerfile, and make a group."""
    image, _, tag = real_node.build("operator").partition(":")
    sidecar, _, of_sidecar = real_node.build("sidecar").partition(":")
    it = Installed(real_node, Helm(tmp_path_factory.mktemp("helm")))
    for name in (HOME, SHOP):
        real_node.kubectl("create", "namespace", name)
    real_node.kubectl("label", "namespace", HOME, *(f"{label}={value}" for label, value in STRICT.items()))
    values = {
        "image": {"repository": image, "tag": tag, "pullPolicy": "Never"},
        "sidecar": {"image": {"repository": sidecar, "tag": of_sidecar}},
        "networkPolicy": {"enabled": True, "memberNamespaces": [SHOP]},  # taken; this node's network enforces none
    }
    items = [{"apiVersion": VERSIONS[str(one["kind"])], **one} for one in (POLICY, SECRET, GROUP)]
    try:
        it.release("install", str(CHART), *WAIT, values=values)
        it.shop("apply", "-f-", feed=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        yield it
    except Refused:
        print(it.story())
        raise
    finally:
        it.release("uninstall", "--ignore-not-found")


@pytest.fixture(autouse=True)
def story(installed: Installed) -> Iterator[None]:
    """Tell people what there was, where a test fails."""
    yield
    print(installed.story())


def test_two_operators_run_and_one_of_them_leads(installed: Installed) -> None:
    assert installed.home("get", "deploy", "rota", "-o", "jsonpath={.status.readyReplicas}") == "2"
    assert eventually(installed.leader, SECONDS) in installed.pods()
    assert len(installed.pods()) == 2


def test_helm_test_finds_the_release_in_order(installed: Installed) -> None:
    assert "Succeeded" in installed.release("test", f"--timeout={SECONDS}s")


def test_a_group_is_told_how_it_fares_with_the_rights_that_the_chart_gives(installed: Installed) -> None:
    eventually(lambda: installed.conditions().get("BrokerUnreachable"), SECONDS)
    assert installed.conditions()["Degraded"] == ("True", "BrokerUnreachable")
    assert not {"MissingPolicy", "MissingSecret", "TemplateRefused"} & {*installed.conditions()}
    eventually(lambda: installed.shop("get", "deploy", SHOP, "--ignore-not-found"), SECONDS)
    eventually(lambda: installed.shop("get", "events", EVENTS, "-o", "name"), SECONDS)
    assert "forbidden" not in installed.log()


class Consumers:
    """A group at work: its broker, and what its pods have noted."""

    name = "orders"

    def __init__(self, installed: Installed, folder: Path) -> None:
        node = installed.node
        self._installed, self._folder = installed, folder
        self._broker = RocketMQ(node.instance, address=node.address, prefix=node.prefix)
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)

    def up(self) -> None:
        """Start the broker, and make the group with two pods."""
        self._broker.up()
        self._broker.create_topic(self.name, QUEUES)
        app: dict[str, Any] = {"name": "app", "image": "rota.local/sidecar:test", "command": ["python", "-c", APP]}
        app |= {"volumeMounts": [{"name": "deliveries", "mountPath": "/deliveries"}]}
        spec = {
            "broker": {"rocketmq": {"nameServers": [self._broker.name_server]}},
            "subscriptions": [{"topic": self.name}],
            "startFrom": {"position": "Earliest"},
            "policyRef": {"name": "steady"},
            "replicas": 2,
            "template": {
                "spec": {
                    "containers": [app],
                    "volumes": [{"name": "deliveries", "hostPath": {"path": str(self._folder)}}],
                }
            },
        }
        group = {"apiVersion": VERSIONS["ConsumerGroup"], "kind": "ConsumerGroup", "metadata": {"name": self.name}}
        self._installed.shop("apply", "-f-", feed=json.dumps(group | {"spec": spec}))

    def down(self) -> None:
        self._installed.shop("delete", "cg", self.name, "--ignore-not-found")
        eventually(lambda: not self._pods(), SECONDS)
        self._broker.down()

    def works(self, members: int) -> None:
        """Wait until so many pods work, and nothing goes on."""
        eventually(lambda: self._settled(members), 2 * SECONDS)

    def send(self) -> None:
        """Begin to send numbered messages."""
        self._producer = peers.producer(self._broker, self.name, MESSAGES, rate=20)

    def came(self) -> Counter[int]:
        """Return how often each message came, once all have been sent and have come."""
        eventually(lambda: self._producer.done, SECONDS)
        eventually(lambda: len(self._noted()) >= MESSAGES, SECONDS)
        time.sleep(1)  # one that comes twice may come a moment later
        return self._noted()

    def _noted(self) -> Counter[int]:
        log = self._folder / "log"
        return Counter(int(line.split()[0]) for line in log.read_text().splitlines()) if log.exists() else Counter()

    def _pods(self) -> list[str]:
        return self._installed.shop("get", "pods", "-l", f"rota.dev/group={self.name}", "-o", "name").split()

    def _settled(self, members: int) -> bool:
        group = json.loads(self._installed.shop("get", "cg", self.name, "-o", "json"))
        return at_rest(group, members) and members == len(self._pods())


@pytest.fixture
def consumers(installed: Installed, tmp_path: Path) -> Iterator[Consumers]:
    made = Consumers(installed, tmp_path / "deliveries")
    try:
        made.up()
        yield made
    finally:
        print(installed.shop("describe", "cg,pods", "-l", "rota.dev/group=orders", check=False))
        made.down()


def test_a_fleet_consumes_grows_and_is_replaced_and_nothing_is_lost_or_comes_twice(
    installed: Installed, consumers: Consumers
) -> None:
    consumers.works(2)
    consumers.send()
    installed.shop("scale", "cg/orders", "--replicas=3")
    consumers.works(3)
    members = installed.rota("members", "shop/orders")["members"]
    assert [(it["origin"], it["state"]) for it in members] == [("Rota", "Ready")] * 3
    assert sum(it["queues"] for it in members) in {QUEUES, QUEUES + 1}  # the one for retries comes when it likes
    restart = {"spec": {"template": {"metadata": {"annotations": {"restarted": "now"}}}}}
    installed.shop("patch", "cg", "orders", "--type=merge", "-p", json.dumps(restart))
    installed.shop("rollout", "status", "deploy/orders", f"--timeout={SECONDS}s")
    consumers.works(3)
    assert consumers.came() == dict.fromkeys(range(MESSAGES), 1)


def test_the_other_operator_leads_when_the_leaders_pod_is_deleted(installed: Installed) -> None:
    leader = eventually(installed.leader, SECONDS)
    (other,) = installed.pods() - {leader}
    installed.home("delete", leader)
    eventually(lambda: installed.leader() == other, SECONDS)
    installed.shop("delete", "rebalancepolicy", "steady")
    eventually(lambda: installed.conditions().get("MissingPolicy"), SECONDS)
    assert "forbidden" not in installed.log()


def test_uninstalling_leaves_definitions_and_groups_and_nothing_else(installed: Installed) -> None:
    before = installed.ids()
    installed.release("uninstall", *WAIT)
    eventually(lambda: installed.left() == LEFT, SECONDS)
    of_cluster = "clusterroles,clusterrolebindings,networkpolicies"
    assert not installed.shop("get", of_cluster, "-A", "-l", "app.kubernetes.io/instance=rota", "-o", "name")
    assert installed.ids() == before
