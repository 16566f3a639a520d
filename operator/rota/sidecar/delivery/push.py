"""Push delivery: messages are posted to the app, and its response decides what happens to them.

| the app | the message |
|---|---|
| 2xx | is done |
| 422 | becomes a dead letter; the messages of a rejected batch are posted again one by one |
| any other response, or a timeout | is retried: through the retry topic or, if Orderly, in place |
| 404 | is retried as if the app were away, and AppPathNotFound is reported: a mistyped path must not empty a topic |
| no connection | waits: the app is away, nothing was sent, and no attempt is counted |

A message that was tried before is posted alone, so that it cannot fail a batch of new ones. While the app is away or
its path is not found, one delivery at a time is tried, after a pause.
"""

import asyncio
import logging
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Protocol

from rota.brokers.message import MEBIBYTE, Message
from rota.deliveries import AppAnswer, DeliveryOutcome, answer_of_status
from rota.model import Queue, Reason
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery import cloudevents, settlement
from rota.sidecar.delivery.http_post import BadResponseError, ConnectFailedError, HttpPoster, SendForbiddenError
from rota.sidecar.delivery.scheduler import Batch, DeliveryScheduler
from rota.sidecar.delivery.settlement import NOT_TAKEN_PAUSE, Settlement
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import SidecarMetrics, topic_label

# Bytes of a batch, unless one message is larger: many requests are open at once, and each holds its batch twice.
LARGEST = MEBIBYTE
IN_PLACE_PAUSE = 1.0  # seconds before an Orderly queue retries its message
AWAY_PAUSES, LOST_PAUSES = (0.1, 1.0), (1.0, 10.0)  # first and longest pause: no connection; path not found

_log = logging.getLogger(__name__)


class Outcome(StrEnum):
    """Result of a request for its messages."""

    DONE = "done"
    DEAD = "dead"
    SPLIT = "split"  # a batch was rejected: each of its messages is posted alone
    LATER = "later"
    LOST = "not_found"
    AWAY = "away"
    CUT = "cut"  # the queue was reassigned during a stall: nothing is sent to the app, or back to the broker


Outcomes = list[tuple[Outcome, list[Message]]]


class _Ended(NamedTuple):
    """Result of a delivery."""

    outcomes: Outcomes
    answered_at: float  # time of the app's answer, or of the failure to get one


_BY_ANSWER = {  # any other answer means LATER
    DeliveryOutcome.DONE: Outcome.DONE,
    DeliveryOutcome.REJECTED: Outcome.DEAD,
    DeliveryOutcome.NOT_FOUND: Outcome.LOST,
    DeliveryOutcome.REFUSED: Outcome.AWAY,
}


class PushHost(settlement.DeliveryHost, Protocol):
    """The member, as Push delivery needs it."""

    health: Problems
    measures: SidecarMetrics

    @property
    def generation(self) -> int:
        """The generation of the obeyed assignment."""

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery of this queue may start now."""

    def may_send(self, queue: Queue, since: float) -> bool:
        """Whether a delivery that started at `since` may be sent, to the app or back to the broker.

        It may not if its queue was reassigned while the process was stalled.
        """


class Push:
    """Posts messages to the app."""

    def __init__(self, shell: PushHost, host: str) -> None:
        """Deliver to the app at `host`; the settings name its port."""
        self._shell, self._name = shell, host
        self._post: HttpPoster | None = None
        self._shelf = DeliveryScheduler(shell.may_deliver)
        self._open: dict[Queue, set[asyncio.Task[_Ended]]] = {}
        self._count = 0
        self._endings = Settlement(shell)
        self._in_doubt, self._since, self._pause, self._again = False, 0.0, 0.0, 0.0
        self._woken = False

    # Starting deliveries.

    def offer(self, reading: QueueReader) -> None:
        """Deliver from a queue: it has messages, or may deliver again."""
        self._shelf.offer(reading.queue, reading.window)
        self.wake()

    def wake(self) -> None:
        """Start possible deliveries in the next turn of the event loop."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._fill)

    def cut(self, reading: QueueReader) -> None:
        """Abort a queue's open deliveries now."""
        for task in self._open.get(reading.queue, ()):
            task.cancel()

    def _fill(self) -> None:
        self._woken = False
        now, concurrency = self._shell.now(), self._shell.settings.delivery.push.concurrency
        while batch := self._shelf.take(now, self._most, self._free(now), concurrency):
            self._count += 1
            task = asyncio.get_running_loop().create_task(self._deliver(batch))
            self._open.setdefault(batch.queue, set()).add(task)
            task.add_done_callback(partial(self._ended, batch))
        if self._in_doubt and not self._count and now >= self._again:  # without messages, assume that the app is back
            self._note(Outcome.DONE)

    def _most(self, queue: Queue) -> int:
        reading = self._shell.reading(queue)
        if reading is None or reading.again:
            return 1
        return reading.window.fit(self._shell.settings.delivery.push.max_batch, LARGEST)

    def _free(self, now: float) -> int:
        """Return how many more deliveries may be open."""
        if self._in_doubt:
            return int(now >= self._again and not self._count)
        return self._shell.settings.delivery.push.concurrency - self._count

    # One delivery.

    async def _deliver(self, batch: Batch) -> _Ended:
        attempts = [(message, self._endings.attempt(batch, message)) for message in batch.delivery.messages]
        app_answer = await self._ask(batch, attempts)
        answered_at = self._shell.now()
        answer = _BY_ANSWER.get(app_answer.outcome, Outcome.LATER) if app_answer else Outcome.CUT
        if answer is not Outcome.DONE and not self._shell.may_send(batch.queue, batch.delivery.since):
            answer = Outcome.CUT  # the queue's next owner has these messages: nothing is sent back
        if app_answer and answer is not Outcome.CUT:  # a cut does not show the state of the app
            self._note(answer)
            self._count_answer(batch, attempts, app_answer)
        outcomes = self._outcomes(answer, batch)
        await self._carry_out(answer, batch)
        return _Ended(outcomes, answered_at)

    def _count_answer(self, batch: Batch, attempts: Sequence[tuple[Message, int]], answer: AppAnswer) -> None:
        """Count an answer; not the rejection of a batch, whose messages are posted again one by one."""
        if answer.outcome is DeliveryOutcome.REJECTED and len(attempts) > 1:
            return
        now, counts = self._shell.now(), self._shell.delivery_counts
        counts.count(batch.queue, attempts, answer, now)
        if answer.outcome is not DeliveryOutcome.REFUSED:
            counts.count_time(topic_label(attempts[0][0], self._shell.settings.topics), now - batch.delivery.since)

    def _outcomes(self, answer: Outcome, batch: Batch) -> Outcomes:
        """Return the outcome of each message after an answer."""
        messages = [*batch.delivery.messages]
        if answer is Outcome.DEAD and len(messages) > 1:
            return [(Outcome.SPLIT, messages)]
        if answer is not Outcome.LATER or (batch.window.orderly and len(messages) > 1):
            return [(answer, messages)]
        last = {message.offset for message in messages if self._endings.spent(batch, message)}
        spent, retried = (
            [message for message in messages if (message.offset in last) is is_spent] for is_spent in (True, False)
        )
        return [(Outcome.DEAD, spent), (answer, retried)]

    def _ended(self, batch: Batch, task: asyncio.Task[_Ended]) -> None:
        """Clean up and count a delivery, however it ended; it may have been cancelled, even before it started."""
        self._count -= 1
        self._open[batch.queue].discard(task)
        if not self._open[batch.queue]:
            del self._open[batch.queue]
        error = None if task.cancelled() else task.exception()
        if error:
            _log.error("A delivery of %s failed", batch.queue, exc_info=error)
        unfinished = batch.delivery.messages
        if unfinished:
            self._endings.back(batch, unfinished, NOT_TAKEN_PAUSE if error else 0.0)
        now, went_wrong = self._shell.now(), "cut" if task.cancelled() else "failed" if error else ""
        outcomes, answered_at = ([(went_wrong, [*unfinished])], now) if went_wrong else task.result()
        seconds = answered_at - batch.delivery.since
        self._shell.measures.answered(seconds, [message for _, messages in outcomes for message in messages])
        for outcome, messages in outcomes:
            self._shell.delivery_ended(messages, outcome, seconds)
        if reading := self._shell.reading(batch.queue):
            reading.delivered_at = now
            reading.changed()
            self.offer(reading)
        self.wake()

    async def _ask(self, batch: Batch, attempts: Sequence[tuple[Message, int]]) -> AppAnswer | None:
        """Post a delivery and return the app's answer; None if it may not be sent any more."""
        push, generation = self._shell.settings.delivery.push, self._shell.generation
        if redelivered := sum(attempt > 1 for _, attempt in attempts):
            self._shell.measures.redelivered.inc(redelivered)
        if push.max_batch > 1 or len(attempts) > 1:
            headers, body = cloudevents.BATCH, cloudevents.batch(attempts, generation)
        else:
            [(message, attempt)] = attempts
            headers, body = cloudevents.binary(message, attempt, generation), message.body
        try:
            status = await self._app(push.port).post(push.path, headers, body, push.timeout, partial(self._may, batch))
        except ConnectFailedError:
            return AppAnswer(DeliveryOutcome.REFUSED)
        except SendForbiddenError:
            return None
        except TimeoutError:
            _log.info("%s: the app did not answer within %g s", batch.queue, push.timeout)
            return AppAnswer(DeliveryOutcome.TIMEOUT)
        except BadResponseError as error:
            _log.info("%s: %s", batch.queue, error)
            return AppAnswer(DeliveryOutcome.BROKEN)
        return answer_of_status(status)

    def _may(self, batch: Batch) -> bool:
        """Whether a delivery may be sent now, over a connection that the app has accepted."""
        may_send = self._shell.may_send(batch.queue, batch.delivery.since)
        if may_send:
            batch.window.note_given(batch.delivery)
        return may_send

    def _app(self, port: int) -> HttpPoster:
        if self._post is None or self._post.port != port:
            self._close()
            self._post = HttpPoster(self._name, port)
        return self._post

    def _note(self, answer: Outcome) -> None:
        """Track whether the app is away, and schedule the next try if it is."""
        pauses = {Outcome.AWAY: AWAY_PAUSES, Outcome.LOST: LOST_PAUSES}.get(answer)
        now = self._shell.now()
        self._tell(answer)
        if self._in_doubt:
            self._shell.measures.paused.inc(now - self._since)
        self._since = now
        if pauses is None:
            self._in_doubt, self._pause = False, 0.0
            return
        if not self._in_doubt:
            self._in_doubt, self._again = True, 0.0
        if now >= self._again:  # deliveries that fail together count once
            self._pause = min(max(pauses[0], 2 * self._pause), pauses[1])
            self._again = now + self._pause
            asyncio.get_running_loop().call_later(self._pause, self.wake)

    def _tell(self, answer: Outcome) -> None:
        """Report why the app cannot be reached, or clear that problem."""
        push, lost, away = self._shell.settings.delivery.push, answer is Outcome.LOST, answer is Outcome.AWAY
        problem = lost and f"The app answers 404 to POST {push.path}; correct spec.delivery.push.path"
        self._shell.health.trouble(Reason.APP_PATH_NOT_FOUND, problem or "")
        problem = away and f"Nobody listens at port {push.port}; start the app, or correct spec.delivery.push.port"
        self._shell.health.trouble(Reason.APP_NOT_LISTENING, problem or "")

    async def _carry_out(self, answer: Outcome, batch: Batch) -> None:
        messages = batch.delivery.messages
        match answer:
            case Outcome.DONE:
                for message in messages:
                    self._endings.finish(batch, message)
            case Outcome.AWAY | Outcome.LOST | Outcome.CUT:
                self._endings.back(batch, messages)
            case Outcome.DEAD if len(messages) > 1:
                self._endings.back(batch, messages)  # a message that comes back is posted alone
            case Outcome.DEAD:
                await self._endings.dead(batch, messages[0])
            case Outcome.LATER if batch.window.orderly:
                await self._in_place(batch, messages)
            case Outcome.LATER:
                await asyncio.gather(*(self._endings.later(batch, message) for message in messages))

    async def _in_place(self, batch: Batch, messages: tuple[Message, ...]) -> None:
        last = self._endings.spent(batch, messages[0])
        for message in messages:
            batch.window.tries(batch.delivery, message)
        if last and len(messages) == 1:
            await self._endings.dead(batch, messages[0])
        else:
            self._endings.back(batch, messages, IN_PLACE_PAUSE)

    def queues_changed(self) -> None:
        """Clear the problem of a refused message whose queue was released."""
        self._endings.look()

    async def close(self) -> None:
        """Clear the problems of the app, and close connections."""
        for reason in (Reason.APP_PATH_NOT_FOUND, Reason.APP_NOT_LISTENING):
            self._shell.health.trouble(reason, "")
        self._close()

    def _close(self) -> None:
        if self._post:
            self._post.close()
