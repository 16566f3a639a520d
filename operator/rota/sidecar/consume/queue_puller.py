"""The puller of one queue: fetches messages into the queue's window, as far as window and memory budget have room.

The metric labels of pulls must not change, because users' dashboards name them; some use other words than the code.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from rota.brokers.errors import BrokerError, ConsumptionDisabledError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.port import PullResult
from rota.sidecar.consume.lease_requests import LeaseRequests
from rota.sidecar.consume.offset_committer import OffsetCommitter
from rota.sidecar.consume.source import QueueSource
from rota.sidecar.member.memory_budget import MemoryReservation, PullAdmission, QueueMemory, RefusedMessage
from rota.sidecar.member.queue_lifecycle import LeaseEvent
from rota.sidecar.status.pull_status import PullStatus

MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
# While a user has disabled consumption at the broker: no backoff, since the broker is well. The reference client waits
# as long after any failed pull.
DISABLED_PAUSE_SECONDS = 3.0
RESUME_FREE_DIVISOR = 4  # after a pull had no memory for a message, wait until a quarter of the queue's limit is free

_FAILURE_LABELS: dict[type[Exception], str] = {
    ConsumptionDisabledError: "switched_off",
    UnreachableError: "unreachable",
    NotFoundError: "unknown",  # the topic or queue
}

_log = logging.getLogger(__name__)


class QueuePuller:
    """Pulls a queue in a task, from `start` to `stop`."""

    def __init__(
        self,
        source: QueueSource,
        committer: OffsetCommitter,
        requests: LeaseRequests,
        memory: QueueMemory,
        offer: Callable[[], None],
    ) -> None:
        """`memory` has the queue's limits; `offer` is called once messages were fetched."""
        self.status = PullStatus()
        self._source = source
        self._queue = source.queue
        self._window = source.window
        self._host = source.host
        self._committer = committer
        self._requests = requests
        self._memory = memory
        self._offer = offer
        self._task: asyncio.Task[None] | None = None
        self._refused_message: RefusedMessage | None = None  # the message for which the last pull had no memory

    def start(self) -> None:
        """Start to pull, for a Fetch command; after an unexpected error, the command is answered with ReaderFailed."""
        self._task = self._source.start_task(self._pull_forever())
        self._task.add_done_callback(partial(self._on_ended, self._requests.lease_number))

    def _on_ended(self, lease_number: int, task: asyncio.Task[None]) -> None:
        if self._task is task:  # otherwise it was cancelled
            self._task = None
            self.status.reset("failing")
            self._requests.answer(LeaseEvent.READER_FAILED, lease_number)

    def stop(self) -> None:
        """Cancel the open pull, and stop pulling."""
        if self._task:
            self._task.cancel()
            self._task = None
        self.status.reset()

    def restart(self) -> None:
        """Pull at the window's new offset, unless stopped: at the old one the broker may hold the pull for long."""
        if self._task:
            self._task.cancel()
            self.status.on_unanswered()
            self.start()
        self._source.on_change()

    def restart_idle_pull(self, awake_since: float) -> None:
        """Send the open pull again if it hangs; time before `awake_since`, when the process was stalled, is ignored."""
        seconds = self.status.hanging_seconds(self._host.now(), awake_since)
        if self._task and seconds is not None:
            text = "A pull of %s has neither returned nor failed for %.0f s; it is sent again"
            _log.warning(text, self._queue, seconds)
            self._host.metrics.pulls.labels("idle").inc()
            self.restart()

    async def _pull_forever(self) -> None:
        has_failed = False
        backoff_seconds = 0.0
        last_error = ""
        while True:
            reservation = await self._wait_for_memory()
            offset = self._window.next_offset
            with PullAdmission(self._host.memory_budget, self._memory, reservation) as admission:
                try:
                    pulled = await self._send_pull(offset, admission, after_failure=has_failed)
                except (BrokerError, ValueError) as error:  # ValueError: the settings do not name the topic
                    has_failed = True
                    backoff_seconds = next_backoff(error, backoff_seconds)
                    self._on_pull_failed(error, is_repeated=str(error) == last_error)
                    last_error = str(error)
                else:
                    if has_failed:  # the broker may have been killed, and have lost its latest commits
                        self._window.committed_offset = None
                        self._committer.needs_check = True
                    has_failed = False
                    backoff_seconds = 0.0
                    last_error = ""
                    self._add_pull(offset, pulled, admission)
            if has_failed:
                await asyncio.sleep(backoff_seconds or DISABLED_PAUSE_SECONDS)

    async def _send_pull(self, offset: int, admission: PullAdmission, *, after_failure: bool) -> PullResult:
        """Pull; after a failure without long polling, so that the broker's return is noticed at once.

        A pull after a failure carries no commit, either: the broker may have lost commits, so the next one is checked.
        """
        self.status.on_sent(self._host.now())
        if after_failure:
            consumer = self._source.session.consumer
            return await consumer.pull(self._queue, offset, wait_seconds=0.0, admission=admission)
        return await self._committer.pull_and_commit(offset, admission)

    def _on_pull_failed(self, error: Exception, *, is_repeated: bool) -> None:
        if isinstance(error, RejectedError):  # a rejection is an answer
            self.status.reset()
        else:
            self.status.on_unanswered()
        self.status.obstacle = "paused" if isinstance(error, ConsumptionDisabledError) else "failing"
        self._host.metrics.pulls.labels(failure_label(error)).inc()
        self._source.record_failure("Pulling", error, is_repeated=is_repeated)
        self._refused_message = None  # reserve no memory for a broker that does not answer

    def _add_pull(self, offset: int, pulled: PullResult, admission: PullAdmission) -> None:
        """Add a pull's messages to the window, and remember the size of the message that found no memory."""
        self.status.on_answered(self._host.now())
        self._source.record_answer()
        self._host.problems.clear_rejection(self._queue)
        self._host.metrics.pulls.labels(result_label(pulled, admission)).inc()
        self._count_filtered(offset, pulled)
        self._window.add_pull(offset, pulled)
        if pulled.correction:
            self._committer.start_commit()  # the pull may have overwritten the user's offset
        self._refused_message = None
        if admission.refused_bytes:
            self._refused_message = RefusedMessage(pulled.next_offset, admission.refused_bytes)
        if pulled.messages:
            self._offer()

    def _count_filtered(self, offset: int, pulled: PullResult) -> None:
        if not pulled.correction:
            matched = len(pulled.messages)
            filtered = max(0, pulled.next_offset - offset - matched)
            now = self._host.now()
            self._host.filter_counts.count_pull(self._queue.topic, filtered=filtered, matched=matched, now=now)

    async def _wait_for_memory(self) -> MemoryReservation | None:
        """Wait until window and memory budget have room; return the memory reserved for a message refused before."""
        if not self._has_room():
            self.status.reset("full")
            await self._source.changed.wait_until(self._has_room)
        refused = self._next_if_refused()
        if refused is None:
            return None
        self.status.reset("full")
        budget = self._host.memory_budget
        reservation = budget.reserve(self._memory, refused.memory_bytes, on_granted=self._source.changed.notify)
        try:
            await self._source.changed.wait_until(lambda: reservation.granted)
        except asyncio.CancelledError:
            budget.cancel(reservation)  # a returned reservation is ended by the caller's PullAdmission
            raise
        return reservation

    def _next_if_refused(self) -> RefusedMessage | None:
        """Return the next message to fetch, if the last pull had no memory for it."""
        refused = self._refused_message
        return refused if refused and refused.offset == self._window.next_offset else None

    def _has_room(self) -> bool:
        return not self._window.is_full(self._memory.limits) and self._has_room_after_refusal()

    def _has_room_after_refusal(self) -> bool:
        """Whether the queue's limit allows a pull after a refused message; True without one, or if the window is empty.

        That message must fit, and a quarter of the limit be free, so that large messages are not pulled one by one.
        """
        refused = self._next_if_refused()
        if refused is None or not self._window.unfinished_count:
            return True
        max_bytes = self._memory.limits.max_bytes
        needed_bytes = max(refused.memory_bytes, max_bytes // RESUME_FREE_DIVISOR)
        return self._window.memory_bytes + needed_bytes <= max_bytes


def next_backoff(error: Exception, previous_seconds: float) -> float:
    """Return the backoff after a failed pull, in seconds; 0 if consumption is disabled: the next error starts over."""
    if isinstance(error, ConsumptionDisabledError):
        return 0.0
    return min(max(MIN_BACKOFF_SECONDS, 2 * previous_seconds), MAX_BACKOFF_SECONDS)


def result_label(pulled: PullResult, admission: PullAdmission) -> str:
    """Return the metric label of an answered pull."""
    if pulled.correction:
        return "moved"  # the broker names another offset to go on from
    if pulled.messages:
        return "found"
    return "no_memory" if admission.refused_bytes else "empty"


def failure_label(error: Exception) -> str:
    """Return the metric label of a failed pull."""
    for kind, label in _FAILURE_LABELS.items():
        if isinstance(error, kind):
            return label
    return "refused"  # by the broker or, with a ValueError, by the settings, which do not name the topic
