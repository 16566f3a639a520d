"""Publishes what the operator did and observed to metrics, log, journal, traces, and users of the page."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rota.kube.client.objects import ObjectKey
from rota.kube.http.events import Broadcaster
from rota.kube.http.read_model import ReadModel
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.telemetry.change_log import ChangeLog
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.journal.lag_records import OffsetRecorder
from rota.kube.telemetry.journal.recorder import JournalRecorder, redelivered_records
from rota.kube.telemetry.retries import RetryTracker
from rota.kube.telemetry.trace_export import TraceExporter
from rota.logs import group_fields
from rota.model import RETRY_TOPIC_PREFIX
from rota.redelivery import Redelivery, RedeliveryCause

_log = logging.getLogger(__name__)


class Observers:
    """Metrics, log, journal, traces and page events of all groups."""

    def __init__(
        self, journal: Journal, read_model: ReadModel, broadcaster: Broadcaster, trace_exporter: TraceExporter
    ) -> None:
        self._journal = journal
        self._read_model = read_model
        self._broadcaster = broadcaster
        self._trace_exporter = trace_exporter
        self._offset_recorder = OffsetRecorder(read_model.registry.lag_of)
        self._journal_recorder = JournalRecorder()
        self._retry_tracker = RetryTracker()
        self._change_log = ChangeLog()
        self._tasks: set[asyncio.Task[None]] = set()

    def on_reconciled(self, result: ReconcileResult) -> None:
        """Publish the result of a group's reconcile."""
        key = (result.group.namespace, result.group.name)
        controller = self._read_model.controller
        changes = self._read_model.record_reconcile(result)
        journal_records = self._journal_recorder.build_records(
            result, changes, controller.wall_time(), lambda: controller.snapshot(result.group)
        )
        records = [*result.plan.journal_records, *journal_records]
        self._journal.write(records)
        self._change_log.write(key, records, result.plan.status.get("lastRebalance", {}).get("at", ""))
        self._trace_exporter.export(key, changes)
        self._broadcaster.publish(key)

    def on_lag_polled(self, groups: Collection[ObjectKey]) -> None:
        """Journal and publish the lag of groups after their brokers were polled."""
        if self._read_model.controller.is_leading:
            task = asyncio.get_running_loop().create_task(self._record_offsets(list(groups)), name="offsets")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._broadcaster.publish(*groups)

    async def _record_offsets(self, groups: Collection[ObjectKey]) -> None:
        """Journal the offsets that are due; a thread builds the records, as there may be a thousand groups."""
        records = await asyncio.to_thread(self._offset_recorder.build_due_records, groups, self._read_model.loop_time())
        self._journal.write(records)
        for record in records:
            self._count_retries(record)

    def _count_retries(self, record: Mapping[str, Any]) -> None:
        namespace, _, name = record["group"].partition("/")
        if group := self._read_model.controller.group((namespace, name)):
            messages = self._retry_tracker.count_new_retries(record, RETRY_TOPIC_PREFIX + group.consumer_group)
            self._read_model.metrics.count_redelivered((namespace, name), RedeliveryCause.RETRY, messages)

    def on_redelivered(self, key: ObjectKey, entries: Sequence[Redelivery]) -> None:
        """Count, journal and log messages that were delivered again after a member took over their queues."""
        self._read_model.metrics.record_redelivered(key, entries)
        records = [*redelivered_records("/".join(key), self._read_model.controller.wall_time(), entries)]
        self._journal.write(records)
        for record in records:
            fields = group_fields(*key, member=record["to"], reason=record["cause"])
            text = "%d messages were redelivered after queues moved from %s"
            _log.info(text, record["messages"], record["from"], extra=fields)

    def on_group_changed(self, key: ObjectKey) -> None:
        """Publish that a group changed; drop the counters of a deleted group."""
        group = self._read_model.controller.group(key)
        if group is None or group.body is None:
            self._read_model.metrics.forget_groups(lambda known_group: known_group != key)
            self._journal_recorder.forget_groups(lambda known_group: known_group != "/".join(key))
            self._retry_tracker.forget_groups(lambda known_group: known_group != "/".join(key))
            self._change_log.forget_groups(lambda known_group: known_group != key)
        self._broadcaster.publish(key)

    def on_leadership(self, *, is_leading: bool) -> None:
        """Publish a change of leadership; an operator that lost it drops its counters, as the new leader counts."""
        if not is_leading:
            self._read_model.metrics.forget_groups(lambda _: False)
            self._journal_recorder.forget_groups(lambda _: False)
            self._retry_tracker.forget_groups(lambda _: False)
            self._change_log.forget_groups(lambda _: False)
        self._broadcaster.publish()
