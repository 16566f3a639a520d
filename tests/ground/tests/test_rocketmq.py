"""The broker of the ground, and its Java peers."""

import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from ground import java
from ground.fixtures import skip_what_is_missing
from ground.instance import temporary
from ground.peers import Peer, producer, push_consumer
from ground.poll import eventually
from ground.report import Missing
from ground.rocketmq import NAME_SERVER, RocketMQ

MESSAGES = 300
QUICK = {"poll": 500}  # routes are polled twice a second, not twice a minute


@pytest.fixture(scope="module")
def pair() -> Iterator[RocketMQ]:
    """Start a second ground with two brokers, whose brokers may be killed."""
    with temporary("pair") as instance:
        brokers = RocketMQ(instance, brokers=2, settings={"autoCreateTopicEnable": False})
        brokers.up()
        yield brokers
        brokers.down()


def need_peers() -> None:
    with (
        nullcontext() if java.javac() else skip_what_is_missing()
    ):  # peers that do not compile are a failure, not a skip
        java.classes()


@pytest.fixture(scope="module")
def consumer(rocketmq: RocketMQ) -> Peer:
    """Send numbered messages to a topic that a group of one consumer consumes, commits included."""
    need_peers()
    rocketmq.create_topic("numbers", 4)
    receiver = push_consumer(rocketmq, "counters", "numbers")
    sender = producer(rocketmq, "numbers", MESSAGES, tags="odd,even")
    eventually(lambda: sender.done)
    eventually(lambda: len(receiver.numbers()) >= MESSAGES)
    receiver.stop()
    return receiver


def test_broker_delivers_each_message_of_a_java_producer_to_a_java_consumer_once(consumer: Peer) -> None:
    assert sorted(consumer.numbers()) == list(range(MESSAGES))


def test_broker_java_consumer_reports_its_rebalance(consumer: Peer) -> None:
    queues = [line["queues"] for line in consumer.lines("rebalance") if line["topic"] == "numbers"]  # no retry topic
    assert queues[-1] == "broker-0:0 broker-0:1 broker-0:2 broker-0:3"


def test_broker_mqadmin_prints_the_progress_of_a_group(rocketmq: RocketMQ, consumer: Peer) -> None:
    printed = rocketmq.mqadmin("consumerProgress", "-g", "counters").splitlines()
    rows = [line.split() for line in printed if line.startswith("numbers ")]
    assert [row[2] for row in rows] == ["0", "1", "2", "3"]
    assert sum(int(row[4]) for row in rows) == len(consumer.numbers())
    assert "Consume Diff Total: 0" in printed


@pytest.mark.slow("RocketMQ of the ground with two brokers")
def test_topic_has_its_queues_on_each_broker_it_was_created_on(pair: RocketMQ) -> None:
    pair.create_topic("everywhere", 3)
    pair.create_topic("somewhere", 5, brokers=[1])
    assert pair.queues("everywhere") == {"broker-0": 3, "broker-1": 3}
    assert pair.queues("somewhere") == {"broker-1": 5}


@pytest.mark.slow("a topic of the ground grows on two brokers")
def test_topic_can_grow_in_queues(pair: RocketMQ) -> None:
    pair.create_topic("growing", 2)
    pair.create_topic("growing", 6)
    assert pair.queues("growing") == {"broker-0": 6, "broker-1": 6}


def test_topic_that_is_deleted_has_no_queues(pair: RocketMQ) -> None:
    pair.create_topic("passing", 1)
    pair.delete_topic("passing")
    assert pair.queues("passing") == {}


def test_ground_brokers_are_isolated_from_other_grounds(rocketmq: RocketMQ, pair: RocketMQ) -> None:
    rocketmq.create_topic("private", 1)
    assert pair.queues("private") == {}
    assert rocketmq.address != pair.address


@pytest.mark.slow("settings of the ground's RocketMQ")
def test_broker_settings_are_applied(pair: RocketMQ) -> None:
    printed = pair.mqadmin("getBrokerConfig", "-b", pair.brokers[0].endpoint).splitlines()
    assert ["autoCreateTopicEnable", "=", "false"] in [line.split() for line in printed]


@pytest.mark.slow("a Java consumer outlives a broker that moves")
def test_broker_restart_on_another_port_loses_no_message_of_a_consumer(pair: RocketMQ) -> None:
    need_peers()
    pair.create_topic("interrupted", 2)
    receiver = push_consumer(pair, "patient", "interrupted", **QUICK)
    sender = producer(pair, "interrupted", 400, rate=100, sharded=True, **QUICK)
    eventually(receiver.numbers)
    pair.kill_broker(0)
    pair.start_broker(0, port=pair.brokers[0].port + 5)
    eventually(lambda: sender.done)
    eventually(lambda: set(receiver.numbers()) == set(range(400)))
    receiver.stop()


@pytest.mark.slow("RocketMQ of the ground on a port that is in use")
def test_broker_names_a_busy_port(pair: RocketMQ) -> None:
    pair.kill_broker(1)
    broker = pair.brokers[1]
    with socket.create_server((broker.address, broker.port - 2)), pytest.raises(Missing, match=str(broker.port - 2)):
        pair.start_broker(1)
    pair.start_broker(1)


def test_broker_writes_nothing_outside_the_instance_folder(rocketmq: RocketMQ) -> None:
    """By default RocketMQ writes into the user's home."""
    folder = str(rocketmq.instance.folder)
    running = [rocketmq.instance.process(name) for name in (NAME_SERVER, rocketmq.brokers[0].name)]
    written = [path for process in running if process for path in _written(process.pid)]
    assert all(running)
    assert written
    assert [path for path in written if not path.startswith(folder)] == []


def _written(pid: int) -> Iterator[str]:
    """Yield the files that a process has open for writing."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            target = str(entry.readlink())
            flags = int(Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().split("flags:")[1].split()[0], 8)
            if target.startswith("/") and not target.startswith("/dev/") and flags & os.O_ACCMODE:
                yield target
