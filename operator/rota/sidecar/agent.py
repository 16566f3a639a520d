"""Agent of one member: connects the mounted configuration, the member's decisions, the queue readers and the app."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from rota.aio import supervise
from rota.model import Reason
from rota.sidecar.config_follower import ConfigFollower
from rota.sidecar.consume.broker_probes import BrokerProber
from rota.sidecar.consume.broker_session import Connect
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.effects import EffectRunner
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import Command
from rota.sidecar.member_host import CreateDelivery, MemberHost
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.state_store import StateStore
from rota.spec.resolved import GroupSettings, settings_digest
from rota.tls import Validity

COMMIT_SECONDS = 5.0  # between two commits of a queue
MONITOR_INTERVAL_SECONDS = 0.5
# After a stall, requests that waited in sockets meanwhile are handled within this time.
SENT_BEFORE_STALL_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Agent:
    """Runs one member: obeys the mounted assignment and settings, carries out the decisions, and reports."""

    def __init__(
        self,
        pod: PodIdentity,
        connect: Connect,
        create_delivery: CreateDelivery,
        client_validity: Callable[[], Validity | None] = lambda: None,
    ) -> None:
        """Create all parts; `run` starts them. `client_validity` returns that of the certificate shown to brokers."""
        self.uid = pod.uid
        self._problems = Problems()
        state_store = StateStore(Path(pod.state_folder))
        self._config_follower = ConfigFollower(pod, state_store, self._problems, self._read_config)
        saved = state_store.load(pod.uid)
        self.member = Member(pod.name, pod.uid, obeyed_generation=saved.obeyed_generation, final=saved.final)
        self._config_follower.start_incarnation(self.member)
        self._effect_runner = EffectRunner(
            state_store, self._problems, self.member.report, self._run_command, self._schedule_publish
        )
        self.host = MemberHost(
            pod,
            connect,
            create_delivery,
            self.member,
            self._effect_runner,
            problems=self._problems,
            client_validity=client_validity,
            on_stall=self._on_stall,
        )
        self.readers = self.host.readers
        self.status = self.host.status
        self._broker_session = self.host.broker_session
        self._delivery = self.host.delivery
        self._broker_prober = BrokerProber(self.readers, self._problems)
        self._last_report = self._effect_runner.published_report  # the report that `_publish_report` last handled
        self._is_publish_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_rejoining = False  # changed settings require a drain, then leaving and joining the group
        self._ignores_sent_until = 0.0  # assignments that arrive until then may have been sent before a stall
        self.pod_drain_started = asyncio.Event()  # set once a drain for the pod's end starts; such a drain never ends
        self._last_rejection: str | None = None

    async def run(self, stop_requested: asyncio.Event) -> None:
        """Run until `stop_requested` is set, then drain and leave the group."""
        tasks = {
            "configuration": self._config_follower.run,
            "beat": self._monitor,
            "commits": self._commit_periodically,
            "broker probes": self._broker_prober.run,
        }
        for name, work in tasks.items():
            self.host.start_task(supervise(name, work, self._problems.report_task))
        await stop_requested.wait()
        self._effect_runner.skip_failed_writes()
        await self.drain()
        self._config_follower.close()
        await self.host.cancel_tasks()  # before leaving: a task may be about to rejoin
        await asyncio.gather(self._leave_group(), self.host.delivery_spans.close())
        await self._delivery.close()

    async def _monitor(self) -> None:
        """Look for stalls, brokers that do not answer, and other problems, every MONITOR_INTERVAL_SECONDS."""
        while True:
            self.host.look_for_stall()
            now = self.host.now()
            self.member.set_broker_reachability(self._broker_prober.broker_reachability(now))
            self.host.delivery_counts.sample(self.readers, now)
            self._problems.report_stuck(self.member.stuck_queues)
            awake_since = self.host.stall_detector.awake_since
            unread = [queue for queue, reader in self.readers.items() if reader.pull_status.is_unread(now, awake_since)]
            self._problems.report_unread(unread)
            if self._broker_session.settings:
                filtered = self.host.filter_counts.find_problem(self._broker_session.settings.subscriptions, now)
                self._problems.set_problem(Reason.NOTHING_MATCHES, filtered)
            self._publish_report()
            await asyncio.sleep(MONITOR_INTERVAL_SECONDS)

    def _on_stall(self, seconds: float) -> None:
        """Read the assignment before anything else: during the stall this member's queues may have got other owners."""
        _log.warning("The sidecar was stalled for %.1f s; it re-reads its assignment", seconds)
        self.member.mark_stalled()
        # The kubelet may have stalled, too, so that the mounted assignment is outdated. Count the stall's end as a
        # report request: a restarted process takes over its predecessor's queues RESUME_SECONDS after the last one.
        self.member.note_report_request(self.host.stall_detector.awake_since)
        self._ignores_sent_until = self.host.stall_detector.awake_since + SENT_BEFORE_STALL_SECONDS
        try:
            self._read_config()
        except Exception:
            self._config_follower.schedule_retry()  # nothing is delivered or committed until a read succeeds
            raise

    async def _commit_periodically(self) -> None:
        """Commit the offsets of all queues every COMMIT_SECONDS, and send pulls that hang again."""
        while True:
            await asyncio.sleep(COMMIT_SECONDS)
            for reader in self.readers.values():
                reader.start_commit()
                reader.restart_idle_pull(self.host.stall_detector.awake_since)

    async def _leave_group(self) -> None:
        await asyncio.gather(*(reader.close() for reader in self.readers.values()))
        self._broker_prober.stop_probes()
        await self._broker_session.leave()

    # Assignment and settings.

    def _read_config(self) -> None:
        """Obey the mounted assignment, and apply the settings; after a stall, this permits deliveries and commits."""
        files = self._config_follower.read()
        if files is None:  # nothing changes; after a stall, nothing is delivered or committed until a read succeeds
            return
        settings = self._config_follower.parse_settings(files)
        if self._broker_session.current is None and not (settings and self._join_group(settings)):
            return  # without a broker session no queue can be consumed, so no assignment is obeyed
        if not self._config_follower.can_store_state():
            # Obey nothing new; after a stall this permits deliveries and commits by the obeyed assignment again.
            self.member.apply_assignment(None, self.host.now())
            return
        self._config_follower.start_incarnation(self.member)
        if not self.member.incarnation:
            self._config_follower.schedule_retry()
        self.member.orderly = self.host.settings.is_orderly
        self._effect_runner.snapshot_report()
        drain_timeout = settings.drain_timeout if settings else None
        effects = self.member.apply_assignment(files.assignment, self.host.now(), drain_timeout)
        self._log_rejection(effects)
        if settings is None or effects.rejection:  # settings are valid only with the assignment in the same ConfigMap
            self._effect_runner.submit_effects(effects)
            self._end_drain()
        else:
            self._apply_config(settings, settings_digest(files.settings or b""), effects)

    def _apply_config(self, settings: GroupSettings, digest: str, effects: Effects) -> None:
        """Apply settings and the assignment's effects; settings that require a rejoin start one."""
        needs_rejoin = not self._broker_session.accept_settings(settings)
        if not needs_rejoin:
            self.status.set_settings_digest(digest)
        if self.host.delivery_spans.set_endpoint(settings.traces_endpoint):
            self.host.start_task(self.host.delivery_spans.switch())
        self._effect_runner.submit_effects(effects)
        if needs_rejoin and not self._is_rejoining:
            self._is_rejoining = True
            self._effect_runner.submit_effects(self.member.drain(final=False, now=self.host.now()))
            self.host.start_task(self._rejoin_group())
        self._end_drain()
        self._divide_memory()
        self._delivery.apply_settings()

    def _log_rejection(self, effects: Effects) -> None:
        """Log why an assignment was rejected; the same reason only once in a row."""
        rejection = effects.rejection
        if rejection and rejection != self._last_rejection:
            _log.log(logging.INFO if effects.is_older else logging.WARNING, "%s", rejection)
        self._last_rejection = rejection

    def _join_group(self, settings: GroupSettings) -> bool:
        """Create the broker session; return False, and report the problem, if a Secret is missing or invalid."""
        try:
            self._broker_session.accept_settings(settings)
        except ValueError as error:
            self._config_follower.schedule_retry(Reason.MISSING_SECRET, str(error))
            return False
        self._problems.set_problem(Reason.MISSING_SECRET, "")
        self._is_rejoining = False
        return True

    async def _rejoin_group(self) -> None:
        """Rejoin with changed settings: release every queue, leave the group, then read the configuration again."""
        await self.wait_drained()
        await self._leave_group()
        self._read_config()

    # The member's decisions.

    def _run_command(self, command: Command) -> None:
        queue = command.queue
        if queue not in self.readers:
            assert self._broker_session.current  # noqa: S101 - no assignment is obeyed before the session exists
            self.readers[queue] = QueueReader(queue, self._broker_session.current, self.host)
        self.readers[queue].run_command(command)

    def _schedule_publish(self) -> None:
        """Schedule `_publish_report`, once for all changes in this turn of the event loop."""
        if not self._is_publish_scheduled:
            self._is_publish_scheduled = True
            asyncio.get_running_loop().call_soon(self._publish_report)

    def _publish_report(self) -> None:
        """Drop released readers, publish the current report, and set the timer for the member's next one.

        While effects wait for the disk this does nothing; `EffectRunner` has it called once none waits any more.
        """
        self._is_publish_scheduled = False
        if self._effect_runner.is_waiting:
            return
        report = self._effect_runner.published_report
        for queue in self.readers.keys() - self.member.leases.keys():
            reader = self.readers.pop(queue)
            _log.debug("%s is released", queue)
            self._broker_prober.on_released(reader)
            self.status.released_queues.add(queue, reader.window)
            self.host.memory_budget.grant_waiting()
        if self._last_report is not report:
            self._last_report = report
            self._divide_memory()
            self._delivery.on_queues_changed()
            for reader in self.readers.values():
                self._delivery.offer(reader)
        self.status.notify()  # always: a drain at the pod's end goes on, though its report cannot be stored
        if self._timer:
            self._timer.cancel()
        if (due := self.member.next_timer_at()) is not None:
            delay_seconds = max(0.0, due - self.host.now())
            self._timer = asyncio.get_running_loop().call_later(delay_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self.host.look_if_overdue()  # before the timers: after a stall, a takeover of queues is postponed
        if self.member.needs_takeover:  # no takeover by an outdated assignment
            self._read_config()
        self._effect_runner.submit_effects(self.member.run_due_timers(self.host.now()))

    def _divide_memory(self) -> None:
        """Divide each topic's buffer among its queues at this member, and the memory budget among all queues."""
        if self._broker_session.current:
            self.host.memory_budget.set_limits(self.host.settings.delivery.buffer, self.readers)
            for reader in self.readers.values():
                reader.wake()
            self.host.memory_budget.grant_waiting()

    # Assignments that the operator sends; drains and reports, which the operator and the pod's end request.

    def receive_assignment(self, document: bytes, digest: str) -> bool:
        """Obey an assignment that the operator has sent, before the volume shows it; return whether it is in force.

        `digest` is that of the settings that are stored with it. If others are in force, or are about to be after a
        rejoin, only the volume has both.

        Right after a stall, the request may have waited in the socket. If the node was stalled, too, the volume does
        not show yet that the sent assignment is outdated, such as by forced grants.
        """
        self.host.look_for_stall()
        has_settings = self._broker_session.current is not None and digest == self.status.settings_digest
        may_be_outdated = self.host.now() < self._ignores_sent_until
        if not has_settings or self._is_rejoining or may_be_outdated or not self._config_follower.can_store_state():
            return False
        self._effect_runner.snapshot_report()
        effects = self.member.apply_sent_assignment(document, self.host.now())
        self._log_rejection(effects)
        self._effect_runner.submit_effects(effects)
        return not (effects.rejection or self._effect_runner.is_waiting)

    def on_report_requested(self) -> None:
        """Note that the operator has requested the report."""
        self.member.note_report_request(self.host.now())

    async def drain(self, *, final: bool = False) -> None:
        """Release every queue, and return when that is done; the pod ends.

        `final` is stored, so that a restarted process of the pod does not consume again either.
        """
        self.pod_drain_started.set()
        self._effect_runner.snapshot_report()
        self._effect_runner.submit_effects(self.member.drain(final=final, now=self.host.now()))
        await self.wait_drained()

    async def wait_drained(self) -> None:
        """Wait until every queue is released."""
        while self._effect_runner.is_waiting or self.member.state != "drained":
            await self.status.wait_for_change()

    def _end_drain(self) -> None:
        """End a drain for a rejoin once the member has rejoined; a drain for the pod's end, or a final one, goes on."""
        if not self._is_rejoining and not self.pod_drain_started.is_set():
            self._effect_runner.submit_effects(self.member.end_drain(self.host.now()))
