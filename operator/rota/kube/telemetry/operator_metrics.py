"""The metrics of the operator itself, and counters and histograms of groups; `group_gauges` has the groups' gauges."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rota.aio import loop_time, yield_periodically
from rota.kube.client.objects import ObjectKey
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry.group_gauges import GROUP_LABELS, GroupFacts, group_gauges
from rota.kube.telemetry.journal.journal_writer import JournalCounts
from rota.kube.telemetry.rebalances import RebalanceChange, RebalanceTracker
from rota.metrics import GroupCounter, Labels, Metric, Metrics, MetricsFormat
from rota.model import Holder, Reason, ReasonKind, reasons_of_kind
from rota.redelivery import RedeliveryCause

DURATION_BUCKETS_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GroupSource(Protocol):
    """Gives the state of groups to a scrape."""

    def facts_of(self, key: ObjectKey) -> GroupFacts | None:
        """Return the present state of a group; None if the group does not exist."""

    def keys(self) -> list[ObjectKey]:
        """Return the keys of all groups."""


class OperatorMetrics:
    """All metrics of the operator and of its groups; reconciles count in it, and each scrape renders it."""

    def __init__(
        self,
        is_leading: Callable[[], bool] = lambda: False,
        watch_ages: Callable[[], Mapping[str, float]] = dict,
        journal_counts: Callable[[], JournalCounts] = JournalCounts,
        *,
        version: str = "",
        with_queues: bool = True,
        trace_of: Callable[[ObjectKey, Rebalance], str] = lambda *_: "",
    ) -> None:
        """Declare all metrics.

        `watch_ages` returns the seconds since the last watch event of each kind, `journal_counts` what the journal did,
        and `trace_of` the trace id of a rebalance, empty if it has no trace.
        """
        self.trackers: dict[ObjectKey, RebalanceTracker] = {}  # of groups that this leader has planned
        self._is_leading = is_leading
        self._read_watch_ages = watch_ages
        self._trace_of = trace_of
        self._with_queues = with_queues
        self._watch_ages: dict[Labels, float] = {}
        self._initialized: set[ObjectKey] = set()  # groups whose series exist
        self._metrics = metrics = Metrics()
        self._rebalances = self._group_counter(
            "rota_rebalances_total",
            "Completed rebalances, by the reason that started them and by outcome: Settled, or Forced if queues were"
            " granted without the previous owner's release.",
            "reason",
            "outcome",
        )
        self._rebalance_seconds = metrics.histogram(
            "rota_rebalance_duration_seconds",
            "Seconds from the first document of a rebalance until every member obeys the last one.",
            GROUP_LABELS,
            DURATION_BUCKETS_SECONDS,
        )
        self._handover_seconds = metrics.histogram(
            "rota_handover_duration_seconds",
            "Seconds from a queue's revocation, or from its grant if its owner had ended, until its next owner obeys"
            " the document that grants it.",
            GROUP_LABELS,
            DURATION_BUCKETS_SECONDS,
        )
        self._moved = self._group_counter("rota_queues_moved_total", "Queues that were granted to another member.")
        self._gate_held = self._group_counter(
            "rota_gate_held_total", "Times that a gate started to hold a rebalance back, by its reason.", "reason"
        )
        self._redelivered = self._group_counter(
            "rota_redelivered_messages_total",
            "Messages that were delivered again, by cause: handover (a drain timed out), crash (the queue's reader"
            " ended without a release), forced (the queue was granted without a release), retry (the app failed)."
            " An upper bound if a filter applies, an estimate for a member that ended without a report.",
            "cause",
        )
        self._plan_seconds = metrics.histogram("rota_plan_duration_seconds", "Seconds that one plan took.")
        self._writes = metrics.counter("rota_apply_writes_total", "Writes to the API server, by kind.", ("kind",))
        self._declare_operator_metrics(version)
        self._declare_journal_metrics(journal_counts)

    def _declare_operator_metrics(self, version: str) -> None:
        """Declare the metrics of the operator itself, which are computed at each scrape."""
        add = self._metrics.add_computed
        add(
            Metric("rota_watch_age_seconds", "Seconds since the last message of a kind's watch.", ("kind",)),
            lambda: self._watch_ages,
        )
        add(Metric("rota_leader", "Whether this operator leads: 1 or 0."), lambda: {(): float(self._is_leading())})
        build_info = Metric("rota_build_info", "Always 1; the label has the version.", ("version",))
        add(build_info, lambda: {(version,): 1})

    def _declare_journal_metrics(self, counts: Callable[[], JournalCounts]) -> None:
        add = self._metrics.add_computed
        missing = "Records missing in the journal because its disk is full or too slow, or its bucket unavailable."
        add(Metric("rota_journal_lost_total", missing, kind="counter"), lambda: {(): counts().dropped_records})
        shipped = "Segments of the journal that were stored in its folder or bucket."
        add(Metric("rota_journal_segments_total", shipped, kind="counter"), lambda: {(): counts().shipped_segments})
        failed = "Attempts to store a segment of the journal that failed."
        add(Metric("rota_journal_failures_total", failed, kind="counter"), lambda: {(): counts().failed_attempts})
        spool = "Size of the journal's segments that are not stored yet, in bytes."
        add(Metric("rota_journal_spool_bytes", spool), lambda: {(): counts().spool_bytes})

    def _group_counter(self, name: str, text: str, *labels: str) -> GroupCounter:
        counter = GroupCounter()
        self._metrics.add_computed(Metric(name, text, (*GROUP_LABELS, *labels), "counter"), counter.samples)
        return counter

    @property
    def metrics(self) -> list[Metric]:
        """Every metric, with its help text and labels."""
        gauges = group_gauges((), 0.0, with_queues=self._with_queues)
        return [*self._metrics.declared, *(gauge.metric for gauge in gauges)]

    # Counting.

    def record_reconcile(self, result: ReconcileResult, now: float) -> RebalanceChange:
        """Count the result of a group's reconcile; return what changed in its rebalances."""
        key = (result.group.namespace, result.group.name)
        self._plan_seconds.observe(result.planning_seconds)
        for kind, count in result.write_counts.items():
            self._writes.labels(kind).inc(count)
        tracker = self.trackers.setdefault(key, RebalanceTracker())
        self._initialize_series(key)
        obeyed: dict[Holder, int] = {}
        for name, member in result.group.pods.items():
            if member.decoded_report:
                obeyed[Holder(name, member.pod.metadata.uid)] = member.decoded_report.report.generation
        change = tracker.record_plan(result.plan, result.group.stored_assignment.document, obeyed, now)
        self._moved.add(key, amount=change.moved_queues)
        for handover in change.handovers:
            if handover.previous_owner:
                self._handover_seconds.labels(*key).observe(handover.seconds)
        if change.gate_reason:
            self._gate_held.add(key, str(change.gate_reason))
        if ended_rebalance := change.ended_rebalance:
            trace_id = self._trace_of(key, ended_rebalance)
            self._rebalances.add(key, ended_rebalance.reason, ended_rebalance.outcome)
            exemplar = {"trace_id": trace_id} if trace_id else None
            seconds = ended_rebalance.seconds or 0.0  # a completed rebalance always has its seconds
            self._rebalance_seconds.labels(*key).observe(seconds, exemplar)
        return change

    def count_redelivered(self, key: ObjectKey, cause: RedeliveryCause, messages: int) -> None:
        """Count redelivered messages of a group."""
        self._initialize_series(key)
        self._redelivered.add(key, cause, amount=messages)

    def _initialize_series(self, key: ObjectKey) -> None:
        """Create a group's series with 0: `increase()` misses the first increment of a series that starts at 1."""
        if key in self._initialized:
            return
        self._initialized.add(key)
        self._moved.add(key, amount=0)
        for reason in reasons_of_kind(ReasonKind.CAUSE):
            self._rebalances.add(key, reason, "Settled", amount=0)
        self._rebalances.add(key, Reason.MEMBER_LOST, "Forced", amount=0)
        for reason in reasons_of_kind(ReasonKind.GATE):
            self._gate_held.add(key, reason, amount=0)
        for cause in RedeliveryCause:
            self._redelivered.add(key, cause, amount=0)
        for histogram in (self._rebalance_seconds, self._handover_seconds):
            histogram.labels(*key)

    def forget(self, key: ObjectKey) -> None:
        """Drop the series of a deleted group."""
        self.trackers.pop(key, None)
        if key in self._initialized:
            self._initialized.remove(key)
            for histogram in (self._rebalance_seconds, self._handover_seconds):
                histogram.remove(*key)
            for counter in (self._rebalances, self._moved, self._gate_held, self._redelivered):
                counter.forget(key)

    def clear(self) -> None:
        """Drop the series of all groups, because another operator leads and reports them."""
        for key in {*self.trackers, *self._initialized}:
            self.forget(key)

    # Rendering.

    async def render(self, groups: GroupSource, style: MetricsFormat = MetricsFormat.TEXT) -> bytes:
        """Render all metrics. 100,000 queues take a while: groups are collected in slices, and rendered in a thread."""
        self._watch_ages = {(kind,): age for kind, age in self._read_watch_ages().items()}
        if not self._is_leading():
            self.clear()
            return self._metrics.render(style)
        keys = {*groups.keys()}
        for key in {*self.trackers, *self._initialized} - keys:
            self.forget(key)
        now = loop_time()
        facts: list[tuple[ObjectKey, GroupFacts]] = []
        async for key in yield_periodically(sorted(keys)):
            group_facts = groups.facts_of(key)
            if group_facts:  # else the group was deleted meanwhile
                facts.append((key, group_facts))
        return await asyncio.to_thread(self._render, facts, now, style)

    def _render(self, facts: Sequence[tuple[ObjectKey, GroupFacts]], now: float, style: MetricsFormat) -> bytes:
        return self._metrics.render(style, group_gauges(facts, now, with_queues=self._with_queues))
