"""Settlement of delivered messages: finished, returned to the window, or sent back to the broker."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from rota.brokers.errors import BrokerError, RejectedError
from rota.brokers.message import Message
from rota.brokers.port import LATER, NEVER
from rota.model import Queue, Reason, plain
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery.scheduler import Batch
from rota.sidecar.member.window import AT_ONCE, Window
from rota.sidecar.status.delivery_counts import DeliveryCounts
from rota.sidecar.status.problems import Problems
from rota.spec.resolved import GroupSettings

NOT_TAKEN_PAUSE = 5.0  # seconds before a message that the broker did not take back is delivered again

LONGEST_NAME = 100  # characters of a message's id

FOR_EVER = 2**31 - 1  # the broker's largest number of attempts: the sidecar decides when a message has none left

_log = logging.getLogger(__name__)


class SettlementHost(Protocol):
    """The member, as settlement needs it."""

    health: Problems
    delivery_counts: DeliveryCounts

    @property
    def settings(self) -> GroupSettings:
        """The settings in force."""

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""

    def reading(self, queue: Queue) -> QueueReader | None:
        """Return the reader of a queue; None without one."""

    def offer(self, reading: QueueReader) -> None:
        """Deliver messages from a queue."""


class DeliveryHost(SettlementHost, Protocol):
    """The member, as Push and Pull delivery need it."""

    def delivery_ended(self, messages: Sequence[Message], outcome: str, seconds: float) -> None:
        """Count messages of one topic that were at the app for `seconds`, and send spans of the traced ones."""


class Settlement:
    """Settles messages, and counts their attempts."""

    def __init__(self, shell: SettlementHost) -> None:
        self._shell = shell
        self._refused: tuple[Window, int] | None = None  # the message that the broker last refused to take back

    def attempt(self, batch: Batch, message: Message) -> int:
        """Return the number of this attempt, from 1."""
        return batch.window.attempt(message)

    def spent(self, batch: Batch, message: Message) -> bool:
        """Whether this was the message's last attempt, so that a failure makes it a dead letter."""
        max_attempts = self._shell.settings.max_attempts
        return not self._shell.settings.broadcasting and 0 <= max_attempts <= self.attempt(batch, message)

    def finish(self, batch: Batch, message: Message) -> None:
        """Finish a message."""
        batch.window.done(batch.delivery, message)
        if self._refused:
            self.look()

    def look(self) -> None:
        """Clear the problem of a refused message once it is finished or forgotten, or its queue is released."""
        window, offset = self._refused or (None, 0)
        if window and (window.stopped or offset not in window.tried):
            self._refused = None
            self._shell.health.trouble(Reason.MESSAGE_NOT_TAKEN_BACK, "")

    def back(self, batch: Batch, messages: Iterable[Message], pause: float = 0.0) -> None:
        """Return messages to the window, to be delivered again after a pause."""
        until = self._shell.now() + pause if pause else AT_ONCE
        for message in messages:
            batch.window.back(batch.delivery, message, until)
        self.look()
        if pause:
            asyncio.get_running_loop().call_later(pause, self._offer, batch.queue)

    def _offer(self, queue: Queue) -> None:
        self.look()
        if reading := self._shell.reading(queue):  # the queue may have another reader by now
            self._shell.offer(reading)

    async def later(self, batch: Batch, message: Message) -> None:
        """Have the broker deliver a message again later; after its last attempt make it a dead letter."""
        await self._give_back(batch, message, NEVER if self.spent(batch, message) else LATER)

    async def dead(self, batch: Batch, message: Message) -> None:
        """Have the broker store a message as a dead letter."""
        await self._give_back(batch, message, NEVER)

    async def _give_back(self, batch: Batch, message: Message, level: int) -> None:
        """Send a message back to the broker; in Broadcasting, or without a reader, only finish it."""
        reading = self._shell.reading(batch.queue)
        if self._shell.settings.broadcasting or reading is None:
            self.finish(batch, message)
            return
        try:
            await reading.source.consumer.send_back(message, level=level, attempts=FOR_EVER)
        except BrokerError as error:
            _log.warning("%s did not go back to its broker, and is tried again here: %s", _name(message), error)
            if isinstance(error, RejectedError):  # this may last: count the attempt here, and report the problem
                batch.window.tries(batch.delivery, message)
                self._refused = batch.window, message.offset
                self._shell.health.trouble(Reason.MESSAGE_NOT_TAKEN_BACK, _not_taken(message, error))
            self.back(batch, (message,), NOT_TAKEN_PAUSE)
        else:
            if level == LATER:
                self._shell.delivery_counts.count_returned(message.attempt, self._shell.now())
            self.finish(batch, message)


def _name(message: Message) -> str:
    """Return a message's ID, shortened for logs and reports: a producer may have chosen one of 32 KB."""
    return plain(message.id, LONGEST_NAME)


def _not_taken(message: Message, error: BrokerError) -> str:
    return (
        f"The broker keeps {_name(message)}, offset {message.offset} of {message.queue}, neither for another attempt "
        f"nor among the dead letters: {error}; have the app take it, or set the group's offset behind it"
    )
