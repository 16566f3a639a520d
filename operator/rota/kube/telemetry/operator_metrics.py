"""The operator's counters and histograms; `group_gauges` has the metrics that are computed at each scrape."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rota.aio import yield_periodically
from rota.kube.client.objects import Key
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry.group_gauges import OF_GROUP, GroupFacts, group_gauges
from rota.kube.telemetry.rebalances import RebalanceChange, RebalanceTracker
from rota.metrics import Format, GroupCounter, Labels, Metric, Metrics
from rota.model import Holder, Reason, Use, reasons
from rota.redelivery import Cause, Redelivered

LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GroupSource(Protocol):
    """Gives the state of groups to a scrape."""

    def fact(self, key: Key) -> GroupFacts | None:
        """Return the present state of a group; None if the group does not exist."""

    def keys(self) -> list[Key]:
        """Return the keys of all groups."""


class OperatorMetrics:
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
        """Declare all metrics.

        `ages` returns the seconds since the last watch event of each kind, `lost` the number of records missing from
        the journal, and `trace_of` the trace id of a rebalance, empty if it has no trace.
        """
        self.tallies: dict[Key, RebalanceTracker] = {}
        self._leads, self._ages, self._trace_of = leads, ages, trace_of
        self._queues = queues
        self._heard: dict[Labels, float] = {}
        self._begun: set[Key] = set()  # groups whose series exist
        self._metrics = metrics = Metrics()
        self._rebalances = self._group_counter(
            "rota_rebalances_total",
            "Completed rebalances, by the reason that started them and by outcome: Settled, or Forced if queues were"
            " taken from a silent member.",
            "reason",
            "outcome",
        )
        self._rebalance_seconds = metrics.histogram(
            "rota_rebalance_duration_seconds",
            "Seconds from the first document of a rebalance until every member obeys the last one.",
            OF_GROUP,
            LONG,
        )
        self._handover_seconds = metrics.histogram(
            "rota_handover_duration_seconds",
            "Seconds from a queue's revocation until its next owner obeys the document that grants it.",
            OF_GROUP,
            LONG,
        )
        self._moved = self._group_counter("rota_queues_moved_total", "Queues that were granted to another member.")
        self._held = self._group_counter(
            "rota_gate_held_total", "Times that a gate started to hold a rebalance back, by its reason.", "reason"
        )
        self._redelivered = self._group_counter(
            "rota_redelivered_messages_total",
            "Messages that were delivered again, by cause: handover (a drain timed out), crash or forced if another"
            " process took over their queue, retry if the app failed. An upper bound if a filter applies, an estimate"
            " for a member that ended without a report.",
            "cause",
        )
        self._plan_seconds = metrics.histogram("rota_plan_duration_seconds", "Seconds that one plan took.")
        self._writes = metrics.counter("rota_apply_writes_total", "Writes to the API server, by kind.", ("kind",))
        metrics.look_up(
            Metric(
                "rota_watch_age_seconds",
                "Seconds since the last message of a kind's watch.",
                ("kind",),
            ),
            lambda: self._heard,
        )
        missing = "Records missing in the journal because its disk is full or too slow."
        metrics.look_up(Metric("rota_journal_lost_total", missing, kind="counter"), lambda: {(): lost()})
        metrics.look_up(Metric("rota_leader", "Whether this operator leads: 1 or 0."), lambda: {(): float(leads())})
        metrics.look_up(
            Metric("rota_build_info", "Always 1; the label has the version.", ("version",)), lambda: {(version,): 1}
        )

    def _group_counter(self, name: str, text: str, *labels: str) -> GroupCounter:
        counter = GroupCounter()
        self._metrics.look_up(Metric(name, text, (*OF_GROUP, *labels), "counter"), counter.look)
        return counter

    @property
    def metrics(self) -> list[Metric]:
        """Every metric, with its help text and labels."""
        return [*self._metrics.declared, *(gauge.metric for gauge in group_gauges((), 0.0, queues=self._queues))]

    # Counting.

    def take(self, done: ReconcileResult, now: float) -> RebalanceChange:
        """Count the result of a group's reconcile; return what changed in its rebalances."""
        key = (done.group.namespace, done.group.name)
        self._plan_seconds.observe(done.seconds)
        for kind, count in done.writes.items():
            self._writes.labels(kind).inc(count)
        tally = self.tallies.setdefault(key, RebalanceTracker())
        self._begin(key)
        obeyed = {
            Holder(name, member.pod.metadata.uid): member.heard.report.generation
            for name, member in done.group.pods.items()
            if member.heard
        }
        change = tally.take(done.plan, done.group.record.document, obeyed, now)
        self._moved.add(key, by=change.moved)
        for handover in change.handovers:
            if handover.before:
                self._handover_seconds.labels(*key).observe(handover.seconds)
        if change.held:
            self._held.add(key, str(change.held))
        if ended := change.ended:
            trace = self._trace_of(key, ended)
            self._rebalances.add(key, ended.reason, ended.outcome)
            exemplar = {"trace_id": trace} if trace else None
            self._rebalance_seconds.labels(*key).observe(ended.seconds or 0.0, exemplar)
        return change

    def take_redelivered(self, key: Key, redelivered: Sequence[Redelivered]) -> None:
        """Count the messages that were redelivered because queues changed owners."""
        for entry in redelivered:
            self.count_redelivered(key, entry.cause, entry.messages)

    def count_redelivered(self, key: Key, cause: Cause, messages: int) -> None:
        """Count redelivered messages of a group."""
        self._begin(key)
        self._redelivered.add(key, cause, by=messages)

    def _begin(self, key: Key) -> None:
        """Create a group's series with 0: `increase()` misses the first increment of a series that starts at 1."""
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

    def forget(self, is_known: Callable[[Key], bool]) -> None:
        """Drop the series of groups that were deleted, or that another operator reports."""
        self.tallies = {key: tally for key, tally in self.tallies.items() if is_known(key)}
        for key in [key for key in self._begun if not is_known(key)]:
            self._begun.remove(key)
            for histogram in (self._rebalance_seconds, self._handover_seconds):
                histogram.remove(*key)
            for counter in (self._rebalances, self._moved, self._held, self._redelivered):
                counter.forget(key)

    # Rendering.

    async def text(self, groups: GroupSource, style: Format = Format.TEXT) -> bytes:
        """Render all metrics. 100,000 queues take a while: groups are collected in slices, and rendered in a thread."""
        self._heard = {(kind,): age for kind, age in self._ages().items()}
        if not self._leads():
            self.forget(lambda _: False)
            return self._metrics.render(style)
        keys = {*groups.keys()}
        self.forget(keys.__contains__)
        now = asyncio.get_running_loop().time()
        facts = [(key, fact) async for key in yield_periodically(sorted(keys)) if (fact := groups.fact(key))]
        return await asyncio.to_thread(self._render, facts, now, style)

    def _render(self, facts: Sequence[tuple[Key, GroupFacts]], now: float, style: Format) -> bytes:
        return self._metrics.render(style, group_gauges(facts, now, queues=self._queues))
