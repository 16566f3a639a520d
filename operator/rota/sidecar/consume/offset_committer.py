"""Committer of one queue's offsets: by separate requests or carried by a pull; one commit at a time."""

import asyncio
import logging
from collections.abc import Callable

from rota.aio import shield_until_done
from rota.brokers.errors import UnreachableError
from rota.brokers.port import PullResult
from rota.sidecar.consume.source import QueueSource
from rota.sidecar.consume.start_offset import commit_offset
from rota.sidecar.member.memory_budget import PullAdmission
from rota.sidecar.member.window import Commit

PULL_COMMIT_TIMEOUT_SECONDS = 20.0  # limit for a pull that carries a commit: the pull may have to wait for memory
LONG_POLL_SECONDS = 15.0  # long polling: how long a broker holds a pull while it has no message

_log = logging.getLogger(__name__)


class OffsetCommitter:
    """Commits the finished offset of a window; a caller that holds `commit_lock` keeps commits away."""

    def __init__(self, source: QueueSource, on_skipped: Callable[[], None]) -> None:
        """`on_skipped` is called when the window moves on to a higher offset that another consumer has committed."""
        self.commit_lock = asyncio.Lock()
        # Compare the next commit with the stored offset: the queue is being released, or its broker was unavailable, so
        # another consumer may have had the queue meanwhile.
        self.needs_check = False
        self._source = source
        self._queue = source.queue
        self._session = source.session
        self._window = source.window
        self._host = source.host
        self._on_skipped = on_skipped

    async def commit(self) -> bool:
        """Commit the finished offset, if that is allowed; return whether the broker has it."""
        async with self.commit_lock:
            try:
                return await self._commit_finished()
            except Exception as error:  # noqa: BLE001 - one queue's failure is counted, logged and retried
                self._source.log_failure("Committing", error)
                self._host.metrics.commits.labels("failed").inc()
                return False

    async def _commit_finished(self) -> bool:
        commit = self._window.next_commit()
        if commit is None:
            return True
        if not self._host.may_commit(self._queue):
            return False
        if self.needs_check and await self._skip_if_passed(commit):
            return True
        await self._send(commit.offset)
        self._host.metrics.commits.labels("done").inc()
        self._window.mark_committed(commit)
        self.needs_check = False
        return True

    async def _send(self, offset: int) -> None:
        """Commit; record whether the broker answers. While the queue is read, its pulls record failures soon enough."""
        try:
            await commit_offset(self._session.offset_store, self._queue, offset)
        except UnreachableError:
            if self._window.stopped:  # a drain sends nothing but commits
                self._source.record_no_answer()
            raise
        if self._session.commits_to_broker:
            self._source.record_answer()

    async def _skip_if_passed(self, commit: Commit) -> bool:
        """Move the window to a higher offset that another consumer has committed; return whether there is one.

        The commit would rewind the group, and messages that the other consumer finished would be delivered again.
        """
        stored_offset = await self._session.offset_store.committed_offset(self._queue)
        was_passed = stored_offset is not None and self._window.skip_if_passed(commit, stored_offset)
        if was_passed:
            self._on_skipped()
        return was_passed

    async def pull_and_commit(self, offset: int, admission: PullAdmission) -> PullResult:
        """Pull, and commit the finished offset with the same request, so that a crash repeats few finished messages.

        The broker may store the carried offset after a commit that was sent later. Therefore later commits wait for
        this pull's answer. The pull is sent without long polling and is not cancelled, so that the answer comes soon.
        If the group was reset meanwhile, the broker discards the offset; the next pull's response reports the reset.
        """
        consumer = self._session.consumer
        is_commit_open = self.commit_lock.locked()  # then pull without a commit, at once
        if self._session.commits_to_broker and not is_commit_open:
            async with self.commit_lock:
                # Choose the offset with the lock held: a commit that waits for the lock already stores a higher one.
                commit = self._window.next_commit() if self._may_commit_now() else None
                if commit:
                    return await shield_until_done(self._pull_with_commit(commit, offset, admission))
        return await consumer.pull(self._queue, offset, wait_seconds=LONG_POLL_SECONDS, admission=admission)

    async def _pull_with_commit(self, commit: Commit, offset: int, admission: PullAdmission) -> PullResult:
        consumer = self._session.consumer
        try:
            async with asyncio.timeout(PULL_COMMIT_TIMEOUT_SECONDS):
                pulled = await consumer.pull(
                    self._queue, offset, wait_seconds=0.0, commit_offset=commit.offset, admission=admission
                )
        except TimeoutError:
            raise UnreachableError(
                f"{self._queue.broker} did not respond within {PULL_COMMIT_TIMEOUT_SECONDS:g} s"
            ) from None
        self._host.metrics.commits.labels("done").inc()
        self._window.mark_committed(commit)
        return pulled

    def _may_commit_now(self) -> bool:
        """Whether a pull may carry a commit: one that must be checked first needs a request of its own."""
        return not self.needs_check and self._host.may_commit(self._queue)

    def count_uncommitted(self) -> None:
        """Count and log finished messages that are delivered again because their offset could not be committed."""
        number = self._window.uncommitted_count
        self._host.metrics.uncommitted.inc(number)
        _log.warning(
            "%s is released, but offset %d could not be committed: up to %d finished messages are delivered again",
            self._queue,
            self._window.committable_offset,
            number,
        )
