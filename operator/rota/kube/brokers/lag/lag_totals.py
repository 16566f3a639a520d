"""A group's lag by topic: the sum over its queues, and whether it is only an estimate."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from rota.kube.brokers.lag.lag_history import NOTHING, QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.model import RETRY, Queue, TopicKind
from rota.spec import GroupSpec, Subscription


class TopicLag(NamedTuple):
    """A group's lag on a topic; None: not known."""

    kind: TopicKind
    queues: tuple[Queue, ...]
    lag: int | None
    delay: float | None
    estimate: bool  # upper bound: a filter skips messages, or members reported before the ends were read


def of_group(group: Group, broker: BrokerState, lag: GroupLag) -> dict[str, TopicLag]:
    """Return the group's lag by topic; while its spec is invalid, by the last valid one."""
    return by_topic(group.good, broker, lag, RETRY + group.at_broker, group.record.brokers)


def by_topic(
    spec: GroupSpec | None, broker: BrokerState, lag: GroupLag, retries: str, recorded: Mapping[str, Collection[str]]
) -> dict[str, TopicLag]:
    """Return the lag by topic; if the lag on one queue is unknown, so is its topic's.

    The lag at a broker that has left a topic's route is unknown, too: until it has been away for a while, and its
    queues have left the stored assignment (`recorded`: its brokers by topic), a sum of the others would be too small.
    """
    subscriptions = spec.subscriptions if spec else ()
    is_broadcasting = spec is not None and spec.message_model == "Broadcasting"
    estimates = {subscription.topic for subscription in subscriptions if is_broadcasting or _filters(subscription)}
    lags: dict[str, TopicLag] = {}
    for topic, view in broker.views.items():
        queues = view.queues if view else ()
        if topic == retries and not queues:
            continue  # no message was ever sent back
        states = [lag.queues.get(queue, NOTHING) for queue in queues]
        if topic in lag.missing or {*recorded.get(topic, ())} - {queue.broker for queue in queues}:
            states.append(NOTHING)
        kind: TopicKind = "Retry" if topic == retries else "Subscribed"
        behind = _sum(state.lag for state in states) if queues else None
        lags[topic] = TopicLag(kind, queues, behind, _longest(states), topic in estimates)
    return lags


def total(topics: Mapping[str, TopicLag], kind: TopicKind) -> int | None:
    """Return the total lag of all topics of a kind; None unless each is known."""
    of_kind = [topic.lag for topic in topics.values() if topic.kind == kind]
    return _sum(of_kind) if of_kind else None


def delay(topics: Mapping[str, TopicLag]) -> float | None:
    """Return for how long the oldest unconsumed message of subscribed topics has waited; None if not known."""
    delays = [topic.delay for topic in topics.values() if topic.kind == "Subscribed"]
    return max((wait for wait in delays if wait is not None), default=None) if None not in delays else None


def verdicts(topics: Mapping[str, TopicLag], lag: GroupLag) -> Counter[str]:
    """Count the group's queues by lag state, where it is known."""
    states = (lag.queues.get(queue, NOTHING).verdict for topic in topics.values() for queue in topic.queues)
    return Counter(str(verdict) for verdict in states if verdict)


def round_lag(lag: int | None) -> int | None:
    """Round a lag for the status: an exact figure changes, and would be written, all the time."""
    return lag if lag is None else int(float(f"{lag:.1e}"))


def status_lag(group: Group, broker: BrokerState, lag: GroupLag) -> int | None:
    """Return the lag for the status; before the first poll, return the published value."""
    if lag.at is None:
        written: int | None = group.status.get("lag")
        return written
    return round_lag(total(of_group(group, broker, lag), "Subscribed"))


def _sum(lags: Iterable[int | None]) -> int | None:
    values = list(lags)
    return None if None in values else sum(lag for lag in values if lag is not None)


def _longest(states: list[QueueLag]) -> float | None:
    if not states or any(state.delay is None for state in states):
        return None
    return max(state.delay or 0.0 for state in states)


def _filters(subscription: Subscription) -> bool:
    return subscription.type != "Tag" or subscription.expression.strip() != "*"
