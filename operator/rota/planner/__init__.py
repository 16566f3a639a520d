"""Planner of a group: `plan(snapshot, now)` returns everything to write, in one pass, without I/O or clock.

It keeps no state between calls. The stored assignment records the owner of each queue, and every plan continues from
it. So it does not matter which replica calls the planner, how often, or which changes it missed in between.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from rota.documents import Assignment, AssignmentTooLargeError, Share, encode_assignment
from rota.handover import Act, ready_member_lost_after
from rota.model import Finding, Holder, Poke, Queue, Reason
from rota.planner import budget, pokes, record
from rota.planner.explain import Explanation, explain_queues
from rota.planner.members import incarnations
from rota.planner.members.member_states import MemberState, classify_members, owns_queues
from rota.planner.moves import Draft, decide, next_document, unmanaged_queues
from rota.planner.situation import UNKNOWN_POLICY, Situation
from rota.planner.snapshot import DecodedReport, Event, Plan, PodSnapshot, QueueView, Snapshot, brokers_reached_by
from rota.planner.status import conditions, events, group_status, problems
from rota.planner.status.journal_records import condition_records, document_records, owners_record
from rota.planner.subscribed_queues import SHRINK_PATIENCE_SECONDS
from rota.planner.target import StrategyInputs, compute_owners, share_with_unmanaged
from rota.reports import Report
from rota.spec.resolved import settings_digest

__all__ = [
    "DecodedReport",
    "Event",
    "Plan",
    "PodSnapshot",
    "QueueView",
    "Snapshot",
    "StrategyInputs",
    "compute_owners",
    "explain_owners",
    "owners_record",
    "plan",
    "share_with_unmanaged",
]


URGENT_ACTS = (Act.REVOKE, Act.RETURN, Act.GRANT, Act.FORCE)  # dropping a queue that no member consumes can wait
_BLOCKING_REASONS = {Reason.UNSUPPORTED_ASSIGNMENT, Reason.TOO_MANY_MEMBERS}
_ALWAYS_UPDATED_FIELDS = ("observedGeneration", "conditions", "lag")


def explain_owners(snapshot: Snapshot, now: float, queues: Sequence[Queue] = ()) -> list[Explanation]:
    """Explain the owners of these queues; without queues, explain one queue of each member."""
    return explain_queues(_derive_situation(snapshot, now), queues)


def plan(snapshot: Snapshot, now: float) -> Plan:
    """Return the plan for a group; `now` is the wall-clock time in seconds.

    No assignment is written while the spec is invalid or a problem blocks writing. Nor is the first assignment of a
    ConsumerGroup that duplicates another one. A missing or damaged assignment is read a second time before it is
    created or rebuilt.
    """
    damaged = record.find_damage(snapshot)
    is_blocked = not _BLOCKING_REASONS.isdisjoint(snapshot.problem_reasons)
    is_new_duplicate = snapshot.document is None and snapshot.is_duplicate and not damaged
    if snapshot.spec is None or is_blocked or is_new_duplicate:
        return _report_only_plan(_derive_situation(snapshot, now))
    if (damaged or snapshot.document is None) and not snapshot.refetched:
        return Plan(refetch=True, status=snapshot.status, requeue_after=1.0)
    if damaged:
        return _recovery_plan(snapshot, damaged, now)
    situation = _derive_situation(snapshot, now)
    if snapshot.spec.message_model == "Broadcasting":
        return _broadcasting_plan(situation)
    if situation.document.is_broadcasting:  # the spec has changed from Broadcasting to Clustering
        return _build_plan(situation, Draft(), _clustering_document(situation))
    draft = decide(situation)
    document = next_document(situation, draft) if _needs_write(situation, draft) else None
    return _build_plan(situation, draft, document)


def _derive_situation(snapshot: Snapshot, now: float) -> Situation:
    """Derive the facts of a snapshot; a group without a readable assignment is planned from generation 0."""
    document = snapshot.document or Assignment(group=snapshot.group, generation=0, issued_at="")
    policy = snapshot.policy or UNKNOWN_POLICY
    is_orderly = snapshot.spec is not None and snapshot.spec.is_orderly
    member_states = classify_members(snapshot.pods, snapshot.deleted_uids, policy, document, is_orderly=is_orderly)
    return Situation(snapshot, member_states, document, now)


def _report_only_plan(situation: Situation) -> Plan:
    """Return a plan that writes no assignment; of the status, only conditions, lag and observedGeneration change."""
    reduced = _build_plan(situation, Draft(), document=None, is_complete=False)
    status = situation.snapshot.status
    kept_fields = {name: value for name, value in status.items() if name not in _ALWAYS_UPDATED_FIELDS}
    return replace(reduced, status={**reduced.status, **kept_fields})


def _recovery_plan(snapshot: Snapshot, damage: str, now: float) -> Plan:
    """Return the plan that replaces a missing or damaged assignment; a `plan` record and an Event name the loss."""
    situation = _derive_situation(snapshot, now)
    document = record.rebuild_assignment(snapshot, now)
    if snapshot.spec and snapshot.spec.message_model == "Broadcasting":  # it has no handovers: no barrier is needed
        members = {name: Share(share.uid) for name, share in document.members.items()}
        everyone = tuple(sorted({*record.owners_of(document), *situation.queues}))
        document = replace(document, strategy="", members=members, everyone=everyone, barrier=0, incarnations_since=0)
    recovery = _build_plan(situation, Draft(), document)
    finding = Finding(Reason.ASSIGNMENT_LOST, f"{damage}; it was rebuilt from the members' reports")
    journal = []
    for line in recovery.journal_records:
        cause = {"reason": finding.reason, "message": finding.message} if line["kind"] == "plan" else {}
        journal.append({**line, **cause})
    return replace(
        recovery,
        events=(*recovery.events, Event(*finding, warning=True)),
        journal_records=tuple(journal),
        requeue_after=0.0 if recovery.document else recovery.requeue_after,  # at once, from the rebuilt assignment
    )


def _needs_write(situation: Situation, draft: Draft) -> bool:
    """Whether to write a document now: queues change hands, or an informational change has waited long enough.

    An *informational change* gives no queue to a member and takes none from it: it drops a queue that no member
    consumes, or updates other fields. It waits until the last document is as old as the policy's debounce time.
    """
    if draft.with_acts(*URGENT_ACTS) or situation.snapshot.document is None:
        return True
    has_dropped_queue = bool(draft.with_acts(Act.DROP))
    is_outdated = _has_outdated_next_owner(situation, draft) or _has_outdated_fields(situation, draft.strategy)
    return (has_dropped_queue or is_outdated) and _seconds_until_informational_write(situation) <= 0


def _has_outdated_next_owner(situation: Situation, draft: Draft) -> bool:
    """Whether a queue that is still being released is to go to another member than the document names."""
    for decision in draft.with_acts(Act.WAIT):
        release = situation.document.releasing.get(decision.queue)
        next_name = decision.next_owner.name if decision.next_owner else None
        if release and release.to != next_name:
            return True
    return False


def _has_outdated_fields(situation: Situation, strategy: str) -> bool:
    """Whether members' entries, strategy, settings, times of spent moves, forced grants or incarnations must change."""
    document = situation.document
    entries = record.member_entries(document, situation.snapshot, situation.counted_holders)
    # An owner keeps its entry, even if its pod has ended.
    owner_uids = {name: share.uid for name, share in document.members.items() if share.queues}
    entries_differ = dict(document.entry_holders) != entries | owner_uids
    new_settings = situation.snapshot.settings != situation.snapshot.desired_settings
    future_moves = any(situation.seconds_since(at) < 0 for at, _ in document.spent)  # from a clock that was ahead
    # A forced grant is resolved once the queue has one consumer again (`HolderProofs.is_forced_grant_resolved`).
    has_resolved_grant = situation.proofs.unresolved_grants != document.forced
    is_outdated = entries_differ or new_settings or future_moves or has_resolved_grant or document.strategy != strategy
    return is_outdated or _has_outdated_incarnations(situation)


def _has_outdated_incarnations(situation: Situation) -> bool:
    """Whether the document must begin or stop naming incarnations, or a restarted process has inherited a share."""
    if situation.document.is_broadcasting:
        return False
    names_incarnations = situation.document.incarnations_since > 0
    should_name_incarnations = situation.incarnations_since > 0  # in the next document
    if names_incarnations != should_name_incarnations:
        return True
    return any(incarnations.has_outdated_share(situation.document, pod) for pod in situation.snapshot.pods)


def _seconds_until_informational_write(situation: Situation) -> float:
    """Return the seconds until a document with only informational changes may follow the last one."""
    age = situation.seconds_since(situation.document.issued_at)
    return situation.policy.triggers.debounce - age if age >= 0 else 0.0  # negative: do not wait for a wrong clock


def _broadcasting_plan(situation: Situation) -> Plan:
    """Return the plan of a Broadcasting group: every member consumes every queue, without handover."""
    current = situation.document
    everyone = tuple(sorted(situation.queues))
    if situation.subscribed.missing_metadata and current.everyone is not None:  # without metadata, keep the queues
        everyone = current.everyone
    may_write_fields = _seconds_until_informational_write(situation) <= 0
    needs_write = current.everyone != everyone or (may_write_fields and _has_outdated_fields(situation, strategy=""))
    if not needs_write:
        return _build_plan(situation, Draft(), document=None)
    entries = record.member_entries(current, situation.snapshot, situation.counted_holders)
    document = replace(
        current,
        generation=current.generation + 1,
        issued_at=situation.formatted_now,
        strategy="",
        members={name: Share(uid) for name, uid in entries.items()},
        everyone=everyone,
        releasing={},
        forced={},
        spent=budget.updated_spent(situation, voluntary_moves=0),
        barrier=0,
        incarnations_since=0,
    )
    return _build_plan(situation, Draft(), document)


def _clustering_document(situation: Situation) -> Assignment:
    """Switch to Clustering: with this barrier, a queue is granted only once no member can still consume all queues."""
    generation = situation.document.generation + 1
    at = situation.formatted_now
    return replace(situation.document, generation=generation, issued_at=at, everyone=None, barrier=generation)


def _build_plan(situation: Situation, draft: Draft, document: Assignment | None, *, is_complete: bool = True) -> Plan:
    """Build the plan around a draft. `is_complete`: look for all problems, also for queues without an owner."""
    snapshot = situation.snapshot
    data, too_large = _encode_document(document)
    if too_large:
        draft = Draft(hold=draft.hold, problem=too_large)
        document = None
    assignment = document or situation.document  # the one that members are to obey from now on
    settings = _settings_to_obey(snapshot, document)
    # *Behind*: pods that have not yet applied the assignment or the settings.
    behind = pokes.pods_behind(snapshot.pods, assignment, snapshot.deleted_uids, settings)
    behind_only_in_settings = pokes.pods_behind_only_in_settings(behind, assignment, snapshot.deleted_uids)
    new_pokes = pokes.due_pokes(behind, assignment)
    behind_in_assignment = [pod for pod in behind if pod.name not in behind_only_in_settings]
    without_owner = situation.unowned_queues(assignment)
    unmanaged = unmanaged_queues(situation).intersection(without_owner) if without_owner else frozenset()
    unowned = len(without_owner) - len(unmanaged)  # a queue of an unmanaged consumer is no problem
    findings = problems.find_problems(situation, draft, unowned if is_complete else 0)
    outdated = problems.members_with_old_settings(situation, settings)
    settings_age = _settings_age(snapshot, document)
    if late := problems.find_late_members(situation, outdated, settings_age):
        findings.append(late)
        outdated = []  # reported as a problem, no longer as progress
    moving = _count_moving(situation, assignment, behind_in_assignment)
    idle = 0 if assignment.is_broadcasting else len(situation.idle_members(assignment))
    progress = conditions.compute_progress(situation, draft, findings, moving, outdated)
    is_at_rest = not (unowned or progress.is_active or situation.transition_seconds_left)
    if idle and situation.queues and is_at_rest:
        findings.append(problems.idle_problem(situation, idle))
    published = group_status.build_status(
        situation,
        draft,
        assignment,
        conditions=conditions.build_conditions(situation, findings, progress, is_complete=is_complete),
        is_settled=not moving,
        idle=idle,
        unowned=unowned,
    )
    awaited = _members_to_poll(situation, assignment, behind_in_assignment, settings)
    journal = document_records(situation, draft, document) if document else ()
    limits = _time_limits(situation, draft, assignment, findings)
    # If no report is awaited, none enqueues the group after this write: plan again at once, from the new document.
    is_due_now = document is not None and not awaited
    return Plan(
        document=document,
        config_map_data=data,
        pokes=new_pokes,
        settings_only_pokes=behind_only_in_settings & new_pokes.keys(),
        members_to_drain=tuple(pod.holder for pod in _leaving_pods(situation) if not pod.drains_for_good),
        members_to_poll=awaited,
        verify_ended=_holders_to_verify(situation, assignment),
        status=published,
        events=tuple(events.build_events(situation, draft, published, findings)),
        journal_records=(*journal, *condition_records(situation, published)),
        member_states=situation.member_states,
        unmanaged_queues=unmanaged,
        hold=Finding(draft.hold.reason, draft.hold.message) if draft.hold else None,
        problems=tuple(findings),
        requeue_after=0.0 if is_due_now else _requeue_seconds(situation, limits, behind, new_pokes),
    )


def _settings_to_obey(snapshot: Snapshot, document: Assignment | None) -> str:
    """Return the digest of the settings that members are to use: new ones are written together with a document."""
    text = snapshot.desired_settings if document else snapshot.settings
    return settings_digest(text) if text else ""


def _settings_age(snapshot: Snapshot, document: Assignment | None) -> float:
    """Return how long ago the settings were written; 0 if new ones are written now, so that no member is late yet."""
    return 0.0 if document and snapshot.settings != snapshot.desired_settings else snapshot.settings_age


def _requeue_seconds(
    situation: Situation, limits: Iterable[float], behind: Sequence[PodSnapshot], new_pokes: Mapping[str, Poke]
) -> float:
    """Return after how many seconds to plan again if nothing changes: at the next time limit, poke or resync."""
    coming = [seconds for seconds in limits if seconds > 0]
    return min(situation.policy.triggers.resync, pokes.seconds_until_next_poke(behind, new_pokes), *coming)


def _count_moving(situation: Situation, assignment: Assignment, behind_in_assignment: Sequence[PodSnapshot]) -> int:
    """Count queues on their way to a next owner, members that have yet to obey, and members that leave with queues."""
    releasing = sum(release.to is not None for release in assignment.releasing.values())
    pending = sum(not pod.is_lost(situation.policy.handover) for pod in behind_in_assignment)
    leaving_owners = sum(owns_queues(assignment, pod) for pod in _leaving_pods(situation))
    return releasing + pending + leaving_owners


def _leaving_pods(situation: Situation) -> list[PodSnapshot]:
    """Return the terminating pods that have not ended. LEAVING also has pods that drain for good without a deletion."""
    return [pod for pod in situation.pods_in_state(MemberState.LEAVING) if pod.terminating]


def _encode_document(document: Assignment | None) -> tuple[Mapping[str, str | bytes], Finding | None]:
    try:
        return encode_assignment(document) if document else {}, None
    except AssignmentTooLargeError as error:
        return {}, Finding(Reason.ASSIGNMENT_TOO_LARGE, f"{error}; the present assignment stays in force")


def _members_to_poll(
    situation: Situation, assignment: Assignment, behind_in_assignment: Sequence[PodSnapshot], settings: str
) -> frozenset[str]:
    """Return the names of the pods to poll because their next report could change the plan.

    A policy change can alter the settings of a thousand groups at once. So of the members that only use old settings,
    just those that were already poked are polled.
    """
    pods = situation.snapshot.pods
    missed_brokers = set().union(*(pod.cut_off_brokers for pod in pods if not pod.ended))
    # Brokers that some pods reach and others do not. Poll all pods that name such a broker: it may have failed or
    # recovered for all of them, and only some reports are new enough to show it.
    contested = missed_brokers & brokers_reached_by(pods) if missed_brokers else set()

    def may_change_plan(pod: PodSnapshot) -> bool:
        is_state_temporary = situation.member_states[pod.name] is not MemberState.READY
        has_old_settings = pod.poke.attempts > 0 and pokes.has_other_settings(pod, settings)
        must_release = pod.holder in assignment.releases_by_holder or incarnations.has_restarted(assignment, pod)
        # Poll an unreachable pod until it responds: otherwise it would count as silent for ever.
        if is_state_temporary or has_old_settings or must_release or pod.unreachable_for:
            return True
        return pod.report is not None and _may_change_by_report(pod.report, assignment, contested)

    watched = filter(may_change_plan, pods)
    return frozenset(pod.name for pod in (*behind_in_assignment, *watched) if pod.is_running)


def _may_change_by_report(report: Report, assignment: Assignment, contested: AbstractSet[str]) -> bool:
    """Whether a member's next report may change the plan without a new document.

    `contested`: the brokers that some pods reach and others do not.
    """
    is_draining = report.state != "serving"  # it may end its drain, or resume its queues
    # After the assignment was lost, a member may drain queues that no document names. These wait for the next report.
    may_drain_unrecorded = bool(assignment.barrier and report.releasing)
    return is_draining or may_drain_unrecorded or not contested.isdisjoint(report.brokers)


def _holders_to_verify(situation: Situation, assignment: Assignment) -> tuple[Holder, ...]:
    """Return the holders that are neither among the pods nor known to have ended."""
    on_record = assignment.entry_holders | assignment.releases_by_holder.keys()
    absent = on_record.difference(pod.holder for pod in situation.snapshot.pods)
    return tuple(sorted(holder for holder in absent if holder.uid not in situation.snapshot.deleted_uids))


def _time_limits(
    situation: Situation, draft: Draft, current: Assignment, findings: Sequence[Finding]
) -> Iterator[float]:
    """Yield the seconds after which time alone may change the plan; a value of 0 or less is no limit, or has passed."""
    handover = situation.policy.handover
    grace = situation.policy.triggers.unready_grace
    yield problems.start_seconds_left(situation)  # a new group still has no member: NoMembers
    yield conditions.stall_seconds_left(situation, findings)  # a problem has lasted for long: Stalled
    yield from situation.transition_seconds_left.values()  # members that join or leave are no longer waited for
    yield (draft.hold and draft.hold.seconds_left) or 0.0
    if current is situation.snapshot.document:  # nothing is written now: an informational change may have to wait
        yield _seconds_until_informational_write(situation)
    for pod in situation.snapshot.pods:
        if not pod.ended and not pod.ready:
            yield grace - pod.stable_for
            yield handover.lost_after - pod.unreachable_for
        for seconds in pod.cut_off_brokers.values():
            yield grace - seconds
        yield incarnations.pause_seconds_left(pod, current)  # a restarted member may have queues again
    for view in filter(None, situation.snapshot.views.values()):
        yield SHRINK_PATIENCE_SECONDS - view.stable_for
    for release in current.releasing.values():
        yield ready_member_lost_after(handover) - situation.seconds_since(release.at)
