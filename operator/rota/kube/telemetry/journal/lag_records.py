"""Offsets of groups for the journal: at most one record per group and minute, because samples are frequent."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from rota.kube.brokers.lag.lag_history import QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import ObjectKey
from rota.model import Queue
from rota.records import journal_record
from rota.timestamps import format_time

RECORD_INTERVAL_SECONDS = 60.0


class OffsetRecorder:
    """Makes `offsets` records, and remembers when each group had its last one."""

    def __init__(self, lag_of: Callable[[ObjectKey], GroupLag]) -> None:
        self._lag_of = lag_of
        self._last_recorded_at: dict[ObjectKey, float] = {}

    def build_due_records(self, keys: Iterable[ObjectKey], now: float) -> list[Mapping[str, Any]]:
        """Return records of the sampled groups `keys` that had no record in the last minute."""
        self._last_recorded_at = {
            key: at for key, at in self._last_recorded_at.items() if now < at + RECORD_INTERVAL_SECONDS
        }
        fresh = [key for key in keys if key not in self._last_recorded_at]
        self._last_recorded_at |= dict.fromkeys(fresh, now)
        return [record for key in fresh if (record := _offsets_record(key, self._lag_of(key)))]


def _offsets_record(key: ObjectKey, lag: GroupLag) -> Mapping[str, Any] | None:
    samples = {
        queue: sample
        for queue, sample in lag.queues.items()
        if sample.max_offset is not None and _is_position_known(sample)
    }
    if not samples or lag.sampled_at is None:
        return None
    verdicts = Counter(str(sample.lag_state) for sample in samples.values() if sample.lag_state)
    topics: dict[str, dict[str, Any]] = {}
    for (topic, broker), queues in groupby(sorted(samples), key=lambda queue: (queue.topic, queue.broker)):
        topics.setdefault(topic, {})[broker] = _columns(list(queues), samples)
    return journal_record("offsets", "/".join(key), format_time(lag.sampled_at), topics=topics, verdicts=dict(verdicts))


def _is_position_known(sample: QueueLag) -> bool:
    """Whether the group's position is known: its offset, or that it has never committed one."""
    return sample.committed is not None or sample.lag is not None


def _columns(queues: list[Queue], samples: Mapping[Queue, QueueLag]) -> dict[str, list[int | None]]:
    rows = [samples[queue] for queue in queues]
    return {
        "ids": [queue.id for queue in queues],
        "first": [row.min_offset for row in rows],
        "last": [row.max_offset for row in rows],
        "committed": [row.committed for row in rows],
    }
