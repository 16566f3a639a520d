"""In-memory consumer: implements the broker port's `Consumer` on the in-memory cluster."""

import asyncio
from collections.abc import Collection
from random import choice

from msgspec.structs import replace

from rota.brokers.errors import ConsumptionDisabledError, RejectedError, UnreachableError
from rota.brokers.memory.cluster import LOCK_SECONDS, NAME_SERVER, MemoryCluster
from rota.brokers.message import Message
from rota.brokers.port import ADMIT_ALL, LATER, Admission, Membership, PullRedirect, PullResult
from rota.brokers.rocketmq.wire.messages import ZLIB, java_hash, unpacked
from rota.brokers.rocketmq.wire.requests import one_broker
from rota.model import RETRY, Queue
from rota.spec.consumer_settings import tags_of

DEAD = "%DLQ%"
MOST, MOST_BYTES = 32, 256 * 1024  # upper limits of one pull, whatever the caller requests


class MemoryConsumer:
    """A member of a group of the in-memory cluster; implements `Consumer`."""

    def __init__(self, memory: MemoryCluster, member: Membership) -> None:
        self._memory, self._member, self._group = memory, member, member.group
        self._subscriptions = member.topics
        self._tags = {topic: frozenset(tags_of(subscription)) for topic, subscription in member.topics.items()}
        self._joined = self._left = False

    async def check(self) -> None:
        """Raise `RejectedError` for a subscription that is not by tag."""
        await self._look()
        for topic in self._subscriptions:
            self._take_tags_only(topic)

    def _take_tags_only(self, topic: str) -> None:
        if topic not in self._subscriptions:
            raise ValueError(f"{self._group} has not subscribed to {topic}")
        if self._subscriptions[topic].type != "Tag":  # the message is a real broker's
            raise RejectedError(f"{topic}: The broker does not support consumer to filter message by SQL92")

    async def join(self) -> None:
        """Register in the group; callable once, and again only after a failure."""
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
        """Leave the group; pulls that wait fail with `UnreachableError`."""
        self._left = True
        for waiter, (_, consumer) in self._memory.held.items():
            if consumer is self and not waiter.done():
                waiter.set_exception(UnreachableError("The member has closed its connections"))
        if self._member in self._memory.members[self._group]:
            self._memory.members[self._group].remove(self._member)
            self._memory.tell(self._group)

    def _stay(self) -> None:
        if self._left:
            raise UnreachableError(f"{self._member.client_id} has left {self._group}")

    async def _log(self, queue: Queue) -> list[Message]:
        self._stay()
        return await self._memory.log(queue)

    async def _reach(self, broker: str) -> None:
        self._stay()
        await self._memory.reach(broker)

    async def _look(self) -> None:
        await self._reach(NAME_SERVER)
        if not self._memory.where(self._member):
            await self._memory.queues(next(iter(self._subscriptions)))  # raises the reason

    async def pull(
        self,
        queue: Queue,
        offset: int,
        *,
        most: int = 32,
        wait: float = 15.0,
        commit: int | None = None,
        admission: Admission = ADMIT_ALL,
    ) -> PullResult:
        """Request messages from an offset on; if the queue has none yet, wait for `wait` seconds."""
        now = asyncio.get_running_loop().time
        until = now() + wait
        pulled = await self._fetch(queue, offset, most)
        if commit is not None:
            await self.commit(queue, commit)
        if pulled.next == offset:  # the pull passed over no message either: the queue ends here
            while not (pulled.messages or pulled.moved) and now() < until:
                await self._memory.more(queue, self, until - now())
                pulled = await self._fetch(queue, offset, most)
        tags = self._tags[queue.topic]
        pulled = self._admitted(pulled, admission)
        return pulled._replace(
            messages=tuple(message for message in pulled.messages if not tags or message.tag in tags)
        )

    def _admitted(self, pulled: PullResult, admission: Admission) -> PullResult:
        """Unpack the pulled messages up to the limit; end the result before the first that is not admitted."""
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

    async def _fetch(self, queue: Queue, offset: int, most: int) -> PullResult:
        """Read messages like a real broker, which compares only the hashes of tags."""
        group, memory = self._group, self._memory
        log, first = await self._log(queue), memory.firsts[queue]
        if not memory.group(group, queue.broker).enabled:
            raise ConsumptionDisabledError(f"The group {group} is switched off on {queue.broker}")
        self._take_tags_only(queue.topic)
        hashes = {*map(java_hash, self._tags[queue.topic])}
        if queue in memory.marked[group]:
            memory.marked[group].remove(queue)
            return PullResult((), memory.offsets[group][queue], first, len(log), PullRedirect.RESET)
        if not first <= offset <= len(log):
            return PullResult((), first if offset < first else len(log), first, len(log), PullRedirect.OUTSIDE)
        messages: list[Message] = []
        at, size = offset, 0
        while at < len(log) and len(messages) < min(max(most, 1), MOST):
            if not hashes or java_hash(log[at].tag) in hashes:
                size += len(log[at].body)
                if messages and size > MOST_BYTES:
                    break
                messages.append(log[at])
            at += 1
        memory.pulled[group][queue] = at
        return PullResult(tuple(messages), at, first, len(log))

    async def reach(self, broker: str) -> None:
        """Raise `UnreachableError` if the broker is down."""
        await self._reach(broker)

    async def send_back(self, message: Message, *, level: int = LATER, attempts: int = 16) -> None:
        """Send a message back for redelivery after a delay, or to the dead-letter topic."""
        memory, group, broker = self._memory, self._group, message.queue.broker
        log = await self._log(message.queue)
        if not 0 <= message.offset < len(log):
            raise RejectedError(f"There is no message {message.offset} in {message.queue}")
        stored = log[message.offset]
        dead = level < 0 or stored.attempt >= attempts
        topic, queues = (DEAD, 1) if dead else (RETRY, memory.group(group, broker).retry_queues)
        queue = choice(memory.make(topic + group, broker, queues))  # noqa: S311 - not a secret
        retry = {"ORIGIN_MESSAGE_ID": f"{stored.place:032X}", "RETRY_TOPIC": stored.queue.topic, **stored.properties}
        retry |= {"WAIT": "false", "DELAY": str(0 if dead else level or 3 + stored.attempt)}
        memory.store(replace(stored, queue=queue, properties=retry, attempt=stored.attempt + 1))

    async def committed(self, queue: Queue) -> int | None:
        """Return the group's committed offset, or None if it never committed."""
        await self._log(queue)
        return self._memory.offsets[self._group].get(queue)

    async def commit(self, queue: Queue, offset: int) -> None:
        """Commit an offset for the group; like a real broker, accept it from any client."""
        if offset < 0:
            raise ValueError(f"{offset} is no offset to commit for {queue}")
        await self._reach(queue.broker)
        self._memory.known(queue.topic, queue.broker)  # checks the topic only: the queue may have left the topic
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
        """Return the offset of the first message that was stored at this time or later."""
        await self._log(queue)
        return self._memory.search(queue, seconds)

    async def lock(self, queues: Collection[Queue]) -> frozenset[Queue]:
        """Request locks on queues of one broker; return the queues that were locked."""
        await self._reach(one_broker(queues))
        locks, me, now, locked = self._memory.locks, self._member.client_id, self._memory.clock(), set()
        for queue in queues:
            owner, until = locks.get((self._group, queue), (me, now))
            if owner == me or until < now:
                locks[self._group, queue] = me, now + LOCK_SECONDS
                locked.add(queue)
        return frozenset(locked)

    async def unlock(self, queues: Collection[Queue]) -> None:
        """Release locks on queues of one broker."""
        await self._reach(one_broker(queues))
        await self._memory.unlock(self._group, self._member.client_id, queues)
