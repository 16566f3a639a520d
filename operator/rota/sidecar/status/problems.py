"""What keeps a member from working: brokers that do not answer, and troubles that people must see to."""

import logging
from collections.abc import Collection, Mapping

from rota.model import Queue, Reason, plain
from rota.sidecar.member.queue_lifecycle import Event

UNREACHABLE = 5.0  # a broker that has not answered for so long cannot be reached

_WHY_STUCK = {
    Event.REFUSED: "another consumer has its lock",
    Event.FAILED: "its broker did not say where to begin",
    Event.READER_FAILED: "its reader failed with an unexpected error, which the sidecar's log shows",
}

_log = logging.getLogger(__name__)


class Health:
    """What was noticed; `troubles` is there to be read: reasons, and a sentence for each."""

    def __init__(self) -> None:
        """All is well."""
        self.troubles: dict[str, str] = {}
        self.changes = 0  # of them
        self._answering: set[str] = set()
        self._failing: dict[str, float] = {}  # and since when
        self._failed_tasks: dict[str, str] = {}  # by name: the error
        self._refused: dict[Queue, str] = {}  # and what their brokers said

    def reached(self, broker: str) -> None:
        """Note that a broker answered."""
        self._failing.pop(broker, None)
        self._answering.add(broker)

    def missed(self, broker: str, now: float) -> None:
        """Note that it did not."""
        self._failing.setdefault(broker, now)

    def fails(self, broker: str) -> bool:
        """Whether it did not answer when it was asked the last time."""
        return broker in self._failing

    def refuses(self, queue: Queue, told: str) -> None:
        """Note that a queue's broker answers, and says no; of several queues one speaks for all."""
        self._refused.setdefault(queue, told)
        self._tell_refusals()

    def takes(self, queue: Queue) -> None:
        """Note that it does what is asked again, or is not asked any more."""
        if self._refused.pop(queue, None):
            self._tell_refusals()

    def stuck(self, queues: Mapping[Queue, Event]) -> None:
        """Say which queue cannot be taken up, and why; one stands for all."""
        told = ""
        if queues:
            queue, event = min(queues.items())
            told = f"There are queues that are not consumed, such as {queue}: {_WHY_STUCK[event]}; the sidecar retries"
        self.trouble(Reason.QUEUES_NOT_TAKEN_UP, told)

    def unread(self, queues: Collection[Queue]) -> None:
        """Report queues of which no pull has succeeded for long, though their brokers answer; the message names one."""
        quiet = [queue for queue in queues if not self.fails(queue.broker) and queue not in self._refused]
        told = (
            quiet
            and f"There are queues that are not read, such as {min(quiet)}: no pull of it has succeeded for a minute"
        )
        self.trouble(Reason.QUEUES_NOT_READ, told or "")

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
        """Return which brokers can be reached, and which cannot."""
        found = dict.fromkeys(self._answering, True)
        return found | {name: now - since < UNREACHABLE for name, since in self._failing.items()}

    def trouble(self, reason: Reason, told: str) -> None:
        """Tell of what is wrong; with no text, that it is no more."""
        if told and self.troubles.get(reason) != told:
            _log.warning("%s", told, extra={"reason": reason.value})
            self.troubles[reason.value] = told
            self.changes += 1
        elif not told and reason in self.troubles:
            del self.troubles[reason.value]
            self.changes += 1
            _log.info("The problem is over", extra={"reason": reason.value})
