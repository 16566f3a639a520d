"""A member of a group in memory: `Consumer`."""

import asyncio
from collections.abc import Collection
from random import choice

from msgspec.structs import replace

from rota.brokers.errors import Refused, SwitchedOff, Unreachable
from rota.brokers.memory.cluster import LOCK_SECONDS, NAME_SERVER, Memory
from rota.brokers.message import Message
from rota.brokers.port import ADMIT_ALL, LATER, Admission, Membership, Moved, Pulled
from rota.brokers.rocketmq.wire.messages import ZLIB, java_hash, unpacked
from rota.brokers.rocketmq.wire.requests import one_broker
from rota.model import RETRY, Queue
from rota.spec.consumer_settings import tags_of

DEAD = "%DLQ%"
MOST, MOST_BYTES = 32, 256 * 1024  # of one pull, whatever is asked


class MemoryConsumer:
    """A member of a group in memory: `Consumer`."""

    def __init__(self, memory: Memory, member: Membership) -> None:
        """Do nothing yet."""
        self._memory, self._member, self._group = memory, member, member.group
        self._subscriptions = member.topics
        self._tags = {topic: frozenset(tags_of(it)) for topic, it in member.topics.items()}
        self._joined = self._left = False

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
        if self._joined or self._left:
            done = "has left" if self._left else "has joined"
            raise RuntimeError(f"{self._member.client_id} {done} {self._group} already; a member joins once")
        self._joined = True
        try:
            await self._look()
            self._stay()
            self._memory.house(self._member)
        except BaseException:
            self._joined = False
            raise
        self._memory.members[self._group].append(self._member)
        self._memory.tell(self._group)

    async def leave(self) -> None:
        """Go; what waits for an answer fails."""
        self._left = True
        for waiter, (_, who) in self._memory.held.items():
            if who is self and not waiter.done():
                waiter.set_exception(Unreachable("The member has closed its connections"))
        if self._member in self._memory.members[self._group]:
            self._memory.members[self._group].remove(self._member)
            self._memory.tell(self._group)

    def _stay(self) -> None:
        if self._left:
            raise Unreachable(f"{self._member.client_id} has left {self._group}")

    async def _log(self, queue: Queue) -> list[Message]:
        self._stay()
        return await self._memory.log(queue)

    async def _reach(self, broker: str) -> None:
        self._stay()
        await self._memory.reach(broker)

    async def _look(self) -> None:
        await self._reach(NAME_SERVER)
        if not self._memory.where(self._member):
            await self._memory.queues(next(iter(self._subscriptions)))  # says why

    async def pull(
        self,
        queue: Queue,
        offset: int,
        *,
        most: int = 32,
        wait: float = 15.0,
        commit: int | None = None,
        admission: Admission = ADMIT_ALL,
    ) -> Pulled:
        """Ask for messages from an offset on; where there are none, wait for some."""
        now = asyncio.get_running_loop().time
        until = now() + wait
        found = await self._fetch(queue, offset, most)
        if commit is not None:
            await self.commit(queue, commit)
        if found.next == offset:  # there was not even one to be passed over
            while not (found.messages or found.moved) and now() < until:
                await self._memory.more(queue, self, until - now())
                found = await self._fetch(queue, offset, most)
        tags = self._tags[queue.topic]
        found = self._admitted(found, admission)
        return found._replace(messages=tuple(it for it in found.messages if not tags or it.tag in tags))

    def _admitted(self, pulled: Pulled, admission: Admission) -> Pulled:
        """Return the messages up to the first that is not admitted, each unpacked as far as the limit allows."""
        messages: list[Message] = []
        for stored in pulled.messages:
            message = self._unpacked(stored, admission.largest_body_bytes)
            if not admission.admit(message.memory_bytes):
                return pulled._replace(messages=tuple(messages), next=message.offset)
            messages.append(message)
        return pulled._replace(messages=tuple(messages))

    def _unpacked(self, message: Message, limit: int) -> Message:
        if message.id not in self._memory.packed:
            return message
        body, damage = unpacked(message.body, ZLIB, limit)
        return replace(message, body=body, damage=damage)

    async def _fetch(self, queue: Queue, offset: int, most: int) -> Pulled:
        """Ask as a broker is asked: it looks at the hash of a tag only."""
        group, memory = self._group, self._memory
        log, first = await self._log(queue), memory.firsts[queue]
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
        at, size = offset, 0
        while at < len(log) and len(found) < min(max(most, 1), MOST):
            if not hashes or java_hash(log[at].tag) in hashes:
                size += len(log[at].body)
                if found and size > MOST_BYTES:
                    break
                found.append(log[at])
            at += 1
        memory.pulled[group][queue] = at
        return Pulled(tuple(found), at, first, len(log))

    async def reach(self, broker: str) -> None:
        """Ask a broker something."""
        await self._reach(broker)

    async def give_back(self, message: Message, *, level: int = LATER, attempts: int = 16) -> None:
        """Have a message tried again later, or never."""
        memory, group, broker = self._memory, self._group, message.queue.broker
        log = await self._log(message.queue)
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
        await self._log(queue)
        return self._memory.offsets[self._group].get(queue)

    async def commit(self, queue: Queue, offset: int) -> None:
        """Say where the group is; anybody may."""
        if offset < 0:
            raise ValueError(f"{offset} is no offset to commit for {queue}")
        await self._reach(queue.broker)
        self._memory.known(queue.topic, queue.broker)  # the queue may have left it
        self._memory.group(self._group, queue.broker, make=False)
        if queue not in self._memory.marked[self._group]:
            self._memory.offsets[self._group][queue] = offset

    async def first(self, queue: Queue) -> int:
        """Return the offset of a queue's oldest message."""
        await self._log(queue)
        return self._memory.firsts[queue]

    async def last(self, queue: Queue) -> int:
        """Return the offset that a queue's next message will have."""
        return len(await self._log(queue))

    async def at(self, queue: Queue, seconds: float) -> int:
        """Return the offset of the first message that was stored at a time or later."""
        await self._log(queue)
        return self._memory.search(queue, seconds)

    async def lock(self, queues: Collection[Queue]) -> frozenset[Queue]:
        """Ask for queues of one broker to be locked; return those that are."""
        await self._reach(one_broker(queues))
        locks, me, now, mine = self._memory.locks, self._member.client_id, self._memory.clock(), set()
        for queue in queues:
            owner, until = locks.get((self._group, queue), (me, now))
            if owner == me or until < now:
                locks[self._group, queue] = me, now + LOCK_SECONDS
                mine.add(queue)
        return frozenset(mine)

    async def unlock(self, queues: Collection[Queue]) -> None:
        """Give locks back."""
        await self._reach(one_broker(queues))
        await self._memory.unlock(self._group, self._member.client_id, queues)
