"""Input of the checker: messages that a producer sends continuously, and the deliveries in the logs of apps."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count, pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple

from rota.brokers.errors import BrokerError
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.model import RETRY_TOPIC_PREFIX, Queue
from sidecar.checker import Commit, Delivery, Fact, Sent

MESSAGES_PER_SECOND = 200
OFFSET_POLL_SECONDS = 1.0


class Traffic:
    """Sends numbered messages to all queues of a topic in turns, and polls the group's committed offsets."""

    def __init__(self, name_server: str, group: str, topic: str, queues: int) -> None:
        self._config = ConnectionConfig([name_server])
        self._group = group
        self._queues = [Queue(topic, "broker-0", number) for number in range(queues)]
        self._numbers = count()
        self.sent: list[Sent] = []
        self.commits: list[Commit] = []

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Send continuously inside the context."""
        stopped = Event()
        thread = Thread(target=lambda: asyncio.run(self._flow(stopped)), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    async def _flow(self, stopped: Event) -> None:
        client = AdminClient(self._config)
        poll = asyncio.create_task(self._poll_offsets(client))
        started_at = time.monotonic()
        for turn in count():
            if stopped.is_set():
                break
            await asyncio.gather(*(self._send(client, queue) for queue in self._queues))
            await asyncio.sleep(started_at + (turn + 1) * len(self._queues) / MESSAGES_PER_SECOND - time.monotonic())
        poll.cancel()
        with suppress(asyncio.CancelledError):
            await poll
        await client.close()

    async def _send(self, client: AdminClient, queue: Queue) -> None:
        number = next(self._numbers)
        at = time.monotonic()
        acked = True
        try:
            await client.send(queue.topic, b"%d %s" % (number, b"x" * 100), queue=queue)
        except BrokerError:
            acked = False
        self.sent.append(Sent(number, queue, at, acked))

    async def _poll_offsets(self, client: AdminClient) -> None:
        topics = [self._queues[0].topic, RETRY_TOPIC_PREFIX + self._group]
        while True:
            with suppress(BrokerError):
                offsets = await client.group_offsets(self._group, self._queues[0].broker, topics)
                self.commits += [
                    Commit(time.monotonic(), queue, offset.committed_offset) for queue, offset in offsets.items()
                ]
            await asyncio.sleep(OFFSET_POLL_SECONDS)


class AppLogs:
    """The logs of a group's apps: each container has a file of its own, `<pod>@<start time>.jsonl`."""

    def __init__(self, folder: Path, group: str) -> None:
        self._folder = folder
        self._group = group
        self._read_bytes: dict[Path, int] = {}
        self._requests: dict[Path, dict[str, list[Delivery]]] = {}
        self._ends: dict[Path, Fact] = {}  # of containers that logged their end
        self._done: set[int] = set()
        self.orderly = False  # of the group: a rejected message is delivered again from its own queue

    def done(self) -> set[int]:
        """Return the numbers of all messages that an app has handled."""
        for path in self._folder.glob("*.jsonl"):
            self._requests.setdefault(path, {})  # an empty log, too, shows that the previous container has ended
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")  # the last line may be incomplete
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole + end)
            for line in whole.splitlines():
                self._parse(path, json.loads(line))
        return self._done

    def delivered(self) -> list[Delivery]:
        """Return all deliveries so far."""
        self.done()
        deliveries: list[Delivery] = []
        for requests in self._requests.values():
            deliveries += chain.from_iterable(requests.values())
        return deliveries

    def app_ends(self) -> Iterator[Fact]:
        """Yield the ends of apps, which end their open deliveries.

        A killed app logs no end: either the pod has a later container, or the pod's own end is known.
        """
        yield from self._ends.values()
        for path, following in pairwise(sorted(self._requests)):
            deliveries = [*chain.from_iterable(self._requests[path].values())]
            if _member(path) == _member(following) and path not in self._ends and deliveries:
                last_at = max(max(delivery.begin, delivery.end or 0.0) for delivery in deliveries)
                yield Fact(last_at, "app", _member(path))

    def _parse(self, path: Path, entry: dict[str, Any]) -> None:
        for key, kind in (("died", "app"), ("stopped", "stopped")):
            if key in entry:
                self._ends[path] = Fact(entry[key], kind, _member(path))
                return
        requests = self._requests[path]
        request = entry["name"]
        if "begin" in entry:
            requests[request] = [
                self._delivery(_member(path), entry["begin"], delivery) for delivery in entry["messages"]
            ]
            return
        requests[request] = [
            delivery._replace(end=entry["end"], status=entry["status"]) for delivery in requests[request]
        ]
        self._done |= {delivery.number for delivery in requests[request] if delivery.done}

    def _delivery(self, member: str, begin: float, message: dict[str, Any]) -> Delivery:
        attempt = message["attempt"]
        is_from_retry_topic = attempt != 1 and not self.orderly
        topic = RETRY_TOPIC_PREFIX + self._group if is_from_retry_topic else message["topic"]
        return Delivery(
            begin=begin,
            end=None,
            status=None,
            member=member,
            queue=Queue(topic, message["broker"], message["queue"]),
            offset=message["offset"],
            number=message["number"],
            attempt=attempt,
            generation=message["generation"],
            id=message["id"],
        )


def _member(path: Path) -> str:
    return path.name.partition("@")[0]


class Handovers(NamedTuple):
    """The number of handovers, and how long queues paused between their owners."""

    total: int
    median_seconds: float
    max_seconds: float


def measure_handovers(delivered: list[Delivery]) -> Handovers:
    """Measure handovers by the deliveries of each queue; queues without messages do not count."""
    by_queue: dict[Queue, list[Delivery]] = {}
    for delivery in sorted(delivered, key=lambda delivery: delivery.begin):
        if not delivery.queue.topic.startswith(RETRY_TOPIC_PREFIX):
            by_queue.setdefault(delivery.queue, []).append(delivery)
    pauses: list[float] = []
    for deliveries in by_queue.values():
        for previous, following in pairwise(deliveries):
            if previous.member != following.member:
                pauses.append(following.begin - (previous.end or previous.begin))
    return Handovers(len(pauses), median(pauses or [0.0]), max(pauses, default=0.0))
