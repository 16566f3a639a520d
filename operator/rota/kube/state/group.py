"""One group as it is known now: what was seen of its pods, record and broker, put together for the planner.

Nothing here asks anybody; others tell. All times are measured on the loop's clock, which never jumps, and may start
anew: whoever begins to lead looks at everything once before it writes anything.
"""

import math
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from rota.kube.client.objects import ConfigMap, Custom, Metadata, Pod
from rota.kube.state.broker_state import AtBroker
from rota.kube.state.member_problems import member_problems, too_many_members
from rota.kube.state.pod_state import Known, client_id, name_of
from rota.kube.state.resolved_spec import Wish, wish_of
from rota.kube.state.status_throttle import Pace
from rota.kube.state.stored_assignment import Record, RecordLimits
from rota.lag import slowest
from rota.model import Holder, Queue, Verdict
from rota.planner import Snapshot
from rota.spec import GroupSpec, resolved

LINGER_SECONDS = 1.0  # before a pod that may have ended is read again
REREAD_SECONDS = 60.0  # before an assignment that could not be used is read again
NO_WEIGHTS: Mapping[Queue, float] = {}
MAX_MEMBERS = 10_000  # of a group; a pod takes about 10 KiB of memory
FORGOTTEN_SECONDS = 240.0  # then no broker tells of a pod that ended any more; it notices after 120


class Group:
    """What is known of one group."""

    def __init__(self, namespace: str, name: str, record_limits: RecordLimits | None = None) -> None:
        """Know nothing yet."""
        self.namespace, self.name = namespace, name
        self._record_limits = record_limits or RecordLimits()
        self.body: Custom | None = None
        self.wish = Wish()
        self._read_of: tuple[Any, Custom | None] | None = None  # the texts that it was read from
        self.good: GroupSpec | None = None  # the last spec that could be understood
        self.record = Record()
        self.pods: dict[str, Known] = {}
        self.fleet: tuple[Verdict, ...] = ()  # what is wrong with the pods that we run
        self.key_problems: tuple[Verdict, ...] = ()
        self.strangers: set[str] = set()  # pods that carry the label and no sidecar
        self.surplus: set[str] = set()  # names of pods above MAX_MEMBERS: they are not asked, and get no queues
        self.missed: set[Holder] = set()  # not told of any more: ended, or only without our label
        self.replaced: dict[Holder, Known] = {}  # pods whose name another one has, and of whose end nothing is known
        self.gone: set[str] = set()  # uids of pods that were there and are not any more
        self._clients: dict[str, str] = {}  # and by which ids brokers know them
        self._met: dict[str, float] = {}  # when each name was last one of ours
        self._unlocked: set[str] = set()  # those whose locks were given back
        self._reached: dict[str, float] = {}  # which brokers somebody reaches, and since when
        self.unsure: tuple[Holder, ...] = ()
        self.awaited: frozenset[str] = frozenset()
        self.outdated = False  # the record is not the one that we know
        self._early: ConfigMap | None = None  # the record, seen before its group: whose it is cannot be told yet
        self.looked = False  # everything was looked at once since we began to lead
        self.fresh = False  # and again, after the record was found missing or damaged
        self.pace = Pace()
        self.weights: Mapping[Queue, float] = {}  # what its queues were last said to weigh

    @property
    def spelled(self) -> str:
        """Its name as documents have it."""
        return f"{self.namespace}/{self.name}"

    @property
    def uid(self) -> str:
        """The group's object's own."""
        return self.body.metadata.uid if self.body else ""

    @property
    def version(self) -> str:
        """The group's object's, as it is known."""
        return self.body.metadata.resource_version if self.body else ""

    def is_before(self, newer: Metadata) -> bool:
        """Whether that is a later version of this very group."""
        before = self.body.metadata if self.body else Metadata("")
        return before.uid == newer.uid and before.version < newer.version

    def begin(self) -> None:
        """Forget all waits: whoever begins to lead waits anew."""
        self.looked = self.fresh = self.outdated = False
        self.pace = Pace()
        for known in chain(self.pods.values(), self.replaced.values()):
            known.heard, known.offsets, known.unheard_since, known.cut_off_since = None, None, None, {}
            known.doubt = None

    # What is told.

    def wants(self, body: Custom, policy: Custom | None) -> None:
        """Take the group's and its policy's newest texts."""
        if self.body is None or self.body.metadata.uid != body.metadata.uid:
            self._forget_record()  # it was another one's
            self.forget_missed()
            self.unsure, self.gone, self.fleet, self.good = (), set(), (), None
            self.begin()
        self.body = body
        before = self._read_of
        if before is None or before[1] is not policy or before[0] != body.spec:  # each status that is written is news
            self.wish, self._read_of = wish_of(body, policy), (body.spec, policy)
        self.good = self.wish.spec or self.good
        if self._early:
            self.keep(self._early)
            self._early = None

    def see(self, pod: Pod, now: float) -> None:
        """Take a pod's newest state."""
        name, known = pod.metadata.name, self.pods.get(pod.metadata.name)
        if known and pod.metadata.version < known.pod.metadata.version:
            return
        if known and known.pod.metadata.uid != pod.metadata.uid:
            self._replace(known)
            known = None
        if pod.works_for != self.name:
            (self.strangers.add if pod.labelled == self.name else self.strangers.discard)(name)
            return
        if known is None and pod.labelled != self.name and not self._is_on_record(pod):
            return
        if known is None and not (self.has_room or self._is_on_record(pod)):
            self.surplus.add(name)
            return
        self.surplus.discard(name)
        if known is None:
            known = self.pods[name] = Known(pod, now, now, now)
        known.see(pod, now)

    @property
    def has_room(self) -> bool:
        """Whether it may have another member."""
        return len(self.pods) < MAX_MEMBERS

    def _is_on_record(self, pod: Pod) -> bool:
        document = self.record.document
        share = document.members.get(pod.metadata.name) if document else None
        return share is not None and share.uid == pod.metadata.uid

    def _replace(self, known: Known) -> None:
        """Know that another pod has the name of one of ours: it was deleted, by force if its end was not seen."""
        holder = Holder(known.pod.metadata.name, known.pod.metadata.uid)
        if known.pod.may_run:
            self.replaced[holder] = known
            self.missed.add(holder)
            del self.pods[holder.name]
        else:
            self.lose(known.pod)

    def miss(self, pod: Pod) -> None:
        """Know that a pod is not ours to see any more: it ended, or lost our label and works on."""
        self.strangers.discard(pod.metadata.name)
        self.surplus.discard(pod.metadata.name)
        known = self.pods.get(pod.metadata.name)
        if known is None or known.pod.metadata.uid != pod.metadata.uid:
            return
        known.pod = pod  # as it was at last
        if pod.stopped:
            self.lose(pod)
        elif self.body is None:  # nobody asks what became of it
            del self.pods[pod.metadata.name]
        else:
            self.missed.add(Holder(pod.metadata.name, pod.metadata.uid))

    @property
    def unseen(self) -> set[Holder]:
        """Those of whom only a read tells what became of them."""
        strayed = {Holder(name, it.pod.metadata.uid) for name, it in self.pods.items() if it.strayed}
        return self.missed | strayed | set(self.unsure)

    def read(self, holder: Holder, pod: Pod | None, now: float) -> None:
        """Take what a read of the one object tells of somebody: a pod of that uid, another one, or none."""
        self.missed.discard(holder)
        if pod and pod.metadata.uid == holder.uid:
            self.see(pod, now)
            return
        self.gone.add(holder.uid)
        known = self.replaced.pop(holder, None) or self.pods.get(holder.name)
        if known and known.pod.metadata.uid == holder.uid:
            self.lose(known.pod)

    @property
    def seconds_to_next_read(self) -> float:
        """How soon it is worth reading again what no watch tells."""
        if self.missed:
            return LINGER_SECONDS
        return math.inf if self.record.ours else REREAD_SECONDS

    def in_doubt(self, holder: Holder) -> Known | None:
        """Return what is known of somebody whose pod is no more, if that does not show that its process is not."""
        known = self.replaced.get(holder) or self.pods.get(holder.name)
        right = known is not None and known.pod.metadata.uid == holder.uid and known.pod.may_run
        return known if right else None

    def forget_missed(self) -> None:
        """Forget those who are not told of any more: the group is gone, and nobody asks what became of them."""
        for holder in self.missed:
            known = self.pods.get(holder.name)
            if known and known.pod.metadata.uid == holder.uid:
                del self.pods[holder.name]
        self.missed, self.replaced = set(), {}

    def lose(self, pod: Pod) -> None:
        """Know that a pod is no more."""
        name = pod.metadata.name
        self.strangers.discard(name)
        self.gone.add(pod.metadata.uid)
        if pod.status.pod_ip:
            self._clients[pod.metadata.uid] = client_id(pod)
        known = self.pods.get(name)
        if known and known.pod.metadata.uid == pod.metadata.uid:
            del self.pods[name]

    def keep(self, found: ConfigMap | None) -> None:
        """Take the record as it is; what is older than what is known is no news."""
        self.outdated = False
        if self.body is None:
            self._early = found if found and self._record_limits.may_keep(found) else None  # else it is read later
        elif found is None:
            self._forget_record()
            self.fresh = False
        elif found.metadata.version > self.record.number:
            self.record, self.fresh = self._record_limits.read(found, self.name, self.uid), False
        self.forget_ended()

    def end(self) -> None:
        """Know that the group's object is no more."""
        self.body = None
        self._forget_record()
        self.forget_missed()

    def _forget_record(self) -> None:
        self.record = Record()
        self._record_limits.forget((self.namespace, self.name))

    @property
    def at_rest(self) -> bool:
        """Whether the record gives queues to just the pods that are there: so much can be told without a plan."""
        document = self.record.document
        there = {name: known.pod.metadata.uid for name, known in self.pods.items()}
        if document is None or document.releasing:
            return False
        return there == {name: share.uid for name, share in document.members.items()} and not self.missed

    @property
    def shares(self) -> dict[Holder, tuple[Queue, ...]]:
        """Who owns what by the record."""
        document = self.record.document
        members = document.members if document else {}
        return {Holder(name, share.uid): share.queues for name, share in members.items()}

    def has_ended(self, holder: Holder) -> bool:
        """Whether a pod is known to be no more; while nobody is there to take its queues over, the record has them."""
        known = self.pods.get(holder.name)
        ended = known is not None and known.pod.metadata.uid == holder.uid and known.pod.ended
        return ended or holder.uid in self.gone

    @property
    def owners(self) -> dict[Queue, str]:
        """The name of each queue's owner by the record."""
        return {queue: holder.name for holder, queues in self.shares.items() for queue in queues}

    @property
    def at_broker(self) -> str:
        """What brokers call it: also while its spec cannot be understood, for that never changes."""
        if self.good:
            return self.good.group or self.name
        return resolved.read_group_name(self.record.settings) or self.name

    @property
    def everyones(self) -> bool:
        """Whether every member works every queue, by the record."""
        return self.record.document is not None and self.record.document.everyone is not None

    @property
    def reported(self) -> dict[Queue, int]:
        """Where the slowest member of a Broadcasting group is: who has not begun yet is none."""
        members = self.shares if self.everyones else {}
        there = [known for known in self.pods.values() if known.counts and known.pod.started]
        return slowest([it.offsets for it in there if Holder(it.pod.metadata.name, it.pod.metadata.uid) in members])

    def names(self, now: float) -> Collection[str]:
        """Return how client ids of our own end, those of pods too that ended a while ago: brokers forget slowly."""
        document = self.record.document
        there = {name_of(name, known.pod.metadata.uid) for name, known in self.pods.items()}
        there |= {name_of(*holder) for holder in self.shares}
        there |= {name_of(*release.holder) for release in (document.releasing.values() if document else ())}
        met = self._met | dict.fromkeys(there, now)
        self._met = {name: at for name, at in met.items() if now - at < FORGOTTEN_SECONDS}
        return self._met.keys()

    def locks_left(self) -> list[tuple[str, list[Queue]]]:
        """Return by which ids the broker keeps locks of those who ended, and of which queues; once each."""
        spec, document = self.wish.spec, self.record.document
        if not (spec and spec.orderly and document):
            return []
        held = {holder: [*queues] for holder, queues in self.shares.items()}
        for queue, release in document.releasing.items():
            held.setdefault(release.holder, []).append(queue)
        ended = {known.pod.metadata.uid: client_id(known.pod) for known in self.pods.values() if known.pod.ended}
        clients = self._clients | ended
        left = {holder: queues for holder, queues in held.items() if queues and holder.uid in clients}
        found = [(clients[holder.uid], queues) for holder, queues in left.items() if holder.uid not in self._unlocked]
        self._unlocked |= {holder.uid for holder in left}
        return found

    def forget_ended(self) -> None:
        """Forget who ended and is on record no more: nobody asks for it again."""
        document = self.record.document
        if document:
            known = {share.uid for share in document.members.values()}
            known |= {release.holder.uid for release in document.releasing.values()}
            self.gone &= known
            self._clients = {uid: client for uid, client in self._clients.items() if uid in self.gone}
            self._unlocked &= known

    # What the planner is given.

    @property
    def weighs_queues(self) -> bool:
        """Whether its policy goes by what comes to each queue."""
        return self.wish.policy is not None and self.wish.policy.strategy == "Balanced"

    def snapshot(
        self,
        now: float,
        broker: AtBroker,
        rooms: Mapping[str, str],
        lag: int | None = None,
        weights: Mapping[Queue, float] | None = NO_WEIGHTS,
    ) -> Snapshot:
        """Put together what is seen; `weights`: what queues weigh, None where that is not known and should be."""
        wish, record = self.wish, self.record
        reached = {broker for known in self.pods.values() for broker in known.reaches}
        self._reached = {broker: self._reached.get(broker, now) for broker in reached}
        pods = (known.shown(now, rooms.get(name), self._reached) for name, known in sorted(self.pods.items()))
        return Snapshot(
            group=self.spelled,
            spec=wish.spec if record.ours else None,  # nothing can be written, so nothing is decided
            policy=wish.policy,
            document=record.document,
            damage=record.damage,
            settings=record.settings,
            wanted_settings=self.wanted_settings,
            fresh=self.fresh,
            pods=tuple(pods),
            replaced=frozenset(self.replaced),
            gone=frozenset(self.gone),
            views=broker.views,
            foreigners=broker.foreigners,
            queue_weights=weights,
            lag=lag,
            problems=(*wish.problems, *record.problems, *self.fleet, *broker.problems, *self._of_members),
            status=self.status,
            observed=self.body.metadata.generation if self.body else 0,
        )

    @property
    def status(self) -> Mapping[str, Any]:
        """What the last plan said of the group, told to people or not yet."""
        return self.pace.newest(self.written)

    @property
    def written(self) -> Mapping[str, Any]:
        """The status that people see."""
        return self.body.status if self.body else {}

    @property
    def wanted_settings(self) -> str:
        """What the sidecar shall be told beside the document."""
        if self.wish.spec is None:
            return self.record.settings
        policy = self.wish.policy
        drain_timeout = policy.handover.drain_timeout if policy else resolved.read_drain_timeout(self.record.settings)
        created = self.body.metadata.creation_timestamp if self.body else None
        return resolved.write_settings(self.name, self.wish.spec, drain_timeout, created)

    @property
    def _of_members(self) -> list[Verdict]:
        found = [*self.key_problems, *member_problems(self.strangers, self.pods)]
        return [too_many_members(len(self.pods) + len(self.surplus), MAX_MEMBERS), *found] if self.surplus else found
