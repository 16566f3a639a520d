"""What producers and apps note, for the checker: messages that are sent all the while, and where they came."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple

from rota.brokers.errors import BrokerError
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.model import RETRY_TOPIC_PREFIX, Queue
from sidecar.checker import Commit, Delivery, Fact, Sent

RATE = 200  # messages a second
_EVERY = 1.0  # seconds from one look at the group's offsets to the next


class Traffic:
    """Numbered messages to all queues of a topic in turns, and where the group is with them meanwhile."""

    def __init__(self, name_server: str, group: str, topic: str, queues: int) -> None:
        self._site, self._group = ConnectionConfig([name_server]), group
        self._queues = [Queue(topic, "broker-0", number) for number in range(queues)]
        self._numbers = count()
        self.sent: list[Sent] = []
        self.commits: list[Commit] = []

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Send all the while."""
        over = Event()
        thread = Thread(target=lambda: asyncio.run(self._flow(over)), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    async def _flow(self, over: Event) -> None:
        cluster = AdminClient(self._site)
        look = asyncio.create_task(self._look(cluster))
        begun = time.monotonic()
        for turn in count():
            if over.is_set():
                break
            await asyncio.gather(*(self._send(cluster, queue) for queue in self._queues))
            await asyncio.sleep(begun + (turn + 1) * len(self._queues) / RATE - time.monotonic())
        look.cancel()
        with suppress(asyncio.CancelledError):
            await look
        await cluster.close()

    async def _send(self, cluster: AdminClient, queue: Queue) -> None:
        number, at, acked = next(self._numbers), time.monotonic(), True
        try:
            await cluster.send(queue.topic, b"%d %s" % (number, b"x" * 100), queue=queue)
        except BrokerError:
            acked = False
        self.sent.append(Sent(number, queue, at, acked))

    async def _look(self, cluster: AdminClient) -> None:
        topics = [self._queues[0].topic, RETRY_TOPIC_PREFIX + self._group]
        while True:
            with suppress(BrokerError):
                found = await cluster.group_offsets(self._group, self._queues[0].broker, topics)
                self.commits += [Commit(time.monotonic(), queue, it.committed_offset) for queue, it in found.items()]
            await asyncio.sleep(_EVERY)


class Notes:
    """What the apps of a group note: each container has a file of its own, `<pod>@<when it began>.jsonl`."""

    def __init__(self, folder: Path, group: str) -> None:
        self._folder, self._group = folder, group
        self._read: dict[Path, int] = {}  # how far
        self._found: dict[Path, dict[str, list[Delivery]]] = {}
        self._ends: dict[Path, Fact] = {}  # of containers that noted their own
        self._done: set[int] = set()
        self.orderly = False  # whether the group is: then a message is tried again where it lies

    def done(self) -> set[int]:
        """Return the numbers of all messages that an app was done with."""
        for path in self._folder.glob("*.jsonl"):
            self._found.setdefault(path, {})  # also one that has got nothing yet: the container before it has ended
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")  # the last line may just be written
            self._read[path] = self._read.get(path, 0) + len(whole + end)
            for line in whole.splitlines():
                self._take(path, json.loads(line))
        return self._done

    def delivered(self) -> list[Delivery]:
        """Return all deliveries so far."""
        self.done()
        return [it for requests in self._found.values() for request in requests.values() for it in request]

    def died(self) -> Iterator[Fact]:
        """Yield when apps ended: what they had open then was open no more.

        Who was killed noted nothing: then another container was started in the pod, or the pod's end is known.
        """
        yield from self._ends.values()
        for path, following in pairwise(sorted(self._found)):
            notes = [note for (it,) in self._found[path].values() for note in (it.begin, it.end) if note]
            if _member(path) == _member(following) and path not in self._ends and notes:
                yield Fact(max(notes), "app", _member(path))

    def _take(self, path: Path, told: dict[str, Any]) -> None:
        for note, kind in (("died", "app"), ("stopped", "stopped")):
            if note in told:
                self._ends[path] = Fact(told[note], kind, _member(path))
                return
        requests, name = self._found[path], told["name"]
        if "begin" in told:
            requests[name] = [self._delivery(_member(path), told["begin"], it) for it in told["messages"]]
            return
        requests[name] = [it._replace(end=told["end"], status=told["status"]) for it in requests[name]]
        self._done |= {it.number for it in requests[name] if it.done}

    def _delivery(self, member: str, begin: float, message: dict[str, Any]) -> Delivery:
        attempt = message["attempt"]
        topic = (
            message["topic"] if attempt == 1 or self.orderly else RETRY_TOPIC_PREFIX + self._group
        )  # there it lies then
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


class Moves(NamedTuple):
    """How often another member went on with a queue, and how long nobody worked it before, in seconds."""

    many: int
    middle: float
    longest: float


def moves(delivered: list[Delivery]) -> Moves:
    """Return what is seen of handovers by those to whom messages come; quiet queues tell nothing."""
    by_queue: dict[Queue, list[Delivery]] = {}
    for it in sorted(delivered, key=lambda it: it.begin):
        if not it.queue.topic.startswith(RETRY_TOPIC_PREFIX):
            by_queue.setdefault(it.queue, []).append(it)
    pauses = [
        later.begin - (earlier.end or earlier.begin)
        for found in by_queue.values()
        for earlier, later in pairwise(found)
        if earlier.member != later.member
    ]
    return Moves(len(pauses), median(pauses or [0.0]), max(pauses, default=0.0))
