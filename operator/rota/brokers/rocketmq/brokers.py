"""RocketMQ brokers as the operator uses them: implements the broker port's `Brokers` for one cluster."""

import time
from collections.abc import Collection, Mapping
from itertools import groupby, starmap
from operator import attrgetter
from secrets import choice

from rota.brokers.errors import MalformedResponseError, NotFoundError, RejectedError
from rota.brokers.port import BrokerGroupSettings, BrokerOffsets, OffsetRange, OnlineConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig, RoutingClient
from rota.brokers.rocketmq.transport.responses import (
    decode_body,
    error_of,
    gather_results,
    int_field,
    parse_queue_table,
    remark_of,
    require_success,
)
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import STORED_CODES, ResponseCode
from rota.model import Queue
from rota.spec import Subscription
from rota.spec.consumer_settings import ConsumerSettings, Model, Start

PRODUCER_GROUP = "rota"
# For `version_name`: the first and the last index of the ordered part of RocketMQ's list of versions.
MIN_ORDERED_VERSION = 194
MAX_ORDERED_VERSION = 611
# A snapshot and its release have adjacent indices, so index // 2 counts versions. Index 433 is V5_1_0, number 510.
VERSION_NUMBER_OFFSET = 510 - 433 // 2
MAX_ONLINE_CONSUMERS = 20_000  # consumers of a group at a broker: Rota's limit of members, plus as many unmanaged ones
RELAY_TIMEOUT_SECONDS = 12.0  # the broker itself waits 10 s for the consumer's response
MAX_SUBSCRIPTION_CHARACTERS = 16 * 1024  # characters of all topics and filters of a consumer
STATS_SECONDS = 10.0  # timeout of requests that are slow, since the broker computes statistics for them

_MODELS: Mapping[str, Model] = {"CLUSTERING": "Clustering", "BROADCASTING": "Broadcasting"}
# The last three are deprecated; the Java client treats them as CONSUME_FROM_LAST_OFFSET.
_STARTS: Mapping[str, Start] = {
    "CONSUME_FROM_LAST_OFFSET": "Latest",
    "CONSUME_FROM_FIRST_OFFSET": "Earliest",
    "CONSUME_FROM_TIMESTAMP": "Timestamp",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST": "Latest",
    "CONSUME_FROM_MIN_OFFSET": "Latest",
    "CONSUME_FROM_MAX_OFFSET": "Latest",
}


class RocketMQBrokers:
    """Client of one cluster, which connects on the first request. It joins no group, so brokers do not list it."""

    def __init__(self, config: ConnectionConfig) -> None:
        self._client = RoutingClient(config, handle_request=lambda _: None)

    def reconnect(self) -> None:
        self._client.connections.renew()

    async def close(self) -> None:
        self._client.close()

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        return (await self._client.fetch_route(topic)).queues()

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        return (await self._client.fetch_route(topic)).queue_counts

    async def broker_names(self) -> tuple[str, ...]:
        return tuple(sorted(await self._client.fetch_brokers()))

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        return self._client.addresses(brokers)

    async def online_consumers(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        """Return the consumers of a group that are online at a broker; too many raise `MalformedResponseError`."""
        try:
            response = await self._client.call_or_raise(broker, requests.connections(group))
        except RejectedError as error:
            if error.code == ResponseCode.CONSUMER_NOT_ONLINE:
                return ()
            raise
        peers = decode_body(response, payloads.ConsumerConnection).connection_set
        if len(peers) > MAX_ONLINE_CONSUMERS:
            limit = f"at most {MAX_ONLINE_CONSUMERS:,} are supported"
            raise MalformedResponseError(f"Broker {broker} lists {len(peers):,} consumers of group {group}; {limit}")
        return tuple(map(_to_online_consumer, peers))

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return a consumer's own settings; its broker relays the request and waits 10 s for the response."""
        response = await self._client.call_or_raise(
            broker, requests.running_info(group, client_id), RELAY_TIMEOUT_SECONDS
        )
        info = decode_body(response, payloads.ConsumerInfo)
        if sum(map(_text_length, info.subscription_set)) > MAX_SUBSCRIPTION_CHARACTERS:
            limit = f"{MAX_SUBSCRIPTION_CHARACTERS:,} characters"
            raise MalformedResponseError(f"The subscriptions of consumer {client_id[:100]} are longer than {limit}")
        subscriptions = sorted(
            map(_to_subscription, info.subscription_set), key=lambda subscription: subscription.topic
        )
        model = _MODELS.get(info.properties.get("messageModel", ""), "")
        start = _STARTS.get(info.properties.get("consumeFromWhere", ""), "")
        return ConsumerSettings(tuple(subscriptions), model, start)

    async def group_settings(self, group: str, broker: str) -> BrokerGroupSettings:
        response = await self._client.call_or_raise(broker, requests.group_config(group))
        config = decode_body(response, payloads.GroupConfig)
        return BrokerGroupSettings(
            config.consume_enable, config.consume_broadcast_enable, config.retry_queue_nums, config.retry_max_times
        )

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        response = await self._client.call_or_raise(
            broker, requests.consume_stats(group, topics), seconds=STATS_SECONDS
        )
        return parse_queue_table(decode_body(response, payloads.ConsumeStats).offset_table, _to_broker_offsets)

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        response = await self._client.call(queue.broker, requests.committed_offset(group, queue))
        if response.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return int_field(require_success(f"The offset of {queue}", response), "offset")

    async def offset_at_time(self, queue: Queue, timestamp: float) -> int:
        request = requests.offset_at_time(queue, round(timestamp * 1000))
        return int_field(await self._client.call_or_raise(queue.broker, request), "offset")

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        response = await self._client.call_or_raise(broker, requests.topic_stats(topic), seconds=STATS_SECONDS)
        return parse_queue_table(decode_body(response, payloads.TopicStats).offset_table, _to_offset_range)

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        queue = await self._choose_queue(topic, queue)
        born = int(time.time() * 1000)
        request = requests.send(
            PRODUCER_GROUP, topic, body, properties or {}, broker=queue.broker, queue_id=queue.id, born_ms=born
        )
        response = await self._client.call(queue.broker, request)
        if response.code == ResponseCode.INVALID_PARAMETER:
            raise NotFoundError(f"There is no queue {queue}: {remark_of(response)}")
        if response.code not in STORED_CODES:
            raise error_of(f"Sending to {queue}", response)

    async def _choose_queue(self, topic: str, queue: Queue | None) -> Queue:
        """Return the queue to send to; raise `NotFoundError` for a missing topic, which a broker would create."""
        if queue is None:
            queues = await self.queues(topic)
            if not queues:
                raise RejectedError(f"Topic {topic} has no readable queue, so the message was not sent")
            return choice(queues)
        if queue.topic != topic:
            raise ValueError(f"{queue} is not a queue of topic {topic}")
        await self._client.require_queue(queue)
        await self._client.recheck_queue(queue)  # the cached route may be old
        return queue

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Release queue locks on behalf of a member that has ended; try every broker before raising an error."""
        broker_of = attrgetter("broker")
        by_broker = groupby(sorted(queues, key=broker_of), key=broker_of)
        calls = [(broker, requests.unlock(group, client_id, locked)) for broker, locked in by_broker]
        _, failed = await gather_results(starmap(self._client.call_or_raise, calls))
        if failed:
            raise failed[0]


def _to_online_consumer(peer: payloads.Peer) -> OnlineConsumer:
    return OnlineConsumer(peer.client_id, peer.client_addr, peer.language, version_name(peer.version))


def _to_broker_offsets(row: payloads.OffsetWrapper) -> BrokerOffsets:
    return BrokerOffsets(row.broker_offset, row.consumer_offset, row.pull_offset, _to_unix_seconds(row.last_timestamp))


def _to_offset_range(row: payloads.TopicOffset) -> OffsetRange:
    return OffsetRange(row.min_offset, row.max_offset, _to_unix_seconds(row.last_update_timestamp))


def _to_unix_seconds(timestamp_ms: int) -> float:
    """Return a time in seconds; 0 for an unknown one, which brokers report as 0 or -1."""
    return max(timestamp_ms, 0) / 1000


def _text_length(subscribed: payloads.Subscribed) -> int:
    return len(subscribed.topic) + len(subscribed.sub_string or "")


def _to_subscription(subscribed: payloads.Subscribed) -> Subscription:
    is_by_tag = (subscribed.expression_type or "TAG") == "TAG"
    return Subscription(subscribed.topic, subscribed.sub_string or "*", "Tag" if is_by_tag else "SQL92")


def version_name(version: int) -> str:
    """Return the name of a client's version; on the wire it is an index in RocketMQ's list, MQVersion.

    From index 194 on the list is in order, each version preceded by its snapshot; the last index is 611, V5_9_9.
    """
    if not MIN_ORDERED_VERSION <= version <= MAX_ORDERED_VERSION:
        return str(version)
    number = version // 2 + VERSION_NUMBER_OFFSET
    return f"V{'_'.join(str(number))}" + ("_SNAPSHOT" if version % 2 == 0 else "")
