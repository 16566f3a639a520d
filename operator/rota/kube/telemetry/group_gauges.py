"""Per-group metrics that are computed at each scrape: gauges, and counters whose totals other modules keep."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rota.kube.brokers.lag import lag_totals
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import ObjectKey
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.telemetry.delivery_metrics import DELIVERY_METRICS, DeliveryReader
from rota.kube.telemetry.rebalances import RebalanceTracker
from rota.lag import LagState
from rota.metrics import ComputedMetric, Labels, Metric
from rota.model import Queue

GROUP_LABELS = ("namespace", "group")


class GroupFacts(NamedTuple):
    """The present state of one group."""

    group: Group
    tracker: RebalanceTracker
    broker: BrokerState
    lag: GroupLag
    # Seconds since the oldest handover in the stored assignment began, under any leader.
    oldest_handover_seconds: float = 0.0
    uncommitted_messages: int = 0  # messages that apps have received and members have not committed yet

    @property
    def status(self) -> Mapping[str, Any]:
        """The group's status as of the last plan."""
        return self.tracker.last_plan.status


@dataclass(frozen=True)
class _Scrape:
    """A group at one scrape, with values that several metrics share."""

    labels: Labels
    facts: GroupFacts
    topics: Mapping[str, lag_totals.TopicLag]
    owners: Mapping[Queue, str]
    now: float


GaugeReader = Callable[[_Scrape], Iterator[tuple[Labels, float | None]]]


def group_gauges(
    facts: Sequence[tuple[ObjectKey, GroupFacts]], now: float, *, with_queues: bool
) -> Iterator[ComputedMetric]:
    """Yield the metrics of these groups; with `with_queues`, also the metric that has one series per queue."""
    scraped = [
        _Scrape(
            key,
            fact,
            lag_totals.group_lag_by_topic(fact.group, fact.broker, fact.lag),
            fact.group.stored_assignment.owners,
            now,
        )
        for key, fact in facts
    ]
    for name, text, labels, read in GAUGES:
        if with_queues or name != "rota_queue_lag":
            metric = Metric(name, text, (*GROUP_LABELS, *labels), "counter" if name.endswith("_total") else "gauge")
            yield ComputedMetric(metric, partial(_collect, scraped, read))


def _collect(scraped: Sequence[_Scrape], read: GaugeReader) -> dict[Labels, float]:
    return {(*group.labels, *labels): value for group in scraped for labels, value in read(group) if value is not None}


def _status_field(field: str) -> GaugeReader:
    def read(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        yield (), scrape.facts.status.get(field)

    return read


def _tracker_total(read: Callable[[RebalanceTracker], float]) -> GaugeReader:
    def sample(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        yield (), read(scrape.facts.tracker)

    return sample


def _handover_age(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield (), max(scrape.facts.tracker.oldest_handover_seconds(scrape.now), scrape.facts.oldest_handover_seconds)


def _members(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    if scrape.facts.status:  # empty before the group's first plan
        members = Counter({"Ready": 0})
        members.update(map(str, scrape.facts.tracker.last_plan.member_states.values()))
        yield from (((state,), count) for state, count in members.items())
    if scrape.facts.broker.unmanaged_ids is not None:
        yield ("Foreign",), len(scrape.facts.broker.unmanaged_ids)


def _releasing(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    document = scrape.facts.group.stored_assignment.document
    yield (), len(document.releasing) if document else 0


def _uncommitted(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield (), scrape.facts.uncommitted_messages


def _imbalance_ratio(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    """Yield the load of the most loaded member divided by the mean load, in queues and in message rate."""
    members = [
        name for name, state in scrape.facts.tracker.last_plan.member_states.items() if state in {"Ready", "Unready"}
    ]
    shares = dict.fromkeys(members, 0.0)
    rates = dict.fromkeys(members, 0.0)
    has_rates = True
    for queue, owner in scrape.owners.items():
        if owner in shares:
            queue_lag = scrape.facts.lag.queues.get(queue)
            has_rates &= queue_lag is not None and queue_lag.incoming_rate is not None
            shares[owner] += 1
            rates[owner] += (queue_lag.incoming_rate or 0.0) if queue_lag else 0.0
    for measure, loads in (("queues", shares), ("rate", rates if has_rates else {})):
        total = sum(loads.values())
        yield (measure,), max(loads.values()) * len(loads) / total if total else None


def _queue_lags(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    for topic in scrape.topics.values():
        for queue in topic.queues:
            if queue_lag := scrape.facts.lag.queues.get(queue):
                yield (queue.topic, queue.broker, str(queue.id), scrape.owners.get(queue, "")), queue_lag.lag


def _topic_field(field: str) -> GaugeReader:
    def read(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        for topic, lag in scrape.topics.items():
            yield (topic,), getattr(lag, field)

    return read


def _lag_states(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    counts = lag_totals.count_lag_states(scrape.topics, scrape.facts.lag)
    yield from (((str(state),), counts[state]) for state in LagState if counts)


def _dead_letters(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield (), scrape.facts.lag.dead_letters


def _of_deliveries(read: DeliveryReader) -> GaugeReader:
    def sample(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        yield from read(scrape.facts.group.deliveries, scrape.now)

    return sample


def _lag_age(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield (), None if scrape.facts.lag.requested_at is None else scrape.now - scrape.facts.lag.requested_at


def _certificate_time(field: str) -> GaugeReader:
    def read(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        yield (), getattr(scrape.facts.broker.client_validity, field, None)

    return read


def _conditions(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    for condition in scrape.facts.status.get("conditions") or ():
        if condition["type"] in {"Ready", "Progressing", "Degraded"}:
            yield (condition["type"],), float(condition["status"] == "True")


def _problems(scrape: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield from (((str(finding.reason),), 1) for finding in scrape.facts.tracker.last_plan.problems)


GAUGES: tuple[tuple[str, str, Labels, GaugeReader], ...] = (
    ("rota_generation", "Generation of the group's assignment.", (), _status_field("generation")),
    ("rota_members", "Members by state; Foreign: unmanaged consumers.", ("state",), _members),
    ("rota_idle_members", "Members that own no queue.", (), _status_field("idleMembers")),
    ("rota_queues", "Queues that the group consumes.", (), _status_field("queues")),
    ("rota_unowned_queues", "Queues without an owner.", (), _status_field("unownedQueues")),
    ("rota_releasing_queues", "Queues that were revoked and are not granted yet.", (), _releasing),
    (
        "rota_handover_age_seconds",
        "Age of the oldest handover in progress in seconds; 0 without one.",
        (),
        _handover_age,
    ),
    (
        "rota_queue_unowned_seconds_total",
        "Queue-seconds without an owner.",
        (),
        _tracker_total(lambda tracker: tracker.unowned_seconds),
    ),
    (
        "rota_queue_contested_seconds_total",
        "Queue-seconds in which two members may have consumed a queue, after a forced grant.",
        (),
        _tracker_total(lambda tracker: tracker.contested_seconds),
    ),
    (
        "rota_uncommitted_messages",
        "Delivered messages with uncommitted offsets, as last reported by members: a crash repeats their delivery.",
        (),
        _uncommitted,
    ),
    (
        "rota_imbalance_ratio",
        "Load of the most loaded member divided by the mean load, in queues or in message rate.",
        ("by",),
        _imbalance_ratio,
    ),
    (
        "rota_queue_lag",
        "Lag of the group on a queue, in messages; absent if unknown.",
        ("topic", "broker", "queue", "member"),
        _queue_lags,
    ),
    (
        "rota_group_lag",
        "Lag of the group on a topic, in messages; absent if unknown.",
        ("topic",),
        _topic_field("lag"),
    ),
    (
        "rota_group_lag_estimated",
        "1 if the lag is an upper bound: a filter skips some of the messages, or the group is Broadcasting.",
        ("topic",),
        _topic_field("estimate"),
    ),
    (
        "rota_group_delay_seconds",
        "Seconds for which the oldest unconsumed message of a topic has waited; absent if unknown.",
        ("topic",),
        _topic_field("delay"),
    ),
    ("rota_queues_by_lag_state", "Queues by lag state.", ("lag_state",), _lag_states),
    ("rota_dead_letters", "Messages in the group's dead-letter topic.", (), _dead_letters),
    (
        "rota_lag_age_seconds",
        "Seconds since brokers last returned the group's offsets; if they never did, since the first request.",
        (),
        _lag_age,
    ),
    *((name, text, labels, _of_deliveries(read)) for name, text, labels, read in DELIVERY_METRICS),
    (
        "rota_group_client_certificate_expiration_timestamp_seconds",
        "When the certificate expires that the operator presents to the group's brokers (tls.clientSecret).",
        (),
        _certificate_time("not_after"),
    ),
    (
        "rota_group_client_certificate_not_before_timestamp_seconds",
        "Since when that certificate is valid.",
        (),
        _certificate_time("not_before"),
    ),
    ("rota_group_condition", "Whether a condition is True: 1 or 0.", ("condition",), _conditions),
    ("rota_group_problem", "1 for each present problem, by its reason.", ("reason",), _problems),
)
