"""Counts messages that arrive in groups' retry topics: members sent them back, and brokers deliver them again."""

from collections.abc import Callable, Mapping
from typing import Any


class RetryTracker:
    """Keeps the end offset of each retry queue, by group, broker and queue id, from the last `offsets` record."""

    def __init__(self) -> None:
        self._last_ends: dict[str, dict[tuple[str, int], int]] = {}

    def count_new_retries(self, record: Mapping[str, Any], retry_topic: str) -> int:
        """Return how many messages arrived since the group's last `offsets` record; 0 for a queue's first end."""
        group = record["group"]
        brokers = record["topics"].get(retry_topic, {})
        ends = {
            (broker, number): end
            for broker, columns in brokers.items()
            for number, end in zip(columns["ids"], columns["last"], strict=True)
        }
        last_ends = self._last_ends.get(group, {})
        self._last_ends[group] = last_ends | ends
        return sum(max(0, end - last_ends.get(queue, end)) for queue, end in ends.items())

    def forget_groups(self, is_known: Callable[[str], bool]) -> None:
        """Forget groups that were deleted, or that another operator counts."""
        self._last_ends = {group: ends for group, ends in self._last_ends.items() if is_known(group)}
