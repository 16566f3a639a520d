"""The examples that the pages combine: the unchanged files, with pods, on a real node."""

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
from e2e.release import GROUP_NAMESPACE, TIMEOUT_SECONDS, Installation
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
SIDECAR = "rota.local/sidecar:test"  # contains Python, replaces the image of fleet.yaml
APP_IMAGE = "docker.io/library/python:3.13-slim"
NAMESPACE = "examples"
CREDENTIALS = Credentials("change-me", "change-me")  # of secured.yaml
QUEUES = 8
PODS = 2
MESSAGES = 40


class Message(NamedTuple):
    """A message to one queue of a topic."""

    queue: int
    body: str
    properties: Mapping[str, str]


def messages(test: str, **properties: str) -> list[Message]:
    """Return messages for all queues; their bodies start with the test's name, as tests share topics."""
    return [Message(number % QUEUES, f"{test} {number}", properties) for number in range(MESSAGES)]


class Examples:
    """A namespace with a Service for the name server, named as in the examples."""

    def __init__(self, installation: Installation, broker: RocketMQ, namespace: str) -> None:
        self.installation = installation
        self.broker = broker
        self.namespace = namespace
        installation.ensure_namespace(namespace)
        installation.create_name_server_service(namespace, "rmq-namesrv", broker.name_server)
        installation.node.tag(SIDECAR, APP_IMAGE)

    def kubectl(self, *arguments: str, feed: str | None = None, check: bool = True) -> str:
        """Run kubectl in the namespace."""
        return self.installation.node.kubectl("--namespace", self.namespace, *arguments, feed=feed, check=check)

    def apply(self, bodies: Iterable[Any]) -> None:
        """Apply manifests."""
        self.kubectl("apply", "-f-", feed=yaml.safe_dump_all(bodies))

    def wait_settled(self, group: str, members: int) -> None:
        """Wait until so many members consume, and the group is settled."""
        eventually(
            lambda: at_rest(json.loads(self.kubectl("get", "cg", group, "-o", "json")), members), TIMEOUT_SECONDS
        )

    def send(self, topic: str, sent: Iterable[Message], config: ConnectionConfig | None = None) -> None:
        """Send messages one after another."""
        asyncio.run(_send(config or ConnectionConfig([self.broker.name_server]), topic, sent))

    def printed(self, selector: str, test: str) -> dict[str, list[str]]:
        """Return the bodies of a test's messages at the ends of the lines that each pod's app has printed."""
        pods = self.kubectl("get", "pods", f"--selector={selector}", "-o", "name").split()
        logs = {pod: self.kubectl("logs", pod, "--container=app", check=False).splitlines() for pod in pods}
        printed = {}
        for pod, log in logs.items():
            bodies = [line.split(" ", 2)[-1] for line in log]
            printed[pod] = [body for body in bodies if body.startswith(f"{test} ")]
        return printed

    def wait_printed(self, selector: str, test: str, expected: Iterable[str]) -> dict[str, list[str]]:
        """Wait until the apps have printed all of these bodies; return what each pod has printed."""
        bodies = {*expected}
        eventually(lambda: bodies <= count_bodies(self.printed(selector, test)).keys(), TIMEOUT_SECONDS)
        return self.printed(selector, test)


async def _send(config: ConnectionConfig, topic: str, sent: Iterable[Message]) -> None:
    client = AdminClient(config)
    for message in sent:
        queue = Queue(topic, "broker-0", message.queue)
        await client.send(topic, message.body.encode(), message.properties, queue)
    await client.close()


async def _create_topic(config: ConnectionConfig, topic: str) -> None:
    client = AdminClient(config)
    await client.create_topic(topic, "broker-0", QUEUES)
    await client.close()


@pytest.fixture
def examples(installation: Installation, broker: RocketMQ) -> Iterator[Examples]:
    """Create the namespace; delete groups and Deployments at the end."""
    namespace = Examples(installation, broker, NAMESPACE)
    yield namespace
    namespace.kubectl("delete", "cg,deploy", "--all", "--wait=false")


def with_pods(name: str, app: Mapping[str, Any]) -> list[Any]:
    """Return an example with `replicas` and the `template` of fleet.yaml added, as the tutorial says."""
    bodies = [*yaml.safe_load_all((EXAMPLES / name).read_text())]
    (container,) = FLEET["spec"]["template"]["spec"]["containers"]
    for body in bodies:
        if body["kind"] == "ConsumerGroup":
            body["spec"] |= {"replicas": PODS, "template": {"spec": {"containers": [container | app]}}}
    return bodies


def count_bodies(printed: Mapping[str, list[str]]) -> Counter[str]:
    """Return how often each body was printed by all pods."""
    return Counter(body for bodies in printed.values() for body in bodies)


@pytest.mark.slow("on a node, the example of an Orderly group with pods of the fleet")
def test_example_orderly_group_with_pods_of_the_fleet_keeps_the_order_of_each_queue(examples: Examples) -> None:
    examples.broker.create_topic("bookings", QUEUES)
    examples.apply(with_pods("orderly.yaml", {}))
    examples.wait_settled("ledger", PODS)
    sent = messages("orderly")
    examples.send("bookings", sent)
    printed = examples.wait_printed("rota.dev/group=ledger", "orderly", (message.body for message in sent))
    assert count_bodies(printed) == dict.fromkeys((message.body for message in sent), 1)
    for queue in range(QUEUES):
        sent_to_queue = [message.body for message in sent if message.queue == queue]
        assert sent_to_queue in [[body for body in bodies if body in sent_to_queue] for bodies in printed.values()]


@pytest.mark.slow("on a node, the example of a Broadcasting group with pods of the fleet")
def test_example_broadcasting_group_with_pods_of_the_fleet_gives_each_message_to_each_pod(examples: Examples) -> None:
    examples.broker.create_topic("prices", QUEUES)
    sent = messages("broadcasting")
    examples.send("prices", sent)
    examples.apply(with_pods("broadcasting.yaml", {}))
    expected = sorted(message.body for message in sent)

    def all_have_all() -> bool:
        printed = examples.printed("rota.dev/group=price-cache", "broadcasting")
        return [sorted(bodies) for bodies in printed.values()] == [expected] * PODS

    eventually(all_have_all, TIMEOUT_SECONDS)


def test_example_pull_group_with_the_python_app_consumes_what_its_sql_filter_matches(examples: Examples) -> None:
    for topic in ("orders", "payments"):
        examples.broker.create_topic(topic, QUEUES)
    examples.apply(with_pods("pull.yaml", {"command": ["python", "-c", PULL_APP]}))
    examples.wait_settled("reports", PODS)
    orders = messages("pull")
    small = messages("pull small", amount="999", currency="EUR")
    foreign = messages("pull foreign", amount="1001", currency="USD")
    large = messages("pull large", amount="1001", currency="EUR")
    examples.send("orders", orders)
    examples.send("payments", [*small, *foreign, *large])  # matching messages are last in each queue
    expected = [message.body for message in (*orders, *large)]
    printed = examples.wait_printed("rota.dev/group=reports", "pull", expected)
    assert count_bodies(printed) == dict.fromkeys(expected, 1)


class SecuredRocketMQ(RocketMQ):
    """A broker with access control and TLS, on other ports of the node than the broker of all other tests."""

    def _port(self, purpose: str, preferred: int) -> int:
        return super()._port(purpose, preferred) + 1000


@pytest.mark.slow("on a node, docs/examples/secured.yaml with pods, at a broker with TLS and credentials")
def test_example_secured_group_with_pods_of_the_fleet_consumes_by_credentials_and_tls(
    examples: Examples, tmp_path: Path
) -> None:
    node = examples.installation.node
    authority = Authority(tmp_path, "authority")
    names = [f"rmq-namesrv-{number}{suffix}" for number in range(2) for suffix in ("", f".{NAMESPACE}")]
    key_pair = authority.issue("broker", "broker", dns=names, ips=[node.address])
    files = f"-Dtls.server.certPath={key_pair.certificate} -Dtls.server.keyPath={key_pair.key}"
    prefix = ("env", f"JAVA_TOOL_OPTIONS=-Dtls.test.mode.enable=false {files}", *node.prefix)
    with temporary("secured") as instance:
        broker = SecuredRocketMQ(instance, address=node.address, prefix=prefix, settings=settings_of(CREDENTIALS))
        broker.up()
        port = int(broker.name_server.rpartition(":")[2])
        for number in range(2):
            examples.installation.create_name_server_service(
                NAMESPACE, f"rmq-namesrv-{number}", f"{node.address}:{port}"
            )
        tls_context = ssl.create_default_context(cafile=str(authority.own.certificate))
        config = ConnectionConfig([broker.name_server], lambda: tls_context, lambda: CREDENTIALS)
        asyncio.run(_create_topic(config, "payments"))
        examples.kubectl("create", "secret", "generic", "rmq-ca", f"--from-file=ca.crt={authority.own.certificate}")
        examples.apply(with_pods("secured.yaml", {}))
        examples.wait_settled("payments", PODS)
        sent = messages("secured")
        examples.send("payments", sent, config)
        expected = [message.body for message in sent]
        printed = examples.wait_printed("rota.dev/group=payments", "secured", expected)
        assert count_bodies(printed) == dict.fromkeys(expected, 1)
        examples.kubectl("delete", "cg", "payments", "--wait=false")
    examples.kubectl("delete", "secret", "rmq-ca", "rmq-acl")


@pytest.mark.slow("on a node, the fleet of the examples with its HorizontalPodAutoscaler")
def test_example_fleet_keeps_its_replicas_while_the_autoscaler_of_the_example_has_no_metric(
    installation: Installation, broker: RocketMQ
) -> None:
    examples = Examples(installation, broker, GROUP_NAMESPACE)  # the namespace of the example
    broker.create_topic("orders", QUEUES)
    examples.apply([FLEET])
    examples.wait_settled("orders", FLEET["spec"]["replicas"])
    installation.ensure_namespace("monitoring")
    installation.node.kubectl("apply", "-f", str(EXAMPLES / "scaling" / "hpa.yaml"))

    def reasons() -> dict[str, str]:
        autoscaler = json.loads(examples.kubectl("get", "hpa", "orders", "-o", "json"))
        conditions = autoscaler.get("status", {}).get("conditions", [])
        return {condition["type"]: condition["reason"] for condition in conditions}

    eventually(lambda: "ScalingActive" in reasons(), TIMEOUT_SECONDS)
    assert reasons() == {"AbleToScale": "SucceededGetScale", "ScalingActive": "FailedGetExternalMetric"}
    assert json.loads(examples.kubectl("get", "cg", "orders", "-o", "json"))["spec"]["replicas"] == 3
    installation.node.kubectl("delete", "-f", str(EXAMPLES / "scaling" / "hpa.yaml"))
    examples.kubectl("delete", "cg", "orders", "--wait=false")


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
    examples.wait_settled("billing", PODS)
    sent = messages("inject")
    examples.send("orders", sent)
    expected = [message.body for message in sent]
    printed = examples.wait_printed("rota.dev/group=billing", "inject", expected)
    assert count_bodies(printed) == dict.fromkeys(expected, 1)
    # Another example uses this group name at the broker: these members would be unmanaged consumers of its group.
    examples.kubectl("delete", "deploy", "shop", "--cascade=foreground", f"--timeout={TIMEOUT_SECONDS}s")
