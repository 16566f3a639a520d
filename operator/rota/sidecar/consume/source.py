"""Dependencies of a queue's reader: its session with the brokers, and the interface of its member."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from rota.brokers.port import Consumer
from rota.model import Queue
from rota.sidecar.consume.filter_counts import FilterCounts
from rota.sidecar.consume.start_offset import OffsetStore
from rota.sidecar.member.memory_budget import MemoryBudget
from rota.sidecar.member.queue_lifecycle import LeaseEvent
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import SidecarMetrics
from rota.spec.resolved import GroupSettings


@dataclass(slots=True)
class ConsumerSession:
    """One session with the brokers, as the settings describe it; `joined` is set once the member has joined."""

    settings: GroupSettings
    consumer: Consumer
    offset_store: OffsetStore
    # When the group started to consume a topic, according to the offset store.
    consuming_since: Callable[[str], Awaitable[float | None]]
    joined: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def commits_to_broker(self) -> bool:
        """Whether the broker is the offset store; in Broadcasting the member's own disk is."""
        return self.offset_store is self.consumer


class ReaderHost(Protocol):
    """The member, as reading and committing need it."""

    problems: Problems
    metrics: SidecarMetrics
    filter_counts: FilterCounts
    memory_budget: MemoryBudget

    def answer_command(self, event: LeaseEvent, queue: Queue, lease_number: int, sent_at: float | None = None) -> None:
        """Pass the answer to a command on to the member."""

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset of this queue may be committed now."""

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""
