"""The reader of one queue: finds the start offset, locks, pulls and commits, as the member commands.

A command starts or stops fetching at once; its requests to the broker are sent one after the other (`lease_requests`).
If pulling fails with an unexpected error, the member gets the event ReaderFailed, and restarts the reader. If a commit
fails, the next commit stores its offset, too.
"""

from functools import partial
from typing import Protocol

from rota.model import Queue
from rota.sidecar.consume.lease_requests import LeaseRequests
from rota.sidecar.consume.offset_committer import OffsetCommitter
from rota.sidecar.consume.queue_puller import QueuePuller
from rota.sidecar.consume.source import ConsumerSession, QueueSource, ReaderHost
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction
from rota.sidecar.member.window import QueueLimits


class QueueReaderHost(ReaderHost, Protocol):
    """The member, as a queue's reader needs it."""

    def offer(self, reader: "QueueReader") -> None:
        """Deliver messages from this queue."""

    def abort_deliveries(self, reader: "QueueReader") -> None:
        """Abort the queue's open deliveries now."""


class QueueReader:
    """Reads a queue until the member has released it; public attributes are read-only for callers."""

    def __init__(self, queue: Queue, session: ConsumerSession, host: QueueReaderHost) -> None:
        self._source = source = QueueSource(queue, session, host)
        self.queue = queue
        self.session = session
        self.window = source.window
        self.is_retry_topic = source.is_retry_topic
        self.limits = QueueLimits()
        self.delivered_at = 0.0  # when a delivery last ended, by the clock `ReaderHost.now`; 0: none has yet
        self._host = host
        self._committer = OffsetCommitter(source, on_skipped=self._restart_pull)
        self._requests = LeaseRequests(source, self._committer)
        offer = partial(host.offer, self)
        self._puller = QueuePuller(source, self._committer, self._requests, memory=self, offer=offer)
        self.pull_status = self._puller.status

    @property
    def reported_offset(self) -> int | None:
        """The committed offset as reports show it: with the one that an unanswered or cancelled pull carries."""
        return self._committer.reported_offset

    def run_command(self, command: Command) -> None:
        """Start a command; its answer comes by `ReaderHost.answer_command`."""
        lease_number = command.lease_number
        self._requests.lease_number = lease_number
        match command.action:
            case LeaseAction.LOCK:
                self._source.start_task(self._requests.lock(lease_number))
            case LeaseAction.FIND_START:
                self._requests.start_search(lease_number)
            case LeaseAction.FETCH:
                self.window.resume()
                self._stop_fetching()
                self._puller.start()
                self._host.offer(self)
            case LeaseAction.STOP:
                self._committer.needs_check = True  # the last commit is compared with the broker's offset first
                self.window.stop()
                self._stop_fetching()
                self._requests.start_drain(lease_number)
            case LeaseAction.ABORT:
                self._requests.is_drain_overdue = True
                self._host.abort_deliveries(self)
            case LeaseAction.UNLOCK:
                self._source.start_task(self._requests.unlock(lease_number))
        self.on_change()

    def on_change(self) -> None:
        """Continue after a delivery ended or a command came; other queues may take memory that became free."""
        self._source.on_change()

    def wake(self) -> None:
        """Have waiting tasks of the reader check their conditions again."""
        self._source.changed.notify()

    def reset_offset(self, offset: int) -> None:
        """Continue at an offset that a user set for the group."""
        self.window.rewind(offset)
        self._committer.needs_check = False  # the user's offset may be lower than the broker's
        self._restart_pull()

    def _restart_pull(self) -> None:
        self._puller.restart()

    def restart_idle_pull(self, awake_since: float) -> None:
        """Send the open pull again if it hangs; time before `awake_since`, when the process was stalled, is ignored."""
        self._puller.restart_idle_pull(awake_since)

    def _stop_fetching(self) -> None:
        """Cancel the open pull, or the look-up of the start offset."""
        self._puller.stop()
        self._requests.cancel_search()
        self._host.problems.clear_rejection(self.queue)

    async def close(self) -> None:
        """Cancel all tasks, and wait for their end."""
        self._stop_fetching()
        await self._source.cancel_tasks()

    async def commit(self) -> None:
        """Commit the finished offset, if that is allowed."""
        await self._committer.commit()

    def start_commit(self) -> None:
        """Start a commit, unless one is in progress; commits of other queues do not wait for it."""
        self._committer.start_commit()
