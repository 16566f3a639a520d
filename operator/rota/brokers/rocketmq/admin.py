"""RocketMQ admin client: the operator's `Brokers` interface, and administrative requests for tools and tests."""

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import groupby
from secrets import choice
from typing import Any

from rota.brokers.errors import MalformedResponseError, NotFoundError, RejectedError
from rota.brokers.port import BrokerGroupSettings, BrokerOffsets, OffsetRange, OnlineConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig, RoutingClient
from rota.brokers.rocketmq.transport.responses import (
    decode_body,
    error_of,
    gather_results,
    int_field,
    parse_queue_keys,
    remark_of,
    require_success,
)
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import READ_WRITE, STORED_CODES, ResponseCode
from rota.model import Queue
from rota.spec import Subscription
from rota.spec.consumer_settings import ConsumerSettings, Model, Start

PRODUCER_GROUP = "rota"
NO_CONSUMER_REMARK = "no consumer for this group"  # remark of a broker's response; the code is the generic SYSTEM_ERROR
MIN_ORDERED_VERSION = 194
MAX_ORDERED_VERSION = 611
VERSION_NUMBER_OFFSET = 217 - 510  # 433 // 2 + 1 = 217 is V5_1_0
MAX_ONLINE_CONSUMERS = 20_000  # consumers of a group at a broker: Rota's limit of members, plus as many unmanaged ones
RELAY_TIMEOUT_SECONDS = 12.0  # the broker itself waits 10 s for the consumer's response
MAX_SUBSCRIPTION_CHARACTERS = 16 * 1024  # characters of all topics and filters of a consumer
STATS_SECONDS = 10.0  # a slow request: the broker computes statistics; requests to other brokers do not wait

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


class AdminClient:
    """Client of one cluster, connected on the first request; it joins no group, so brokers list it as no member."""

    def __init__(self, config: ConnectionConfig) -> None:
        self._client = RoutingClient(config, handle_request=lambda _: None)

    def reconnect(self) -> None:
        """Use new connections from now on; present ones end when their pending requests do."""
        self._client.reconnect()

    async def close(self) -> None:
        """Close all connections."""
        self._client.close()

    # Queries.

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the readable queues of a topic."""
        return (await self._client.fetch_route(topic)).queues()

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        """Return the number of a topic's queues on each broker."""
        return (await self._client.fetch_route(topic)).queue_counts

    async def broker_names(self) -> tuple[str, ...]:
        """Return the names of all brokers."""
        return tuple(sorted(await self._client.fetch_brokers()))

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return the known addresses of these brokers."""
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
        return tuple(
            OnlineConsumer(peer.client_id, peer.client_addr, peer.language, version_name(peer.version))
            for peer in peers
        )

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return a consumer's own settings; its broker relays the request and waits 10 s for the response."""
        response = await self._client.call_or_raise(
            broker, requests.running_info(group, client_id), RELAY_TIMEOUT_SECONDS
        )
        info = decode_body(response, payloads.ConsumerInfo)
        if sum(map(_text_length, info.subscription_set)) > MAX_SUBSCRIPTION_CHARACTERS:
            limit = f"{MAX_SUBSCRIPTION_CHARACTERS:,} characters"
            raise MalformedResponseError(f"The subscriptions of consumer {client_id[:100]} are longer than {limit}")
        subscriptions = [_subscription(subscribed) for subscribed in info.subscription_set]
        model = _MODELS.get(info.properties.get("messageModel", ""), "")
        start = _STARTS.get(info.properties.get("consumeFromWhere", ""), "")
        return ConsumerSettings(tuple(sorted(subscriptions, key=lambda item: item.topic)), model, start)

    async def client_ids(self, group: str, broker: str) -> tuple[str, ...]:
        """Return the distinct client ids online in a group, as members of RocketMQ's own rebalancing request them."""
        response = await self._client.call(broker, requests.client_ids(group))
        if response.code == ResponseCode.SYSTEM_ERROR and NO_CONSUMER_REMARK in response.remark:
            return ()
        client_ids = decode_body(
            require_success(f"The members of {group} at {broker}", response), payloads.ClientIdList
        ).consumer_id_list
        return tuple(dict.fromkeys(client_ids))

    async def group_settings(self, group: str, broker: str) -> BrokerGroupSettings:
        """Return a group's settings."""
        config = decode_body(
            await self._client.call_or_raise(broker, requests.group_config(group)), payloads.GroupConfig
        )
        return BrokerGroupSettings(
            config.consume_enable, config.consume_broadcast_enable, config.retry_queue_nums, config.retry_max_times
        )

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        """Return a group's offsets in the queues of a broker."""
        response = await self._client.call_or_raise(broker, requests.consume_stats(group, topics), STATS_SECONDS)
        stats = parse_queue_keys(decode_body(response, payloads.ConsumeStats).offset_table)
        return {
            queue: BrokerOffsets(row.broker_offset, row.consumer_offset, row.pull_offset, row.last_timestamp / 1000)
            for queue, row in stats.items()
        }

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        """Return a group's committed offset in a queue, or None if it never committed."""
        response = await self._client.call(queue.broker, requests.committed_offset(group, queue))
        if response.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return int_field(require_success(f"The offset of {queue}", response), "offset")

    async def offset_at_time(self, queue: Queue, timestamp: float) -> int:
        """Return the offset of the first message that was stored at this time or later."""
        return int_field(
            await self._client.call_or_raise(queue.broker, requests.offset_at_time(queue, round(timestamp * 1000))),
            "offset",
        )

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        """Return the first and last offsets of a topic's queues."""
        response = await self._client.call_or_raise(broker, requests.topic_stats(topic), STATS_SECONDS)
        rows = parse_queue_keys(decode_body(response, payloads.TopicStats).offset_table)
        return {
            queue: OffsetRange(row.min_offset, row.max_offset, row.last_update_timestamp / 1000)
            for queue, row in rows.items()
        }

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        """Send a message to the given queue, or to any queue of the topic."""
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
        await self._client.recheck_queue(queue)
        return queue

    # Administration.

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Release queue locks on behalf of a member that has ended; try every broker before raising an error."""
        by_broker = groupby(sorted(queues, key=_broker), key=_broker)
        calls = [(broker, requests.unlock(group, client_id, locked)) for broker, locked in by_broker]
        _, failed = await gather_results(self._client.call_or_raise(*call) for call in calls)
        if failed:
            raise failed[0]

    async def create_topic(self, topic: str, broker: str, queues: int, *, perm: int = READ_WRITE) -> None:
        """Create a topic on a broker, or update it there."""
        await self._client.call_or_raise(broker, requests.create_topic(topic, queues, perm=perm))

    async def topic_config(self, topic: str, broker: str) -> payloads.TopicConfig:
        """Return a topic's configuration on a broker."""
        return decode_body(await self._client.call_or_raise(broker, requests.topic_config(topic)), payloads.TopicConfig)

    async def update_group(self, group: str, broker: str, **changed: Any) -> None:
        """Create a group on a broker, or update the named settings; names are the protocol's.

        Attributes are left out, so they do not change: the protocol writes them as changes, "+name" or "-name".
        """
        current: dict[str, Any] = {}
        with suppress(NotFoundError):
            current = {**await self.group_config(group, broker)}
        current.pop("attributes", None)
        await self._client.call_or_raise(broker, requests.update_group({**current, "groupName": group, **changed}))

    async def group_config(self, group: str, broker: str) -> Mapping[str, Any]:
        """Return all settings of a group at a broker, by the protocol's names."""
        return decode_body(await self._client.call_or_raise(broker, requests.group_config(group)), dict[str, Any])

    async def reset_offsets(
        self, group: str, topic: str, broker: str, *, timestamp: float | None = None
    ) -> dict[Queue, int]:
        """Reset a group's offsets to a time, or to the end; return the new offsets."""
        when = -1 if timestamp is None else round(timestamp * 1000)
        response = await self._client.call_or_raise(broker, requests.reset_offsets(group, topic, when))
        return parse_queue_keys(decode_body(response, payloads.ResetOffsets).offset_table)

    async def set_consume_mode(self, topic: str, group: str, broker: str, mode: str, pop_share: int = 0) -> None:
        """Set whether a group's members PULL a topic's queues or POP from them."""
        await self._client.call_or_raise(broker, requests.set_request_mode(topic, group, mode, pop_share))

    async def query_assignment(
        self, topic: str, group: str, client_id: str, broker: str, strategy: str = "AVG"
    ) -> tuple[Queue, ...] | None:
        """Return the queues that a broker would assign to a member; None: none, so it keeps its own."""
        response = await self._client.call_or_raise(broker, requests.assignment(topic, group, client_id, strategy))
        assigned = decode_body(response, payloads.AssignmentResponse).message_queue_assignments
        return None if assigned is None else tuple(sorted(item.message_queue.queue for item in assigned))

    async def running_info(self, group: str, client_id: str, broker: str) -> Mapping[str, Any]:
        """Return the running info of a member; its broker relays the request."""
        response = await self._client.call_or_raise(broker, requests.running_info(group, client_id), STATS_SECONDS)
        return decode_body(response, dict[str, Any])

    async def broker_config(self, broker: str) -> dict[str, str]:
        """Return a broker's own settings."""
        text = (await self._client.call_or_raise(broker, requests.broker_config())).body.decode(errors="replace")
        pairs = (line.partition("=") for line in text.splitlines())
        return {name.strip(): value.strip() for name, separator, value in pairs if separator}

    async def update_broker_config(self, broker: str, **changed: object) -> None:
        """Update settings of a broker; names are the broker's."""
        await self._client.call_or_raise(broker, requests.update_broker_config(changed))


def _text_length(subscribed: payloads.Subscribed) -> int:
    return len(subscribed.topic) + len(subscribed.sub_string or "")


def _subscription(subscribed: payloads.Subscribed) -> Subscription:
    by_tag = (subscribed.expression_type or "TAG") == "TAG"
    return Subscription(subscribed.topic, subscribed.sub_string or "*", "Tag" if by_tag else "SQL92")


def _broker(queue: Queue) -> str:
    return queue.broker


def version_name(version: int) -> str:
    """Return the name of a client's version; on the wire it is an index in RocketMQ's list, MQVersion.

    From index 194 on the list is in order, each version preceded by its snapshot; the last index is 611, V5_9_9.
    """
    if not MIN_ORDERED_VERSION <= version <= MAX_ORDERED_VERSION:
        return str(version)
    number = version // 2 + 1 - VERSION_NUMBER_OFFSET
    return f"V{'_'.join(str(number))}" + ("_SNAPSHOT" if version % 2 == 0 else "")
