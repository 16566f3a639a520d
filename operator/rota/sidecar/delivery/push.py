"""Push: messages are posted to the app, and what it answers decides about them.

| the app | the message |
|---|---|
| 2xx | is done |
| 422 | goes to the dead letters; one of a batch is found by posting each alone |
| anything else, or nothing in time | is tried again: by the retry topic, or, Orderly, in place |
| 404 | is tried again as if the app were away, and AppPathNotFound is told: a mistyped path must not empty a topic |
| no connection | waits: the app is away, nothing was sent, and no attempt is counted |

What was tried before is posted alone, lest it spoil what is fresh. While the app is away or its path is not found, one
delivery at a time is tried, after a pause.
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
from rota.sidecar.consume.queue_reader import Reading
from rota.sidecar.delivery import cloudevents, settlement
from rota.sidecar.delivery.http_post import Away, Broken, Forbidden, Post
from rota.sidecar.delivery.scheduler import Shelf, Taken
from rota.sidecar.delivery.settlement import NOT_TAKEN_PAUSE, Endings
from rota.sidecar.status.problems import Health
from rota.sidecar.status.sidecar_metrics import Measures, topic_label

# Of a batch, unless one message is larger: many requests are open at once, and each holds its batch twice.
LARGEST = MEBIBYTE
IN_PLACE_PAUSE = 1.0  # before an Orderly queue tries its message again
AWAY_PAUSES, LOST_PAUSES = (0.1, 1.0), (1.0, 10.0)  # the first and the longest: no app; no such path

_log = logging.getLogger(__name__)


class Outcome(StrEnum):
    """What came of a request, and of its messages."""

    DONE = "done"
    DEAD = "dead"
    SPLIT = "split"  # it was of several messages, and each goes alone now
    LATER = "later"
    LOST = "not_found"
    AWAY = "away"
    CUT = "cut"  # its queue was reassigned while the process stood still: it is not sent, or not sent back


Outcomes = list[tuple[Outcome, list[Message]]]


class _Ended(NamedTuple):
    """What came of a delivery."""

    outcomes: Outcomes
    answered_at: float  # by the app, or when it was clear that it would not answer


_BY_ANSWER = {  # any other answer means LATER
    DeliveryOutcome.DONE: Outcome.DONE,
    DeliveryOutcome.REJECTED: Outcome.DEAD,
    DeliveryOutcome.NOT_FOUND: Outcome.LOST,
    DeliveryOutcome.REFUSED: Outcome.AWAY,
}


class Shell(settlement.DeliveringShell, Protocol):
    """What delivering asks, and tells, of the member."""

    health: Health
    measures: Measures

    @property
    def generation(self) -> int:
        """The generation that is obeyed."""

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery may begin."""

    def may_send(self, queue: Queue, since: float) -> bool:
        """Whether a delivery that began then may be sent, to the app or back to the broker.

        It may not if its queue was reassigned while the process stood still.
        """


class Push:
    """Delivers by posting."""

    def __init__(self, shell: Shell, host: str) -> None:
        """Post to the app at an address; its port is told by the settings."""
        self._shell, self._name = shell, host
        self._post: Post | None = None
        self._shelf = Shelf(shell.may_deliver)
        self._open: dict[Queue, set[asyncio.Task[_Ended]]] = {}
        self._count = 0
        self._endings = Endings(shell)
        self._in_doubt, self._since, self._pause, self._again = False, 0.0, 0.0, 0.0
        self._woken = False

    # What can be delivered.

    def offer(self, reading: Reading) -> None:
        """Deliver from a queue: it has something, or is allowed again."""
        self._shelf.offer(reading.queue, reading.window)
        self.wake()

    def wake(self) -> None:
        """Look for what to deliver as soon as the loop has time."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._fill)

    def cut(self, reading: Reading) -> None:
        """End a queue's open deliveries now."""
        for task in self._open.get(reading.queue, ()):
            task.cancel()

    def _fill(self) -> None:
        self._woken = False
        now, every = self._shell.now(), self._shell.settings.delivery.push.concurrency
        while taken := self._shelf.take(now, self._most, self._free(now), every):
            self._count += 1
            task = asyncio.get_running_loop().create_task(self._deliver(taken))
            self._open.setdefault(taken.queue, set()).add(task)
            task.add_done_callback(partial(self._ended, taken))
        if self._in_doubt and not self._count and now >= self._again:  # there is nothing to try it with
            self._note(Outcome.DONE)

    def _most(self, queue: Queue) -> int:
        reading = self._shell.reading(queue)
        if reading is None or reading.again:
            return 1
        return reading.window.fit(self._shell.settings.delivery.push.max_batch, LARGEST)

    def _free(self, now: float) -> int:
        """Return how many deliveries more may be open."""
        if self._in_doubt:
            return int(now >= self._again and not self._count)
        return self._shell.settings.delivery.push.concurrency - self._count

    # One delivery.

    async def _deliver(self, taken: Taken) -> _Ended:
        attempts = [(message, self._endings.attempt(taken, message)) for message in taken.delivery.messages]
        app_answer = await self._ask(taken, attempts)
        answered_at = self._shell.now()
        answer = _BY_ANSWER.get(app_answer.outcome, Outcome.LATER) if app_answer else Outcome.CUT
        if answer is not Outcome.DONE and not self._shell.may_send(taken.queue, taken.delivery.since):
            answer = Outcome.CUT  # the queue's next owner has these messages: nothing is sent back
        if app_answer and answer is not Outcome.CUT:  # which says nothing of the app
            self._note(answer)
            self._count_answer(taken, attempts, app_answer)
        outcomes = self._outcomes(answer, taken)
        await self._carry_out(answer, taken)
        return _Ended(outcomes, answered_at)

    def _count_answer(self, taken: Taken, attempts: Sequence[tuple[Message, int]], answer: AppAnswer) -> None:
        """Count an answer; not the rejection of a batch, whose messages are posted again one by one."""
        if answer.outcome is DeliveryOutcome.REJECTED and len(attempts) > 1:
            return
        now, counts = self._shell.now(), self._shell.delivery_counts
        counts.count(taken.queue, attempts, answer, now)
        if answer.outcome is not DeliveryOutcome.REFUSED:
            counts.count_time(topic_label(attempts[0][0], self._shell.settings.topics), now - taken.delivery.since)

    def _outcomes(self, answer: Outcome, taken: Taken) -> Outcomes:
        """Return what an answer makes of its messages."""
        messages = [*taken.delivery.messages]
        if answer is Outcome.DEAD and len(messages) > 1:
            return [(Outcome.SPLIT, messages)]
        if answer is not Outcome.LATER or (taken.window.orderly and len(messages) > 1):
            return [(answer, messages)]
        last = {message.offset for message in messages if self._endings.spent(taken, message)}
        spent, rest = ([it for it in messages if (it.offset in last) is so] for so in (True, False))
        return [(Outcome.DEAD, spent), (answer, rest)]

    def _ended(self, taken: Taken, task: asyncio.Task[_Ended]) -> None:
        """See to what a delivery left, however it ended: it may have been cut, even before it began."""
        self._count -= 1
        self._open[taken.queue].discard(task)
        if not self._open[taken.queue]:
            del self._open[taken.queue]
        error = None if task.cancelled() else task.exception()
        if error:
            _log.error("A delivery of %s failed", taken.queue, exc_info=error)
        unfinished = taken.delivery.messages
        if unfinished:
            self._endings.back(taken, unfinished, NOT_TAKEN_PAUSE if error else 0.0)
        now, went_wrong = self._shell.now(), "cut" if task.cancelled() else "failed" if error else ""
        outcomes, answered_at = ([(went_wrong, [*unfinished])], now) if went_wrong else task.result()
        seconds = answered_at - taken.delivery.since
        self._shell.measures.answered(seconds, [it for _, messages in outcomes for it in messages])
        for outcome, messages in outcomes:
            self._shell.delivery_ended(messages, outcome, seconds)
        if reading := self._shell.reading(taken.queue):
            reading.delivered_at = now
            reading.changed()
            self.offer(reading)
        self.wake()

    async def _ask(self, taken: Taken, attempts: Sequence[tuple[Message, int]]) -> AppAnswer | None:
        """Post a delivery and return the app's answer; None if it may not be sent any more."""
        push, generation = self._shell.settings.delivery.push, self._shell.generation
        if again := sum(attempt > 1 for _, attempt in attempts):
            self._shell.measures.redelivered.inc(again)
        if push.max_batch > 1 or len(attempts) > 1:
            headers, body = cloudevents.BATCH, cloudevents.batch(attempts, generation)
        else:
            [(message, attempt)] = attempts
            headers, body = cloudevents.binary(message, attempt, generation), message.body
        try:
            status = await self._app(push.port).post(push.path, headers, body, push.timeout, partial(self._may, taken))
        except Away:
            return AppAnswer(DeliveryOutcome.REFUSED)
        except Forbidden:
            return None
        except TimeoutError:
            _log.info("%s: the app did not answer within %g s", taken.queue, push.timeout)
            return AppAnswer(DeliveryOutcome.TIMEOUT)
        except Broken as error:
            _log.info("%s: %s", taken.queue, error)
            return AppAnswer(DeliveryOutcome.BROKEN)
        return answer_of_status(status)

    def _may(self, taken: Taken) -> bool:
        """Whether a delivery may be sent now, over a connection that the app has taken."""
        may_send = self._shell.may_send(taken.queue, taken.delivery.since)
        if may_send:
            taken.window.note_given(taken.delivery)
        return may_send

    def _app(self, port: int) -> Post:
        if self._post is None or self._post.port != port:
            self._close()
            self._post = Post(self._name, port)
        return self._post

    def _note(self, answer: Outcome) -> None:
        """Notice that the app is away, or back."""
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
        if now >= self._again:  # of several that end at once the first one counts
            self._pause = min(max(pauses[0], 2 * self._pause), pauses[1])
            self._again = now + self._pause
            asyncio.get_running_loop().call_later(self._pause, self.wake)

    def _tell(self, answer: Outcome) -> None:
        """Say what keeps the app from being delivered to, and that it does no more."""
        push, lost, away = self._shell.settings.delivery.push, answer is Outcome.LOST, answer is Outcome.AWAY
        told = lost and f"The app answers 404 to POST {push.path}; correct spec.delivery.push.path"
        self._shell.health.trouble(Reason.APP_PATH_NOT_FOUND, told or "")
        told = away and f"Nobody listens at port {push.port}; start the app, or correct spec.delivery.push.port"
        self._shell.health.trouble(Reason.APP_NOT_LISTENING, told or "")

    async def _carry_out(self, answer: Outcome, taken: Taken) -> None:
        messages = taken.delivery.messages
        match answer:
            case Outcome.DONE:
                for message in messages:
                    self._endings.finish(taken, message)
            case Outcome.AWAY | Outcome.LOST | Outcome.CUT:
                self._endings.back(taken, messages)
            case Outcome.DEAD if len(messages) > 1:
                self._endings.back(taken, messages)  # what came back is posted alone
            case Outcome.DEAD:
                await self._endings.dead(taken, messages[0])
            case Outcome.LATER if taken.window.orderly:
                await self._in_place(taken, messages)
            case Outcome.LATER:
                await asyncio.gather(*(self._endings.later(taken, message) for message in messages))

    async def _in_place(self, taken: Taken, messages: tuple[Message, ...]) -> None:
        last = self._endings.spent(taken, messages[0])
        for message in messages:
            taken.window.tries(taken.delivery, message)
        if last and len(messages) == 1:
            await self._endings.dead(taken, messages[0])
        else:
            self._endings.back(taken, messages, IN_PLACE_PAUSE)

    def queues_changed(self) -> None:
        """Say no more of a message whose queue is another member's."""
        self._endings.look()

    async def close(self) -> None:
        """Close connections that nobody uses, and say no more of the app."""
        for reason in (Reason.APP_PATH_NOT_FOUND, Reason.APP_NOT_LISTENING):
            self._shell.health.trouble(reason, "")
        self._close()

    def _close(self) -> None:
        if self._post:
            self._post.close()
