"""Offsets of groups for the journal: at most one record per group and minute, because samples are frequent."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from rota.kube.brokers.lag.lag_history import QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import Key
from rota.model import Queue
from rota.records import journal_record
from rota.timestamps import format_time

EVERY_SECONDS = 60.0


class OffsetRecorder:
    """Makes `offsets` records, and remembers when each group had its last one."""

    def __init__(self, lag: Callable[[Key], GroupLag]) -> None:
        self._lag = lag
        self._last: dict[Key, float] = {}

    def due(self, keys: Iterable[Key], now: float) -> list[Mapping[str, Any]]:
        """Return records of the sampled groups `keys` that had no record in the last minute."""
        self._last = {key: at for key, at in self._last.items() if now < at + EVERY_SECONDS}
        fresh = [key for key in keys if key not in self._last]
        self._last |= dict.fromkeys(fresh, now)
        return [record for key in fresh if (record := _record(key, self._lag(key)))]


def _record(key: Key, lag: GroupLag) -> Mapping[str, Any] | None:
    samples = {
        queue: sample for queue, sample in lag.queues.items() if sample.last is not None and _is_position_known(sample)
    }
    if not samples or lag.at is None:
        return None
    verdicts = Counter(str(sample.verdict) for sample in samples.values() if sample.verdict)
    topics: dict[str, dict[str, Any]] = {}
    for (topic, broker), queues in groupby(sorted(samples), key=lambda queue: (queue.topic, queue.broker)):
        topics.setdefault(topic, {})[broker] = _columns(list(queues), samples)
    return journal_record("offsets", "/".join(key), format_time(lag.at), topics=topics, verdicts=dict(verdicts))


def _is_position_known(sample: QueueLag) -> bool:
    """Whether the group's position is known: its offset, or that it has never committed one."""
    return sample.committed is not None or sample.lag is not None


def _columns(queues: list[Queue], samples: Mapping[Queue, QueueLag]) -> dict[str, list[int | None]]:
    rows = [samples[queue] for queue in queues]
    return {
        "ids": [queue.id for queue in queues],
        "first": [row.first for row in rows],
        "last": [row.last for row in rows],
        "committed": [row.committed for row in rows],
    }
