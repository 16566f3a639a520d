"""A group's lag, topic by topic: what its queues come to, and what of that is only an estimate."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from rota.kube.brokers.lag.lag_history import NOTHING, Judged
from rota.kube.brokers.lag.lag_poller import Lag
from rota.kube.state.broker_state import AtBroker
from rota.kube.state.group import Group
from rota.model import RETRY, Queue, TopicKind
from rota.spec import GroupSpec, Subscription


class TopicLag(NamedTuple):
    """How far a group is behind on a topic; None: not known."""

    kind: TopicKind
    queues: tuple[Queue, ...]
    lag: int | None
    delay: float | None
    estimate: bool  # it is at most that: a filter passes over some, or members were asked before the queues' ends


def of_group(group: Group, broker: AtBroker, lag: Lag) -> dict[str, TopicLag]:
    """Add up what is known; while its spec cannot be understood, by the last one that could."""
    return by_topic(group.good, broker, lag, RETRY + group.at_broker, group.record.brokers)


def by_topic(
    spec: GroupSpec | None, broker: AtBroker, lag: Lag, retries: str, recorded: Mapping[str, Collection[str]]
) -> dict[str, TopicLag]:
    """Add up what is known; where one queue is not known, neither is its topic.

    A broker that has left a topic's route is not known either: until it has been away for a while, and its queues have
    left the record (`recorded`: the brokers of each topic in it), a sum of the others would be too small.
    """
    subscriptions = spec.subscriptions if spec else ()
    everyones = spec is not None and spec.message_model == "Broadcasting"
    estimates = {it.topic for it in subscriptions if everyones or _filters(it)}
    found: dict[str, TopicLag] = {}
    for topic, view in broker.views.items():
        queues = view.queues if view else ()
        if topic == retries and not queues:
            continue  # nothing was ever to be tried again
        each = [lag.queues.get(queue, NOTHING) for queue in queues]
        if topic in lag.missing or {*recorded.get(topic, ())} - {queue.broker for queue in queues}:
            each.append(NOTHING)
        kind: TopicKind = "Retry" if topic == retries else "Subscribed"
        behind = _sum(it.lag for it in each) if queues else None
        found[topic] = TopicLag(kind, queues, behind, _longest(each), topic in estimates)
    return found


def total(topics: Mapping[str, TopicLag], kind: TopicKind) -> int | None:
    """Return the lag of all topics of a kind, if that of each is known."""
    of_kind = [it.lag for it in topics.values() if it.kind == kind]
    return _sum(of_kind) if of_kind else None


def delay(topics: Mapping[str, TopicLag]) -> float | None:
    """Return for how long the oldest message has waited that is left of what is subscribed to."""
    found = [it.delay for it in topics.values() if it.kind == "Subscribed"]
    return max((it for it in found if it is not None), default=None) if None not in found else None


def verdicts(topics: Mapping[str, TopicLag], lag: Lag) -> Counter[str]:
    """Count the group's queues by what their history says, as far as it says anything."""
    there = (lag.queues.get(queue, NOTHING).verdict for topic in topics.values() for queue in topic.queues)
    return Counter(str(verdict) for verdict in there if verdict)


def two_digits(lag: int | None) -> int | None:
    """Round what people read in a list: a figure that changes all the time would be written all the time."""
    return lag if lag is None else int(float(f"{lag:.1e}"))


def told(group: Group, broker: AtBroker, lag: Lag) -> int | None:
    """Return the lag that the status is to have; who has not looked yet leaves it as it is."""
    if lag.at is None:
        written: int | None = group.status.get("lag")
        return written
    return two_digits(total(of_group(group, broker, lag), "Subscribed"))


def _sum(lags: Iterable[int | None]) -> int | None:
    known = list(lags)
    return None if None in known else sum(it for it in known if it is not None)


def _longest(each: list[Judged]) -> float | None:
    if not each or any(it.delay is None for it in each):
        return None
    return max(it.delay or 0.0 for it in each)


def _filters(it: Subscription) -> bool:
    return it.type != "Tag" or it.expression.strip() != "*"
