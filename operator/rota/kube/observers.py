"""Where it goes what the operator did and saw: metrics, journal, traces, and whoever looks at the page."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rota.kube.client.objects import Key
from rota.kube.http.events import Hub
from rota.kube.http.read_model import Sight
from rota.kube.reconcile.reconciler import Done
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.journal.lag_records import Offsets
from rota.kube.telemetry.journal.recorder import Notes, redelivered
from rota.kube.telemetry.retries import RetryTracker
from rota.kube.telemetry.trace_export import Exporter
from rota.logs import of_group
from rota.model import RETRY
from rota.redelivery import Cause, Redelivered

_log = logging.getLogger(__name__)


class Outlets:
    """All of them."""

    def __init__(self, journal: Journal, sight: Sight, hub: Hub, traces: Exporter) -> None:
        """Tell nothing yet."""
        self._journal, self._sight, self._hub, self._traces = journal, sight, hub, traces
        self._offsets, self._notes = Offsets(sight.places.lag), Notes()
        self._retries = RetryTracker()
        self._writing: set[asyncio.Task[None]] = set()

    def done(self, done: Done) -> None:
        """Tell what a round of a group did."""
        key, brain = (done.group.namespace, done.group.name), self._sight.brain
        news = self._sight.take(done)
        notes = self._notes.of(done, news, brain.time(), lambda: brain.snapshot(done.group))
        self._journal.write([*done.plan.records, *notes])
        self._traces.take(key, news)
        self._hub.tell(key)

    def looked(self, groups: Collection[Key]) -> None:
        """Tell how far groups are behind, at which brokers have just been asked."""
        if self._sight.brain.leads:
            task = asyncio.get_running_loop().create_task(self._note(list(groups)), name="offsets")
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        self._hub.tell(*groups)

    async def _note(self, groups: Collection[Key]) -> None:
        """Have offsets written down; those of a thousand groups are put together aside."""
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
        """Tell what came again with queues that a member has taken over."""
        self._sight.measures.take_redelivered(key, entries)
        records = [*redelivered("/".join(key), self._sight.brain.time(), entries)]
        self._journal.write(records)
        for it in records:
            fields = of_group(*key, member=it["to"], reason=it["cause"])
            _log.info("%d messages came again with queues of %s", it["messages"], it["from"], extra=fields)

    def heard(self, key: Key) -> None:
        """Tell that something was seen of a group; of one that is gone nothing is counted any more."""
        group = self._sight.brain.group(key)
        if group is None or group.body is None:
            self._sight.measures.forget(lambda other: other != key)
            self._notes.forget(lambda other: other != "/".join(key))
            self._retries.forget(lambda other: other != "/".join(key))
        self._hub.tell(key)

    def led(self, *, leads: bool) -> None:
        """Tell that this operator leads now, or does not: then others count."""
        if not leads:
            self._sight.measures.forget(lambda _: False)
            self._notes.forget(lambda _: False)
            self._retries.forget(lambda _: False)
        self._hub.tell()
