"""Pull delivery: the app requests messages, and acknowledges or rejects each of them.

| the app | the message |
|---|---|
| acknowledges it | is done |
| rejects it, or exceeds visibilityTimeout | is retried through the retry topic; after its last attempt: a dead letter |
| disconnects before the response is written | goes back at once, and no attempt is counted |

Each hand-out of a message gets a new ID, unique among all sidecars. So an ack or nack that comes too late, or reaches
another process, names an unknown ID and changes nothing.

No task or timer is created for a single message. Open messages are kept in the order in which they were handed out, so
overdue messages come first.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from typing import NamedTuple, Protocol, Self

import msgspec
from aiohttp import web

from rota.brokers.message import MEBIBYTE, Message
from rota.deliveries import AppAnswer, DeliveryOutcome
from rota.http_server import BodyReader, Limits, listen
from rota.model import Queue, Reason
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery import settlement
from rota.sidecar.delivery.asker import AppPoll
from rota.sidecar.delivery.assignment_events import Assignments
from rota.sidecar.delivery.scheduler import Batch, DeliveryScheduler
from rota.sidecar.delivery.settlement import Settlement
from rota.sidecar.member.window import Delivery
from rota.sidecar.status.control_api import ReportSource, duration
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import SidecarMetrics, topic_label

PORT = 9912
MOST = 1000  # messages in a response
LARGEST = 8 * MEBIBYTE  # bytes of a response; its last message may exceed this
SIDE_BY_SIDE = 32  # of messages that end together, so many are sent back to their brokers concurrently
WRITE_BYTES = 256 * 1024  # of a response at a time: the transport copies all bytes that it cannot send yet
LEAST_SWEEP = 0.05  # seconds between two sweeps for overdue messages
STOOD_STILL = 0.5  # seconds: a sweep is later than this only after a stall of the process
OPEN_AGAIN = 2.0  # seconds before a port that cannot be bound is tried again
MAX_IDS_BYTES = MEBIBYTE  # of acks or nacks in one request: those of 1,000 messages take 30 KiB
MAX_IDS_BODIES = 64  # being read at the same time
KEPT = 3600.0  # seconds for an idle connection of the app, which may process a message for long before its ack

_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)
_BY_OUTCOME = {"later": DeliveryOutcome.NACK, "expired": DeliveryOutcome.TIMEOUT}


class Handed(msgspec.Struct, omit_defaults=True):
    """A message as the app receives it."""

    id: str
    topic: str
    broker: str
    queue: int
    offset: int
    attempt: int
    tag: str
    keys: str
    properties: Mapping[str, str]
    body: bytes = msgspec.field(name="bodyBase64")
    damage: str = ""  # why the body differs from the producer's, if it does

    @classmethod
    def of(cls, handout_id: str, msg: Message, attempt: int) -> Self:
        """Return a message with the ID of this hand-out."""
        properties = dict(msg.properties)  # a message of a batch has a view, which cannot be encoded
        place, data = (msg.topic, msg.queue.broker, msg.queue.id, msg.offset), (msg.tag, msg.keys, properties, msg.body)
        return cls(handout_id, *place, attempt, *data, msg.damage)


class Ids(msgspec.Struct):
    """The hand-outs that the app acknowledges or rejects."""

    ids: list[str]


class Open(NamedTuple):
    """A message at the app, and since when."""

    taken: Batch
    message: Message
    since: float

    @property
    def here(self) -> bool:
        """Whether the app still has it: a queue that is cut takes its messages back."""
        return self.message.offset in self.taken.delivery.left


class PullHost(settlement.DeliveryHost, Protocol):
    """The member, as Pull delivery needs it."""

    health: Problems
    measures: SidecarMetrics

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery of this queue may start now."""

    def may_send(self, queue: Queue, since: float) -> bool:
        """Whether a message of that time may be sent back; not if its queue was reassigned during a stall."""

    @property
    def status(self) -> ReportSource:
        """The member's reports."""

    def start(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine as a task."""


class Pull:
    """Hands messages out to apps that request them."""

    def __init__(self, shell: PullHost, host: str, port: int = PORT) -> None:
        self._shell, self._host, self._port = shell, host, port
        self._shelf, self._endings = DeliveryScheduler(shell.may_deliver), Settlement(shell)
        self._assignments = Assignments()
        self._asking: dict[AppPoll, None] = {}  # requests that wait, in the order of their arrival
        self._open: dict[str, Open] = {}  # by ID, in the order of `since`
        self._ids_body = BodyReader(MAX_IDS_BYTES, MAX_IDS_BODIES)
        self._patience = 0.0  # seconds for which a message may be open
        self._names = (f"{name}-{number}" for name in [secrets.token_hex(6)] for number in count(1))
        self._sweeper: asyncio.TimerHandle | None = None
        self._woken = self._closed = False
        self._runner: web.AppRunner | None = None

    async def serve(self) -> None:
        """Open the port; while it cannot be bound, report the problem and retry."""
        while not self._closed:
            app = web.Application()
            app.add_routes(
                [
                    web.get("/v1/messages", self._messages, allow_head=False),
                    web.post("/v1/acks", partial(self._told, self._ack)),
                    web.post("/v1/nacks", partial(self._told, partial(self._later, "later"))),
                    web.get("/v1/assignments", self._assignments.follow, allow_head=False),
                ]
            )
            try:
                self._runner = await listen(app, self._host, self._port, limits=Limits(keepalive_seconds=KEPT))
            except ValueError as error:
                self._shell.health.trouble(Reason.PULL_NOT_ANSWERED, str(error))
                await asyncio.sleep(OPEN_AGAIN)
                continue
            self._shell.health.trouble(Reason.PULL_NOT_ANSWERED, "")
            break
        if self._closed:
            await self.close()

    async def close(self) -> None:
        """End the waiting requests, and close the port."""
        self._closed = True
        self._shell.health.trouble(Reason.PULL_NOT_ANSWERED, "")
        for asker in self._asking:
            asker.serve(asker.taken)
        self._assignments.close()
        if self._sweeper:
            self._sweeper.cancel()
        if self._runner:
            await self._runner.cleanup()

    # Handing out.

    def offer(self, reading: QueueReader) -> None:
        """Hand out from a queue: it has messages, or may deliver again."""
        if not reading.window.stopped:
            self._shelf.offer(reading.queue, reading.window)
            if self._asking and not self._woken:
                self._woken = True
                asyncio.get_running_loop().call_soon(self._fill)

    def wake(self) -> None:
        """Apply the current settings."""
        previous, self._patience = self._patience, self._shell.settings.delivery.pull.visibility_timeout
        if self._patience != previous:
            self._sweep()

    def queues_changed(self) -> None:
        """Publish the held queues to the app, and hand out no more from released ones."""
        for queue in self._assignments.told(self._shell.status.report()):
            self._shelf.withdraw(queue)
        self._endings.look()

    def cut(self, reading: QueueReader) -> None:
        """Take a queue's open messages back from the app now."""
        taken = [Batch(reading.queue, reading.window, delivery) for delivery in [*reading.window.open]]
        entries = [Open(batch, message, batch.delivery.since) for batch in taken for message in batch.delivery.messages]
        entries = [entry for entry in entries if entry.here]
        self._back(entries)
        self._ended(entries, "cut")

    def _fill(self) -> None:
        """Serve waiting requests while messages are available."""
        self._woken = False
        for asker in [*self._asking]:
            if asker.there:
                batches = self._take(asker.most)
                if not batches:
                    return
                asker.serve(batches)

    def _take(self, room: int) -> list[Batch]:
        """Take up to `room` messages, or fewer if they are large, from one queue after another."""
        batches: list[Batch] = []
        now, size = self._shell.now(), 0
        while (
            room > 0 and size < LARGEST and (batch := self._shelf.take(now, partial(self._most, room, LARGEST - size)))
        ):
            batch.window.note_given(batch.delivery)
            batches.append(batch)
            room -= len(batch.delivery.messages)
            size += sum([message.encoded_bytes for message in batch.delivery.messages])
        return batches

    def _most(self, room: int, size: int, queue: Queue) -> int:
        """Return how many messages of a queue fit into the remaining response; at least one."""
        reading = self._shell.reading(queue)
        return reading.window.fit(room, size) if reading else room

    # Requests for messages.

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        most, wait = request.query.get("max", "32"), duration(request.query.get("wait", "10s"))
        if not _NUMBER.fullmatch(most) or not 1 <= int(most) <= MOST or wait is None:
            expected = f"max is a number from 1 to {MOST}, wait a duration such as 10s"
            return web.Response(status=400, text=f"{expected}\n")
        asker = AppPoll(request, int(most))
        self._asking[asker] = None
        answer = web.StreamResponse()
        try:
            self._fill()
            await asker.wait(wait)
            await self._write(answer, request, self._hand_out(asker.taken))
        except (ConnectionError, TimeoutError):
            self._return(asker.taken)
        except BaseException:
            self._return(asker.taken)
            raise
        finally:
            del self._asking[asker]
        return answer

    async def _write(self, answer: web.StreamResponse, request: web.Request, body: bytes) -> None:
        """Write a response as fast as the app reads it; after visibilityTimeout abort the connection."""
        answer.content_type = "application/json"
        answer.content_length = len(body)
        parts = memoryview(body)
        try:
            async with asyncio.timeout(self._patience or None):
                await answer.prepare(request)
                for start in range(0, len(body), WRITE_BYTES):
                    await answer.write(parts[start : start + WRITE_BYTES])
                await answer.write_eof()
        except TimeoutError:  # the messages have expired, so free their copies
            if request.transport:
                request.transport.abort()
            raise
        if request.transport is None:  # aiohttp does not raise an error when a connection ends
            raise ConnectionResetError

    def _hand_out(self, batches: Iterable[Batch]) -> bytes:
        """Return a response's body; its messages are open from now on."""
        now, handed = self._shell.now(), []
        for batch in batches:
            for message in batch.delivery.messages:
                handout_id, attempt = next(self._names), self._endings.attempt(batch, message)
                self._open[handout_id] = Open(batch, message, now)
                handed.append(Handed.of(handout_id, message, attempt))
        if handed:
            self._sweep_at(now + self._patience)
        if redelivered := sum([message.attempt > 1 for message in handed]):
            self._shell.measures.redelivered.inc(redelivered)
        return msgspec.json.encode({"messages": handed})

    def _return(self, taken: Iterable[Batch]) -> None:
        """Take back messages that did not reach the app."""
        entries = [Open(batch, message, batch.delivery.since) for batch in taken for message in batch.delivery.messages]
        self._back(entries)
        self._changed(entries)

    # Acks and nacks.

    async def _told(self, handle: Callable[[list[Open]], None], request: web.Request) -> web.Response:
        try:
            ids = msgspec.json.decode(await self._ids_body.read(request), type=Ids).ids
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            problem = f'The body is to be {{"ids": [...]}}, with ids of messages: {error}'
            return web.Response(status=400, text=f"{problem}\n")
        entries, unknown = [], []
        for handout_id in ids:
            entry = self._open.pop(handout_id, None)
            if entry and entry.here:
                entries.append(entry)
            else:
                unknown.append(handout_id)
        handle(entries)
        return web.Response(body=msgspec.json.encode({"unknown": unknown}), content_type="application/json")

    def _ack(self, entries: Sequence[Open]) -> None:
        self._count_answers(entries, DeliveryOutcome.DONE)
        for entry in entries:
            self._endings.finish(entry.taken, entry.message)
        self._ended(entries, "done")

    def _later(self, outcome: str, entries: Sequence[Open]) -> None:
        """Send messages back for another attempt, in a task: the app does not wait for the broker.

        Messages whose queue was reassigned during a stall are not sent back: the queue's next owner has them.
        """
        reassigned: list[Open] = []
        returnable: list[Open] = []
        for entry in entries:
            (returnable if self._shell.may_send(entry.taken.queue, entry.since) else reassigned).append(entry)
        self._back(reassigned)
        self._ended(reassigned, "cut")
        entries = returnable
        self._count_answers(entries, _BY_OUTCOME[outcome])
        if entries:
            self._ended([entry for entry in entries if not self._endings.spent(entry.taken, entry.message)], outcome)
            self._ended([entry for entry in entries if self._endings.spent(entry.taken, entry.message)], "dead")
            self._shell.start(self._give_back(entries))

    def _count_answers(self, entries: Sequence[Open], outcome: DeliveryOutcome) -> None:
        """Count the app's answer to each message, while the number of its attempt is known."""
        now, counts, topics = self._shell.now(), self._shell.delivery_counts, self._shell.settings.topics
        for entry in entries:
            attempt = self._endings.attempt(entry.taken, entry.message)
            counts.count(entry.taken.queue, [(entry.message, attempt)], AppAnswer(outcome), now)
            counts.count_time(topic_label(entry.message, topics), now - entry.since)

    async def _give_back(self, entries: Sequence[Open]) -> None:
        for first in range(0, len(entries), SIDE_BY_SIDE):
            group = [entry for entry in entries[first : first + SIDE_BY_SIDE] if entry.here]
            await asyncio.gather(*(self._endings.later(entry.taken, entry.message) for entry in group))
            self._changed(group)

    def _back(self, entries: Iterable[Open]) -> None:
        for entry in entries:
            self._endings.back(entry.taken, [entry.message])
        self._open = {name: entry for name, entry in self._open.items() if entry.here}  # frees the other bodies

    def _ended(self, entries: Iterable[Open], outcome: str) -> None:
        """Count ended messages; messages of one delivery and topic count together."""
        by_delivery: dict[tuple[Delivery, str], list[Open]] = {}
        for entry in entries:
            by_delivery.setdefault((entry.taken.delivery, entry.message.topic), []).append(entry)
        now = self._shell.now()
        for group in by_delivery.values():
            messages = [entry.message for entry in group]
            self._shell.measures.answered(now - group[0].since, messages)
            self._shell.delivery_ended(messages, outcome, now - group[0].since)
        self._changed(entries)

    def _changed(self, entries: Iterable[Open]) -> None:
        """Wake the readers that wait for room or for the end of a drain, and offer returned messages again."""
        now = self._shell.now()
        for queue in dict.fromkeys([entry.taken.queue for entry in entries]):
            if reading := self._shell.reading(queue):
                reading.delivered_at = now
                reading.changed()
                self.offer(reading)

    # Messages without an answer.

    def _sweep_at(self, when: float) -> None:
        if self._sweeper is None and not self._closed:
            now = self._shell.now()
            due = max(now + LEAST_SWEEP, when)
            self._sweeper = asyncio.get_running_loop().call_later(due - now, self._sweep_due, due)

    def _sweep_due(self, due: float) -> None:
        """Sweep; after a stall of the process, first read the acks that arrived meanwhile."""
        now = self._shell.now()
        if now - due < STOOD_STILL:
            self._sweep()
        else:
            self._sweeper = asyncio.get_running_loop().call_later(LEAST_SWEEP, self._sweep_due, now + LEAST_SWEEP)

    def _sweep(self) -> None:
        """Send overdue messages back, and schedule the sweep for the next one."""
        if self._sweeper:
            self._sweeper.cancel()
            self._sweeper = None
        latest = self._shell.now() - self._patience
        overdue = list(takewhile(lambda item: item[1].since <= latest, self._open.items()))
        for name, _ in overdue:
            del self._open[name]
        self._later("expired", [entry for _, entry in overdue if entry.here])
        for entry in self._open.values():
            self._sweep_at(entry.since + self._patience)
            break
