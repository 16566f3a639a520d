"""Counter of the messages that a subscription's expression filters out, to report expressions that match nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

from rota.model import single_line
from rota.spec import Subscription

QUIET_SECONDS = 180.0  # an expression is reported after this long without a match
MIN_FILTERED_MESSAGES = 50  # and after at least this many messages


@dataclass(slots=True)
class _TopicCounts:
    counted_since: float  # start of counting, or time of the last match
    expression: str = ""  # as `find_problem` last saw it; empty before
    filtered: int = 0
    problem: str = ""  # the reported sentence


class FilterCounts:
    """Counts for each topic the messages that were filtered out since the last message that matched."""

    def __init__(self) -> None:
        self._topics: dict[str, _TopicCounts] = {}

    def count_pull(self, topic: str, *, filtered: int, matched: int, now: float) -> None:
        """Count the messages of one pull."""
        counts = self._topics.get(topic)
        if counts is None or matched:
            counts = self._topics[topic] = _TopicCounts(now, counts.expression if counts else "")
        if not matched:
            counts.filtered += filtered

    def find_problem(self, subscriptions: Iterable[Subscription], now: float) -> str:
        """Return a sentence about the first topic whose expression matches nothing; empty without such a topic."""
        problems: list[str] = []
        for subscription in subscriptions:  # all of them, to notice when an expression is changed
            counts = self._topics.get(subscription.topic)
            if counts is None:
                continue
            if counts.expression not in {"", subscription.expression}:  # the expression was changed: reset the counts
                counts = self._topics[subscription.topic] = _TopicCounts(now)
            counts.expression = subscription.expression
            matches_all = subscription.expression in {"", "*"}
            if not matches_all:
                # Keep the first sentence until a message matches: with the present count it would change all the time.
                counts.problem = counts.problem or _describe_problem(subscription, counts, now)
                problems.append(counts.problem)
        return next(filter(None, problems), "")


def _describe_problem(subscription: Subscription, counts: _TopicCounts, now: float) -> str:
    if counts.filtered < MIN_FILTERED_MESSAGES or now - counts.counted_since < QUIET_SECONDS:
        return ""
    problem = f"None of the last {counts.filtered} messages of {subscription.topic} matches the expression"
    return f"{problem} {single_line(subscription.expression, 100)!r}; check which tags and properties its producers set"
