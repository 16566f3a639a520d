"""Committer of one queue's offsets: by separate requests or carried by a pull; one commit at a time."""

import asyncio
import logging
from collections.abc import Callable

from rota.brokers.errors import NotFoundError, RejectedError, UnreachableError
from rota.brokers.port import PullResult
from rota.sidecar.consume.source import QueueSource
from rota.sidecar.consume.start_offset import commit_and_verify, commit_offset
from rota.sidecar.member.memory_budget import PullAdmission
from rota.sidecar.member.window import Commit

LONG_POLL_SECONDS = 15.0  # long polling: how long a broker holds a pull while it has no message
# Pauses between queries for the offset that a pull carries; brokers usually store it before the first one. They are
# 5.5 s in all: a busy broker rejects a pull that has waited for 5 s (its `waitTimeMillsInPullQueue`).
QUERY_PAUSES_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 1.6, 2.5)

_log = logging.getLogger(__name__)


class OffsetCommitter:
    """Commits the finished offset of a window; a caller that holds `commit_lock` keeps commits away."""

    def __init__(self, source: QueueSource, on_skipped: Callable[[], None]) -> None:
        """`on_skipped` is called when the window moves on to a higher offset that another consumer has committed."""
        self.commit_lock = asyncio.Lock()
        # Compare the next commit with the stored offset: the queue is being released, or its broker was unavailable, so
        # another consumer may have had the queue meanwhile.
        self.needs_check = False
        # Carried by a pull that is unanswered, or was cancelled: the broker may store this offset later.
        self._carried_commit: Commit | None = None
        self._source = source
        self._queue = source.queue
        self._session = source.session
        self._window = source.window
        self._host = source.host
        self._on_skipped = on_skipped

    @property
    def reported_offset(self) -> int | None:
        """The committed offset as reports show it: with the one that an unanswered or cancelled pull carries.

        The broker stores that offset when the pull arrives, but holds the pull until a message comes. So a crash of the
        member repeats only messages from that offset on. If the broker does not store it (the pull was lost, or the
        broker was killed), reports show too high an offset until the next commit reads the stored one. After a failed
        pull they show None once the broker answers again.
        """
        return self._window.committed_with(self._carried_commit)

    def start_commit(self) -> None:
        """Start a commit, unless one is in progress; commits of other queues do not wait for it."""
        if not self.commit_lock.locked():
            self._source.start_task(self.commit())

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
        if self._window.next_commit() is None:
            return True
        if not self._host.may_commit(self._queue):
            return False
        is_forgotten = False
        if self.needs_check or self._carried_commit:
            stored_offset = await self._read_stored_offset()
            is_forgotten = stored_offset is None
            if stored_offset is not None and self._skip_if_passed(stored_offset):
                return True
        if commit := self._window.next_commit():  # None if a pull has committed it
            if not self._host.may_commit(self._queue):  # the process may have been stalled since the query
                return False
            await self._send(commit.offset, is_forgotten=is_forgotten)
            self._record_committed(commit)
        self.needs_check = self._window.stopped  # a queue may have been stopped meanwhile
        return True

    async def _read_stored_offset(self) -> int | None:
        """Return the committed offset; wait until the broker has stored the one that an unanswered pull carries.

        Otherwise the broker may store that one after the next commit, and rewind the group. After QUERY_PAUSES_SECONDS
        it is given up: the broker did not get the pull, or was restarted, or a user has reset the group's offset.
        """
        for pause_seconds in QUERY_PAUSES_SECONDS:
            stored_offset = await self._query_stored_offset()
            if self._carried_commit is None:
                return stored_offset
            await asyncio.sleep(pause_seconds)
        _log.info("%s: the broker did not store the offset of a pull; it is given up", self._queue)
        self._carried_commit = None
        return await self._query_stored_offset()

    async def _query_stored_offset(self) -> int | None:
        stored_offset = await self._session.offset_store.committed_offset(self._queue)
        carried = self._carried_commit
        if carried and stored_offset is not None and stored_offset >= carried.offset:
            self._mark_stored(carried)
        return stored_offset

    async def _send(self, offset: int, *, is_forgotten: bool) -> None:
        """Commit; record whether the broker answers. While the queue is read, its pulls record failures soon enough."""
        commit_request = commit_and_verify if is_forgotten else commit_offset
        try:
            await commit_request(self._session.offset_store, self._queue, offset)
        except UnreachableError:
            if self._window.stopped:  # a drain sends nothing but commits
                self._source.record_no_answer()
            raise
        if self._session.commits_to_broker:
            self._source.record_answer()

    def _skip_if_passed(self, stored_offset: int) -> bool:
        """Move the window to a higher offset that another consumer has committed; return whether there is one.

        The commit would rewind the group, and messages that the other consumer finished would be delivered again.
        """
        commit = self._window.next_commit()
        was_passed = self.needs_check and commit is not None and self._window.skip_if_passed(commit, stored_offset)
        if was_passed:
            self._on_skipped()
        return was_passed

    async def pull_and_commit(self, offset: int, admission: PullAdmission) -> PullResult:
        """Pull, and commit the finished offset with the same request, so that a crash repeats few finished messages.

        The broker stores the offset before it holds the pull, but may store it after a commit that was sent later.
        Therefore a commit waits until the offset is stored, while the pull is unanswered or if it was cancelled.
        """
        commit = self._choose_carried_commit()
        if commit:
            self._carried_commit = commit
        try:
            pulled = await self._session.consumer.pull(
                self._queue,
                offset,
                wait_seconds=LONG_POLL_SECONDS,
                commit_offset=commit.offset if commit else None,
                admission=admission,
            )
        except (NotFoundError, RejectedError, ValueError):  # answered or not sent: the broker stores nothing later
            if commit:
                self._carried_commit = None
            raise
        if commit:
            self._mark_stored(commit)
        return pulled

    def _choose_carried_commit(self) -> Commit | None:
        """Return the commit that a pull may carry: none while another may still be stored, or must be checked first.

        It is above the stored offset, so that a query shows whether the broker has stored it.
        """
        is_undecided = self.needs_check or self._carried_commit is not None or self.commit_lock.locked()
        if is_undecided or not self._session.commits_to_broker:
            return None
        commit = self._window.next_commit()
        known_offset = self._window.committed_offset
        if commit is None or known_offset is None or commit.offset <= known_offset:
            return None
        return commit if self._host.may_commit(self._queue) else None

    def _mark_stored(self, commit: Commit) -> None:
        """Record that the broker has stored the offset that a pull carries."""
        if self._carried_commit is commit:
            self._carried_commit = None
            self._record_committed(commit)

    def _record_committed(self, commit: Commit) -> None:
        """Count a commit that the broker has stored, and mark it in the window."""
        self._host.metrics.commits.labels("done").inc()
        self._window.mark_committed(commit)

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
