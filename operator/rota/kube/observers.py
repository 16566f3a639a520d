"""Publishes what the operator did and observed to metrics, log, journal, traces, and users of the page."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rota.kube.client.objects import Key
from rota.kube.http.events import Broadcaster
from rota.kube.http.read_model import ReadModel
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.telemetry.change_log import ChangeLog
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.journal.lag_records import OffsetRecorder
from rota.kube.telemetry.journal.recorder import JournalRecorder, redelivered
from rota.kube.telemetry.retries import RetryTracker
from rota.kube.telemetry.trace_export import TraceExporter
from rota.logs import of_group
from rota.model import RETRY
from rota.redelivery import Cause, Redelivered

_log = logging.getLogger(__name__)


class Observers:
    """Metrics, log, journal, traces and page events of all groups."""

    def __init__(self, journal: Journal, sight: ReadModel, hub: Broadcaster, traces: TraceExporter) -> None:
        self._journal, self._sight, self._hub, self._traces = journal, sight, hub, traces
        self._offsets, self._notes = OffsetRecorder(sight.places.lag), JournalRecorder()
        self._retries, self._change_log = RetryTracker(), ChangeLog()
        self._writing: set[asyncio.Task[None]] = set()

    def done(self, result: ReconcileResult) -> None:
        """Publish the result of a group's reconcile."""
        key, brain = (result.group.namespace, result.group.name), self._sight.brain
        changes = self._sight.take(result)
        journal_records = self._notes.of(result, changes, brain.time(), lambda: brain.snapshot(result.group))
        records = [*result.plan.records, *journal_records]
        self._journal.write(records)
        self._change_log.write(key, records, result.plan.status.get("lastRebalance", {}).get("at", ""))
        self._traces.take(key, changes)
        self._hub.tell(key)

    def looked(self, groups: Collection[Key]) -> None:
        """Journal and publish the lag of groups after their brokers were polled."""
        if self._sight.brain.leads:
            task = asyncio.get_running_loop().create_task(self._note(list(groups)), name="offsets")
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        self._hub.tell(*groups)

    async def _note(self, groups: Collection[Key]) -> None:
        """Journal the offsets that are due; a thread builds the records, as there may be a thousand groups."""
        records = await asyncio.to_thread(self._offsets.due, groups, self._sight.now())
        self._journal.write(records)
        for record in records:
            self._count_retries(record)

    def _count_retries(self, record: Mapping[str, Any]) -> None:
        namespace, _, name = record["group"].partition("/")
        if group := self._sight.brain.group((namespace, name)):
            messages = self._retries.take(record, RETRY + group.at_broker)
            self._sight.measures.count_redelivered((namespace, name), Cause.RETRY, messages)

    def redelivered(self, key: Key, entries: Sequence[Redelivered]) -> None:
        """Count, journal and log messages that were delivered again after a member took over their queues."""
        self._sight.measures.take_redelivered(key, entries)
        records = [*redelivered("/".join(key), self._sight.brain.time(), entries)]
        self._journal.write(records)
        for record in records:
            fields = of_group(*key, member=record["to"], reason=record["cause"])
            _log.info("%d messages came again with queues of %s", record["messages"], record["from"], extra=fields)

    def heard(self, key: Key) -> None:
        """Publish that a group changed; drop the counters of a deleted group."""
        group = self._sight.brain.group(key)
        if group is None or group.body is None:
            self._sight.measures.forget(lambda known_group: known_group != key)
            self._notes.forget(lambda known_group: known_group != "/".join(key))
            self._retries.forget(lambda known_group: known_group != "/".join(key))
            self._change_log.forget(lambda known_group: known_group != key)
        self._hub.tell(key)

    def led(self, *, leads: bool) -> None:
        """Publish a change of leadership; an operator that lost it drops its counters, as the new leader counts."""
        if not leads:
            self._sight.measures.forget(lambda _: False)
            self._notes.forget(lambda _: False)
            self._retries.forget(lambda _: False)
            self._change_log.forget(lambda _: False)
        self._hub.tell()
