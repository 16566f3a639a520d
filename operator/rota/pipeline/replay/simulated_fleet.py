"""Simulated members of one group: they start, change and end as recorded, obey documents, and drain revoked queues.

A *document* is an assignment that the replayed planner has made.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from operator import attrgetter

from rota.documents import Assignment
from rota.model import Poke
from rota.pipeline.replay.group_history import MemberPresence
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.replay.simulated_members import AWAY_STATES, FOREVER_SECONDS, SimulatedMember
from rota.pipeline.replay.virtual_clock import VirtualClock
from rota.planner import PodSnapshot

OBEY_SECONDS = 0.3  # seconds from the write of a document until members obey it
DRAIN_SECONDS = 0.2  # seconds that a member needs to finish the messages that it has started


class SimulatedFleet:
    """The members that exist now; reports to the replay's metrics which queues they consume."""

    def __init__(
        self,
        clock: VirtualClock,
        metrics: ReplayMetrics,
        schedule_event: Callable[[float, Callable[[], None]], None],
        on_obeyed: Callable[[SimulatedMember], None],
    ) -> None:
        self.members: dict[str, SimulatedMember] = {}
        self.deleted_uids: frozenset[str] = frozenset()
        self._clock = clock
        self._metrics = metrics
        self._schedule_event = schedule_event  # arguments: delay in seconds, and an event that changes members' reports
        self._on_obeyed = on_obeyed
        self._member_numbers = count()

    def apply_presences(self, presences: Mapping[str, MemberPresence], document: Assignment) -> None:
        """Start, change and end members so that exactly those of `presences` exist, under the document in force.

        At the start of the history, the members have already obeyed the document.
        """
        is_start = self._clock.now == self._clock.begins and not self.members
        if is_start:  # pods that the document names and that do not exist have ended earlier
            present_uids = {presence.uid for presence in presences.values()}
            self.deleted_uids = _uids_in(document) - present_uids
        for name, presence in presences.items():
            member = self.members.get(name)
            if member and member.uid == presence.uid:
                self._set_member_state(member, presence, document)
                continue
            if member:
                self._end_member(member)
            since = -FOREVER_SECONDS if is_start else self._clock.now
            member = SimulatedMember(
                name, presence.uid, next(self._member_numbers), presence.state, presence.room, since, state_since=since
            )
            self.members[name] = member
            self._metrics.add_member(member)
            if is_start:
                self._resume_member(member, document)
        for name in sorted(self.members.keys() - presences.keys()):  # the same order in each run
            self._end_member(self.members[name])

    def _resume_member(self, member: SimulatedMember, document: Assignment) -> None:
        """Let a member that exists at the start of the history obey the history's first document."""
        share = document.members.get(member.name)
        if share and share.uid == member.uid and member.state != "Ended":
            revoked = document.releases_by_holder.get(member.holder, ())
            # A member that still has to release queues has only obeyed the previous generation.
            member.obey(document.generation - 1 if revoked else document.generation, (*share.queues, *revoked))
            if member.may_consume:
                self._metrics.consumer_tracker.update_consumer(member)
            if member.may_obey and revoked:
                self._schedule_event(OBEY_SECONDS, partial(self._obey_document, member, document))
        if member.state == "Leaving":
            self._schedule_event(DRAIN_SECONDS, partial(self._finish_drain, member, is_final=True))  # of all queues

    def _set_member_state(self, member: SimulatedMember, presence: MemberPresence, document: Assignment) -> None:
        previous = member.state
        member.set_state(presence.state, presence.room, self._clock.now)
        if presence.state == previous:
            return
        if presence.state in AWAY_STATES:
            self._metrics.consumer_tracker.stop_consumer(member, suddenly=not member.has_drained)
        elif presence.state == "Leaving":
            self._metrics.consumer_tracker.stop_consumer(member)
            self._schedule_event(DRAIN_SECONDS, partial(self._finish_drain, member, is_final=True))
        elif previous in AWAY_STATES or previous == "Joining":
            # A member that was away has stopped, and has missed documents; a Joining one has obeyed documents without
            # consuming. Both start to consume with this document, also if they have obeyed it before (`is_repeat`).
            self._schedule_event(OBEY_SECONDS, partial(self._obey_document, member, document, is_repeat=True))

    def _end_member(self, member: SimulatedMember) -> None:
        """End a member whose pod was deleted; unless it was drained, its messages in flight count as duplicates."""
        is_sudden = member.state not in AWAY_STATES and not member.has_drained
        self._metrics.consumer_tracker.stop_consumer(member, suddenly=is_sudden)
        self.deleted_uids |= {member.uid}
        del self.members[member.name]
        member.set_state("Ended", member.room, self._clock.now)

    def follow_document(self, document: Assignment) -> None:
        """Let members obey a new document after a while, and forget deleted uids that the document does not name."""
        followers = [member for member in self.members.values() if member.may_obey]
        self._schedule_event(OBEY_SECONDS, partial(self._obey_all, followers, document))
        self.deleted_uids &= _uids_in(document)  # the planner does not look up other uids

    def _obey_all(self, followers: Iterable[SimulatedMember], document: Assignment) -> None:
        for member in followers:
            self._obey_document(member, document)

    def _obey_document(self, member: SimulatedMember, document: Assignment, *, is_repeat: bool = False) -> None:
        """Let a member obey a document, unless it has obeyed it (except if `is_repeat`) or a newer one."""
        is_present = self.members.get(member.name) is member
        has_obeyed = member.generation == document.generation and not is_repeat
        if not is_present or not member.may_obey or has_obeyed or member.generation > document.generation:
            return
        share = document.members.get(member.name)
        queues = share.queues if share and share.uid == member.uid else ()
        if member.obey(document.generation, queues):
            self._schedule_event(DRAIN_SECONDS, partial(self._finish_drain, member))
        if member.may_consume:
            self._metrics.consumer_tracker.update_consumer(member)
        self._on_obeyed(member)

    def _finish_drain(self, member: SimulatedMember, *, is_final: bool = False) -> None:
        if self.members.get(member.name) is member:
            member.finish_drain(is_final=is_final)

    def is_only_draining(self, document: Assignment) -> bool:
        """Whether queues are revoked and every holder of one is draining: until a drain ends, no plan is needed."""
        draining = {member.holder for member in self.members.values() if member.is_draining}
        return bool(document.releasing) and document.releases_by_holder.keys() <= draining

    def set_pokes(self, pokes: Mapping[str, Poke]) -> None:
        """Set the pods' annotations that make them sync their ConfigMap."""
        for name, poke in pokes.items():
            self.members[name].poke = poke
            self.members[name].poked_at = self._clock.now

    def to_pods(self) -> tuple[PodSnapshot, ...]:
        """Return the pods by name as input of the planner."""
        return tuple(member.to_pod(self._clock.now) for _, member in sorted(self.members.items()))


def _uids_in(document: Assignment) -> frozenset[str]:
    """Return the uids of all pods that a document names."""
    return frozenset(map(attrgetter("uid"), document.entry_holders | document.releases_by_holder.keys()))
