"""In-memory cluster: its state, the operations of tests on it, and the operator's `Brokers` interface."""

import asyncio
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from random import choice
from typing import Any

from msgspec.structs import replace

from rota.brokers.errors import NotFoundError, RejectedError, UnreachableError
from rota.brokers.message import Message, properties_bytes_of, text_bytes
from rota.brokers.port import BrokerGroupSettings, BrokerOffsets, Membership, OffsetRange, OnlineConsumer
from rota.brokers.rocketmq.wire.messages import write_properties
from rota.model import RETRY, Queue
from rota.spec.consumer_settings import ConsumerSettings, Model

BROKER = "memory"
NAME_SERVER = "name-server"  # can be down like a broker; routes are unavailable then
DELAYS = (0, 1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)  # seconds, by level
LOCK_SECONDS = 60.0


class MemoryCluster:
    """In-memory cluster that implements `Brokers`; methods outside of that port serve `MemoryConsumer` and tests."""

    def __init__(self, brokers: Sequence[str] = (BROKER,), clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.makes_groups = True  # creates a missing group on first use, as brokers do unless configured otherwise
        self.firsts: defaultdict[Queue, int] = defaultdict(int)  # tests raise it: older messages have expired
        self.members: defaultdict[str, list[Membership]] = defaultdict(list)  # by group; one entry for each connection
        self.offsets: defaultdict[str, dict[Queue, int]] = defaultdict(dict)
        self.pulled: defaultdict[str, dict[Queue, int]] = defaultdict(dict)
        self.marked: defaultdict[str, set[Queue]] = defaultdict(set)  # by group: reset queues not pulled since
        self.packed: set[str] = set()  # ids of messages whose body the producer compressed with ZLIB
        self.locks: dict[tuple[str, Queue], tuple[str, float]] = {}  # client id of the owner, and expiry
        self.held: dict[asyncio.Future[None], tuple[Queue, object]] = {}  # waiting pulls: queue, consumer
        self._brokers, self._down = tuple(brokers), set[str]()
        self._topics: dict[str, dict[Queue, list[Message]]] = {}
        self._groups: dict[tuple[str, str], BrokerGroupSettings] = {}  # by group and broker
        self._delayed: list[tuple[float, int, Message]] = []  # due time, place, message; sorted
        self._places = count(1)

    # Operations of tests and administrators.

    def down(self, name: str) -> None:
        """Make a broker or the name server unreachable; pulls that wait there fail."""
        self._down.add(name)
        for waiter, (queue, _) in self.held.items():
            if queue.broker == name and not waiter.done():
                waiter.set_exception(UnreachableError(f"{name} closed the connection"))

    def up(self, name: str, *, restarted: bool = False) -> None:
        """Make a broker or the name server reachable and notify all members; a restarted broker has lost its locks."""
        self._down.discard(name)
        if restarted:
            self.locks = {key: lock for key, lock in self.locks.items() if key[1].broker != name}
        for group in self.members:
            self.tell(group)

    async def create_topic(self, topic: str, broker: str, queues: int) -> None:
        """Create a topic on a broker, or add queues to it."""
        await self.reach(broker)
        self.make(topic, broker, queues)
        for member in [member for members in self.members.values() for member in members]:
            self.house(member)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic on all brokers, and the offsets of all groups in it."""
        self._topics.pop(topic, None)
        self._delayed = [delayed for delayed in self._delayed if delayed[2].queue.topic != topic]
        for table in (self.firsts, *self.offsets.values(), *self.pulled.values()):
            for queue in [queue for queue in table if queue.topic == topic]:
                del table[queue]
        for group, marked in self.marked.items():
            self.marked[group] = {queue for queue in marked if queue.topic != topic}

    async def update_group(self, group: str, broker: str, **changed: Any) -> None:
        """Create a group on a broker, or change the named fields of its `Settings`."""
        await self.reach(broker)
        self._groups[group, broker] = self._groups.get((group, broker), BrokerGroupSettings())._replace(**changed)

    async def reset(self, group: str, topic: str, broker: str, seconds: float | None = None) -> dict[Queue, int]:
        """Reset a group's offsets to a time, or to the end; return them. Until the next pull, commits are ignored."""
        await self.reach(broker)
        self.group(group, broker, make=False)
        offsets = {queue: self.search(queue, seconds) for queue in self.known(topic, broker)}
        self.offsets[group] |= offsets
        self.marked[group] |= offsets.keys()
        return offsets

    # `Brokers`.

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the queues of a topic; raise `NotFoundError` if the topic does not exist."""
        await self.reach(NAME_SERVER)
        if topic not in self._topics:
            raise NotFoundError(f"There is no topic {topic}")
        return tuple(sorted(self._topics[topic]))

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        """Return the number of a topic's queues on each broker."""
        return Counter([queue.broker for queue in await self.queues(topic)])

    async def brokers(self) -> tuple[str, ...]:
        """Return the names of all brokers."""
        await self.reach(NAME_SERVER)
        return tuple(sorted(self._brokers))

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return one address for each of these brokers; no other cluster has the same addresses."""
        return frozenset(f"{name}@{id(self):x}" for name in self._brokers if name in brokers)

    async def clients(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        """Return the consumers of a group that are online at a broker."""
        await self.reach(broker)
        return tuple(OnlineConsumer(member.client_id, BROKER, "PYTHON") for member in self._online(group, broker))

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return the settings of an online consumer; raise `RejectedError` if it is not online."""
        await self.reach(broker)
        for member in self._online(group, broker):
            if member.client_id == client_id:
                subscriptions = sorted(member.topics.values(), key=lambda subscription: subscription.topic)
                model: Model = "Broadcasting" if member.broadcasting else "Clustering"
                return ConsumerSettings(tuple(subscriptions), model, member.start_from().position)
        raise RejectedError(f"{client_id} is not online in {group}")

    async def settings(self, group: str, broker: str) -> BrokerGroupSettings:
        """Return a group's settings."""
        await self.reach(broker)
        return self.group(group, broker)

    async def progress(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        """Return a group's offsets in a broker's queues; while members are online, of subscribed topics only."""
        await self.reach(broker)
        committed, pulled, online = self.offsets[group], self.pulled[group], self._online(group, broker)
        requested = {*topics} or {queue.topic for queue in committed}
        subscribed = {topic for member in online for topic in member.topics} if online else requested
        progress = {}
        for queue, log in [item for topic in requested & subscribed for item in self._on(topic, broker).items()]:
            done = committed.get(queue, 0)
            consumed = _stored(log[max(done - 1, 0) : done])
            progress[queue] = BrokerOffsets(len(log), done, max(done, pulled.get(queue, 0)), consumed)
        return progress

    async def committed(self, group: str, queue: Queue) -> int | None:
        """Return a group's committed offset in a queue, or None if it never committed."""
        await self.reach(queue.broker)
        return self.offsets[group].get(queue)

    async def at(self, queue: Queue, seconds: float) -> int:
        """Return the offset of the first message that was stored at this time or later."""
        await self.log(queue)
        return self.search(queue, seconds)

    async def ends(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        """Return the first and last offsets of a topic's queues."""
        await self.reach(broker)
        logs = self.known(topic, broker).items()
        return {queue: OffsetRange(self.firsts[queue], len(log), _stored(log[-1:])) for queue, log in logs}

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Release queue locks on behalf of a client; locks of other clients stay."""
        failed = []
        for queue in queues:
            try:
                await self.reach(queue.broker)
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
            raise ValueError(f"{queue} is no queue of {topic}")
        await self.log(queue)
        write_properties(properties or {})  # raises ValueError for properties that cannot be sent
        if not body:
            raise RejectedError(f"A message to {queue} has no body")
        unique = {"UNIQ_KEY": f"{next(self._places):032X}", **(properties or {})}
        size = properties_bytes_of(len(unique), sum(text_bytes(name) + text_bytes(unique[name]) for name in unique))
        self.store(Message(queue, 0, body, unique, born=int(self.clock() * 1000), properties_bytes=size))

    def reconnect(self) -> None:
        """Do nothing: the in-memory cluster has no connections."""

    async def close(self) -> None:
        """Do nothing: the in-memory cluster has no connections."""

    # Shared with `MemoryConsumer`.

    async def reach(self, name: str) -> None:
        """Raise `UnreachableError` if a broker or the name server is down; deliver due delayed messages."""
        await asyncio.sleep(0)  # let other tasks run, as a network request would
        if name in self._down or name not in {*self._brokers, NAME_SERVER}:
            raise UnreachableError(f"{name} cannot be reached")
        self._ripen()

    async def log(self, queue: Queue) -> list[Message]:
        """Return the messages of a queue, indexed by offset; raise `NotFoundError` if the queue does not exist."""
        await self.reach(queue.broker)
        if queue not in self._topics.get(queue.topic, {}):
            raise NotFoundError(f"There is no queue {queue}")
        return self._topics[queue.topic][queue]

    def _on(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
        return {queue: log for queue, log in self._topics.get(topic, {}).items() if queue.broker == broker}

    def known(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
        """Return the queues of a topic on a broker with their messages; raise `NotFoundError` if it has none."""
        if logs := self._on(topic, broker):
            return logs
        raise NotFoundError(f"There is no topic {topic} on {broker}")

    def search(self, queue: Queue, seconds: float | None) -> int:
        """Return the offset of the first message stored at this time or later; None: the queue's end."""
        when = float("inf") if seconds is None else round(seconds * 1000)
        return max(
            bisect_left(self._topics[queue.topic][queue], when, key=lambda message: message.stored), self.firsts[queue]
        )

    def make(self, topic: str, broker: str, queues: int) -> list[Queue]:
        """Create queues of a topic on a broker as far as they do not exist; return all of them."""
        created = [Queue(topic, broker, number) for number in range(queues)]
        for queue in created:
            self._topics.setdefault(topic, {}).setdefault(queue, [])
        return created

    def group(self, group: str, broker: str, *, make: bool = True) -> BrokerGroupSettings:
        """Return a group's settings; create a missing group if that is allowed, else raise `NotFoundError`."""
        if make and self.makes_groups:
            self._groups.setdefault((group, broker), BrokerGroupSettings())
        if (group, broker) not in self._groups:
            raise NotFoundError(f"There is no group {group} on {broker}")
        return self._groups[group, broker]

    def house(self, member: Membership) -> None:
        """Create a member's group and its retry topic on all brokers of the member's topics."""
        for broker in self.where(member):
            self.make(RETRY + member.group, broker, self.group(member.group, broker).retry_queues)

    def where(self, member: Membership) -> list[str]:
        """Return the brokers of the topics that a member subscribes to, sorted."""
        return sorted({queue.broker for topic in member.topics for queue in self._topics.get(topic, ())})

    def _online(self, group: str, broker: str) -> list[Membership]:
        return [member for member in self.members[group] if broker in self.where(member)]

    def tell(self, group: str) -> None:
        """Notify all members of a group but broadcasting ones that its members have changed."""
        for member in self.members[group]:
            if not member.broadcasting:
                asyncio.get_running_loop().call_soon(member.on_members)

    def store(self, message: Message) -> None:
        """Append a message to its queue, after the delay of its DELAY level if it has one."""
        level = min(int(message.properties.get("DELAY", 0)), len(DELAYS) - 1)
        if level:
            origin = {"REAL_TOPIC": message.queue.topic, "REAL_QID": str(message.queue.id)}
            message = replace(message, properties={**message.properties, **origin})
        insort(self._delayed, (self.clock() + DELAYS[level], next(self._places), message))
        self._ripen()

    def _ripen(self) -> None:
        while self._delayed and self._delayed[0][0] <= self.clock():
            _, place, message = self._delayed.pop(0)
            log = self._topics[message.queue.topic][message.queue]
            log.append(replace(message, offset=len(log), stored=int(self.clock() * 1000), place=place))
            for waiter, (queue, _) in self.held.items():
                if queue == message.queue and not waiter.done():
                    waiter.set_result(None)

    async def more(self, queue: Queue, consumer: object, seconds: float) -> None:
        """Wait until the queue may have another message; raise `UnreachableError` if the connection is lost."""
        due = self._delayed[0][0] - self.clock() if self._delayed else seconds
        waiter = asyncio.get_running_loop().create_future()
        self.held[waiter] = queue, consumer
        try:
            await asyncio.wait([waiter], timeout=min(seconds, due))
            if waiter.done():
                waiter.result()  # raises if the connection was lost
        finally:
            del self.held[waiter]


def _stored(messages: Sequence[Message]) -> float:
    return messages[0].stored / 1000 if messages else 0.0
