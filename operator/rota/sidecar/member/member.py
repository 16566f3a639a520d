"""State machine of a member: obeys assignments, drains, and reports; `queue_lifecycle` holds the table of one queue.

No I/O and no clock. The sidecar's shell reads the assignment, passes events with their times, and carries out each
returned Step. It first writes `remember` and `remember_final` to the emptyDir, synchronously, before it does or reports
anything else; the commands follow. So a report never names a generation that a restart could forget, and no queue is
fetched under such a generation. The shell answers every Lock, Place, Stop and Unlock once it is done or has failed; the
answer to Stop also answers Cut.
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
from rota.sidecar.member.queue_lifecycle import Command, LeaseEvent, LeaseState, QueueLease

# Seconds without a request for the report after which a restarted process takes over its predecessor's share. Longer
# than the operator's longest poll, the age of a report on which it grants queues of an ended process, and a slow
# kubelet's delay together.
RESUME_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The effects that the shell carries out now, in this order."""

    remember: int | None = None  # generation to write to the emptyDir
    remember_final: bool = False  # also write that the drain is final
    commands: tuple[Command, ...] = ()
    why: str | None = None  # why an assignment was rejected: one sentence, for the log


class Member:
    """The state of one pod's sidecar; `obeyed` and `final` are the values on the emptyDir when the process started.

    `incarnation` is 0 until the shell has written this process's incarnation to the emptyDir.

    `group` (namespace/name) defaults to the group of the first obeyed assignment. `orderly` means that queues are
    consumed under the broker's lock, which never applies to Broadcasting. Other modules may read `lives`.
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
        self._asked: float | None = None  # last request for the report, or the first read of an assignment
        self._resumed = False  # it has taken over its predecessor's share
        self.group, self.orderly, self.drain_timeout = group, orderly, drain_timeout
        self.obeyed, self.final = obeyed, final
        self.revision = 0
        self.lives: dict[Queue, QueueLease] = {}  # every queue that is not released
        self._brokers: dict[str, bool] = {}
        self._document: Assignment | None = None
        self._drains, self._looked = final, True
        self._numbers = count(1)
        self._looks: list[tuple[float, Queue]] = []  # a heap; outdated entries are skipped
        self._moved = False
        self._head = self._said()
        self._report: Report | None = None

    @property
    def state(self) -> Literal["serving", "draining", "drained"]:
        """Return the state of the member as a whole."""
        if not self._drains:
            return "serving"
        return "draining" if self.lives else "drained"

    @property
    def stuck(self) -> dict[Queue, LeaseEvent]:
        """Return the queues that the member cannot start, each with its failure: Refused, Failed or ReaderFailed."""
        stuck_lives = [life for life in self.lives.values() if life.state is LeaseState.STUCK]
        return {life.queue: life.trouble for life in stuck_lives if life.trouble}

    def read(self, text: str | bytes | None, now: float, drain_timeout: float | None = None) -> Step:
        """Obey a valid, newer assignment and apply the settings' drain timeout; else say why it is rejected."""
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
        previous, self.obeyed = self.obeyed, document.generation
        self.group, self._document = document.group, document
        assigned_queues = self._given()
        commands: list[Command] = []
        for life in list(self.lives.values()):
            overruled = document.forced.get(life.queue, 0) > previous  # another member may have consumed it
            if overruled or life.queue not in assigned_queues:
                commands += self._walk(life, LeaseEvent.TAKEN, now)
            if overruled:
                life.back, life.wary = False, True
        commands += self._give(assigned_queues, now)
        return self._step(commands, remember=self.obeyed)

    def _given(self) -> Mapping[Queue, None]:
        """Return the queues that the obeyed assignment gives to this process; none while the member drains."""
        document = self._document
        share = document.members.get(self.name) if document else None
        if self._drains or self.is_waiting or document is None or share is None or share.uid != self.uid:
            return {}
        return dict.fromkeys(share.queues if document.everyone is None else document.everyone)

    @property
    def is_waiting(self) -> bool:
        """Whether the assignment names another process of this pod, so queues may be granted to other members."""
        named = self._named_incarnation
        return named not in {0, self.incarnation} and not (self._resumed and named < self.incarnation)

    @property
    def _named_incarnation(self) -> int:
        """Return the incarnation of this pod that the assignment names; 0 if it names none."""
        share = self._document.members.get(self.name) if self._document else None
        return share.incarnation if share and share.uid == self.uid else 0

    def count(self, incarnation: int, started: float) -> None:
        """Set the incarnation of this process, which is already on the emptyDir, and its start time."""
        self.incarnation, self.started, self._moved = incarnation, started, True
        self._step([])

    def asked(self, now: float) -> None:
        """Record that the operator has requested the report."""
        self._asked = now

    def _resumes_at(self) -> float | None:
        is_successor = self.is_waiting and self._named_incarnation < self.incarnation
        return self._asked + RESUME_SECONDS if self._asked is not None and is_successor else None

    def _resume(self, now: float) -> list[Command]:
        """Take over the predecessor's share: no operator is running that could grant it to other members."""
        self._resumed = True
        return self._give(self._given(), now)

    def _give(self, queues: Iterable[Queue], now: float) -> list[Command]:
        forced = self._document.forced if self._document else {}
        commands: list[Command] = []
        for queue in queues:
            life = self.lives.get(queue) or QueueLease(
                queue=queue,
                orderly=self.orderly,
                numbers=self._numbers,
                wary=queue in forced,
            )
            commands += self._walk(life, LeaseEvent.GIVEN, now)
        return commands

    def happened(self, event: LeaseEvent, queue: Queue, life: int, now: float, sent: float | None = None) -> Step:
        """Apply the shell's answer to a command; an earlier life's is ignored. Locked needs the time of its request."""
        if event is LeaseEvent.LOCKED and sent is None:
            raise ValueError(f"Locked {queue} needs the time at which its request was sent")
        current_life = self.lives.get(queue)
        if current_life is None or current_life.number != life:
            return Step()
        return self._step(self._walk(current_life, event, now, sent or 0.0))

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
        """Apply all timers that are due; the caller has read the assignment before."""
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
        """Release all queues, until `back` or, if `final`, permanently; a repeated call continues the same drain."""
        for_good = final and not self.final
        self._drains, self.final = True, self.final or final
        commands: list[Command] = []
        for life in self.lives.values():
            commands += self._walk(life, LeaseEvent.TAKEN, now)
            life.back = False
        return self._step(commands, remember_final=for_good)

    def back(self, now: float) -> Step:
        """Consume again the queues that the assignment still gives to this member; none after a final drain."""
        if self.final or not self._drains:
            return Step()
        self._drains = False
        return self._step(self._give(self._given(), now))

    def reaches(self, brokers: Mapping[str, bool]) -> None:
        """Replace the reachability of brokers in the report; brokers that are not named are no longer reported."""
        if self._brokers != brokers:
            self._brokers, self._moved = dict(brokers), True
            self._step([])

    def stood_still(self) -> None:
        """Stop deliveries and commits until the assignment is read again: the event loop stalled for over 5 s."""
        self._looked = False

    def may_deliver(self, queue: Queue, now: float, push_timeout: float) -> bool:
        """Whether a delivery of this queue may start now."""
        life = self.lives.get(queue)
        return self._looked and life is not None and life.state is LeaseState.RUNNING and life.trusts(now, push_timeout)

    def begun(self, topic: str) -> float | None:
        """Return since when the group consumes a topic, in seconds since 1970; None if the assignment does not say."""
        return self._document.begun_at.get(topic) if self._document else None

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset of this queue may be committed: until the queue is released."""
        return self._looked and queue in self.lives

    def report(self) -> Report:
        """Return a consistent snapshot of the member; the same value until something changes."""
        if self._report is None:
            draining = [queue for queue, life in self.lives.items() if life.state is LeaseState.DRAINING]
            held = [queue for queue, life in self.lives.items() if life.state is not LeaseState.DRAINING]
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

    def _walk(self, life: QueueLease, event: LeaseEvent, now: float, sent: float = 0.0) -> list[Command]:
        previous_flags, life.drain_timeout = _shown(life), self.drain_timeout
        commands = life.happened(event, now, sent)
        if life.state is LeaseState.RELEASED:
            self.lives.pop(life.queue, None)
        else:
            self.lives[life.queue] = life
        if (due := life.due()) is not None:
            heapq.heappush(self._looks, (due[0], life.queue))
        self._moved |= previous_flags != _shown(life)
        return commands

    def _said(self) -> tuple[int, str, bool]:
        return self.obeyed, self.state, self.final

    def _step(self, commands: list[Command], remember: int | None = None, *, remember_final: bool = False) -> Step:
        if self._moved or self._head != self._said():
            self._moved, self._head = False, self._said()
            self.revision += 1
            self._report = None
        return Step(remember=remember, remember_final=remember_final, commands=tuple(commands))


def _shown(life: QueueLease) -> tuple[bool, bool]:
    """Return the properties of a queue that its member's report shows."""
    return life.state is LeaseState.RELEASED, life.state is LeaseState.DRAINING
