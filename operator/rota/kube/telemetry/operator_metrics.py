"""The operator's metrics: counters are kept, gauges are read from the last plans at each scrape, so none is stale."""

import asyncio
from collections import Counter as Tallied
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from rota.aio import gently
from rota.kube.brokers.lag import lag_totals
from rota.kube.brokers.lag.lag_poller import Lag
from rota.kube.client.objects import Key
from rota.kube.reconcile.reconciler import Done
from rota.kube.state.broker_state import AtBroker
from rota.kube.state.group import Group
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry.delivery_metrics import DELIVERY_METRICS, DeliveryLook
from rota.kube.telemetry.rebalances import News, Tally
from rota.lag import Judgement
from rota.metrics import Format, Labels, LookedUp, Metric, Metrics, SeriesOf
from rota.model import Holder, Queue, Reason, Use, reasons
from rota.redelivery import Cause, Redelivered

OF_GROUP = ("namespace", "group")
LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Known(Protocol):
    """Whom to ask about groups."""

    def fact(self, key: Key) -> "Fact | None":
        """Return what is known of a group now."""

    def keys(self) -> list[Key]:
        """Return all groups."""


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


class Measures:
    """The operator's metrics."""

    def __init__(
        self,
        leads: Callable[[], bool] = lambda: False,
        ages: Callable[[], Mapping[str, float]] = dict,
        lost: Callable[[], int] = lambda: 0,
        *,
        version: str = "",
        queues: bool = True,
        trace_of: Callable[[Key, Rebalance], str] = lambda *_: "",
    ) -> None:
        """Count nothing yet.

        `ages`: seconds since each kind was seen; `lost`: records missing from the journal; `trace_of`: the id of a
        rebalance's trace, empty if it has none.
        """
        self.tallies: dict[Key, Tally] = {}
        self._leads, self._ages, self._trace_of = leads, ages, trace_of
        self._queues = queues
        self._heard: dict[Labels, float] = {}
        self._series: dict[Key, SeriesOf] = {}
        self._metrics = metrics = Metrics()
        self._rebalances = metrics.counter(
            "rota_rebalances_total",
            "Rebalances that are over, by the reason they began for and by outcome: Settled, or Forced where queues"
            " were taken from a member that was not heard.",
            (*OF_GROUP, "reason", "outcome"),
        )
        self._rebalance_seconds = metrics.histogram(
            "rota_rebalance_duration_seconds",
            "From the first document of a rebalance until every member obeys the last one.",
            OF_GROUP,
            LONG,
        )
        self._handover_seconds = metrics.histogram(
            "rota_handover_duration_seconds",
            "From a queue's revoke until its next owner obeys the document that grants it.",
            OF_GROUP,
            LONG,
        )
        self._moved = metrics.counter("rota_queues_moved_total", "Queues that were given to another member.", OF_GROUP)
        self._held = metrics.counter(
            "rota_gate_held_total", "Times that a gate began to hold queues back, by its reason.", (*OF_GROUP, "reason")
        )
        self._redelivered = metrics.counter(
            "rota_redelivered_messages_total",
            "Messages that came again, by cause: handover (a drain timed out), crash or forced, where another process"
            " read their queue, and retry, where the app failed. An upper bound where a filter applies, an estimate for"
            " a member that ended without a word.",
            (*OF_GROUP, "cause"),
        )
        self._plan_seconds = metrics.histogram("rota_plan_duration_seconds", "How long making one plan took.")
        self._writes = metrics.counter("rota_apply_writes_total", "Writes to the API server, by kind.", ("kind",))
        metrics.gauge(
            Metric(
                "rota_watch_age_seconds", "Seconds since the API server last said something about a kind.", ("kind",)
            ),
            lambda: self._heard,
        )
        missing = "Records that are missing in the journal, for its disk is full or too slow."
        metrics.gauge(Metric("rota_journal_lost_total", missing, kind="counter"), lambda: {(): lost()})
        metrics.gauge(Metric("rota_leader", "Whether this operator leads: 1 or 0."), lambda: {(): float(leads())})
        metrics.gauge(Metric("rota_build_info", "Always 1; the version.", ("version",)), lambda: {(version,): 1})

    @property
    def metrics(self) -> list[Metric]:
        """Every metric there is."""
        return [*self._metrics.declared, *(it.metric for it in self._gauges(()))]

    # What happens.

    def take(self, done: Done, now: float) -> News:
        """Count what a round of a group did, and return it."""
        key = (done.group.namespace, done.group.name)
        self._plan_seconds.observe(done.seconds)
        for kind, count in done.writes.items():
            self._writes.labels(kind).inc(count)
        tally = self.tallies.setdefault(key, Tally())
        series = self._series_of(key)
        obeyed = {
            Holder(name, known.pod.metadata.uid): known.heard.report.generation
            for name, known in done.group.pods.items()
            if known.heard
        }
        news = tally.take(done.plan, done.group.record.document, obeyed, now)
        series.counter(self._moved, *key).inc(news.moved)
        for handover in news.handovers:
            if handover.before:
                series.histogram(self._handover_seconds, *key).observe(handover.seconds)
        if news.held:
            series.counter(self._held, *key, str(news.held)).inc()
        if ended := news.ended:
            trace = self._trace_of(key, ended)
            series.counter(self._rebalances, *key, ended.reason, ended.outcome).inc()
            rebalance_seconds = series.histogram(self._rebalance_seconds, *key)
            rebalance_seconds.observe(ended.seconds or 0.0, {"trace_id": trace} if trace else None)
        return news

    def take_redelivered(self, key: Key, redelivered: Sequence[Redelivered]) -> None:
        """Count what came again with queues that were taken over."""
        for entry in redelivered:
            self.count_redelivered(key, entry.cause, entry.messages)

    def count_redelivered(self, key: Key, cause: Cause, messages: int) -> None:
        """Count messages of a group that came again."""
        self._series_of(key).counter(self._redelivered, *key, cause).inc(messages)

    def _series_of(self, key: Key) -> SeriesOf:
        """Return a group's series; all begin with 0: `increase()` misses the first 1 of a series that did not exist."""
        series = self._series.get(key)
        if series is not None:
            return series
        series = self._series[key] = SeriesOf()
        series.counter(self._moved, *key)
        for reason in reasons(Use.CAUSE):
            series.counter(self._rebalances, *key, reason, "Settled")
        series.counter(self._rebalances, *key, Reason.MEMBER_LOST, "Forced")
        for reason in reasons(Use.GATE):
            series.counter(self._held, *key, reason)
        for cause in Cause:
            series.counter(self._redelivered, *key, cause)
        for histogram in (self._rebalance_seconds, self._handover_seconds):
            series.histogram(histogram, *key)
        return series

    def forget(self, known: Callable[[Key], bool]) -> None:
        """Forget groups that do not exist any more, or that another operator reports."""
        self.tallies = {key: it for key, it in self.tallies.items() if known(key)}
        for key in [key for key in self._series if not known(key)]:
            self._series.pop(key).remove()

    # What is so.

    async def text(self, known: Known, style: Format = Format.TEXT) -> bytes:
        """Render everything; a hundred thousand queues take a while, so gently, and then not on the loop."""
        self._heard = {(kind,): age for kind, age in self._ages().items()}
        if not self._leads():
            self.forget(lambda _: False)
            return self._metrics.render(style)
        there = {*known.keys()}
        self.forget(there.__contains__)
        now = asyncio.get_running_loop().time()
        facts = [(key, fact) async for key in gently(sorted(there)) if (fact := known.fact(key))]
        return await asyncio.to_thread(self._render, facts, now, style)

    def _render(self, facts: list[tuple[Key, Fact]], now: float, style: Format) -> bytes:
        scraped = [
            _Scrape(key, fact, lag_totals.of_group(fact.group, fact.broker, fact.lag), fact.group.record.owners, now)
            for key, fact in facts
        ]
        return self._metrics.render(style, self._gauges(scraped))

    def _gauges(self, scraped: Sequence[_Scrape]) -> Iterator[LookedUp]:
        for name, text, labels, read in _LOOKED_UP:
            if self._queues or name != "rota_queue_lag":
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


_LOOKED_UP: tuple[tuple[str, str, Labels, Look], ...] = (
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
