"""Facts derived from a snapshot: counted members, queues, their owners, and the proofs about the owners.

`rota.planner.plan` derives one `Situation` for each plan. All its steps read it, so each fact has one meaning.
"""

from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import starmap

from rota.documents import Assignment, Share
from rota.model import Holder, Queue
from rota.planner import record
from rota.planner.members import incarnations
from rota.planner.members.holder_proofs import HolderProofs
from rota.planner.members.member_states import MemberState, members_in_transition
from rota.planner.snapshot import PodSnapshot, Snapshot
from rota.planner.subscribed_queues import SubscribedQueues
from rota.spec import Handover, PolicySpec, Seconds
from rota.timestamps import format_time

# Stands for a policy that is missing or invalid although the group names it. Its `lostAfter` is not known: with an
# infinite one, no member counts as lost too early.
UNKNOWN_POLICY = PolicySpec(handover=Handover(lost_after=Seconds("inf")))


class Situation:
    """The facts that decisions rest on; each is computed once."""

    def __init__(
        self, snapshot: Snapshot, member_states: Mapping[str, MemberState], document: Assignment, now: float
    ) -> None:
        self.snapshot = snapshot
        self.member_states = member_states
        self.document = document
        self.now = now
        self.policy = snapshot.policy or UNKNOWN_POLICY
        self.pods = snapshot.pods_by_name
        self.formatted_now = format_time(now)  # as documents and the status spell it
        # The pods that share the queues: Ready or Unready (`MemberState.is_counted`).
        self.counted_pods = [pod for pod in snapshot.pods if member_states[pod.name].is_counted]
        self.holders_by_member = {pod.name: pod.holder for pod in self.counted_pods}
        self.counted_members = list(self.holders_by_member)
        self.counted_holders = list(self.holders_by_member.values())
        # Members that are joining or leaving, by name, each with the seconds left to wait for it.
        self.transition_seconds_left = members_in_transition(snapshot.pods, member_states, self.policy)
        self.owners = record.owners_of(document)
        self.subscribed = SubscribedQueues(snapshot, document, self.owners)
        self.queues = self.subscribed.queues
        self.proofs = HolderProofs(snapshot, self.pods, document, self.owners, self.policy.handover, now)

    def seconds_since(self, at: str) -> float:
        """Return the seconds since a time in a document, 0 if unreadable; negative if the writer's clock was ahead."""
        return record.seconds_since(at, self.now)

    def is_counted(self, name: str) -> bool:
        """Whether the member of this name shares the queues."""
        return name in self.holders_by_member

    def pods_in_state(self, state: MemberState) -> list[PodSnapshot]:
        """Return the pods in this member state."""
        return [pod for pod in self.snapshot.pods if self.member_states[pod.name] is state]

    @property
    def client_ids(self) -> dict[str, str]:
        """The counted members' client ids at the broker, by name; a member that reports none has its name."""
        return {pod.name: pod.client_id or pod.name for pod in self.counted_pods}

    @cached_property
    def incarnations_since(self) -> int:
        """The `incarnations_since` of the next document: 0 if its shares name no incarnations."""
        return incarnations.incarnations_since(self.snapshot, self.document)

    def incarnation_of(self, holder: Holder) -> int:
        """Return the incarnation that the next document names as the owner of a pod's queues; 0: it names none.

        - The process that reported last, if the member is counted, or if this process has inherited the queues of an
          earlier one (see `incarnations.py`).
        - Otherwise the process that the present document names: it may still hold queues.
        - If the document names none, the process that reported last.
        """
        if not self.incarnations_since:
            return 0
        pod = self.pods.get(holder.name)
        share = self.document.share_of(holder)
        reporting = pod.incarnation if pod and pod.uid == holder.uid else 0
        recorded = share.incarnation if share else 0
        if not (pod and reporting):
            return recorded
        if self.is_counted(pod.name) or incarnations.consumes_inherited_queues(self.document, pod):
            return reporting
        return recorded or reporting

    @cached_property
    def holder_names_by_state(self) -> dict[MemberState | None, list[str]]:
        """The names of queues' holders by member state; None: the pod is absent, and not known to have ended."""
        ended_uids = self.snapshot.ended_uids
        names: dict[MemberState | None, list[str]] = {}
        for holder in sorted(self.document.queue_holders):
            pod = self.pods.get(holder.name)
            state = self.member_states[pod.name] if pod and pod.uid == holder.uid else None
            if holder.uid in ended_uids:
                state = MemberState.ENDED
            elif pod and state and state.is_counted and incarnations.has_restarted(self.document, pod):
                state = MemberState.RESTARTING  # the pod is counted, but runs a later process than the holder
            names.setdefault(state, []).append(holder.name)
        return names

    def idle_members(self, document: Assignment) -> list[Holder]:
        """Return the members that share the queues and own none by this document."""
        owners = {name: share.uid for name, share in document.members.items() if share.queues}
        return [holder for holder in self.counted_holders if owners.get(holder.name) != holder.uid]

    def unowned_queues(self, document: Assignment) -> list[Queue]:
        """Return the queues that no member consumes and that are not being released, once `document` is in force.

        `document` may still name an owner of such a queue: a member that has ended, or that drains only for a while.
        """
        if document.is_broadcasting:  # every member consumes all queues
            return []
        unconsumed = frozenset[Queue]().union(*starmap(self._unconsumed_queues, document.members.items()))
        # Queues of unchanged shares need no check: they keep their owners. `former`: the queues of changed shares in
        # the stored document; `assigned`: those in `document`.
        former = _queues_of_changed_shares(self.document, document)
        assigned = _queues_of_changed_shares(document, self.document)
        candidates = unconsumed.union(self.subscribed.unassigned, self.document.releasing, former)
        unowned = candidates.difference(assigned - unconsumed, document.releasing)
        return [queue for queue in self.queues if queue in unowned] if unowned else []

    def _unconsumed_queues(self, name: str, share: Share) -> Collection[Queue]:
        """Return the queues of a share that its owner does not consume: it has ended, or drains only for a while."""
        if self._serves_share(name, share):
            return ()
        holder = Holder(name, share.uid)
        evidence = self.proofs.evidence_of(holder, share.incarnation)
        # The pod's next process gets these queues at once, so they do not count as unconsumed.
        is_replaced_in_place = self.is_counted(name) and self.pods[name].uid == share.uid
        if evidence.ended and not is_replaced_in_place:
            return share.queues
        report = evidence.report if evidence.has_reported(holder) else None
        drains_for_a_while = report and report.may_resume and not evidence.terminating
        return frozenset(share.queues) - evidence.active_queues if drains_for_a_while else ()

    def _serves_share(self, name: str, share: Share) -> bool:
        """Whether the process that owns a share is known to serve, as most are: then no evidence has to be computed."""
        pod = self.pods.get(name)
        if pod is None or pod.uid != share.uid or pod.uid in self.snapshot.deleted_uids:
            return False
        is_owner = pod.incarnation == share.incarnation and pod.stopped_for is None and not pod.ended
        return is_owner and (pod.report is None or pod.report.state == "serving")


def _queues_of_changed_shares(document: Assignment, other: Assignment) -> frozenset[Queue]:
    """Return the queues of the shares that differ from the same member's share in `other`.

    An unchanged share is the same object in both documents.
    """
    shares = [share.queues for name, share in document.members.items() if share is not other.members.get(name)]
    return frozenset[Queue]().union(*shares)
