"""Tracks what keeps a member from consuming: unreachable brokers, and problems that a user must solve."""

import logging
from collections.abc import Collection, Mapping

from rota.model import Queue, Reason, single_line
from rota.sidecar.member.queue_lifecycle import LeaseEvent

UNREACHABLE_SECONDS = 5.0  # a broker without a response for this many seconds counts as unreachable

_STUCK_REASONS = {
    LeaseEvent.REFUSED: "another consumer has its lock",
    LeaseEvent.FAILED: "the request for its lock or for its start offset failed, as the sidecar's log shows",
    LeaseEvent.READER_FAILED: "its reader failed with an unexpected error, which the sidecar's log shows",
}

_log = logging.getLogger(__name__)


class Problems:
    """Tracks broker reachability and problems; other modules may read `messages`, a sentence by reason."""

    def __init__(self) -> None:
        self.messages: dict[str, str] = {}
        self.change_count = 0  # number of changes of `messages`
        self._answered_brokers: set[str] = set()
        self._failing_since: dict[str, float] = {}  # by broker: the time of the first failure
        self._failed_tasks: dict[str, str] = {}  # error by task name
        self._rejections: dict[Queue, str] = {}  # the broker's message by queue

    def record_answer(self, broker: str) -> None:
        """Record a response of a broker."""
        self._failing_since.pop(broker, None)
        self._answered_brokers.add(broker)

    def record_no_answer(self, broker: str, now: float) -> None:
        """Record that a broker did not respond."""
        self._failing_since.setdefault(broker, now)

    def is_failing(self, broker: str) -> bool:
        """Whether the last request to a broker got no response."""
        return broker in self._failing_since

    def record_rejection(self, queue: Queue, message: str) -> None:
        """Record that a queue's broker rejects requests; the message that was recorded first is reported."""
        self._rejections.setdefault(queue, message)
        self._report_rejections()

    def clear_rejection(self, queue: Queue) -> None:
        """Record that a queue's broker accepts requests again, or that the queue gets no more requests."""
        if self._rejections.pop(queue, None):
            self._report_rejections()

    def report_stuck(self, queues: Mapping[Queue, LeaseEvent]) -> None:
        """Report queues that cannot be started, and why; the message names one of them."""
        text = ""
        if queues:
            queue, event = min(queues.items())
            text = f"Some queues are not consumed, such as {queue}: {_STUCK_REASONS[event]}; the sidecar retries"
        self.set_problem(Reason.QUEUE_START_FAILED, text)

    def report_unread(self, queues: Collection[Queue]) -> None:
        """Report queues whose pulls get no answer (`PullStatus.is_unread`), unless the cause is reported already.

        The message names one of the queues.
        """
        unexplained = [queue for queue in queues if not self._is_cause_reported(queue)]
        text = ""
        if unexplained:
            text = f"Some queues are not read, such as {min(unexplained)}: no pull has succeeded for a minute"
        self.set_problem(Reason.QUEUES_NOT_READ, text)

    def _is_cause_reported(self, queue: Queue) -> bool:
        """Whether another problem says already why a queue's pulls fail."""
        return self.is_failing(queue.broker) or queue in self._rejections

    def report_task(self, name: str, error: Exception | None) -> None:
        """Report that a task of the sidecar failed, or that it runs steadily again; the message names one."""
        if error:
            self._failed_tasks[name] = single_line(repr(error))
        else:
            self._failed_tasks.pop(name, None)
        message = ""
        if self._failed_tasks:
            failed_name, failure = next(iter(self._failed_tasks.items()))
            message = f"The task {failed_name} failed and is restarted: {failure}; please report it"
        self.set_problem(Reason.INTERNAL_ERROR, message)

    def _report_rejections(self) -> None:
        self.set_problem(Reason.BROKER_REFUSES, next(iter(self._rejections.values()), ""))

    def broker_reachability(self, now: float) -> dict[str, bool]:
        """Return whether each known broker is reachable."""
        reachability = dict.fromkeys(self._answered_brokers, True)
        for broker, failing_since in self._failing_since.items():
            reachability[broker] = now - failing_since < UNREACHABLE_SECONDS
        return reachability

    def set_problem(self, reason: Reason, message: str) -> None:
        """Set the message of a problem, and log a change; an empty message clears the problem."""
        if message and self.messages.get(reason) != message:
            _log.warning("%s", message, extra={"reason": reason.value})
            self.messages[reason.value] = message
            self.change_count += 1
        elif not message and reason in self.messages:
            del self.messages[reason.value]
            self.change_count += 1
            _log.info("The problem is resolved", extra={"reason": reason.value})
