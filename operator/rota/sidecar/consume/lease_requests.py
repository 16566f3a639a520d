"""Requests of one queue's lease to its broker, sent one after the other: lock, find the start offset, drain, unlock.

A lease is the state of one queue at the member, from its assignment to its release. Its state machine
(`queue_lifecycle`) takes a new lease number each time that the queue starts, and awaits no more answers to commands of
the previous number: none is given, and their requests that were not sent are dropped, except an unlock.

A command of the current number is answered even if it fails with an unexpected error. A stop cancels the search for the
start offset and a lock that was not requested yet; these have no answer.
"""

import asyncio
import logging
from functools import partial

from rota.sidecar.consume.offset_committer import OffsetCommitter
from rota.sidecar.consume.source import QueueSource
from rota.sidecar.consume.start_offset import FROM_OLDEST, find_start_offset
from rota.sidecar.member.queue_lifecycle import LeaseEvent

COMMIT_RETRY_SECONDS = 1.0  # seconds before the last commit of a queue is retried
ABORT_TIMEOUT_SECONDS = 3.0  # wait this long for aborted deliveries to end, then release the queue

_log = logging.getLogger(__name__)


class LeaseRequests:
    """Carries out the commands of a queue's lease that need a request or a wait, and answers them."""

    def __init__(self, source: QueueSource, committer: OffsetCommitter) -> None:
        self.lease_number = 0  # of the last command; set by `QueueReader.run_command`
        # drainTimeout is over: a commit that fails now is not retried. Set by `QueueReader.run_command` at an ABORT.
        self.is_drain_overdue = False
        self._source = source
        self._queue = source.queue
        self._session = source.session
        self._window = source.window
        self._committer = committer
        self._stopped_lease = 0  # lease number of the last STOP
        self._request_lock = asyncio.Lock()  # one request of a command at a time; pulls do not take it
        self._find_start_task: asyncio.Task[None] | None = None

    def _is_current(self, lease_number: int) -> bool:
        """Whether the answer to a command of this lease is still awaited."""
        return self.lease_number == lease_number

    def answer(self, event: LeaseEvent, lease_number: int, sent_at: float | None = None) -> None:
        """Answer a command, if its answer is still awaited."""
        if self._is_current(lease_number):
            self._source.host.answer_command(event, self._queue, lease_number, sent_at)

    async def lock(self, lease_number: int) -> None:
        """Lock the queue at its broker, or renew the lock."""
        await self._session.joined.wait()
        async with self._request_lock:
            # The lock of a stopped lease is not renewed: its open deliveries end before the lock expires.
            is_stopped = self._stopped_lease == lease_number
            if is_stopped or not self._is_current(lease_number):
                return
            sent_at = self._source.host.now()
            try:
                locked = await self._session.consumer.lock([self._queue])
            except Exception as error:  # noqa: BLE001 - the command must be answered
                self._source.record_failure("Locking", error)
                self.answer(LeaseEvent.FAILED, lease_number)
            else:
                self._source.record_answer()
                event = LeaseEvent.LOCKED if self._queue in locked else LeaseEvent.REFUSED
                self.answer(event, lease_number, sent_at)

    async def unlock(self, lease_number: int) -> None:
        """Give the queue's lock back to its broker, also that of a previous lease.

        The next lease's `lock` is sent after it, because requests wait for each other in their order.
        """
        async with self._request_lock:
            try:
                await self._session.consumer.unlock([self._queue])
            except Exception as error:  # noqa: BLE001 - the command must be answered; the lock expires at the broker
                self._source.record_failure("Unlocking", error)
            self.answer(LeaseEvent.UNLOCKED, lease_number)

    def start_search(self, lease_number: int) -> None:
        """Start to look up the start offset, from which the window then continues."""
        self._find_start_task = self._source.start_task(self._find_start(lease_number))

    def cancel_search(self) -> None:
        """Cancel the look-up of the start offset, if it goes on."""
        if self._find_start_task:
            self._find_start_task.cancel()
            self._find_start_task = None

    async def _find_start(self, lease_number: int) -> None:
        session = self._session
        await session.joined.wait()
        # Wait for deliveries of the previous lease: resetting the window now would discard their results.
        await self._wait_until_idle(lease_number)
        async with self._request_lock, self._committer.commit_lock:
            if not self._is_current(lease_number):
                return
            start_from = FROM_OLDEST if self._source.is_retry_topic else session.settings.start_from
            try:
                since = await session.consuming_since(self._queue.topic)
                start = await find_start_offset(self._queue, session.consumer, session.offset_store, start_from, since)
            except Exception as error:  # noqa: BLE001 - the command must be answered
                self._source.record_failure("Looking up the start offset", error)
                self.answer(LeaseEvent.FAILED, lease_number)
                return
            self._source.record_answer()
            # Never go back behind messages that are finished here: a killed broker may have lost its latest commits.
            self._window.reset(max(start, self._window.committable_offset), committed=start)
        self._source.on_change()
        self.answer(LeaseEvent.START_FOUND, lease_number)

    def start_drain(self, lease_number: int) -> None:
        """Start to drain: wait for open deliveries, commit, and answer Drained."""
        self._stopped_lease = lease_number
        self.is_drain_overdue = False
        self._source.start_task(self._drain(lease_number))

    async def _drain(self, lease_number: int) -> None:
        """Drain the queue; no answer is given if the queue was assigned again meanwhile."""
        async with self._request_lock:  # held throughout: requests of the next lease wait until this drain has ended
            await self._wait_until_drained(lease_number)
            while self._is_current(lease_number) and not await self._committer.commit():
                if self.is_drain_overdue:
                    self._committer.count_uncommitted()
                    break
                await self._source.changed.wait_briefly(COMMIT_RETRY_SECONDS)
        self.answer(LeaseEvent.DRAINED, lease_number)

    async def _wait_until_drained(self, lease_number: int) -> None:
        """Wait until no delivery is open; once drainTimeout is over, for at most ABORT_TIMEOUT_SECONDS more."""
        deadline: float | None = None
        is_over = partial(self._is_idle_or_superseded, lease_number)
        await self._source.changed.wait_until(lambda: self.is_drain_overdue or is_over())
        while not is_over():
            now = self._source.host.now()
            if deadline is None:
                deadline = now + ABORT_TIMEOUT_SECONDS
            if now >= deadline:
                text = "Deliveries of %s did not end after they were aborted; the queue is released anyway"
                _log.error(text, self._queue)
                return
            await self._source.changed.wait_briefly(deadline - now)

    async def _wait_until_idle(self, lease_number: int) -> None:
        """Wait until no delivery is open, or the queue has another lease number."""
        await self._source.changed.wait_until(partial(self._is_idle_or_superseded, lease_number))

    def _is_idle_or_superseded(self, lease_number: int) -> bool:
        """Whether no delivery is open, or the queue has another lease number."""
        return self._window.is_idle or not self._is_current(lease_number)
