"""Where a member's messages come from: joined as the settings say, and joined anew where they say otherwise."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from rota.aio import supervise
from rota.brokers.errors import BrokerError, Refused, Unknown
from rota.brokers.port import Consumer, Membership, Working
from rota.model import Queue, Reason
from rota.sidecar.consume.queue_reader import Reading
from rota.sidecar.consume.source import Source
from rota.sidecar.member.member import Member
from rota.sidecar.status.problems import Health
from rota.sidecar.storage.environment import Who
from rota.sidecar.storage.local_offsets import Local
from rota.sidecar.storage.offset_files import Offsets
from rota.spec import StartFrom
from rota.spec.resolved import Settings

JOIN_AGAIN = 2.0

_log = logging.getLogger(__name__)

Connect = Callable[[Settings, Membership], Consumer]


class Shell(Protocol):
    """Whose sources they are."""

    member: Member
    readings: dict[Queue, Reading]
    health: Health

    def start(self, work: Coroutine[None, None, object]) -> None:
        """Do something beside all else."""

    def now(self) -> float:
        """Return the time on a clock that never stops and never jumps."""

    def consumers_changed(self) -> None:
        """Hear from a broker that consumers of the group came or went."""


class Sources:
    """One source at a time; what has no underscore is there to be read."""

    def __init__(self, who: Who, connect: Connect, shell: Shell) -> None:
        """Join nothing yet."""
        self.now: Source | None = None
        self.settings: Settings | None = None  # the last that were taken, also between leaving and joining anew
        self._who, self._connect, self._shell = who, connect, shell
        self._leaving: Source | None = None

    def take(self, settings: Settings) -> bool:
        """Take settings, and join if that was not done yet; False where one must leave first, and take them then."""
        if self.now is None:
            self.now = self._join(settings)
            become_known = partial(self._become_known, self.now)
            self._shell.start(supervise("joining", become_known, self._shell.health.task_failed))
        elif _fixed(self.now.settings) != _fixed(settings):
            return False
        self.now.settings = self.settings = settings
        return True

    async def leave(self) -> None:
        """Be known no more."""
        self._leaving = self.now
        if self.now:
            await self.now.consumer.leave()  # to the end: who joins meanwhile, by the same name, would be gone with it
            self.now = None

    def _join(self, settings: Settings) -> Source:
        membership = Membership(
            group=settings.group,
            client_id=self._who.client_id,
            subscriptions=settings.subscriptions,
            broadcasting=settings.broadcasting,
            orderly=settings.orderly,
            pushed=settings.delivery.mode == "Push",
            start_from=self._start_from,
            queues=self._working,
            on_members=self._shell.consumers_changed,
            on_reset=self._reset,
        )
        consumer = self._connect(settings, membership)
        if not settings.broadcasting:
            return Source(settings, consumer, consumer, self._begun)
        local = Local(Offsets(Path(self._who.state), settings.group))
        return Source(settings, consumer, local, local.begun)

    async def _begun(self, topic: str) -> float | None:
        return self._shell.member.begun(topic)

    async def _become_known(self, source: Source) -> None:
        while self.now is source:
            try:
                await source.consumer.check()
                await source.consumer.join()
            except BrokerError as error:
                if source is self._leaving:
                    return
                self._report(_reason_of(error), str(error))
                await asyncio.sleep(JOIN_AGAIN)
            else:
                self._report(None)
                source.ready.set()
                return

    def _report(self, problem: Reason | None, message: str = "") -> None:
        """Report what keeps the member from joining, and nothing else."""
        for reason in (Reason.BROKER_REFUSES, Reason.BROKER_UNREACHABLE, Reason.UNKNOWN_TOPIC):
            self._shell.health.trouble(reason, message if reason is problem else "")

    # What brokers ask and tell.

    def _start_from(self) -> StartFrom:
        return self.settings.start_from if self.settings else StartFrom()

    def _working(self) -> dict[Queue, Working]:
        return {queue: self._told(queue, reading) for queue, reading in self._shell.readings.items()}

    def _told(self, queue: Queue, reading: Reading) -> Working:
        window, life = reading.window, self._shell.member.lives.get(queue)
        return Working(
            committed=window.committed or 0,
            first=window.committable,
            last=window.last or 0,
            buffered=window.buffered,
            bytes=window.bytes,
            locked=bool(life and life.locked is not None),
            locked_at=self._since_1970((life and life.locked) or 0.0),
            pulled_at=self._since_1970(reading.pulled_at),
            delivered_at=self._since_1970(reading.delivered_at),
        )

    def _since_1970(self, at: float) -> float:
        """Read the clock that never jumps as brokers do; 0 stays what it is: never."""
        return at and time.time() - (self._shell.now() - at)

    def _reset(self, offsets: Mapping[Queue, int]) -> None:
        """Go on where somebody set the group's offsets."""
        for queue, offset in offsets.items():
            if reading := self._shell.readings.get(queue):
                reading.reset(offset)
                self._shell.start(reading.commit())


def _reason_of(error: BrokerError) -> Reason:
    if isinstance(error, Unknown):
        return Reason.UNKNOWN_TOPIC
    return Reason.BROKER_REFUSES if isinstance(error, Refused) else Reason.BROKER_UNREACHABLE


def _fixed(settings: Settings) -> bytes:
    """Return what cannot change under a source that is in use."""
    told = (settings.group, settings.broker, settings.subscriptions, settings.message_model, settings.ordering)
    return msgspec.json.encode([*told, settings.delivery.mode], enc_hook=float)
