"""The reader of one queue: finds the start offset, locks, pulls and commits, as the member commands.

A command starts or stops fetching at once. Requests to the broker are sent one after the other; a request that finds
the queue's life number changed when its turn comes is dropped without an answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from rota.aio import to_the_end
from rota.brokers.errors import BrokerError, Refused, SwitchedOff, Unknown, Unreachable
from rota.brokers.port import Consumer, Pulled
from rota.model import RETRY, Queue
from rota.sidecar.consume.start_offset import FROM_THE_OLDEST, Store, beginning
from rota.sidecar.member.memory_budget import MemoryBudget, PullAdmission, Reservation
from rota.sidecar.member.queue_lifecycle import Act, Command, Event
from rota.sidecar.member.window import Commit, Limits, Window
from rota.sidecar.status.problems import Health
from rota.sidecar.status.sidecar_metrics import Measures
from rota.spec.resolved import Settings

PULL_SECONDS = 15.0  # that a broker holds a pull for which there is nothing
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # after a pull that failed
SWITCHED_OFF_PAUSE = 3.0
COMMIT_PAUSE = 1.0
RESUME_AT_FREE_SHARE = 4  # a queue that reached its limit fetches again once a quarter of it is free

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Source:
    """Where messages come from, as the settings say; ready once the member is known there."""

    settings: Settings
    consumer: Consumer
    store: Store
    begun: Callable[
        [str], Awaitable[float | None]
    ]  # when the group began to consume a topic, according to the offset store
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Shell(Protocol):
    """What a reading tells, and asks, of the member that it is a part of."""

    health: Health
    measures: Measures
    memory_budget: MemoryBudget

    def answer(self, event: Event, queue: Queue, life: int, sent: float | None = None) -> None:
        """Take an answer to a command."""

    def offer(self, reading: "Reading") -> None:
        """Deliver from it: it has something."""

    def cut(self, reading: "Reading") -> None:
        """End its open deliveries now."""

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset may be committed."""

    def now(self) -> float:
        """Return the time on a clock that never stops and never jumps."""


class Reading:
    """Reads a queue until the member has released it; public attributes are read-only for others."""

    def __init__(self, queue: Queue, source: Source, shell: Shell) -> None:
        """Do nothing yet."""
        self.queue, self.source, self.limits = queue, source, Limits()
        self.window = Window(next=0, orderly=source.settings.orderly, committed=0)
        self.again = queue.topic == RETRY + source.settings.group  # what is in it was tried before, by this group
        self.pulled_at = self.delivered_at = 0.0
        self._shell = shell
        self._life = self._stopped = 0
        self._doubts = False  # somebody else may have worked it: it is about to be released, or its broker was away
        self._late = False  # the drain is over, and what cannot be committed now never will be
        self._changed = asyncio.Event()
        self._refused_offset = self._refused_bytes = 0  # of the message that the last pull had no memory for
        self._turn, self._committing = asyncio.Lock(), asyncio.Lock()
        self._pulling: asyncio.Task[None] | None = None
        self._placing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def obey(self, command: Command) -> None:
        """Carry out a command; its answer comes by `Shell.answer`."""
        self._life = life = command.life
        match command.act:
            case Act.LOCK:
                self._start(self._lock(life))
            case Act.PLACE:
                self._placing = self._start(self._place(life))
            case Act.FETCH:
                self.window.resume()
                self._halt()
                self._pulling = self._start(self._pull())
                self._shell.offer(self)
            case Act.STOP:
                self._stopped, self._late, self._doubts = life, False, True
                self.window.stop()
                self._halt()
                self._start(self._end(life))
            case Act.CUT:
                self._late = True
                self._shell.cut(self)
            case Act.UNLOCK:
                self._start(self._unlock(life))
        self.changed()

    def changed(self) -> None:
        """Notice that a delivery has ended, or that more may be fetched, by other queues too: memory may be free."""
        self.wake()
        self._shell.memory_budget.grant()

    def wake(self) -> None:
        """Notice that the queue's limits may have changed."""
        self._changed.set()

    def reset(self, offset: int) -> None:
        """Go on there: somebody set the group's offset."""
        self.window.reset(offset)
        self._doubts = False
        self._pull_anew()

    def _pull_anew(self) -> None:
        if self._pulling:  # it may wait for long where it was
            self._pulling.cancel()
            self._pulling = self._start(self._pull())
        self.changed()

    async def close(self) -> None:
        """Stop everything, finished or not."""
        self._shell.health.takes(self.queue)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def commit(self) -> bool:
        """Commit what is finished, if it may be; whether the broker has all of it."""
        async with self._committing:
            commit = self.window.to_commit()
            if commit is None:
                return True
            if not self._shell.may_commit(self.queue):
                return False
            try:
                if self._doubts and await self._is_passed(commit):
                    return True
                await self._commit(commit.offset)
            except (BrokerError, OSError) as error:
                self._say("Committing", error)
                self._shell.measures.commits.add("failed")
                return False
            self._shell.measures.commits.add("done")
            self.window.answered(commit)
            self._doubts = False
            return True

    async def _commit(self, offset: int) -> None:
        """Commit; while nothing is pulled, this tells whether the broker can be reached."""
        try:
            await self.source.store.commit(self.queue, offset)
        except Unreachable:
            if self._stopped == self._life:
                self._shell.health.missed(self.queue.broker, self._shell.now())
            raise
        if self.source.store is self.source.consumer:
            self._answered()

    async def _is_passed(self, commit: Commit) -> bool:
        """Whether others have worked the queue meanwhile, and are further; else what they did would come again."""
        there = await self.source.store.committed(self.queue)
        passed = there is not None and self.window.passed(commit, there)
        if passed:
            self._pull_anew()
        return passed

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("The work on %s failed", self.queue, exc_info=error)

    def _halt(self) -> None:
        """Stop what is under way and would only be in the way: a pull, or the search for a beginning."""
        for task in (self._pulling, self._placing):
            if task:
                task.cancel()
        self._pulling = self._placing = None
        self._shell.health.takes(self.queue)

    async def _lock(self, life: int) -> None:
        await self.source.ready.wait()
        async with self._turn:
            if self._life != life or self._stopped == life:
                return
            sent = self._shell.now()
            try:
                mine = await self.source.consumer.lock([self.queue])
            except BrokerError as error:
                self._failed("Locking", error)
                self._answer(Event.FAILED, life)
            else:
                self._answered()
                self._answer(Event.LOCKED if self.queue in mine else Event.REFUSED, life, sent)

    async def _unlock(self, life: int) -> None:
        async with self._turn:
            try:
                await self.source.consumer.unlock([self.queue])
            except BrokerError as error:
                self._failed("Unlocking", error)
            self._answer(Event.UNLOCKED, life)

    async def _place(self, life: int) -> None:
        await self.source.ready.wait()
        await self._until_empty(life)  # deliveries under the previous lock: a reset now would discard their results
        async with self._turn, self._committing:
            if self._life != life:
                return
            settings, consumer, store = self.source.settings, self.source.consumer, self.source.store
            try:
                wanted = FROM_THE_OLDEST if self.again else settings.start_from
                begun = await self.source.begun(self.queue.topic)
                start = await beginning(self.queue, consumer, store, wanted, begun)
            except (BrokerError, OSError) as error:
                self._failed("Finding where to begin", error)
                self._answer(Event.FAILED, life)
                return
            self._answered()
            # What was finished here stays so: a broker that was killed has forgotten what it was told last.
            self.window.reset(max(start, self.window.committable), start)
        self.changed()
        self._answer(Event.PLACED, life)

    async def _end(self, life: int) -> None:
        """Wait until what is open has ended, and commit; nothing is said if the queue was given back meanwhile."""
        async with self._turn:
            await self._until_empty(life)
            while self._life == life and not await self.commit():
                if self._late:
                    _log.warning("%s is released with %d not committed", self.queue, self.window.committable)
                    break
                await asyncio.sleep(COMMIT_PAUSE)
        self._answer(Event.EMPTY, life)

    async def _until_empty(self, life: int) -> None:
        """Wait until no delivery is open, or this life is over."""
        while self._life == life and not self.window.empty:
            await self._change()

    def _answer(self, event: Event, life: int, sent: float | None = None) -> None:
        if self._life == life:
            self._shell.answer(event, self.queue, life, sent)

    async def _pull(self) -> None:
        pause, told = 0.0, ""
        while True:
            reservation = await self._wait_for_memory()
            asked = self.window.next
            with PullAdmission(self._shell.memory_budget, self, reservation) as admission:
                try:
                    found = await self._ask(asked, admission, retries=bool(pause))
                except (BrokerError, ValueError) as error:  # the latter where the settings name no such topic
                    pause = _next_pause(error, pause)
                    self._shell.measures.pulls.add(_outcome(error))
                    self._failed("Pulling", error, quietly=str(error) == told)
                    told = str(error)
                    self._refused_bytes = 0  # reserve no memory for a broker that does not answer
                else:
                    if pause:  # the broker may have been killed, and have forgotten what it was told last
                        self.window.committed, self._doubts = None, True
                    pause, told = 0.0, ""
                    self._put(asked, found, admission)
            if pause:
                await asyncio.sleep(pause)

    def _put(self, asked: int, found: Pulled, admission: PullAdmission) -> None:
        """Take what a pull brought, and remember the message that there was no memory for."""
        self.pulled_at = self._shell.now()
        self._answered()
        self._shell.health.takes(self.queue)
        self._shell.measures.pulls.add(_result(found, admission))
        self.window.put(asked, found)
        self._refused_offset, self._refused_bytes = found.next, admission.refused_bytes
        if found.messages:
            self._shell.offer(self)

    async def _wait_for_memory(self) -> Reservation | None:
        """Wait until the window, and the member's memory, have room; after a refusal return what is reserved for it."""
        while self.window.full(self.limits) or not self._has_drained():
            await self._change()
        if not self._is_refused():
            return None
        reservation = self._shell.memory_budget.reserve(self, self._refused_bytes, self._changed.set)
        try:
            while not reservation.granted:
                await self._change()
        except asyncio.CancelledError:
            self._shell.memory_budget.cancel(reservation)
            raise
        return reservation

    def _is_refused(self) -> bool:
        """Whether the next message is one that the last pull had no memory for."""
        return bool(self._refused_bytes) and self.window.next == self._refused_offset

    def _has_drained(self) -> bool:
        """Whether a queue that was refused memory has room for the message and, if any, for some more."""
        if not self._is_refused() or not self.window.buffered:
            return True
        wanted_bytes = max(self._refused_bytes, self.limits.bytes // RESUME_AT_FREE_SHARE)
        return self.window.memory_bytes + wanted_bytes <= self.limits.bytes

    async def _change(self) -> None:
        """Wait until something of the queue has changed, or memory was granted to it."""
        self._changed.clear()
        await self._changed.wait()

    async def _ask(self, offset: int, admission: PullAdmission, *, retries: bool) -> Pulled:
        """Pull; after a failure without being held, so that it is known at once whether the broker answers again."""
        if retries:
            return await self.source.consumer.pull(self.queue, offset, wait=0.0, admission=admission)
        return await self._ask_and_commit(offset, admission)

    async def _ask_and_commit(self, offset: int, admission: PullAdmission) -> Pulled:
        """Pull, and take along what is to be committed: so a crash repeats little more than what was in flight.

        A broker stores what was taken along when it has looked for messages, which may be after a commit that was sent
        later: so that waits for this one's answer, and to have it soon the pull is not held, and not given up.
        If the group was reset meanwhile, the broker puts that back, and says so: the next pull takes the reset along.
        """
        consumer = self.source.consumer
        if self.source.store is consumer and not self._committing.locked():
            async with self._committing:
                # Chosen with the lock held: while this pull waits for it, another commit may store a higher offset.
                commit = self.window.to_commit() if self._is_sure() else None
                if commit:
                    pulling = consumer.pull(self.queue, offset, wait=0.0, commit=commit.offset, admission=admission)
                    found = await to_the_end(pulling)
                    self._shell.measures.commits.add("done")
                    self.window.answered(commit)
                    return found
        return await consumer.pull(self.queue, offset, wait=PULL_SECONDS, admission=admission)

    def _is_sure(self) -> bool:
        """Whether nobody else can have worked the queue meanwhile."""
        return not self._doubts and self._shell.may_commit(self.queue)

    def _answered(self) -> None:
        self._shell.health.reached(self.queue.broker)

    def _failed(self, what: str, error: Exception, *, quietly: bool = False) -> None:
        if isinstance(error, Unreachable):
            self._shell.health.missed(self.queue.broker, self._shell.now())
        elif isinstance(error, Refused):  # it was asked, and said no
            self._answered()
            if not isinstance(error, SwitchedOff):  # that is the group's, and the operator's to tell
                self._shell.health.refuses(self.queue, str(error))
        if not quietly:
            self._say(what, error)

    def _say(self, what: str, error: Exception) -> None:
        _log.warning("%s failed for %s: %s", what, self.queue, error)


def _next_pause(error: Exception, pause: float) -> float:
    """Return for how many seconds a queue rests after a pull that failed."""
    if isinstance(error, SwitchedOff):
        return SWITCHED_OFF_PAUSE
    return min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)


def _result(found: Pulled, admission: PullAdmission) -> str:
    """Return the label by which an answered pull is counted."""
    if found.moved:
        return "moved"
    if found.messages:
        return "found"
    return "no_memory" if admission.refused_bytes else "empty"


def _outcome(error: Exception) -> str:
    kinds = ((SwitchedOff, "switched_off"), (Unreachable, "unreachable"), (Unknown, "unknown"))
    return next((name for kind, name in kinds if isinstance(error, kind)), "refused")
