"""In-memory cluster: the operator's `Brokers` interface, and operations of tests: outages, topics, offset resets."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from random import choice
from typing import Any

from rota.brokers.errors import NotFoundError, RejectedError, UnreachableError
from rota.brokers.memory.consumer_groups import ConsumerGroups
from rota.brokers.memory.message_store import MessageStore
from rota.brokers.message import Message, extra_properties_bytes, text_bytes
from rota.brokers.port import BrokerGroupSettings, BrokerOffsets, Membership, OffsetRange, OnlineConsumer
from rota.brokers.rocketmq.wire.messages import write_properties
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.spec.consumer_settings import ConsumerSettings, Model

BROKER = "memory"
NAME_SERVER = "name-server"  # can be down like a broker; routes are unavailable then


class MemoryCluster:
    """In-memory cluster that implements `Brokers`; methods outside of that port serve `MemoryConsumer` and tests."""

    def __init__(self, brokers: Sequence[str] = (BROKER,), clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.store = MessageStore(clock)
        self.groups = ConsumerGroups(clock)
        self._brokers = tuple(brokers)
        self._down: set[str] = set()

    # Operations of tests.

    def take_down(self, name: str) -> None:
        """Make a broker or the name server unreachable; pulls that wait there fail."""
        self._down.add(name)
        self.store.disconnect_broker(name)

    def bring_up(self, name: str, *, restarted: bool = False) -> None:
        """Make a broker or the name server reachable; a restarted broker has lost its locks.

        All members are notified, as by a real broker to which members connect again.
        """
        self._down.discard(name)
        if restarted:
            self.groups.drop_locks(name)
        for group in self.groups.members:
            self.groups.notify_members(group)

    async def create_topic(self, topic: str, broker: str, queues: int) -> None:
        """Create a topic on a broker, or add queues to it."""
        await self.simulate_request(broker)
        self.store.create_queues(topic, broker, queues)
        # The broker may be a new one for members that subscribe to the topic: they need their retry topic there, too.
        for member in chain.from_iterable(self.groups.members.values()):
            self.create_retry_queues(member)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic on all brokers, and the offsets of all groups in it."""
        self.store.delete_topic(topic)
        self.groups.forget_topic(topic)

    async def update_group(self, group: str, broker: str, **changed: Any) -> None:
        """Create a group on a broker, or change the named fields of its `BrokerGroupSettings`."""
        await self.simulate_request(broker)
        self.groups.update_settings(group, broker, changed)

    async def reset_offsets(
        self, group: str, topic: str, broker: str, timestamp: float | None = None
    ) -> dict[Queue, int]:
        """Reset a group's offsets to a time, or to the end; return them.

        Commits of a queue are ignored until its next pull: they would undo the reset.
        """
        await self.simulate_request(broker)
        self.groups.require_settings(group, broker, create=False)
        offsets = {queue: self.store.find_offset(queue, timestamp) for queue in self.require_topic(topic, broker)}
        self.groups.reset_offsets(group, offsets)
        return offsets

    # `Brokers`.

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        await self.simulate_request(NAME_SERVER)
        if queues := self.store.logs_of(topic):
            return tuple(sorted(queues))
        raise NotFoundError(f"There is no topic {topic}")

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        return Counter([queue.broker for queue in await self.queues(topic)])

    async def broker_names(self) -> tuple[str, ...]:
        await self.simulate_request(NAME_SERVER)
        return tuple(sorted(self._brokers))

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return one address for each of these brokers; another instance returns others, as it is another cluster."""
        return frozenset(f"{name}@{id(self):x}" for name in self._brokers if name in brokers)

    async def online_consumers(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        await self.simulate_request(broker)
        online = self._online(group, broker)
        return tuple(OnlineConsumer(member.client_id, address=BROKER, language="PYTHON") for member in online)

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return the settings of an online consumer; raise `RejectedError` if it is not online."""
        await self.simulate_request(broker)
        for member in self._online(group, broker):
            if member.client_id == client_id:
                subscriptions = sorted(member.subscriptions_by_topic.values(), key=lambda sub: sub.topic)
                model: Model = "Broadcasting" if member.broadcasting else "Clustering"
                return ConsumerSettings(tuple(subscriptions), model, member.get_start_from().position)
        raise RejectedError(f"{client_id} is not online in {group}")

    async def group_settings(self, group: str, broker: str) -> BrokerGroupSettings:
        await self.simulate_request(broker)
        return self.groups.require_settings(group, broker)

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        """Return a group's offsets in a broker's queues; while members are online, only of topics that they subscribe.

        Real brokers have the same rule.
        """
        await self.simulate_request(broker)
        committed = self.groups.committed_offsets[group]
        pulled = self.groups.pulled_offsets[group]
        requested = {*topics} or {queue.topic for queue in committed}  # default: all with a committed offset
        if online := self._online(group, broker):
            requested.intersection_update(chain.from_iterable(member.subscriptions_by_topic for member in online))
        offsets: dict[Queue, BrokerOffsets] = {}
        for topic in requested:
            for queue, log in self.store.logs_at(topic, broker).items():
                offset = committed.get(queue, 0)
                last_consumed = log[max(offset - 1, 0) : offset]  # one message; none at offset 0 or behind the end
                pulled_offset = max(offset, pulled.get(queue, 0))
                offsets[queue] = BrokerOffsets(
                    max_offset=len(log),
                    committed_offset=offset,
                    pulled_offset=pulled_offset,
                    consumed_until=_stored_at(last_consumed),
                )
        return offsets

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        await self.simulate_request(queue.broker)
        return self.groups.committed_offsets[group].get(queue)

    async def offset_at_time(self, queue: Queue, timestamp: float) -> int:
        await self.messages_of(queue)  # raises NotFoundError for a missing queue
        return self.store.find_offset(queue, timestamp)

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        await self.simulate_request(broker)
        min_offsets = self.store.min_offsets
        logs = self.require_topic(topic, broker).items()
        return {queue: OffsetRange(min_offsets[queue], len(log), _stored_at(log[-1:])) for queue, log in logs}

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Release queue locks on behalf of a client; locks of other clients stay."""
        failed = []
        for queue in queues:
            try:
                await self.simulate_request(queue.broker)
            except UnreachableError as error:  # continue with the other brokers
                failed.append(error)
            else:
                self.groups.unlock(group, client_id, queue)
        if failed:
            raise failed[0]

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        queue = queue or choice(await self.queues(topic))  # noqa: S311 - not a secret
        if queue.topic != topic:
            raise ValueError(f"{queue} is not a queue of topic {topic}")
        await self.messages_of(queue)  # raises NotFoundError for a missing queue
        write_properties(properties or {})  # raises ValueError for properties that cannot be sent
        if not body:
            raise RejectedError(f"A message to {queue} has no body")
        # UNIQ_KEY is the id that a producer gives to each message: a commit log offset is as unique.
        stored_properties = {"UNIQ_KEY": f"{next(self.store.commit_log_offsets):032X}", **(properties or {})}
        size_bytes = sum(map(text_bytes, chain(stored_properties, stored_properties.values())))
        # The memory of properties beyond those of an ordinary message.
        extra_bytes = extra_properties_bytes(len(stored_properties), size_bytes)
        born_ms = int(self.clock() * 1000)
        # The store sets the offset, here 0, when it appends the message to its queue.
        self.store.append(Message(queue, 0, body, stored_properties, born_ms=born_ms, properties_bytes=extra_bytes))

    def reconnect(self) -> None:
        """Do nothing: the in-memory cluster has no connections."""

    async def close(self) -> None:
        """Do nothing: the in-memory cluster has no connections."""

    # Shared with `MemoryConsumer`.

    async def simulate_request(self, name: str) -> None:
        """Do what each request does: raise `UnreachableError` if the server is down, and deliver due messages."""
        await asyncio.sleep(0)  # let other tasks run, as a network request would
        if name in self._down or name not in {*self._brokers, NAME_SERVER}:
            raise UnreachableError(f"{name} cannot be reached")
        self.store.append_due_messages()

    async def messages_of(self, queue: Queue) -> list[Message]:
        """Return the messages of a queue, indexed by offset; raise `NotFoundError` if the queue does not exist."""
        await self.simulate_request(queue.broker)
        log = self.store.logs_of(queue.topic).get(queue)
        if log is None:
            raise NotFoundError(f"There is no queue {queue}")
        return log

    def require_topic(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
        """Return the queues of a topic on a broker with their messages; raise `NotFoundError` if it has none."""
        if logs := self.store.logs_at(topic, broker):
            return logs
        raise NotFoundError(f"There is no topic {topic} on {broker}")

    def create_retry_queues(self, member: Membership) -> None:
        """Create a member's group and its retry topic on all brokers of the member's topics."""
        for broker in self.store.brokers_of(member.subscriptions_by_topic):
            queue_count = self.groups.require_settings(member.group, broker).retry_queues
            self.store.create_queues(RETRY_TOPIC_PREFIX + member.group, broker, queue_count)

    def _online(self, group: str, broker: str) -> list[Membership]:
        brokers_of = self.store.brokers_of
        return [member for member in self.groups.members[group] if broker in brokers_of(member.subscriptions_by_topic)]


def _stored_at(messages: Sequence[Message]) -> float:
    """Return when the message in a list of at most one was stored, in seconds since 1970; 0: the list is empty."""
    return messages[0].stored_ms / 1000 if messages else 0.0
