"""Counts the messages that a subscription's expression passes over, to report one that lets nothing through."""

from collections.abc import Iterable
from dataclasses import dataclass

from rota.model import plain
from rota.spec import Subscription

QUIET_SECONDS = 180.0  # an expression is reported after so long without a match
FEWEST_MESSAGES = 50  # and no sooner than after so many messages


@dataclass(slots=True)
class _Topic:
    since: float  # when counting began, or the last message matched
    expression: str = ""
    passed_over: int = 0
    problem: str = ""


class FilterCounts:
    """What was passed over in each topic since a message of it matched last."""

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}

    def count(self, topic: str, *, passed_over: int, matched: int, now: float) -> None:
        """Note what a pull brought."""
        counted = self._topics.get(topic)
        if counted is None or matched:
            counted = self._topics[topic] = _Topic(now, counted.expression if counted else "")
        if not matched:
            counted.passed_over += passed_over

    def problem(self, subscriptions: Iterable[Subscription], now: float) -> str:
        """Return a sentence about the first topic whose expression lets nothing through; empty if there is none."""
        for subscription in subscriptions:
            counted = self._topics.get(subscription.topic)
            if counted and counted.expression not in {"", subscription.expression}:  # it was changed
                counted = self._topics[subscription.topic] = _Topic(now)
            if counted:
                counted.expression = subscription.expression
            if counted and subscription.expression not in {"", "*"}:
                counted.problem = counted.problem or _problem(subscription, counted, now)
                if counted.problem:
                    return counted.problem
        return ""


def _problem(subscription: Subscription, counted: _Topic, now: float) -> str:
    if counted.passed_over < FEWEST_MESSAGES or now - counted.since < QUIET_SECONDS:
        return ""
    told = f"None of the last {counted.passed_over} messages of {subscription.topic} matches the expression"
    return f"{told} {plain(subscription.expression, 100)!r}; look which tags and properties its producers set"
