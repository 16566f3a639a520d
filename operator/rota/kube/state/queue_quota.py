"""Limits on the queues and brokers of groups: a malicious name server could report any number of them."""

from collections.abc import Mapping, Sequence

from rota.kube.client.objects import ObjectKey
from rota.model import Finding, Reason
from rota.ranges import MAX_QUEUES_PER_DOCUMENT, MAX_TOPIC_BROKER_PAIRS

MAX_QUEUES_OF_GROUP = MAX_QUEUES_PER_DOCUMENT  # an assignment holds no more
MAX_BROKERS_OF_GROUP = 1000  # the operator connects to each
MAX_QUEUES = 300_000  # default for all groups together (--max-queues): a queue takes about 1 KiB


class QueueQuota:
    """Counts the queues claimed by each group and rejects a claim that would exceed a limit.

    A rejected claim leaves the group's last accepted one counted: its members still own those queues, and the group
    is accepted again when its topics have shrunk.
    """

    def __init__(
        self, max_per_group: int = MAX_QUEUES_OF_GROUP, max_total: int = MAX_QUEUES, subject: str = "The topics have"
    ) -> None:
        self._subject = subject  # the start of each message
        self._max_per_group = max_per_group
        self._max_total = max_total
        self._claims: dict[ObjectKey, int] = {}
        self._claimed = 0
        self._rejected: dict[ObjectKey, Finding] = {}

    def claim(self, key: ObjectKey, counts: Sequence[Mapping[str, int]]) -> None:
        """Claim the queues of a group in place of its last accepted claim; `counts`: per topic, queues by broker."""
        queues = sum(sum(count.values()) for count in counts)
        if rejection := _broker_rejection(counts) or self._find_rejection(key, queues):
            self._rejected[key] = rejection
        else:
            self.release(key)
            self._claims[key] = queues
            self._claimed += queues

    def _find_rejection(self, key: ObjectKey, queues: int) -> Finding | None:
        if queues > self._max_per_group:
            message = f"{self._subject} {queues:,} queues; a group may have {self._max_per_group:,}: name fewer topics"
            return Finding(Reason.TOO_MANY_QUEUES, message)
        claimed = self._claimed - self._claims.get(key, 0)
        if claimed + queues > self._max_total:
            message = (
                f"{self._subject} {queues:,} queues, and all groups of this operator may have {self._max_total:,}"
                f" together, of which {claimed:,} are in use: delete groups, or raise --max-queues and its memory"
            )
            return Finding(Reason.TOO_MANY_QUEUES, message)
        return None

    def release(self, key: ObjectKey) -> None:
        """Forget a group."""
        self._claimed -= self._claims.pop(key, 0)
        self._rejected.pop(key, None)

    def rejection(self, key: ObjectKey) -> Finding | None:
        """Return why the group's last claim was rejected; None if it was accepted."""
        return self._rejected.get(key)


def _broker_rejection(counts: Sequence[Mapping[str, int]]) -> Finding | None:
    brokers = len(set().union(*counts))
    pairs = sum(map(len, counts))
    if brokers > MAX_BROKERS_OF_GROUP:
        message = f"The topics are on {brokers:,} brokers; a group may have {MAX_BROKERS_OF_GROUP:,}: name fewer topics"
        return Finding(Reason.TOO_MANY_BROKERS, message)
    if pairs > MAX_TOPIC_BROKER_PAIRS:
        message = f"The topics have {pairs:,} pairs of topic and broker; a group may have {MAX_TOPIC_BROKER_PAIRS:,}"
        return Finding(Reason.TOO_MANY_BROKERS, f"{message}: name fewer topics")
    return None
