"""What keeps a member from working: brokers that do not answer, and troubles that people must see to."""

import logging
from collections.abc import Mapping

from rota.model import Queue
from rota.sidecar.member.queue_lifecycle import Event

REFUSES = "BrokerRefuses"
STUCK = "QueuesNotTakenUp"
UNREACHABLE = 5.0  # a broker that has not answered for so long cannot be reached

_log = logging.getLogger(__name__)


class Health:
    """What was noticed; `troubles` is there to be read: reasons, and a sentence for each."""

    def __init__(self) -> None:
        """All is well."""
        self.troubles: dict[str, str] = {}
        self.changes = 0  # of them
        self._answering: set[str] = set()
        self._failing: dict[str, float] = {}  # and since when
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
            why = "another consumer has its lock" if event is Event.REFUSED else "its broker did not say where to begin"
            told = f"There are queues that cannot be taken up, such as {queue}: {why}; it is asked again and again"
        self.trouble(STUCK, told)

    def _tell_refusals(self) -> None:
        self.trouble(REFUSES, next(iter(self._refused.values()), ""))

    def brokers(self, now: float) -> dict[str, bool]:
        """Return which brokers can be reached, and which cannot."""
        found = dict.fromkeys(self._answering, True)
        return found | {name: now - since < UNREACHABLE for name, since in self._failing.items()}

    def trouble(self, reason: str, told: str) -> None:
        """Tell of what is wrong; with no text, that it is no more."""
        if told and self.troubles.get(reason) != told:
            _log.warning("%s: %s", reason, told)
            self.troubles[reason] = told
            self.changes += 1
        elif not told and reason in self.troubles:
            del self.troubles[reason]
            self.changes += 1
            _log.info("%s is no more", reason)
