"""State machine of a member: obeys assignments, drains, and reports; `lease_table` has the leases of its queues.

No I/O and no clock. The sidecar's agent reads the assignment, passes events with their times, and carries out all
returned Effects. It first writes `store_generation` and `store_final` to the emptyDir, synchronously, before it does or
reports anything else; the commands follow. So a report never names a generation that a restart could forget, and no
queue is fetched under such a generation. The agent answers every Lock, FindStart, Stop and Unlock once it is done or
has failed; the answer to Stop also answers Abort.

The *share* is the part of the assignment for this pod: its queues, and the *incarnation* (the pod's count of sidecar
processes) of the process that owns them. A restarted process does not consume its predecessor's share at once: the
operator may be granting it to other members. It takes it over if no report was requested for RESUME_SECONDS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rota.documents import ASSIGNMENT_SCHEMA, MAX_GENERATION, Assignment, Share, decode_assignment
from rota.model import Queue
from rota.ranges import to_ranges
from rota.reports import Report
from rota.sidecar.member.lease_table import LeaseTable
from rota.sidecar.member.queue_lifecycle import Command, LeaseEvent, LeaseState

# Longer than the sum of the operator's longest poll, the age of a report on which it grants queues of an ended process,
# and the delay of a slow kubelet.
RESUME_SECONDS = 180.0
# Each member of a group has its key, so any of them could send a forged assignment. If that had the highest possible
# generation, no later one could be newer. So only the mounted assignment may be more than this many generations newer.
MAX_GENERATIONS_AHEAD = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """The effects that the agent carries out now, in this order."""

    store_generation: int | None = None  # generation to write to the emptyDir
    store_final: bool = False  # also write that the drain is final
    commands: tuple[Command, ...] = ()
    rejection: str | None = None  # why an assignment was rejected: one sentence, for the log
    is_older: bool = False  # whether the rejected assignment is older than the obeyed one: volumes are, for a while


class Member:
    """The state of one pod's sidecar; `obeyed_generation` and `final` were on the emptyDir when the process started.

    `group` (namespace/name) defaults to the group of the first obeyed assignment. `orderly` means that queues are
    consumed under the broker's lock, which never applies to Broadcasting. Other modules may read `leases`.
    """

    def __init__(
        self,
        name: str,
        uid: str,
        *,
        group: str | None = None,
        orderly: bool = False,
        drain_timeout: float = 30.0,
        obeyed_generation: int = 0,
        final: bool = False,
    ) -> None:
        self.name = name
        self.uid = uid
        self.incarnation = 0  # 0 until the agent has written this process's incarnation to the emptyDir
        self.started = 0.0  # start of this process, in seconds since 1970; set with the incarnation
        # When the operator last requested the report; before its first request, when an assignment was first read.
        self._report_requested_at: float | None = None
        self._resumed = False  # whether this process has taken over its predecessor's share
        self.group = group
        self.orderly = orderly
        self.obeyed_generation = obeyed_generation
        self.final = final
        self.revision = 0
        self._lease_table = LeaseTable(drain_timeout)
        self.leases = self._lease_table.leases  # every queue that is not released
        self._broker_reachability: dict[str, bool] = {}
        self._assignment: Assignment | None = None
        self._is_draining = final
        self._is_assignment_current = True  # False after a stall, until the assignment was read again
        self._last_summary = self._summary()
        self._report: Report | None = None

    @property
    def state(self) -> Literal["serving", "draining", "drained"]:
        """Return the state of the member as a whole."""
        if not self._is_draining:
            return "serving"
        return "draining" if self.leases else "drained"

    @property
    def stuck_queues(self) -> dict[Queue, LeaseEvent]:
        """Return the queues that the member cannot start, each with its failure: Refused, Failed or ReaderFailed."""
        stuck: dict[Queue, LeaseEvent] = {}
        for queue, lease in self.leases.items():
            if failure := lease.failure:
                stuck[queue] = failure
        return stuck

    def apply_assignment(self, text: str | bytes | None, now: float, drain_timeout: float | None = None) -> Effects:
        """Obey a valid, newer assignment and apply the settings' drain timeout; else say why it is rejected.

        The assignment that is already obeyed changes nothing. Each call, even without a text or with an invalid one,
        counts as a read: after a stall it permits deliveries and commits again.
        """
        self._is_assignment_current = True
        if self._report_requested_at is None:
            self._report_requested_at = now
        if text is None:
            return Effects(rejection=f"There is no assignment; generation {self.obeyed_generation} stays in force")
        return self._obey_if_valid(text, now, MAX_GENERATION, drain_timeout)

    def apply_sent_assignment(self, text: str | bytes, now: float) -> Effects:
        """Obey a valid, newer assignment that the operator has sent; else say why it is rejected.

        This is not a read of the mounted assignment: after a stall that comes first, because a request may have waited
        for the process, and a newer assignment may be mounted.
        """
        if not self._is_assignment_current:
            return Effects(rejection="An assignment was sent after a stall: the mounted one must be read first")
        return self._obey_if_valid(text, now, self.obeyed_generation + MAX_GENERATIONS_AHEAD)

    def _obey_if_valid(
        self, text: str | bytes, now: float, max_generation: int, drain_timeout: float | None = None
    ) -> Effects:
        try:
            assignment = decode_assignment(text)
        except ValueError as error:
            return Effects(rejection=str(error))
        if assignment == self._assignment:
            return Effects()
        if rejection := self._why_rejected(assignment, max_generation):
            return Effects(rejection=rejection, is_older=assignment.generation < self.obeyed_generation)
        if drain_timeout is not None:
            self._lease_table.drain_timeout = drain_timeout
        return self._obey_assignment(assignment, now)

    def _why_rejected(self, assignment: Assignment, max_generation: int) -> str | None:
        obeyed = self.obeyed_generation
        if self.group is not None and assignment.group != self.group:
            return f"The assignment is of group {assignment.group}, this member belongs to group {self.group}"
        if assignment.generation < obeyed:
            is_restarted = self._assignment is None
            consequence = "was obeyed before the restart, so this one is not" if is_restarted else "is already in force"
            return f"The assignment has generation {assignment.generation}; generation {obeyed} {consequence}"
        if assignment.generation > max_generation:
            ahead = assignment.generation - obeyed
            return f"The sent assignment is {ahead} generations newer than the obeyed one ({obeyed}): too many"
        # A restarted process knows only the obeyed generation, so it accepts any assignment of that generation.
        if assignment.generation == obeyed and self._assignment is not None:
            return f"The assignment differs from the assignment of the same generation {obeyed} that is in force"
        return None

    def _obey_assignment(self, assignment: Assignment, now: float) -> Effects:
        previous_generation = self.obeyed_generation
        self.obeyed_generation = assignment.generation
        self.group = assignment.group
        self._assignment = assignment
        assigned_queues = self._assigned_queues()
        commands: list[Command] = []
        for lease in list(self.leases.values()):
            # A forced grant that this member missed: another member may have consumed the queue since then.
            overruled = assignment.forced.get(lease.queue, 0) > previous_generation
            if overruled or lease.queue not in assigned_queues:
                commands += self._lease_table.apply_event(lease, LeaseEvent.REVOKED, now)
            if overruled:
                lease.may_resume = False
                lease.needs_lock_hold = True  # as for any forced queue: see `_start_assigned_queues`
        commands += self._start_assigned_queues(now)
        return self._build_effects(commands, store_generation=self.obeyed_generation)

    def _assigned_queues(self) -> Mapping[Queue, None]:
        """Return the queues that this process may consume, as an ordered set; none while it drains.

        None either while another process of the pod has them (`needs_takeover`).
        """
        assignment = self._assignment
        share = self._share
        if self._is_draining or self.needs_takeover or assignment is None or share is None:
            return {}
        queues = share.queues
        if assignment.everyone is not None:  # Broadcasting: each member has all queues
            queues = assignment.everyone
        return dict.fromkeys(queues)

    def _start_assigned_queues(self, now: float) -> list[Command]:
        # The former owner of a forcibly granted queue may still trust its lock when this member gets one. So an Orderly
        # queue waits for LOCK_HOLD_SECONDS before its first delivery.
        forced = self._assignment.forced if self._assignment else {}
        commands: list[Command] = []
        for queue in self._assigned_queues():
            commands += self._lease_table.assign(queue, now, orderly=self.orderly, needs_lock_hold=queue in forced)
        return commands

    @property
    def _share(self) -> Share | None:
        """The part of the obeyed assignment for this pod; None if it has none, or is for another pod of this name."""
        share = self._assignment.members.get(self.name) if self._assignment else None
        return share if share and share.uid == self.uid else None

    @property
    def needs_takeover(self) -> bool:
        """Whether the assignment gives the share to another process of this pod, so that this one may not consume it.

        Once the operator knows that the other process has ended, it may grant the queues to other members.
        """
        named = self._named_incarnation
        if self._resumed and named < self.incarnation:  # this process has taken over that process's share already
            return False
        return named not in {0, self.incarnation}

    @property
    def _named_incarnation(self) -> int:
        """The incarnation of this pod that the assignment names; 0 if it names none."""
        return self._share.incarnation if self._share else 0

    def set_incarnation(self, incarnation: int, started: float) -> None:
        """Set the incarnation of this process, which is already on the emptyDir, and its start time."""
        self.incarnation = incarnation
        self.started = started
        self._update_revision()

    def note_report_request(self, now: float) -> None:
        """Record that the operator has requested the report."""
        self._report_requested_at = now

    def _resume_at(self) -> float | None:
        """Return when this process takes over its predecessor's share; None if no earlier process has the share."""
        has_predecessor = self.needs_takeover and self._named_incarnation < self.incarnation
        if self._report_requested_at is None or not has_predecessor:
            return None
        return self._report_requested_at + RESUME_SECONDS

    def on_event(
        self, event: LeaseEvent, queue: Queue, lease_number: int, now: float, sent_at: float | None = None
    ) -> Effects:
        """Apply the answer to a command; ignore that of an earlier lease. Locked needs the time of its request."""
        if event is LeaseEvent.LOCKED and sent_at is None:
            raise ValueError(f"Locked {queue} needs the time at which its request was sent")
        lease = self.leases.get(queue)
        if lease is None or lease.number != lease_number:
            return Effects()
        return self._build_effects(self._lease_table.apply_event(lease, event, now, sent_at or 0.0))

    def next_timer_at(self) -> float | None:
        """Return when `run_due_timers` is due next."""
        due_times = [at for at in (self._lease_table.next_timer_at(), self._resume_at()) if at is not None]
        return min(due_times, default=None)

    def run_due_timers(self, now: float) -> Effects:
        """Apply all timers that are due; if `needs_takeover`, the caller reads the assignment first."""
        commands: list[Command] = []
        resume_at = self._resume_at()
        if resume_at is not None and resume_at <= now and self._is_assignment_current:
            self._resumed = True  # no operator runs that could grant the share to other members
            commands += self._start_assigned_queues(now)
        commands += self._lease_table.run_due_timers(now)
        return self._build_effects(commands)

    def drain(self, *, final: bool, now: float) -> Effects:
        """Release all queues, until `end_drain` or, if `final`, permanently; a repeated call continues the drain."""
        becomes_final = final and not self.final
        self._is_draining = True
        self.final = self.final or final
        commands: list[Command] = []
        for lease in self.leases.values():
            commands += self._lease_table.apply_event(lease, LeaseEvent.REVOKED, now)
            lease.may_resume = False
        return self._build_effects(commands, store_final=becomes_final)

    def end_drain(self, now: float) -> Effects:
        """Consume again the queues that the assignment still gives to this member; none after a final drain."""
        if self.final or not self._is_draining:
            return Effects()
        self._is_draining = False
        return self._build_effects(self._start_assigned_queues(now))

    def set_broker_reachability(self, brokers: Mapping[str, bool]) -> None:
        """Replace the reachability of brokers in the report; brokers that are not named are no longer reported."""
        if self._broker_reachability != brokers:
            self._broker_reachability = dict(brokers)
            self._update_revision()

    def mark_stalled(self) -> None:
        """Stop deliveries and commits until the assignment is read again: the event loop stalled for over 5 s."""
        self._is_assignment_current = False

    def may_deliver(self, queue: Queue, now: float, push_timeout: float) -> bool:
        """Whether a delivery of this queue may start now."""
        lease = self.leases.get(queue)
        if lease is None or lease.state is not LeaseState.RUNNING:
            return False
        return self._is_assignment_current and lease.is_lock_trusted(now, push_timeout)

    def consuming_since(self, topic: str) -> float | None:
        """Return since when the group consumes a topic, in seconds since 1970; None if the assignment does not say."""
        return self._assignment.topic_start_seconds.get(topic) if self._assignment else None

    def may_commit(self, queue: Queue) -> bool:
        """Whether an offset of this queue may be committed: until the queue is released."""
        return self._is_assignment_current and queue in self.leases

    def report(self) -> Report:
        """Return a consistent snapshot of the member; the same value until something changes."""
        if self._report is None:
            releasing: list[Queue] = []
            held: list[Queue] = []  # in the assignment's order: a set would take three times as long to sort
            for queue, lease in self.leases.items():
                (releasing if lease.state is LeaseState.DRAINING else held).append(queue)
            self._report = Report(
                member=self.name,
                uid=self.uid,
                incarnation=str(self.incarnation or ""),
                started=self.started,
                reads=ASSIGNMENT_SCHEMA,
                generation=self.obeyed_generation,
                revision=self.revision,
                state=self.state,
                final=self.final,
                held=to_ranges(held),
                releasing=to_ranges(releasing),
                brokers=self._broker_reachability,
            )
        return self._report

    def _summary(self) -> tuple[object, ...]:
        """Return a value that changes whenever the report does."""
        member = (self.incarnation, self.started, self.obeyed_generation, self.state, self.final)
        return (*member, self._lease_table.reported_changes, self._broker_reachability)

    def _build_effects(
        self, commands: list[Command], store_generation: int | None = None, *, store_final: bool = False
    ) -> Effects:
        self._update_revision()
        return Effects(store_generation=store_generation, store_final=store_final, commands=tuple(commands))

    def _update_revision(self) -> None:
        """Increment the revision, and have the report built again, if it has changed since the last call."""
        summary = self._summary()
        if self._last_summary != summary:
            self._last_summary = summary
            self.revision += 1
            self._report = None
