"""A RocketMQ cluster as an operator sees it: `Brokers`, and what administrators do."""

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import groupby
from secrets import choice
from typing import Any

from rota.brokers.errors import Garbled, Refused, Unknown
from rota.brokers.port import Client as Online
from rota.brokers.port import Ends, Progress, Settings
from rota.brokers.rocketmq.routing import Client, Site
from rota.brokers.rocketmq.transport.responses import body, by_queue, good, number, reason, refusal, side_by_side
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import STORED, Answer
from rota.model import Queue
from rota.spec import Subscription
from rota.spec.consumer_settings import ConsumerSettings, Model, Start

PRODUCER = "rota"
NOBODY = "no consumer for this group"  # how a broker says so; its code is that of all failures
FIRST_IN_ORDER, LAST_IN_ORDER, AHEAD = 194, 611, 217 - 510  # 433 // 2 + 1 = 217 is V5_1_0
MOST_ONLINE = 20_000  # consumers of a group at a broker: all that Rota manages in one, and as many others
RELAYED_SECONDS = 12.0  # a broker waits 10 s for a consumer's answer
MAX_SUBSCRIPTION_TEXT = 16 * 1024  # characters of a consumer's topics and filters
STATS_SECONDS = 10.0  # a broker works for this; who asks another one meanwhile does not wait

_MODELS: Mapping[str, Model] = {"CLUSTERING": "Clustering", "BROADCASTING": "Broadcasting"}
# The last three are deprecated; the Java client takes each for CONSUME_FROM_LAST_OFFSET.
_STARTS: Mapping[str, Start] = {
    "CONSUME_FROM_LAST_OFFSET": "Latest",
    "CONSUME_FROM_FIRST_OFFSET": "Earliest",
    "CONSUME_FROM_TIMESTAMP": "Timestamp",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST": "Latest",
    "CONSUME_FROM_MIN_OFFSET": "Latest",
    "CONSUME_FROM_MAX_OFFSET": "Latest",
}


class Cluster:
    """A cluster, by connections of its own; no broker takes it for a member of a group."""

    def __init__(self, site: Site) -> None:
        """Connect when something is asked."""
        self._client = Client(site, serve=lambda _: None)

    async def close(self) -> None:
        """Close all connections."""
        self._client.close()

    # What there is.

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the queues of a topic that can be read."""
        return (await self._client.route(topic)).queues()

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        """Return how many queues of a topic each broker has."""
        return (await self._client.route(topic)).queue_counts

    async def brokers(self) -> tuple[str, ...]:
        """Return the names of all brokers."""
        return tuple(sorted(await self._client.brokers()))

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return the known addresses of these brokers."""
        return self._client.addresses(brokers)

    async def clients(self, group: str, broker: str) -> tuple[Online, ...]:
        """Return who is online in a group."""
        try:
            answer = await self._client.get(broker, requests.connections(group))
        except Refused as refused:
            if refused.code == Answer.CONSUMER_NOT_ONLINE:
                return ()
            raise
        found = body(answer, payloads.ConsumerConnection).connection_set
        if len(found) > MOST_ONLINE:
            raise Garbled(f"{broker} names {len(found):,} consumers of {group}; {MOST_ONLINE:,} are the most")
        return tuple(Online(peer.client_id, peer.client_addr, peer.language, spelled(peer.version)) for peer in found)

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return what a consumer says of its own settings, asked by its broker, which waits 10 s for it."""
        answer = await self._client.get(broker, requests.running_info(group, client_id), RELAYED_SECONDS)
        info = body(answer, payloads.ConsumerInfo)
        if sum(map(_text_length, info.subscription_set)) > MAX_SUBSCRIPTION_TEXT:
            raise Garbled(f"The subscriptions of {client_id[:100]} take over {MAX_SUBSCRIPTION_TEXT:,} characters")
        subscriptions = [_subscription(it) for it in info.subscription_set]
        model = _MODELS.get(info.properties.get("messageModel", ""), "")
        start = _STARTS.get(info.properties.get("consumeFromWhere", ""), "")
        return ConsumerSettings(tuple(sorted(subscriptions, key=lambda it: it.topic)), model, start)

    async def client_ids(self, group: str, broker: str) -> tuple[str, ...]:
        """Return what a member that decides by itself asks: the ids of who is online, each once."""
        answer = await self._client.ask(broker, requests.client_ids(group))
        if answer.code == Answer.SYSTEM_ERROR and NOBODY in answer.remark:
            return ()
        found = body(good(f"The members of {group} at {broker}", answer), payloads.ClientIds).consumer_id_list
        return tuple(dict.fromkeys(found))

    async def settings(self, group: str, broker: str) -> Settings:
        """Return a group's settings."""
        found = body(await self._client.get(broker, requests.group_config(group)), payloads.GroupConfig)
        return Settings(
            found.consume_enable, found.consume_broadcast_enable, found.retry_queue_nums, found.retry_max_times
        )

    async def progress(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, Progress]:
        """Return how far a group is with the queues of a broker."""
        answer = await self._client.get(broker, requests.consume_stats(group, topics), STATS_SECONDS)
        found = by_queue(body(answer, payloads.ConsumeStats).offset_table)
        return {
            queue: Progress(it.broker_offset, it.consumer_offset, it.pull_offset, it.last_timestamp / 1000)
            for queue, it in found.items()
        }

    async def committed(self, group: str, queue: Queue) -> int | None:
        """Return where a group is with a queue, or None where it never was."""
        answer = await self._client.ask(queue.broker, requests.committed(group, queue))
        if answer.code == Answer.QUERY_NOT_FOUND:
            return None
        return number(good(f"The offset of {queue}", answer), "offset")

    async def at(self, queue: Queue, seconds: float) -> int:
        """Return the offset of the first message that was stored at a time or later."""
        return number(await self._client.get(queue.broker, requests.at(queue, round(seconds * 1000))), "offset")

    async def ends(self, topic: str, broker: str) -> dict[Queue, Ends]:
        """Return where a topic's queues begin and end."""
        answer = await self._client.get(broker, requests.topic_stats(topic), STATS_SECONDS)
        found = by_queue(body(answer, payloads.TopicStats).offset_table)
        return {
            queue: Ends(it.min_offset, it.max_offset, it.last_update_timestamp / 1000) for queue, it in found.items()
        }

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        """Send a message, to one queue or to any."""
        queue = await self._place(topic, queue)
        born = int(time.time() * 1000)
        request = requests.send(PRODUCER, topic, body, properties or {}, broker=queue.broker, queue=queue.id, born=born)
        answer = await self._client.ask(queue.broker, request)
        if answer.code == Answer.INVALID_PARAMETER:
            raise Unknown(f"There is no queue {queue}: {reason(answer)}")
        if answer.code not in STORED:
            raise refusal(f"Sending to {queue}", answer)

    async def _place(self, topic: str, queue: Queue | None) -> Queue:
        """Return where a message goes; to a topic that is not there, or a broker would make it."""
        if queue is None:
            queues = await self.queues(topic)
            if not queues:
                raise Refused(f"The topic {topic} has no queue that can be read, so nothing is sent to it")
            return choice(queues)
        if queue.topic != topic:
            raise ValueError(f"{queue} is no queue of {topic}")
        await self._client.need(queue)
        await self._client.doubt(queue)
        return queue

    # What administrators do.

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Give locks back in the name of a member that has ended."""
        by_broker = groupby(sorted(queues, key=_broker), key=_broker)
        told = [(broker, requests.unlock(group, client_id, mine)) for broker, mine in by_broker]
        _, failed = await side_by_side(self._client.get(*it) for it in told)
        if failed:
            raise failed[0]

    async def create_topic(self, topic: str, broker: str, queues: int, *, perm: int = 6) -> None:
        """Make a topic on a broker, or change it there."""
        await self._client.get(broker, requests.create_topic(topic, queues, perm=perm))

    async def topic(self, topic: str, broker: str) -> payloads.TopicConfig:
        """Return how a topic is made on a broker."""
        return body(await self._client.get(broker, requests.topic_config(topic)), payloads.TopicConfig)

    async def update_group(self, group: str, broker: str, **changed: Any) -> None:
        """Make a group on a broker, or change what is named of it; names are the protocol's.

        Attributes stay as they are: they are written as changes, "+name" or "-name", not as they are read.
        """
        before: dict[str, Any] = {}
        with suppress(Unknown):
            before = {**await self.group(group, broker)}
        before.pop("attributes", None)
        await self._client.get(broker, requests.update_group({**before, "groupName": group, **changed}))

    async def group(self, group: str, broker: str) -> Mapping[str, Any]:
        """Return all that a broker keeps of a group's settings."""
        return body(await self._client.get(broker, requests.group_config(group)), dict[str, Any])

    async def reset(self, group: str, topic: str, broker: str, *, seconds: float | None = None) -> dict[Queue, int]:
        """Set a group's offsets to a time, or to the end; return them."""
        when = -1 if seconds is None else round(seconds * 1000)
        answer = await self._client.get(broker, requests.reset(group, topic, when))
        return by_queue(body(answer, payloads.Reset).offset_table)

    async def consume_mode(self, topic: str, group: str, broker: str, mode: str, share: int = 0) -> None:
        """Say whether a group's members PULL a topic's queues or POP from them."""
        await self._client.get(broker, requests.request_mode(topic, group, mode, share))

    async def assignment(
        self, topic: str, group: str, client_id: str, broker: str, strategy: str = "AVG"
    ) -> tuple[Queue, ...] | None:
        """Return which queues a broker would give to a member; None: it says nothing, so keep what you have."""
        answer = await self._client.get(broker, requests.assignment(topic, group, client_id, strategy))
        found = body(answer, payloads.Assignments).message_queue_assignments
        return None if found is None else tuple(sorted(it.message_queue.queue for it in found))

    async def running_info(self, group: str, client_id: str, broker: str) -> Mapping[str, Any]:
        """Return what a member tells of itself, asked by its broker."""
        answer = await self._client.get(broker, requests.running_info(group, client_id), STATS_SECONDS)
        return body(answer, dict[str, Any])

    async def broker_settings(self, broker: str) -> dict[str, str]:
        """Return a broker's own settings."""
        text = (await self._client.get(broker, requests.broker_config())).body.decode(errors="replace")
        pairs = (line.partition("=") for line in text.splitlines())
        return {name.strip(): value.strip() for name, separator, value in pairs if separator}

    async def update_broker(self, broker: str, **changed: object) -> None:
        """Change some of a broker's own settings; names are the broker's."""
        await self._client.get(broker, requests.update_broker_config(changed))


def _text_length(subscribed: payloads.Subscribed) -> int:
    return len(subscribed.topic) + len(subscribed.sub_string or "")


def _subscription(subscribed: payloads.Subscribed) -> Subscription:
    by_tag = (subscribed.expression_type or "TAG") == "TAG"
    return Subscription(subscribed.topic, subscribed.sub_string or "*", "Tag" if by_tag else "SQL92")


def _broker(queue: Queue) -> str:
    return queue.broker


def spelled(version: int) -> str:
    """Return a client's version as RocketMQ names it; the wire has its place in their list, MQVersion.

    From 194 on they stand there one after the other, each with a snapshot before it; 611 is the last: V5_9_9.
    """
    if not FIRST_IN_ORDER <= version <= LAST_IN_ORDER:
        return str(version)
    number = version // 2 + 1 - AHEAD
    return f"V{'_'.join(str(number))}" + ("_SNAPSHOT" if version % 2 == 0 else "")
