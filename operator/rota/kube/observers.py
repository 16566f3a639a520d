"""Publishes what the operator did and observed to metrics, log, journal, traces, and users of the page.

`operator.py` connects these methods to the components whose events they publish.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rota.aio import BackgroundTasks, loop_time
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import ObjectKey
from rota.kube.http.broadcaster import Broadcaster
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.telemetry.change_log import ChangeLog
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.journal.offset_recorder import OffsetRecorder
from rota.kube.telemetry.journal.recorder import JournalRecorder, redelivered_records
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.retries import RetryTracker
from rota.kube.telemetry.trace_export import TraceExporter
from rota.logs import group_fields
from rota.model import RETRY_TOPIC_PREFIX
from rota.redelivery import Redelivery, RedeliveryCause

_log = logging.getLogger(__name__)


class Observers:
    """Metrics, log, journal, traces and page events of all groups."""

    def __init__(
        self,
        controller: Controller,
        metrics: OperatorMetrics,
        lag_of: Callable[[ObjectKey], GroupLag],
        *,
        journal: Journal,
        broadcaster: Broadcaster,
        trace_exporter: TraceExporter,
    ) -> None:
        self._controller = controller
        self._metrics = metrics
        self._journal = journal
        self._broadcaster = broadcaster
        self._trace_exporter = trace_exporter
        self._offset_recorder = OffsetRecorder(lag_of)
        self._tasks = BackgroundTasks()
        self._reset_recorders()

    def _reset_recorders(self) -> None:
        self._journal_recorder = JournalRecorder()
        self._retry_tracker = RetryTracker()
        self._change_log = ChangeLog()

    def on_reconciled(self, result: ReconcileResult) -> None:
        """Publish the result of a group's reconcile."""
        key = (result.group.namespace, result.group.name)
        rebalance_change = self._metrics.record_reconcile(result, loop_time())
        journal_records = self._journal_recorder.build_records(
            result,
            rebalance_change,
            self._controller.wall_time(),
            lambda: self._controller.reconciler.snapshot(result.group),
        )
        records = [*result.plan.journal_records, *journal_records]
        self._journal.write(records)
        rebalance_started_at = result.plan.status.get("lastRebalance", {}).get("at", "")
        self._change_log.write(key, records, rebalance_started_at)
        self._trace_exporter.export(key, rebalance_change)
        self._broadcaster.publish(key)

    def on_lag_polled(self, groups: Collection[ObjectKey]) -> None:
        """Journal and publish the lag of groups after their brokers were polled."""
        if self._controller.is_leading:
            self._tasks.start(self._record_offsets(list(groups)), "offsets")
        self._broadcaster.publish(*groups)

    async def _record_offsets(self, groups: Collection[ObjectKey]) -> None:
        """Journal the offsets of groups whose last record is a minute old, and count new messages in retry topics."""
        records = await self._offset_recorder.build_due_records(groups, loop_time())
        self._journal.write(records)
        for record in records:
            self._count_retries(record)

    def _count_retries(self, record: Mapping[str, Any]) -> None:
        namespace, _, name = record["group"].partition("/")
        if group := self._controller.group((namespace, name)):
            messages = self._retry_tracker.count_new_retries(record, RETRY_TOPIC_PREFIX + group.consumer_group)
            self._metrics.count_redelivered((namespace, name), RedeliveryCause.RETRY, messages)

    def on_redelivered(self, key: ObjectKey, entries: Sequence[Redelivery]) -> None:
        """Count, journal and log messages that were delivered again after a member took over their queues."""
        for entry in entries:
            self._metrics.count_redelivered(key, entry.cause, entry.messages)
        records = [*redelivered_records("/".join(key), self._controller.wall_time(), entries)]
        self._journal.write(records)
        for record in records:
            fields = group_fields(*key, member=record["to"], reason=record["cause"])
            text = "%d messages were redelivered after queues moved from %s"
            _log.info(text, record["messages"], record["from"], extra=fields)

    def on_group_changed(self, key: ObjectKey) -> None:
        """Publish that a group changed; drop the counters of a deleted group."""
        group = self._controller.group(key)
        if group is None or group.body is None:
            self._metrics.forget(key)
            self._change_log.forget(key)
            self._journal_recorder.forget("/".join(key))
            self._retry_tracker.forget("/".join(key))
        self._broadcaster.publish(key)

    def on_leadership(self, *, is_leading: bool) -> None:
        """Publish a change of leadership; an operator that lost it drops its counters, as the new leader counts."""
        if not is_leading:
            self._metrics.clear()
            self._reset_recorders()
        self._broadcaster.publish()  # no key: the operator itself changed, so every group may look different
