"""A group's lag by topic: the sum over its queues, and whether it is only an estimate."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.model import RETRY_TOPIC_PREFIX, Queue, TopicKind
from rota.spec import GroupSpec, Subscription


class TopicLag(NamedTuple):
    """A group's lag on a topic; None: not known."""

    kind: TopicKind
    queues: tuple[Queue, ...]
    lag: int | None
    delay: float | None
    # Whether the lag is only an upper bound: a filter skips messages, or, in a Broadcasting group, the members reported
    # their offsets some time before the broker was asked for the ends of the queues.
    estimate: bool


def group_lag_by_topic(group: Group, broker: BrokerState, lag: GroupLag) -> dict[str, TopicLag]:
    """Return the group's lag by topic; while its spec is invalid, by the last valid one."""
    retry_topic = RETRY_TOPIC_PREFIX + group.consumer_group
    return lag_by_topic(group.last_valid_spec, broker, lag, retry_topic, group.stored_assignment.brokers_by_topic)


def lag_by_topic(
    spec: GroupSpec | None,
    broker: BrokerState,
    lag: GroupLag,
    retry_topic: str,
    stored_brokers: Mapping[str, Collection[str]],
) -> dict[str, TopicLag]:
    """Return the lag by topic.

    A topic's lag is unknown, because the sum would be too small, in these cases:

    - the lag on one of its queues is unknown;
    - a broker has just left its route (`GroupLag.incomplete_topics`);
    - the stored assignment has queues on a broker that is not in its route (`stored_brokers`, by topic).
    """
    estimated_topics = _estimated_topics(spec) if spec else set()
    lags: dict[str, TopicLag] = {}
    for topic, view in broker.views.items():
        queues = view.queues if view else ()
        if topic == retry_topic and not queues:
            continue  # no message has failed yet
        queue_lags = [*map(lag.queue_lag, queues)]
        left_brokers = {*stored_brokers.get(topic, ())} - {queue.broker for queue in queues}
        if topic in lag.incomplete_topics or left_brokers:
            queue_lags.append(UNKNOWN_QUEUE_LAG)  # stands for the missing queues: the sum becomes unknown
        kind: TopicKind = "Retry" if topic == retry_topic else "Subscribed"
        total = _sum([queue_lag.lag for queue_lag in queue_lags]) if queues else None
        delay = _max([queue_lag.delay for queue_lag in queue_lags])
        lags[topic] = TopicLag(kind, queues, total, delay, topic in estimated_topics)
    return lags


def total_lag(topics: Mapping[str, TopicLag], kind: TopicKind) -> int | None:
    """Return the total lag of all topics of a kind; None if a topic's lag is unknown, or there is no such topic."""
    lags = [topic.lag for topic in topics.values() if topic.kind == kind]
    return _sum(lags) if lags else None


def max_delay(topics: Mapping[str, TopicLag]) -> float | None:
    """Return for how long the oldest unconsumed message of subscribed topics has waited; None if not known."""
    return _max([topic.delay for topic in topics.values() if topic.kind == "Subscribed"])


def count_lag_states(topics: Mapping[str, TopicLag], lag: GroupLag) -> Counter[str]:
    """Count the group's queues by lag state, where it is known."""
    counts = Counter[str]()
    for topic in topics.values():
        states = [lag.queue_lag(queue).lag_state for queue in topic.queues]
        counts.update(map(str, filter(None, states)))
    return counts


def round_lag(lag: int | None) -> int | None:
    """Round a lag to two digits for the status: an exact number would change, and be written, with every poll."""
    return lag if lag is None else int(float(f"{lag:.1e}"))


def status_lag(group: Group, broker: BrokerState, lag: GroupLag) -> int | None:
    """Return the lag for the status; before the first poll, return the published value."""
    if lag.sampled_at is None:
        written: int | None = group.latest_status.get("lag")
        return written
    return round_lag(total_lag(group_lag_by_topic(group, broker, lag), "Subscribed"))


def _estimated_topics(spec: GroupSpec) -> set[str]:
    """Return the topics on which the lag is only an upper bound (see `TopicLag.estimate`)."""
    is_broadcasting = spec.message_model == "Broadcasting"
    estimated = spec.subscriptions if is_broadcasting else filter(_has_filter, spec.subscriptions)
    return {subscription.topic for subscription in estimated}


def _has_filter(subscription: Subscription) -> bool:
    return subscription.type != "Tag" or subscription.expression.strip() != "*"


def _sum(lags: Sequence[int | None]) -> int | None:
    """Return the sum; None if a lag is unknown."""
    return None if None in lags else sum(filter(None, lags))


def _max(delays: Sequence[float | None]) -> float | None:
    """Return the longest delay; None if there is none, or one is unknown."""
    return None if not delays or None in delays else max(filter(None, delays), default=0.0)
