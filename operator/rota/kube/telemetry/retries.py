"""Counts messages that arrive in groups' retry topics: members sent them back, and brokers deliver them again.

The counts come from the ends of the retry queues, in the `offsets` records that the journal gets anyway.
"""

from collections.abc import Mapping
from typing import Any


class RetryTracker:
    """Keeps the end offset of each retry queue, by group, broker and queue id, from the last `offsets` record."""

    def __init__(self) -> None:
        self._last_ends: dict[str, dict[tuple[str, int], int]] = {}

    def count_new_retries(self, record: Mapping[str, Any], retry_topic: str) -> int:
        """Return how many messages arrived since the group's last record; 0 for a queue's first end, or a lower one."""
        last_ends = self._last_ends.setdefault(record["group"], {})
        count = 0
        for broker, columns in record["topics"].get(retry_topic, {}).items():
            for queue_id, end in zip(columns["ids"], columns["last"], strict=True):
                count += max(0, end - last_ends.get((broker, queue_id), end))
                last_ends[broker, queue_id] = end
        return count

    def forget(self, group: str) -> None:
        """Forget a deleted group."""
        self._last_ends.pop(group, None)
