"""In-memory consumer, for `rota sidecar` on a laptop and for tests.

It implements the broker port's `Consumer` on the in-memory cluster.
"""

import asyncio
from collections.abc import Collection
from random import choice

from msgspec.structs import replace

from rota.brokers.errors import ConsumptionDisabledError, RejectedError, UnreachableError
from rota.brokers.memory.cluster import NAME_SERVER, MemoryCluster
from rota.brokers.message import Message
from rota.brokers.port import ADMIT_ALL, RETRY_LEVEL, Admission, Membership, OffsetCorrection, PullResult
from rota.brokers.rocketmq.wire.messages import ZLIB, java_hash, unpack_body
from rota.brokers.rocketmq.wire.requests import require_one_broker
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.spec.consumer_settings import tags_of

DEAD_LETTER_PREFIX = "%DLQ%"
MAX_PULL_MESSAGES = 32  # messages of one pull, whatever the caller requests
MAX_PULL_BYTES = 256 * 1024  # bytes of all bodies of one pull


class MemoryConsumer:
    """A member of a group of the in-memory cluster; implements `Consumer`."""

    def __init__(self, cluster: MemoryCluster, member: Membership) -> None:
        self._cluster = cluster
        self._store = cluster.store
        self._groups = cluster.groups
        self._member = member
        self._group = member.group
        self._subscriptions = member.subscriptions_by_topic
        self._tags = {topic: frozenset(tags_of(subscription)) for topic, subscription in self._subscriptions.items()}
        self._joined = False
        self._left = False

    async def check_subscriptions(self) -> None:
        """Raise `RejectedError` for a subscription that is not by tag."""
        await self._check_topics()
        for topic in self._subscriptions:
            self._check_tag_filter(topic)

    def _check_tag_filter(self, topic: str) -> None:
        if topic not in self._subscriptions:
            raise ValueError(f"{self._group} has not subscribed to {topic}")
        if self._subscriptions[topic].type != "Tag":  # the text is a real broker's
            raise RejectedError(f"{topic}: The broker does not support consumer to filter message by SQL92")

    async def join(self) -> None:
        """Register in the group; callable once, and again only after a failure."""
        if self._joined or self._left:
            done = "left" if self._left else "joined"
            raise RuntimeError(f"Member {self._member.client_id} has already {done} group {self._group}")
        self._joined = True
        try:
            await self._check_topics()
            self._check_not_left()
            self._cluster.create_retry_queues(self._member)
        except BaseException:
            self._joined = False
            raise
        self._groups.members[self._group].append(self._member)
        self._groups.notify_members(self._group)

    async def leave(self) -> None:
        """Leave the group; pulls that wait fail with `UnreachableError`."""
        self._left = True
        self._store.disconnect_consumer(self)
        members = self._groups.members[self._group]
        if self._member in members:
            members.remove(self._member)
            self._groups.notify_members(self._group)

    def _check_not_left(self) -> None:
        if self._left:
            raise UnreachableError(f"Member {self._member.client_id} has left group {self._group}")

    async def _messages_of(self, queue: Queue) -> list[Message]:
        self._check_not_left()
        return await self._cluster.messages_of(queue)

    async def _simulate_request(self, broker: str) -> None:
        self._check_not_left()
        await self._cluster.simulate_request(broker)

    async def _check_topics(self) -> None:
        await self._simulate_request(NAME_SERVER)
        if not self._store.brokers_of(self._subscriptions):
            # No broker has a subscribed topic: this raises NotFoundError.
            await self._cluster.queues(next(iter(self._subscriptions)))

    async def pull(
        self,
        queue: Queue,
        offset: int,
        *,
        max_messages: int = 32,
        wait_seconds: float = 15.0,
        commit_offset: int | None = None,
        admission: Admission = ADMIT_ALL,
    ) -> PullResult:
        now = asyncio.get_running_loop().time
        until = now() + wait_seconds
        pulled = await self._fetch(queue, offset, max_messages)
        if commit_offset is not None:
            await self.commit(queue, commit_offset)
        # At the queue's end, wait for new messages. A pull that skips messages of other tags does not wait, although it
        # returns no message: its next offset is a later one.
        if pulled.next_offset == offset:
            while not (pulled.messages or pulled.correction) and now() < until:
                await self._store.wait_for_messages(queue, self, until - now())
                pulled = await self._fetch(queue, offset, max_messages)
        tags = self._tags[queue.topic]
        pulled = self._admit_messages(pulled, admission)
        if not tags:
            return pulled
        return pulled._replace(messages=tuple(message for message in pulled.messages if message.tag in tags))

    def _admit_messages(self, pulled: PullResult, admission: Admission) -> PullResult:
        """Unpack each body up to `max_body_bytes`; end the result before the first message that is not admitted."""
        messages: list[Message] = []
        for stored in pulled.messages:
            message = self._unpack_message(stored, admission.max_body_bytes)
            if not admission.admit(message.memory_bytes):
                return pulled._replace(messages=tuple(messages), next_offset=message.offset)
            messages.append(message)
        return pulled._replace(messages=tuple(messages))

    def _unpack_message(self, message: Message, max_body_bytes: int) -> Message:
        if message.id not in self._store.compressed_ids:
            return message
        body, body_error = unpack_body(message.body, ZLIB, max_body_bytes)
        return replace(message, body=body, body_error=body_error)

    async def _fetch(self, queue: Queue, offset: int, max_messages: int) -> PullResult:
        """Read messages like a real broker, which compares only hashes of tags.

        The first pull after an offset reset returns the new offset, with correction RESET.
        """
        group = self._group
        groups = self._groups
        log = await self._messages_of(queue)
        min_offset = self._store.min_offsets[queue]
        if not groups.require_settings(group, queue.broker).consume_enabled:
            raise ConsumptionDisabledError(f"Consumption of group {group} is disabled on broker {queue.broker}")
        self._check_tag_filter(queue.topic)
        hashes = {*map(java_hash, self._tags[queue.topic])}
        if queue in groups.reset_queues[group]:
            groups.reset_queues[group].remove(queue)
            return PullResult((), groups.committed_offsets[group][queue], min_offset, len(log), OffsetCorrection.RESET)
        if not min_offset <= offset <= len(log):
            next_offset = min_offset if offset < min_offset else len(log)
            return PullResult((), next_offset, min_offset, len(log), OffsetCorrection.OUT_OF_RANGE)
        messages: list[Message] = []
        next_offset = offset
        size_bytes = 0
        max_count = min(max(max_messages, 1), MAX_PULL_MESSAGES)
        while next_offset < len(log) and len(messages) < max_count:
            message = log[next_offset]
            if not hashes or java_hash(message.tag) in hashes:
                size_bytes += len(message.body)
                if messages and size_bytes > MAX_PULL_BYTES:  # a single message may be larger
                    break
                messages.append(message)
            next_offset += 1
        groups.pulled_offsets[group][queue] = next_offset
        return PullResult(tuple(messages), next_offset, min_offset, len(log))

    async def ping_broker(self, broker: str) -> None:
        await self._simulate_request(broker)

    async def send_back(self, message: Message, *, delay_level: int = RETRY_LEVEL, max_attempts: int = 16) -> None:
        broker = message.queue.broker
        log = await self._messages_of(message.queue)
        if not 0 <= message.offset < len(log):
            raise RejectedError(f"There is no message {message.offset} in {message.queue}")
        stored = log[message.offset]
        is_dead = delay_level < 0 or stored.reconsume_times >= max_attempts  # no further attempt
        prefix = DEAD_LETTER_PREFIX if is_dead else RETRY_TOPIC_PREFIX
        queue_count = 1 if is_dead else self._groups.require_settings(self._group, broker).retry_queues
        queue = choice(self._store.create_queues(prefix + self._group, broker, queue_count))  # noqa: S311 - not a secret
        # At level 0, the default, the delay grows with each attempt: first level 3, which is 10 s at a real broker.
        retry_level = delay_level or 3 + stored.reconsume_times
        level = 0 if is_dead else retry_level
        properties = {
            "ORIGIN_MESSAGE_ID": f"{stored.commit_log_offset:032X}",
            "RETRY_TOPIC": stored.queue.topic,
            **stored.properties,
        }
        properties |= {"WAIT": "false", "DELAY": str(level)}
        attempts = stored.reconsume_times + 1
        self._store.append(replace(stored, queue=queue, properties=properties, reconsume_times=attempts))

    async def committed_offset(self, queue: Queue) -> int | None:
        await self._messages_of(queue)
        return self._groups.committed_offsets[self._group].get(queue)

    async def commit(self, queue: Queue, offset: int) -> None:
        """Commit an offset for the group; like a real broker, this does not check which client sends it."""
        if offset < 0:
            raise ValueError(f"Offset {offset} cannot be committed for {queue}")
        await self._simulate_request(queue.broker)
        # Check the topic only: the queue may have left the topic.
        self._cluster.require_topic(queue.topic, queue.broker)
        self._groups.require_settings(self._group, queue.broker, create=False)
        self._groups.commit(self._group, queue, offset)

    async def min_offset(self, queue: Queue) -> int:
        await self._messages_of(queue)
        return self._store.min_offsets[queue]

    async def max_offset(self, queue: Queue) -> int:
        return len(await self._messages_of(queue))

    async def offset_at_time(self, queue: Queue, timestamp: float) -> int:
        await self._messages_of(queue)
        return self._store.find_offset(queue, timestamp)

    async def lock(self, queues: Collection[Queue]) -> frozenset[Queue]:
        await self._simulate_request(require_one_broker(queues))
        return self._groups.lock(self._group, self._member.client_id, queues)

    async def unlock(self, queues: Collection[Queue]) -> None:
        await self._simulate_request(require_one_broker(queues))
        await self._cluster.unlock(self._group, self._member.client_id, queues)
