"""Examples that the pages combine: the files as they are written, with pods, on a real node."""

import asyncio
import json
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from brokers.guarded import settings_of
from e2e.release import SECONDS, SHOP, Installed
from ground.instance import temporary
from ground.keys import Authority
from ground.ours import at_rest
from ground.poll import eventually
from ground.rocketmq import RocketMQ
from kube.pages import ROOT
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.model import Queue

pytestmark = pytest.mark.node

EXAMPLES = ROOT / "docs" / "examples"
FLEET: dict[str, Any] = yaml.safe_load((EXAMPLES / "fleet.yaml").read_text())
PULL_APP = (EXAMPLES / "apps" / "python" / "app.py").read_text()
SIDECAR = "rota.local/sidecar:test"  # it has a Python, so it stands in for the image of fleet.yaml
APP_IMAGE = "docker.io/library/python:3.13-slim"
PLACE = "examples"  # the namespace
CREDENTIALS = Credentials("change-me", "change-me")  # of secured.yaml
QUEUES, PODS, MESSAGES = 8, 2, 40


class Message(NamedTuple):
    """A message to one queue of a topic."""

    queue: int
    body: str
    properties: Mapping[str, str]


def messages(test: str, **properties: str) -> list[Message]:
    """Return messages for all queues; their bodies begin with the test's word, for topics are shared."""
    return [Message(number % QUEUES, f"{test} {number}", properties) for number in range(MESSAGES)]


class Examples:
    """A namespace with a Service for the name server under the name that the examples use."""

    def __init__(self, installed: Installed, broker: RocketMQ, namespace: str) -> None:
        self.installed, self.broker, self.namespace = installed, broker, namespace
        installed.namespace(namespace)
        installed.serve(namespace, "rmq-namesrv", broker.name_server)
        installed.node.tag(SIDECAR, APP_IMAGE)

    def kubectl(self, *arguments: str, feed: str | None = None, check: bool = True) -> str:
        """Run kubectl in the namespace."""
        return self.installed.node.kubectl("--namespace", self.namespace, *arguments, feed=feed, check=check)

    def apply(self, bodies: Iterable[Any]) -> None:
        """Apply manifests."""
        self.kubectl("apply", "-f-", feed=yaml.safe_dump_all(bodies))

    def works(self, group: str, members: int) -> None:
        """Wait until so many members consume, and nothing changes."""
        eventually(lambda: at_rest(json.loads(self.kubectl("get", "cg", group, "-o", "json")), members), SECONDS)

    def send(self, topic: str, sent: Iterable[Message], site: ConnectionConfig | None = None) -> None:
        """Send, one after another."""
        asyncio.run(_send(site or ConnectionConfig([self.broker.name_server]), topic, sent))

    def printed(self, selector: str, test: str) -> dict[str, list[str]]:
        """Return the bodies of a test's messages that each pod's app has printed, each at the end of a line."""
        pods = self.kubectl("get", "pods", f"--selector={selector}", "-o", "name").split()
        logs = {pod: self.kubectl("logs", pod, "--container=app", check=False).splitlines() for pod in pods}
        lines = {pod: [line.split(" ", 2)[-1] for line in log] for pod, log in logs.items()}
        return {pod: [body for body in bodies if body.startswith(f"{test} ")] for pod, bodies in lines.items()}

    def prints(self, selector: str, test: str, wanted: Iterable[str]) -> dict[str, list[str]]:
        """Wait until the apps have printed all of these bodies; return what each pod has printed."""
        bodies = {*wanted}
        eventually(lambda: bodies <= {it for pod in self.printed(selector, test).values() for it in pod}, SECONDS)
        return self.printed(selector, test)


async def _send(site: ConnectionConfig, topic: str, sent: Iterable[Message]) -> None:
    cluster = AdminClient(site)
    for message in sent:
        queue = Queue(topic, "broker-0", message.queue)
        await cluster.send(topic, message.body.encode(), message.properties, queue)
    await cluster.close()


async def _create_topic(site: ConnectionConfig, topic: str) -> None:
    cluster = AdminClient(site)
    await cluster.create_topic(topic, "broker-0", QUEUES)
    await cluster.close()


@pytest.fixture
def examples(installed: Installed, broker: RocketMQ) -> Iterator[Examples]:
    """Make the namespace; delete groups and Deployments at the end."""
    place = Examples(installed, broker, PLACE)
    yield place
    place.kubectl("delete", "cg,deploy", "--all", "--wait=false")


def with_pods(name: str, app: Mapping[str, Any]) -> list[Any]:
    """Return an example with `replicas` and the `template` of fleet.yaml added, as the tutorial says."""
    bodies = [*yaml.safe_load_all((EXAMPLES / name).read_text())]
    (container,) = FLEET["spec"]["template"]["spec"]["containers"]
    for body in bodies:
        if body["kind"] == "ConsumerGroup":
            body["spec"] |= {"replicas": PODS, "template": {"spec": {"containers": [container | app]}}}
    return bodies


def once(printed: Mapping[str, list[str]]) -> Counter[str]:
    """Return how often each body was printed by any pod."""
    return Counter(body for bodies in printed.values() for body in bodies)


@pytest.mark.slow("on a node, the example of an Orderly group with pods of the fleet")
def test_example_orderly_group_with_pods_of_the_fleet_keeps_the_order_of_each_queue(examples: Examples) -> None:
    examples.broker.create_topic("bookings", QUEUES)
    examples.apply(with_pods("orderly.yaml", {}))
    examples.works("ledger", PODS)
    sent = messages("orderly")
    examples.send("bookings", sent)
    printed = examples.prints("rota.dev/group=ledger", "orderly", (it.body for it in sent))
    assert once(printed) == dict.fromkeys((it.body for it in sent), 1)
    for queue in range(QUEUES):
        of_queue = [it.body for it in sent if it.queue == queue]
        assert of_queue in [[body for body in bodies if body in of_queue] for bodies in printed.values()]


@pytest.mark.slow("on a node, the example of a Broadcasting group with pods of the fleet")
def test_example_broadcasting_group_with_pods_of_the_fleet_gives_each_message_to_each_pod(examples: Examples) -> None:
    examples.broker.create_topic("prices", QUEUES)
    sent = messages("broadcasting")
    examples.send("prices", sent)
    examples.apply(with_pods("broadcasting.yaml", {}))
    wanted = sorted(it.body for it in sent)

    def all_have_all() -> bool:
        printed = examples.printed("rota.dev/group=price-cache", "broadcasting")
        return [sorted(bodies) for bodies in printed.values()] == [wanted] * PODS

    eventually(all_have_all, SECONDS)


def test_example_pull_group_with_the_python_app_consumes_what_its_sql_filter_matches(examples: Examples) -> None:
    for topic in ("orders", "payments"):
        examples.broker.create_topic(topic, QUEUES)
    examples.apply(with_pods("pull.yaml", {"command": ["python", "-c", PULL_APP]}))
    examples.works("reports", PODS)
    orders = messages("pull")
    small = messages("pull small", amount="999", currency="EUR")
    foreign = messages("pull foreign", amount="1001", currency="USD")
    large = messages("pull large", amount="1001", currency="EUR")
    examples.send("orders", orders)
    examples.send("payments", [*small, *foreign, *large])  # in each queue those that match come last
    wanted = [it.body for it in (*orders, *large)]
    assert once(examples.prints("rota.dev/group=reports", "pull", wanted)) == dict.fromkeys(wanted, 1)


class SecuredRocketMQ(RocketMQ):
    """A broker with access control and TLS, on other ports of the node than the broker of all other tests."""

    def _port(self, what: str, wish: int) -> int:
        return super()._port(what, wish) + 1000


@pytest.mark.slow("on a node, docs/examples/secured.yaml with pods, at a broker with TLS and credentials")
def test_example_secured_group_with_pods_of_the_fleet_consumes_by_credentials_and_tls(
    examples: Examples, tmp_path: Path
) -> None:
    node, authority = examples.installed.node, Authority(tmp_path, "authority")
    names = [f"rmq-namesrv-{number}{suffix}" for number in range(2) for suffix in ("", f".{PLACE}")]
    pair = authority.issue("broker", "broker", dns=names, ips=[node.address])
    files = f"-Dtls.server.certPath={pair.certificate} -Dtls.server.keyPath={pair.key}"
    prefix = ("env", f"JAVA_TOOL_OPTIONS=-Dtls.test.mode.enable=false {files}", *node.prefix)
    with temporary("secured") as instance:
        broker = SecuredRocketMQ(instance, address=node.address, prefix=prefix, settings=settings_of(CREDENTIALS))
        broker.up()
        port = int(broker.name_server.rpartition(":")[2])
        for number in range(2):
            examples.installed.serve(PLACE, f"rmq-namesrv-{number}", f"{node.address}:{port}")
        trusting = ssl.create_default_context(cafile=str(authority.own.certificate))
        site = ConnectionConfig([broker.name_server], lambda: trusting, lambda: CREDENTIALS)
        asyncio.run(_create_topic(site, "payments"))
        examples.kubectl("create", "secret", "generic", "rmq-ca", f"--from-file=ca.crt={authority.own.certificate}")
        examples.apply(with_pods("secured.yaml", {}))
        examples.works("payments", PODS)
        sent = messages("secured")
        examples.send("payments", sent, site)
        wanted = [it.body for it in sent]
        assert once(examples.prints("rota.dev/group=payments", "secured", wanted)) == dict.fromkeys(wanted, 1)
        examples.kubectl("delete", "cg", "payments", "--wait=false")
    examples.kubectl("delete", "secret", "rmq-ca", "rmq-acl")


@pytest.mark.slow("on a node, the fleet of the examples with its HorizontalPodAutoscaler")
def test_example_fleet_keeps_its_replicas_while_the_autoscaler_of_the_example_has_no_metric(
    installed: Installed, broker: RocketMQ
) -> None:
    shop = Examples(installed, broker, SHOP)  # which the example names
    broker.create_topic("orders", QUEUES)
    shop.apply([FLEET])
    shop.works("orders", FLEET["spec"]["replicas"])
    installed.namespace("monitoring")
    installed.node.kubectl("apply", "-f", str(EXAMPLES / "scaling" / "hpa.yaml"))

    def reasons() -> dict[str, str]:
        told = json.loads(shop.kubectl("get", "hpa", "orders", "-o", "json")).get("status", {}).get("conditions", [])
        return {it["type"]: it["reason"] for it in told}

    eventually(lambda: "ScalingActive" in reasons(), SECONDS)
    assert reasons() == {"AbleToScale": "SucceededGetScale", "ScalingActive": "FailedGetExternalMetric"}
    assert json.loads(shop.kubectl("get", "cg", "orders", "-o", "json"))["spec"]["replicas"] == 3
    installed.node.kubectl("delete", "-f", str(EXAMPLES / "scaling" / "hpa.yaml"))
    shop.kubectl("delete", "cg", "orders", "--wait=false")


def test_example_group_gives_messages_to_a_deployment_with_the_sidecar_of_rota_inject(
    examples: Examples, tmp_path: Path
) -> None:
    examples.broker.create_topic("orders", QUEUES)
    labels = {"app": "shop"}
    template = {"metadata": {"labels": labels}, **FLEET["spec"]["template"]}
    spec = {"replicas": PODS, "selector": {"matchLabels": labels}, "template": template}
    manifest = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "shop"}, "spec": spec}
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(manifest))
    argv = [sys.executable, "-m", "rota.cli", "inject", "--group", "billing", "--image", SIDECAR]
    injected = subprocess.run([*argv, "-f", tmp_path / "shop.yaml"], capture_output=True, text=True, check=True)
    examples.kubectl("apply", "-f", str(EXAMPLES / "group.yaml"))
    examples.kubectl("apply", "-f-", feed=injected.stdout)
    examples.works("billing", PODS)
    sent = messages("inject")
    examples.send("orders", sent)
    wanted = [it.body for it in sent]
    assert once(examples.prints("rota.dev/group=billing", "inject", wanted)) == dict.fromkeys(wanted, 1)
    # Another file has a group of this name at the broker: these members would be unmanaged consumers there.
    examples.kubectl("delete", "deploy", "shop", "--cascade=foreground", f"--timeout={SECONDS}s")
