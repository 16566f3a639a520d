"""A group's lag by topic: the sum over its queues, and whether it is only an estimate."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from rota.kube.brokers.lag.lag_history import UNKNOWN_QUEUE_LAG, QueueLag
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
    estimate: bool  # upper bound: a filter skips messages, or (Broadcasting) members reported before the ends were read


def group_lag_by_topic(group: Group, broker: BrokerState, lag: GroupLag) -> dict[str, TopicLag]:
    """Return the group's lag by topic; while its spec is invalid, by the last valid one."""
    return lag_by_topic(
        group.last_valid_spec,
        broker,
        lag,
        RETRY_TOPIC_PREFIX + group.consumer_group,
        group.stored_assignment.brokers_by_topic,
    )


def lag_by_topic(
    spec: GroupSpec | None,
    broker: BrokerState,
    lag: GroupLag,
    retry_topic: str,
    stored_brokers: Mapping[str, Collection[str]],
) -> dict[str, TopicLag]:
    """Return the lag by topic; if the lag on one queue is unknown, so is its topic's.

    It is unknown, too, for a while after a broker has left the route, and as long as the stored assignment still has
    queues there (`stored_brokers`, by topic): a sum without them would be too small.
    """
    subscriptions = spec.subscriptions if spec else ()
    is_broadcasting = spec is not None and spec.message_model == "Broadcasting"
    estimates = {subscription.topic for subscription in subscriptions if is_broadcasting or _has_filter(subscription)}
    lags: dict[str, TopicLag] = {}
    for topic, view in broker.views.items():
        queues = view.queues if view else ()
        if topic == retry_topic and not queues:
            continue  # no message has failed yet
        states = [lag.queues.get(queue, UNKNOWN_QUEUE_LAG) for queue in queues]
        left_brokers = {*stored_brokers.get(topic, ())} - {queue.broker for queue in queues}
        if topic in lag.incomplete_topics or left_brokers:
            states.append(UNKNOWN_QUEUE_LAG)
        kind: TopicKind = "Retry" if topic == retry_topic else "Subscribed"
        topic_lag = _sum(state.lag for state in states) if queues else None
        lags[topic] = TopicLag(kind, queues, topic_lag, _max_queue_delay(states), topic in estimates)
    return lags


def total_lag(topics: Mapping[str, TopicLag], kind: TopicKind) -> int | None:
    """Return the total lag of all topics of a kind; None unless each is known."""
    of_kind = [topic.lag for topic in topics.values() if topic.kind == kind]
    return _sum(of_kind) if of_kind else None


def max_delay(topics: Mapping[str, TopicLag]) -> float | None:
    """Return for how long the oldest unconsumed message of subscribed topics has waited; None if not known."""
    delays = [topic.delay for topic in topics.values() if topic.kind == "Subscribed"]
    known = [delay for delay in delays if delay is not None]
    return max(known, default=None) if len(known) == len(delays) else None


def count_lag_states(topics: Mapping[str, TopicLag], lag: GroupLag) -> Counter[str]:
    """Count the group's queues by lag state, where it is known."""
    states = (lag.queues.get(queue, UNKNOWN_QUEUE_LAG).lag_state for topic in topics.values() for queue in topic.queues)
    return Counter(str(state) for state in states if state)


def round_lag(lag: int | None) -> int | None:
    """Round a lag for the status: an exact figure changes, and would be written, all the time."""
    return lag if lag is None else int(float(f"{lag:.1e}"))


def status_lag(group: Group, broker: BrokerState, lag: GroupLag) -> int | None:
    """Return the lag for the status; before the first poll, return the published value."""
    if lag.sampled_at is None:
        written: int | None = group.latest_status.get("lag")
        return written
    return round_lag(total_lag(group_lag_by_topic(group, broker, lag), "Subscribed"))


def _sum(lags: Iterable[int | None]) -> int | None:
    values = list(lags)
    return None if None in values else sum(lag for lag in values if lag is not None)


def _max_queue_delay(states: list[QueueLag]) -> float | None:
    if not states or any(state.delay is None for state in states):
        return None
    return max(state.delay or 0.0 for state in states)


def _has_filter(subscription: Subscription) -> bool:
    return subscription.type != "Tag" or subscription.expression.strip() != "*"
