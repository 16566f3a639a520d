"""Agent of one member: connects the mounted configuration, the member's decisions, the queue readers and the app."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from rota.aio import supervise
from rota.brokers.message import Message
from rota.container import memory_limit
from rota.model import Queue, Reason
from rota.sidecar.config_follower import ConfigFollower
from rota.sidecar.consume.broker_probes import Probes
from rota.sidecar.consume.broker_session import BrokerSession, Connect
from rota.sidecar.consume.filter_counts import FilterCounts
from rota.sidecar.consume.queue_reader import QueueReader
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

COMMIT_SECONDS = 5.0
BEAT_SECONDS = 0.5
STOOD_STILL = 5.0  # seconds: after a longer stall of the event loop, the assignment is read before anything else
FOR_MESSAGES = 0.25  # share of the container's memory: messages at the app have two more copies; Python needs some

# Reasons for a drain. The member resumes its queues once no reason is left; END, the pod's end, is never removed.
SETTINGS, END = "its settings are others", "it ends"

_log = logging.getLogger(__name__)


class App(Protocol):
    """Delivers messages to the app, by Push or Pull."""

    def offer(self, reading: QueueReader) -> None:
        """Deliver messages from a queue."""

    def wake(self) -> None:
        """Apply the current settings, and start possible deliveries."""

    def cut(self, reading: QueueReader) -> None:
        """Abort a queue's open deliveries now."""

    def queues_changed(self) -> None:
        """Handle a changed report: the member may hold other queues."""

    async def close(self) -> None:
        """Close connections and ports."""


class Agent:
    """Runs one member: its configuration, broker session, queue readers, status and deliveries."""

    def __init__(
        self,
        pod: PodIdentity,
        connect: Connect,
        app: Callable[["Agent"], App],
        client_validity: Callable[[], Validity | None] = lambda: None,
    ) -> None:
        """Create all parts; `run` starts them. `client_validity` returns that of the certificate shown to brokers."""
        self.uid = pod.uid
        self.readings: dict[Queue, QueueReader] = {}
        self.health = Problems()
        self.filter_counts = FilterCounts()
        notes = StateStore(Path(pod.state))
        self._config = ConfigFollower(pod, notes, self.health, self._look)
        remembered = notes.load(pod.uid)
        self.member = Member(pod.pod, pod.uid, obeyed=remembered.obeyed, final=remembered.final)
        self._config.count_start(self.member)
        self._sources, self._probes = BrokerSession(pod, connect, self), Probes(self)
        self._steps = EffectRunner(notes, self.health, self.member.report, self._obey, self._tell_soon)
        self.status = MemberStatus(
            self.member,
            self._steps,
            self.health,
            self._sources,
            self.readings,
            now=self.now,
            client_validity=client_validity,
        )
        self.measures, self.delivery_counts = self.status.measures, self.status.delivery_counts
        self._delivery_spans = DeliverySpans(
            partial(open_otlp_sender, resource=_describe(pod)), partial(self.health.trouble, Reason.TRACES_NOT_SENT)
        )
        self._said = self._steps.told  # the report that was last passed on
        self._telling = False
        self._clock: asyncio.TimerHandle | None = None
        self._alive = self._awoke = self.now()
        self.memory_budget = MemoryBudget(memory_limit() * FOR_MESSAGES, self.readings.values)
        self._drains: set[str] = {END} if remembered.final else set()
        self.ends = asyncio.Event()  # set once a drain for the pod's end has started
        self._why: str | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._app = app(self)

    # Lifecycle.

    async def run(self, ending: asyncio.Event) -> None:
        """Run until `ending` is set, then drain and leave the group."""
        tasks = {
            "configuration": self._config.run,
            "beat": self._beat,
            "commits": self._commit,
            "broker probes": self._probes.run,
        }
        for name, work in tasks.items():
            self.start(supervise(name, work, self.health.task_failed))
        await ending.wait()
        self._steps.end()
        await self.drain()
        self._config.close()
        for task in list(self._tasks):  # before leaving: a task may be about to rejoin
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._leave(), self._delivery_spans.close())
        await self._app.close()

    def start(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine as a task; log its failure."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("A part of the sidecar failed", exc_info=error)

    async def _beat(self) -> None:
        while True:
            self._awake()
            self.member.reaches(self._probes.reached(self.now()))
            self.status.sample_deliveries()
            self.health.stuck(self.member.stuck)
            self.health.unread([reading.queue for reading in self.readings.values() if reading.is_unread(self._awoke)])
            if self._sources.settings:
                filtered = self.filter_counts.problem(self.settings.subscriptions, self.now())
                self.health.trouble(Reason.NOTHING_MATCHES, filtered)
            self._tell()
            await asyncio.sleep(BEAT_SECONDS)

    def _awake(self) -> None:
        """After a stall of the event loop, read the assignment before anything else."""
        last_alive, self._alive = self._alive, self.now()
        if self._alive - last_alive > STOOD_STILL:
            _log.warning("The sidecar stood still for %.1f s; it reads its document again", self._alive - last_alive)
            self._awoke = self._alive
            self.member.stood_still()
            self.member.asked(self.now())  # postpone a resume: the kubelet may have stalled, too
            try:
                self._look()
            except Exception:
                self._config.retry()  # nothing is delivered or committed until a read succeeds
                raise

    async def _commit(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_SECONDS)
            for reading in self.readings.values():
                reading.commit_soon()
                reading.give_up_idle_pull(self._awoke)

    async def _leave(self) -> None:
        await asyncio.gather(*(reading.close() for reading in self.readings.values()))
        self._probes.forget()
        await self._sources.leave()

    # Assignment and settings.

    def _look(self) -> None:
        files = self._config.read()
        settings = self._config.settings(files)
        if self._sources.now is None and not (settings and self._joined(settings)):
            return  # without a broker session no queue can be consumed, so no assignment is obeyed
        if not self._config.check_disk():
            self.member.read(None, self.now())  # after a stall, continue with the obeyed assignment
            return
        self._config.count_start(self.member)
        if not self.member.incarnation:
            self._config.retry()
        self.member.orderly = self.settings.orderly
        self._steps.hold()
        step = self.member.read(files.assignment, self.now(), settings.drain_timeout if settings else None)
        if step.why and step.why != self._why:
            _log.warning("%s", step.why)
        self._why = step.why
        if settings is None or step.why:  # settings are valid only with the assignment in the same ConfigMap
            self._steps.take(step)
            self._back()
            return
        swaps = not self._sources.take(settings)
        if not swaps:
            self.status.settings_in_force(settings_digest(files.settings or b""))
        self._send_traces_to(settings.traces_endpoint)
        self._steps.take(step)
        if swaps and SETTINGS not in self._drains:
            self._drains.add(SETTINGS)
            self._steps.take(self.member.drain(False, self.now()))  # noqa: FBT003 - not final
            self.start(self._swap())
        self._back()
        self._limit()
        self._app.wake()

    def _send_traces_to(self, endpoint: str) -> None:
        if self._delivery_spans.take_endpoint(endpoint):
            self.start(self._delivery_spans.switch())

    def _joined(self, settings: GroupSettings) -> bool:
        """Create the broker session; return False, and report the problem, if a Secret is missing or invalid."""
        try:
            self._sources.take(settings)
        except ValueError as error:
            self._config.retry(Reason.MISSING_SECRET, str(error))
            return False
        self.health.trouble(Reason.MISSING_SECRET, "")
        self._drains.discard(SETTINGS)
        return True

    async def _swap(self) -> None:
        """Rejoin with changed settings: release every queue, leave the group, then read the configuration again."""
        await self.drained()
        await self._leave()
        self._look()

    # The member's decisions.

    def answer(self, event: LeaseEvent, queue: Queue, life: int, sent: float | None = None) -> None:
        """Pass the answer to a command on to the member."""
        self._steps.take(self.member.happened(event, queue, life, self.now(), sent))

    def _obey(self, command: Command) -> None:
        self._reading(command.queue).obey(command)

    def _reading(self, queue: Queue) -> QueueReader:
        if queue not in self.readings:
            assert self._sources.now  # noqa: S101 - no assignment is obeyed before the session exists
            self.readings[queue] = QueueReader(queue, self._sources.now, self)
        return self.readings[queue]

    def _tell_soon(self) -> None:
        """Schedule `_tell`, once for all changes in this turn of the event loop."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        """Drop released readers and publish the current report; postponed while a step waits for the disk."""
        self._telling = False
        if self._steps.waiting:
            return
        report = self._steps.told
        for queue in self.readings.keys() - self.member.lives.keys():
            reading = self.readings.pop(queue)
            _log.debug("%s is released", queue)
            self._probes.given_up(reading)
            self.status.released.add(queue, reading.window)
            self.memory_budget.grant()
        if self._said is not report:
            self._said = report
            self._limit()
            self._app.queues_changed()
            for reading in self.readings.values():
                self._app.offer(reading)
        self.status.notify()  # always: a drain at the pod's end goes on, though its report cannot be stored
        if self._clock:
            self._clock.cancel()
        due = self.member.next_look()
        wait = None if due is None else max(0.0, due - self.now())
        self._clock = None if wait is None else asyncio.get_running_loop().call_later(wait, self._tick)

    def _tick(self) -> None:
        if self.member.is_waiting:  # do not resume by an outdated assignment
            self._look()
        self._steps.take(self.member.tick(self.now()))

    def _limit(self) -> None:
        """Divide each topic's buffer among its queues at this member, and the memory budget among all queues."""
        if self._sources.now:
            self.memory_budget.divide(self.settings.delivery.buffer, self.readings)
            for reading in self.readings.values():
                reading.wake()
            self.memory_budget.grant()

    # Drains.

    async def drain(self, *, final: bool = False) -> None:
        """Release every queue, and return when that is done: the pod ends, or (`final`) the member drains for good."""
        self._drains.add(END)
        self.ends.set()
        self._steps.hold()
        self._steps.take(self.member.drain(final, self.now()))
        await self.drained()

    async def drained(self) -> None:
        """Wait until every queue is released."""
        while self._steps.waiting or self.member.state != "drained":
            await self.status.changed()

    def _back(self) -> None:
        if not self._drains:
            self._steps.take(self.member.back(self.now()))

    # Interface for readers, deliveries and the control API.

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def settings(self) -> GroupSettings:
        """The settings in force."""
        assert self._sources.settings  # noqa: S101 - set before the first delivery
        return self._sources.settings

    def report_asked(self) -> None:
        """Note that the operator has requested the report."""
        self.member.asked(self.now())

    @property
    def generation(self) -> int:
        """The generation of the obeyed assignment."""
        return self.member.obeyed

    def reading(self, queue: Queue) -> QueueReader | None:
        """Return the reader of a queue; None without one."""
        return self.readings.get(queue)

    def consumers_changed(self) -> None:
        """Report that consumers of the group joined or left."""
        self.status.consumers_changed()

    def offer(self, reading: QueueReader) -> None:
        """Deliver messages from a queue."""
        self._app.offer(reading)

    def delivery_ended(self, messages: Sequence[Message], outcome: str, seconds: float) -> None:
        """Count messages of one topic whose delivery has ended, and send spans of the traced ones."""
        if not messages:
            return
        topics = self.settings.topics
        self.measures.ended(messages, outcome, topics)
        if self._delivery_spans.are_sent:  # otherwise skip a second look-up of the topic
            topic, group = topic_label(messages[0], topics), self.settings.group
            self._delivery_spans.record(messages, topic=topic, group=group, outcome=outcome, seconds=seconds)

    def cut(self, reading: QueueReader) -> None:
        """Abort a queue's open deliveries."""
        self._app.cut(reading)

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery of this queue may start now."""
        self._sure()
        return self.member.may_deliver(queue, self.now(), self.settings.delivery.push.timeout)

    def may_send(self, queue: Queue, since: float) -> bool:
        """Whether a delivery started at `since` may be sent; after a later stall only if its queue may deliver now."""
        self._sure()
        return self._awoke < since or self.may_deliver(queue)

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset of this queue may be committed now."""
        self._sure()
        return self.member.may_commit(queue)

    def _sure(self) -> None:
        if self.now() - self._alive > STOOD_STILL:
            self._awake()


def _describe(pod: PodIdentity) -> dict[str, str]:
    """Return the resource attributes that identify this process in spans."""
    return {
        "service.name": "rota-sidecar",
        "service.version": version("rota-operator"),
        "service.instance.id": pod.uid,
        "k8s.namespace.name": pod.namespace,
        "k8s.pod.name": pod.pod,
    }
