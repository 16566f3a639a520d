"""What a queue's reader is given: where messages come from, and the member that it is a part of."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from rota.brokers.port import Consumer
from rota.model import Queue
from rota.sidecar.consume.filter_counts import FilterCounts
from rota.sidecar.consume.start_offset import Store
from rota.sidecar.member.memory_budget import MemoryBudget
from rota.sidecar.member.queue_lifecycle import Event
from rota.sidecar.status.problems import Health
from rota.sidecar.status.sidecar_metrics import Measures
from rota.spec.resolved import Settings


@dataclass(slots=True)
class Source:
    """Where messages come from, as the settings say; ready once the member is known there."""

    settings: Settings
    consumer: Consumer
    store: Store
    begun: Callable[
        [str], Awaitable[float | None]
    ]  # when the group began to consume a topic, according to the offset store
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class ReaderShell(Protocol):
    """What reading and committing report to the member, and ask of it."""

    health: Health
    measures: Measures
    filter_counts: FilterCounts
    memory_budget: MemoryBudget

    def answer(self, event: Event, queue: Queue, life: int, sent: float | None = None) -> None:
        """Take an answer to a command."""

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset may be committed."""

    def now(self) -> float:
        """Return the time on a clock that never stops and never jumps."""
