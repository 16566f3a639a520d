"""Agent of one member: connects the mounted configuration, the member's decisions, the queue readers and the app."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rota.aio import supervise
from rota.brokers.message import Message
from rota.container import memory_limit_bytes
from rota.model import Queue, Reason
from rota.sidecar.config_follower import ConfigFollower
from rota.sidecar.consume.broker_probes import BrokerProber
from rota.sidecar.consume.broker_session import BrokerSession, Connect
from rota.sidecar.consume.filter_counts import FilterCounts
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery.switch import DeliverySwitch
from rota.sidecar.effects import EffectRunner
from rota.sidecar.member.member import Member
from rota.sidecar.member.memory_budget import MemoryBudget
from rota.sidecar.member.queue_lifecycle import Command, LeaseEvent
from rota.sidecar.member_status import MemberStatus
from rota.sidecar.status.delivery_spans import DeliverySpans, open_otlp_sender
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import topic_label
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.state_store import StateStore
from rota.spec.resolved import GroupSettings, settings_digest
from rota.tls import Validity

COMMIT_SECONDS = 5.0  # seconds between two commits of a queue
MONITOR_INTERVAL_SECONDS = 0.5
STALL_SECONDS = 5.0  # after a longer stall of the event loop, the assignment is read before anything else
MESSAGE_MEMORY_SHARE = 0.25  # of the container's: messages at the app have two more copies; Python needs some

# Reasons for a drain. The member resumes its queues once no reason is left; POD_ENDS is never removed.
SETTINGS_CHANGED = "settings-changed"
POD_ENDS = "pod-ends"

_log = logging.getLogger(__name__)


class Agent:
    """Runs one member: its configuration, broker session, queue readers, status and deliveries."""

    def __init__(
        self,
        pod: PodIdentity,
        connect: Connect,
        create_delivery: Callable[["Agent"], DeliverySwitch],
        client_validity: Callable[[], Validity | None] = lambda: None,
    ) -> None:
        """Create all parts; `run` starts them. `client_validity` returns that of the certificate shown to brokers."""
        self.uid = pod.uid
        self.readers: dict[Queue, QueueReader] = {}
        self.problems = Problems()
        self.filter_counts = FilterCounts()
        state_store = StateStore(Path(pod.state_folder))
        self._config_follower = ConfigFollower(pod, state_store, self.problems, self._read_config)
        saved = state_store.load(pod.uid)
        self.member = Member(pod.name, pod.uid, obeyed_generation=saved.obeyed_generation, final=saved.final)
        self._config_follower.start_incarnation(self.member)
        self._broker_session = BrokerSession(pod, connect, self)
        self._broker_prober = BrokerProber(self.readers, self.problems)
        self._effect_runner = EffectRunner(
            state_store, self.problems, self.member.report, self._run_command, self._schedule_publish
        )
        self.status = MemberStatus(
            self.member,
            self._effect_runner,
            self.problems,
            self._broker_session,
            self.readers,
            now=self.now,
            client_validity=client_validity,
        )
        self.metrics = self.status.metrics
        self.delivery_counts = self.status.delivery_counts
        open_sender = partial(open_otlp_sender, resource=_resource_attributes(pod))
        report_export = partial(self.problems.set_problem, Reason.TRACE_EXPORT_FAILED)
        self._delivery_spans = DeliverySpans(open_sender, report_export)
        self._last_report = self._effect_runner.published_report  # the report that was last passed on
        self._is_publish_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_alive_at = self.now()  # when the event loop last looked for a stall
        self._awake_since = self._last_alive_at  # end of the last stall
        self.memory_budget = MemoryBudget(memory_limit_bytes() * MESSAGE_MEMORY_SHARE, self.readers.values)
        self._drain_reasons: set[str] = {POD_ENDS} if saved.final else set()
        self.pod_drain_started = asyncio.Event()  # set once a drain for the pod's end has started
        self._last_rejection: str | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._delivery = create_delivery(self)

    # Lifecycle.

    async def run(self, stop_requested: asyncio.Event) -> None:
        """Run until `stop_requested` is set, then drain and leave the group."""
        tasks = {
            "configuration": self._config_follower.run,
            "beat": self._monitor,
            "commits": self._commit_periodically,
            "broker probes": self._broker_prober.run,
        }
        for name, work in tasks.items():
            self.start_task(supervise(name, work, self.problems.report_task))
        await stop_requested.wait()
        self._effect_runner.skip_failed_writes()
        await self.drain()
        self._config_follower.close()
        for task in list(self._tasks):  # before leaving: a task may be about to rejoin
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._leave_group(), self._delivery_spans.close())
        await self._delivery.close()

    def start_task(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine as a task; log its failure."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("A background task of the sidecar failed", exc_info=error)

    async def _monitor(self) -> None:
        while True:
            self._detect_stall()
            self.member.set_broker_reachability(self._broker_prober.broker_reachability(self.now()))
            self.status.sample_deliveries()
            self.problems.report_stuck(self.member.stuck_queues)
            self.problems.report_unread(self._unread_queues())
            if self._broker_session.settings:
                filtered = self.filter_counts.find_problem(self.settings.subscriptions, self.now())
                self.problems.set_problem(Reason.NOTHING_MATCHES, filtered)
            self._publish_report()
            await asyncio.sleep(MONITOR_INTERVAL_SECONDS)

    def _unread_queues(self) -> list[Queue]:
        now = self.now()
        return [queue for queue, reader in self.readers.items() if reader.pull_status.is_unread(now, self._awake_since)]

    def _detect_stall(self) -> None:
        """After a stall of the event loop, read the assignment before anything else."""
        now = self.now()
        seconds = now - self._last_alive_at
        self._last_alive_at = now
        if seconds > STALL_SECONDS:
            _log.warning("The sidecar was stalled for %.1f s; it re-reads its assignment", seconds)
            self._awake_since = now
            self.member.mark_stalled()
            self.member.note_report_request(now)  # postpone a resume: the kubelet may have stalled, too
            try:
                self._read_config()
            except Exception:
                self._config_follower.schedule_retry()  # nothing is delivered or committed until a read succeeds
                raise

    async def _commit_periodically(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_SECONDS)
            for reader in self.readers.values():
                reader.start_commit()
                reader.restart_idle_pull(self._awake_since)

    async def _leave_group(self) -> None:
        await asyncio.gather(*(reader.close() for reader in self.readers.values()))
        self._broker_prober.stop_probes()
        await self._broker_session.leave()

    # Assignment and settings.

    def _read_config(self) -> None:
        files = self._config_follower.read()
        if files is None:  # nothing changes; after a stall, nothing is delivered or committed until a read succeeds
            return
        settings = self._config_follower.parse_settings(files)
        if self._broker_session.current is None and not (settings and self._join_group(settings)):
            return  # without a broker session no queue can be consumed, so no assignment is obeyed
        if not self._config_follower.may_store_state():
            self.member.apply_assignment(None, self.now())  # after a stall, continue with the obeyed assignment
            return
        self._config_follower.start_incarnation(self.member)
        if not self.member.incarnation:
            self._config_follower.schedule_retry()
        self.member.orderly = self.settings.is_orderly
        self._effect_runner.freeze_report()
        drain_timeout = settings.drain_timeout if settings else None
        effects = self.member.apply_assignment(files.assignment, self.now(), drain_timeout)
        self._log_rejection(effects.rejection)
        if settings is None or effects.rejection:  # settings are valid only with the assignment in the same ConfigMap
            self._effect_runner.submit_effects(effects)
            self._end_drain()
            return
        needs_rejoin = not self._broker_session.accept_settings(settings)
        if not needs_rejoin:
            self.status.set_settings_digest(settings_digest(files.settings or b""))
        self._send_traces_to(settings.traces_endpoint)
        self._effect_runner.submit_effects(effects)
        if needs_rejoin and SETTINGS_CHANGED not in self._drain_reasons:
            self._drain_reasons.add(SETTINGS_CHANGED)
            self._effect_runner.submit_effects(self.member.drain(final=False, now=self.now()))
            self.start_task(self._rejoin_group())
        self._end_drain()
        self._divide_memory()
        self._delivery.apply_settings()

    def _log_rejection(self, rejection: str | None) -> None:
        """Log why an assignment was rejected; the same reason only once in a row."""
        if rejection and rejection != self._last_rejection:
            _log.warning("%s", rejection)
        self._last_rejection = rejection

    def _send_traces_to(self, endpoint: str) -> None:
        if self._delivery_spans.set_endpoint(endpoint):
            self.start_task(self._delivery_spans.switch())

    def _join_group(self, settings: GroupSettings) -> bool:
        """Create the broker session; return False, and report the problem, if a Secret is missing or invalid."""
        try:
            self._broker_session.accept_settings(settings)
        except ValueError as error:
            self._config_follower.schedule_retry(Reason.MISSING_SECRET, str(error))
            return False
        self.problems.set_problem(Reason.MISSING_SECRET, "")
        self._drain_reasons.discard(SETTINGS_CHANGED)
        return True

    async def _rejoin_group(self) -> None:
        """Rejoin with changed settings: release every queue, leave the group, then read the configuration again."""
        await self.wait_drained()
        await self._leave_group()
        self._read_config()

    # The member's decisions.

    def answer_command(self, event: LeaseEvent, queue: Queue, lease_number: int, sent_at: float | None = None) -> None:
        """Pass the answer to a command on to the member."""
        self._effect_runner.submit_effects(self.member.on_event(event, queue, lease_number, self.now(), sent_at))

    def _run_command(self, command: Command) -> None:
        self._get_or_create_reader(command.queue).run_command(command)

    def _get_or_create_reader(self, queue: Queue) -> QueueReader:
        if queue not in self.readers:
            assert self._broker_session.current  # noqa: S101 - no assignment is obeyed before the session exists
            self.readers[queue] = QueueReader(queue, self._broker_session.current, self)
        return self.readers[queue]

    def _schedule_publish(self) -> None:
        """Schedule `_publish_report`, once for all changes in this turn of the event loop."""
        if not self._is_publish_scheduled:
            self._is_publish_scheduled = True
            asyncio.get_running_loop().call_soon(self._publish_report)

    def _publish_report(self) -> None:
        """Drop released readers and publish the current report; postponed while effects wait for the disk."""
        self._is_publish_scheduled = False
        if self._effect_runner.is_waiting:
            return
        report = self._effect_runner.published_report
        for queue in self.readers.keys() - self.member.leases.keys():
            reader = self.readers.pop(queue)
            _log.debug("%s is released", queue)
            self._broker_prober.on_released(reader)
            self.status.released_queues.add(queue, reader.window)
            self.memory_budget.grant_waiting()
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
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self.now()), self._on_timer)

    def _on_timer(self) -> None:
        self._check_stall()  # before the timers: after a stall, a takeover of queues is postponed
        if self.member.needs_takeover:  # do not resume by an outdated assignment
            self._read_config()
        self._effect_runner.submit_effects(self.member.run_due_timers(self.now()))

    def _divide_memory(self) -> None:
        """Divide each topic's buffer among its queues at this member, and the memory budget among all queues."""
        if self._broker_session.current:
            self.memory_budget.set_limits(self.settings.delivery.buffer, self.readers)
            for reader in self.readers.values():
                reader.wake()
            self.memory_budget.grant_waiting()

    # Drains.

    async def drain(self, *, final: bool = False) -> None:
        """Release every queue, and return when that is done: the pod ends, or with `final` for ever."""
        self._drain_reasons.add(POD_ENDS)
        self.pod_drain_started.set()
        self._effect_runner.freeze_report()
        self._effect_runner.submit_effects(self.member.drain(final=final, now=self.now()))
        await self.wait_drained()

    async def wait_drained(self) -> None:
        """Wait until every queue is released."""
        while self._effect_runner.is_waiting or self.member.state != "drained":
            await self.status.wait_for_change()

    def _end_drain(self) -> None:
        if not self._drain_reasons:
            self._effect_runner.submit_effects(self.member.end_drain(self.now()))

    # Interface for readers, deliveries and the control API.

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def settings(self) -> GroupSettings:
        """The settings in force."""
        assert self._broker_session.settings  # noqa: S101 - set before the first delivery
        return self._broker_session.settings

    def on_report_requested(self) -> None:
        """Note that the operator has requested the report."""
        self.member.note_report_request(self.now())

    @property
    def obeyed_generation(self) -> int:
        """The generation of the obeyed assignment."""
        return self.member.obeyed_generation

    def reader_of(self, queue: Queue) -> QueueReader | None:
        """Return the reader of a queue; None without one."""
        return self.readers.get(queue)

    def on_consumers_changed(self) -> None:
        """Report that consumers of the group joined or left."""
        self.status.on_consumers_changed()

    def offer(self, reader: QueueReader) -> None:
        """Deliver messages from a queue."""
        self._delivery.offer(reader)

    def on_delivery_ended(self, messages: Sequence[Message], outcome: str, seconds: float) -> None:
        """Count messages of one topic whose delivery has ended, and send spans of the traced ones."""
        if not messages:
            return
        settings = self.settings
        self.metrics.count_messages(messages, outcome, settings.topics)
        if self._delivery_spans.are_sent:  # otherwise skip a second look-up of the topic
            topic = topic_label(messages[0], settings.topics)
            self._delivery_spans.record(messages, topic=topic, group=settings.group, outcome=outcome, seconds=seconds)

    def abort_deliveries(self, reader: QueueReader) -> None:
        """Abort a queue's open deliveries."""
        self._delivery.abort_deliveries(reader)

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery of this queue may start now."""
        self._check_stall()
        return self.member.may_deliver(queue, self.now(), self.settings.delivery.push.timeout)

    def may_send(self, queue: Queue, started_at: float) -> bool:
        """Whether a delivery of that time may be sent; after a later stall only if its queue may deliver now."""
        self._check_stall()
        return self._awake_since < started_at or self.may_deliver(queue)

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset of this queue may be committed now."""
        self._check_stall()
        return self.member.may_commit(queue)

    def _check_stall(self) -> None:
        if self.now() - self._last_alive_at > STALL_SECONDS:
            self._detect_stall()


def _resource_attributes(pod: PodIdentity) -> dict[str, str]:
    """Return the resource attributes that identify this process in spans."""
    return {
        "service.name": "rota-sidecar",
        "service.version": version("rota-operator"),
        "service.instance.id": pod.uid,
        "k8s.namespace.name": pod.namespace,
        "k8s.pod.name": pod.name,
    }
