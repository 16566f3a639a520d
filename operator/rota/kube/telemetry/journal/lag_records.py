"""What the journal keeps of how far groups are: a record a minute and group, for looks are many and disks are small."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from rota.kube.brokers.lag.lag_history import Judged
from rota.kube.brokers.lag.lag_poller import Lag
from rota.kube.client.objects import Key
from rota.model import Queue
from rota.records import journal_record
from rota.timestamps import format_time

EVERY_SECONDS = 60.0


class Offsets:
    """Of which group the last record was made when."""

    def __init__(self, lag: Callable[[Key], Lag]) -> None:
        """Know of none."""
        self._lag = lag
        self._last: dict[Key, float] = {}

    def due(self, keys: Iterable[Key], now: float) -> list[Mapping[str, Any]]:
        """Return records of those groups, just looked at, of which there was none for a minute."""
        self._last = {key: at for key, at in self._last.items() if now < at + EVERY_SECONDS}
        fresh = [key for key in keys if key not in self._last]
        self._last |= dict.fromkeys(fresh, now)
        return [record for key in fresh if (record := _record(key, self._lag(key)))]


def _record(key: Key, lag: Lag) -> Mapping[str, Any] | None:
    known = {queue: it for queue, it in lag.queues.items() if it.last is not None and _told(it)}
    if not known or lag.at is None:
        return None
    verdicts = Counter(str(it.verdict) for it in known.values() if it.verdict)
    topics: dict[str, dict[str, Any]] = {}
    for (topic, broker), some in groupby(sorted(known), key=lambda queue: (queue.topic, queue.broker)):
        topics.setdefault(topic, {})[broker] = _columns(list(some), known)
    return journal_record("offsets", "/".join(key), format_time(lag.at), topics=topics, verdicts=dict(verdicts))


def _told(it: Judged) -> bool:
    """Whether it is known where the group is, if only that it never was there."""
    return it.committed is not None or it.lag is not None


def _columns(queues: list[Queue], known: Mapping[Queue, Judged]) -> dict[str, list[int | None]]:
    rows = [known[queue] for queue in queues]
    return {
        "ids": [queue.id for queue in queues],
        "first": [it.first for it in rows],
        "last": [it.last for it in rows],
        "committed": [it.committed for it in rows],
    }
