"""A snapshot, looked at: who counts, which queues there are, who owns them, what is known of the owners."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rota.documents import Assignment, Share
from rota.handover import Proof, Seen
from rota.model import RETRY, Holder, Queue
from rota.planner import record
from rota.planner.members import incarnations
from rota.planner.members.standings import Standing, in_motion
from rota.planner.snapshot import Pod, Snapshot
from rota.spec import Handover, PolicySpec, Seconds

# Brokers tell the name servers every 30 s that they are there: one that has just started knows only some of them.
SHRINK_PATIENCE = 40.0

# How long somebody may be silent is not known without a policy: nobody is overruled sooner than anybody may be.
WITHOUT_POLICY = PolicySpec(handover=Handover(lost_after=Seconds("inf")))


@dataclass(frozen=True)
class Situation:
    """What the decisions rest on; each thing is worked out once, and only if somebody asks."""

    snapshot: Snapshot
    standings: Mapping[str, Standing]
    document: Assignment
    now: float

    @cached_property
    def policy(self) -> PolicySpec:
        """The policy, or what goes without one where it cannot be followed."""
        return self.snapshot.policy or WITHOUT_POLICY

    @cached_property
    def pods(self) -> dict[str, Pod]:
        """The pods by name."""
        return {pod.name: pod for pod in self.snapshot.pods}

    @cached_property
    def counted(self) -> list[str]:
        """The names of those who share the queues."""
        return [pod.name for pod in self.snapshot.pods if self.standings[pod.name].counts]

    @cached_property
    def motion(self) -> dict[str, float]:
        """Who comes or goes at this moment, and for how many seconds it is worth waiting for."""
        return in_motion(self.snapshot.pods, self.standings, self.policy)

    @cached_property
    def owned(self) -> dict[Queue, Holder]:
        """Who owns what."""
        return record.owners(self.document)

    @cached_property
    def queues(self) -> list[Queue]:
        """Every queue that shall be worked: those seen, and where too little is seen, those on record."""
        return [queue for topic in self._topics for queue in self._queues_of(topic)]

    @cached_property
    def unseen(self) -> list[str]:
        """What there is no view of, so that nothing may move; a retry topic may not exist yet."""
        seen = {topic for topic, view in self.snapshot.views.items() if view and view.queues}
        topics = [f"topic {topic}" for topic in self._topics if topic not in seen and topic != self.retries]
        return topics + ["the group's members"] * (self.snapshot.foreigners is None)

    @cached_property
    def on_record(self) -> dict[str, set[Queue]]:
        """The queues that the record knows, by topic."""
        found: dict[str, set[Queue]] = {}
        for queue in [*self.owned, *self.document.releasing]:
            found.setdefault(queue.topic, set()).add(queue)
        return found

    @cached_property
    def freely_left(self) -> frozenset[Queue]:
        """The queues of which the policy alone may say that nobody shall own them; a foreigner's share is his."""
        return frozenset() if self.snapshot.foreigners else frozenset(self.queues)

    @property
    def _topics(self) -> list[str]:
        spec = self.snapshot.spec
        if spec is None or self.snapshot.must_release_all:
            return []
        subscribed = [subscription.topic for subscription in spec.subscriptions]  # others' retries may be among them
        return subscribed + [it for it in self.snapshot.views if it == self.retries and it not in subscribed]

    @property
    def retries(self) -> str:
        """The group's own retry topic: others' may be subscribed to as any topic may."""
        spec = self.snapshot.spec
        return RETRY + ((spec and spec.group) or self.snapshot.group.partition("/")[2])

    def _queues_of(self, topic: str) -> Sequence[Queue]:
        view = self.snapshot.views.get(topic)
        if view and view.queues and view.steady >= SHRINK_PATIENCE:
            return view.queues
        known = self.on_record.get(topic, set())
        if view and view.queues:  # what is on its way out by the record, and is not seen here either, is left to go
            known = {queue for queue in known if not self._leaves(queue)}
        return sorted(known.union(view.queues if view else ()))

    def _leaves(self, queue: Queue) -> bool:
        release = self.document.releasing.get(queue)
        return release is not None and release.to is None

    def seen(self, holder: Holder, incarnation: int = 0) -> Seen:
        """Say what is known of a holder's process; one who is not among the pods is not ended by that."""
        found = self._seen.get((holder, incarnation))
        if found is None:
            found = self._seen[holder, incarnation] = self._look_at(holder, incarnation)
        return found

    @cached_property
    def _seen(self) -> dict[tuple[Holder, int], Seen]:
        """What is known of holders that were asked about: a holder is, for each of its queues."""
        return {}

    def _look_at(self, holder: Holder, incarnation: int) -> Seen:
        pod = self.pods.get(holder.name)
        if holder.uid in self.snapshot.gone:
            return Seen(ended=True)
        return incarnations.seen(self.document, pod, incarnation) if pod and pod.uid == holder.uid else Seen()

    def seen_of_owner(self, holder: Holder) -> Seen:
        """Say what is known of the process to which the document gives queues."""
        return self.seen(holder, self.document.members[holder.name].incarnation)

    @cached_property
    def incarnations_since(self) -> int:
        """The generation from which on shares name incarnations, for the next document."""
        return incarnations.since(self.snapshot, self.document)

    def incarnation(self, name: str, uid: str) -> int:
        """Return which process of a pod the next document names."""
        pod, share = self.pods.get(name), self.document.members.get(name)
        if not self.incarnations_since:
            return 0
        is_heard = pod is not None and pod.uid == uid and bool(pod.incarnation)
        if pod and is_heard and (self.counts(name) or incarnations.inherits(self.document, pod)):
            return pod.incarnation
        if share and share.uid == uid and (share.incarnation or not pod):
            return share.incarnation
        return pod.incarnation if pod and pod.uid == uid else 0

    def counts(self, name: str) -> bool:
        """Whether the member of this name shares the queues."""
        return name in self.standings and self.standings[name].counts

    @cached_property
    def free_proof(self) -> Proof:
        """What is known of queues that the record gives to nobody; who is not shown to us may work them."""
        if self.snapshot.foreigners is None or (self.document.barrier and self.snapshot.replaced):
            return Proof.NONE
        return record.past_barrier(self.document, self.snapshot.pods, self.policy.handover, self.now)

    def free(self, queue: Queue) -> Proof:
        """Say what is known of a queue that the record gives to nobody."""
        return Proof.NONE if self.free_proof is Proof.NONE else self.strays.get(queue, self.free_proof)

    @cached_property
    def strays(self) -> dict[Queue, Proof]:
        """Queues that somebody still drains after the record was lost, and that it does not name."""
        if not self.document.barrier:
            return {}
        found: dict[Queue, Proof] = {}
        named = {*self.owned, *self.document.releasing}
        rules, since = self.policy.handover, record.ago(self.document.issued_at, self.now)
        for pod in self.snapshot.pods:
            if pod.heard and not self.seen(pod.holder).ended:
                known = Proof.LOST if pod.seen.lost(rules, since) else Proof.NONE
                found |= {queue: known for queue in pod.heard.working - named if found.get(queue) is not Proof.NONE}
        return found

    def overcome(self, queue: Queue, forced: int) -> bool:
        """Whether nobody can be working a queue any more that was forced from him by this generation."""
        if self._oldest < forced:
            return False
        return sum(pod.heard is not None and queue in pod.heard.working for pod in self.snapshot.pods) <= 1

    def without_owner(self, document: Assignment) -> list[Queue]:
        """Return the queues that none of ours works: neither with an owner, nor still with one who has not released it.

        On record a queue stays with who has ended while nobody takes it over, and with who was told to drain.
        """
        if document.everyone is not None:
            return []
        owned = self.owned if document is self.document else record.owners(document)
        idle = frozenset[Queue]().union(*(self._not_worked(*share) for share in document.members.items()))
        known = document.releasing
        return [queue for queue in self.queues if (queue not in owned or queue in idle) and queue not in known]

    def _not_worked(self, name: str, share: Share) -> Collection[Queue]:
        """Return what of a share its owner does not work: it has ended, or was told to drain though it stays."""
        holder = Holder(name, share.uid)
        seen = self.seen(holder, share.incarnation)
        if seen.ended and not (self.counts(name) and self.pods[name].uid == share.uid):
            return share.queues
        report = seen.report if seen.obeys(holder, 0) else None
        drains = report and report.state != "serving" and not (report.final or seen.terminating)
        return frozenset(share.queues) - seen.working if drains else ()

    @cached_property
    def _oldest(self) -> int:
        """The oldest generation that a member may still obey."""
        pods = [pod for pod in self.snapshot.pods if not self.seen(pod.holder).ended]
        there = {pod.holder for pod in pods}
        on_record = (Holder(name, share.uid) for name, share in self.document.members.items())
        if any(holder not in there and not self.seen(holder).ended for holder in on_record):
            return 0
        return min((pod.generation for pod in pods if pod.started), default=self.document.generation)
