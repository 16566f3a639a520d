"""The agent: connects what is mounted, the member's decisions, the queues' readers and the app."""

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
from rota.sidecar.consume.broker_session import Connect, Sources
from rota.sidecar.consume.filter_counts import FilterCounts
from rota.sidecar.consume.queue_reader import Reading
from rota.sidecar.effects import Steps
from rota.sidecar.member.member import Member
from rota.sidecar.member.memory_budget import MemoryBudget
from rota.sidecar.member.queue_lifecycle import Command, Event
from rota.sidecar.member_status import MemberStatus
from rota.sidecar.status.delivery_spans import DeliverySpans, open_otlp_sender
from rota.sidecar.status.problems import Health
from rota.sidecar.status.sidecar_metrics import topic_label
from rota.sidecar.storage.environment import Who
from rota.sidecar.storage.state_store import Notes
from rota.spec.resolved import Settings, settings_digest

COMMIT_SECONDS = 5.0
BEAT_SECONDS = 0.5
STOOD_STILL = 5.0  # a loop that was away for so long looks at its document before it goes on
FOR_MESSAGES = 0.25  # of the container's memory: what is at the app lies there twice more, and Python wants some

# Why a member drains; it takes its queues up again when no reason is left. A drain for the pod's end is never undone.
SETTINGS, END = "its settings are others", "it ends"

_log = logging.getLogger(__name__)


class App(Protocol):
    """How messages reach the app."""

    def offer(self, reading: Reading) -> None:
        """Deliver from a queue."""

    def wake(self) -> None:
        """Look for what to deliver."""

    def cut(self, reading: Reading) -> None:
        """End a queue's open deliveries now."""

    def queues_changed(self) -> None:
        """Hear that the report has changed: other queues may be held."""

    async def close(self) -> None:
        """Let go of what is held."""


class Sidecar:
    """One member with everything around it."""

    def __init__(self, who: Who, connect: Connect, app: Callable[["Sidecar"], App]) -> None:
        """Do nothing until `run`."""
        self.uid = who.uid
        self.readings: dict[Queue, Reading] = {}
        self.health = Health()
        self.filter_counts = FilterCounts()
        notes = Notes(Path(who.state))
        self._config = ConfigFollower(who, notes, self.health, self._look)
        remembered = notes.load(who.uid)
        self.member = Member(who.pod, who.uid, obeyed=remembered.obeyed, final=remembered.final)
        self._config.count_start(self.member)
        self._sources, self._probes = Sources(who, connect, self), Probes(self)
        self._steps = Steps(notes, self.health, self.member.report, self._obey, self._tell_soon)
        self.status = MemberStatus(self.member, self._steps, self.health, self._sources, self.readings, now=self.now)
        self.measures, self.delivery_counts = self.status.measures, self.status.delivery_counts
        self._delivery_spans = DeliverySpans(partial(open_otlp_sender, resource=_describe(who)))
        self._said = self._steps.told  # as news
        self._telling = False
        self._clock: asyncio.TimerHandle | None = None
        self._alive = self._awoke = self.now()
        self.memory_budget = MemoryBudget(memory_limit() * FOR_MESSAGES, self.readings.values)
        self._drains: set[str] = {END} if remembered.final else set()
        self.ends = asyncio.Event()  # set once a drain has begun that lasts until the pod ends
        self._why: str | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._app = app(self)

    # Its life.

    async def run(self, ending: asyncio.Event) -> None:
        """Work until told to end, then drain and leave."""
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
        for task in list(self._tasks):  # before it leaves: one of them may be about to join anew
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._leave(), self._delivery_spans.close())
        await self._app.close()

    def start(self, work: Coroutine[None, None, object]) -> None:
        """Do something beside all else; what goes wrong there is told."""
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
            self.health.unread([it.queue for it in self.readings.values() if it.is_unread(self._awoke)])
            if self._sources.settings:
                filtered = self.filter_counts.problem(self.settings.subscriptions, self.now())
                self.health.trouble(Reason.NOTHING_MATCHES, filtered)
            self._tell()
            await asyncio.sleep(BEAT_SECONDS)

    def _awake(self) -> None:
        """Look at the document before anything else, if the loop stood still."""
        before, self._alive = self._alive, self.now()
        if self._alive - before > STOOD_STILL:
            _log.warning("The sidecar stood still for %.1f s; it reads its document again", self._alive - before)
            self._awoke = self._alive
            self.member.stood_still()
            self.member.asked(self.now())  # the kubelet may have stood still, too: its volume is an old one
            try:
                self._look()
            except Exception:
                self._config.retry()  # until the document is read, nothing is delivered or committed
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

    # Documents and settings.

    def _look(self) -> None:
        files = self._config.read()
        settings = self._config.settings(files)
        if self._sources.now is None and not (settings and self._joined(settings)):
            return  # nothing can be worked, so nothing is obeyed
        if not self._config.check_disk():
            self.member.read(None, self.now())  # who stood still goes on with what is obeyed
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
        if settings is None or step.why:  # settings belong to the document beside them
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
            self._steps.take(self.member.drain(False, self.now()))  # noqa: FBT003 - not for good
            self.start(self._swap())
        self._back()
        self._limit()
        self._app.wake()

    def _send_traces_to(self, endpoint: str) -> None:
        if self._delivery_spans.take_endpoint(endpoint):
            self.start(self._delivery_spans.switch())

    def _joined(self, settings: Settings) -> bool:
        """Join for the first time, or anew; False if that cannot be, because of what is mounted."""
        try:
            self._sources.take(settings)
        except ValueError as error:
            self._config.retry(Reason.MISSING_SECRET, str(error))
            return False
        self.health.trouble(Reason.MISSING_SECRET, "")
        self._drains.discard(SETTINGS)
        return True

    async def _swap(self) -> None:
        """Join anew, with other settings, between giving everything back and taking it up again."""
        await self.drained()
        await self._leave()
        self._look()

    # What the member decides.

    def answer(self, event: Event, queue: Queue, life: int, sent: float | None = None) -> None:
        """Take an answer to a command."""
        self._steps.take(self.member.happened(event, queue, life, self.now(), sent))

    def _obey(self, command: Command) -> None:
        self._reading(command.queue).obey(command)

    def _reading(self, queue: Queue) -> Reading:
        if queue not in self.readings:
            assert self._sources.now  # noqa: S101 - no document is obeyed before
            self.readings[queue] = Reading(queue, self._sources.now, self)
        return self.readings[queue]

    def _tell_soon(self) -> None:
        """Say what has changed, once for all that changes in this turn of the loop."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        """Say what has changed, and see to what follows from it."""
        self._telling = False
        if self._steps.waiting:
            return
        report = self._steps.told
        for queue in self.readings.keys() - self.member.lives.keys():
            reading = self.readings.pop(queue)
            self._probes.given_up(reading)
            self.status.released.add(queue, reading.window)
            self.memory_budget.grant()
        if self._said is not report:
            self._said = report
            self._limit()
            self._app.queues_changed()
            for reading in self.readings.values():
                self._app.offer(reading)
        self.status.notify()  # in any case: drains go on, though what cannot be noted is not told
        if self._clock:
            self._clock.cancel()
        due = self.member.next_look()
        wait = None if due is None else max(0.0, due - self.now())
        self._clock = None if wait is None else asyncio.get_running_loop().call_later(wait, self._tick)

    def _tick(self) -> None:
        if self.member.is_waiting:  # nothing is resumed by an old document
            self._look()
        self._steps.take(self.member.tick(self.now()))

    def _limit(self) -> None:
        """Divide a topic's room by the queues of it that are worked here, and the memory by all of them."""
        if self._sources.now:
            self.memory_budget.divide(self.settings.delivery.buffer, self.readings)
            for reading in self.readings.values():
                reading.wake()
            self.memory_budget.grant()

    # Drains.

    async def drain(self, *, final: bool = False) -> None:
        """Give everything up, and return when that is done: the pod ends, or the member is drained for good."""
        self._drains.add(END)
        self.ends.set()
        self._steps.hold()
        self._steps.take(self.member.drain(final, self.now()))
        await self.drained()

    async def drained(self) -> None:
        """Wait until everything is given up."""
        while self._steps.waiting or self.member.state != "drained":
            await self.status.changed()

    def _back(self) -> None:
        if not self._drains:
            self._steps.take(self.member.back(self.now()))

    # What readings and the app ask and tell.

    def now(self) -> float:
        """Return the time on a clock that neither stops nor jumps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def settings(self) -> Settings:
        """The settings that are in force."""
        assert self._sources.settings  # noqa: S101 - nothing is delivered before
        return self._sources.settings

    def report_asked(self) -> None:
        """Note that the operator has asked for the report."""
        self.member.asked(self.now())

    @property
    def generation(self) -> int:
        """The generation that is obeyed."""
        return self.member.obeyed

    def reading(self, queue: Queue) -> Reading | None:
        """Return who reads a queue."""
        return self.readings.get(queue)

    def consumers_changed(self) -> None:
        """Hear from a broker that consumers of the group came or went."""
        self.status.consumers_changed()

    def offer(self, reading: Reading) -> None:
        """Deliver from a queue."""
        self._app.offer(reading)

    def delivery_ended(self, messages: Sequence[Message], outcome: str, seconds: float) -> None:
        """Count messages of one topic whose delivery has ended, and send the spans of those that are traced."""
        if not messages:
            return
        topics = self.settings.topics
        self.measures.ended(messages, outcome, topics)
        if self._delivery_spans.are_sent:  # else each delivery would look up its topic twice
            topic, group = topic_label(messages[0], topics), self.settings.group
            self._delivery_spans.record(messages, topic=topic, group=group, outcome=outcome, seconds=seconds)

    def cut(self, reading: Reading) -> None:
        """End a queue's open deliveries."""
        self._app.cut(reading)

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery may begin now."""
        self._sure()
        return self.member.may_deliver(queue, self.now(), self.settings.delivery.push.timeout)

    def may_send(self, queue: Queue, since: float) -> bool:
        """Whether a delivery that began then may go out now, also if we stood still since."""
        self._sure()
        return self._awoke < since or self.may_deliver(queue)

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset may be committed now."""
        self._sure()
        return self.member.may_commit(queue)

    def _sure(self) -> None:
        if self.now() - self._alive > STOOD_STILL:
            self._awake()


def _describe(who: Who) -> dict[str, str]:
    """Return the attributes by which spans name this process."""
    return {
        "service.name": "rota-sidecar",
        "service.version": version("rota-operator"),
        "service.instance.id": who.uid,
        "k8s.namespace.name": who.namespace,
        "k8s.pod.name": who.pod,
    }
