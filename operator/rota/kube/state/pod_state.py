"""State of a group's pods: status and its duration, and the last reports of their sidecars."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from rota.documents import Assignment
from rota.kube.client.objects import Pod
from rota.model import Holder, Queue, Reason
from rota.planner import DecodedReport
from rota.planner import Pod as Seen
from rota.queue_offsets import ProgressPage
from rota.redelivery import DeliveryTracker, Reader, Redelivered, RedeliveryRules
from rota.reports import Report

MAX_MEMBERS = 10_000  # of a group; a pod takes about 10 KiB of memory
FORGIVEN_SECONDS = 600.0  # older restarts are not counted


@dataclass(slots=True)
class Restarts:
    """Restarts of one pod's sidecar process; times are the event loop's, unless the node's clock is named."""

    heard_since: float = 0.0  # since when the current process responds
    stopped_since: float | None = None  # since when that process is known to have ended
    last_end: float = 0.0  # when a process last ended, by the node's clock
    earlier_end: float = 0.0  # `last_end` as known when the current process last responded
    _times: list[float] = field(default_factory=list)

    def hear(self, previous: Report | None, report: Report, now: float) -> None:
        """Record a report and the one before it.

        The process responds, so an end that is known already belongs to an earlier one, even if its clock is behind.
        """
        self.earlier_end, self.stopped_since = self.last_end, None
        if is_later_process(previous, report):
            self._times.append(now)
            self.heard_since = now

    def see(self, report: Report | None, process_ended: float, now: float) -> None:
        """Record when a process last ended; like the start in the report, this time is by the node's clock."""
        self.last_end = process_ended
        is_earlier = process_ended <= self.earlier_end
        if is_earlier or not (report and 0 < report.started < process_ended):
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now

    @property
    def has_stopped(self) -> bool:
        """Whether the process that sent the last report is known to have ended."""
        return self.stopped_since is not None

    def count(self, now: float) -> int:
        """Return the number of restarts within the last ten minutes."""
        self._times = [at for at in self._times if now - at < FORGIVEN_SECONDS]
        return len(self._times)


def is_later_process(previous: Report | None, report: Report) -> bool:
    """Whether `report` is of a later process; False for earlier sidecar versions, which send no process number."""
    return previous is not None and 0 < previous.process < report.process


@dataclass(slots=True)
class PodState:
    """State of one pod, and since when each part of it holds."""

    pod: Pod
    first_seen: float
    ready_changed: float
    poke_changed: float
    leaving_since: float | None = None
    heard: DecodedReport | None = None
    offsets: Mapping[Queue, int | None] | None = None  # of a Broadcasting group's member; None: no response
    unheard_since: float | None = None
    notices: int | None = None  # its brokers' notices of joined and left consumers that were acted on
    doubted_since: float | None = None  # since when its responses are ignored
    doubt: Reason | None = None  # why its last response was ignored; the previous report is kept
    unproved_since: float | None = None  # of a force-deleted pod: since when no authenticated response came
    cut_off_since: dict[str, float] = field(default_factory=dict)
    strayed: bool = False  # it lost the group's label: it consumes until revoked, but counts no more
    restarts: Restarts = field(default_factory=Restarts)
    lingers: bool = False  # it was force-deleted: its object is gone, but its sidecar responds
    next_page: int = 0  # index of the queue from which its progress is read next
    on_report: Callable[[Report, Report, float], None] = lambda *_: None  # on each change: previous report, report, now
    has_key: bool = field(init=False)  # whether its sidecar mounts the group's key; a pod's mounts never change

    def __post_init__(self) -> None:
        """Look at the mounts once: each plan reads `has_key` of every pod."""
        self.has_key = self.pod.has_key

    def see(self, pod: Pod, now: float) -> None:
        """Record a newer version of the same pod."""
        if pod.ready != self.pod.ready:
            self.ready_changed = now
        if pod.poke != self.pod.poke:
            self.poke_changed = now
        if pod.terminating and self.leaving_since is None:
            self.leaving_since = now
        self.pod, self.strayed = pod, pod.labelled != pod.works_for
        self.restarts.see(self.heard.report if self.heard else None, self.pod.status.process_ended, now)

    def hear(self, report: Report | None, now: float, requested_at: float, doubt: Reason | None = None) -> bool:
        """Record a report (None: no response since the request); return whether it may change the plan.

        A response that is ignored because of `doubt` releases no queues, but it does not count as silence either.
        """
        was_doubted, self.doubt = self.doubt, doubt
        if doubt:
            self.doubted_since = self.doubted_since or requested_at
            is_news, self.unheard_since = doubt is not was_doubted or self.unheard_since is not None, None
            return is_news
        if report is None:
            is_news, self.unheard_since = self.unheard_since is None, self.unheard_since or requested_at
            return is_news
        previous = self.heard.report if self.heard else None
        if previous and is_later_process(report, previous):
            return False  # a late response of a process that has ended
        was_silent = self.unheard_since is not None or was_doubted is not None or self.restarts.has_stopped
        self.restarts.hear(previous, report, now)
        self.doubted_since = None
        is_news = was_silent or not _is_equivalent(previous, report)
        self.unheard_since = None
        if self.notices is None:
            self.notices = report.consumers_changed
        if previous != report:
            self.heard = DecodedReport(report)
            if previous is not None:
                self.on_report(previous, report, now)
        if is_news:
            cut_off = [broker for broker, reachable in report.brokers.items() if not reachable]
            self.cut_off_since = {broker: self.cut_off_since.get(broker, now) for broker in cut_off}
        return is_news

    def take_notice(self) -> bool:
        """Return whether its brokers have sent notices of joined or left consumers since the last call."""
        previous, current = self.notices, self.heard.report.consumers_changed if self.heard else None
        self.notices = current
        return previous is not None and current is not None and previous != current

    def observe_force_deleted(
        self, report: Report | None, now: float, requested_at: float, doubt: Reason | None = None
    ) -> None:
        """Record the report of a force-deleted pod that still responds; for the planner the pod is terminating."""
        self.lingers, self.leaving_since = True, self.leaving_since or now
        self.hear(report, now, requested_at, doubt)

    @property
    def counts(self) -> bool:
        """Whether a scale-down may still end it: it has the label, and is neither deleted nor ended."""
        return not (self.strayed or self.lingers or self.pod.terminating or self.pod.ended)

    @property
    def can_report_notices(self) -> bool:
        """Whether the member is Ready, responds, and reports its brokers' notices of joined and left consumers."""
        if self.heard is None or self.unheard_since is not None or self.doubt is not None:
            return False
        return self.counts and self.pod.ready and self.heard.report.consumers_changed is not None

    @property
    def reaches(self) -> frozenset[str]:
        """The brokers that it reports as reachable; none while it is not Ready or does not respond."""
        sure = self.counts and self.pod.ready and self.heard and self.unheard_since is None
        brokers = self.heard.report.brokers if sure and self.heard else {}
        return frozenset(broker for broker, reachable in brokers.items() if reachable)

    def shown(self, now: float, room: str | None, reached: Mapping[str, float]) -> Seen:
        """Return it as input of the planner; `reached`: since when at least one member reaches each broker."""
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
            cut_off={
                broker: now - max(since, reached.get(broker, now)) for broker, since in self.cut_off_since.items()
            },
            poke=pod.poke,
            poked=now - self.poke_changed,
        )


class GroupPods(dict[str, PodState]):
    """The pods of one group by name, and the state of pods that have left the watch."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group, self.limit = group, MAX_MEMBERS
        self.assignment: Assignment | None = None  # its members are kept without the label and above the limit
        self.strangers: set[str] = set()  # names of pods with the label and without a sidecar of the group
        self.surplus: set[str] = set()  # names of pods above the limit: they are not polled and get no queues
        self.missed: set[Holder] = set()  # left the watch: deleted, or without the label; must be read
        self.replaced: dict[Holder, PodState] = {}  # deleted pods that may still run, though a new pod has the name
        self.gone: set[str] = set()  # uids of deleted pods
        self.unsure: tuple[Holder, ...] = ()  # the planner asks whether these pods exist
        self.client_ids: dict[str, str] = {}  # client ids of deleted pods, by uid
        self.given = DeliveryTracker()

    def restart(self) -> None:
        """Forget reports and their timers: leadership has changed, or the ConsumerGroup was recreated."""
        for state in chain(self.values(), self.replaced.values()):
            state.heard, state.offsets, state.unheard_since, state.cut_off_since = None, None, None, {}
            state.doubt = state.notices = None
        self.given.clear()

    def see(self, pod: Pod, now: float) -> None:
        """Handle an added or changed pod."""
        name, state = pod.metadata.name, self.get(pod.metadata.name)
        if state and pod.metadata.version < state.pod.metadata.version:
            return
        if state and state.pod.metadata.uid != pod.metadata.uid:
            self._replace(state)
            state = None
        if pod.works_for != self._group:
            (self.strangers.add if pod.labelled == self._group else self.strangers.discard)(name)
            return
        if state is None and pod.labelled != self._group and not self._is_assigned(pod):
            return
        if state is None and not (self.has_room or self._is_assigned(pod)):
            self.surplus.add(name)
            return
        self.surplus.discard(name)
        if state is None:
            state = self[name] = PodState(pod, now, now, now, on_report=self._take_report)
        state.see(pod, now)

    @property
    def has_room(self) -> bool:
        """Whether the group may have another member."""
        return len(self) < self.limit

    def _take_report(self, previous: Report, report: Report, now: float) -> None:
        self.given.take_report(previous, report, self.assignment, now)

    def take_page(self, name: str, page: ProgressPage, now: float, *, most: int) -> list[Redelivered]:
        """Record a member's progress with queues that both its report and the assignment give it.

        Return the redeliveries of queues that it has taken over. `most`: limit of the group's queues to remember.
        """
        state, assignment = self.get(name), self.assignment
        share = assignment.members.get(name) if assignment else None
        if state is None or state.heard is None or assignment is None or share is None:
            return []
        uid, heard = state.pod.metadata.uid, state.heard
        incarnation = heard.report.incarnation
        if share.uid != uid or page.incarnation not in {incarnation, ""}:  # earlier versions send none
            return []
        owned = set(share.queues).intersection(page.queues)
        progress = {queue: page.queues[queue] for queue in owned if queue in heard.held}
        rules = RedeliveryRules(assignment.forced, lambda reader: not self.may_read(reader))
        return self.given.take_page(Reader(name, uid, incarnation), progress, rules, now, most=most)

    def may_read(self, reader: Reader) -> bool:
        """Whether a reader's process may still run: its pod exists and has reported no other process."""
        state = self.replaced.get(reader.holder) or self.get(reader.member)
        if state is None or state.pod.metadata.uid != reader.uid or state.pod.ended or state.restarts.has_stopped:
            return False
        return state.heard is None or state.heard.report.incarnation == reader.incarnation

    def taking_over(self, now: float) -> set[str]:
        """Return the members that took over queues and have not reported their start offsets yet."""
        queues = self.given.to_be_taken_over(lambda reader: not self.may_read(reader), now)
        members = self.assignment.members if self.assignment and queues else {}
        return {name for name, share in members.items() if not queues.isdisjoint(share.queues)}

    def _is_assigned(self, pod: Pod) -> bool:
        share = self.assignment.members.get(pod.metadata.name) if self.assignment else None
        return share is not None and share.uid == pod.metadata.uid

    def _replace(self, state: PodState) -> None:
        """Handle a pod that a new pod of its name has replaced: it was deleted, by force if it may still run."""
        holder = Holder(state.pod.metadata.name, state.pod.metadata.uid)
        if state.pod.may_run:
            self.replaced[holder] = state
            self.missed.add(holder)
            del self[holder.name]
        else:
            self.lose(state.pod)

    def leave(self, pod: Pod, *, read_later: bool) -> None:
        """Handle a pod that left the watch; `read_later`: a reconcile will read whether it still exists."""
        self.strangers.discard(pod.metadata.name)
        self.surplus.discard(pod.metadata.name)
        state = self.get(pod.metadata.name)
        if state is None or state.pod.metadata.uid != pod.metadata.uid:
            return
        state.pod = pod  # its last state
        if pod.stopped:
            self.lose(pod)
        elif not read_later:
            del self[pod.metadata.name]
        else:
            self.missed.add(Holder(pod.metadata.name, pod.metadata.uid))

    @property
    def unseen(self) -> set[Holder]:
        """Pods that no watch reports, so that each must be read."""
        strayed = {Holder(name, state.pod.metadata.uid) for name, state in self.items() if state.strayed}
        return self.missed | strayed | set(self.unsure)

    def read(self, holder: Holder, pod: Pod | None, now: float) -> None:
        """Handle the result of reading a pod: the pod with that uid, another pod of its name, or None."""
        self.missed.discard(holder)
        if pod and pod.metadata.uid == holder.uid:
            self.see(pod, now)
            return
        self.gone.add(holder.uid)
        state = self.replaced.pop(holder, None) or self.get(holder.name)
        if state and state.pod.metadata.uid == holder.uid:
            self.lose(state.pod)

    def in_doubt(self, holder: Holder) -> PodState | None:
        """Return the state of a deleted pod whose sidecar may still run; else None."""
        state = self.replaced.get(holder) or self.get(holder.name)
        may_run = state is not None and state.pod.metadata.uid == holder.uid and state.pod.may_run
        return state if may_run else None

    def has_ended(self, holder: Holder) -> bool:
        """Whether a pod has ended; the assignment may still name it, until another member takes its queues."""
        state = self.get(holder.name)
        ended = state is not None and state.pod.metadata.uid == holder.uid and state.pod.ended
        return ended or holder.uid in self.gone

    def lose(self, pod: Pod) -> None:
        """Handle a pod that does not exist any more."""
        name = pod.metadata.name
        self.strangers.discard(name)
        self.gone.add(pod.metadata.uid)
        if pod.status.pod_ip:
            self.client_ids[pod.metadata.uid] = client_id(pod)
        state = self.get(name)
        if state and state.pod.metadata.uid == pod.metadata.uid:
            del self[name]

    def forget_missed(self) -> None:
        """Forget the pods that must be read: the ConsumerGroup was deleted or recreated."""
        for holder in self.missed:
            state = self.get(holder.name)
            if state and state.pod.metadata.uid == holder.uid:
                del self[holder.name]
        self.missed, self.replaced = set(), {}

    def forget_gone(self, uids: Collection[str]) -> None:
        """Forget deleted pods, except those with these uids."""
        self.gone.intersection_update(uids)
        self.client_ids = {uid: client for uid, client in self.client_ids.items() if uid in self.gone}


def client_id(pod: Pod) -> str:
    """Return the client id of a pod's sidecar at the brokers."""
    return f"{pod.status.pod_ip}@{name_of(pod.metadata.name, pod.metadata.uid)}"


def name_of(pod: str, uid: str) -> str:
    """Return the suffix of the client id, which does not depend on the pod's address."""
    return f"{pod}#{uid[:8]}"


def _is_equivalent(previous: Report | None, report: Report) -> bool:
    """Whether two reports lead to the same plan: they differ at most in queue states, uncommitted offsets, notices."""
    if previous is None:
        return False
    report = msgspec.structs.replace(report, states=previous.states, uncommitted=previous.uncommitted)
    if previous.consumers_changed != report.consumers_changed:  # a notice alone raises the revision, too
        unchanged = previous.consumers_changed
        report = msgspec.structs.replace(report, consumers_changed=unchanged, revision=previous.revision)
    return report == previous
