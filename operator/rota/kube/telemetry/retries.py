"""Counts the messages that came to groups' retry topics: members sent them back, and they are delivered again."""

from collections.abc import Callable, Mapping
from typing import Any


class RetryTracker:
    """The ends of retry topics' queues, by group, broker and queue, as the journal's offsets last had them."""

    def __init__(self) -> None:
        self._ends: dict[str, dict[tuple[str, int], int]] = {}

    def take(self, offsets: Mapping[str, Any], retry_topic: str) -> int:
        """Return how many messages came since the group's last `offsets` record; a queue's first end counts nothing."""
        group, brokers = offsets["group"], offsets["topics"].get(retry_topic, {})
        ends = {
            (broker, number): end
            for broker, columns in brokers.items()
            for number, end in zip(columns["ids"], columns["last"], strict=True)
        }
        before = self._ends.get(group, {})
        self._ends[group] = before | ends
        return sum(max(0, end - before.get(queue, end)) for queue, end in ends.items())

    def forget(self, is_known: Callable[[str], bool]) -> None:
        """Forget groups that do not exist any more, or that another operator counts."""
        self._ends = {group: ends for group, ends in self._ends.items() if is_known(group)}
