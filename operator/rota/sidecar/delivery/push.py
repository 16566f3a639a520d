"""Push delivery: messages are posted to the app, and its response decides what happens to them.

| the app | the message |
|---|---|
| 2xx | is done |
| 422 | becomes a dead letter; the messages of a rejected batch are posted again one by one |
| any other response, or a timeout | is retried: through the retry topic or, if Orderly, in place |
| 404 | is retried as if the app were away, and AppPathNotFound is reported: a mistyped path must not empty a topic |
| no connection | waits: the app is away, nothing was sent, and no attempt is counted |

A message that was tried before is posted alone, so that it cannot fail a batch of new ones. `app_availability` has the
pauses between tries while the app is away.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import NamedTuple

from rota.brokers.message import MEBIBYTE, Message
from rota.deliveries import AppResponse, DeliveryOutcome, response_of_status
from rota.model import Queue
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery import cloudevents
from rota.sidecar.delivery.app_availability import AppAvailability
from rota.sidecar.delivery.http_post import BadResponseError, ConnectFailedError, HttpPoster, SendForbiddenError
from rota.sidecar.delivery.scheduler import Batch, DeliveryScheduler
from rota.sidecar.delivery.settlement import SEND_BACK_RETRY_SECONDS, DeliveryHost, Settlement, partition
from rota.sidecar.status.sidecar_metrics import topic_label

# Limit for a batch of several messages: many requests are open at once, and each holds its batch in memory twice.
MAX_BATCH_BYTES = MEBIBYTE
IN_PLACE_RETRY_SECONDS = 1.0  # seconds before an Orderly queue retries its message

_log = logging.getLogger(__name__)


class PushOutcome(StrEnum):
    """What a request means for its messages. The values are labels of metrics, which users' dashboards name."""

    DONE = "done"
    DEAD_LETTER = "dead"
    SPLIT = "split"  # a batch was rejected: each of its messages is posted alone
    RETRY = "later"
    NOT_FOUND = "not_found"
    APP_AWAY = "away"
    # The delivery was cancelled, or the queue was reassigned during a stall: nothing more is sent to app or broker.
    ABORTED = "cut"
    FAILED = "failed"  # an error of the sidecar's own, which the log shows


_OUTCOME_BY_RESPONSE = {  # any other response means RETRY
    DeliveryOutcome.DONE: PushOutcome.DONE,
    DeliveryOutcome.UNPROCESSABLE: PushOutcome.DEAD_LETTER,
    DeliveryOutcome.NOT_FOUND: PushOutcome.NOT_FOUND,
    DeliveryOutcome.REFUSED: PushOutcome.APP_AWAY,
}

Attempts = Sequence[tuple[Message, int]]  # messages, each with the number of this attempt
Outcomes = Mapping[PushOutcome, Sequence[Message]]


class _DeliveryResult(NamedTuple):
    """Result of a delivery."""

    outcomes: Outcomes
    answered_at: float  # time of the app's response, or of the failure to get one


class BatchPoster:
    """Posts batches to the app as CloudEvents."""

    def __init__(self, host: DeliveryHost, app_host: str) -> None:
        self._host = host
        self._app_host = app_host
        self._poster: HttpPoster | None = None

    async def post(self, batch: Batch, attempts: Attempts) -> AppResponse | None:
        """Post a batch and return the app's response; None if the batch may not be sent any more."""
        push = self._host.settings.delivery.push
        generation = self._host.obeyed_generation
        if redelivered := sum(attempt > 1 for _, attempt in attempts):
            self._host.metrics.redelivered.inc(redelivered)
        # With batches enabled, a single message is posted as a batch, too. A batch may have started before the settings
        # disabled batches.
        if push.max_batch > 1 or len(attempts) > 1:
            headers = cloudevents.BATCH_HEADERS
            body = cloudevents.encode_batch(attempts, generation)
        else:
            [(message, attempt)] = attempts
            headers = cloudevents.encode_headers(message, attempt, generation)
            body = message.body
        poster = self._poster_to(push.port)
        try:
            status = await poster.post(push.path, headers, body, push.timeout, partial(self._may_send, batch))
        except ConnectFailedError:
            return AppResponse(DeliveryOutcome.REFUSED)
        except SendForbiddenError:
            return None
        except TimeoutError:
            _log.info("%s: the app did not respond within %g s", batch.queue, push.timeout)
            return AppResponse(DeliveryOutcome.TIMEOUT)
        except BadResponseError as error:
            _log.info("%s: %s", batch.queue, error)
            return AppResponse(DeliveryOutcome.BROKEN)
        return response_of_status(status)

    def _may_send(self, batch: Batch) -> bool:
        """Whether a delivery may be sent now, over a connection that the app has accepted."""
        may_send = self._host.may_send(batch.queue, batch.delivery.started_at)
        if may_send:
            batch.window.mark_sent(batch.delivery)
        return may_send

    def _poster_to(self, port: int) -> HttpPoster:
        """Return the client for the port in the settings; connections to another port are closed."""
        if self._poster is None or self._poster.port != port:
            self.close()
            self._poster = HttpPoster(self._app_host, port)
        return self._poster

    def close(self) -> None:
        """Close connections."""
        if self._poster:
            self._poster.close()


class _Worker:
    """The task that runs `PushDelivery._work`, and its batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch: Batch | None = batch  # the one in delivery; None between two batches
        self.task: asyncio.Task[None] | None = None


class PushDelivery:
    """Posts messages to the app, each open delivery in a task of its own.

    A task goes on with the next batch, and ends when none may start: a new task for each batch would need several more
    turns of the event loop.
    """

    def __init__(self, host: DeliveryHost, app_host: str) -> None:
        """Deliver to the app at `app_host`; the settings name its port."""
        self._host = host
        self._poster = BatchPoster(host, app_host)
        self._app = AppAvailability(host, self._schedule_fill)
        self._scheduler = DeliveryScheduler(host.may_deliver)
        self._settlement = Settlement(host)
        self._workers: set[_Worker] = set()
        self._open_count = 0
        self._is_fill_scheduled = False

    # Starting deliveries.

    def offer(self, reader: QueueReader) -> None:
        """Give a queue a turn: it has messages, or may deliver again."""
        self._scheduler.offer(reader.queue, reader.window)
        self._schedule_fill()

    def apply_settings(self) -> None:
        """Start deliveries that a higher concurrency allows; each delivery looks up the other settings itself."""
        self._schedule_fill()

    def _schedule_fill(self) -> None:
        """Start possible deliveries in the next turn of the event loop, once for all queues offered in this one."""
        if not self._is_fill_scheduled:
            self._is_fill_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_deliveries)

    def abort_deliveries(self, reader: QueueReader) -> None:
        """Abort a queue's open deliveries now."""
        for worker in self._workers:
            if worker.task and worker.batch and worker.batch.queue == reader.queue:
                worker.task.cancel()

    def _start_deliveries(self) -> None:
        self._is_fill_scheduled = False
        while batch := self._next_batch():
            worker = _Worker(batch)
            self._workers.add(worker)
            worker.task = asyncio.get_running_loop().create_task(self._work(worker))
            worker.task.add_done_callback(partial(self._on_worker_ended, worker))
        is_nothing_left = not self._open_count and not self._scheduler.has_ready
        if self._app.is_away and is_nothing_left and self._app.is_try_due(self._host.now()):
            # No try would clear the app's problem; the next delivery finds out again.
            self._app.track(DeliveryOutcome.DONE)

    def _next_batch(self) -> Batch | None:
        """Start the next delivery, if one is possible now."""
        now = self._host.now()
        concurrency = self._host.settings.delivery.push.concurrency
        slots = concurrency
        if self._app.is_away:
            slots = 1 if self._app.is_try_due(now) else 0
        # Of all slots, the scheduler keeps the last quarter for queues without an open delivery.
        batch = self._scheduler.start_next(
            now, self._max_messages, free_slots=slots - self._open_count, total_slots=concurrency
        )
        if batch:
            self._open_count += 1
        return batch

    def _max_messages(self, queue: Queue) -> int:
        reader = self._host.reader_of(queue)
        max_batch = self._host.settings.delivery.push.max_batch
        if max_batch == 1 or reader is None or reader.is_retry_topic:
            return 1
        return reader.window.count_fitting(max_batch, MAX_BATCH_BYTES)

    async def _work(self, worker: _Worker) -> None:
        while batch := worker.batch:
            result = await self._deliver(batch)
            worker.batch = None
            self._on_delivery_ended(batch, result)
            del result  # the next delivery may take long, and the memory budget does not count these messages
            if worker.task and worker.task.cancelling():
                # `abort_deliveries` cancelled this task while the batch was being settled. The pending cancellation
                # would abort the next batch, which may be of another queue.
                self._schedule_fill()
                return
            worker.batch = self._next_batch()
            if self._scheduler.has_ready or self._app.is_away:  # more may be possible, or nothing be left to try
                self._schedule_fill()

    def _on_worker_ended(self, worker: _Worker, task: asyncio.Task[None]) -> None:
        """If the task failed or was cancelled, maybe before it started, end its delivery and return the messages."""
        self._workers.discard(worker)
        error = None if task.cancelled() else task.exception()
        if error:
            _log.error("A delivery of %s failed", worker.batch.queue if worker.batch else "messages", exc_info=error)
        if batch := worker.batch:
            unsettled = batch.delivery.messages
            self._settlement.return_messages(batch, unsettled, SEND_BACK_RETRY_SECONDS if error else 0.0)
            outcome = PushOutcome.FAILED if error else PushOutcome.ABORTED
            self._on_delivery_ended(batch, _DeliveryResult({outcome: unsettled}, self._host.now()))
        if error or worker.batch:
            self._schedule_fill()

    # One delivery.

    async def _deliver(self, batch: Batch) -> _DeliveryResult:
        attempts = [(message, batch.window.attempt_number(message)) for message in batch.delivery.messages]
        response = await self._poster.post(batch, attempts)
        answered_at = self._host.now()
        outcome = PushOutcome.ABORTED
        if response:
            outcome = _OUTCOME_BY_RESPONSE.get(response.outcome, PushOutcome.RETRY)
        if outcome is not PushOutcome.DONE and not self._host.may_send(batch.queue, batch.delivery.started_at):
            outcome = PushOutcome.ABORTED  # the queue's next owner has these messages: nothing is sent back
        if response and outcome is not PushOutcome.ABORTED:  # an aborted delivery does not show the state of the app
            self._app.track(response.outcome)
            self._count_response(batch, attempts, response)
        outcomes = self._split_by_outcome(outcome, batch)  # before settling, which may count a message's last attempt
        await self._settle_batch(outcome, batch)
        return _DeliveryResult(outcomes, answered_at)

    def _count_response(self, batch: Batch, attempts: Attempts, response: AppResponse) -> None:
        """Count a response; not the rejection of a batch, whose messages are posted again one by one."""
        if response.outcome is DeliveryOutcome.UNPROCESSABLE and len(attempts) > 1:
            return
        now = self._host.now()
        counts = self._host.delivery_counts
        counts.count(batch.queue, attempts, response, now)
        if response.outcome is not DeliveryOutcome.REFUSED:
            counts.count_time(topic_label(attempts[0][0], self._host.settings.topics), now - batch.delivery.started_at)

    def _split_by_outcome(self, outcome: PushOutcome, batch: Batch) -> Outcomes:
        """Return the outcome of each message after a response."""
        messages = batch.delivery.messages
        is_batch = len(messages) > 1
        if outcome is PushOutcome.DEAD_LETTER and is_batch:
            return {PushOutcome.SPLIT: messages}
        # The messages of an Orderly batch come back one by one, and only one that fails alone may become a dead letter.
        is_retried_alone = batch.window.orderly and is_batch
        if outcome is not PushOutcome.RETRY or is_retried_alone:
            return {outcome: messages}
        exhausted, retried = partition(messages, partial(self._settlement.is_last_attempt, batch))
        return {PushOutcome.DEAD_LETTER: exhausted, PushOutcome.RETRY: retried}

    def _on_delivery_ended(self, batch: Batch, result: _DeliveryResult) -> None:
        """Count a delivery, and offer its queue again."""
        self._open_count -= 1
        self._count_result(batch, result)
        if reader := self._host.reader_of(batch.queue):
            reader.delivered_at = self._host.now()
            reader.on_change()
            self._scheduler.offer(reader.queue, reader.window)

    def _count_result(self, batch: Batch, result: _DeliveryResult) -> None:
        seconds = result.answered_at - batch.delivery.started_at
        self._host.metrics.observe_delivery(seconds, chain.from_iterable(result.outcomes.values()))
        for outcome, messages in result.outcomes.items():
            self._host.on_delivery_ended(messages, outcome, seconds)

    async def _settle_batch(self, outcome: PushOutcome, batch: Batch) -> None:
        messages = batch.delivery.messages
        match outcome:
            case PushOutcome.DONE:
                for message in messages:
                    self._settlement.ack(batch, message)
            case PushOutcome.APP_AWAY | PushOutcome.NOT_FOUND | PushOutcome.ABORTED:
                self._settlement.return_messages(batch, messages)
            case PushOutcome.DEAD_LETTER if len(messages) > 1:
                self._settlement.return_messages(batch, messages)  # a message that comes back is posted alone
            case PushOutcome.DEAD_LETTER:
                await self._settlement.dead_letter(batch, messages[0])
            case PushOutcome.RETRY if batch.window.orderly:
                await self._retry_in_place(batch, messages)
            case PushOutcome.RETRY:
                await self._settlement.retry_all(batch, messages)

    async def _retry_in_place(self, batch: Batch, messages: tuple[Message, ...]) -> None:
        """Retry messages of an Orderly queue, each alone, so that only the failing one becomes a dead letter."""
        is_last = self._settlement.is_last_attempt(batch, messages[0])
        for message in messages:
            batch.window.count_attempt(batch.delivery, message)
        if is_last and len(messages) == 1:
            await self._settlement.dead_letter(batch, messages[0])
        else:
            self._settlement.return_messages(batch, messages, IN_PLACE_RETRY_SECONDS)

    def on_queues_changed(self) -> None:
        """Clear the problem of a message that the broker rejected if its queue was released."""
        self._settlement.clear_settled_rejection()

    async def close(self) -> None:
        """Clear the problems of the app, and close connections."""
        self._app.clear_problems()
        self._poster.close()
