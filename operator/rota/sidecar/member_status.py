"""Status of a member: its report, queues, deliveries, readiness and metrics."""

import asyncio
import secrets
from collections.abc import Callable, Mapping

import msgspec

from rota.aio import RateLimitedCall
from rota.deliveries import DeliveriesPage
from rota.metrics import MetricsFormat
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

NOTICE_SECONDS = 1.0  # brokers' notices of changed consumers within this time count as one


class MemberStatus:
    """Builds the member's report, readiness and metrics."""

    def __init__(
        self,
        member: Member,
        effect_runner: EffectRunner,
        problems: Problems,
        broker_session: BrokerSession,
        readers: Mapping[Queue, QueueReader],
        *,
        now: Callable[[], float],
        client_validity: Callable[[], Validity | None],
    ) -> None:
        self._now = now
        self._member = member
        self._effect_runner = effect_runner
        self._problems = problems
        self._broker_session = broker_session
        self._readers = readers
        # Identifies this process in reports while its number in the pod, the incarnation, cannot be stored.
        self._fallback_incarnation = secrets.token_hex(8)
        self.released_queues = ReleasedQueues()
        self.settings_digest = ""  # digest of the settings in force
        self._settings_changes = 0  # number of changes of the digest
        self._consumer_changes = 0  # number of brokers' notices, for the report and its revision
        self._notices = RateLimitedCall(self._count_notice, NOTICE_SECONDS)
        self.metrics = SidecarMetrics(client_validity)
        self.delivery_counts = DeliveryCounts(now())
        self._change_event = asyncio.Event()

    def set_settings_digest(self, digest: str) -> None:
        """Report this digest of the settings in force from now on."""
        if digest != self.settings_digest:
            self.settings_digest = digest
            self._settings_changes += 1
            self.notify()

    def on_consumers_changed(self) -> None:
        """Report that consumers of the group joined or left: the first notice at once, later ones once a second."""
        self._notices.request()

    def _count_notice(self) -> None:
        self._consumer_changes += 1
        self.notify()

    @property
    def _incarnation(self) -> str:
        return str(self._member.incarnation or self._fallback_incarnation)

    @property
    def _revision(self) -> int:
        """The revision of the full report: the published report's, plus the changes that only the full report shows."""
        changes = self._problems.change_count + self._settings_changes + self._consumer_changes
        return self._effect_runner.published_report.revision + changes

    def notify(self) -> None:
        """Wake all tasks that wait for a change."""
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Wait for the next change."""
        await self._change_event.wait()

    def report(self) -> FullReport:
        """Return the member's current report."""
        published = self._effect_runner.published_report
        report = full_report(published, self._problems, self._member, self._readers, self.released_queues)
        return msgspec.structs.replace(
            report,
            revision=self._revision,
            incarnation=self._incarnation,
            settings=self.settings_digest,
            consumers_changed=self._consumer_changes,
        )

    def queues(self, start: int) -> QueuesPage:
        """Return one page of the progress of the member's queues, from index `start`."""
        page = queues_page(start, self._member, self._readers, self._now())
        return msgspec.structs.replace(page, incarnation=self._incarnation)

    def deliveries(self, start: int) -> DeliveriesPage:
        """Return one page of delivery counts by queue, from index `start`."""
        return self.delivery_counts.page(start, self._incarnation, self._readers, self._now())

    async def wait_for_revision(self, after: int) -> None:
        """Wait until the report's revision differs from `after`."""
        while self._revision == after:
            await self.wait_for_change()

    def why_unready(self) -> str:
        """Return why the pod is not ready; empty if it is ready."""
        if self._member.final:
            return "the member is permanently drained"
        session = self._broker_session.current
        if session is None:
            return "the member has not joined its group"
        if not session.joined.is_set():
            return f"the member is not yet registered with the brokers of {session.settings.group}"
        brokers = {queue.broker for queue in self._readers}
        reachability = self._effect_runner.published_report.brokers
        unreachable = {broker for broker in brokers if not reachability.get(broker, True)}  # unprobed: reachable
        if brokers and unreachable == brokers:
            return f"no response from {', '.join(sorted(brokers))}"
        return ""

    def render_metrics(self, style: MetricsFormat) -> bytes:
        """Render the sidecar's metrics."""
        inflight = 0
        buffered = 0
        for reader in self._readers.values():
            inflight += reader.window.in_flight
            buffered += reader.window.unfinished_count
        generation = self._member.obeyed_generation
        return self.metrics.render(style, inflight=inflight, buffered=buffered, generation=generation)
