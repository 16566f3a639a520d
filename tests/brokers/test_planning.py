"""`rota plan --name-server`: a plan for a group that Rota does not run yet, by the queues that there really are."""

import json
import secrets

import pytest
import yaml
from click.testing import CliRunner

from ground import peers
from ground.poll import eventually
from ground.rocketmq import RocketMQ
from rota.cli import main


def rota(group: str, topics: list[str], *words: str) -> str:
    spec = {
        "broker": {"rocketmq": {"nameServers": ["elsewhere:9876"]}},
        "subscriptions": [{"topic": topic} for topic in topics],
    }
    feed = yaml.safe_dump({"kind": "ConsumerGroup", "metadata": {"name": group}, "spec": spec})
    ran = CliRunner().invoke(main, ["plan", "-f", "-", "--members", "2", *words], input=feed)
    assert (ran.exit_code, ran.stderr) == (0, "")
    return ran.stdout


@pytest.mark.parametrize("form", [[], ["-o", "json"]], ids=["table", "json"])
def test_queues_are_those_that_the_brokers_have_and_who_works_them_is_noted(
    rocketmq: RocketMQ, form: list[str]
) -> None:
    topic = f"planned-{secrets.token_hex(3)}"
    rocketmq.create_topic(topic, 5)
    where = ("--name-server", rocketmq.name_server, *form)
    java = peers.push_consumer(rocketmq, topic, topic, instance="java")
    try:
        eventually(lambda: java.lines("rebalance"), 60)
        told = rota(topic, [topic, "nowhere"], *where)
    finally:
        java.stop()
    assert "unseen: there is no queue of nowhere" in told
    assert "online: 1 consumer in the group now: " in told
    if form:
        shares = json.loads(told)["members"]
        assert [[*share[topic].values()] for share in shares.values()] == [["0-2"], ["3-4"]]
