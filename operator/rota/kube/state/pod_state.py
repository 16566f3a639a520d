"""A group's pods as they are known: their state, since when that is so, and what their sidecars last reported."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from rota.documents import Assignment
from rota.kube.client.objects import Pod
from rota.model import Holder, Queue, Reason
from rota.planner import Heard
from rota.planner import Pod as Seen
from rota.queue_offsets import ProgressPage
from rota.redelivery import GivenOffsets, Reader, Redelivered, Rules
from rota.reports import Report

MAX_MEMBERS = 10_000  # of a group; a pod takes about 10 KiB of memory
FORGIVEN_SECONDS = 600.0  # after which a restart does not count any more


@dataclass(slots=True)
class Restarts:
    """What is known of the processes of one pod's sidecar; times are the loop's, but for those of the node."""

    heard_since: float = 0.0  # since when the present process is heard
    stopped_since: float | None = None  # since when that process is seen to have ended
    last_end: float = 0.0  # when a process ended last, by the node's clock
    earlier_end: float = 0.0  # likewise, as it was known when the present process last responded
    _times: list[float] = field(default_factory=list)

    def hear(self, before: Report | None, report: Report, now: float) -> None:
        """Take a report, and the one before it.

        The process responds, so an end that is known already is of an earlier one, also if its own clock is behind.
        """
        self.earlier_end, self.stopped_since = self.last_end, None
        if is_later_process(before, report):
            self._times.append(now)
            self.heard_since = now

    def see(self, report: Report | None, process_ended: float, now: float) -> None:
        """Take when a process of the sidecar ended last, by the node's clock, as is the start in the report."""
        self.last_end = process_ended
        is_earlier = process_ended <= self.earlier_end
        if is_earlier or not (report and 0 < report.started < process_ended):
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now

    @property
    def has_stopped(self) -> bool:
        """Whether the process that was heard last is seen to have ended."""
        return self.stopped_since is not None

    def count(self, now: float) -> int:
        """Return how many restarts there were within the last ten minutes."""
        self._times = [at for at in self._times if now - at < FORGIVEN_SECONDS]
        return len(self._times)


def is_later_process(before: Report | None, report: Report) -> bool:
    """Whether a report is of a later process than the one before; of earlier versions that is not known."""
    return before is not None and 0 < before.process < report.process


@dataclass(slots=True)
class Known:
    """A pod, and since when what is known of it is so."""

    pod: Pod
    first_seen: float
    ready_changed: float
    poke_changed: float
    leaving_since: float | None = None
    heard: Heard | None = None
    offsets: Mapping[Queue, int | None] | None = None  # of a Broadcasting group's member; None: it was not heard
    unheard_since: float | None = None
    notices: int | None = None  # of its brokers, that consumers came or went, as far as they were acted upon
    doubted_since: float | None = None  # since when its responses are ignored
    doubt: Reason | None = None  # why its last response was ignored; the report before it is kept
    unproved_since: float | None = None  # of a pod deleted by force: since when no authenticated response came
    cut_off_since: dict[str, float] = field(default_factory=dict)
    strayed: bool = False  # it has lost our label: it works on until it is told otherwise, but it counts no more
    restarts: Restarts = field(default_factory=Restarts)
    lingers: bool = False  # the API server knows it no more, for it was deleted by force, and its sidecar answers
    next_page: int = 0  # of its queues, whose progress is read next
    on_report: Callable[[Report, Report, float], None] = lambda *_: None  # after each change: the one before, this, now
    has_key: bool = field(init=False)  # whether its sidecar mounts the group's key; a pod's mounts never change

    def __post_init__(self) -> None:
        """Look at the mounts once: each plan asks for the result, of every pod."""
        self.has_key = self.pod.has_key

    def see(self, pod: Pod, now: float) -> None:
        """Take a newer state of the same pod."""
        if pod.ready != self.pod.ready:
            self.ready_changed = now
        if pod.poke != self.pod.poke:
            self.poke_changed = now
        if pod.terminating and self.leaving_since is None:
            self.leaving_since = now
        self.pod, self.strayed = pod, pod.labelled != pod.works_for
        self.restarts.see(self.heard.report if self.heard else None, self.pod.status.process_ended, now)

    def hear(self, report: Report | None, now: float, asked: float, doubt: Reason | None = None) -> bool:
        """Take what it said, or that it said nothing since it was asked; return whether that is news.

        A response that is ignored, because of `doubt`, releases no queues, and it is not silence either.
        """
        was_doubted, self.doubt = self.doubt, doubt
        if doubt:
            self.doubted_since = self.doubted_since or asked
            news, self.unheard_since = doubt is not was_doubted or self.unheard_since is not None, None
            return news
        if report is None:
            news, self.unheard_since = self.unheard_since is None, self.unheard_since or asked
            return news
        before = self.heard.report if self.heard else None
        if before and is_later_process(report, before):
            return False  # an answer that came late: that process has ended
        was_silent = self.unheard_since is not None or was_doubted is not None or self.restarts.has_stopped
        self.restarts.hear(before, report, now)
        self.doubted_since = None
        news = was_silent or not _decides_the_same(before, report)
        self.unheard_since = None
        if self.notices is None:
            self.notices = report.consumers_changed
        if before != report:
            self.heard = Heard(report)
            if before is not None:
                self.on_report(before, report, now)
        if news:
            cut_off = [broker for broker, reachable in report.brokers.items() if not reachable]
            self.cut_off_since = {broker: self.cut_off_since.get(broker, now) for broker in cut_off}
        return news

    def take_notice(self) -> bool:
        """Whether its brokers have notified it, since this was last asked, that consumers came or went."""
        before, now = self.notices, self.heard.report.consumers_changed if self.heard else None
        self.notices = now
        return before is not None and now is not None and before != now

    def linger(self, report: Report | None, now: float, asked: float, doubt: Reason | None = None) -> None:
        """Take what it said though there is no such pod any more: it goes, as one does that is told to."""
        self.lingers, self.leaving_since = True, self.leaving_since or now
        self.hear(report, now, asked, doubt)

    @property
    def counts(self) -> bool:
        """Whether it is one of those of whom some may be ended when the fleet shrinks."""
        return not (self.strayed or self.lingers or self.pod.terminating or self.pod.ended)

    @property
    def can_report_notices(self) -> bool:
        """Whether the member is Ready, responds, and reports its brokers' notices: that consumers came or went."""
        if self.heard is None or self.unheard_since is not None or self.doubt is not None:
            return False
        return self.counts and self.pod.ready and self.heard.report.consumers_changed is not None

    @property
    def reaches(self) -> frozenset[str]:
        """The brokers that it says it can reach; nothing is known of who is not ready, or not heard."""
        sure = self.counts and self.pod.ready and self.heard and self.unheard_since is None
        brokers = self.heard.report.brokers if sure and self.heard else {}
        return frozenset(broker for broker, reachable in brokers.items() if reachable)

    def shown(self, now: float, room: str | None, reached: Mapping[str, float]) -> Seen:
        """Return it as the planner sees it; `reached`: since when others reach which brokers."""
        pod = self.pod
        return Seen(
            name=pod.metadata.name,
            uid=pod.metadata.uid,
            started=pod.started,
            ready=pod.ready and not self.strayed,
            steady=math.inf if self.strayed else now - self.ready_changed,
            age=now - self.first_seen,
            terminating=pod.terminating or self.lingers,
            leaving=0.0 if self.leaving_since is None else now - self.leaving_since,
            ended=pod.ended,
            stopped=None if self.restarts.stopped_since is None else now - self.restarts.stopped_since,
            restarts=self.restarts.count(now),
            serving=now - max(self.ready_changed, self.restarts.heard_since) if pod.ready else 0.0,
            obstacle=pod.obstacle,
            room=room,
            client_id=client_id(pod),
            heard=self.heard,
            unheard=0.0 if self.unheard_since is None else now - self.unheard_since,
            doubted=0.0 if self.doubted_since is None else now - self.doubted_since,
            cut_off={it: now - max(since, reached.get(it, now)) for it, since in self.cut_off_since.items()},
            poke=pod.poke,
            poked=now - self.poke_changed,
        )


class GroupPods(dict[str, Known]):
    """The pods of one group by name, and what is known of those that a watch does not report any more."""

    def __init__(self, group: str) -> None:
        """Know no pod yet."""
        super().__init__()
        self._group, self.limit = group, MAX_MEMBERS
        self.assignment: Assignment | None = None  # whose members are kept without the label, and above the limit
        self.strangers: set[str] = set()  # names of pods with the label and without a sidecar of the group
        self.surplus: set[str] = set()  # names of pods above the limit: they are not asked, and get no queues
        self.missed: set[Holder] = set()  # in no watch any more: deleted, or without the label; to be read
        self.replaced: dict[Holder, Known] = {}  # pods whose name another one has, and of whose end nothing is known
        self.gone: set[str] = set()  # uids of pods that existed and do not any more
        self.unsure: tuple[Holder, ...] = ()  # of which the planner asks whether they exist
        self.client_ids: dict[str, str] = {}  # by which brokers knew those that are gone, by uid
        self.given = GivenOffsets()

    def restart(self) -> None:
        """Forget reports and timers: this operator has become the leader."""
        for known in chain(self.values(), self.replaced.values()):
            known.heard, known.offsets, known.unheard_since, known.cut_off_since = None, None, None, {}
            known.doubt = known.notices = None
        self.given.clear()

    def see(self, pod: Pod, now: float) -> None:
        """Handle an added or changed pod."""
        name, known = pod.metadata.name, self.get(pod.metadata.name)
        if known and pod.metadata.version < known.pod.metadata.version:
            return
        if known and known.pod.metadata.uid != pod.metadata.uid:
            self._replace(known)
            known = None
        if pod.works_for != self._group:
            (self.strangers.add if pod.labelled == self._group else self.strangers.discard)(name)
            return
        if known is None and pod.labelled != self._group and not self._is_assigned(pod):
            return
        if known is None and not (self.has_room or self._is_assigned(pod)):
            self.surplus.add(name)
            return
        self.surplus.discard(name)
        if known is None:
            known = self[name] = Known(pod, now, now, now, on_report=self._take_report)
        known.see(pod, now)

    @property
    def has_room(self) -> bool:
        """Whether the group may have another member."""
        return len(self) < self.limit

    def _take_report(self, before: Report, report: Report, now: float) -> None:
        self.given.take_report(before, report, self.assignment, now)

    def take_page(self, name: str, page: ProgressPage, now: float, *, most: int) -> list[Redelivered]:
        """Take how far a member is with queues that it holds by its report and by the assignment.

        Return what came again with those that it has taken over. `most`: how many queues of the group may be kept.
        """
        known, assignment = self.get(name), self.assignment
        share = assignment.members.get(name) if assignment else None
        if known is None or known.heard is None or assignment is None or share is None:
            return []
        uid, heard = known.pod.metadata.uid, known.heard
        incarnation = heard.report.incarnation
        if share.uid != uid or page.incarnation not in {incarnation, ""}:  # pages of earlier versions do not name it
            return []
        owned = set(share.queues).intersection(page.queues)
        progress = {queue: page.queues[queue] for queue in owned if queue in heard.held}
        rules = Rules(assignment.forced, lambda reader: not self.may_read(reader))
        return self.given.take_page(Reader(name, uid, incarnation), progress, rules, now, most=most)

    def may_read(self, reader: Reader) -> bool:
        """Whether a process may still run: its pod exists, and reports no other process."""
        known = self.replaced.get(reader.holder) or self.get(reader.member)
        if known is None or known.pod.metadata.uid != reader.uid or known.pod.ended or known.restarts.has_stopped:
            return False
        return known.heard is None or known.heard.report.incarnation == reader.incarnation

    def taking_over(self, now: float) -> set[str]:
        """Return the members that own queues of which it is awaited where they began to read."""
        queues = self.given.to_be_taken_over(lambda reader: not self.may_read(reader), now)
        members = self.assignment.members if self.assignment and queues else {}
        return {name for name, share in members.items() if not queues.isdisjoint(share.queues)}

    def _is_assigned(self, pod: Pod) -> bool:
        share = self.assignment.members.get(pod.metadata.name) if self.assignment else None
        return share is not None and share.uid == pod.metadata.uid

    def _replace(self, known: Known) -> None:
        """Handle a pod whose name another one has: it was deleted, by force if it may still run."""
        holder = Holder(known.pod.metadata.name, known.pod.metadata.uid)
        if known.pod.may_run:
            self.replaced[holder] = known
            self.missed.add(holder)
            del self[holder.name]
        else:
            self.lose(known.pod)

    def leave(self, pod: Pod, *, read_later: bool) -> None:
        """Handle a pod that no watch reports any more; `read_later`: somebody will read what became of it."""
        self.strangers.discard(pod.metadata.name)
        self.surplus.discard(pod.metadata.name)
        known = self.get(pod.metadata.name)
        if known is None or known.pod.metadata.uid != pod.metadata.uid:
            return
        known.pod = pod  # its last state
        if pod.stopped:
            self.lose(pod)
        elif not read_later:
            del self[pod.metadata.name]
        else:
            self.missed.add(Holder(pod.metadata.name, pod.metadata.uid))

    @property
    def unseen(self) -> set[Holder]:
        """Pods whose state only a read of the object can tell."""
        strayed = {Holder(name, it.pod.metadata.uid) for name, it in self.items() if it.strayed}
        return self.missed | strayed | set(self.unsure)

    def read(self, holder: Holder, pod: Pod | None, now: float) -> None:
        """Handle the result of reading a pod: the pod of that uid, another one of its name, or none."""
        self.missed.discard(holder)
        if pod and pod.metadata.uid == holder.uid:
            self.see(pod, now)
            return
        self.gone.add(holder.uid)
        known = self.replaced.pop(holder, None) or self.get(holder.name)
        if known and known.pod.metadata.uid == holder.uid:
            self.lose(known.pod)

    def in_doubt(self, holder: Holder) -> Known | None:
        """Return a deleted pod whose process may still run."""
        known = self.replaced.get(holder) or self.get(holder.name)
        right = known is not None and known.pod.metadata.uid == holder.uid and known.pod.may_run
        return known if right else None

    def has_ended(self, holder: Holder) -> bool:
        """Whether a pod has ended; the assignment may still name it, until another member takes its queues."""
        known = self.get(holder.name)
        ended = known is not None and known.pod.metadata.uid == holder.uid and known.pod.ended
        return ended or holder.uid in self.gone

    def lose(self, pod: Pod) -> None:
        """Handle a pod that does not exist any more."""
        name = pod.metadata.name
        self.strangers.discard(name)
        self.gone.add(pod.metadata.uid)
        if pod.status.pod_ip:
            self.client_ids[pod.metadata.uid] = client_id(pod)
        known = self.get(name)
        if known and known.pod.metadata.uid == pod.metadata.uid:
            del self[name]

    def forget_missed(self) -> None:
        """Forget the pods that are to be read: the group is gone."""
        for holder in self.missed:
            known = self.get(holder.name)
            if known and known.pod.metadata.uid == holder.uid:
                del self[holder.name]
        self.missed, self.replaced = set(), {}

    def forget_gone(self, uids: Collection[str]) -> None:
        """Forget deleted pods, except those with these uids."""
        self.gone.intersection_update(uids)
        self.client_ids = {uid: client for uid, client in self.client_ids.items() if uid in self.gone}


def client_id(pod: Pod) -> str:
    """Return the id by which a pod's sidecar is known at the broker."""
    return f"{pod.status.pod_ip}@{name_of(pod.metadata.name, pod.metadata.uid)}"


def name_of(pod: str, uid: str) -> str:
    """Return how that id ends, whatever address the pod has."""
    return f"{pod}#{uid[:8]}"


def _decides_the_same(before: Report | None, report: Report) -> bool:
    """Whether a report differs at most in what no plan depends on: states of queues, what is not committed, notices."""
    if before is None:
        return False
    report = msgspec.structs.replace(report, states=before.states, uncommitted=before.uncommitted)
    if before.consumers_changed != report.consumers_changed:  # which is a revision of its own
        unchanged = before.consumers_changed
        report = msgspec.structs.replace(report, consumers_changed=unchanged, revision=before.revision)
    return report == before
