"""In-memory cluster: its state, the operations of tests on it, and the operator's `Brokers` interface."""

import asyncio
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from random import choice
from typing import Any, NamedTuple

from msgspec.structs import replace

from rota.brokers.errors import NotFoundError, RejectedError, UnreachableError
from rota.brokers.message import Message, properties_bytes_of, text_bytes
from rota.brokers.port import BrokerGroupSettings, BrokerOffsets, Membership, OffsetRange, OnlineConsumer
from rota.brokers.rocketmq.wire.messages import write_properties
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.spec.consumer_settings import ConsumerSettings, Model

BROKER = "memory"
NAME_SERVER = "name-server"  # can be down like a broker; routes are unavailable then
DELAY_LEVEL_SECONDS = (0, 1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)  # by level, as at a real broker
LOCK_SECONDS = 60.0  # for which a lock is held without renewal


class _DelayedMessage(NamedTuple):
    """A message that is stored at `due_at`; entries sort by that, then by their place in the commit log."""

    due_at: float
    commit_log_offset: int
    message: Message


class MemoryCluster:
    """In-memory cluster that implements `Brokers`; methods outside of that port serve `MemoryConsumer` and tests."""

    def __init__(self, brokers: Sequence[str] = (BROKER,), clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        # Creates a missing group on first use, as brokers do unless configured otherwise.
        self.auto_creates_groups = True
        self.min_offsets: defaultdict[Queue, int] = defaultdict(int)  # tests raise it: older messages have expired
        self.members: defaultdict[str, list[Membership]] = defaultdict(list)  # by group; one entry for each connection
        self.committed_offsets: defaultdict[str, dict[Queue, int]] = defaultdict(dict)
        self.pulled_offsets: defaultdict[str, dict[Queue, int]] = defaultdict(dict)
        self.reset_queues: defaultdict[str, set[Queue]] = defaultdict(set)  # by group: reset queues not pulled since
        self.compressed_ids: set[str] = set()  # ids of messages whose body the producer compressed with ZLIB
        self.locks: dict[tuple[str, Queue], tuple[str, float]] = {}  # by group and queue: owner's client id, expiry
        self.waiting_pulls: dict[asyncio.Future[None], tuple[Queue, object]] = {}  # waiting pulls: queue, consumer
        self._brokers = tuple(brokers)
        self._down: set[str] = set()
        self._topics: dict[str, dict[Queue, list[Message]]] = {}
        self._groups: dict[tuple[str, str], BrokerGroupSettings] = {}  # by group and broker
        self._delayed: list[_DelayedMessage] = []  # sorted
        self._store_positions = count(1)

    # Operations of tests and administrators.

    def take_down(self, name: str) -> None:
        """Make a broker or the name server unreachable; pulls that wait there fail."""
        self._down.add(name)
        for waiter, (queue, _) in self.waiting_pulls.items():
            if queue.broker == name and not waiter.done():
                waiter.set_exception(UnreachableError(f"{name} closed the connection"))

    def bring_up(self, name: str, *, restarted: bool = False) -> None:
        """Make a broker or the name server reachable and notify all members; a restarted broker has lost its locks."""
        self._down.discard(name)
        if restarted:
            self.locks = {(group, queue): lock for (group, queue), lock in self.locks.items() if queue.broker != name}
        for group in self.members:
            self.notify_members(group)

    async def create_topic(self, topic: str, broker: str, queues: int) -> None:
        """Create a topic on a broker, or add queues to it."""
        await self.check_reachable(broker)
        self.create_queues(topic, broker, queues)
        for member in [member for members in self.members.values() for member in members]:
            self.create_retry_queues(member)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic on all brokers, and the offsets of all groups in it."""
        self._topics.pop(topic, None)
        self._delayed = [delayed for delayed in self._delayed if delayed.message.queue.topic != topic]
        for table in (self.min_offsets, *self.committed_offsets.values(), *self.pulled_offsets.values()):
            for queue in [queue for queue in table if queue.topic == topic]:
                del table[queue]
        for group, marked in self.reset_queues.items():
            self.reset_queues[group] = {queue for queue in marked if queue.topic != topic}

    async def update_group(self, group: str, broker: str, **changed: Any) -> None:
        """Create a group on a broker, or change the named fields of its `BrokerGroupSettings`."""
        await self.check_reachable(broker)
        self._groups[group, broker] = self._groups.get((group, broker), BrokerGroupSettings())._replace(**changed)

    async def reset_offsets(
        self, group: str, topic: str, broker: str, timestamp: float | None = None
    ) -> dict[Queue, int]:
        """Reset a group's offsets to a time, or to the end; return them. Until the next pull, commits are ignored."""
        await self.check_reachable(broker)
        self.require_group(group, broker, create=False)
        offsets = {queue: self.find_offset(queue, timestamp) for queue in self.require_topic(topic, broker)}
        self.committed_offsets[group] |= offsets
        self.reset_queues[group] |= offsets.keys()
        return offsets

    # `Brokers`.

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the queues of a topic; raise `NotFoundError` if the topic does not exist."""
        await self.check_reachable(NAME_SERVER)
        if topic not in self._topics:
            raise NotFoundError(f"There is no topic {topic}")
        return tuple(sorted(self._topics[topic]))

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        """Return the number of a topic's queues on each broker."""
        return Counter([queue.broker for queue in await self.queues(topic)])

    async def broker_names(self) -> tuple[str, ...]:
        """Return the names of all brokers."""
        await self.check_reachable(NAME_SERVER)
        return tuple(sorted(self._brokers))

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return one address for each of these brokers; no other cluster has the same addresses."""
        return frozenset(f"{name}@{id(self):x}" for name in self._brokers if name in brokers)

    async def online_consumers(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        """Return the consumers of a group that are online at a broker."""
        await self.check_reachable(broker)
        return tuple(OnlineConsumer(member.client_id, BROKER, "PYTHON") for member in self._online(group, broker))

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return the settings of an online consumer; raise `RejectedError` if it is not online."""
        await self.check_reachable(broker)
        for member in self._online(group, broker):
            if member.client_id == client_id:
                subscriptions = sorted(member.topics.values(), key=lambda subscription: subscription.topic)
                model: Model = "Broadcasting" if member.broadcasting else "Clustering"
                return ConsumerSettings(tuple(subscriptions), model, member.get_start_from().position)
        raise RejectedError(f"{client_id} is not online in {group}")

    async def group_settings(self, group: str, broker: str) -> BrokerGroupSettings:
        """Return a group's settings."""
        await self.check_reachable(broker)
        return self.require_group(group, broker)

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        """Return a group's offsets in a broker's queues; while members are online, of subscribed topics only."""
        await self.check_reachable(broker)
        committed = self.committed_offsets[group]
        pulled = self.pulled_offsets[group]
        online = self._online(group, broker)
        requested = {*topics} or {queue.topic for queue in committed}
        subscribed = {topic for member in online for topic in member.topics} if online else requested
        offsets: dict[Queue, BrokerOffsets] = {}
        for topic in requested & subscribed:
            for queue, log in self._topic_queues(topic, broker).items():
                offset = committed.get(queue, 0)
                consumed_until = _stored_at(log[max(offset - 1, 0) : offset])
                offsets[queue] = BrokerOffsets(len(log), offset, max(offset, pulled.get(queue, 0)), consumed_until)
        return offsets

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        """Return a group's committed offset in a queue, or None if it never committed."""
        await self.check_reachable(queue.broker)
        return self.committed_offsets[group].get(queue)

    async def offset_at_time(self, queue: Queue, timestamp: float) -> int:
        """Return the offset of the first message that was stored at this time or later."""
        await self.messages_of(queue)
        return self.find_offset(queue, timestamp)

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        """Return the first and last offsets of a topic's queues."""
        await self.check_reachable(broker)
        logs = self.require_topic(topic, broker).items()
        return {queue: OffsetRange(self.min_offsets[queue], len(log), _stored_at(log[-1:])) for queue, log in logs}

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Release queue locks on behalf of a client; locks of other clients stay."""
        failed = []
        for queue in queues:
            try:
                await self.check_reachable(queue.broker)
            except UnreachableError as error:  # continue with the other brokers
                failed.append(error)
                continue
            if self.locks.get((group, queue), ("", 0))[0] == client_id:
                del self.locks[group, queue]
        if failed:
            raise failed[0]

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        """Send a message to the given queue, or to any queue of the topic."""
        queue = queue or choice(await self.queues(topic))  # noqa: S311 - not a secret
        if queue.topic != topic:
            raise ValueError(f"{queue} is not a queue of topic {topic}")
        await self.messages_of(queue)
        write_properties(properties or {})  # raises ValueError for properties that cannot be sent
        if not body:
            raise RejectedError(f"A message to {queue} has no body")
        unique = {"UNIQ_KEY": f"{next(self._store_positions):032X}", **(properties or {})}
        size = properties_bytes_of(len(unique), sum(text_bytes(name) + text_bytes(unique[name]) for name in unique))
        self.store_message(Message(queue, 0, body, unique, born_ms=int(self.clock() * 1000), properties_bytes=size))

    def reconnect(self) -> None:
        """Do nothing: the in-memory cluster has no connections."""

    async def close(self) -> None:
        """Do nothing: the in-memory cluster has no connections."""

    # Shared with `MemoryConsumer`.

    async def check_reachable(self, name: str) -> None:
        """Raise `UnreachableError` if a broker or the name server is down; deliver due delayed messages."""
        await asyncio.sleep(0)  # let other tasks run, as a network request would
        if name in self._down or name not in {*self._brokers, NAME_SERVER}:
            raise UnreachableError(f"{name} cannot be reached")
        self._store_due_messages()

    async def messages_of(self, queue: Queue) -> list[Message]:
        """Return the messages of a queue, indexed by offset; raise `NotFoundError` if the queue does not exist."""
        await self.check_reachable(queue.broker)
        if queue not in self._topics.get(queue.topic, {}):
            raise NotFoundError(f"There is no queue {queue}")
        return self._topics[queue.topic][queue]

    def _topic_queues(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
        return {queue: log for queue, log in self._topics.get(topic, {}).items() if queue.broker == broker}

    def require_topic(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
        """Return the queues of a topic on a broker with their messages; raise `NotFoundError` if it has none."""
        if logs := self._topic_queues(topic, broker):
            return logs
        raise NotFoundError(f"There is no topic {topic} on {broker}")

    def find_offset(self, queue: Queue, timestamp: float | None) -> int:
        """Return the offset of the first message stored at this time or later; None: the queue's end."""
        when = float("inf") if timestamp is None else round(timestamp * 1000)
        return max(
            bisect_left(self._topics[queue.topic][queue], when, key=lambda message: message.stored_ms),
            self.min_offsets[queue],
        )

    def create_queues(self, topic: str, broker: str, queue_count: int) -> list[Queue]:
        """Create queues of a topic on a broker as far as they do not exist; return all of them."""
        created = [Queue(topic, broker, number) for number in range(queue_count)]
        for queue in created:
            self._topics.setdefault(topic, {}).setdefault(queue, [])
        return created

    def require_group(self, group: str, broker: str, *, create: bool = True) -> BrokerGroupSettings:
        """Return a group's settings; create a missing group if that is allowed, else raise `NotFoundError`."""
        if create and self.auto_creates_groups:
            self._groups.setdefault((group, broker), BrokerGroupSettings())
        if (group, broker) not in self._groups:
            raise NotFoundError(f"There is no group {group} on {broker}")
        return self._groups[group, broker]

    def create_retry_queues(self, member: Membership) -> None:
        """Create a member's group and its retry topic on all brokers of the member's topics."""
        for broker in self.brokers_of(member):
            self.create_queues(
                RETRY_TOPIC_PREFIX + member.group, broker, self.require_group(member.group, broker).retry_queues
            )

    def brokers_of(self, member: Membership) -> list[str]:
        """Return the brokers of the topics that a member subscribes to, sorted."""
        return sorted({queue.broker for topic in member.topics for queue in self._topics.get(topic, ())})

    def _online(self, group: str, broker: str) -> list[Membership]:
        return [member for member in self.members[group] if broker in self.brokers_of(member)]

    def notify_members(self, group: str) -> None:
        """Notify all members of a group but broadcasting ones that its members have changed."""
        for member in self.members[group]:
            if not member.broadcasting:
                asyncio.get_running_loop().call_soon(member.on_members_changed)

    def store_message(self, message: Message) -> None:
        """Append a message to its queue, after the delay of its DELAY level if it has one."""
        level = min(int(message.properties.get("DELAY", 0)), len(DELAY_LEVEL_SECONDS) - 1)
        if level:
            origin = {"REAL_TOPIC": message.queue.topic, "REAL_QID": str(message.queue.id)}
            message = replace(message, properties={**message.properties, **origin})
        due_at = self.clock() + DELAY_LEVEL_SECONDS[level]
        insort(self._delayed, _DelayedMessage(due_at, next(self._store_positions), message))
        self._store_due_messages()

    def _store_due_messages(self) -> None:
        while self._delayed and self._delayed[0].due_at <= self.clock():
            _, commit_log_offset, message = self._delayed.pop(0)
            log = self._topics[message.queue.topic][message.queue]
            stored_ms = int(self.clock() * 1000)
            log.append(replace(message, offset=len(log), stored_ms=stored_ms, commit_log_offset=commit_log_offset))
            for waiter, (queue, _) in self.waiting_pulls.items():
                if queue == message.queue and not waiter.done():
                    waiter.set_result(None)

    async def wait_for_messages(self, queue: Queue, consumer: object, timeout_seconds: float) -> None:
        """Wait until the queue may have another message; raise `UnreachableError` if the connection is lost."""
        due = self._delayed[0].due_at - self.clock() if self._delayed else timeout_seconds
        waiter = asyncio.get_running_loop().create_future()
        self.waiting_pulls[waiter] = queue, consumer
        try:
            await asyncio.wait([waiter], timeout=min(timeout_seconds, due))
            if waiter.done():
                waiter.result()  # raises if the connection was lost
        finally:
            del self.waiting_pulls[waiter]


def _stored_at(messages: Sequence[Message]) -> float:
    return messages[0].stored_ms / 1000 if messages else 0.0
