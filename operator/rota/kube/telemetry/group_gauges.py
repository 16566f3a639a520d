"""What is looked up of each group at a scrape: gauges, and counters that something else counts."""

from collections import Counter as Tallied
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rota.kube.brokers.lag import lag_totals
from rota.kube.brokers.lag.lag_poller import Lag
from rota.kube.client.objects import Key
from rota.kube.state.broker_state import AtBroker
from rota.kube.state.group import Group
from rota.kube.telemetry.delivery_metrics import DELIVERY_METRICS, DeliveryLook
from rota.kube.telemetry.rebalances import Tally
from rota.lag import Judgement
from rota.metrics import Labels, LookedUp, Metric
from rota.model import Queue

OF_GROUP = ("namespace", "group")


class Fact(NamedTuple):
    """One group as it is now."""

    group: Group
    tally: Tally
    broker: AtBroker
    lag: Lag
    under_way: float = 0.0  # seconds since the oldest handover on record was begun, whoever led then
    uncommitted: int = 0  # messages that apps were given and whose offsets are not committed

    @property
    def status(self) -> Mapping[str, Any]:
        """What the last plan said."""
        return self.tally.plan.status


@dataclass(frozen=True)
class _Scrape:
    """A group, and what several metrics need of it."""

    labels: Labels
    fact: Fact
    topics: Mapping[str, lag_totals.TopicLag]
    owners: Mapping[Queue, str]
    now: float


Look = Callable[[_Scrape], Iterator[tuple[Labels, float | None]]]


def group_gauges(facts: Sequence[tuple[Key, Fact]], now: float, *, queues: bool) -> Iterator[LookedUp]:
    """Yield the metrics of some groups; `queues`: also those of each queue."""
    scraped = [
        _Scrape(key, fact, lag_totals.of_group(fact.group, fact.broker, fact.lag), fact.group.record.owners, now)
        for key, fact in facts
    ]
    for name, text, labels, read in GAUGES:
        if queues or name != "rota_queue_lag":
            metric = Metric(name, text, (*OF_GROUP, *labels), "counter" if name.endswith("_total") else "gauge")
            yield LookedUp(metric, partial(_looked_up, scraped, read))


def _looked_up(scraped: Sequence[_Scrape], read: Look) -> dict[Labels, float]:
    return {(*it.labels, *labels): value for it in scraped for labels, value in read(it) if value is not None}


def _status(field: str) -> Look:
    def read(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        yield (), it.fact.status.get(field)

    return read


def _tallied(read: Callable[[Tally], float]) -> Look:
    def found(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        yield (), read(it.fact.tally)

    return found


def _oldest(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield (), max(it.fact.tally.oldest(it.now), it.fact.under_way)


def _members(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    if it.fact.status:  # else nothing was decided yet
        found = Tallied({"Ready": 0})
        found.update(map(str, it.fact.tally.plan.standings.values()))
        yield from (((state,), count) for state, count in found.items())
    if it.fact.broker.foreigners is not None:
        yield ("Foreign",), len(it.fact.broker.foreigners)


def _releasing(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    document = it.fact.group.record.document
    yield (), len(document.releasing) if document else 0


def _uncommitted(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield (), it.fact.uncommitted


def _imbalance(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    """The most that one member has, over what each would have if all had the same."""
    counted = [name for name, standing in it.fact.tally.plan.standings.items() if standing in {"Ready", "Unready"}]
    shares, rates = dict.fromkeys(counted, 0.0), dict.fromkeys(counted, 0.0)
    measured = True
    for queue, owner in it.owners.items():
        if owner in shares:
            judged = it.fact.lag.queues.get(queue)
            measured &= judged is not None and judged.rate is not None
            shares[owner] += 1
            rates[owner] += (judged.rate or 0.0) if judged else 0.0
    for by, found in (("queues", shares), ("rate", rates if measured else {})):
        whole = sum(found.values())
        yield (by,), max(found.values()) * len(found) / whole if whole else None


def _queue_lags(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    for topic in it.topics.values():
        for queue in topic.queues:
            if judged := it.fact.lag.queues.get(queue):
                yield (queue.topic, queue.broker, str(queue.id), it.owners.get(queue, "")), judged.lag


def _topic(field: str) -> Look:
    def read(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        for topic, lag in it.topics.items():
            yield (topic,), getattr(lag, field)

    return read


def _verdicts(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    known = lag_totals.verdicts(it.topics, it.fact.lag)
    yield from (((str(verdict),), known[verdict]) for verdict in Judgement if known)


def _dead(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield (), it.fact.lag.dead


def _of_deliveries(read: DeliveryLook) -> Look:
    def found(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
        yield from read(it.fact.group.deliveries, it.now)

    return found


def _lag_age(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield (), None if it.fact.lag.asked is None else it.now - it.fact.lag.asked


def _conditions(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    for condition in it.fact.status.get("conditions") or ():
        if condition["type"] in {"Ready", "Progressing", "Degraded"}:
            yield (condition["type"],), float(condition["status"] == "True")


def _problems(it: _Scrape) -> Iterator[tuple[Labels, float | None]]:
    yield from (((str(verdict.reason),), 1) for verdict in it.fact.tally.plan.problems)


GAUGES: tuple[tuple[str, str, Labels, Look], ...] = (
    ("rota_generation", "The generation of the group's document.", (), _status("generation")),
    ("rota_members", "Members by state; Foreign: consumers that are not Rota's.", ("state",), _members),
    ("rota_idle_members", "Members that own no queue.", (), _status("idleMembers")),
    ("rota_queues", "Queues that the group works.", (), _status("queues")),
    ("rota_unowned_queues", "Queues that nobody works.", (), _status("unownedQueues")),
    ("rota_releasing_queues", "Queues that were taken from a member and given to nobody yet.", (), _releasing),
    (
        "rota_handover_age_seconds",
        "For how long the oldest handover has been under way; 0: there is none.",
        (),
        _oldest,
    ),
    (
        "rota_queue_unowned_seconds_total",
        "Queue-seconds for which nobody worked a queue.",
        (),
        _tallied(lambda it: it.unowned),
    ),
    (
        "rota_queue_contested_seconds_total",
        "Queue-seconds for which two members may have worked a queue, after a forced grant.",
        (),
        _tallied(lambda it: it.contested),
    ),
    (
        "rota_uncommitted_messages",
        "Messages that apps were given and whose offsets are not committed, as members last said: crashes repeat them.",
        (),
        _uncommitted,
    ),
    (
        "rota_imbalance_ratio",
        "What the most loaded member has over what each would have if all had the same, by queues or by their rate.",
        ("by",),
        _imbalance,
    ),
    (
        "rota_queue_lag",
        "Messages by which the group is behind on a queue; absent where that is not known.",
        ("topic", "broker", "queue", "member"),
        _queue_lags,
    ),
    (
        "rota_group_lag",
        "Messages by which the group is behind on a topic; absent where that is not known.",
        ("topic",),
        _topic("lag"),
    ),
    (
        "rota_group_lag_estimated",
        "1 where lag is an upper bound: a filter passes over some of it, or the group is Broadcasting.",
        ("topic",),
        _topic("estimate"),
    ),
    (
        "rota_group_delay_seconds",
        "For how long the oldest message of a topic has waited; absent where that is not known.",
        ("topic",),
        _topic("delay"),
    ),
    ("rota_queue_verdict", "Queues by what their history says of them.", ("verdict",), _verdicts),
    ("rota_dead_letters", "Messages in the group's dead-letter topic.", (), _dead),
    (
        "rota_lag_age_seconds",
        "Seconds since brokers last told how far the group is; of one that never did, since it was first asked.",
        (),
        _lag_age,
    ),
    *((name, told, labels, _of_deliveries(read)) for name, told, labels, read in DELIVERY_METRICS),
    ("rota_group_condition", "Whether a condition holds: 1 or 0.", ("condition",), _conditions),
    ("rota_group_problem", "1 for everything that is wrong now, by its reason.", ("reason",), _problems),
)
