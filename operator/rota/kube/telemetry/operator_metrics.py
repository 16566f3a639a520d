"""The operator's metrics: what it counts; what is looked up at each scrape is in `group_gauges`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rota.aio import gently
from rota.kube.client.objects import Key
from rota.kube.reconcile.reconciler import Done
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry.group_gauges import OF_GROUP, Fact, group_gauges
from rota.kube.telemetry.rebalances import News, Tally
from rota.metrics import Format, GroupCounter, Labels, Metric, Metrics
from rota.model import Holder, Reason, Use, reasons
from rota.redelivery import Cause, Redelivered

LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Known(Protocol):
    """Whom to ask about groups."""

    def fact(self, key: Key) -> Fact | None:
        """Return what is known of a group now."""

    def keys(self) -> list[Key]:
        """Return all groups."""


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
        self._begun: set[Key] = set()  # groups that have series
        self._metrics = metrics = Metrics()
        self._rebalances = self._group_counter(
            "rota_rebalances_total",
            "Rebalances that are over, by the reason they began for and by outcome: Settled, or Forced where queues"
            " were taken from a member that was not heard.",
            "reason",
            "outcome",
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
        self._moved = self._group_counter("rota_queues_moved_total", "Queues that were given to another member.")
        self._held = self._group_counter(
            "rota_gate_held_total", "Times that a gate began to hold queues back, by its reason.", "reason"
        )
        self._redelivered = self._group_counter(
            "rota_redelivered_messages_total",
            "Messages that came again, by cause: handover (a drain timed out), crash or forced, where another process"
            " read their queue, and retry, where the app failed. An upper bound where a filter applies, an estimate for"
            " a member that ended without a word.",
            "cause",
        )
        self._plan_seconds = metrics.histogram("rota_plan_duration_seconds", "How long making one plan took.")
        self._writes = metrics.counter("rota_apply_writes_total", "Writes to the API server, by kind.", ("kind",))
        metrics.look_up(
            Metric(
                "rota_watch_age_seconds", "Seconds since the API server last said something about a kind.", ("kind",)
            ),
            lambda: self._heard,
        )
        missing = "Records that are missing in the journal, for its disk is full or too slow."
        metrics.look_up(Metric("rota_journal_lost_total", missing, kind="counter"), lambda: {(): lost()})
        metrics.look_up(Metric("rota_leader", "Whether this operator leads: 1 or 0."), lambda: {(): float(leads())})
        metrics.look_up(Metric("rota_build_info", "Always 1; the version.", ("version",)), lambda: {(version,): 1})

    def _group_counter(self, name: str, text: str, *labels: str) -> GroupCounter:
        counter = GroupCounter()
        self._metrics.look_up(Metric(name, text, (*OF_GROUP, *labels), "counter"), counter.look)
        return counter

    @property
    def metrics(self) -> list[Metric]:
        """Every metric there is."""
        return [*self._metrics.declared, *(it.metric for it in group_gauges((), 0.0, queues=self._queues))]

    # What happens.

    def take(self, done: Done, now: float) -> News:
        """Count what a round of a group did, and return it."""
        key = (done.group.namespace, done.group.name)
        self._plan_seconds.observe(done.seconds)
        for kind, count in done.writes.items():
            self._writes.labels(kind).inc(count)
        tally = self.tallies.setdefault(key, Tally())
        self._begin(key)
        obeyed = {
            Holder(name, known.pod.metadata.uid): known.heard.report.generation
            for name, known in done.group.pods.items()
            if known.heard
        }
        news = tally.take(done.plan, done.group.record.document, obeyed, now)
        self._moved.add(key, by=news.moved)
        for handover in news.handovers:
            if handover.before:
                self._handover_seconds.labels(*key).observe(handover.seconds)
        if news.held:
            self._held.add(key, str(news.held))
        if ended := news.ended:
            trace = self._trace_of(key, ended)
            self._rebalances.add(key, ended.reason, ended.outcome)
            exemplar = {"trace_id": trace} if trace else None
            self._rebalance_seconds.labels(*key).observe(ended.seconds or 0.0, exemplar)
        return news

    def take_redelivered(self, key: Key, redelivered: Sequence[Redelivered]) -> None:
        """Count what came again with queues that were taken over."""
        for entry in redelivered:
            self.count_redelivered(key, entry.cause, entry.messages)

    def count_redelivered(self, key: Key, cause: Cause, messages: int) -> None:
        """Count messages of a group that came again."""
        self._begin(key)
        self._redelivered.add(key, cause, by=messages)

    def _begin(self, key: Key) -> None:
        """Create a group's series with 0: `increase()` misses the first 1 of a series that did not exist."""
        if key in self._begun:
            return
        self._begun.add(key)
        self._moved.add(key, by=0)
        for reason in reasons(Use.CAUSE):
            self._rebalances.add(key, reason, "Settled", by=0)
        self._rebalances.add(key, Reason.MEMBER_LOST, "Forced", by=0)
        for reason in reasons(Use.GATE):
            self._held.add(key, reason, by=0)
        for cause in Cause:
            self._redelivered.add(key, cause, by=0)
        for histogram in (self._rebalance_seconds, self._handover_seconds):
            histogram.labels(*key)

    def forget(self, known: Callable[[Key], bool]) -> None:
        """Forget groups that do not exist any more, or that another operator reports."""
        self.tallies = {key: it for key, it in self.tallies.items() if known(key)}
        for key in [key for key in self._begun if not known(key)]:
            self._begun.remove(key)
            for histogram in (self._rebalance_seconds, self._handover_seconds):
                histogram.remove(*key)
            for counter in (self._rebalances, self._moved, self._held, self._redelivered):
                counter.forget(key)

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

    def _render(self, facts: Sequence[tuple[Key, Fact]], now: float, style: Format) -> bytes:
        return self._metrics.render(style, group_gauges(facts, now, queues=self._queues))
