"""The settings that every consumer of a group must share, and how an unmanaged consumer's differ from the group's."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from rota.model import RETRY_TOPIC_PREFIX, Finding, Reason, single_line
from rota.sentences import join_names
from rota.spec import GroupSpec, Subscription
from rota.spec.resolved import GroupSettings

Model = Literal["Clustering", "Broadcasting", ""]
Start = Literal["Latest", "Earliest", "Timestamp", ""]
MAX_TEXT_CHARS = 100  # limit for a client id, a filter or a list of topics in a sentence
MAX_LISTED_CONSUMERS = 3  # consumers that a sentence names; the others are counted


class ConsumerSettings(NamedTuple):
    """A consumer's subscriptions, message model and start position; a setting that it does not report is empty."""

    subscriptions: tuple[Subscription, ...]
    message_model: Model = ""
    start_position: Start = ""

    @property
    def filters(self) -> dict[str, frozenset[str]]:
        """Return each topic's filter; equal filters accept the same messages. Retry topics are left out."""
        filters: dict[str, frozenset[str]] = {}
        for subscription in self.subscriptions:
            if not subscription.topic.startswith(RETRY_TOPIC_PREFIX):
                filters[subscription.topic] = _comparable_filter(subscription)
        return filters


def settings_of(group: GroupSpec | GroupSettings) -> ConsumerSettings:
    """Return the settings of a group's own members."""
    return ConsumerSettings(tuple(group.subscriptions), group.message_model, group.start_from.position)


def tags_of(subscription: Subscription) -> list[str]:
    """Return the tags that a subscription accepts; an empty list means all tags."""
    if subscription.expression.strip() == "*":
        return []
    tags = {*map(str.strip, subscription.expression.split("||"))}
    return sorted(tags - {""})


def _comparable_filter(subscription: Subscription) -> frozenset[str]:
    """Return the accepted tags, or an SQL92 expression with a prefix that keeps it apart from a tag."""
    if subscription.type == "Tag":
        return frozenset(tags_of(subscription))
    return frozenset({f"SQL92: {' '.join(subscription.expression.split())}"})


def describe_differences(group: ConsumerSettings, consumer: ConsumerSettings) -> list[str]:
    """Return how another consumer's settings differ from the group's; an unknown setting is no difference."""
    result = [*_topic_differences(group.filters, consumer.filters), *_filter_differences(group, consumer)]
    if consumer.message_model and consumer.message_model != group.message_model:
        result.append(f"its message model is {consumer.message_model}")
    if consumer.start_position and consumer.start_position != group.start_position:
        result.append(f"it starts from {consumer.start_position}")
    return result


def _topic_differences(group_topics: Collection[str], consumer_topics: Collection[str]) -> Iterator[str]:
    if missing := sorted({*group_topics}.difference(consumer_topics)):
        yield f"it does not read {join_names(missing)}"
    if added := sorted({*consumer_topics}.difference(group_topics)):
        yield f"it also reads {single_line(join_names(added), MAX_TEXT_CHARS)}"


def _filter_differences(group: ConsumerSettings, consumer: ConsumerSettings) -> Iterator[str]:
    group_filters = group.filters
    consumer_filters = consumer.filters
    for subscription in consumer.subscriptions:
        topic = subscription.topic
        if topic in group_filters and group_filters[topic] != consumer_filters[topic]:
            yield f"its filter of {topic} is {single_line(subscription.expression, MAX_TEXT_CHARS)}"


def find_mismatches(group: GroupSpec | None, unmanaged: Mapping[str, ConsumerSettings]) -> list[Finding]:
    """Return one problem that lists the unmanaged consumers with other settings than the group, or an empty list.

    `unmanaged` has the settings of each unmanaged consumer, by client id.
    """
    if group is None:
        return []
    sentences: list[str] = []
    for client_id, consumer in sorted(unmanaged.items()):
        differences = describe_differences(settings_of(group), consumer)
        if differences:
            sentences.append(f"{single_line(client_id, MAX_TEXT_CHARS)}: {', '.join(differences)}")
    if not sentences:
        return []
    more = len(sentences) - MAX_LISTED_CONSUMERS
    message = "; ".join(sentences[:MAX_LISTED_CONSUMERS]) + (f"; and {more} more" if more > 0 else "")
    problem = f"Unmanaged consumers have other settings than the group: {message}"
    return [Finding(Reason.SUBSCRIPTION_MISMATCH, problem)]
