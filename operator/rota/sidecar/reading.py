"""One queue at its broker: placed, locked, pulled from, committed, as the member commands.

What a command says about fetching holds at once. What must be asked of the broker takes its turn, one thing after
another; who waits there and finds that its life has another number by now has nothing to say any more.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from rota.brokers import BrokerError, Consumer, Pulled, Refused, SwitchedOff, Unknown, Unreachable
from rota.model import RETRY, Queue
from rota.sidecar.beginning import FROM_THE_OLDEST, Store, beginning
from rota.sidecar.health import Health
from rota.sidecar.machine import Act, Command, Event
from rota.sidecar.measures import Measures
from rota.sidecar.window import Commit, Limits, Window
from rota.spec.resolved import Settings
from rota.waiting import to_the_end

PULL_SECONDS = 15.0  # that a broker holds a pull for which there is nothing
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # after a pull that failed
SWITCHED_OFF_PAUSE = 3.0
COMMIT_PAUSE = 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Source:
    """Where messages come from, as the settings say; ready once the member is known there."""

    settings: Settings
    consumer: Consumer
    store: Store
    begun: Callable[[str], Awaitable[float | None]]  # since when a topic is worked, by who keeps the offsets
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Shell(Protocol):
    """What a reading tells, and asks, of the member that it is a part of."""

    health: Health
    measures: Measures

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
    """One queue from its first command until the member has released it; what has no underscore is there to be read."""

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
        """Notice that a delivery has ended, or that more may be fetched."""
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
        await self._until_empty(life)  # of a lock before: what were forgotten while it is open would end for nothing
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
            self._changed.clear()
            await self._changed.wait()

    def _answer(self, event: Event, life: int, sent: float | None = None) -> None:
        if self._life == life:
            self._shell.answer(event, self.queue, life, sent)

    async def _pull(self) -> None:
        pause, told = 0.0, ""
        while True:
            while self.window.full(self.limits):
                self._changed.clear()
                await self._changed.wait()
            asked = self.window.next
            try:
                # Whether a broker that failed answers again is known at once, not when the next message comes.
                found = await (self.source.consumer.pull(self.queue, asked, wait=0.0) if pause else self._ask(asked))
            except (BrokerError, ValueError) as error:  # the latter where the settings name no such topic
                pause = min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
                if isinstance(error, SwitchedOff):
                    pause = SWITCHED_OFF_PAUSE
                self._shell.measures.pulls.add(_outcome(error))
                self._failed("Pulling", error, quietly=str(error) == told)
                told = str(error)
                await asyncio.sleep(pause)
                continue
            if pause:  # the broker may have been killed, and have forgotten what it was told last
                self.window.committed, self._doubts = None, True
            pause, told, self.pulled_at = 0.0, "", self._shell.now()
            self._answered()
            self._shell.health.takes(self.queue)
            self._shell.measures.pulls.add("moved" if found.moved else "found" if found.messages else "empty")
            self.window.put(asked, found)
            if found.messages:
                self._shell.offer(self)

    async def _ask(self, offset: int) -> Pulled:
        """Pull, and take along what is to be committed: so a crash repeats little more than what was in flight.

        A broker stores what was taken along when it has looked for messages, which may be after a commit that was sent
        later: so that waits for this one's answer, and to have it soon the pull is not held, and not given up.
        If the group was reset meanwhile, the broker puts that back, and says so: the next pull takes the reset along.
        """
        consumer, mine = self.source.consumer, self.source.store is self.source.consumer
        sure = mine and not (self._doubts or self._committing.locked()) and self._shell.may_commit(self.queue)
        commit = self.window.to_commit() if sure else None
        if commit is None:
            return await consumer.pull(self.queue, offset, wait=PULL_SECONDS)
        async with self._committing:
            found = await to_the_end(consumer.pull(self.queue, offset, wait=0.0, commit=commit.offset))
            self._shell.measures.commits.add("done")
            self.window.answered(commit)
        return found

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


def _outcome(error: Exception) -> str:
    kinds = ((SwitchedOff, "switched_off"), (Unreachable, "unreachable"), (Unknown, "unknown"))
    return next((name for kind, name in kinds if isinstance(error, kind)), "refused")
