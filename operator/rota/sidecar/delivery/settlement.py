"""Settlement of delivered messages: finished, returned to the window, or sent back to the broker."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from rota.brokers.errors import BrokerError, RejectedError
from rota.brokers.message import Message
from rota.brokers.port import DEAD_LETTER_LEVEL, RETRY_LEVEL
from rota.model import Queue, Reason, single_line
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery.scheduler import Batch
from rota.sidecar.member.window import IMMEDIATELY, QueueWindow
from rota.sidecar.status.control_api import ReportSource
from rota.sidecar.status.delivery_counts import DeliveryCounts
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import SidecarMetrics
from rota.spec.resolved import GroupSettings

SEND_BACK_RETRY_SECONDS = 5.0  # seconds before a message that the broker did not take back is delivered again
MAX_ID_CHARACTERS = 100  # characters of a message's id in logs and problems
UNLIMITED_ATTEMPTS = 2**31 - 1  # the most that brokers accept: the sidecar, not the broker, ends the attempts

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SettlementHost(Protocol):
    """The member, as settlement needs it."""

    problems: Problems
    delivery_counts: DeliveryCounts

    @property
    def settings(self) -> GroupSettings:
        """The settings in force."""

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""

    def reader_of(self, queue: Queue) -> QueueReader | None:
        """Return the reader of a queue; None without one."""

    def offer(self, reader: QueueReader) -> None:
        """Deliver messages from a queue."""


class DeliveryHost(SettlementHost, Protocol):
    """The member, as Push and Pull delivery (push.py, pull.py) need it."""

    metrics: SidecarMetrics

    @property
    def status(self) -> ReportSource:
        """The member's reports."""

    @property
    def obeyed_generation(self) -> int:
        """The generation of the obeyed assignment."""

    def start_task(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine as a task."""

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery of this queue may start now."""

    def may_send(self, queue: Queue, started_at: float) -> bool:
        """Whether a delivery that started at `started_at` may be sent, to the app or back to the broker.

        It may not if its queue was reassigned while the process was stalled.
        """

    def on_delivery_ended(self, messages: Sequence[Message], outcome: str, seconds: float) -> None:
        """Count messages of one topic that were at the app for `seconds`, and send spans of the traced ones."""


class _RejectedMessage(NamedTuple):
    """A message that the broker rejected when it was sent back."""

    window: QueueWindow
    offset: int

    @property
    def is_settled(self) -> bool:
        """Whether the message is finished, or discarded by a reset, or its queue is released."""
        # `_send_back` counts an extra attempt at the rejection; the window keeps it while the message is unfinished.
        return self.window.stopped or not self.window.has_extra_attempt(self.offset)


class Settlement:
    """Settles messages, and counts their attempts."""

    def __init__(self, host: SettlementHost) -> None:
        self._host = host
        self._last_rejected: _RejectedMessage | None = None

    def is_last_attempt(self, batch: Batch, message: Message) -> bool:
        """Whether this was the message's last attempt, so that a failure makes it a dead letter."""
        max_attempts = self._host.settings.max_attempts
        # -1 means no limit; Broadcasting has no retries and no dead letters.
        has_limit = max_attempts >= 0 and not self._host.settings.is_broadcasting
        return has_limit and batch.window.attempt_number(message) >= max_attempts

    def ack(self, batch: Batch, message: Message) -> None:
        """Finish a message."""
        batch.window.finish_message(batch.delivery, message)
        self.clear_settled_rejection()

    def clear_settled_rejection(self) -> None:
        """Clear RETRY_REJECTED once the message that the broker rejected last is settled, or its queue is released."""
        if self._last_rejected and self._last_rejected.is_settled:
            self._last_rejected = None
            self._host.problems.set_problem(Reason.RETRY_REJECTED, "")

    def return_messages(self, batch: Batch, messages: Iterable[Message], delay_seconds: float = 0.0) -> None:
        """Return messages to the window, to be delivered again: after a delay or, without one, at the next offer."""
        deliver_after = self._host.now() + delay_seconds if delay_seconds else IMMEDIATELY
        for message in messages:
            batch.window.return_message(batch.delivery, message, deliver_after)
        self.clear_settled_rejection()
        if delay_seconds:
            asyncio.get_running_loop().call_later(delay_seconds, self._offer_again, batch.queue)

    def _offer_again(self, queue: Queue) -> None:
        self.clear_settled_rejection()
        if reader := self._host.reader_of(queue):  # the queue may have another reader by now
            self._host.offer(reader)

    async def retry(self, batch: Batch, message: Message) -> None:
        """Have the broker deliver a message again later; after its last attempt make it a dead letter."""
        level = DEAD_LETTER_LEVEL if self.is_last_attempt(batch, message) else RETRY_LEVEL
        await self._send_back(batch, message, level)

    async def retry_all(self, batch: Batch, messages: Iterable[Message]) -> None:
        """Retry messages concurrently; after an unexpected error, raise it once all of them have ended."""
        # Raised by `gather`, an error would lose the traceback that names its origin (docker/compile_sidecar.py).
        retries = [self.retry(batch, message) for message in messages]
        for error in await asyncio.gather(*retries, return_exceptions=True):
            if error:
                raise error

    async def dead_letter(self, batch: Batch, message: Message) -> None:
        """Have the broker store a message as a dead letter."""
        await self._send_back(batch, message, DEAD_LETTER_LEVEL)

    async def _send_back(self, batch: Batch, message: Message, delay_level: int) -> None:
        """Send a message back to the broker; while that fails, redeliver it here.

        Broadcasting has no retries, so there the message is only finished. It is also only finished if its queue was
        released meanwhile: nothing commits this window any more, and the queue's next owner fetches the message again.
        """
        reader = self._host.reader_of(batch.queue)
        if self._host.settings.is_broadcasting or reader is None:
            self.ack(batch, message)
            return
        try:
            await reader.session.consumer.send_back(message, delay_level=delay_level, max_attempts=UNLIMITED_ATTEMPTS)
        except BrokerError as error:
            text = "Message %s could not be sent back to its broker and is redelivered by this member: %s"
            _log.warning(text, _short_id(message), error)
            if isinstance(error, RejectedError):  # this may last: count the attempt here, and report the problem
                batch.window.count_attempt(batch.delivery, message)
                self._last_rejected = _RejectedMessage(batch.window, message.offset)
                self._host.problems.set_problem(Reason.RETRY_REJECTED, _rejection_message(message, error))
            self.return_messages(batch, (message,), SEND_BACK_RETRY_SECONDS)
        else:
            if delay_level == RETRY_LEVEL:
                self._host.delivery_counts.count_returned(message.reconsume_times, self._host.now())
            self.ack(batch, message)


def partition(items: Iterable[T], predicate: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """Return the items that satisfy the predicate, and the others, both in their order; used by Push and Pull."""
    matching: list[T] = []
    others: list[T] = []
    for item in items:
        (matching if predicate(item) else others).append(item)
    return matching, others


def _short_id(message: Message) -> str:
    """Return a message's ID, shortened for logs and reports: a producer may have chosen one of 32 KB."""
    return single_line(message.id, MAX_ID_CHARACTERS)


def _rejection_message(message: Message, error: BrokerError) -> str:
    name = f"message {_short_id(message)} (offset {message.offset} of {message.queue})"
    rejection = f"The broker rejects {name} when it is sent back for a retry or as a dead letter: {error}"
    return f"{rejection}; have the app accept it, or reset the group's offset past it"
