"""The settings that every consumer of a group must share, and how an unmanaged consumer's differ from the group's."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from rota.model import RETRY, Reason, Verdict, plain
from rota.sentences import listed
from rota.spec import GroupSpec, Subscription
from rota.spec.resolved import Settings

Model = Literal["Clustering", "Broadcasting", ""]
Start = Literal["Latest", "Earliest", "Timestamp", ""]
MAX_TEXT = 100  # characters of a client id, a filter or topics in a sentence
MAX_CONSUMERS = 3  # in a sentence; the others are counted


class ConsumerSettings(NamedTuple):
    """What a consumer reads, and how; the model or start of a consumer that does not report it is empty."""

    subscriptions: tuple[Subscription, ...]
    model: Model = ""
    start: Start = ""

    @property
    def filters(self) -> dict[str, frozenset[str]]:
        """Return each topic's filter; equal ones let the same messages through. Retry topics are not compared."""
        return {it.topic: _filter(it) for it in self.subscriptions if not it.topic.startswith(RETRY)}


def settings_of(group: GroupSpec | Settings) -> ConsumerSettings:
    """Return the settings of a group's own members."""
    return ConsumerSettings(tuple(group.subscriptions), group.message_model, group.start_from.position)


def tags_of(subscription: Subscription) -> list[str]:
    """Return the tags that a subscription lets through; none: all."""
    if subscription.expression.strip() == "*":
        return []
    return sorted({tag.strip() for tag in subscription.expression.split("||") if tag.strip()})


def _filter(subscription: Subscription) -> frozenset[str]:
    if subscription.type == "Tag":
        return frozenset(tags_of(subscription))
    return frozenset({f"SQL92: {' '.join(subscription.expression.split())}"})


def differences(group: ConsumerSettings, other: ConsumerSettings) -> list[str]:
    """Return how another consumer's settings differ from the group's; what is not known is no difference."""
    found = [*_topic_differences(group.filters, other.filters), *_filter_differences(group, other)]
    if other.model and other.model != group.model:
        found.append(f"its message model is {other.model}")
    if other.start and other.start != group.start:
        found.append(f"it starts from {other.start}")
    return found


def _topic_differences(ours: Collection[str], theirs: Collection[str]) -> Iterator[str]:
    if missing := sorted({*ours}.difference(theirs)):
        yield f"it does not read {listed(missing)}"
    if added := sorted({*theirs}.difference(ours)):
        yield f"it also reads {plain(listed(added), MAX_TEXT)}"


def _filter_differences(group: ConsumerSettings, other: ConsumerSettings) -> Iterator[str]:
    ours, theirs = group.filters, other.filters
    for subscription in other.subscriptions:
        topic = subscription.topic
        if topic in ours and ours[topic] != theirs[topic]:
            yield f"its filter of {topic} is {plain(subscription.expression, MAX_TEXT)}"


def mismatches(group: GroupSpec | None, unmanaged: Mapping[str, ConsumerSettings]) -> list[Verdict]:
    """Return the problem of unmanaged consumers, by client id, whose settings differ from the group's."""
    if group is None:
        return []
    found = {name: differences(settings_of(group), unmanaged[name]) for name in sorted(unmanaged)}
    sentences = [f"{plain(name, MAX_TEXT)}: {', '.join(different)}" for name, different in found.items() if different]
    if not sentences:
        return []
    more = len(sentences) - MAX_CONSUMERS
    message = "; ".join(sentences[:MAX_CONSUMERS]) + (f"; and {more} more" if more > 0 else "")
    told = f"Unmanaged consumers have other settings than the group: {message}"
    return [Verdict(Reason.SUBSCRIPTION_MISMATCH, told)]
