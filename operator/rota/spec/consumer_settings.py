"""The settings that every consumer of a group must share, and how an unmanaged consumer's differ from the group's."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from rota.model import RETRY, Reason, Verdict, plain
from rota.sentences import listed
from rota.spec import GroupSpec, Subscription
from rota.spec.resolved import GroupSettings

Model = Literal["Clustering", "Broadcasting", ""]
Start = Literal["Latest", "Earliest", "Timestamp", ""]
MAX_TEXT = 100  # characters of a client id, a filter or topics in a sentence
MAX_CONSUMERS = 3  # in a sentence; the others are counted


class ConsumerSettings(NamedTuple):
    """A consumer's subscriptions, message model and start position; a setting that it does not report is empty."""

    subscriptions: tuple[Subscription, ...]
    model: Model = ""
    start: Start = ""

    @property
    def filters(self) -> dict[str, frozenset[str]]:
        """Return each topic's filter; equal filters accept the same messages. Retry topics are not compared."""
        return {entry.topic: _filter(entry) for entry in self.subscriptions if not entry.topic.startswith(RETRY)}


def settings_of(group: GroupSpec | GroupSettings) -> ConsumerSettings:
    """Return the settings of a group's own members."""
    return ConsumerSettings(tuple(group.subscriptions), group.message_model, group.start_from.position)


def tags_of(subscription: Subscription) -> list[str]:
    """Return the tags that a subscription accepts; an empty list means all tags."""
    if subscription.expression.strip() == "*":
        return []
    return sorted({tag.strip() for tag in subscription.expression.split("||") if tag.strip()})


def _filter(subscription: Subscription) -> frozenset[str]:
    if subscription.type == "Tag":
        return frozenset(tags_of(subscription))
    return frozenset({f"SQL92: {' '.join(subscription.expression.split())}"})


def differences(group: ConsumerSettings, consumer: ConsumerSettings) -> list[str]:
    """Return how another consumer's settings differ from the group's; an unknown setting is no difference."""
    result = [*_topic_differences(group.filters, consumer.filters), *_filter_differences(group, consumer)]
    if consumer.model and consumer.model != group.model:
        result.append(f"its message model is {consumer.model}")
    if consumer.start and consumer.start != group.start:
        result.append(f"it starts from {consumer.start}")
    return result


def _topic_differences(ours: Collection[str], theirs: Collection[str]) -> Iterator[str]:
    if missing := sorted({*ours}.difference(theirs)):
        yield f"it does not read {listed(missing)}"
    if added := sorted({*theirs}.difference(ours)):
        yield f"it also reads {plain(listed(added), MAX_TEXT)}"


def _filter_differences(group: ConsumerSettings, consumer: ConsumerSettings) -> Iterator[str]:
    ours, theirs = group.filters, consumer.filters
    for subscription in consumer.subscriptions:
        topic = subscription.topic
        if topic in ours and ours[topic] != theirs[topic]:
            yield f"its filter of {topic} is {plain(subscription.expression, MAX_TEXT)}"


def mismatches(group: GroupSpec | None, unmanaged: Mapping[str, ConsumerSettings]) -> list[Verdict]:
    """Return the problem of unmanaged consumers, by client id, whose settings differ from the group's."""
    if group is None:
        return []
    by_name = {name: differences(settings_of(group), unmanaged[name]) for name in sorted(unmanaged)}
    sentences = [f"{plain(name, MAX_TEXT)}: {', '.join(different)}" for name, different in by_name.items() if different]
    if not sentences:
        return []
    more = len(sentences) - MAX_CONSUMERS
    message = "; ".join(sentences[:MAX_CONSUMERS]) + (f"; and {more} more" if more > 0 else "")
    problem = f"Unmanaged consumers have other settings than the group: {message}"
    return [Verdict(Reason.SUBSCRIPTION_MISMATCH, problem)]
