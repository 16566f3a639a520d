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
from rota.sidecar.consume.source import ConsumerSession
from rota.sidecar.member.member import Member
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.local_offsets import LocalOffsetStore
from rota.sidecar.storage.offset_files import OffsetFiles
from rota.spec import StartFrom
from rota.spec.resolved import GroupSettings

JOIN_RETRY_SECONDS = 2.0  # seconds before a failed join is retried

_log = logging.getLogger(__name__)

Connect = Callable[[GroupSettings, Membership], Consumer]


class SessionHost(Protocol):
    """The part of `MemberHost` that the session uses."""

    member: Member
    readers: dict[Queue, QueueReader]
    problems: Problems

    def start_task(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine as a task."""

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""

    def on_consumers_changed(self) -> None:
        """Handle a broker's notice that consumers of the group joined or left."""


class BrokerSession:
    """The member's session, at most one at a time; public attributes are read-only for callers."""

    def __init__(self, pod: PodIdentity, connect: Connect, host: SessionHost) -> None:
        self.current: ConsumerSession | None = None
        self.settings: GroupSettings | None = None  # the settings last accepted, kept between leaving and rejoining
        self._pod = pod
        self._connect = connect
        self._host = host
        self._leaving_session: ConsumerSession | None = None  # a failed join of this session is not retried

    def accept_settings(self, settings: GroupSettings) -> bool:
        """Accept settings, and join if needed; False if they require that the caller leaves and calls this again."""
        if self.current is None:
            self.current = self._create_session(settings)
            join = partial(self._join_group, self.current)
            self._host.start_task(supervise("joining", join, self._host.problems.report_task))
        elif _rejoin_settings(self.current.settings) != _rejoin_settings(settings):
            return False
        self.current.settings = self.settings = settings
        return True

    async def leave(self) -> None:
        """Leave the group."""
        self._leaving_session = self.current
        if self.current:
            await self.current.consumer.leave()  # wait: a new session with this client ID would be removed, too
            self.current = None

    def _create_session(self, settings: GroupSettings) -> ConsumerSession:
        membership = Membership(
            group=settings.group,
            client_id=self._pod.client_id,
            subscriptions=settings.subscriptions,
            broadcasting=settings.is_broadcasting,
            orderly=settings.is_orderly,
            is_push=settings.delivery.mode == "Push",
            get_start_from=self._start_from,
            get_queues=self._consumed_queues,
            on_members_changed=self._host.on_consumers_changed,
            on_offsets_reset=self._on_offsets_reset,
        )
        consumer = self._connect(settings, membership)
        if not settings.is_broadcasting:
            offset_store = consumer  # the broker keeps the offsets
            return ConsumerSession(settings, consumer, offset_store, self._consuming_since)
        local_store = LocalOffsetStore(OffsetFiles(Path(self._pod.state_folder), settings.group))
        return ConsumerSession(settings, consumer, local_store, local_store.consuming_since)

    async def _consuming_since(self, topic: str) -> float | None:
        """Return since when the group consumes a topic; async, as the local store's method reads the disk."""
        return self._host.member.consuming_since(topic)

    async def _join_group(self, session: ConsumerSession) -> None:
        while self.current is session:
            try:
                await session.consumer.check_subscriptions()
                await session.consumer.join()
            except BrokerError as error:
                if session is self._leaving_session:
                    return
                self._report_join_problem(_reason_of(error), f"{error}{self._likely_cause(error, session.settings)}")
                await asyncio.sleep(JOIN_RETRY_SECONDS)
            else:
                self._report_join_problem(None)
                session.joined.set()
                return

    def _likely_cause(self, error: BrokerError, settings: GroupSettings) -> str:
        """Return the likely cause of a failed join as the end of a sentence: TLS errors do not name it."""
        tls = settings.broker.rocketmq.tls
        secret = tls.client_secret if tls.enabled else None
        if secret is None or self._pod.client_folder or not isinstance(error, UnreachableError):
            return ""
        name = secret.name
        field = "spec.broker.rocketmq.tls.clientSecret"
        return f"; the pod does not mount Secret {name} of {field}: run rota inject again with --client-secret {name}"

    def _report_join_problem(self, problem: Reason | None, message: str = "") -> None:
        """Report the problem that keeps the member from joining, and clear the other ones; None clears all."""
        for reason in (Reason.BROKER_REFUSES, Reason.BROKER_UNREACHABLE, Reason.UNKNOWN_TOPIC):
            self._host.problems.set_problem(reason, message if reason is problem else "")

    # Callbacks of the consumer.

    def _start_from(self) -> StartFrom:
        return self.settings.start_from if self.settings else StartFrom()

    def _consumed_queues(self) -> dict[Queue, ConsumedQueue]:
        return {queue: self._consumed_queue(queue, reader) for queue, reader in self._host.readers.items()}

    def _consumed_queue(self, queue: Queue, reader: QueueReader) -> ConsumedQueue:
        window = reader.window
        lease = self._host.member.leases.get(queue)
        locked_at = lease.locked_at if lease else None
        return ConsumedQueue(
            committed_offset=reader.reported_offset or 0,
            min_buffered_offset=window.committable_offset,
            max_buffered_offset=window.last_offset or 0,
            buffered_messages=window.unfinished_count,
            buffered_bytes=window.unfinished_bytes,
            locked=locked_at is not None,
            locked_at=self._to_unix_time(locked_at or 0.0),
            pulled_at=self._to_unix_time(reader.pull_status.answered_at),
            delivered_at=self._to_unix_time(reader.delivered_at),
        )

    def _to_unix_time(self, host_time: float) -> float:
        """Convert a time of the clock `SessionHost.now` to Unix time; 0 means never, and stays 0."""
        return time.time() - (self._host.now() - host_time) if host_time else 0.0

    def _on_offsets_reset(self, offsets: Mapping[Queue, int]) -> None:
        """Continue at the offsets that a user set for the group."""
        for queue, offset in offsets.items():
            if reader := self._host.readers.get(queue):
                reader.reset_offset(offset)
                self._host.start_task(reader.commit())


def _reason_of(error: BrokerError) -> Reason:
    if isinstance(error, NotFoundError):
        return Reason.UNKNOWN_TOPIC
    return Reason.BROKER_REFUSES if isinstance(error, RejectedError) else Reason.BROKER_UNREACHABLE


def _rejoin_settings(settings: GroupSettings) -> bytes:
    """Return, encoded, the settings that can change only by a rejoin."""
    fields = (settings.group, settings.broker, settings.subscriptions, settings.message_model, settings.ordering)
    return msgspec.json.encode([*fields, settings.delivery.mode], enc_hook=float)  # the hook encodes Seconds
