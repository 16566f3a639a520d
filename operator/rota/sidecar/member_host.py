"""Host of a member's parts: what its broker session, queue readers and deliveries need of the member.

**After a stall of this process, the assignment is read before anything is delivered or committed**: during the stall
the operator may have granted the queues to another member by force. Code that runs right after a stall may come before
the agent's periodic look for stalls, so each `may_` method looks for one first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib.metadata import version

from rota.aio import StallDetector
from rota.brokers.message import Message
from rota.container import memory_limit_bytes
from rota.model import Queue, Reason
from rota.sidecar.consume.broker_session import BrokerSession, Connect
from rota.sidecar.consume.filter_counts import FilterCounts
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery.settlement import DeliveryHost
from rota.sidecar.delivery.switch import DeliverySwitch
from rota.sidecar.effects import EffectRunner
from rota.sidecar.member.member import Member
from rota.sidecar.member.memory_budget import MemoryBudget
from rota.sidecar.member.queue_lifecycle import LeaseEvent
from rota.sidecar.member_status import MemberStatus
from rota.sidecar.status.delivery_spans import DeliverySpans, open_otlp_sender
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import topic_label
from rota.sidecar.storage.environment import PodIdentity
from rota.spec.resolved import GroupSettings
from rota.tls import Validity

# Part of the container's memory limit: messages at the app exist in two more copies, and Python needs memory, too.
MESSAGE_MEMORY_FRACTION = 0.25

CreateDelivery = Callable[[DeliveryHost], DeliverySwitch]

_log = logging.getLogger(__name__)


class MemberHost:
    """The member as its broker session, queue readers and deliveries need it; they are given this host."""

    def __init__(
        self,
        pod: PodIdentity,
        connect: Connect,
        create_delivery: CreateDelivery,
        member: Member,
        effect_runner: EffectRunner,
        *,
        problems: Problems,
        client_validity: Callable[[], Validity | None],
        on_stall: Callable[[float], None],
    ) -> None:
        """`on_stall` is called with the seconds of a stall, and reads the assignment."""
        self.member = member
        self.problems = problems
        self.filter_counts = FilterCounts()
        self.readers: dict[Queue, QueueReader] = {}
        self.broker_session = BrokerSession(pod, connect, self)
        self.status = MemberStatus(
            member,
            effect_runner,
            problems,
            self.broker_session,
            self.readers,
            now=self.now,
            client_validity=client_validity,
        )
        self.metrics = self.status.metrics
        self.delivery_counts = self.status.delivery_counts
        self.memory_budget = MemoryBudget(memory_limit_bytes() * MESSAGE_MEMORY_FRACTION, self.readers.values)
        self.delivery_spans = DeliverySpans(
            partial(open_otlp_sender, resource=_resource_attributes(pod)),
            partial(problems.set_problem, Reason.TRACE_EXPORT_FAILED),
        )
        self.stall_detector = StallDetector(self.now())
        self._effect_runner = effect_runner
        self._on_stall = on_stall
        self._tasks: set[asyncio.Task[object]] = set()
        self.delivery = create_delivery(self)

    def now(self) -> float:
        """Return the seconds of a clock that never stops and never jumps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def settings(self) -> GroupSettings:
        """The settings in force."""
        assert self.broker_session.settings  # noqa: S101 - set before the first delivery
        return self.broker_session.settings

    @property
    def obeyed_generation(self) -> int:
        """The generation of the obeyed assignment."""
        return self.member.obeyed_generation

    def reader_of(self, queue: Queue) -> QueueReader | None:
        """Return the reader of a queue; None without one."""
        return self.readers.get(queue)

    def look_for_stall(self) -> None:
        """Call `on_stall` if this process was stalled since the last call; the agent calls this periodically."""
        if stalled_seconds := self.stall_detector.observe(self.now()):
            self._on_stall(stalled_seconds)

    def look_if_overdue(self) -> None:
        """Look for a stall now if the periodic call is overdue: the caller is about to act before it."""
        if self.stall_detector.is_overdue(self.now()):
            self.look_for_stall()

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery of this queue may start now."""
        self.look_if_overdue()
        return self.member.may_deliver(queue, self.now(), self.settings.delivery.push.timeout)

    def may_send(self, queue: Queue, started_at: float) -> bool:
        """Whether a delivery that started at `started_at` may be sent.

        It may if the process has not been stalled since; otherwise only if its queue may still deliver.
        """
        self.look_if_overdue()
        return self.stall_detector.awake_since < started_at or self.may_deliver(queue)

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset of this queue may be committed now."""
        self.look_if_overdue()
        return self.member.may_commit(queue)

    def answer_command(self, event: LeaseEvent, queue: Queue, lease_number: int, sent_at: float | None = None) -> None:
        """Pass the answer to a command on to the member."""
        self._effect_runner.submit_effects(self.member.on_event(event, queue, lease_number, self.now(), sent_at))

    def on_consumers_changed(self) -> None:
        """Report that consumers of the group joined or left."""
        self.status.on_consumers_changed()

    def offer(self, reader: QueueReader) -> None:
        """Deliver messages from a queue."""
        self.delivery.offer(reader)

    def abort_deliveries(self, reader: QueueReader) -> None:
        """Abort a queue's open deliveries."""
        self.delivery.abort_deliveries(reader)

    def on_delivery_ended(self, messages: Sequence[Message], outcome: str, seconds: float) -> None:
        """Count messages of one topic whose delivery has ended, and send spans of the traced ones."""
        if not messages:
            return
        settings = self.settings
        self.metrics.count_messages(messages, outcome, settings.topics)
        if self.delivery_spans.are_sent:  # checked here to spare the look-up of the topic
            topic = topic_label(messages[0], settings.topics)
            self.delivery_spans.record(messages, topic=topic, group=settings.group, outcome=outcome, seconds=seconds)

    def start_task(self, work: Coroutine[None, None, object]) -> None:
        """Run a coroutine as a task; log its failure."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("A background task of the sidecar failed", exc_info=error)

    async def cancel_tasks(self) -> None:
        """Cancel all tasks, and wait for their end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _resource_attributes(pod: PodIdentity) -> dict[str, str]:
    """Return the resource attributes that identify this process in spans."""
    return {
        "service.name": "rota-sidecar",
        "service.version": version("rota-operator"),
        "service.instance.id": pod.uid,
        "k8s.namespace.name": pod.namespace,
        "k8s.pod.name": pod.name,
    }
