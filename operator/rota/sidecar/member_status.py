"""Status of a member: its report, queues, deliveries, readiness and metrics."""

import asyncio
import secrets
from collections.abc import Callable, Mapping

import msgspec

from rota.aio import RateLimitedCall
from rota.deliveries import DeliveriesPage
from rota.metrics import Format
from rota.model import Queue
from rota.reports import FullReport
from rota.sidecar.consume.broker_session import BrokerSession
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.effects import EffectRunner
from rota.sidecar.member.member import Member
from rota.sidecar.status.delivery_counts import DeliveryCounts
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.self_report import QueuesPage, ReleasedQueues, full_report, queues_page
from rota.sidecar.status.sidecar_metrics import SidecarMetrics
from rota.tls import Validity

NOTICE_SECONDS = 1.0  # within this time, several notices from brokers count as one


class MemberStatus:
    """Builds the member's report, readiness and metrics."""

    def __init__(
        self,
        member: Member,
        steps: EffectRunner,
        health: Problems,
        sources: BrokerSession,
        readings: Mapping[Queue, QueueReader],
        *,
        now: Callable[[], float],
        client_validity: Callable[[], Validity | None],
    ) -> None:
        self._now = now
        self._member, self._steps, self._health = member, steps, health
        self._sources, self._readings = sources, readings
        self._random = secrets.token_hex(8)  # replaces the process number while that cannot be stored
        self.released = ReleasedQueues()
        self._settings = ""  # digest of the settings in force
        self._settings_changes = 0
        self._consumers_changed = 0
        self._notices = RateLimitedCall(self._count_notice, NOTICE_SECONDS)
        self.measures = SidecarMetrics(client_validity)
        self.delivery_counts = DeliveryCounts(now())
        self._changed = asyncio.Event()

    def settings_in_force(self, digest: str) -> None:
        """Report this digest of the settings in force from now on."""
        if digest != self._settings:
            self._settings, self._settings_changes = digest, self._settings_changes + 1
            self.notify()

    def consumers_changed(self) -> None:
        """Report that consumers of the group joined or left: the first notice at once, later ones once a second."""
        self._notices.request()

    def _count_notice(self) -> None:
        self._consumers_changed += 1
        self.notify()

    @property
    def _incarnation(self) -> str:
        return str(self._member.incarnation or self._random)

    @property
    def _revision(self) -> int:
        changes = self._health.changes + self._settings_changes + self._consumers_changed
        return self._steps.told.revision + changes

    def notify(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def report(self) -> FullReport:
        """Return the member's current report."""
        report = full_report(self._steps.told, self._health, self._member, self._readings, self.released)
        return msgspec.structs.replace(
            report,
            revision=self._revision,
            incarnation=self._incarnation,
            settings=self._settings,
            consumers_changed=self._consumers_changed,
        )

    def queues(self, start: int) -> QueuesPage:
        """Return one page of the progress of the member's queues, from index `start`."""
        page = queues_page(start, self._member, self._readings, self._now())
        return msgspec.structs.replace(page, incarnation=self._incarnation)

    def deliveries(self, start: int) -> DeliveriesPage:
        """Return one page of delivery counts by queue, from index `start`."""
        return self.delivery_counts.page(start, self._incarnation, self._readings, self._now())

    def sample_deliveries(self) -> None:
        """Sample how many messages are at the app, and for which queues messages wait."""
        self.delivery_counts.sample(self._readings, self._now())

    async def news(self, after: int) -> None:
        """Wait until the report's revision differs from `after`."""
        while self._revision == after:
            await self.changed()

    def unready(self) -> str:
        """Return why the pod is not ready; empty if it is ready."""
        if self._member.final:
            return "the member was drained for good"
        source = self._sources.now
        if source is None:
            return "the member has not joined its group"
        if not source.ready.is_set():
            return f"the member is not known to the brokers of {source.settings.group} yet"
        brokers = {queue.broker for queue in self._readings}
        if brokers and not any(self._steps.told.brokers.get(broker, True) for broker in brokers):
            return f"no answer from {', '.join(sorted(brokers))}"
        return ""

    def metrics(self, style: Format) -> bytes:
        """Render the sidecar's metrics."""
        windows = [reading.window for reading in self._readings.values()]
        return self.measures.text(
            style,
            inflight=sum(window.in_flight for window in windows),
            buffered=sum(window.buffered for window in windows),
            generation=self._member.obeyed,
        )
