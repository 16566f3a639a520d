"""Commits the offsets of one queue: by themselves, or carried by a pull; one commit at a time."""

import asyncio
import logging
from collections.abc import Callable

from rota.aio import to_the_end
from rota.brokers.errors import BrokerError, Unreachable
from rota.brokers.port import Pulled
from rota.model import Queue
from rota.sidecar.consume.source import ReaderShell, Source
from rota.sidecar.consume.start_offset import commit_offset
from rota.sidecar.member.memory_budget import PullAdmission
from rota.sidecar.member.window import Commit, Window

PULL_AND_COMMIT_SECONDS = 20.0  # that a pull which carries a commit is waited for: it may have to wait for memory
PULL_SECONDS = 15.0  # that a broker holds a pull for which there is nothing

_log = logging.getLogger(__name__)


class OffsetCommitter:
    """Commits what is finished in a window; hold `in_progress` to keep commits away."""

    def __init__(
        self, queue: Queue, source: Source, window: Window, shell: ReaderShell, jumped: Callable[[], None]
    ) -> None:
        """Commit nothing yet; `jumped` is called when the window continues where another consumer got to."""
        self.in_progress = asyncio.Lock()
        self.in_doubt = (
            False  # another consumer may have had the queue: it is about to be released, or its broker was away
        )
        self._queue, self._source, self._window, self._shell, self._jumped = queue, source, window, shell, jumped

    async def commit(self) -> bool:
        """Commit what is finished, if it may be; return whether the broker has all of it."""
        async with self.in_progress:
            try:
                return await self._commit_finished()
            except Exception as error:  # noqa: BLE001 - of one queue: it is counted, logged, and tried again
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
        """Commit; while nothing is pulled, this tells whether the broker can be reached."""
        try:
            await commit_offset(self._source.store, self._queue, offset)
        except Unreachable:
            if self._window.stopped:
                self._shell.health.missed(self._queue.broker, self._shell.now())
            raise
        if self._source.store is self._source.consumer:
            self._shell.health.reached(self._queue.broker)

    async def _is_passed(self, commit: Commit) -> bool:
        """Return whether other consumers got further meanwhile; committing would have their messages come again."""
        there = await self._source.store.committed(self._queue)
        passed = there is not None and self._window.passed(commit, there)
        if passed:
            self._jumped()
        return passed

    async def pull(self, offset: int, admission: PullAdmission) -> Pulled:
        """Pull, and commit with the same request what is finished: so a crash repeats little more than was in flight.

        The broker may store the carried offset after a commit that was sent later. Therefore later commits wait for
        this pull's answer. The pull is sent without long polling and is not cancelled, so that the answer comes soon.
        If the group was reset meanwhile, the broker discards the offset and says so: the next pull carries the reset.
        """
        consumer = self._source.consumer
        if self._source.store is consumer and not self.in_progress.locked():
            async with self.in_progress:
                # Chosen with the lock held: while this pull waits for it, another commit may store a higher offset.
                commit = self._window.to_commit() if self._may_carry() else None
                if commit:
                    return await to_the_end(self._pull_with(commit, offset, admission))
        return await consumer.pull(self._queue, offset, wait=PULL_SECONDS, admission=admission)

    async def _pull_with(self, commit: Commit, offset: int, admission: PullAdmission) -> Pulled:
        consumer = self._source.consumer
        try:
            async with asyncio.timeout(PULL_AND_COMMIT_SECONDS):
                pulled = await consumer.pull(self._queue, offset, wait=0.0, commit=commit.offset, admission=admission)
        except TimeoutError:
            raise Unreachable(f"{self._queue.broker} did not answer within {PULL_AND_COMMIT_SECONDS:g} s") from None
        self._shell.measures.commits.labels("done").inc()
        self._window.answered(commit)
        return pulled

    def _may_carry(self) -> bool:
        return not self.in_doubt and self._shell.may_commit(self._queue)

    def report_uncommitted(self) -> None:
        """Count the messages that are finished, and come again because their offset could not be committed."""
        number = self._window.uncommitted
        self._shell.measures.uncommitted.inc(number)
        _log.warning(
            "%s is released, but offset %d could not be committed: up to %d finished messages are delivered again",
            self._queue,
            self._window.committable,
            number,
        )


def log_failure(what: str, queue: Queue, error: Exception) -> None:
    """Log a failure on one line; add the traceback of an error that is neither the broker's, a disk's nor a value's."""
    is_expected = isinstance(error, BrokerError | OSError | ValueError)
    _log.warning(
        "%s failed for %s: %s", what, queue, str(error) or repr(error), exc_info=None if is_expected else error
    )
