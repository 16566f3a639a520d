"""Sidecar processes, of which there is one each: each step of the real `Member` is taken once, then looked up.

A queue is worked from Fetch until Stop of that life is answered: until then a delivery may be open.
"""

from copy import copy
from itertools import count
from typing import Any

from builders import LONG
from rota.model import Queue
from rota.planner import DecodedReport
from rota.reports import Report
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent, LeaseState, QueueLease
from simulation.exploration.documents import Document, Numbering
from simulation.judge import Broken


class Told:
    """A report that was read; what it says apart from the generation is its body."""

    def __init__(self, report: Report, bodies: Numbering) -> None:
        self.heard, self.number = DecodedReport(report), report.generation
        draining = self.heard.active_queues - self.heard.held_queues
        self.incarnation = report.incarnation_number
        said = (report.uid, self.heard.held_queues, draining, report.state, report.final, self.incarnation)
        self.body = bodies[said]

    def __str__(self) -> str:
        """Tell it in a trace."""
        it = self.heard.report
        drains = " draining for good," if it.final else ""
        drains = f" process {self.incarnation}," * bool(self.incarnation) + drains
        return f"generation {it.generation},{drains} held {it.held}, releasing {it.releasing}"


class Process:
    """A sidecar's process: its member, the document it obeyed, unanswered commands, and the lives it works."""

    told: Told  # its report; given with `body` and `working` once the process does not change any more
    body: int
    working: frozenset[Queue]

    def __init__(self, member: Member, document: Document | None = None, now: float = 0.0) -> None:
        self.member, self.document, self.now = member, document, now
        self.waiting: dict[Queue, tuple[tuple[Command, float], ...]] = {}
        self.worked: frozenset[tuple[Queue, int]] = frozenset()
        self.after: dict[Any, tuple[Process, Effects]] = {}

    def twin(self) -> "Process":
        """Copy it as it is, so that both can go on."""
        member = copy(self.member)
        member._lease_numbers = count(next(self.member._lease_numbers))
        member.leases = {queue: copy(life) for queue, life in self.member.leases.items()}
        for life in member.leases.values():
            life.lease_numbers = member._lease_numbers
        member._timers = list(self.member._timers)
        twin = Process(member, self.document, self.now)
        twin.waiting, twin.worked = dict(self.waiting), self.worked
        return twin

    def carry(self, step: Effects) -> None:
        """Take up the commands of a step; Fetch begins at once, Abort is answered by what answers Stop."""
        for command in step.commands:
            if command.action is LeaseAction.FETCH:
                self.worked |= {(command.queue, command.lease_number)}
            elif command.action is not LeaseAction.ABORT:
                self.waiting[command.queue] = (*self.waiting.get(command.queue, ()), (command, self.now))

    def answered(self, queue: Queue) -> None:
        """Forget the oldest command of a queue; if it was Stop, nothing is open of that life or an earlier one."""
        (command, _), *left = self.waiting.pop(queue)
        if left:
            self.waiting[queue] = tuple(left)
        if command.action is LeaseAction.STOP:
            self.worked = frozenset(it for it in self.worked if it[0] != queue or it[1] > command.lease_number)

    def objection(self) -> str:
        """Say what it works without leave, or does not tell of."""
        member, document = self.member, self.document
        share = document.assignment.members.get(member.name) if document else None
        is_given = share is not None and share.uid == member.uid and not member._is_draining
        is_its_own = share is not None and (share.incarnation in {0, member.incarnation} or member._resumed)
        given = set(share.queues) if share and is_given and is_its_own else set()
        for queue, life in member.leases.items():
            if life.state is not LeaseState.DRAINING and queue not in given:
                return f"{member.name} works {queue}, which the document that it obeys does not give it"
        for queue, _ in self.worked:
            if queue not in member.leases:
                return f"{member.name} works {queue} and does not report it"
        return ""

    def sketch(self) -> tuple[Any, ...]:
        """Return what matters of it apart from generations, and from how its lives are numbered."""
        member, now = self.member, self.now
        lives, waiting = sorted(member.leases.items()), sorted(self.waiting.items())
        numbers = {life.number for _, life in lives} | {life for _, life in self.worked}
        numbers |= {command.lease_number for _, commands in waiting for command, _ in commands}
        rank = {number: place for place, number in enumerate(sorted(numbers))}
        return (
            member.uid,
            member._is_draining,
            member.final,
            member._is_assignment_current,
            member.incarnation,
            member._resumed,
            self.document.part(member.name)[0] if self.document else None,
            tuple((queue, rank[life.number], *_shown(life, now)) for queue, life in lives),
            tuple(
                (
                    queue,
                    tuple((it.action, rank[it.lease_number], (sent - now) * member.orderly) for it, sent in commands),
                )
                for queue, commands in waiting
            ),
            tuple(sorted((queue, rank[number]) for queue, number in self.worked)),
        )


def _shown(life: QueueLease, now: float) -> tuple[Any, ...]:
    """Return what matters of a life; without locks it is no matter when things are due, as it may be any time."""
    times: tuple[Any, ...] = ()
    if life.orderly:
        due = (
            life.drain_deadline
            if life.state is LeaseState.DRAINING
            else life.retry_at
            if life.state is LeaseState.STUCK
            else now
        )
        ages = (
            life.locked_at,
            life.lock_requested_at if life.locked_at is not None else None,
            due,
            life.deliver_after or None,
        )
        times = tuple(None if at is None else max(at - now, -LONG) for at in ages)
    return (
        life.state,
        life.may_resume,
        life.is_reassigned,
        life.needs_lock_hold,
        life.is_held,
        life.drain_deadline is None,
        *times,
    )


class Processes:
    """Every process that there was, and what became of it."""

    def __init__(self, group: str, *, orderly: bool, drain_timeout: float, placed_at_once: bool) -> None:
        self.group, self.orderly, self.drain_timeout = group, orderly, drain_timeout
        self.placed_at_once = placed_at_once
        self._known: dict[Any, Process] = {}
        self._reports: dict[Any, Told] = {}
        self._bodies = Numbering()

    def start(self, name: str, uid: str, disk: tuple[int, bool, int]) -> Process:
        """Start a process on a disk."""
        obeyed, final, incarnation = disk
        timeout = self.drain_timeout
        member = Member(
            name,
            uid,
            group=self.group,
            orderly=self.orderly,
            drain_timeout=timeout,
            obeyed_generation=obeyed,
            final=final,
        )
        if incarnation:
            member.set_incarnation(incarnation, 0.0)
        return self._one(Process(member))

    def after(self, process: Process, *action: Any) -> tuple[Process, Effects]:
        """Return what becomes of a process by what its shell tells its member, and what the member wants done."""
        found = process.after.get(action)
        if found is None:
            twin = process.twin()
            step = _tell(twin, action)
            twin.carry(step)
            if self.placed_at_once:
                _place(twin)
            if wrong := twin.objection():
                raise Broken(wrong)
            found = process.after[action] = (self._one(twin), step)
        return found

    def _one(self, process: Process) -> Process:
        sketch = process.sketch()
        key = (process.member.obeyed_generation, process.document, process.member.name, sketch)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = process
            process.body = self._bodies[sketch]
            process.working = frozenset(queue for queue, _ in process.worked)
            process.told = self._report(process.member.report())
        return found

    def _report(self, report: Report) -> Told:
        queues = str(report.held), str(report.releasing)
        said = (report.uid, report.incarnation, report.generation, *queues, report.state, report.final)
        found = self._reports.get(said)
        if found is None:
            found = self._reports[said] = Told(report, self._bodies)
        return found


def _tell(process: Process, action: tuple[Any, ...]) -> Effects:
    member = process.member
    match action:
        case "read" | "wake" as kind, document:
            if kind == "wake":
                member.mark_stalled()
            step = member.apply_assignment(document.text if document else None, process.now)
            if step.store_generation is not None:
                process.document = document
            return step
        case "answer", event, queue:
            command, sent = process.waiting[queue][0]
            process.answered(queue)
            return member.on_event(event, queue, command.lease_number, process.now, sent)
        case "reader fails", queue:
            return member.on_event(LeaseEvent.READER_FAILED, queue, member.leases[queue].number, process.now)
        case "tick", at:
            process.now = at
            return member.run_due_timers(at)
        case "drain" | "drain for good" as kind, *_:
            return member.drain(kind == "drain for good", process.now)
        case _:
            return member.end_drain(process.now)


def _place(process: Process) -> None:
    """Tell at once where to start."""
    while found := [
        queue for queue, commands in process.waiting.items() if commands[0][0].action is LeaseAction.FIND_START
    ]:
        process.carry(_tell(process, ("answer", LeaseEvent.START_FOUND, found[0])))
