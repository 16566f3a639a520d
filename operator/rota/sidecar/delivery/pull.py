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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import count, takewhile
from typing import Protocol

import msgspec
from aiohttp import web

from rota.brokers.message import MEBIBYTE
from rota.deliveries import AppResponse, DeliveryOutcome
from rota.http_server import BodyReader, ServerLimits, listen
from rota.model import Queue, Reason
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery import settlement
from rota.sidecar.delivery.app_poll import AppPoll
from rota.sidecar.delivery.assignment_events import AssignmentStream
from rota.sidecar.delivery.pull_messages import AppMessage, MessageIds, OpenMessage
from rota.sidecar.delivery.scheduler import Batch, DeliveryScheduler
from rota.sidecar.delivery.settlement import Settlement
from rota.sidecar.member.window import OpenDelivery
from rota.sidecar.status.control_api import ReportSource, parse_wait
from rota.sidecar.status.sidecar_metrics import topic_label

PORT = 9912
MAX_MESSAGES = 1000  # messages in a response
MAX_RESPONSE_BYTES = 8 * MEBIBYTE  # bytes of a response; its last message may exceed this
MAX_CONCURRENT_SEND_BACKS = 32  # messages that end together are sent back to their brokers in groups of this size
WRITE_CHUNK_BYTES = 256 * 1024  # of a response at a time: the transport copies all bytes that it cannot send yet
MIN_SWEEP_SECONDS = 0.05  # seconds between two sweeps for overdue messages
STALL_SECONDS = 0.5  # seconds: a sweep is later than this only after a stall of the process
BIND_RETRY_SECONDS = 2.0  # seconds before a port that cannot be bound is tried again
MAX_IDS_BYTES = MEBIBYTE  # of acks or nacks in one request: those of 1,000 messages take 30 KiB
MAX_IDS_BODIES = 64  # being read at the same time
# Seconds for an idle connection of the app, which may process a message for long before its ack.
KEEP_ALIVE_SECONDS = 3600.0

_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)
_DELIVERY_OUTCOMES = {"later": DeliveryOutcome.NACK, "expired": DeliveryOutcome.TIMEOUT}


class PullHost(settlement.DeliveryHost, Protocol):
    """The member, as Pull delivery needs it."""

    @property
    def status(self) -> ReportSource:
        """The member's reports."""

    def start_task(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine as a task."""


class PullDelivery:
    """Hands messages out to apps that request them."""

    def __init__(self, host: PullHost, app_host: str, port: int = PORT) -> None:
        self._host = host
        self._app_host = app_host
        self._port = port
        self._scheduler = DeliveryScheduler(host.may_deliver)
        self._settlement = Settlement(host)
        self._assignments = AssignmentStream()
        self._polls: dict[AppPoll, None] = {}  # requests that wait, in the order of their arrival
        self._open_messages: dict[str, OpenMessage] = {}  # by ID, in the order of `handed_out_at`
        self._ids_body = BodyReader(MAX_IDS_BYTES, MAX_IDS_BODIES)
        self._visibility_timeout = 0.0  # seconds for which a message may be open
        process_id = secrets.token_hex(6)
        self._handout_ids = (f"{process_id}-{number}" for number in count(1))
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_fill_scheduled = False
        self._closed = False
        self._runner: web.AppRunner | None = None

    async def serve(self) -> None:
        """Open the port; while it cannot be bound, report the problem and retry."""
        while not self._closed:
            app = web.Application()
            app.add_routes(
                [
                    web.get("/v1/messages", self._handle_poll, allow_head=False),
                    web.post("/v1/acks", partial(self._handle_ids, self._ack)),
                    web.post("/v1/nacks", partial(self._handle_ids, partial(self._retry_messages, "later"))),
                    web.get("/v1/assignments", self._assignments.stream_changes, allow_head=False),
                ]
            )
            try:
                self._runner = await listen(
                    app, self._app_host, self._port, limits=ServerLimits(keepalive_seconds=KEEP_ALIVE_SECONDS)
                )
            except ValueError as error:
                self._host.problems.set_problem(Reason.PULL_PORT_UNAVAILABLE, str(error))
                await asyncio.sleep(BIND_RETRY_SECONDS)
                continue
            self._host.problems.set_problem(Reason.PULL_PORT_UNAVAILABLE, "")
            break
        if self._closed:
            await self.close()

    async def close(self) -> None:
        """End the waiting requests, and close the port."""
        self._closed = True
        self._host.problems.set_problem(Reason.PULL_PORT_UNAVAILABLE, "")
        for poll in self._polls:
            poll.end_wait(poll.batches)
        self._assignments.close()
        if self._sweep_timer:
            self._sweep_timer.cancel()
        if self._runner:
            await self._runner.cleanup()

    # Handing out.

    def offer(self, reader: QueueReader) -> None:
        """Hand out from a queue: it has messages, or may deliver again."""
        if not reader.window.stopped:
            self._scheduler.offer(reader.queue, reader.window)
            if self._polls and not self._is_fill_scheduled:
                self._is_fill_scheduled = True
                asyncio.get_running_loop().call_soon(self._serve_polls)

    def apply_settings(self) -> None:
        """Apply the current settings."""
        previous = self._visibility_timeout
        self._visibility_timeout = self._host.settings.delivery.pull.visibility_timeout
        if self._visibility_timeout != previous:
            self._sweep()

    def on_queues_changed(self) -> None:
        """Publish the held queues to the app, and hand out no more from released ones."""
        for queue in self._assignments.update_held(self._host.status.report()):
            self._scheduler.withdraw(queue)
        self._settlement.clear_solved_problem()

    def abort_deliveries(self, reader: QueueReader) -> None:
        """Take a queue's open messages back from the app now."""
        batches = [Batch(reader.queue, reader.window, delivery) for delivery in reader.window.open_deliveries]
        entries = [entry for entry in _entries_of(batches) if entry.is_open]
        self._take_back(entries)
        self._count_ended(entries, "cut")

    def _serve_polls(self) -> None:
        """Serve waiting requests while messages are available."""
        self._is_fill_scheduled = False
        for poll in [*self._polls]:
            if poll.is_waiting:
                batches = self._take_batches(poll.max_messages)
                if not batches:
                    return
                poll.end_wait(batches)

    def _take_batches(self, max_messages: int) -> list[Batch]:
        """Take up to `max_messages`, or fewer if they are large, from one queue after another."""
        batches: list[Batch] = []
        now = self._host.now()
        size = 0
        while max_messages > 0 and size < MAX_RESPONSE_BYTES:
            count_fitting = partial(self._count_fitting, max_messages, MAX_RESPONSE_BYTES - size)
            batch = self._scheduler.start_next(now, count_fitting)
            if batch is None:
                break
            batch.window.mark_sent(batch.delivery)
            batches.append(batch)
            max_messages -= len(batch.delivery.messages)
            size += sum([message.encoded_bytes for message in batch.delivery.messages])
        return batches

    def _count_fitting(self, max_messages: int, max_bytes: int, queue: Queue) -> int:
        """Return how many messages of a queue fit into the remaining response; at least one."""
        reader = self._host.reader_of(queue)
        return reader.window.count_fitting(max_messages, max_bytes) if reader else max_messages

    # Requests for messages.

    async def _handle_poll(self, request: web.Request) -> web.StreamResponse:
        max_text = request.query.get("max", "32")
        wait = parse_wait(request.query.get("wait", "10s"))
        if not _NUMBER.fullmatch(max_text) or not 1 <= int(max_text) <= MAX_MESSAGES or wait is None:
            expected = f"max must be a number from 1 to {MAX_MESSAGES}, wait must be a duration such as 10s"
            return web.Response(status=400, text=f"{expected}\n")
        poll = AppPoll(request, int(max_text))
        self._polls[poll] = None
        response = web.StreamResponse()
        try:
            self._serve_polls()
            await poll.wait(wait)
            await self._write_response(response, request, self._hand_out(poll.batches))
        except (ConnectionError, TimeoutError):
            self._take_back_batches(poll.batches)
        except BaseException:
            self._take_back_batches(poll.batches)
            raise
        finally:
            del self._polls[poll]
        return response

    async def _write_response(self, response: web.StreamResponse, request: web.Request, body: bytes) -> None:
        """Write a response as fast as the app reads it; after visibilityTimeout abort the connection."""
        response.content_type = "application/json"
        response.content_length = len(body)
        parts = memoryview(body)
        try:
            async with asyncio.timeout(self._visibility_timeout or None):
                await response.prepare(request)
                for start in range(0, len(body), WRITE_CHUNK_BYTES):
                    await response.write(parts[start : start + WRITE_CHUNK_BYTES])
                await response.write_eof()
        except TimeoutError:  # the messages have expired, so free their copies
            if request.transport:
                request.transport.abort()
            raise
        if request.transport is None:  # aiohttp does not raise an error when a connection ends
            raise ConnectionResetError

    def _hand_out(self, batches: Iterable[Batch]) -> bytes:
        """Return a response's body; its messages are open from now on."""
        now = self._host.now()
        handed_out: list[AppMessage] = []
        for batch in batches:
            for message in batch.delivery.messages:
                handout_id = next(self._handout_ids)
                attempt = self._settlement.attempt_number(batch, message)
                self._open_messages[handout_id] = OpenMessage(batch, message, now)
                handed_out.append(AppMessage.from_message(handout_id, message, attempt))
        if handed_out:
            self._schedule_sweep(now + self._visibility_timeout)
        if redelivered := sum([message.attempt > 1 for message in handed_out]):
            self._host.metrics.redelivered.inc(redelivered)
        return msgspec.json.encode({"messages": handed_out})

    def _take_back_batches(self, batches: Iterable[Batch]) -> None:
        """Take back messages that did not reach the app."""
        entries = _entries_of(batches)
        self._take_back(entries)
        self._wake_readers(entries)

    # Acks and nacks.

    async def _handle_ids(self, settle: Callable[[list[OpenMessage]], None], request: web.Request) -> web.Response:
        try:
            ids = msgspec.json.decode(await self._ids_body.read(request), type=MessageIds).ids
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            problem = f'The body must be {{"ids": [...]}} with message ids: {error}'
            return web.Response(status=400, text=f"{problem}\n")
        entries: list[OpenMessage] = []
        unknown: list[str] = []
        for handout_id in ids:
            entry = self._open_messages.pop(handout_id, None)
            if entry and entry.is_open:
                entries.append(entry)
            else:
                unknown.append(handout_id)
        settle(entries)
        return web.Response(body=msgspec.json.encode({"unknown": unknown}), content_type="application/json")

    def _ack(self, entries: Sequence[OpenMessage]) -> None:
        self._count_answers(entries, DeliveryOutcome.DONE)
        for entry in entries:
            self._settlement.ack(entry.batch, entry.message)
        self._count_ended(entries, "done")

    def _retry_messages(self, outcome: str, entries: Sequence[OpenMessage]) -> None:
        """Send messages back for another attempt, in a task: the app does not wait for the broker.

        Messages whose queue was reassigned during a stall are not sent back: the queue's next owner has them.
        """
        reassigned: list[OpenMessage] = []
        to_send_back: list[OpenMessage] = []
        for entry in entries:
            if self._host.may_send(entry.batch.queue, entry.handed_out_at):
                to_send_back.append(entry)
            else:
                reassigned.append(entry)
        self._take_back(reassigned)
        self._count_ended(reassigned, "cut")
        self._count_answers(to_send_back, _DELIVERY_OUTCOMES[outcome])
        exhausted = [entry for entry in to_send_back if self._settlement.is_last_attempt(entry.batch, entry.message)]
        retried = [entry for entry in to_send_back if not self._settlement.is_last_attempt(entry.batch, entry.message)]
        self._count_ended(retried, outcome)
        self._count_ended(exhausted, "dead")
        if to_send_back:
            self._host.start_task(self._send_back(to_send_back))

    def _count_answers(self, entries: Sequence[OpenMessage], outcome: DeliveryOutcome) -> None:
        """Count the app's answer to each message, while the number of its attempt is known."""
        now = self._host.now()
        counts = self._host.delivery_counts
        topics = self._host.settings.topics
        for entry in entries:
            attempt = self._settlement.attempt_number(entry.batch, entry.message)
            counts.count(entry.batch.queue, [(entry.message, attempt)], AppResponse(outcome), now)
            counts.count_time(topic_label(entry.message, topics), now - entry.handed_out_at)

    async def _send_back(self, entries: Sequence[OpenMessage]) -> None:
        for first in range(0, len(entries), MAX_CONCURRENT_SEND_BACKS):
            group = [entry for entry in entries[first : first + MAX_CONCURRENT_SEND_BACKS] if entry.is_open]
            await asyncio.gather(*(self._settlement.retry(entry.batch, entry.message) for entry in group))
            self._wake_readers(group)

    def _take_back(self, entries: Iterable[OpenMessage]) -> None:
        """Put messages back into their queues' windows."""
        for entry in entries:
            self._settlement.return_messages(entry.batch, [entry.message])
        # Drop entries that the app no longer has now, even before it names them: their bodies would stay in memory.
        self._open_messages = {name: entry for name, entry in self._open_messages.items() if entry.is_open}

    def _count_ended(self, entries: Iterable[OpenMessage], outcome: str) -> None:
        """Count ended messages; messages of one delivery and topic count together."""
        by_delivery: dict[tuple[OpenDelivery, str], list[OpenMessage]] = {}
        for entry in entries:
            by_delivery.setdefault((entry.batch.delivery, entry.message.topic), []).append(entry)
        now = self._host.now()
        for group in by_delivery.values():
            messages = [entry.message for entry in group]
            self._host.metrics.observe_delivery(now - group[0].handed_out_at, messages)
            self._host.on_delivery_ended(messages, outcome, now - group[0].handed_out_at)
        self._wake_readers(entries)

    def _wake_readers(self, entries: Iterable[OpenMessage]) -> None:
        """Wake the readers that wait for room or for the end of a drain, and offer returned messages again."""
        now = self._host.now()
        for queue in dict.fromkeys([entry.batch.queue for entry in entries]):
            if reader := self._host.reader_of(queue):
                reader.delivered_at = now
                reader.on_change()
                self.offer(reader)

    # Messages without an answer.

    def _schedule_sweep(self, when: float) -> None:
        if self._sweep_timer is None and not self._closed:
            now = self._host.now()
            due = max(now + MIN_SWEEP_SECONDS, when)
            self._sweep_timer = asyncio.get_running_loop().call_later(due - now, self._sweep_due, due)

    def _sweep_due(self, due: float) -> None:
        """Sweep; after a stall of the process, first read the acks that arrived meanwhile."""
        now = self._host.now()
        if now - due < STALL_SECONDS:
            self._sweep()
        else:
            self._sweep_timer = asyncio.get_running_loop().call_later(
                MIN_SWEEP_SECONDS, self._sweep_due, now + MIN_SWEEP_SECONDS
            )

    def _sweep(self) -> None:
        """Send overdue messages back, and schedule the sweep for the next one."""
        if self._sweep_timer:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        handed_out_until = self._host.now() - self._visibility_timeout
        overdue = list(takewhile(lambda item: item[1].handed_out_at <= handed_out_until, self._open_messages.items()))
        for handout_id, _ in overdue:
            del self._open_messages[handout_id]
        self._retry_messages("expired", [entry for _, entry in overdue if entry.is_open])
        oldest = next(iter(self._open_messages.values()), None)
        if oldest:
            self._schedule_sweep(oldest.handed_out_at + self._visibility_timeout)


def _entries_of(batches: Iterable[Batch]) -> list[OpenMessage]:
    """Return all messages of deliveries, open since their start."""
    return [
        OpenMessage(batch, message, batch.delivery.started_at)
        for batch in batches
        for message in batch.delivery.messages
    ]
