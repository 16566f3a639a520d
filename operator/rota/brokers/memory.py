"""A cluster in memory: for an app developer's laptop, and for tests of what stands on the port.

It does what RocketMQ's brokers do by default, as far as the port shows it: one contract is tested on both. Its
clock serves locks, delays and the times of messages: who turns it by hand need not wait. Pulls wait by the loop's.
"""

import asyncio
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from random import choice
from typing import Any

from msgspec.structs import replace

from rota.brokers import (
    LATER,
    Client,
    Ends,
    Membership,
    Message,
    Moved,
    Progress,
    Pulled,
    Refused,
    Settings,
    SwitchedOff,
    Unknown,
    Unreachable,
)
from rota.brokers.rocketmq.messages import java_hash
from rota.brokers.rocketmq.requests import tags_of
from rota.model import RETRY, Queue

BROKER = "memory"
NAME_SERVER = "name-server"  # can be down as a broker can: then there are no routes to be had
DEAD = "%DLQ%"
DELAYS = (0, 1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)  # seconds, by level
LOCK_SECONDS = 60.0
MOST = 32  # messages of one pull, whatever is asked


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

    async def update_group(self, group: str, broker: str, **changed: Any) -> None:
        """Make a group on a broker, or change what is named of its `Settings`."""
        await self.reach(broker)
        self._groups[group, broker] = self._groups.get((group, broker), Settings())._replace(**changed)

    async def reset(self, group: str, topic: str, broker: str, seconds: float | None = None) -> dict[Queue, int]:
        """Set a group's offsets to a time, or to the end; return them. Commits are void until the next pull."""
        await self.reach(broker)
        self.group(group, broker, make=False)
        found = {queue: self.search(queue, seconds) for queue in self._known(topic, broker)}
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

    async def brokers(self) -> tuple[str, ...]:
        """Return the names of all brokers."""
        await self.reach(NAME_SERVER)
        return tuple(sorted(self._brokers))

    async def clients(self, group: str, broker: str) -> tuple[Client, ...]:
        """Return who is online in a group."""
        await self.reach(broker)
        return tuple(Client(it.client_id, BROKER, "PYTHON") for it in self._online(group, broker))

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

    async def ends(self, topic: str, broker: str) -> dict[Queue, Ends]:
        """Return where a topic's queues begin and end."""
        await self.reach(broker)
        found = self._known(topic, broker).items()
        return {queue: Ends(self.firsts[queue], len(log), _stored(log[-1:])) for queue, log in found}

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Give locks back in somebody's name; those of others stay."""
        for queue in queues:
            await self.reach(queue.broker)
            if self.locks.get((group, queue), ("", 0))[0] == client_id:
                del self.locks[group, queue]

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        """Send a message, to one queue or to any."""
        queue = queue or choice(await self.queues(topic))  # noqa: S311 - not a secret
        await self.log(queue)
        if not body:
            raise Refused(f"A message to {queue} has no body")
        unique = {"UNIQ_KEY": f"{next(self._places):032X}", **(properties or {})}
        self.store(Message(queue, 0, body, unique, born=int(self.clock() * 1000)))

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

    def _known(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
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


class MemoryConsumer:
    """A member of a group in memory: `Consumer`."""

    def __init__(self, memory: Memory, member: Membership) -> None:
        """Do nothing yet."""
        self._memory, self._member, self._group = memory, member, member.group
        self._subscriptions = member.topics
        self._tags = {topic: frozenset(tags_of(it)) for topic, it in member.topics.items()}

    async def check(self) -> None:
        """Ask whether the subscriptions are taken."""
        await self._look()
        for topic in self._subscriptions:
            self._take_tags_only(topic)

    def _take_tags_only(self, topic: str) -> None:
        if topic not in self._subscriptions:
            raise ValueError(f"{self._group} has not subscribed to {topic}")
        if self._subscriptions[topic].type != "Tag":  # what follows are a real one's words
            raise Refused(f"{topic}: The broker does not support consumer to filter message by SQL92")

    async def join(self) -> None:
        """Become known."""
        await self._look()
        self._memory.house(self._member)
        self._memory.members[self._group].append(self._member)
        self._memory.tell(self._group)

    async def leave(self) -> None:
        """Go; what waits for an answer fails."""
        for waiter, (_, who) in self._memory.held.items():
            if who is self and not waiter.done():
                waiter.set_exception(Unreachable("The member has closed its connections"))
        if self._member in self._memory.members[self._group]:
            self._memory.members[self._group].remove(self._member)
            self._memory.tell(self._group)

    async def _look(self) -> None:
        await self._memory.reach(NAME_SERVER)
        if not self._memory.where(self._member):
            await self._memory.queues(next(iter(self._subscriptions)))  # says why

    async def pull(self, queue: Queue, offset: int, *, most: int = 32, wait: float = 15.0) -> Pulled:
        """Ask for messages from an offset on; where there are none, wait for some."""
        now = asyncio.get_running_loop().time
        until = now() + wait
        found = await self._fetch(queue, offset, most)
        if found.next == offset:  # there was not even one to be passed over
            while not (found.messages or found.moved) and now() < until:
                await self._memory.more(queue, self, until - now())
                found = await self._fetch(queue, offset, most)
        tags = self._tags[queue.topic]
        return found._replace(messages=tuple(it for it in found.messages if not tags or it.tag in tags))

    async def _fetch(self, queue: Queue, offset: int, most: int) -> Pulled:
        """Ask as a broker is asked: it looks at the hash of a tag only."""
        group, memory = self._group, self._memory
        log, first = await memory.log(queue), memory.firsts[queue]
        if not memory.group(group, queue.broker).enabled:
            raise SwitchedOff(f"The group {group} is switched off on {queue.broker}")
        self._take_tags_only(queue.topic)
        hashes = {*map(java_hash, self._tags[queue.topic])}
        if queue in memory.marked[group]:
            memory.marked[group].remove(queue)
            return Pulled((), memory.offsets[group][queue], first, len(log), Moved.RESET)
        if not first <= offset <= len(log):
            return Pulled((), first if offset < first else len(log), first, len(log), Moved.OUTSIDE)
        found: list[Message] = []
        at, most = offset, min(max(most, 1), MOST)
        while at < len(log) and len(found) < most:
            if not hashes or java_hash(log[at].tag) in hashes:
                found.append(log[at])
            at += 1
        memory.pulled[group][queue] = at
        return Pulled(tuple(found), at, first, len(log))

    async def give_back(self, message: Message, *, level: int = LATER, attempts: int = 16) -> None:
        """Have a message tried again later, or never."""
        memory, group, broker = self._memory, self._group, message.queue.broker
        log = await memory.log(message.queue)
        if not 0 <= message.offset < len(log):
            raise Refused(f"There is no message {message.offset} in {message.queue}")
        found = log[message.offset]
        dead = level < 0 or found.attempt >= attempts
        topic, queues = (DEAD, 1) if dead else (RETRY, memory.group(group, broker).retry_queues)
        queue = choice(memory.make(topic + group, broker, queues))  # noqa: S311 - not a secret
        told = {"ORIGIN_MESSAGE_ID": f"{found.place:032X}", "RETRY_TOPIC": found.queue.topic, **found.properties}
        told |= {"WAIT": "false", "DELAY": str(0 if dead else level or 3 + found.attempt)}
        memory.store(replace(found, queue=queue, properties=told, attempt=found.attempt + 1))

    async def committed(self, queue: Queue) -> int | None:
        """Return where the group is, or None where it never was."""
        await self._memory.log(queue)
        return self._memory.offsets[self._group].get(queue)

    async def commit(self, queue: Queue, offset: int) -> None:
        """Say where the group is; anybody may."""
        if offset < 0:
            raise ValueError(f"{offset} is no offset to commit for {queue}")
        await self._memory.log(queue)
        self._memory.group(self._group, queue.broker, make=False)
        if queue not in self._memory.marked[self._group]:
            self._memory.offsets[self._group][queue] = offset

    async def first(self, queue: Queue) -> int:
        """Return the offset of a queue's oldest message."""
        await self._memory.log(queue)
        return self._memory.firsts[queue]

    async def last(self, queue: Queue) -> int:
        """Return the offset that a queue's next message will have."""
        return len(await self._memory.log(queue))

    async def at(self, queue: Queue, seconds: float) -> int:
        """Return the offset of the first message that was stored at a time or later."""
        await self._memory.log(queue)
        return self._memory.search(queue, seconds)

    async def lock(self, queues: Collection[Queue]) -> frozenset[Queue]:
        """Ask for queues of one broker to be locked; return those that are."""
        (broker,) = {queue.broker for queue in queues}
        await self._memory.reach(broker)
        locks, me, now, mine = self._memory.locks, self._member.client_id, self._memory.clock(), set()
        for queue in queues:
            owner, until = locks.get((self._group, queue), (me, now))
            if owner == me or until < now:
                locks[self._group, queue] = me, now + LOCK_SECONDS
                mine.add(queue)
        return frozenset(mine)

    async def unlock(self, queues: Collection[Queue]) -> None:
        """Give locks back."""
        await self._memory.unlock(self._group, self._member.client_id, queues)


def _stored(one: Sequence[Message]) -> float:
    return one[0].stored / 1000 if one else 0.0
