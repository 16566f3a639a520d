"""Session of a member with the brokers: joins the group by the settings, and rejoins when a change requires it."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from rota.aio import supervise
from rota.brokers.errors import BrokerError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.port import ConsumedQueue, Consumer, Membership
from rota.model import Queue, Reason
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.consume.source import Source
from rota.sidecar.member.member import Member
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.local_offsets import LocalOffsetStore
from rota.sidecar.storage.offset_files import OffsetFiles
from rota.spec import StartFrom
from rota.spec.resolved import GroupSettings

JOIN_AGAIN = 2.0  # seconds before a failed join is retried

_log = logging.getLogger(__name__)

Connect = Callable[[GroupSettings, Membership], Consumer]


class SessionHost(Protocol):
    """The member, as the session needs it."""

    member: Member
    readings: dict[Queue, QueueReader]
    health: Problems

    def start(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine as a task."""

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""

    def consumers_changed(self) -> None:
        """Handle a broker's notice that consumers of the group joined or left."""


class BrokerSession:
    """The member's session, at most one at a time; public attributes are read-only for callers."""

    def __init__(self, pod: PodIdentity, connect: Connect, shell: SessionHost) -> None:
        self.now: Source | None = None
        self.settings: GroupSettings | None = None  # the last accepted ones, kept between leaving and rejoining
        self._who, self._connect, self._shell = pod, connect, shell
        self._leaving: Source | None = None

    def take(self, settings: GroupSettings) -> bool:
        """Accept settings, and join if needed; False if they require that the caller leaves and calls this again."""
        if self.now is None:
            self.now = self._join(settings)
            become_known = partial(self._become_known, self.now)
            self._shell.start(supervise("joining", become_known, self._shell.health.task_failed))
        elif _fixed(self.now.settings) != _fixed(settings):
            return False
        self.now.settings = self.settings = settings
        return True

    async def leave(self) -> None:
        """Leave the group."""
        self._leaving = self.now
        if self.now:
            await self.now.consumer.leave()  # wait: a new session with this client ID would be removed, too
            self.now = None

    def _join(self, settings: GroupSettings) -> Source:
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
        local = LocalOffsetStore(OffsetFiles(Path(self._who.state), settings.group))
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
                self._report(_reason_of(error), f"{error}{self._likely_cause(error, source.settings)}")
                await asyncio.sleep(JOIN_AGAIN)
            else:
                self._report(None)
                source.ready.set()
                return

    def _likely_cause(self, error: BrokerError, settings: GroupSettings) -> str:
        """Return the likely cause of a failed join as the end of a sentence: TLS errors do not name it."""
        tls = settings.broker.rocketmq.tls
        secret = tls.client_secret if tls.enabled else None
        if secret is None or self._who.client or not isinstance(error, UnreachableError):
            return ""
        name = secret.name
        field = "spec.broker.rocketmq.tls.clientSecret"
        return f"; the pod does not mount Secret {name} of {field}: run rota inject again with --client-secret {name}"

    def _report(self, problem: Reason | None, message: str = "") -> None:
        """Report the problem that keeps the member from joining, and clear the other ones; None clears all."""
        for reason in (Reason.BROKER_REFUSES, Reason.BROKER_UNREACHABLE, Reason.UNKNOWN_TOPIC):
            self._shell.health.trouble(reason, message if reason is problem else "")

    # Callbacks of the consumer.

    def _start_from(self) -> StartFrom:
        return self.settings.start_from if self.settings else StartFrom()

    def _working(self) -> dict[Queue, ConsumedQueue]:
        return {queue: self._told(queue, reading) for queue, reading in self._shell.readings.items()}

    def _told(self, queue: Queue, reading: QueueReader) -> ConsumedQueue:
        window, life = reading.window, self._shell.member.lives.get(queue)
        return ConsumedQueue(
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
        """Convert a time of the shell's clock to Unix time; 0 means never, and stays 0."""
        return at and time.time() - (self._shell.now() - at)

    def _reset(self, offsets: Mapping[Queue, int]) -> None:
        """Continue at the offsets that a user set for the group."""
        for queue, offset in offsets.items():
            if reading := self._shell.readings.get(queue):
                reading.reset(offset)
                self._shell.start(reading.commit())


def _reason_of(error: BrokerError) -> Reason:
    if isinstance(error, NotFoundError):
        return Reason.UNKNOWN_TOPIC
    return Reason.BROKER_REFUSES if isinstance(error, RejectedError) else Reason.BROKER_UNREACHABLE


def _fixed(settings: GroupSettings) -> bytes:
    """Return, encoded, the settings that can change only by a rejoin."""
    fields = (settings.group, settings.broker, settings.subscriptions, settings.message_model, settings.ordering)
    return msgspec.json.encode([*fields, settings.delivery.mode], enc_hook=float)
