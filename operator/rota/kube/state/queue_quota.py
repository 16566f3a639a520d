"""Limits on the queues and brokers of groups: a malicious name server could report any number of them."""

from collections.abc import Mapping, Sequence

from rota.kube.client.objects import Key
from rota.model import Reason, Verdict
from rota.ranges import MOST_IDS, MOST_PLACES

MAX_QUEUES_OF_GROUP = MOST_IDS  # an assignment carries no more
MAX_BROKERS_OF_GROUP = 1000  # the operator connects to each
MAX_QUEUES = 300_000  # default for all groups together (--max-queues): a queue takes about 1 KiB


class QueueQuota:
    """Counts the queues claimed by each group and rejects a claim that would exceed a limit.

    A rejected claim leaves the group's last accepted one counted: its members still own those queues, and the group
    is accepted again when its topics have shrunk.
    """

    def __init__(
        self, per_group: int = MAX_QUEUES_OF_GROUP, total: int = MAX_QUEUES, what: str = "The topics have"
    ) -> None:
        self._what = what
        self._per_group = per_group
        self._total = total
        self._claims: dict[Key, int] = {}
        self._claimed = 0
        self._rejected: dict[Key, Verdict] = {}

    def claim(self, key: Key, counts: Sequence[Mapping[str, int]]) -> None:
        """Claim the queues of a group's topics, counted by broker, in place of its last accepted claim."""
        queues = sum(sum(count.values()) for count in counts)
        if verdict := _verdict_on_brokers(counts) or self._verdict(key, queues):
            self._rejected[key] = verdict
        else:
            self.release(key)
            self._claims[key] = queues
            self._claimed += queues

    def _verdict(self, key: Key, queues: int) -> Verdict | None:
        if queues > self._per_group:
            message = f"{self._what} {queues:,} queues; a group may have {self._per_group:,}: name fewer topics"
            return Verdict(Reason.TOO_MANY_QUEUES, message)
        taken = self._claimed - self._claims.get(key, 0)
        if taken + queues > self._total:
            message = (
                f"{self._what} {queues:,} queues, and all groups of this operator may have {self._total:,} together,"
                f" of which {taken:,} are taken: delete groups, or raise --max-queues and the operator's memory"
            )
            return Verdict(Reason.TOO_MANY_QUEUES, message)
        return None

    def release(self, key: Key) -> None:
        """Forget a group."""
        self._claimed -= self._claims.pop(key, 0)
        self._rejected.pop(key, None)

    def rejection(self, key: Key) -> Verdict | None:
        """Return the limit that a group exceeds, if it does."""
        return self._rejected.get(key)


def _verdict_on_brokers(counts: Sequence[Mapping[str, int]]) -> Verdict | None:
    brokers, places = len({broker for count in counts for broker in count}), sum(map(len, counts))
    if brokers > MAX_BROKERS_OF_GROUP:
        message = f"The topics are on {brokers:,} brokers; a group may have {MAX_BROKERS_OF_GROUP:,}: name fewer topics"
        return Verdict(Reason.TOO_MANY_BROKERS, message)
    if places > MOST_PLACES:
        message = f"The topics have {places:,} pairs of topic and broker; a group may have {MOST_PLACES:,}"
        return Verdict(Reason.TOO_MANY_BROKERS, f"{message}: name fewer topics")
    return None
