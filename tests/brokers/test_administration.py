"""Administrative requests, and requests of members that only a real broker supports."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest

from ground.poll import PATIENCE_SECONDS
from ground.rocketmq import RocketMQ
from rota.brokers.errors import NotFoundError, RejectedError
from rota.brokers.port import ConsumedQueue, Membership
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.model import Queue
from rota.spec import Subscription

BROKER = "broker-0"
TOPIC = "administered"
GROUP = "administrators"
CLIENT = "10.0.0.1@orders-1#1"
QUEUES = tuple(Queue(TOPIC, BROKER, number) for number in range(3))


@pytest.fixture
async def cluster(rocketmq: RocketMQ) -> AsyncIterator[AdminClient]:
    opened = AdminClient(ConnectionConfig([rocketmq.name_server]))
    await opened.create_topic(TOPIC, BROKER, len(QUEUES))
    yield opened
    await opened.close()


@pytest.fixture
async def member(rocketmq: RocketMQ, cluster: AdminClient) -> AsyncIterator[RocketMQConsumer]:
    assert await cluster.queues(TOPIC) == QUEUES
    membership = Membership(
        group=GROUP,
        client_id=CLIENT,
        subscriptions=[Subscription(topic=TOPIC, expression="red || blue")],
        get_queues=lambda: {
            QUEUES[1]: ConsumedQueue(committed_offset=7, buffered_messages=2, buffered_bytes=3 * 2**20, locked=True)
        },
    )
    joined = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), membership)
    await joined.join()
    yield joined
    await joined.leave()


async def test_topic_can_be_created_changed_and_read(cluster: AdminClient) -> None:
    await cluster.create_topic("grows", BROKER, 2)
    assert len(await cluster.queues("grows")) == 2
    await cluster.create_topic("grows", BROKER, 5, perm=2)
    assert (await cluster.topic_config("grows", BROKER)).read_queue_nums == 5
    assert await cluster.queues("grows") == (), "the topic is write-only"
    with pytest.raises(NotFoundError, match="GET_TOPIC_CONFIG of nope at broker-0"):
        await cluster.topic_config("nope", BROKER)
    with pytest.raises(RejectedError):
        await cluster.create_topic("not a name", BROKER, 1)


async def test_settings_of_a_group_that_an_update_does_not_name_are_kept(cluster: AdminClient) -> None:
    await cluster.update_group("careful", BROKER, retryMaxTimes=3)
    await cluster.update_group("careful", BROKER, consumeEnable=False)
    assert await cluster.group_settings("careful", BROKER) == (False, True, 1, 3)
    config: Mapping[str, object] = await cluster.group_config("careful", BROKER)
    assert config["groupName"] == "careful"
    assert config["retryMaxTimes"] == 3


async def test_settings_update_of_a_group_keeps_its_attributes(cluster: AdminClient) -> None:
    await cluster.update_group("marked", BROKER, attributes={"+priority.factor": "5"})
    attributes = (await cluster.group_config("marked", BROKER))["attributes"]
    assert attributes
    await cluster.update_group("marked", BROKER, retryMaxTimes=3)
    config = await cluster.group_config("marked", BROKER)
    assert (config["attributes"], config["retryMaxTimes"]) == (attributes, 3)


@pytest.mark.usefixtures("member")
async def test_member_running_info_is_returned_by_its_broker(cluster: AdminClient) -> None:
    info = await cluster.running_info(GROUP, CLIENT, BROKER)
    ((key, queue),) = info["mqTable"].items()
    assert key == '{"topic":"administered","brokerName":"broker-0","queueId":1}'
    assert (queue["commitOffset"], queue["cachedMsgCount"], queue["cachedMsgSizeInMiB"], queue["locked"]) == (
        7,
        2,
        3,
        1,
    )
    tags = {subscription["topic"]: subscription["tagsSet"] for subscription in info["subscriptionSet"]}
    assert tags == {TOPIC: ["blue", "red"], f"%RETRY%{GROUP}": []}
    assert info["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"


@pytest.mark.usefixtures("member")
async def test_member_ids_are_listed_once_each(rocketmq: RocketMQ, cluster: AdminClient) -> None:
    membership = Membership(group=GROUP, client_id=CLIENT, subscriptions=[Subscription(topic=TOPIC)])
    again = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), membership)
    await again.join()
    assert await cluster.client_ids(GROUP, BROKER) == (CLIENT,)
    assert [consumer.client_id for consumer in await cluster.online_consumers(GROUP, BROKER)] == [CLIENT, CLIENT]
    assert await cluster.client_ids("deserted", BROKER) == ()
    await again.leave()


@pytest.mark.usefixtures("member")
async def test_broker_side_assignment_is_returned_for_pull_and_pop_mode(cluster: AdminClient) -> None:
    assert await cluster.query_assignment(TOPIC, GROUP, CLIENT, BROKER) == QUEUES
    assert await cluster.query_assignment(TOPIC, GROUP, CLIENT, BROKER, "No such strategy") is None
    await cluster.set_consume_mode(TOPIC, GROUP, BROKER, "POP")
    assert await cluster.query_assignment(TOPIC, GROUP, CLIENT, BROKER) == (Queue(TOPIC, BROKER, -1),)
    await cluster.set_consume_mode(TOPIC, GROUP, BROKER, "PULL")
    assert await cluster.query_assignment(TOPIC, GROUP, CLIENT, BROKER) == QUEUES


async def test_broker_settings_are_returned(cluster: AdminClient) -> None:
    config = await cluster.broker_config(BROKER)
    assert config["brokerName"] == BROKER
    assert config["enablePropertyFilter"] == "false"


async def test_offset_reset_is_pushed_to_a_member_if_the_broker_is_configured_so(
    rocketmq: RocketMQ, cluster: AdminClient
) -> None:
    resets: asyncio.Queue[Mapping[Queue, int]] = asyncio.Queue()
    subscribed = [Subscription(topic=TOPIC)]
    membership = Membership(
        group="pushed", client_id=CLIENT, subscriptions=subscribed, on_offsets_reset=resets.put_nowait
    )
    listening = RocketMQConsumer(ConnectionConfig([rocketmq.name_server]), membership)
    await cluster.update_broker_config(BROKER, useServerSideResetOffset=False)
    try:
        await listening.join()
        for queue in QUEUES:  # without offsets the broker rejects the reset: it does not know the group
            await listening.commit(queue, 0)
        await cluster.send(TOPIC, b"something", queue=QUEUES[0])
        offsets = await cluster.reset_offsets("pushed", TOPIC, BROKER, timestamp=0)
        assert set(offsets) == set(QUEUES)
        assert await asyncio.wait_for(resets.get(), PATIENCE_SECONDS) == offsets
    finally:
        await listening.leave()
        await cluster.update_broker_config(BROKER, useServerSideResetOffset=True)
