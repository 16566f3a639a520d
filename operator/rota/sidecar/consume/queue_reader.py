"""The reader of one queue: finds the start offset, locks, pulls and commits, as the member commands.

A command starts or stops fetching at once. Requests to the broker are sent one after the other; a request that finds
the queue's life number changed when its turn comes is dropped without an answer.

Every command is answered, even if it fails with an unexpected error. A failed reader is an event of the queue's
state machine (`ReaderFailed`), which restarts it; a failed commit is retried by the next one.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Protocol

from rota.brokers.errors import BrokerError, ConsumptionDisabledError, RejectedError, UnreachableError
from rota.brokers.port import PullResult
from rota.model import RETRY, Queue
from rota.reports import QueueState
from rota.sidecar.consume.offset_committer import OffsetCommitter, log_failure
from rota.sidecar.consume.pull_outcomes import failure_of, next_pause, result_of
from rota.sidecar.consume.source import ReaderHost, Source
from rota.sidecar.consume.start_offset import FROM_THE_OLDEST, find_start_offset
from rota.sidecar.member.memory_budget import PullAdmission, Reservation
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent
from rota.sidecar.member.window import Limits, Window

COMMIT_PAUSE = 1.0  # seconds before the last commit of a queue is retried
CUT_SECONDS = 3.0  # wait this long for cut deliveries to end, then release the queue
UNREAD_SECONDS = 60.0  # a queue without an answered pull for this long is reported
IDLE_SECONDS = 120.0  # a pull that neither returns nor fails for this long is sent again
RESUME_AT_FREE_SHARE = 4  # a queue that reached its limit fetches again once a quarter of it is free

_log = logging.getLogger(__name__)


class QueueReaderHost(ReaderHost, Protocol):
    """The member, as a queue's reader needs it."""

    def offer(self, reading: "QueueReader") -> None:
        """Deliver messages from this queue."""

    def cut(self, reading: "QueueReader") -> None:
        """Abort the queue's open deliveries now."""


class QueueReader:
    """Reads a queue until the member has released it; public attributes are read-only for callers."""

    def __init__(self, queue: Queue, source: Source, shell: QueueReaderHost) -> None:
        self.queue, self.source, self.limits = queue, source, Limits()
        self.window = Window(next=0, orderly=source.settings.orderly, committed=0)
        self.again = queue.topic == RETRY + source.settings.group  # retry topic: its messages were tried before
        self.pulled_at = self.delivered_at = 0.0
        self._shell = shell
        self.obstacle: QueueState = ""  # why it does not pull, while its state is Running
        self._asked_at: float | None = None  # when the open pull was sent
        self._unanswered_since: float | None = None  # when the first unanswered pull was sent
        self._life = self._stopped = 0
        self._late = False  # drainTimeout is over: a commit that fails now is not retried
        self._changed = asyncio.Event()
        self._refused_offset = self._refused_bytes = 0  # of the message that the last pull had no memory for
        self._turn = asyncio.Lock()
        self._offsets = OffsetCommitter(queue, source, self.window, shell, self._pull_anew)
        self._pulling: asyncio.Task[None] | None = None
        self._placing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def obey(self, command: Command) -> None:
        """Start a command; its answer comes by `QueueReaderHost.answer`."""
        self._life = life = command.life
        match command.act:
            case LeaseAction.LOCK:
                self._start(self._lock(life))
            case LeaseAction.PLACE:
                self._placing = self._start(self._place(life))
            case LeaseAction.FETCH:
                self.window.resume()
                self._halt()
                self._pulling = self._start_pulling()
                self._shell.offer(self)
            case LeaseAction.STOP:
                self._stopped, self._late, self._offsets.in_doubt = life, False, True
                self.window.stop()
                self._halt()
                self._start(self._end(life))
            case LeaseAction.CUT:
                self._late = True
                self._shell.cut(self)
            case LeaseAction.UNLOCK:
                self._start(self._unlock(life))
        self.changed()

    def changed(self) -> None:
        """Continue after a delivery ended or a limit changed; other queues may take memory that became free."""
        self.wake()
        self._shell.memory_budget.grant()

    def wake(self) -> None:
        """Wake the reader: the queue's limits may have changed."""
        self._changed.set()

    def reset(self, offset: int) -> None:
        """Continue at an offset that a user set for the group."""
        self.window.rewind(offset)
        self._offsets.in_doubt = False
        self._pull_anew()

    def _pull_anew(self) -> None:
        if self._pulling:  # the open pull may wait for long at the old offset
            self._pulling.cancel()
            self._asked_at = None
            self._pulling = self._start_pulling()
        self.changed()

    def _start_pulling(self) -> asyncio.Task[None]:
        task = self._start(self._pull())
        task.add_done_callback(partial(self._pulling_ended, self._life))
        return task

    def _pulling_ended(self, life: int, task: asyncio.Task[None]) -> None:
        """Report a failed reader; the queue's state machine decides when it is restarted."""
        if self._pulling is task:  # otherwise it was cancelled
            self._pulling = self._asked_at = self._unanswered_since = None
            self.obstacle = "failing"
            self._answer(LeaseEvent.READER_FAILED, life)

    def give_up_idle_pull(self, awake_since: float) -> None:
        """Send the open pull again if it had no result for IDLE_SECONDS while the event loop was running."""
        if self._asked_at is None or not self._pulling:
            return
        idle = self._shell.now() - max(self._asked_at, awake_since)
        if idle >= IDLE_SECONDS:
            _log.warning("A pull of %s has neither returned nor failed for %.0f s; it is sent again", self.queue, idle)
            self._shell.measures.pulls.labels("idle").inc()
            self._pull_anew()

    def is_unread(self, awake_since: float) -> bool:
        """Whether the broker has answered no pull for UNREAD_SECONDS, although the reader keeps pulling."""
        since = self._unanswered_since
        return since is not None and self._shell.now() - max(since, awake_since) > UNREAD_SECONDS

    async def close(self) -> None:
        """Cancel all tasks, and wait for their end."""
        self._shell.health.takes(self.queue)
        self._pulling = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def commit(self) -> None:
        """Commit the finished offset, if that is allowed."""
        await self._offsets.commit()

    def commit_soon(self) -> None:
        """Start a commit, unless one is in progress; commits of other queues do not wait for it."""
        if not self._offsets.in_progress.locked():
            self._start(self.commit())

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("The work on %s failed", self.queue, exc_info=error)

    def _halt(self) -> None:
        """Cancel the open pull, or the look-up of the start offset."""
        for task in (self._pulling, self._placing):
            if task:
                task.cancel()
        self._pulling = self._placing = self._asked_at = self._unanswered_since = None
        self.obstacle = ""
        self._shell.health.takes(self.queue)

    async def _lock(self, life: int) -> None:
        await self.source.ready.wait()
        async with self._turn:
            if self._life != life or self._stopped == life:
                return
            sent = self._shell.now()
            try:
                mine = await self.source.consumer.lock([self.queue])
            except Exception as error:  # noqa: BLE001 - the command must be answered
                self._failed("Locking", error)
                self._answer(LeaseEvent.FAILED, life)
            else:
                self._answered()
                self._answer(LeaseEvent.LOCKED if self.queue in mine else LeaseEvent.REFUSED, life, sent)

    async def _unlock(self, life: int) -> None:
        async with self._turn:
            try:
                await self.source.consumer.unlock([self.queue])
            except Exception as error:  # noqa: BLE001 - the command must be answered; the lock expires at the broker
                self._failed("Unlocking", error)
            self._answer(LeaseEvent.UNLOCKED, life)

    async def _place(self, life: int) -> None:
        await self.source.ready.wait()
        await self._until_empty(life)  # deliveries of the previous lock: a reset now would discard their results
        async with self._turn, self._offsets.in_progress:
            if self._life != life:
                return
            settings, consumer, store = self.source.settings, self.source.consumer, self.source.store
            try:
                start_from = FROM_THE_OLDEST if self.again else settings.start_from
                begun = await self.source.begun(self.queue.topic)
                start = await find_start_offset(self.queue, consumer, store, start_from, begun)
            except Exception as error:  # noqa: BLE001 - the command must be answered
                self._failed("Finding where to begin", error)
                self._answer(LeaseEvent.FAILED, life)
                return
            self._answered()
            # Never go back behind messages that are finished here: a killed broker may have lost its latest commits.
            self.window.reset(max(start, self.window.committable), start)
        self.changed()
        self._answer(LeaseEvent.PLACED, life)

    async def _end(self, life: int) -> None:
        """Wait for open deliveries, commit, and answer Empty; no answer if the queue was assigned again meanwhile."""
        async with self._turn:
            await self._until_drained(life)
            while self._life == life and not await self._offsets.commit():
                if self._late:
                    self._offsets.report_uncommitted()
                    break
                await self._change_within(COMMIT_PAUSE)
        self._answer(LeaseEvent.EMPTY, life)

    async def _until_drained(self, life: int) -> None:
        """Wait until no delivery is open; for aborted deliveries CUT_SECONDS at most."""
        deadline: float | None = None
        while self._life == life and not self.window.empty:
            if self._late:
                now = self._shell.now()
                deadline = now + CUT_SECONDS if deadline is None else deadline
                if now >= deadline:
                    _log.error("Deliveries of %s did not end when they were cut; the queue is released", self.queue)
                    return
                await self._change_within(deadline - now)
            else:
                await self._change()

    async def _until_empty(self, life: int) -> None:
        """Wait until no delivery is open, or the queue has another life number."""
        while self._life == life and not self.window.empty:
            await self._change()

    def _answer(self, event: LeaseEvent, life: int, sent: float | None = None) -> None:
        if self._life == life:
            self._shell.answer(event, self.queue, life, sent)

    async def _pull(self) -> None:
        pause, last_error = 0.0, ""
        while True:
            reservation = await self._wait_for_memory()
            offset = self.window.next
            with PullAdmission(self._shell.memory_budget, self, reservation) as admission:
                try:
                    pulled = await self._ask(offset, admission, retries=bool(pause))
                except (BrokerError, ValueError) as error:  # ValueError: the settings do not name the topic
                    pause, self._asked_at = next_pause(error, pause), None
                    self.obstacle = "paused" if isinstance(error, ConsumptionDisabledError) else "failing"
                    if isinstance(error, RejectedError):
                        self._unanswered_since = None
                    self._shell.measures.pulls.labels(failure_of(error)).inc()
                    self._failed("Pulling", error, quietly=str(error) == last_error)
                    last_error = str(error)
                    self._refused_bytes = 0  # reserve no memory for a broker that does not answer
                else:
                    if pause:  # the broker may have been killed, and have lost its latest commits
                        self.window.committed, self._offsets.in_doubt = None, True
                    pause, last_error = 0.0, ""
                    self._put(offset, pulled, admission)
            if pause:
                await asyncio.sleep(pause)

    def _put(self, offset: int, pulled: PullResult, admission: PullAdmission) -> None:
        """Add a pull's messages to the window, and remember the size of the message that found no memory."""
        self.pulled_at, self._asked_at, self._unanswered_since = self._shell.now(), None, None
        self.obstacle = ""
        self._answered()
        self._shell.health.takes(self.queue)
        self._shell.measures.pulls.labels(result_of(pulled, admission)).inc()
        self._count_filtered(offset, pulled)
        self.window.put(offset, pulled)
        self._refused_offset, self._refused_bytes = pulled.next, admission.refused_bytes
        if pulled.messages:
            self._shell.offer(self)

    def _count_filtered(self, offset: int, pulled: PullResult) -> None:
        if not pulled.moved:
            matched = len(pulled.messages)
            passed_over = max(0, pulled.next - offset - matched)
            self._shell.filter_counts.count(
                self.queue.topic, passed_over=passed_over, matched=matched, now=self._shell.now()
            )

    async def _wait_for_memory(self) -> Reservation | None:
        """Wait until window and memory budget have room; return the memory reserved for a message refused before."""
        while self.window.full(self.limits) or not self._has_drained():
            self._note_full()
            await self._change()
        if not self._is_refused():
            return None
        self._note_full()
        reservation = self._shell.memory_budget.reserve(self, self._refused_bytes, self._changed.set)
        try:
            while not reservation.granted:
                await self._change()
        except asyncio.CancelledError:
            self._shell.memory_budget.cancel(reservation)
            raise
        return reservation

    def _note_full(self) -> None:
        self.obstacle, self._unanswered_since = "full", None

    def _is_refused(self) -> bool:
        """Whether the last pull had no memory for the next message."""
        return bool(self._refused_bytes) and self.window.next == self._refused_offset

    def _has_drained(self) -> bool:
        """Whether a queue without memory may pull again: it is empty, or the message fits and a quarter is free."""
        if not self._is_refused() or not self.window.buffered:
            return True
        needed_bytes = max(self._refused_bytes, self.limits.bytes // RESUME_AT_FREE_SHARE)
        return self.window.memory_bytes + needed_bytes <= self.limits.bytes

    async def _change(self) -> None:
        """Wait until the queue has changed, or memory was granted to it."""
        self._changed.clear()
        await self._changed.wait()

    async def _change_within(self, seconds: float) -> None:
        """Wait for a change, for at most that many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change()

    async def _ask(self, offset: int, admission: PullAdmission, *, retries: bool) -> PullResult:
        """Pull; after a failure without long polling, so that the broker's return is noticed at once."""
        self._asked_at = now = self._shell.now()
        if self._unanswered_since is None:
            self._unanswered_since = now
        if self.obstacle == "full":
            self.obstacle = ""
        if retries:
            return await self.source.consumer.pull(self.queue, offset, wait=0.0, admission=admission)
        return await self._offsets.pull(offset, admission)

    def _answered(self) -> None:
        self._shell.health.reached(self.queue.broker)

    def _failed(self, action: str, error: Exception, *, quietly: bool = False) -> None:
        if isinstance(error, UnreachableError):
            self._shell.health.missed(self.queue.broker, self._shell.now())
        elif isinstance(error, RejectedError):  # the broker answered, with a rejection
            self._answered()
            if not isinstance(error, ConsumptionDisabledError):  # the operator reports it, for the whole group
                self._shell.health.refuses(self.queue, str(error))
        if not quietly:
            log_failure(action, self.queue, error)
