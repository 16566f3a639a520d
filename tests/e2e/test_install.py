"""From the chart and the Dockerfile to managed groups: installed as users install it, on a real node."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from textwrap import dedent

import pytest

from e2e.deliveries import Traffic
from e2e.release import TIMEOUT_SECONDS, Installation
from ground.ours import at_rest
from ground.poll import eventually
from ground.programs import program
from ground.rocketmq import RocketMQ

pytestmark = pytest.mark.node

QUEUES = 8
MESSAGES = 100
GROUP_NAME = "shop"
EVENTS = f"--field-selector=involvedObject.name={GROUP_NAME}"
POLICY = {"kind": "RebalancePolicy", "metadata": {"name": "there"}, "spec": {"strategy": "Sticky"}}
SECRET = {"kind": "Secret", "metadata": {"name": "acl"}, "stringData": {"accessKey": "shop", "secretKey": "12345678"}}
GROUP = {
    "kind": "ConsumerGroup",
    "metadata": {"name": GROUP_NAME},
    "spec": {
        "broker": {"rocketmq": {"nameServers": ["127.0.0.1:9876"], "credentialsSecret": {"name": "acl"}}},
        "subscriptions": [{"topic": "orders"}],
        "policyRef": {"name": "there"},
        "replicas": 0,
        "template": {"spec": {"containers": [{"name": "app", "image": "app"}]}},
    },
}
# A first app of a reader of the NOTES: it accepts each request to port 8080.
APP = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class App(BaseHTTPRequestHandler):
    def do_POST(self):
        print(self.rfile.read(int(self.headers["content-length"])).decode().split()[0], flush=True)
        self.send_response(204)
        self.end_headers()
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", 8080), App).serve_forever()
"""


@pytest.mark.slow("on a node, one of two operators leads")
def test_leader_election_chooses_one_of_two_running_operators(installation: Installation) -> None:
    assert installation.operator_kubectl("get", "deploy", "rota", "-o", "jsonpath={.status.readyReplicas}") == "2"
    assert eventually(installation.leader, TIMEOUT_SECONDS) in installation.pods()
    assert len(installation.pods()) == 2


def test_page_is_served_to_its_user_by_rota_page(installation: Installation, unused_tcp_port: int) -> None:
    eventually(installation.leader, TIMEOUT_SECONDS)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    argv = [sys.executable, "-m", "rota.cli", "page", "--port", str(unused_tcp_port)]
    env = {**os.environ, "KUBECONFIG": str(installation.node.kubeconfig)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout
            assert f"The page is at {url}/ until Ctrl-C" in serving.stdout.readline()
            with urllib.request.urlopen(f"{url}/") as response:
                assert "<title>" in response.read().decode()
            with urllib.request.urlopen(f"{url}/v1/groups") as response:
                assert json.load(response)["operator"]["leads"]
            with urllib.request.urlopen(f"{url}/v1/events") as response:
                assert response.readline() == b": here\n"
        finally:
            serving.terminate()


def test_chart_helm_test_of_the_release_succeeds(installation: Installation) -> None:
    assert "Succeeded" in installation.helm_release("test", f"--timeout={TIMEOUT_SECONDS}s")


def test_condition_and_events_of_a_group_are_published_with_the_charts_rbac(installation: Installation) -> None:
    installation.apply(POLICY, SECRET, GROUP)
    eventually(lambda: installation.conditions(GROUP_NAME).get("BrokerUnreachable"), TIMEOUT_SECONDS)
    conditions = installation.conditions(GROUP_NAME)
    assert conditions["Degraded"] == ("True", "BrokerUnreachable")
    assert not {"MissingPolicy", "MissingSecret", "TemplateRejected"} & {*conditions}
    eventually(lambda: installation.group_kubectl("get", "deploy", GROUP_NAME, "--ignore-not-found"), TIMEOUT_SECONDS)
    eventually(lambda: installation.group_kubectl("get", "events", EVENTS, "-o", "name"), TIMEOUT_SECONDS)
    assert "is forbidden: User" not in installation.log()
    installation.group_kubectl("delete", "cg", GROUP_NAME)


@pytest.fixture
def orders(installation: Installation, broker: RocketMQ) -> Iterator[Traffic]:
    """Provide the name server and the topic of the chart's NOTES, and delete the group that they create."""
    installation.create_name_server_service("default", "rmq-namesrv", broker.name_server)
    broker.create_topic("orders", QUEUES)
    yield Traffic(broker.name_server, "billing", "orders", QUEUES)
    installation.node.kubectl("delete", "cg", "billing", "--ignore-not-found")


@pytest.mark.slow("the group of the chart's notes consumes on a node")
def test_chart_notes_first_group_consumes_each_message_once(installation: Installation, orders: Traffic) -> None:
    notes = installation.helm_release("get notes")
    (apply_command,) = re.findall(r"^  kubectl apply .*?^  EOF$", notes, re.MULTILINE | re.DOTALL)
    app_image = f"image: rota.local/sidecar:test, command: {json.dumps(['python', '-c', APP])}"
    command, replaced = re.subn(
        r"- name: app\n +image: your-app:1.0 .*", lambda _: f"- {{name: app, {app_image}}}", dedent(apply_command)
    )
    assert replaced == 1
    path = f"{program('kubectl').parent}:{os.environ['PATH']}"
    env = {**os.environ, "KUBECONFIG": str(installation.node.kubeconfig), "PATH": path}
    subprocess.run(["bash", "-euc", command], env=env, check=True)
    group = ("get", "cg", "billing", "-o", "json")
    eventually(lambda: at_rest(json.loads(installation.node.kubectl(*group)), 3), TIMEOUT_SECONDS)
    members = installation.run_rota("members", "default/billing")["members"]
    assert [(member["origin"], member["state"]) for member in members] == [("Rota", "Ready")] * 3

    def received() -> Counter[int]:
        log = ("logs", "--selector=rota.dev/group=billing", "--container=app", "--tail=-1")
        return Counter(map(int, installation.node.kubectl(*log).split()))

    with orders.flowing():
        eventually(lambda: len(orders.sent) > MESSAGES, TIMEOUT_SECONDS)
    expected = dict.fromkeys((message.number for message in orders.sent), 1)
    eventually(lambda: received().keys() == expected.keys(), TIMEOUT_SECONDS)
    assert received() == expected
