"""The whole member: it obeys documents, drains, and reports; every queue lives by the table in queue_lifecycle.py.

No I/O and no clock: a shell reads the document, tells what happened and when, and carries out what each Step says.
First it puts `remember` and `remember_final` on the emptyDir, synchronously, before it does or tells anything
else; then come the commands. So a report never names a generation that a restart could forget, and no queue is
fetched under one. Every Lock, Place, Stop and Unlock is answered once it is done or has failed; Cut is answered by
what answers Stop.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal

from rota.documents import SCHEMA, Assignment, read_assignment
from rota.model import Queue
from rota.ranges import to_ranges
from rota.reports import Report
from rota.sidecar.member.queue_lifecycle import Command, Event, Life, State

# Seconds without a request for the report, after which a restarted process goes on with its predecessor's share: longer
# than the operator's longest poll, the age of news on which it grants queues of an ended process, and a slow kubelet.
RESUME_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the shell shall do now, in this order."""

    remember: int | None = None  # the generation to put on the emptyDir
    remember_final: bool = False  # that the drain is for good, too
    commands: tuple[Command, ...] = ()
    why: str | None = None  # why a document was not obeyed: one sentence, for the log


class Member:
    """One pod's sidecar as a value that changes; `obeyed` and `final` are what lay on the emptyDir at its start.

    `incarnation` is 0 until the shell has put this process's on the emptyDir.

    `group` (namespace/name) is the first obeyed document's where it is not given; `orderly` means that queues are
    worked under the broker's lock, never so in Broadcasting. `lives` is there to be read.
    """

    def __init__(
        self,
        name: str,
        uid: str,
        *,
        group: str | None = None,
        orderly: bool = False,
        drain_timeout: float = 30.0,
        obeyed: int = 0,
        final: bool = False,
    ) -> None:
        self.name, self.uid = name, uid
        self.incarnation, self.started = 0, 0.0  # see `count`
        self._asked: float | None = None  # when its report was last asked for, or its first document was read
        self._resumed = False  # it goes on with its predecessor's share
        self.group, self.orderly, self.drain_timeout = group, orderly, drain_timeout
        self.obeyed, self.final = obeyed, final
        self.revision = 0
        self.lives: dict[Queue, Life] = {}  # every queue but the released ones
        self._brokers: dict[str, bool] = {}
        self._document: Assignment | None = None
        self._drains, self._looked = final, True
        self._numbers = count(1)
        self._looks: list[tuple[float, Queue]] = []  # a heap; entries that are out of date are passed over
        self._moved = False
        self._head = self._said()
        self._report: Report | None = None

    @property
    def state(self) -> Literal["serving", "draining", "drained"]:
        """Return what it does as a whole."""
        if not self._drains:
            return "serving"
        return "draining" if self.lives else "drained"

    @property
    def stuck(self) -> dict[Queue, Event]:
        """Return the queues that it cannot take up, and what failed: Refused or Failed."""
        stuck = [life for life in self.lives.values() if life.state is State.STUCK]
        return {life.queue: life.trouble for life in stuck if life.trouble}

    def read(self, text: str | bytes | None, now: float, drain_timeout: float | None = None) -> Step:
        """Obey the document, and what the settings beside it say, if it is to be obeyed; without one go on."""
        self._looked = True
        if self._asked is None:
            self._asked = now
        if text is None:
            return Step(why=f"There is no assignment; generation {self.obeyed} stays in force")
        try:
            document = read_assignment(text)
        except ValueError as error:
            return Step(why=str(error))
        if document == self._document:
            return Step()
        why = self._objection(document)
        if why:
            return Step(why=why)
        self.drain_timeout = self.drain_timeout if drain_timeout is None else drain_timeout
        return self._obey(document, now)

    def _objection(self, document: Assignment) -> str | None:
        if self.group is not None and document.group != self.group:
            return f"The assignment is of group {document.group}, this member works for {self.group}"
        if document.generation < self.obeyed:
            return f"The assignment has generation {document.generation}, but {self.obeyed} is obeyed"
        if document.generation == self.obeyed and self._document is not None:
            return f"The assignment has another text than the generation {self.obeyed} that is obeyed"
        return None

    def _obey(self, document: Assignment, now: float) -> Step:
        before, self.obeyed = self.obeyed, document.generation
        self.group, self._document = document.group, document
        given = self._given()
        commands: list[Command] = []
        for life in list(self.lives.values()):
            overruled = document.forced.get(life.queue, 0) > before  # somebody else may have worked it meanwhile
            if overruled or life.queue not in given:
                commands += self._walk(life, Event.TAKEN, now)
            if overruled:
                life.back, life.wary = False, True
        commands += self._give(given, now)
        return self._step(commands, remember=self.obeyed)

    def _given(self) -> Mapping[Queue, None]:
        """Return what it shall work: what the obeyed document gives its pod, unless it drains."""
        document = self._document
        share = document.members.get(self.name) if document else None
        if self._drains or self.is_waiting or document is None or share is None or share.uid != self.uid:
            return {}
        return dict.fromkeys(share.queues if document.everyone is None else document.everyone)

    @property
    def is_waiting(self) -> bool:
        """Whether the document gives queues to another process of this pod: they may be granted to other members."""
        named = self._named_incarnation
        return named not in {0, self.incarnation} and not (self._resumed and named < self.incarnation)

    @property
    def _named_incarnation(self) -> int:
        """Which process of this pod the document names; 0: none."""
        share = self._document.members.get(self.name) if self._document else None
        return share.incarnation if share and share.uid == self.uid else 0

    def count(self, incarnation: int, started: float) -> None:
        """Take the number of this process, which is on the emptyDir, and its start."""
        self.incarnation, self.started, self._moved = incarnation, started, True
        self._step([])

    def asked(self, now: float) -> None:
        """Note that the operator has asked for the report."""
        self._asked = now

    def _resumes_at(self) -> float | None:
        is_successor = self.is_waiting and self._named_incarnation < self.incarnation
        return self._asked + RESUME_SECONDS if self._asked is not None and is_successor else None

    def _resume(self, now: float) -> list[Command]:
        """Go on with the predecessor's share: no operator is there that could grant it to others."""
        self._resumed = True
        return self._give(self._given(), now)

    def _give(self, given: Iterable[Queue], now: float) -> list[Command]:
        forced = self._document.forced if self._document else {}
        commands: list[Command] = []
        for queue in given:
            life = self.lives.get(queue) or Life(
                queue=queue,
                orderly=self.orderly,
                numbers=self._numbers,
                wary=queue in forced,
            )
            commands += self._walk(life, Event.GIVEN, now)
        return commands

    def happened(self, event: Event, queue: Queue, life: int, now: float, sent: float | None = None) -> Step:
        """Take a shell's answer to the command of that life; Locked brings when its request was sent."""
        if event is Event.LOCKED and sent is None:
            raise ValueError(f"Locked {queue} needs the time at which its request was sent")
        lived = self.lives.get(queue)
        if lived is None or lived.number != life:
            return Step()
        return self._step(self._walk(lived, event, now, sent or 0.0))

    def next_look(self) -> float | None:
        """Return when `tick` is due next."""
        due = [at for at in (self._next_of_lives(), self._resumes_at()) if at is not None]
        return min(due, default=None)

    def _next_of_lives(self) -> float | None:
        while self._looks:
            at, queue = self._looks[0]
            life = self.lives.get(queue)
            due = life.due() if life else None
            if due is not None and due[0] == at:
                return at
            heapq.heappop(self._looks)
        return None

    def tick(self, now: float) -> Step:
        """Let happen what is due by now; the caller has read the document before."""
        commands: list[Command] = []
        if (resumes := self._resumes_at()) is not None and resumes <= now and self._looked:
            commands += self._resume(now)
        while (at := self._next_of_lives()) is not None and at <= now:
            life = self.lives[heapq.heappop(self._looks)[1]]
            due = life.due()
            if due is not None:
                commands += self._walk(life, due[1], now)
        return self._step(commands)

    def drain(self, final: bool, now: float) -> Step:  # noqa: FBT001 - for good or not is all that is asked
        """Give everything up, for good or until `back`; asked twice it goes on as it was."""
        for_good = final and not self.final
        self._drains, self.final = True, self.final or final
        commands: list[Command] = []
        for life in self.lives.values():
            commands += self._walk(life, Event.TAKEN, now)
            life.back = False
        return self._step(commands, remember_final=for_good)

    def back(self, now: float) -> Step:
        """Take up again what the document still gives it; after a final drain nothing."""
        if self.final or not self._drains:
            return Step()
        self._drains = False
        return self._step(self._give(self._given(), now))

    def reaches(self, brokers: Mapping[str, bool]) -> None:
        """Say of brokers whether they can be reached; those that are not named are spoken of no more."""
        if self._brokers != brokers:
            self._brokers, self._moved = dict(brokers), True
            self._step([])

    def stood_still(self) -> None:
        """Deliver and commit nothing until the document is read: the shell's loop stood still for over 5 s."""
        self._looked = False

    def may_deliver(self, queue: Queue, now: float, push_timeout: float) -> bool:
        """Whether a delivery of this queue may begin now."""
        life = self.lives.get(queue)
        return self._looked and life is not None and life.state is State.RUNNING and life.trusts(now, push_timeout)

    def begun(self, topic: str) -> float | None:
        """Return since when the group works a topic, in seconds since 1970; None if nobody has said."""
        return self._document.begun_at.get(topic) if self._document else None

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset of this queue may be committed: until it is released."""
        return self._looked and queue in self.lives

    def report(self) -> Report:
        """Say what it is, as one cut; the same value until something changes."""
        if self._report is None:
            draining = [queue for queue, life in self.lives.items() if life.state is State.DRAINING]
            held = [queue for queue, life in self.lives.items() if life.state is not State.DRAINING]
            self._report = Report(
                member=self.name,
                uid=self.uid,
                incarnation=str(self.incarnation or ""),
                started=self.started,
                reads=SCHEMA,
                generation=self.obeyed,
                revision=self.revision,
                state=self.state,
                final=self.final,
                held=to_ranges(held),
                releasing=to_ranges(draining),
                brokers=self._brokers,
            )
        return self._report

    def _walk(self, life: Life, event: Event, now: float, sent: float = 0.0) -> list[Command]:
        shown, life.drain_timeout = _shown(life), self.drain_timeout
        commands = life.happened(event, now, sent)
        if life.state is State.RELEASED:
            self.lives.pop(life.queue, None)
        else:
            self.lives[life.queue] = life
        if (due := life.due()) is not None:
            heapq.heappush(self._looks, (due[0], life.queue))
        self._moved |= shown != _shown(life)
        return commands

    def _said(self) -> tuple[int, str, bool]:
        return self.obeyed, self.state, self.final

    def _step(self, commands: list[Command], remember: int | None = None, *, remember_final: bool = False) -> Step:
        if self._moved or self._head != self._said():
            self._moved, self._head = False, self._said()
            self.revision += 1
            self._report = None
        return Step(remember=remember, remember_final=remember_final, commands=tuple(commands))


def _shown(life: Life) -> tuple[bool, bool]:
    """Return what of a life a report shows."""
    return life.state is State.RELEASED, life.state is State.DRAINING
