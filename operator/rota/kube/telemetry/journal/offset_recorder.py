"""Makes the journal's `offsets` records: at most one per group and minute, because samples are frequent."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from rota.kube.brokers.lag.lag_history import QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import ObjectKey
from rota.kube.telemetry.journal.journal_writer import JournalRecord
from rota.model import Queue
from rota.records import journal_record
from rota.timestamps import format_time

RECORD_INTERVAL_SECONDS = 60.0


class OffsetRecorder:
    """Makes the records of groups, and remembers when each group had its last one."""

    def __init__(self, lag_of: Callable[[ObjectKey], GroupLag]) -> None:
        self._lag_of = lag_of
        self._last_recorded_at: dict[ObjectKey, float] = {}

    async def build_due_records(self, keys: Iterable[ObjectKey], now: float) -> list[JournalRecord]:
        """Return a record for each group of `keys` that had none in the last minute, unless its lag is unknown."""
        recent = {key: at for key, at in self._last_recorded_at.items() if now < at + RECORD_INTERVAL_SECONDS}
        due = [key for key in keys if key not in recent]
        # Set before the await: meanwhile the poll of another broker may request records of the same groups.
        self._last_recorded_at = recent | dict.fromkeys(due, now)
        built = await asyncio.to_thread(self._build_records, due)
        for key, record in zip(due, built, strict=True):
            if record is None:
                self._last_recorded_at.pop(key, None)  # its lag is unknown, so it is due again at the next poll
        return [*filter(None, built)]

    def _build_records(self, keys: Iterable[ObjectKey]) -> list[JournalRecord | None]:
        return [_build_record(key, self._lag_of(key)) for key in keys]


def _build_record(key: ObjectKey, lag: GroupLag) -> JournalRecord | None:
    samples = {queue: sample for queue, sample in lag.queues.items() if _is_position_known(sample)}
    if not samples or lag.sampled_at is None:
        return None
    lag_states = Counter(str(sample.lag_state) for sample in samples.values() if sample.lag_state)
    topics: dict[str, dict[str, Any]] = {}
    for (topic, broker), queues in groupby(sorted(samples), key=lambda queue: (queue.topic, queue.broker)):
        topics.setdefault(topic, {})[broker] = _columns(queues, samples)
    at = format_time(lag.sampled_at)
    # `verdicts` counts lag states; names in the journal do not change.
    return journal_record("offsets", "/".join(key), at, topics=topics, verdicts=dict(lag_states))


def _is_position_known(sample: QueueLag) -> bool:
    """Whether the queue's end and the group's position are known; without a commit, a known lag implies a position."""
    has_position = sample.committed is not None or sample.lag is not None
    return has_position and sample.max_offset is not None


def _columns(queues: Iterable[Queue], samples: Mapping[Queue, QueueLag]) -> dict[str, list[int | None]]:
    columns: dict[str, list[int | None]] = {"ids": [], "first": [], "last": [], "committed": []}
    for queue in queues:
        sample = samples[queue]
        columns["ids"].append(queue.id)
        columns["first"].append(sample.min_offset)
        columns["last"].append(sample.max_offset)
        columns["committed"].append(sample.committed)
    return columns
