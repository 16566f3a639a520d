"""Sidecar processes as shared values: each step of the real `Member` is computed once, then looked up.

A lease is consumed from Fetch until the response to its Stop: until then a delivery may be open.
"""

from copy import copy
from itertools import count
from typing import Any, NamedTuple

from builders import LONG
from rota.model import Queue
from rota.planner import DecodedReport
from rota.reports import Report
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction, LeaseEvent, LeaseState, QueueLease
from simulation.exploration.documents import Document, Numbering
from simulation.judge import InvariantError


class DiskState(NamedTuple):
    """What a pod's disk keeps for its next process."""

    generation: int = 0
    final: bool = False  # whether the member has drained for good
    starts: int = 0  # of processes in this pod


class ReadReport:
    """A report as the operator reads it; `body` identifies its content without the generation."""

    def __init__(self, report: Report, bodies: Numbering) -> None:
        self.decoded = DecodedReport(report)
        self.number = report.generation
        draining = self.decoded.active_queues - self.decoded.held_queues
        self.incarnation = report.incarnation_number
        content = (report.uid, self.decoded.held_queues, draining, report.state, report.final, self.incarnation)
        self.body = bodies[content]

    def __str__(self) -> str:
        """Return the report as a trace shows it."""
        report = self.decoded.report
        process = f" process {self.incarnation}," if self.incarnation else ""
        drains = " draining for good," if report.final else ""
        return f"generation {report.generation},{process}{drains} held {report.held}, releasing {report.releasing}"


class Process:
    """A sidecar's process: its member, the document it obeyed, unanswered commands, and the leases it consumes."""

    report: ReadReport  # set with `body` and `consumed_queues` once the process does not change any more
    body: int
    consumed_queues: frozenset[Queue]

    def __init__(self, member: Member, document: Document | None = None, now: float = 0.0) -> None:
        self.member = member
        self.document = document
        self.now = now
        self.pending_commands: dict[Queue, tuple[tuple[Command, float], ...]] = {}
        self.consumed_leases: frozenset[tuple[Queue, int]] = frozenset()
        self.successors: dict[Any, tuple[Process, Effects]] = {}

    def duplicate(self) -> "Process":
        """Return a copy with timers and leases of its own."""
        member = copy(self.member)
        table = copy(self.member._lease_table)
        table._lease_numbers = count(next(self.member._lease_table._lease_numbers))
        table.leases = {queue: copy(lease) for queue, lease in self.member.leases.items()}
        for lease in table.leases.values():
            lease.lease_numbers = table._lease_numbers
        table._timers = list(self.member._lease_table._timers)
        member._lease_table = table
        member.leases = table.leases
        copied = Process(member, self.document, self.now)
        copied.pending_commands = dict(self.pending_commands)
        copied.consumed_leases = self.consumed_leases
        return copied

    def apply_effects(self, effects: Effects) -> None:
        """Start the commands of a step. Fetch starts at once; Abort has no response but that to Stop."""
        for command in effects.commands:
            if command.action is LeaseAction.FETCH:
                self.consumed_leases |= {(command.queue, command.lease_number)}
            elif command.action is not LeaseAction.ABORT:
                self.pending_commands[command.queue] = (
                    *self.pending_commands.get(command.queue, ()),
                    (command, self.now),
                )

    def complete_command(self, queue: Queue) -> None:
        """Remove the oldest command of a queue; after Stop, that lease and earlier ones have no open delivery."""
        (command, _), *pending = self.pending_commands.pop(queue)
        if pending:
            self.pending_commands[queue] = tuple(pending)
        if command.action is LeaseAction.STOP:
            self.consumed_leases = frozenset(
                (consumed, number)
                for consumed, number in self.consumed_leases
                if consumed != queue or number > command.lease_number
            )

    def violation(self) -> str:
        """Describe a queue that the member consumes without an assignment, or does not report."""
        member, document = self.member, self.document
        share = document.assignment.members.get(member.name) if document else None
        is_assigned = share is not None and share.uid == member.uid and not member._is_draining
        is_own_incarnation = share is not None and (share.incarnation in {0, member.incarnation} or member._resumed)
        assigned_queues = set(share.queues) if share and is_assigned and is_own_incarnation else set()
        for queue, lease in member.leases.items():
            if lease.state is not LeaseState.DRAINING and queue not in assigned_queues:
                return f"{member.name} consumes {queue}, which the document that it obeys does not assign to it"
        for queue, _ in self.consumed_leases:
            if queue not in member.leases:
                return f"{member.name} consumes {queue} and does not report it"
        return ""

    def fingerprint(self) -> tuple[Any, ...]:
        """Return the content of the process without generations and absolute lease numbers."""
        member, now = self.member, self.now
        leases = sorted(member.leases.items())
        pending = sorted(self.pending_commands.items())
        numbers = {lease.number for _, lease in leases} | {lease for _, lease in self.consumed_leases}
        numbers |= {command.lease_number for _, commands in pending for command, _ in commands}
        rank = {number: position for position, number in enumerate(sorted(numbers))}
        command_keys = []
        for queue, commands in pending:
            for command, sent in commands:
                command_keys.append((queue, command.action, rank[command.lease_number], (sent - now) * member.orderly))
        return (
            member.uid,
            member._is_draining,
            member.final,
            member._is_assignment_current,
            member.incarnation,
            member._resumed,
            self.document.part(member.name)[0] if self.document else None,
            tuple((queue, rank[lease.number], *_lease_key(lease, now)) for queue, lease in leases),
            tuple(command_keys),
            tuple(sorted((queue, rank[number]) for queue, number in self.consumed_leases)),
        )


def _lease_key(lease: QueueLease, now: float) -> tuple[Any, ...]:
    """Return the content of a lease. Times matter only with locks; other timers may fire at any time."""
    times: tuple[Any, ...] = ()
    if lease.orderly:
        due: float | None = now
        if lease.state is LeaseState.DRAINING:
            due = lease.drain_deadline
        elif lease.state is LeaseState.STUCK:
            due = lease.retry_at
        ages = (
            lease.locked_at,
            lease.lock_requested_at if lease.locked_at is not None else None,
            due,
            lease.deliver_after or None,
        )
        times = tuple(None if at is None else max(at - now, -LONG) for at in ages)
    return (
        lease.state,
        lease.may_resume,
        lease.is_reassigned,
        lease.needs_lock_hold,
        lease.is_held,
        lease.drain_deadline is None,
        *times,
    )


class Processes:
    """All processes of an exploration, by content, with their successors."""

    def __init__(self, group: str, *, orderly: bool, drain_timeout: float, starts_found_at_once: bool) -> None:
        self.group = group
        self.orderly = orderly
        self.drain_timeout = drain_timeout
        self.starts_found_at_once = starts_found_at_once
        self._processes: dict[Any, Process] = {}
        self._reports: dict[Any, ReadReport] = {}
        self._bodies = Numbering()

    def start(self, name: str, uid: str, disk: DiskState) -> Process:
        """Return the first state of a process that starts with this disk."""
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
        return self._deduplicate(Process(member))

    def advance(self, process: Process, *action: Any) -> tuple[Process, Effects]:
        """Return a process after an action of its shell, and the effects that its member requests."""
        outcome = process.successors.get(action)
        if outcome is None:
            copied = process.duplicate()
            step = _run_action(copied, action)
            copied.apply_effects(step)
            if self.starts_found_at_once:
                _answer_find_start(copied)
            if problem := copied.violation():
                raise InvariantError(problem)
            outcome = process.successors[action] = (self._deduplicate(copied), step)
        return outcome

    def _deduplicate(self, process: Process) -> Process:
        fingerprint = process.fingerprint()
        key = (process.member.obeyed_generation, process.document, process.member.name, fingerprint)
        existing = self._processes.get(key)
        if existing is None:
            existing = self._processes[key] = process
            process.body = self._bodies[fingerprint]
            process.consumed_queues = frozenset(queue for queue, _ in process.consumed_leases)
            process.report = self._report(process.member.report())
        return existing

    def _report(self, report: Report) -> ReadReport:
        queues = str(report.held), str(report.releasing)
        content = (report.uid, report.incarnation, report.generation, *queues, report.state, report.final)
        read_report = self._reports.get(content)
        if read_report is None:
            read_report = self._reports[content] = ReadReport(report, self._bodies)
        return read_report


def _run_action(process: Process, action: tuple[Any, ...]) -> Effects:
    member = process.member
    match action:
        case "read" | "wake" | "send" as kind, document:
            return _apply_document(process, kind, document)
        case "answer", event, queue:
            command, sent = process.pending_commands[queue][0]
            process.complete_command(queue)
            return member.on_event(event, queue, command.lease_number, process.now, sent)
        case "reader fails", queue:
            return member.on_event(LeaseEvent.READER_FAILED, queue, member.leases[queue].number, process.now)
        case "tick", at:
            process.now = at
            return member.run_due_timers(at)
        case "drain" | "drain for good" as kind, *_:
            return member.drain(final=kind == "drain for good", now=process.now)
        case _:
            return member.end_drain(process.now)


def _apply_document(process: Process, kind: str, document: Document | None) -> Effects:
    member = process.member
    if kind == "send" and document:
        step = member.apply_sent_assignment(document.text, process.now)
    else:
        if kind == "wake":
            member.mark_stalled()
        step = member.apply_assignment(document.text if document else None, process.now)
    if document and not step.rejection:
        process.document = document
    return step


def _answer_find_start(process: Process) -> None:
    """Respond to each pending FindStart at once."""
    while queues := [
        queue for queue, commands in process.pending_commands.items() if commands[0][0].action is LeaseAction.FIND_START
    ]:
        process.apply_effects(_run_action(process, ("answer", LeaseEvent.START_FOUND, queues[0])))
