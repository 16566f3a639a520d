"""Pull delivery: the app requests messages, and acknowledges or rejects each of them.

| the app | the message |
|---|---|
| acknowledges it | is done |
| rejects it, or exceeds visibilityTimeout | is retried through the retry topic; after its last attempt: a dead letter |
| disconnects before the response is written | stays with the member, which hands it out again; no attempt is counted |
"""

import asyncio
import re
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from rota.brokers.message import MEBIBYTE
from rota.http_server import BodyReader, ServerLimits, listen
from rota.model import Queue, Reason
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery.assignment_events import AssignmentStream
from rota.sidecar.delivery.pull_messages import HandoutTracker, OpenMessage
from rota.sidecar.delivery.scheduler import Batch, DeliveryScheduler
from rota.sidecar.delivery.settlement import DeliveryHost, Settlement
from rota.sidecar.status.control_api import parse_wait

PORT = 9912
MAX_MESSAGES = 1000  # messages in a response
MAX_RESPONSE_BYTES = 8 * MEBIBYTE  # bytes of a response; its last message may exceed this
WRITE_CHUNK_BYTES = 256 * 1024  # part of a response to write at once: the transport copies all it cannot send yet
BIND_RETRY_SECONDS = 2.0  # until a port that could not be bound is tried again
MAX_IDS_BYTES = MEBIBYTE  # body of an ack or nack request: 1,000 message ids take 30 KiB
MAX_IDS_BODIES = 64  # such bodies that are read at the same time
# Until an idle connection of the app is closed: the app may process a message for long before it sends the ack.
KEEP_ALIVE_SECONDS = 3600.0

_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)


class MessageIds(msgspec.Struct):
    """The hand-outs that the app acknowledges or rejects."""

    ids: list[str]


class AppPoll:
    """One request for messages, and the deliveries for its response."""

    def __init__(self, request: web.Request, max_messages: int) -> None:
        self.request = request
        self.max_messages = max_messages
        self.batches: list[Batch] = []
        self._has_ended = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether the client still waits."""
        transport = self.request.transport
        return not self._has_ended.is_set() and transport is not None and not transport.is_closing()

    def end_wait(self, batches: list[Batch]) -> None:
        """End the wait with these deliveries, or without any."""
        self.batches = batches
        self._has_ended.set()

    async def wait(self, seconds: float) -> None:
        """Wait for deliveries, for at most `seconds`."""
        if not self._has_ended.is_set():
            timer = asyncio.get_running_loop().call_later(seconds, self._has_ended.set)
            try:
                await self._has_ended.wait()
            finally:
                timer.cancel()
                self._has_ended.set()  # also after a cancellation: this poll must get no deliveries any more


class PullDelivery:
    """Hands messages out to apps that request them."""

    def __init__(self, host: DeliveryHost, app_host: str, port: int = PORT) -> None:
        self._host = host
        self._app_host = app_host
        self._port = port
        self._scheduler = DeliveryScheduler(host.may_deliver)
        self._settlement = Settlement(host)
        self._handouts = HandoutTracker(host, self._settlement, self.offer)
        self._assignments = AssignmentStream()
        self._polls: dict[AppPoll, None] = {}  # requests that wait, in the order of their arrival
        self._ids_body = BodyReader(MAX_IDS_BYTES, MAX_IDS_BODIES)
        self._is_serving_scheduled = False
        self._closed = False
        self._runner: web.AppRunner | None = None

    async def serve(self) -> None:
        """Open the port; while it cannot be bound, report the problem and retry."""
        limits = ServerLimits(keepalive_seconds=KEEP_ALIVE_SECONDS)
        while not self._closed:
            app = web.Application()
            app.add_routes(
                [
                    web.get("/v1/messages", self._handle_poll, allow_head=False),
                    web.post("/v1/acks", partial(self._handle_ids, self._handouts.ack)),
                    web.post("/v1/nacks", partial(self._handle_ids, self._handouts.nack)),
                    web.get("/v1/assignments", self._assignments.stream_changes, allow_head=False),
                ]
            )
            try:
                self._runner = await listen(app, self._app_host, self._port, limits=limits)
            except ValueError as error:
                self._host.problems.set_problem(Reason.PULL_PORT_UNAVAILABLE, str(error))
                await asyncio.sleep(BIND_RETRY_SECONDS)
            else:
                self._host.problems.set_problem(Reason.PULL_PORT_UNAVAILABLE, "")
                break
        if self._closed:  # `close` came while the port was being bound, and had no runner to clean up: repeat it
            await self.close()

    async def close(self) -> None:
        """End the waiting requests, and close the port."""
        self._closed = True
        self._host.problems.set_problem(Reason.PULL_PORT_UNAVAILABLE, "")
        for poll in self._polls:
            poll.end_wait(poll.batches)
        self._assignments.close()
        self._handouts.close()
        if self._runner:
            await self._runner.cleanup()

    # Handing out.

    def offer(self, reader: QueueReader) -> None:
        """Give a queue a turn: it has messages, or may deliver again. The event loop's next turn hands them out."""
        if not reader.window.stopped:
            self._scheduler.offer(reader.queue, reader.window)
            if self._polls and not self._is_serving_scheduled:
                self._is_serving_scheduled = True
                asyncio.get_running_loop().call_soon(self._serve_polls)

    def apply_settings(self) -> None:
        """Apply the current settings."""
        self._handouts.set_visibility_timeout(self._host.settings.delivery.pull.visibility_timeout)

    def on_queues_changed(self) -> None:
        """Stream the queues that the member now owns to the app; hand out no more messages of queues that it lost."""
        for queue in self._assignments.update_held(self._host.status.report()):
            self._scheduler.withdraw(queue)
        self._settlement.clear_settled_rejection()  # the message that the broker rejected may be of a released queue

    def abort_deliveries(self, reader: QueueReader) -> None:
        """Take a queue's open messages back from the app now."""
        self._handouts.abort(reader)

    def _serve_polls(self) -> None:
        """Serve waiting requests while messages are available."""
        self._is_serving_scheduled = False
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
        remaining_messages = max_messages
        size = 0
        while remaining_messages > 0 and size < MAX_RESPONSE_BYTES:
            # The scheduler calls this with the queue that it has chosen.
            max_messages_of = partial(self._count_fitting, remaining_messages, MAX_RESPONSE_BYTES - size)
            batch = self._scheduler.start_next(now, max_messages_of)
            if batch is None:
                break
            batch.window.mark_sent(batch.delivery)
            batches.append(batch)
            remaining_messages -= len(batch.delivery.messages)
            for message in batch.delivery.messages:
                size += message.encoded_bytes
        return batches

    def _count_fitting(self, max_messages: int, max_bytes: int, queue: Queue) -> int:
        """Return how many messages of a queue fit into the remaining response; at least one."""
        reader = self._host.reader_of(queue)  # the scheduler asks only for queues that may deliver: these have a reader
        return reader.window.count_fitting(max_messages, max_bytes) if reader else max_messages

    # Requests for messages.

    async def _handle_poll(self, request: web.Request) -> web.StreamResponse:
        max_messages = _parse_max(request.query.get("max", "32"))
        wait = parse_wait(request.query.get("wait", "10s"))
        if max_messages is None or wait is None:
            expected = f"max must be a number from 1 to {MAX_MESSAGES}, wait must be a duration such as 10s"
            return web.Response(status=400, text=f"{expected}\n")
        poll = AppPoll(request, max_messages)
        self._polls[poll] = None
        response = web.StreamResponse()
        try:
            self._serve_polls()
            await poll.wait(wait)
            await self._write_response(response, request, self._handouts.hand_out(poll.batches))
        except (ConnectionError, TimeoutError):  # the app has not got the whole response
            self._handouts.take_back(poll.batches)
        except BaseException:
            self._handouts.take_back(poll.batches)
            raise
        finally:
            del self._polls[poll]
        return response

    async def _write_response(self, response: web.StreamResponse, request: web.Request, body: bytes) -> None:
        """Write a response as fast as the app reads it; raise TimeoutError if that takes longer than visibilityTimeout.

        After that time the messages have expired, and are being sent back to their brokers. The connection is aborted:
        otherwise the transport would keep the rest of the response until the app reads it.
        """
        response.content_type = "application/json"
        response.content_length = len(body)
        body_view = memoryview(body)  # slices of it are not copies
        time_limit = self._handouts.visibility_timeout or None  # 0 (no settings were applied yet) means no limit
        try:
            async with asyncio.timeout(time_limit):
                await response.prepare(request)
                for start in range(0, len(body), WRITE_CHUNK_BYTES):
                    await response.write(body_view[start : start + WRITE_CHUNK_BYTES])
                await response.write_eof()
        except TimeoutError:
            if request.transport:
                request.transport.abort()
            raise
        if request.transport is None:  # aiohttp does not raise an error when a connection ends
            raise ConnectionResetError

    # Acks and nacks.

    async def _handle_ids(self, settle: Callable[[list[OpenMessage]], None], request: web.Request) -> web.Response:
        try:
            ids = msgspec.json.decode(await self._ids_body.read(request), type=MessageIds).ids
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            problem = f'The body must be {{"ids": [...]}} with message ids: {error}'
            return web.Response(status=400, text=f"{problem}\n")
        entries, unknown = self._handouts.claim(ids)
        settle(entries)
        return web.Response(body=msgspec.json.encode({"unknown": unknown}), content_type="application/json")


def _parse_max(text: str) -> int | None:
    """Return how many messages a client asks for; None if the text is no number from 1 to MAX_MESSAGES."""
    number = int(text) if _NUMBER.fullmatch(text) else 0
    return number if 1 <= number <= MAX_MESSAGES else None
