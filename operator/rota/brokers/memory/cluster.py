"""The cluster in memory: its state, what is done to it, and `Brokers`."""

import asyncio
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from random import choice
from typing import Any

from msgspec.structs import replace

from rota.brokers.errors import Refused, Unknown, Unreachable
from rota.brokers.message import Message, properties_bytes_of, text_bytes
from rota.brokers.port import Client, Ends, Membership, Progress, Settings
from rota.brokers.rocketmq.wire.messages import write_properties
from rota.model import RETRY, Queue
from rota.spec.consumer_settings import ConsumerSettings, Model

BROKER = "memory"
NAME_SERVER = "name-server"  # can be down as a broker can: then there are no routes to be had
DELAYS = (0, 1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)  # seconds, by level
LOCK_SECONDS = 60.0


class Memory:
    """A cluster's state, and `Brokers`; what no operator asks is for `MemoryConsumer`."""

    def __init__(self, brokers: Sequence[str] = (BROKER,), clock: Callable[[], float] = time.time) -> None:
        """Start without topics and groups."""
        self.clock = clock
        self.makes_groups = True  # when somebody comes with one; brokers can be told not to
        self.firsts: defaultdict[Queue, int] = defaultdict(int)  # raise one, as if what is older were not kept
        self.members: defaultdict[str, list[Membership]] = defaultdict(list)  # by group; one for each connection
        self.offsets: defaultdict[str, dict[Queue, int]] = defaultdict(dict)
        self.pulled: defaultdict[str, dict[Queue, int]] = defaultdict(dict)
        self.marked: defaultdict[str, set[Queue]] = defaultdict(set)  # whose offset was set, until they are pulled
        self.packed: set[str] = set()  # ids of messages whose producer packed the body by ZLIB
        self.locks: dict[tuple[str, Queue], tuple[str, float]] = {}  # whose, and until when
        self.held: dict[asyncio.Future[None], tuple[Queue, object]] = {}  # pulls, and whose
        self._brokers, self._down = tuple(brokers), set[str]()
        self._topics: dict[str, dict[Queue, list[Message]]] = {}
        self._groups: dict[tuple[str, str], Settings] = {}  # by group and broker
        self._delayed: list[tuple[float, int, Message]] = []  # when it is due, its place; sorted
        self._places = count(1)

    # What is done to it.

    def down(self, name: str) -> None:
        """Put a broker, or the name server, out of reach; pulls that it holds fail."""
        self._down.add(name)
        for waiter, (queue, _) in self.held.items():
            if queue.broker == name and not waiter.done():
                waiter.set_exception(Unreachable(f"{name} closed the connection"))

    def up(self, name: str, *, restarted: bool = False) -> None:
        """Put it within reach, and its members with it; one that was restarted has forgotten its locks."""
        self._down.discard(name)
        if restarted:
            self.locks = {key: lock for key, lock in self.locks.items() if key[1].broker != name}
        for group in self.members:
            self.tell(group)

    async def create_topic(self, topic: str, broker: str, queues: int) -> None:
        """Make a topic on a broker, or give it more queues."""
        await self.reach(broker)
        self.make(topic, broker, queues)
        for member in [it for members in self.members.values() for it in members]:
            self.house(member)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic on all brokers, and the offsets of groups there."""
        self._topics.pop(topic, None)
        self._delayed = [it for it in self._delayed if it[2].queue.topic != topic]
        for table in (self.firsts, *self.offsets.values(), *self.pulled.values()):
            for queue in [it for it in table if it.topic == topic]:
                del table[queue]
        for group, marked in self.marked.items():
            self.marked[group] = {it for it in marked if it.topic != topic}

    async def update_group(self, group: str, broker: str, **changed: Any) -> None:
        """Make a group on a broker, or change what is named of its `Settings`."""
        await self.reach(broker)
        self._groups[group, broker] = self._groups.get((group, broker), Settings())._replace(**changed)

    async def reset(self, group: str, topic: str, broker: str, seconds: float | None = None) -> dict[Queue, int]:
        """Set a group's offsets to a time, or to the end; return them. Commits are void until the next pull."""
        await self.reach(broker)
        self.group(group, broker, make=False)
        found = {queue: self.search(queue, seconds) for queue in self.known(topic, broker)}
        self.offsets[group] |= found
        self.marked[group] |= found.keys()
        return found

    # As an operator sees it.

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the queues of a topic."""
        await self.reach(NAME_SERVER)
        if topic not in self._topics:
            raise Unknown(f"There is no topic {topic}")
        return tuple(sorted(self._topics[topic]))

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        """Return how many queues of a topic each broker has."""
        return Counter([queue.broker for queue in await self.queues(topic)])

    async def brokers(self) -> tuple[str, ...]:
        """Return the names of all brokers."""
        await self.reach(NAME_SERVER)
        return tuple(sorted(self._brokers))

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return an address for each broker that no other cluster has."""
        return frozenset(f"{name}@{id(self):x}" for name in self._brokers if name in brokers)

    async def clients(self, group: str, broker: str) -> tuple[Client, ...]:
        """Return who is online in a group."""
        await self.reach(broker)
        return tuple(Client(it.client_id, BROKER, "PYTHON") for it in self._online(group, broker))

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return a consumer's own settings."""
        await self.reach(broker)
        for it in self._online(group, broker):
            if it.client_id == client_id:
                subscriptions = sorted(it.topics.values(), key=lambda subscription: subscription.topic)
                model: Model = "Broadcasting" if it.broadcasting else "Clustering"
                return ConsumerSettings(tuple(subscriptions), model, it.start_from().position)
        raise Refused(f"{client_id} is not online in {group}")

    async def settings(self, group: str, broker: str) -> Settings:
        """Return a group's settings."""
        await self.reach(broker)
        return self.group(group, broker)

    async def progress(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, Progress]:
        """Return how far a group is; while somebody is online, with what is subscribed to."""
        await self.reach(broker)
        committed, pulled, online = self.offsets[group], self.pulled[group], self._online(group, broker)
        asked = {*topics} or {queue.topic for queue in committed}
        read = {topic for member in online for topic in member.topics} if online else asked
        found = {}
        for queue, log in [it for topic in asked & read for it in self._on(topic, broker).items()]:
            done = committed.get(queue, 0)
            consumed = _stored(log[max(done - 1, 0) : done])
            found[queue] = Progress(len(log), done, max(done, pulled.get(queue, 0)), consumed)
        return found

    async def committed(self, group: str, queue: Queue) -> int | None:
        """Return where a group is with a queue, or None where it never was."""
        await self.reach(queue.broker)
        return self.offsets[group].get(queue)

    async def at(self, queue: Queue, seconds: float) -> int:
        """Return the offset of the first message that was stored at a time or later."""
        await self.log(queue)
        return self.search(queue, seconds)

    async def ends(self, topic: str, broker: str) -> dict[Queue, Ends]:
        """Return where a topic's queues begin and end."""
        await self.reach(broker)
        found = self.known(topic, broker).items()
        return {queue: Ends(self.firsts[queue], len(log), _stored(log[-1:])) for queue, log in found}

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Give locks back in somebody's name; those of others stay."""
        failed = []
        for queue in queues:
            try:
                await self.reach(queue.broker)
            except Unreachable as error:  # the others are told all the same
                failed.append(error)
                continue
            if self.locks.get((group, queue), ("", 0))[0] == client_id:
                del self.locks[group, queue]
        if failed:
            raise failed[0]

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        """Send a message, to one queue or to any."""
        queue = queue or choice(await self.queues(topic))  # noqa: S311 - not a secret
        if queue.topic != topic:
            raise ValueError(f"{queue} is no queue of {topic}")
        await self.log(queue)
        write_properties(properties or {})  # says what cannot be sent
        if not body:
            raise Refused(f"A message to {queue} has no body")
        unique = {"UNIQ_KEY": f"{next(self._places):032X}", **(properties or {})}
        size = properties_bytes_of(len(unique), sum(text_bytes(name) + text_bytes(unique[name]) for name in unique))
        self.store(Message(queue, 0, body, unique, born=int(self.clock() * 1000), properties_bytes=size))

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    # Underneath.

    async def reach(self, name: str) -> None:
        """Make sure that a broker, or the name server, can be asked."""
        await asyncio.sleep(0)  # others run meanwhile, as they do while a network is waited for
        if name in self._down or name not in {*self._brokers, NAME_SERVER}:
            raise Unreachable(f"{name} cannot be reached")
        self._ripen()

    async def log(self, queue: Queue) -> list[Message]:
        """Return what lies in a queue, by offset."""
        await self.reach(queue.broker)
        if queue not in self._topics.get(queue.topic, {}):
            raise Unknown(f"There is no queue {queue}")
        return self._topics[queue.topic][queue]

    def _on(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
        return {queue: log for queue, log in self._topics.get(topic, {}).items() if queue.broker == broker}

    def known(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
        """Return the queues of a topic on a broker, and what lies in them."""
        if found := self._on(topic, broker):
            return found
        raise Unknown(f"There is no topic {topic} on {broker}")

    def search(self, queue: Queue, seconds: float | None) -> int:
        """Return the offset of the first message that was stored at a time or later; None: the queue's end."""
        when = float("inf") if seconds is None else round(seconds * 1000)
        return max(bisect_left(self._topics[queue.topic][queue], when, key=lambda it: it.stored), self.firsts[queue])

    def make(self, topic: str, broker: str, queues: int) -> list[Queue]:
        """Make queues where there are none yet."""
        made = [Queue(topic, broker, number) for number in range(queues)]
        for queue in made:
            self._topics.setdefault(topic, {}).setdefault(queue, [])
        return made

    def group(self, group: str, broker: str, *, make: bool = True) -> Settings:
        """Return a group's settings, and make it if need be."""
        if make and self.makes_groups:
            self._groups.setdefault((group, broker), Settings())
        if (group, broker) not in self._groups:
            raise Unknown(f"There is no group {group} on {broker}")
        return self._groups[group, broker]

    def house(self, member: Membership) -> None:
        """Make a member's group, and the group's retry topic, where it reads."""
        for broker in self.where(member):
            self.make(RETRY + member.group, broker, self.group(member.group, broker).retry_queues)

    def where(self, member: Membership) -> list[str]:
        """Return the brokers of what a member subscribes to."""
        return sorted({queue.broker for topic in member.topics for queue in self._topics.get(topic, ())})

    def _online(self, group: str, broker: str) -> list[Membership]:
        return [member for member in self.members[group] if broker in self.where(member)]

    def tell(self, group: str) -> None:
        """Tell all members of a group that members have changed."""
        for member in self.members[group]:
            if not member.broadcasting:
                asyncio.get_running_loop().call_soon(member.on_members)

    def store(self, message: Message) -> None:
        """Store a message when its delay is over; most have none."""
        level = min(int(message.properties.get("DELAY", 0)), len(DELAYS) - 1)
        if level:
            real = {"REAL_TOPIC": message.queue.topic, "REAL_QID": str(message.queue.id)}
            message = replace(message, properties={**message.properties, **real})
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

    async def more(self, queue: Queue, who: object, seconds: float) -> None:
        """Wait until there may be another message."""
        due = self._delayed[0][0] - self.clock() if self._delayed else seconds
        waiter = asyncio.get_running_loop().create_future()
        self.held[waiter] = queue, who
        try:
            await asyncio.wait([waiter], timeout=min(seconds, due))
            if waiter.done():
                waiter.result()  # raises if the connection was lost
        finally:
            del self.held[waiter]


def _stored(one: Sequence[Message]) -> float:
    return one[0].stored / 1000 if one else 0.0
