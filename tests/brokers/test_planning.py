"""`rota plan --name-server`: a plan for a group that Rota does not run yet, with the real queues of its topics."""

import json
import secrets

import pytest
import yaml
from click.testing import CliRunner

from ground import peers
from ground.poll import eventually
from ground.rocketmq import RocketMQ
from rota.cli import main


def rota(group: str, topics: list[str], *words: str, members: str = "2") -> str:
    spec = {
        "policyRef": {"name": "p"},
        "broker": {"rocketmq": {"nameServers": ["elsewhere:9876"]}},
        "subscriptions": [{"topic": topic} for topic in topics],
    }
    policy = {"kind": "RebalancePolicy", "metadata": {"name": "p"}, "spec": {"strategy": "Averagely"}}
    feed = yaml.safe_dump_all([{"kind": "ConsumerGroup", "metadata": {"name": group}, "spec": spec}, policy])
    ran = CliRunner().invoke(main, ["plan", "-f", "-", "--members", members, *words], input=feed)
    assert (ran.exit_code, ran.stderr) == (0, "")
    return ran.stdout


@pytest.mark.parametrize("form", [[], ["-o", "json"]], ids=["table", "json"])
def test_cli_plan_uses_the_queues_of_the_brokers_and_notes_online_consumers(
    rocketmq: RocketMQ, form: list[str]
) -> None:
    topic = f"planned-{secrets.token_hex(3)}"
    rocketmq.create_topic(topic, 5)
    where = ("--name-server", rocketmq.name_server, *form)
    java = peers.push_consumer(rocketmq, topic, topic, instance="java")
    try:
        eventually(lambda: java.lines("rebalance"))
        printed = rota(topic, [topic, "nowhere"], *where)
    finally:
        java.stop()
    assert "unknown: topics without queues: nowhere" in printed
    assert "connected: 1 consumer in the group now: " in printed
    if form:
        shares = json.loads(printed)["members"]
        assert [[*share[topic].values()] for share in shares.values()] == [["0-2"], ["3-4"]]


def test_cli_plan_gives_each_member_as_many_queues_as_mqadmin(rocketmq: RocketMQ) -> None:
    topic = f"allocated-{secrets.token_hex(3)}"
    members = "10.0.0.1,10.0.0.2,10.0.0.3"
    rocketmq.create_topic(topic, 8)
    where = ("--name-server", rocketmq.name_server, "-o", "json")
    shares = json.loads(rota(topic, [topic], *where, members=members))["members"]
    printed = rocketmq.mqadmin("allocateMQ", "-t", topic, "-i", members)
    allocated = json.loads(printed[printed.index("{") :])["result"]
    assert [len(allocated[name]) for name in members.split(",")] == [
        3,
        3,
        2,
    ]  # which queues is random: mqadmin does not sort them
    assert [[*share[topic].values()] for share in shares.values()] == [["0-2"], ["3-5"], ["6-7"]]  # as clients do
