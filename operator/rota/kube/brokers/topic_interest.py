"""The part of a group's spec that its brokers are polled for: topics, and the offsets that give its lag."""

from typing import NamedTuple

from rota.model import RETRY_TOPIC_PREFIX
from rota.spec import GroupSpec, StartFrom


class OffsetSource(NamedTuple):
    """Where a group's committed offsets come from: samples of one source are never mixed with those of another."""

    consumer_group: str  # at the broker
    broadcasting: bool  # whether the members report the offsets, because brokers store none of a Broadcasting group


class TopicInterest(NamedTuple):
    """What a group consumes, as `RouteWatcher` (routes, online consumers) and `LagPoller` (lag) need to know it."""

    consumer_group: str  # at the broker
    topics: tuple[str, ...]  # that the group subscribes to
    broadcasting: bool
    start_from: StartFrom = StartFrom()
    needs_weights: bool = False  # whether the policy's strategy needs each queue's incoming rate as its weight

    @property
    def retry_topic(self) -> str:
        """The topic from which rejected messages come again."""
        return RETRY_TOPIC_PREFIX + self.consumer_group

    @property
    def offset_source(self) -> OffsetSource:
        """Where the group's committed offsets come from."""
        return OffsetSource(self.consumer_group, self.broadcasting)

    @property
    def consumed_topics(self) -> tuple[str, ...]:
        """The topics that members consume: the subscribed ones, and the retry topic unless Broadcasting."""
        return self.topics if self.broadcasting else (*self.topics, self.retry_topic)


def interest_of(spec: GroupSpec, name: str, *, needs_weights: bool) -> TopicInterest:
    """Return the interest of the ConsumerGroup with this spec and name."""
    topics = tuple(spec.topics)
    broadcasting = spec.message_model == "Broadcasting"
    return TopicInterest(spec.group or name, topics, broadcasting, spec.start_from, needs_weights=needs_weights)
