"""How a message that was handed over ends, whichever way it went: finished, back here, or given back to its broker."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from rota.brokers.errors import BrokerError, Refused
from rota.brokers.message import Message
from rota.brokers.port import LATER, NEVER
from rota.model import Queue, Reason, plain
from rota.sidecar.consume.queue_reader import Reading
from rota.sidecar.delivery.scheduler import Taken
from rota.sidecar.member.window import AT_ONCE, Window
from rota.sidecar.status.delivery_counts import DeliveryCounts
from rota.sidecar.status.problems import Health
from rota.spec.resolved import Settings

NOT_TAKEN_PAUSE = 5.0  # before a message that the broker did not take back is tried again

LONGEST_NAME = 100  # characters of a message's id

FOR_EVER = 2**31 - 1  # a broker counts up to this

_log = logging.getLogger(__name__)


class Shell(Protocol):
    """What is asked, and told, of the member."""

    health: Health
    delivery_counts: DeliveryCounts

    @property
    def settings(self) -> Settings:
        """The settings that are in force."""

    def now(self) -> float:
        """Return the time on a clock that never stops and never jumps."""

    def reading(self, queue: Queue) -> Reading | None:
        """Return who reads a queue."""

    def offer(self, reading: Reading) -> None:
        """Deliver from it: it has something."""


class DeliveringShell(Shell, Protocol):
    """What is asked, and told, of the member by those who deliver."""

    def delivery_ended(self, messages: Sequence[Message], outcome: str, seconds: float) -> None:
        """Count messages of one topic that were at the app for so long, and send the spans of those that are traced."""


class Endings:
    """Ends messages, and knows how often each was tried."""

    def __init__(self, shell: Shell) -> None:
        """End those of a member."""
        self._shell = shell
        self._refused: tuple[Window, int] | None = None  # the message that the broker refused to take back last

    def attempt(self, taken: Taken, message: Message) -> int:
        """Return the number of this attempt, from 1."""
        return taken.window.attempt(message)

    def spent(self, taken: Taken, message: Message) -> bool:
        """Whether this attempt was its last, and dead letters are what comes then."""
        most = self._shell.settings.max_attempts
        return not self._shell.settings.broadcasting and 0 <= most <= self.attempt(taken, message)

    def finish(self, taken: Taken, message: Message) -> None:
        """Be done with a message."""
        taken.window.done(taken.delivery, message)
        if self._refused:
            self.look()

    def look(self) -> None:
        """Say no more of a message that the broker refused once it is finished, forgotten or another member's."""
        window, offset = self._refused or (None, 0)
        if window and (window.stopped or offset not in window.tried):
            self._refused = None
            self._shell.health.trouble(Reason.MESSAGE_NOT_TAKEN_BACK, "")

    def back(self, taken: Taken, messages: Iterable[Message], pause: float = 0.0) -> None:
        """Take messages back to hand them out again after a pause."""
        until = self._shell.now() + pause if pause else AT_ONCE
        for message in messages:
            taken.window.back(taken.delivery, message, until)
        self.look()
        if pause:
            asyncio.get_running_loop().call_later(pause, self._offer, taken.queue)

    def _offer(self, queue: Queue) -> None:
        self.look()
        if reading := self._shell.reading(queue):  # as it is by then
            self._shell.offer(reading)

    async def later(self, taken: Taken, message: Message) -> None:
        """Have it tried again later; after its last attempt it goes to the dead letters."""
        await self._give_back(taken, message, NEVER if self.spent(taken, message) else LATER)

    async def dead(self, taken: Taken, message: Message) -> None:
        """Have it kept with the dead letters."""
        await self._give_back(taken, message, NEVER)

    async def _give_back(self, taken: Taken, message: Message, level: int) -> None:
        """Have the broker keep it for later, or with the dead letters; Broadcasting knows neither."""
        reading = self._shell.reading(taken.queue)
        if self._shell.settings.broadcasting or reading is None:
            self.finish(taken, message)
            return
        try:
            await reading.source.consumer.give_back(message, level=level, attempts=FOR_EVER)
        except BrokerError as error:
            _log.warning("%s did not go back to its broker, and is tried again here: %s", _name(message), error)
            if isinstance(error, Refused):  # it may never be taken: so the attempt is counted here, and it is told
                taken.window.tries(taken.delivery, message)
                self._refused = taken.window, message.offset
                self._shell.health.trouble(Reason.MESSAGE_NOT_TAKEN_BACK, _not_taken(message, error))
            self.back(taken, (message,), NOT_TAKEN_PAUSE)
        else:
            if level == LATER:
                self._shell.delivery_counts.count_returned(message.attempt, self._shell.now())
            self.finish(taken, message)


def _name(message: Message) -> str:
    """Return a message's id for a log or a report: a producer may have chosen one of 32 KB."""
    return plain(message.id, LONGEST_NAME)


def _not_taken(message: Message, error: BrokerError) -> str:
    return (
        f"The broker keeps {_name(message)}, offset {message.offset} of {message.queue}, neither for another attempt "
        f"nor among the dead letters: {error}; have the app take it, or set the group's offset behind it"
    )
