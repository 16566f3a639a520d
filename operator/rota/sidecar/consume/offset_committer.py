"""Committer of one queue's offsets: by separate requests or carried by a pull; one commit at a time."""

import asyncio
import logging
from collections.abc import Callable

from rota.aio import shield_until_done
from rota.brokers.errors import BrokerError, UnreachableError
from rota.brokers.port import PullResult
from rota.model import Queue
from rota.sidecar.consume.source import ReaderHost, Source
from rota.sidecar.consume.start_offset import commit_offset
from rota.sidecar.member.memory_budget import PullAdmission
from rota.sidecar.member.window import Commit, Window

PULL_AND_COMMIT_SECONDS = 20.0  # limit for a pull that carries a commit: the pull may have to wait for memory
PULL_SECONDS = 15.0  # long polling: how long a broker holds a pull while it has no message

_log = logging.getLogger(__name__)


class OffsetCommitter:
    """Commits the finished offset of a window; a caller that holds `in_progress` keeps commits away."""

    def __init__(
        self, queue: Queue, source: Source, window: Window, shell: ReaderHost, jumped: Callable[[], None]
    ) -> None:
        """`jumped` is called when the window moves on to a higher offset that another consumer has committed."""
        self.in_progress = asyncio.Lock()
        # Whether another consumer may have had the queue: a release has started, or the broker was unavailable.
        self.in_doubt = False
        self._queue, self._source, self._window, self._shell, self._jumped = queue, source, window, shell, jumped

    async def commit(self) -> bool:
        """Commit the finished offset, if that is allowed; return whether the broker has it."""
        async with self.in_progress:
            try:
                return await self._commit_finished()
            except Exception as error:  # noqa: BLE001 - one queue's failure is counted, logged and retried
                log_failure("Committing", self._queue, error)
                self._shell.measures.commits.labels("failed").inc()
                return False

    async def _commit_finished(self) -> bool:
        commit = self._window.to_commit()
        if commit is None:
            return True
        if not self._shell.may_commit(self._queue):
            return False
        if self.in_doubt and await self._is_passed(commit):
            return True
        await self._send(commit.offset)
        self._shell.measures.commits.labels("done").inc()
        self._window.answered(commit)
        self.in_doubt = False
        return True

    async def _send(self, offset: int) -> None:
        """Commit; while the window is stopped, a failure also counts as a broker that cannot be reached."""
        try:
            await commit_offset(self._source.store, self._queue, offset)
        except UnreachableError:
            if self._window.stopped:
                self._shell.health.missed(self._queue.broker, self._shell.now())
            raise
        if self._source.store is self._source.consumer:
            self._shell.health.reached(self._queue.broker)

    async def _is_passed(self, commit: Commit) -> bool:
        """Return whether others committed a higher offset, and move the window there: a commit would repeat theirs."""
        stored_offset = await self._source.store.committed(self._queue)
        passed = stored_offset is not None and self._window.passed(commit, stored_offset)
        if passed:
            self._jumped()
        return passed

    async def pull(self, offset: int, admission: PullAdmission) -> PullResult:
        """Pull, and commit the finished offset with the same request: a crash repeats little more than was in flight.

        The broker may store the carried offset after a commit that was sent later. Therefore later commits wait for
        this pull's answer. The pull is sent without long polling and is not cancelled, so that the answer comes soon.
        If the group was reset meanwhile, the broker discards the offset; the next pull's response reports the reset.
        """
        consumer = self._source.consumer
        if self._source.store is consumer and not self.in_progress.locked():
            async with self.in_progress:
                # Choose the offset with the lock held: while this pull waits, another commit may store a higher one.
                commit = self._window.to_commit() if self._may_carry() else None
                if commit:
                    return await shield_until_done(self._pull_with(commit, offset, admission))
        return await consumer.pull(self._queue, offset, wait=PULL_SECONDS, admission=admission)

    async def _pull_with(self, commit: Commit, offset: int, admission: PullAdmission) -> PullResult:
        consumer = self._source.consumer
        try:
            async with asyncio.timeout(PULL_AND_COMMIT_SECONDS):
                pulled = await consumer.pull(self._queue, offset, wait=0.0, commit=commit.offset, admission=admission)
        except TimeoutError:
            raise UnreachableError(
                f"{self._queue.broker} did not answer within {PULL_AND_COMMIT_SECONDS:g} s"
            ) from None
        self._shell.measures.commits.labels("done").inc()
        self._window.answered(commit)
        return pulled

    def _may_carry(self) -> bool:
        return not self.in_doubt and self._shell.may_commit(self._queue)

    def report_uncommitted(self) -> None:
        """Count finished messages that are delivered again because their offset could not be committed."""
        number = self._window.uncommitted
        self._shell.measures.uncommitted.inc(number)
        _log.warning(
            "%s is released, but offset %d could not be committed: up to %d finished messages are delivered again",
            self._queue,
            self._window.committable,
            number,
        )


def log_failure(action: str, queue: Queue, error: Exception) -> None:
    """Log a failure on one line; errors other than BrokerError, OSError and ValueError with their traceback."""
    is_expected = isinstance(error, BrokerError | OSError | ValueError)
    _log.warning(
        "%s failed for %s: %s", action, queue, str(error) or repr(error), exc_info=None if is_expected else error
    )
