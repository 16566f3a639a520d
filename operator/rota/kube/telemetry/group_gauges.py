"""Per-group metrics that are computed at each scrape: gauges, and counters whose totals other modules keep."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

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
QUEUE_LAG_METRIC = "rota_queue_lag"  # has one series per queue, so users can turn it off


class GroupFacts(NamedTuple):
    """The present state of one group, as `ReadModel.facts_of` collects it for metrics and page."""

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

    @classmethod
    def from_facts(cls, key: ObjectKey, facts: GroupFacts, now: float) -> Self:
        topics = lag_totals.group_lag_by_topic(facts.group, facts.broker, facts.lag)
        return cls(key, facts, topics, facts.group.stored_assignment.owners, now)


Samples = Iterator[tuple[Labels, float | None]]  # label values, and the value; None: unknown, so the sample is omitted
SampleReader = Callable[[_Scrape], Samples]


class GroupMetric(NamedTuple):
    """A metric of groups: a counter if its name ends in `_total`; `labels` are those in addition to GROUP_LABELS."""

    name: str
    text: str
    read: SampleReader
    labels: Labels = ()


def group_gauges(
    facts: Sequence[tuple[ObjectKey, GroupFacts]], now: float, *, with_queues: bool
) -> Iterator[ComputedMetric]:
    """Yield the metrics of these groups; with `with_queues`, also the metric that has one series per queue."""
    scraped = [_Scrape.from_facts(key, group_facts, now) for key, group_facts in facts]
    for name, text, read, labels in GAUGES:
        if with_queues or name != QUEUE_LAG_METRIC:
            metric = Metric(name, text, (*GROUP_LABELS, *labels), "counter" if name.endswith("_total") else "gauge")
            yield ComputedMetric(metric, partial(_collect, scraped, read))


def _collect(scraped: Sequence[_Scrape], read: SampleReader) -> dict[Labels, float]:
    values: dict[Labels, float] = {}
    for scrape in scraped:
        for labels, value in read(scrape):
            if value is not None:
                values[*scrape.labels, *labels] = value
    return values


def _single_reader(read_value: Callable[[_Scrape], float | None]) -> SampleReader:
    """Return a reader of one sample per group, without further labels."""

    def read(scrape: _Scrape) -> Samples:
        yield (), read_value(scrape)

    return read


def _status_reader(field: str) -> SampleReader:
    return _single_reader(lambda scrape: scrape.facts.status.get(field))


def _tracker_reader(field: str) -> SampleReader:
    return _single_reader(lambda scrape: getattr(scrape.facts.tracker, field))


def _handover_age(scrape: _Scrape) -> float:
    # The tracker counts handovers until the new owner obeys the grant; the facts have those of an earlier leader, too.
    return max(scrape.facts.tracker.oldest_handover_seconds(scrape.now), scrape.facts.oldest_handover_seconds)


def _members(scrape: _Scrape) -> Samples:
    if scrape.facts.status:  # empty before the group's first plan
        members = Counter({"Ready": 0})  # the only state that is reported without a member
        members.update(map(str, scrape.facts.tracker.last_plan.member_states.values()))
        for state, count in members.items():
            yield (state,), count
    if scrape.facts.broker.unmanaged_ids is not None:
        yield ("Foreign",), len(scrape.facts.broker.unmanaged_ids)  # unmanaged; names in metrics do not change


def _releasing_count(scrape: _Scrape) -> int:
    document = scrape.facts.group.stored_assignment.document
    return len(document.releasing) if document else 0


def _imbalance_ratio(scrape: _Scrape) -> Samples:
    """Yield the load of the most loaded member divided by the mean load, in queues and in message rate."""
    states = scrape.facts.tracker.last_plan.member_states
    members = [name for name, state in states.items() if state in {"Ready", "Unready"}]
    shares = dict.fromkeys(members, 0.0)
    rates = dict.fromkeys(members, 0.0)
    has_rates = True
    for queue, owner in scrape.owners.items():
        if owner in shares:
            rate = scrape.facts.lag.queue_lag(queue).incoming_rate
            has_rates = has_rates and rate is not None
            shares[owner] += 1
            rates[owner] += rate or 0.0
    yield ("queues",), _ratio_to_mean(shares.values())
    yield ("rate",), _ratio_to_mean(rates.values()) if has_rates else None


def _ratio_to_mean(loads: Collection[float]) -> float | None:
    """Return the highest load divided by the mean; None without any load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else None


def _queue_lags(scrape: _Scrape) -> Samples:
    for topic in scrape.topics.values():
        for queue in topic.queues:
            if queue_lag := scrape.facts.lag.queues.get(queue):
                yield (queue.topic, queue.broker, str(queue.id), scrape.owners.get(queue, "")), queue_lag.lag


def _topic_reader(field: str) -> SampleReader:
    def read(scrape: _Scrape) -> Samples:
        for topic, lag in scrape.topics.items():
            yield (topic,), getattr(lag, field)

    return read


def _lag_states(scrape: _Scrape) -> Samples:
    if counts := lag_totals.count_lag_states(scrape.topics, scrape.facts.lag):
        for state in LagState:
            yield (str(state),), counts[state]


def _with_deliveries(read: DeliveryReader) -> SampleReader:
    """Return a reader that passes the group's deliveries to `read`."""
    return lambda scrape: read(scrape.facts.group.deliveries, scrape.now)


def _lag_age(scrape: _Scrape) -> float | None:
    return None if scrape.facts.lag.requested_at is None else scrape.now - scrape.facts.lag.requested_at


def _certificate_reader(field: str) -> SampleReader:
    # Without a certificate, the validity is None and has no such field: no sample.
    return _single_reader(lambda scrape: getattr(scrape.facts.broker.client_validity, field, None))


def _conditions(scrape: _Scrape) -> Samples:
    for condition in scrape.facts.status.get("conditions") or ():
        if condition["type"] in {"Ready", "Progressing", "Degraded"}:
            yield (condition["type"],), float(condition["status"] == "True")


def _problems(scrape: _Scrape) -> Samples:
    for finding in scrape.facts.tracker.last_plan.problems:
        yield (str(finding.reason),), 1


GAUGES: tuple[GroupMetric, ...] = (
    GroupMetric("rota_generation", "Generation of the group's assignment.", _status_reader("generation")),
    GroupMetric("rota_members", "Members by state; Foreign: unmanaged consumers.", _members, ("state",)),
    GroupMetric("rota_idle_members", "Members that own no queue.", _status_reader("idleMembers")),
    GroupMetric("rota_queues", "Queues that the group consumes.", _status_reader("queues")),
    GroupMetric("rota_unowned_queues", "Queues without an owner.", _status_reader("unownedQueues")),
    GroupMetric(
        "rota_releasing_queues", "Queues that were revoked and are not granted yet.", _single_reader(_releasing_count)
    ),
    GroupMetric(
        "rota_handover_age_seconds",
        "Age of the oldest handover in progress in seconds; 0 without one.",
        _single_reader(_handover_age),
    ),
    GroupMetric(
        "rota_queue_unowned_seconds_total", "Queue-seconds without an owner.", _tracker_reader("unowned_seconds")
    ),
    GroupMetric(
        "rota_queue_contested_seconds_total",
        "Queue-seconds in which two members may have consumed a queue, after a forced grant.",
        _tracker_reader("contested_seconds"),
    ),
    GroupMetric(
        "rota_uncommitted_messages",
        "Delivered messages with uncommitted offsets, as last reported by members: a crash repeats their delivery.",
        _single_reader(lambda scrape: scrape.facts.uncommitted_messages),
    ),
    GroupMetric(
        "rota_imbalance_ratio",
        "Load of the most loaded member divided by the mean load, in queues or in message rate.",
        _imbalance_ratio,
        ("by",),
    ),
    GroupMetric(
        QUEUE_LAG_METRIC,
        "Lag of the group on a queue, in messages; absent if unknown.",
        _queue_lags,
        ("topic", "broker", "queue", "member"),
    ),
    GroupMetric(
        "rota_group_lag",
        "Lag of the group on a topic, in messages; absent if unknown.",
        _topic_reader("lag"),
        ("topic",),
    ),
    GroupMetric(
        "rota_group_lag_estimated",
        "1 if the lag is an upper bound: a filter skips some of the messages, or the group is Broadcasting.",
        _topic_reader("estimate"),
        ("topic",),
    ),
    GroupMetric(
        "rota_group_delay_seconds",
        "Seconds for which the oldest unconsumed message of a topic has waited; absent if unknown.",
        _topic_reader("delay"),
        ("topic",),
    ),
    GroupMetric("rota_queues_by_lag_state", "Queues by lag state.", _lag_states, ("lag_state",)),
    GroupMetric(
        "rota_dead_letters",
        "Messages in the group's dead-letter topic.",
        _single_reader(lambda scrape: scrape.facts.lag.dead_letters),
    ),
    GroupMetric(
        "rota_lag_age_seconds",
        "Seconds since brokers last returned the group's offsets; if they never did, since the first request.",
        _single_reader(_lag_age),
    ),
    *(GroupMetric(name, text, _with_deliveries(read), labels) for name, text, read, labels in DELIVERY_METRICS),
    GroupMetric(
        "rota_group_client_certificate_expiration_timestamp_seconds",
        "When the certificate expires that the operator presents to the group's brokers (tls.clientSecret).",
        _certificate_reader("not_after"),
    ),
    GroupMetric(
        "rota_group_client_certificate_not_before_timestamp_seconds",
        "Since when that certificate is valid.",
        _certificate_reader("not_before"),
    ),
    GroupMetric("rota_group_condition", "Whether a condition is True: 1 or 0.", _conditions, ("condition",)),
    GroupMetric("rota_group_problem", "1 for each present problem, by its reason.", _problems, ("reason",)),
)
