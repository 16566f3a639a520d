"""The reader of one queue: finds the start offset, locks, pulls and commits, as the member commands.

A command starts or stops fetching at once; its requests to the broker are sent one after the other. The state machine
(`queue_lifecycle`) takes a new lease number each time that the queue starts. Then answers to commands of the previous
lease are not awaited any more: none is given, and requests that have not been sent are dropped.

A command of the current lease is always answered, even if it fails with an unexpected error. A failed reader is an
event of the state machine (`ReaderFailed`), which restarts it; a failed commit is retried by the next one.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Protocol

from rota.brokers.errors import BrokerError, ConsumptionDisabledError, RejectedError, UnreachableError
from rota.brokers.port import PullResult
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.reports import QueueState
from rota.sidecar.consume.offset_committer import OffsetCommitter, log_failure
from rota.sidecar.consume.pull_outcomes import failure_label, next_backoff, result_label
from rota.sidecar.consume.pull_times import PullTimes
from rota.sidecar.consume.source import ConsumerSession, ReaderHost
from rota.sidecar.consume.start_offset import FROM_OLDEST, find_start_offset
from rota.sidecar.member.memory_budget import MemoryReservation, PullAdmission, RefusedMessage
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent
from rota.sidecar.member.window import QueueLimits, QueueWindow

COMMIT_RETRY_SECONDS = 1.0  # seconds before the last commit of a queue is retried
ABORT_TIMEOUT_SECONDS = 3.0  # wait this long for aborted deliveries to end, then release the queue
RESUME_FREE_DIVISOR = 4  # after a refused message, a queue pulls again once a quarter of its own bytes is free

_log = logging.getLogger(__name__)


class QueueReaderHost(ReaderHost, Protocol):
    """The member, as a queue's reader needs it."""

    def offer(self, reader: "QueueReader") -> None:
        """Deliver messages from this queue."""

    def abort_deliveries(self, reader: "QueueReader") -> None:
        """Abort the queue's open deliveries now."""


class QueueReader:
    """Reads a queue until the member has released it; public attributes are read-only for callers."""

    def __init__(self, queue: Queue, session: ConsumerSession, host: QueueReaderHost) -> None:
        self.queue = queue
        self.session = session
        self.limits = QueueLimits()
        self.window = QueueWindow(next_offset=0, orderly=session.settings.is_orderly, committed_offset=0)
        # The messages of the group's retry topic were tried before.
        self.is_retry_topic = queue.topic == RETRY_TOPIC_PREFIX + session.settings.group
        self.pulled_at = 0.0  # the last answer to a pull, in seconds of the host's clock; 0: none yet
        self.delivered_at = 0.0  # the last end of a delivery
        self.obstacle: QueueState = ""  # why it does not pull, while its state is Running
        self.pull_times = PullTimes()
        self._host = host
        self._lease_number = 0  # of the last command
        self._stopped_lease = 0  # number of the lease that was last stopped
        self._is_drain_overdue = False  # drainTimeout is over: a commit that fails now is not retried
        self._change_event = asyncio.Event()
        self._refused_message: RefusedMessage | None = None  # by the last pull
        self._request_lock = asyncio.Lock()  # one request of a command at a time; pulls do not take it
        self._committer = OffsetCommitter(queue, session, self.window, host, self._restart_pull)
        self._pull_task: asyncio.Task[None] | None = None
        self._find_start_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run_command(self, command: Command) -> None:
        """Start a command; its answer comes by `ReaderHost.answer_command`."""
        lease_number = command.lease_number
        self._lease_number = lease_number
        match command.action:
            case LeaseAction.LOCK:
                self._start_task(self._lock_queue(lease_number))
            case LeaseAction.FIND_START:
                self._find_start_task = self._start_task(self._find_start(lease_number))
            case LeaseAction.FETCH:
                self.window.resume()
                self._cancel_requests()
                self._pull_task = self._start_pulling()
                self._host.offer(self)
            case LeaseAction.STOP:
                self._stopped_lease = lease_number
                self._is_drain_overdue = False
                self._committer.needs_check = True  # the last commit is compared with the broker's offset first
                self.window.stop()
                self._cancel_requests()
                self._start_task(self._drain(lease_number))
            case LeaseAction.ABORT:
                self._is_drain_overdue = True
                self._host.abort_deliveries(self)
            case LeaseAction.UNLOCK:
                self._start_task(self._unlock_queue(lease_number))
        self.on_change()

    def on_change(self) -> None:
        """Continue after a delivery ended or a command came; other queues may take memory that became free."""
        self.wake()
        self._host.memory_budget.grant_waiting()

    def wake(self) -> None:
        """Have the reader look again at what it waits for."""
        self._change_event.set()

    def reset_offset(self, offset: int) -> None:
        """Continue at an offset that a user set for the group."""
        self.window.rewind(offset)
        self._committer.needs_check = False  # the user's offset may be lower than the broker's
        self._restart_pull()

    def _restart_pull(self) -> None:
        if self._pull_task:  # the open pull may wait for long at the old offset
            self._pull_task.cancel()
            self.pull_times.on_unanswered()
            self._pull_task = self._start_pulling()
        self.on_change()

    def _start_pulling(self) -> asyncio.Task[None]:
        task = self._start_task(self._pull_forever())
        task.add_done_callback(partial(self._on_pull_ended, self._lease_number))
        return task

    def _on_pull_ended(self, lease_number: int, task: asyncio.Task[None]) -> None:
        """Report a failed reader; the queue's state machine decides when it is restarted."""
        if self._pull_task is task:  # otherwise it was cancelled
            self._pull_task = None
            self.pull_times.reset()
            self.obstacle = "failing"
            self._answer_command(LeaseEvent.READER_FAILED, lease_number)

    def restart_idle_pull(self, awake_since: float) -> None:
        """Send the open pull again if it had no result for IDLE_SECONDS while the event loop was running."""
        seconds = self.pull_times.hanging_seconds(self._host.now(), awake_since)
        if self._pull_task and seconds is not None:
            text = "A pull of %s has neither returned nor failed for %.0f s; it is sent again"
            _log.warning(text, self.queue, seconds)
            self._host.metrics.pulls.labels("idle").inc()
            self._restart_pull()

    async def close(self) -> None:
        """Cancel all tasks, and wait for their end."""
        self._host.problems.clear_rejection(self.queue)
        self._pull_task = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def commit(self) -> None:
        """Commit the finished offset, if that is allowed."""
        await self._committer.commit()

    def start_commit(self) -> None:
        """Start a commit, unless one is in progress; commits of other queues do not wait for it."""
        if not self._committer.commit_lock.locked():
            self._start_task(self.commit())

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("A task of queue %s failed", self.queue, exc_info=error)

    def _cancel_requests(self) -> None:
        """Cancel the open pull, or the look-up of the start offset."""
        for task in (self._pull_task, self._find_start_task):
            if task:
                task.cancel()
        self._pull_task = None
        self._find_start_task = None
        self.pull_times.reset()
        self.obstacle = ""
        self._host.problems.clear_rejection(self.queue)

    def _is_current(self, lease_number: int) -> bool:
        """Whether the answer to a command of this lease is still awaited."""
        return self._lease_number == lease_number

    async def _lock_queue(self, lease_number: int) -> None:
        await self.session.joined.wait()
        async with self._request_lock:
            is_stopped = self._stopped_lease == lease_number  # a queue that drains needs no renewal
            if is_stopped or not self._is_current(lease_number):
                return
            sent_at = self._host.now()
            try:
                locked = await self.session.consumer.lock([self.queue])
            except Exception as error:  # noqa: BLE001 - the command must be answered
                self._on_request_failed("Locking", error)
                self._answer_command(LeaseEvent.FAILED, lease_number)
            else:
                self._on_broker_answered()
                event = LeaseEvent.LOCKED if self.queue in locked else LeaseEvent.REFUSED
                self._answer_command(event, lease_number, sent_at)

    async def _unlock_queue(self, lease_number: int) -> None:
        async with self._request_lock:
            try:
                await self.session.consumer.unlock([self.queue])
            except Exception as error:  # noqa: BLE001 - the command must be answered; the lock expires at the broker
                self._on_request_failed("Unlocking", error)
            self._answer_command(LeaseEvent.UNLOCKED, lease_number)

    async def _find_start(self, lease_number: int) -> None:
        await self.session.joined.wait()
        # Wait for deliveries of the previous lock: resetting the window now would discard their results.
        await self._wait_until_idle(lease_number)
        async with self._request_lock, self._committer.commit_lock:
            if not self._is_current(lease_number):
                return
            session = self.session
            start_from = FROM_OLDEST if self.is_retry_topic else session.settings.start_from
            try:
                since = await session.consuming_since(self.queue.topic)
                start = await find_start_offset(self.queue, session.consumer, session.offset_store, start_from, since)
            except Exception as error:  # noqa: BLE001 - the command must be answered
                self._on_request_failed("Looking up the start offset", error)
                self._answer_command(LeaseEvent.FAILED, lease_number)
                return
            self._on_broker_answered()
            # Never go back behind messages that are finished here: a killed broker may have lost its latest commits.
            self.window.reset(max(start, self.window.committable_offset), committed=start)
        self.on_change()
        self._answer_command(LeaseEvent.START_FOUND, lease_number)

    async def _drain(self, lease_number: int) -> None:
        """Wait for open deliveries, commit, and answer Drained; no answer if the queue was assigned again meanwhile."""
        async with self._request_lock:  # held throughout: requests of the next lease wait until this drain has ended
            await self._wait_until_drained(lease_number)
            while self._is_current(lease_number) and not await self._committer.commit():
                if self._is_drain_overdue:
                    self._committer.report_uncommitted()
                    break
                await self._wait_briefly(COMMIT_RETRY_SECONDS)
        self._answer_command(LeaseEvent.DRAINED, lease_number)

    async def _wait_until_drained(self, lease_number: int) -> None:
        """Wait until no delivery is open; for aborted deliveries ABORT_TIMEOUT_SECONDS at most."""
        deadline: float | None = None
        while self._is_current(lease_number) and not self.window.is_idle:
            if self._is_drain_overdue:
                now = self._host.now()
                if deadline is None:
                    deadline = now + ABORT_TIMEOUT_SECONDS
                if now >= deadline:
                    text = "Deliveries of %s did not end after they were aborted; the queue is released anyway"
                    _log.error(text, self.queue)
                    return
                await self._wait_briefly(deadline - now)
            else:
                await self._wait_for_change()

    async def _wait_until_idle(self, lease_number: int) -> None:
        """Wait until no delivery is open, or the queue has another lease number."""
        while self._is_current(lease_number) and not self.window.is_idle:
            await self._wait_for_change()

    def _answer_command(self, event: LeaseEvent, lease_number: int, sent_at: float | None = None) -> None:
        if self._is_current(lease_number):
            self._host.answer_command(event, self.queue, lease_number, sent_at)

    async def _pull_forever(self) -> None:
        backoff_seconds = 0.0  # positive after a failed pull
        last_error = ""
        while True:
            reservation = await self._wait_for_memory()
            offset = self.window.next_offset
            has_failed = backoff_seconds > 0
            with PullAdmission(self._host.memory_budget, self, reservation) as admission:
                try:
                    pulled = await self._send_pull(offset, admission, after_failure=has_failed)
                except (BrokerError, ValueError) as error:  # ValueError: the settings do not name the topic
                    backoff_seconds = next_backoff(error, backoff_seconds)
                    self._on_pull_failed(error, is_repeated=str(error) == last_error)
                    last_error = str(error)
                else:
                    if has_failed:  # the broker may have been killed, and have lost its latest commits
                        self.window.committed_offset = None
                        self._committer.needs_check = True
                    backoff_seconds = 0.0
                    last_error = ""
                    self._add_pull(offset, pulled, admission)
            if backoff_seconds:
                await asyncio.sleep(backoff_seconds)

    def _on_pull_failed(self, error: Exception, *, is_repeated: bool) -> None:
        if isinstance(error, RejectedError):
            self.pull_times.reset()  # a rejection is an answer
        else:
            self.pull_times.on_unanswered()
        self.obstacle = "paused" if isinstance(error, ConsumptionDisabledError) else "failing"
        self._host.metrics.pulls.labels(failure_label(error)).inc()
        self._on_request_failed("Pulling", error, is_repeated=is_repeated)
        self._refused_message = None  # reserve no memory for a broker that does not answer

    def _add_pull(self, offset: int, pulled: PullResult, admission: PullAdmission) -> None:
        """Add a pull's messages to the window, and remember the size of the message that found no memory."""
        self.pulled_at = self._host.now()
        self.pull_times.reset()
        self.obstacle = ""
        self._on_broker_answered()
        self._host.problems.clear_rejection(self.queue)
        self._host.metrics.pulls.labels(result_label(pulled, admission)).inc()
        self._count_filtered(offset, pulled)
        self.window.add_pull(offset, pulled)
        self._refused_message = None
        if admission.refused_bytes:
            self._refused_message = RefusedMessage(pulled.next_offset, admission.refused_bytes)
        if pulled.messages:
            self._host.offer(self)

    def _count_filtered(self, offset: int, pulled: PullResult) -> None:
        if not pulled.correction:
            matched = len(pulled.messages)
            filtered = max(0, pulled.next_offset - offset - matched)
            now = self._host.now()
            self._host.filter_counts.count_pull(self.queue.topic, filtered=filtered, matched=matched, now=now)

    async def _wait_for_memory(self) -> MemoryReservation | None:
        """Wait until window and memory budget have room; return the memory reserved for a message refused before."""
        while self.window.why_full(self.limits) or not self._has_room_after_refusal():
            self._mark_full()
            await self._wait_for_change()
        refused = self._next_if_refused()
        if refused is None:
            return None
        self._mark_full()
        reservation = self._host.memory_budget.reserve(self, refused.memory_bytes, on_granted=self.wake)
        try:
            while not reservation.granted:
                await self._wait_for_change()
        except asyncio.CancelledError:
            self._host.memory_budget.cancel(reservation)
            raise
        return reservation

    def _mark_full(self) -> None:
        self.obstacle = "full"
        self.pull_times.reset()

    def _next_if_refused(self) -> RefusedMessage | None:
        """Return the next message to fetch, if the last pull had no memory for it."""
        refused = self._refused_message
        return refused if refused and refused.offset == self.window.next_offset else None

    def _has_room_after_refusal(self) -> bool:
        """Whether no message was refused, the queue is empty, or the message and a quarter of its bytes have room."""
        refused = self._next_if_refused()
        if refused is None or not self.window.unfinished_count:
            return True
        needed_bytes = max(refused.memory_bytes, self.limits.max_bytes // RESUME_FREE_DIVISOR)
        return self.window.memory_bytes + needed_bytes <= self.limits.max_bytes

    async def _wait_for_change(self) -> None:
        """Wait for the next `wake`: by a command, the end of a delivery, new limits, or granted memory."""
        self._change_event.clear()
        await self._change_event.wait()

    async def _wait_briefly(self, seconds: float) -> None:
        """Wait for a change, for at most that many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait_for_change()

    async def _send_pull(self, offset: int, admission: PullAdmission, *, after_failure: bool) -> PullResult:
        """Pull; after a failure without long polling, so that the broker's return is noticed at once.

        A pull after a failure carries no commit, either: the broker may have lost commits, so the next one is checked.
        """
        self.pull_times.on_sent(self._host.now())
        if self.obstacle == "full":  # other obstacles last until a pull is answered
            self.obstacle = ""
        if after_failure:
            return await self.session.consumer.pull(self.queue, offset, wait_seconds=0.0, admission=admission)
        return await self._committer.pull_and_commit(offset, admission)

    def _on_broker_answered(self) -> None:
        self._host.problems.record_answer(self.queue.broker)

    def _on_request_failed(self, action: str, error: Exception, *, is_repeated: bool = False) -> None:
        if isinstance(error, UnreachableError):
            self._host.problems.record_no_answer(self.queue.broker, self._host.now())
        elif isinstance(error, RejectedError):  # the broker answered, with a rejection
            self._on_broker_answered()
            if not isinstance(error, ConsumptionDisabledError):  # that the operator reports, for the whole group
                self._host.problems.record_rejection(self.queue, str(error))
        if not is_repeated:
            log_failure(action, self.queue, error)
