"""From the chart and the Dockerfile to groups that are looked after: installed as people install it, on a real node."""

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
from e2e.release import SECONDS, SHOP, Installed
from ground.ours import at_rest
from ground.poll import eventually
from ground.programs import program
from ground.rocketmq import RocketMQ

pytestmark = pytest.mark.node

QUEUES, SOME = 8, 100  # messages
EVENTS = f"--field-selector=involvedObject.name={SHOP}"
POLICY = {"kind": "RebalancePolicy", "metadata": {"name": "there"}, "spec": {"strategy": "Sticky"}}
SECRET = {"kind": "Secret", "metadata": {"name": "acl"}, "stringData": {"accessKey": "shop", "secretKey": "12345678"}}
GROUP = {
    "kind": "ConsumerGroup",
    "metadata": {"name": SHOP},
    "spec": {
        "broker": {"rocketmq": {"nameServers": ["127.0.0.1:9876"], "credentialsSecret": {"name": "acl"}}},
        "subscriptions": [{"topic": "orders"}],
        "policyRef": {"name": "there"},
        "replicas": 0,
        "template": {"spec": {"containers": [{"name": "app", "image": "app"}]}},
    },
}
# An app as somebody may have one who has just read the NOTES: it is done with whatever comes to port 8080.
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
def test_leader_election_chooses_one_of_two_running_operators(installed: Installed) -> None:
    assert installed.home("get", "deploy", "rota", "-o", "jsonpath={.status.readyReplicas}") == "2"
    assert eventually(installed.leader, SECONDS) in installed.pods()
    assert len(installed.pods()) == 2


def test_page_is_served_to_its_user_by_rota_page(installed: Installed, unused_tcp_port: int) -> None:
    eventually(installed.leader, SECONDS)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    argv = [sys.executable, "-m", "rota.cli", "page", "--port", str(unused_tcp_port)]
    env = {**os.environ, "KUBECONFIG": str(installed.node.kubeconfig)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout
            assert f"The page is at {url}/ until Ctrl-C" in serving.stdout.readline()
            with urllib.request.urlopen(f"{url}/") as answer:
                assert "<title>" in answer.read().decode()
            with urllib.request.urlopen(f"{url}/v1/groups") as answer:
                assert json.load(answer)["operator"]["leads"]
            with urllib.request.urlopen(f"{url}/v1/events") as answer:
                assert answer.readline() == b": here\n"
        finally:
            serving.terminate()


def test_chart_helm_test_of_the_release_succeeds(installed: Installed) -> None:
    assert "Succeeded" in installed.release("test", f"--timeout={SECONDS}s")


def test_condition_and_events_of_a_group_are_published_with_the_charts_rbac(installed: Installed) -> None:
    installed.apply(POLICY, SECRET, GROUP)
    eventually(lambda: installed.conditions(SHOP).get("BrokerUnreachable"), SECONDS)
    told = installed.conditions(SHOP)
    assert told["Degraded"] == ("True", "BrokerUnreachable")
    assert not {"MissingPolicy", "MissingSecret", "TemplateRejected"} & {*told}
    eventually(lambda: installed.shop("get", "deploy", SHOP, "--ignore-not-found"), SECONDS)
    eventually(lambda: installed.shop("get", "events", EVENTS, "-o", "name"), SECONDS)
    assert "is forbidden: User" not in installed.log()
    installed.shop("delete", "cg", SHOP)


@pytest.fixture
def orders(installed: Installed, broker: RocketMQ) -> Iterator[Traffic]:
    """Have a name server and a topic as the chart's NOTES name them, and end the group that is made by them."""
    installed.serve("default", "rmq-namesrv", broker.name_server)
    broker.create_topic("orders", QUEUES)
    yield Traffic(broker.name_server, "billing", "orders", QUEUES)
    installed.node.kubectl("delete", "cg", "billing", "--ignore-not-found")


@pytest.mark.slow("the group of the chart's notes consumes on a node")
def test_chart_notes_first_group_consumes_each_message_once(installed: Installed, orders: Traffic) -> None:
    notes = installed.release("get notes")
    (told,) = re.findall(r"^  kubectl apply .*?^  EOF$", notes, re.MULTILINE | re.DOTALL)
    ours = f"image: rota.local/sidecar:test, command: {json.dumps(['python', '-c', APP])}"
    command, replaced = re.subn(
        r"- name: app\n +image: your-app:1.0 .*", lambda _: f"- {{name: app, {ours}}}", dedent(told)
    )
    assert replaced == 1
    path = f"{program('kubectl').parent}:{os.environ['PATH']}"
    env = {**os.environ, "KUBECONFIG": str(installed.node.kubeconfig), "PATH": path}
    subprocess.run(["bash", "-euc", command], env=env, check=True)
    group = ("get", "cg", "billing", "-o", "json")
    eventually(lambda: at_rest(json.loads(installed.node.kubectl(*group)), 3), SECONDS)
    members = installed.rota("members", "default/billing")["members"]
    assert [(it["origin"], it["state"]) for it in members] == [("Rota", "Ready")] * 3

    def came() -> Counter[int]:
        log = ("logs", "--selector=rota.dev/group=billing", "--container=app", "--tail=-1")
        return Counter(map(int, installed.node.kubectl(*log).split()))

    with orders.flowing():
        eventually(lambda: len(orders.sent) > SOME, SECONDS)
    wanted = dict.fromkeys((it.number for it in orders.sent), 1)
    eventually(lambda: came().keys() == wanted.keys(), SECONDS)
    assert came() == wanted
