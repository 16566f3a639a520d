"""Messages of the in-memory cluster: topics, their queues, delayed messages, and the pulls that wait for messages."""

import asyncio
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from rota.brokers.errors import UnreachableError
from rota.brokers.message import Message
from rota.model import Queue

DELAY_LEVEL_SECONDS = (0, 1, 5, 10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200)  # by level, as at a real broker


class _ScheduledMessage(NamedTuple):
    """A message, and when to append it to its queue; entries sort by due time, then by commit log offset."""

    due_at: float
    commit_log_offset: int
    message: Message


class MessageStore:
    """The messages of all queues, and the pulls that wait for further ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.min_offsets: defaultdict[Queue, int] = defaultdict(int)  # tests raise it: older messages have expired
        self.compressed_ids: set[str] = set()  # ids of messages whose body the producer compressed with ZLIB
        self.commit_log_offsets = count(1)  # the next ones
        self._topics: dict[str, dict[Queue, list[Message]]] = {}
        self._scheduled: list[_ScheduledMessage] = []  # every message until it is due, also without a delay; sorted
        self._waiting_pulls: dict[asyncio.Future[None], tuple[Queue, object]] = {}  # queue and consumer of each

    def create_queues(self, topic: str, broker: str, queue_count: int) -> list[Queue]:
        """Create those of a topic's queues on a broker that do not exist yet; return all of them."""
        queues = [Queue(topic, broker, number) for number in range(queue_count)]
        for queue in queues:
            self._topics.setdefault(topic, {}).setdefault(queue, [])
        return queues

    def delete_topic(self, topic: str) -> None:
        """Delete a topic on all brokers."""
        self._topics.pop(topic, None)
        self._scheduled = [entry for entry in self._scheduled if entry.message.queue.topic != topic]
        for queue in queues_of_topic(self.min_offsets, topic):
            del self.min_offsets[queue]

    def logs_of(self, topic: str) -> dict[Queue, list[Message]]:
        """Return the messages of each queue of a topic, indexed by offset; a missing topic has no queues."""
        return self._topics.get(topic, {})

    def logs_at(self, topic: str, broker: str) -> dict[Queue, list[Message]]:
        """Return the messages of each queue of a topic on a broker."""
        return {queue: log for queue, log in self.logs_of(topic).items() if queue.broker == broker}

    def brokers_of(self, topics: Iterable[str]) -> list[str]:
        """Return the brokers that have queues of these topics, sorted."""
        brokers: set[str] = set()
        for topic in topics:
            brokers.update(queue.broker for queue in self.logs_of(topic))
        return sorted(brokers)

    def find_offset(self, queue: Queue, timestamp: float | None) -> int:
        """Return the offset of the first message stored at this time or later; None: the queue's end."""
        stored_ms = inf if timestamp is None else round(timestamp * 1000)
        offset = bisect_left(self._topics[queue.topic][queue], stored_ms, key=lambda message: message.stored_ms)
        return max(offset, self.min_offsets[queue])

    def append(self, message: Message) -> None:
        """Append a message to its queue, after the delay of its DELAY level if it has one."""
        level = min(int(message.properties.get("DELAY", 0)), len(DELAY_LEVEL_SECONDS) - 1)
        if level:
            origin = {"REAL_TOPIC": message.queue.topic, "REAL_QID": str(message.queue.id)}
            message = replace(message, properties={**message.properties, **origin})
        due_at = self.clock() + DELAY_LEVEL_SECONDS[level]
        insort(self._scheduled, _ScheduledMessage(due_at, next(self.commit_log_offsets), message))
        self.append_due_messages()

    def append_due_messages(self) -> None:
        """Append the delayed messages that are due to their queues, and wake the pulls that wait there.

        There is no timer: the cluster calls this method at each request. A pull waits at most until the next message is
        due, and then fetches again (`wait_for_messages`).
        """
        while self._scheduled and self._scheduled[0].due_at <= self.clock():
            _, commit_log_offset, message = self._scheduled.pop(0)
            log = self._topics[message.queue.topic][message.queue]
            stored_ms = int(self.clock() * 1000)
            log.append(replace(message, offset=len(log), stored_ms=stored_ms, commit_log_offset=commit_log_offset))
            for waiter, (queue, _) in self._waiting_pulls.items():
                if queue == message.queue and not waiter.done():
                    waiter.set_result(None)

    async def wait_for_messages(self, queue: Queue, consumer: object, timeout_seconds: float) -> None:
        """Wait until the queue may have another message; raise `UnreachableError` if the connection is lost."""
        wait_seconds = timeout_seconds
        if self._scheduled:  # also of another queue
            wait_seconds = min(timeout_seconds, self._scheduled[0].due_at - self.clock())
        waiter = asyncio.get_running_loop().create_future()
        self._waiting_pulls[waiter] = queue, consumer
        try:
            await asyncio.wait([waiter], timeout=wait_seconds)
            if waiter.done():
                waiter.result()  # raises if the connection was lost
        finally:
            del self._waiting_pulls[waiter]

    def disconnect_broker(self, broker: str) -> None:
        """Fail the waiting pulls at a broker."""
        for waiter, (queue, _) in self._waiting_pulls.items():
            if queue.broker == broker and not waiter.done():
                waiter.set_exception(UnreachableError(f"{broker} closed the connection"))

    def disconnect_consumer(self, consumer: object) -> None:
        """Fail the waiting pulls of a consumer."""
        for waiter, (_, waiting_consumer) in self._waiting_pulls.items():
            if waiting_consumer is consumer and not waiter.done():
                waiter.set_exception(UnreachableError("The member has closed its connections"))


def queues_of_topic(queues: Iterable[Queue], topic: str) -> list[Queue]:
    """Return those of the queues that belong to a topic."""
    return [queue for queue in queues if queue.topic == topic]
