"""The source of one queue's messages: its session with the brokers, and the state that its reader's parts share."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rota.brokers.errors import BrokerError, ConsumptionDisabledError, RejectedError, UnreachableError
from rota.brokers.port import Consumer
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.sidecar.consume.filter_counts import FilterCounts
from rota.sidecar.consume.start_offset import OffsetStore
from rota.sidecar.member.memory_budget import MemoryBudget
from rota.sidecar.member.queue_lifecycle import LeaseEvent
from rota.sidecar.member.window import QueueWindow
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import SidecarMetrics
from rota.spec.resolved import GroupSettings

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ConsumerSession:
    """One session with the brokers, as the settings describe it; `joined` is set once the member has joined."""

    settings: GroupSettings
    consumer: Consumer
    offset_store: OffsetStore
    # When the group started to consume a topic, in seconds since 1970: by the assignment or, in Broadcasting, by the
    # member's disk. None: unknown.
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
        """Pass the answer to a command on to the member; with LOCKED, `sent_at` is when the lock was requested."""

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset of this queue may be committed now."""

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""


class ChangeSignal:
    """Wakes tasks that wait for a condition.

    `notify` checks the conditions, because the tasks themselves would wake up in vain for most changes: while a queue's
    window is full, each delivered message is a change.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def notify(self) -> None:
        """Wake the tasks whose conditions hold now; call this after each change of a state that conditions read."""
        for waiter, condition in self._waiting.items():
            if not waiter.done() and condition():
                waiter.set_result(None)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it must only read state."""
        while not condition():
            await self._wait(condition)

    async def wait_briefly(self, seconds: float) -> None:
        """Wait for the next change, for at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait(lambda: True)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = condition
        try:
            await waiter
        finally:
            del self._waiting[waiter]


class QueueSource:
    """One queue at its broker, with its window and tasks.

    It is shared by `QueueReader`, `QueuePuller`, `OffsetCommitter` and `LeaseRequests` (lock, drain, unlock).
    """

    def __init__(self, queue: Queue, session: ConsumerSession, host: ReaderHost) -> None:
        self.queue = queue
        self.session = session
        self.host = host
        self.window = QueueWindow(next_offset=0, orderly=session.settings.is_orderly, committed_offset=0)
        # The messages of the group's retry topic were tried before.
        self.is_retry_topic = queue.topic == RETRY_TOPIC_PREFIX + session.settings.group
        # Notified of commands, ends of deliveries, resets, new limits, and granted memory.
        self.changed = ChangeSignal()
        self._memory_budget = host.memory_budget
        self._tasks: set[asyncio.Task[Any]] = set()

    def on_change(self) -> None:
        """Continue after a change; other queues may take memory that became free."""
        self.changed.notify()
        self._memory_budget.grant_waiting()

    def start_task(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task; log its failure."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("A task of queue %s failed", self.queue, exc_info=error)

    async def cancel_tasks(self) -> None:
        """Cancel all tasks, and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def record_answer(self) -> None:
        """Record that the queue's broker has answered a request."""
        self.host.problems.record_answer(self.queue.broker)

    def record_no_answer(self) -> None:
        """Record that the queue's broker did not answer a request."""
        self.host.problems.record_no_answer(self.queue.broker, self.host.now())

    def record_failure(self, action: str, error: Exception, *, is_repeated: bool = False) -> None:
        """Record a failed request, and log it unless the same failure was logged before."""
        if isinstance(error, UnreachableError):
            self.record_no_answer()
        elif isinstance(error, RejectedError):  # the broker answered, with a rejection
            self.record_answer()
            if not isinstance(error, ConsumptionDisabledError):  # the operator reports that, for the whole group
                self.host.problems.record_rejection(self.queue, str(error))
        if not is_repeated:
            self.log_failure(action, error)

    def log_failure(self, action: str, error: Exception) -> None:
        """Log a failure on one line; errors other than BrokerError, OSError and ValueError with their traceback."""
        is_expected = isinstance(error, BrokerError | OSError | ValueError)
        text = str(error) or repr(error)
        _log.warning("%s failed for %s: %s", action, self.queue, text, exc_info=None if is_expected else error)
