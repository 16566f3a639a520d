"""State of a group's pods: status and its duration, and the last reports of their sidecars."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain

from rota import planner
from rota.documents import Assignment
from rota.kube.client.objects import Pod
from rota.model import Holder, Queue, Reason
from rota.queue_offsets import ProgressPage
from rota.redelivery import DeliveryTracker, ReaderProcess, Redelivery, RedeliveryRules
from rota.reports import Report, is_later_process, is_outdated, leads_to_same_plan

MAX_MEMBERS = 10_000  # of a group; a pod takes about 10 KiB of memory
RESTART_WINDOW_SECONDS = 600.0  # older restarts are not counted


@dataclass(slots=True)
class Restarts:
    """Restarts of one pod's sidecar process; times are the event loop's, unless the node's clock is named."""

    responding_since: float = 0.0  # since when the current process responds
    stopped_since: float | None = None  # since when that process is known to have ended
    last_end: float = 0.0  # when a process last ended, by the node's clock
    end_before_report: float = 0.0  # `last_end` at the last report: the end of a process before the reporting one
    _restart_times: list[float] = field(default_factory=list)

    def record_report(self, previous: Report | None, report: Report, now: float) -> None:
        """Record a report: its process runs, so any end that is known by now is that of an earlier process."""
        self.end_before_report = self.last_end
        self.stopped_since = None
        if is_later_process(previous, report):
            self._restart_times.append(now)
            self.responding_since = now

    def record_end(self, report: Report | None, process_ended_at: float, now: float) -> None:
        """Record when a process of the pod last ended, by the node's clock: the reporting one, or an earlier one."""
        self.last_end = process_ended_at
        is_new = process_ended_at > self.end_before_report  # otherwise it was known when the process reported
        has_reporter_ended = is_new and report is not None and 0 < report.started < process_ended_at  # 0: unknown
        if not has_reporter_ended:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now

    @property
    def has_stopped(self) -> bool:
        """Whether the process that sent the last report is known to have ended."""
        return self.stopped_since is not None

    def count_recent(self, now: float) -> int:
        """Return the number of restarts within the last ten minutes."""
        self._restart_times = [at for at in self._restart_times if now - at < RESTART_WINDOW_SECONDS]
        return len(self._restart_times)


@dataclass(slots=True)
class PodState:
    """State of one pod, and since when each part of it holds, on the event loop's clock."""

    pod: Pod
    first_seen: float
    ready_changed_at: float
    poke_changed_at: float
    terminating_since: float | None = None
    decoded_report: planner.DecodedReport | None = None
    offsets: Mapping[Queue, int | None] | None = None  # of a Broadcasting group's member; None: no response
    unreachable_since: float | None = None  # since when its report cannot be fetched (it is silent)
    handled_notices: int | None = None  # `consumers_changed` of the last handled report: a count; None: not reported
    ignored_since: float | None = None  # since when its responses are ignored, such as unsigned ones
    ignored_reason: Reason | None = None  # why its last response was ignored; the previous report is kept
    unauthenticated_since: float | None = None  # of a force-deleted pod: since when no authenticated response came
    cut_off_since: dict[str, float] = field(default_factory=dict)  # by broker that it reports as unreachable
    lost_label: bool = False  # it has lost the group's label: it consumes until revoked, but is no member any more
    restarts: Restarts = field(default_factory=Restarts)
    is_force_deleted: bool = False  # it was force-deleted: its object is gone, but its sidecar responds
    next_progress_start: int = 0  # index of the first queue of the progress page that is read next
    on_report: Callable[[Report, Report, float], None] = lambda *_: None  # on each change: previous report, report, now
    has_key: bool = field(init=False)  # whether its sidecar mounts the group's key; a pod's mounts never change

    def __post_init__(self) -> None:
        """Cache `has_key`: each plan reads it of every pod."""
        self.has_key = self.pod.has_key

    def update_pod(self, pod: Pod, now: float) -> None:
        """Record a newer version of the same pod."""
        if pod.ready != self.pod.ready:
            self.ready_changed_at = now
        if pod.poke != self.pod.poke:
            self.poke_changed_at = now
        if pod.terminating and self.terminating_since is None:
            self.terminating_since = now
        self.pod = pod
        self.lost_label = pod.labelled_group != pod.mounted_group
        report = self.decoded_report.report if self.decoded_report else None
        self.restarts.record_end(report, pod.status.process_ended_at, now)

    def record_report(
        self, report: Report | None, now: float, silent_since: float, ignored_reason: Reason | None = None
    ) -> bool:
        """Record a report (None: silence since `silent_since`); return whether that may change the plan.

        A response with an `ignored_reason` releases no queues, but it does not count as silence either.
        """
        previous_ignored_reason = self.ignored_reason
        self.ignored_reason = ignored_reason
        if ignored_reason:
            self.ignored_since = self.ignored_since or silent_since
            may_change_plan = ignored_reason is not previous_ignored_reason or self.unreachable_since is not None
            self.unreachable_since = None
            return may_change_plan
        if report is None:
            was_reachable = self.unreachable_since is None
            self.unreachable_since = self.unreachable_since or silent_since
            return was_reachable
        previous = self.decoded_report.report if self.decoded_report else None
        if previous and is_outdated(report, previous):
            return False  # a late response
        # The first report after silence, an ignored response or the end of a process. The lines below reset all three.
        resumes = self.unreachable_since is not None or previous_ignored_reason is not None or self.restarts.has_stopped
        may_change_plan = resumes or not leads_to_same_plan(previous, report)
        self.restarts.record_report(previous, report, now)
        self.ignored_since = self.unreachable_since = None
        if self.handled_notices is None:
            self.handled_notices = report.consumers_changed
        if previous != report:
            self.decoded_report = planner.DecodedReport(report)
            if previous is not None:
                self.on_report(previous, report, now)
        if may_change_plan:  # otherwise the report names the same brokers as before
            cut_off = [broker for broker, reachable in report.brokers.items() if not reachable]
            self.cut_off_since = {broker: self.cut_off_since.get(broker, now) for broker in cut_off}
        return may_change_plan

    def take_new_notices(self) -> bool:
        """Return whether its brokers have sent notices of joined or left consumers since the last call."""
        previous = self.handled_notices
        current = self.decoded_report.report.consumers_changed if self.decoded_report else None
        self.handled_notices = current
        return previous is not None and current is not None and previous != current

    def observe_force_deleted(
        self, report: Report | None, now: float, silent_since: float, ignored_reason: Reason | None = None
    ) -> None:
        """Record the report of a force-deleted pod that still responds; for the planner the pod is terminating."""
        self.is_force_deleted = True
        self.terminating_since = self.terminating_since or now
        self.record_report(report, now, silent_since, ignored_reason)

    @property
    def is_staying(self) -> bool:
        """Whether it has the label, and is neither terminating, deleted nor ended."""
        return not (self.lost_label or self.is_force_deleted or self.pod.terminating or self.pod.ended)

    @property
    def can_report_notices(self) -> bool:
        """Whether the member is Ready, responds, and reports its brokers' notices of joined and left consumers."""
        if self.decoded_report is None or self.unreachable_since is not None or self.ignored_reason is not None:
            return False
        return self.is_staying and self.pod.ready and self.decoded_report.report.consumers_changed is not None

    @property
    def reachable_brokers(self) -> frozenset[str]:
        """The brokers that it reports as reachable; none while it is not Ready or does not respond."""
        is_working = self.is_staying and self.pod.ready and self.unreachable_since is None
        brokers = self.decoded_report.report.brokers if is_working and self.decoded_report else {}
        return frozenset(broker for broker, is_reachable in brokers.items() if is_reachable)

    def to_planner_pod(self, now: float, room: str | None, reached_since: Mapping[str, float]) -> planner.PodSnapshot:
        """Return the planner's view of it; `reached_since`: since when at least one member reaches each broker."""
        pod = self.pod
        # 0 seconds if no member reaches the broker: the broker is down, rather than the members cut off.
        cut_off_for = {name: now - max(at, reached_since.get(name, now)) for name, at in self.cut_off_since.items()}
        return planner.PodSnapshot(
            name=pod.metadata.name,
            uid=pod.metadata.uid,
            started=pod.started,
            ready=pod.ready and not self.lost_label,
            stable_for=math.inf if self.lost_label else now - self.ready_changed_at,  # without label: no grace period
            age=now - self.first_seen,
            terminating=pod.terminating or self.is_force_deleted,
            terminating_for=0.0 if self.terminating_since is None else now - self.terminating_since,
            ended=pod.ended,
            stopped_for=None if self.restarts.stopped_since is None else now - self.restarts.stopped_since,
            restarts=self.restarts.count_recent(now),
            serving_for=now - max(self.ready_changed_at, self.restarts.responding_since) if pod.ready else 0.0,
            obstacle=pod.start_obstacle,
            room=room,
            client_id=client_id(pod),
            decoded_report=self.decoded_report,
            unreachable_for=0.0 if self.unreachable_since is None else now - self.unreachable_since,
            rejected_for=0.0 if self.ignored_since is None else now - self.ignored_since,
            cut_off_brokers=cut_off_for,
            poke=pod.poke,
            poked_for=now - self.poke_changed_at,
        )


class GroupPods(dict[str, PodState]):
    """The pods of one group by name, and the state of pods that have left the watch.

    A pod that leaves the watch stays in this dict, and its holder is in `missing`, until a reconcile has read from the
    API server whether it still exists (`apply_read`). If a new pod takes its name first, the state moves to `replaced`.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group
        self.max_members = MAX_MEMBERS
        self.assignment: Assignment | None = None  # its members are kept without the label and above the limit
        self.without_sidecar: set[str] = set()  # names of pods with the label and without a sidecar of the group
        self.surplus: set[str] = set()  # names of pods above the limit: they are not polled and get no queues
        self.missing: set[Holder] = set()  # left the watch: deleted, or without the label; must be read
        self.replaced: dict[Holder, PodState] = {}  # deleted pods that may still run, though a new pod has the name
        self.deleted_uids: set[str] = set()
        self.verify_ended: tuple[Holder, ...] = ()  # owners in the last plan that are not among the pods: to be read
        self.deleted_client_ids: dict[str, str] = {}  # client ids of deleted pods, by uid
        self.delivery_tracker = DeliveryTracker()

    def reset_reports(self) -> None:
        """Forget reports and their timers: leadership has changed, or the ConsumerGroup was recreated."""
        for state in chain(self.values(), self.replaced.values()):
            state.decoded_report = state.offsets = None
            state.unreachable_since = state.ignored_since = state.unauthenticated_since = None
            state.ignored_reason = state.handled_notices = None
            state.cut_off_since = {}
        self.delivery_tracker.clear()

    def upsert(self, pod: Pod, now: float) -> None:
        """Handle an added or changed pod."""
        name = pod.metadata.name
        state = self.get(name)
        if state and pod.metadata.version_number < state.pod.metadata.version_number:
            return
        if state and state.pod.metadata.uid != pod.metadata.uid:
            self._mark_replaced(state)
            state = None
        has_label = pod.labelled_group == self._group
        if pod.mounted_group != self._group:
            self.without_sidecar.discard(name)
            if has_label:
                self.without_sidecar.add(name)
            return
        is_kept = state is not None or self._is_assigned(pod)  # even without the label or above the limit
        if not is_kept and not has_label:
            return
        if not is_kept and not self.has_capacity:
            self.surplus.add(name)
            return
        self.surplus.discard(name)
        if state is None:
            state = self[name] = PodState(pod, now, now, now, on_report=self._track_report)
        state.update_pod(pod, now)

    @property
    def holders(self) -> set[Holder]:
        """The names and uids of the watched and missing pods."""
        return {state.pod.holder for state in self.values()}

    @property
    def has_capacity(self) -> bool:
        """Whether the group may have another member."""
        return len(self) < self.max_members

    def find(self, holder: Holder) -> PodState | None:
        """Return the state of exactly this pod, not of another one of its name."""
        state = self.get(holder.name)
        return state if state and state.pod.metadata.uid == holder.uid else None

    def _track_report(self, previous: Report, report: Report, now: float) -> None:
        self.delivery_tracker.record_report(previous, report, self.assignment, now)

    def record_progress(self, name: str, page: ProgressPage, now: float, *, max_queues: int) -> list[Redelivery]:
        """Record a page of a member's offsets, for the queues that both its report and the assignment give it.

        Return the redeliveries of queues that it has taken over; at most `max_queues` are remembered.
        """
        state = self.get(name)
        decoded_report = state.decoded_report if state else None
        share = self.assignment.members.get(name) if self.assignment else None
        if state is None or decoded_report is None or self.assignment is None or share is None:
            return []
        incarnation = decoded_report.report.incarnation
        is_of_other_process = page.incarnation not in {incarnation, ""}  # earlier versions send none
        if share.uid != state.pod.metadata.uid or is_of_other_process:
            return []
        owned = set(share.queues).intersection(page.queues)
        progress = {queue: page.queues[queue] for queue in owned if queue in decoded_report.held_queues}
        rules = RedeliveryRules(self.assignment.forced, self.has_stopped_reading)
        reader = ReaderProcess(name, share.uid, incarnation)
        return self.delivery_tracker.record_page(reader, progress, rules, now, max_queues=max_queues)

    def has_stopped_reading(self, reader: ReaderProcess) -> bool:
        """Whether a reader's process has ended: its pod is gone, has ended, or has reported another process."""
        state = self.replaced.get(reader.holder) or self.find(reader.holder)
        if state is None or state.pod.ended or state.restarts.has_stopped:
            return True
        return state.decoded_report is not None and state.decoded_report.report.incarnation != reader.incarnation

    def members_taking_over(self, now: float) -> set[str]:
        """Return the members with queues from another process whose start offsets are not recorded yet."""
        queues = self.delivery_tracker.queues_awaiting_reader(self.has_stopped_reading, now)
        members = self.assignment.members if self.assignment and queues else {}
        return {name for name, share in members.items() if not queues.isdisjoint(share.queues)}

    def _is_assigned(self, pod: Pod) -> bool:
        return self.assignment is not None and self.assignment.share_of(pod.holder) is not None

    def _mark_replaced(self, state: PodState) -> None:
        """Handle a pod that a new pod of its name has replaced: it was deleted, by force if it may still run."""
        holder = state.pod.holder
        if state.pod.may_run:
            self.replaced[holder] = state
            self.missing.add(holder)
            del self[holder.name]
        else:
            self.mark_deleted(state.pod)

    def mark_missing(self, pod: Pod, *, read_later: bool) -> None:
        """Handle a pod that left the watch; `read_later`: a reconcile will read it, to see whether it exists."""
        holder = pod.holder
        self.without_sidecar.discard(holder.name)
        self.surplus.discard(holder.name)
        state = self.find(holder)
        if state is None:
            return
        state.pod = pod  # as it was at the end
        if pod.stopped:
            self.mark_deleted(pod)
        elif not read_later:
            del self[holder.name]
        else:
            self.missing.add(holder)

    @property
    def unwatched(self) -> set[Holder]:
        """Pods that must each be read: missing in the watch, without the group's label, or unwatched owners."""
        unlabelled = {state.pod.holder for state in self.values() if state.lost_label}
        return self.missing | unlabelled | set(self.verify_ended)

    def apply_read(self, holder: Holder, pod: Pod | None, now: float) -> None:
        """Handle the result of reading a pod: the pod with that uid, another pod of its name, or None."""
        self.missing.discard(holder)
        if pod and pod.metadata.uid == holder.uid:
            self.upsert(pod, now)
            return
        self.deleted_uids.add(holder.uid)
        if state := self.replaced.pop(holder, None) or self.find(holder):
            self.mark_deleted(state.pod)

    def find_possibly_running(self, holder: Holder) -> PodState | None:
        """Return the state of a deleted pod whose sidecar may still run; else None."""
        state = self.replaced.get(holder) or self.find(holder)
        return state if state and state.pod.may_run else None

    def has_ended(self, holder: Holder) -> bool:
        """Whether a pod has ended; the assignment may still name it, until another member takes its queues."""
        state = self.find(holder)
        return holder.uid in self.deleted_uids or (state is not None and state.pod.ended)

    def mark_deleted(self, pod: Pod) -> None:
        """Handle a pod that does not exist any more."""
        holder = pod.holder
        self.without_sidecar.discard(holder.name)
        self.deleted_uids.add(holder.uid)
        if pod.status.pod_ip:
            self.deleted_client_ids[holder.uid] = client_id(pod)
        if self.find(holder):
            del self[holder.name]

    def forget_missing(self) -> None:
        """Forget the pods that must be read: the ConsumerGroup was deleted or recreated."""
        for holder in self.missing:
            if self.find(holder):
                del self[holder.name]
        self.missing = set()
        self.replaced = {}

    def forget_deleted(self, kept_uids: Collection[str]) -> None:
        """Forget deleted pods, except those with these uids."""
        self.deleted_uids.intersection_update(kept_uids)
        self.deleted_client_ids = {uid: id_ for uid, id_ in self.deleted_client_ids.items() if uid in self.deleted_uids}


def client_id(pod: Pod) -> str:
    """Return the client id of a pod's sidecar at the brokers."""
    return f"{pod.status.pod_ip}@{client_id_suffix(pod.metadata.name, pod.metadata.uid)}"


def client_id_suffix(pod: str, uid: str) -> str:
    """Return the suffix of the client id, which does not depend on the pod's address."""
    return f"{pod}#{uid[:8]}"
