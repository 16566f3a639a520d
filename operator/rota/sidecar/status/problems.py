"""Tracks what keeps a member from consuming: unreachable brokers, and problems that a user must solve."""

import logging
from collections.abc import Collection, Mapping

from rota.model import Queue, Reason, plain
from rota.sidecar.member.queue_lifecycle import LeaseEvent

UNREACHABLE = 5.0  # a broker without a response for this many seconds counts as unreachable

_WHY_STUCK = {
    LeaseEvent.REFUSED: "another consumer has its lock",
    LeaseEvent.FAILED: "its broker did not say where to begin",
    LeaseEvent.READER_FAILED: "its reader failed with an unexpected error, which the sidecar's log shows",
}

_log = logging.getLogger(__name__)


class Problems:
    """Tracks broker reachability and problems; other modules may read `troubles`, a sentence by reason."""

    def __init__(self) -> None:
        self.troubles: dict[str, str] = {}
        self.changes = 0  # number of changes of `troubles`
        self._answering: set[str] = set()
        self._failing: dict[str, float] = {}  # by broker: the time of the first failure
        self._failed_tasks: dict[str, str] = {}  # error by task name
        self._refused: dict[Queue, str] = {}  # the broker's message by queue

    def reached(self, broker: str) -> None:
        """Record a response of a broker."""
        self._failing.pop(broker, None)
        self._answering.add(broker)

    def missed(self, broker: str, now: float) -> None:
        """Record that a broker did not respond."""
        self._failing.setdefault(broker, now)

    def fails(self, broker: str) -> bool:
        """Whether the last request to a broker got no response."""
        return broker in self._failing

    def refuses(self, queue: Queue, message: str) -> None:
        """Record that a queue's broker rejects requests; only the first recorded message is reported."""
        self._refused.setdefault(queue, message)
        self._tell_refusals()

    def takes(self, queue: Queue) -> None:
        """Record that a queue's broker accepts requests again, or that the queue gets no more requests."""
        if self._refused.pop(queue, None):
            self._tell_refusals()

    def stuck(self, queues: Mapping[Queue, LeaseEvent]) -> None:
        """Report queues that cannot be started, and why; the message names one of them."""
        text = ""
        if queues:
            queue, event = min(queues.items())
            text = f"There are queues that are not consumed, such as {queue}: {_WHY_STUCK[event]}; the sidecar retries"
        self.trouble(Reason.QUEUES_NOT_TAKEN_UP, text)

    def unread(self, queues: Collection[Queue]) -> None:
        """Report queues without a successful pull for long, though their brokers respond; the message names one."""
        quiet = [queue for queue in queues if not self.fails(queue.broker) and queue not in self._refused]
        message = (
            quiet
            and f"There are queues that are not read, such as {min(quiet)}: no pull of it has succeeded for a minute"
        )
        self.trouble(Reason.QUEUES_NOT_READ, message or "")

    def task_failed(self, name: str, error: Exception | None) -> None:
        """Report that a task of the sidecar failed, or that it runs steadily again; the message names one."""
        if error:
            self._failed_tasks[name] = plain(repr(error))
        else:
            self._failed_tasks.pop(name, None)
        first = next(iter(self._failed_tasks.items()), None)
        self.trouble(
            Reason.INTERNAL_ERROR,
            "The task {} failed and is restarted: {}; please report it".format(*first) if first else "",
        )

    def _tell_refusals(self) -> None:
        self.trouble(Reason.BROKER_REFUSES, next(iter(self._refused.values()), ""))

    def brokers(self, now: float) -> dict[str, bool]:
        """Return whether each known broker is reachable."""
        reachable = dict.fromkeys(self._answering, True)
        return reachable | {name: now - since < UNREACHABLE for name, since in self._failing.items()}

    def trouble(self, reason: Reason, message: str) -> None:
        """Set the message of a problem, and log a change; an empty message clears the problem."""
        if message and self.troubles.get(reason) != message:
            _log.warning("%s", message, extra={"reason": reason.value})
            self.troubles[reason.value] = message
            self.changes += 1
        elif not message and reason in self.troubles:
            del self.troubles[reason.value]
            self.changes += 1
            _log.info("The problem is over", extra={"reason": reason.value})
