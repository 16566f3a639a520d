"""Planner of a group: `plan(snapshot, now)` returns everything to write, in one pass, without I/O or clock.

It keeps no state between calls. The stored assignment records the owner of each queue, and every plan continues from
it. So it does not matter which replica calls the planner, how often, or which changes it missed in between.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from rota.documents import Assignment, AssignmentTooLargeError, Share, encode_assignment
from rota.handover import Act, lost_after_seconds
from rota.model import Finding, Holder, Queue, Reason
from rota.planner import pokes, record
from rota.planner.explain import Explanation, explain_queues
from rota.planner.members import incarnations
from rota.planner.members.member_states import MemberState, classify_members, owns_queues
from rota.planner.moves import Draft, decide, next_document, unmanaged_queues
from rota.planner.situation import SHRINK_PATIENCE_SECONDS, WITHOUT_POLICY, Situation
from rota.planner.snapshot import DecodedReport, Event, Plan, PodSnapshot, QueueView, Snapshot
from rota.planner.status import conditions, events, group_status, problems
from rota.planner.status.journal_records import condition_records, document_records, owners_record
from rota.planner.target import StrategyInputs, compute_owners, share_with_unmanaged
from rota.spec.resolved import settings_digest
from rota.timestamps import format_time

__all__ = [
    "DecodedReport",
    "Event",
    "Explanation",
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


def explain_owners(snapshot: Snapshot, now: float, queues: Sequence[Queue] = ()) -> list[Explanation]:
    """Explain the owners of these queues; without queues, explain one queue of each member."""
    return explain_queues(_derive_situation(snapshot, now), queues)


_BLOCKING_REASONS = (Reason.UNSUPPORTED_ASSIGNMENT, Reason.TOO_MANY_MEMBERS)
_ALWAYS_UPDATED_FIELDS = ("observedGeneration", "conditions", "lag")


def plan(snapshot: Snapshot, now: float) -> Plan:
    """Return the plan for a group; `now` is the wall-clock time in seconds."""
    is_blocked = any(finding.reason in _BLOCKING_REASONS for finding in snapshot.problems)
    is_new_duplicate = snapshot.document is None and snapshot.is_duplicate and not record.find_damage(snapshot)
    if snapshot.spec is None or is_blocked or is_new_duplicate:
        return _report_only_plan(_derive_situation(snapshot, now))
    damaged = record.find_damage(snapshot)
    if (damaged or snapshot.document is None) and not snapshot.refetched:
        return Plan(refetch=True, status=snapshot.status, requeue_after=1.0)
    if damaged:
        return _recovery_plan(snapshot, damaged, now)
    situation = _derive_situation(snapshot, now)
    if snapshot.spec.message_model == "Broadcasting":
        return _broadcasting_plan(situation)
    if situation.document.everyone is not None:
        return _build_plan(situation, Draft(), _clustering_document(situation))
    draft = decide(situation)
    return _build_plan(situation, draft, next_document(situation, draft) if _needs_write(situation, draft) else None)


def _derive_situation(snapshot: Snapshot, now: float) -> Situation:
    document = snapshot.document or Assignment(group=snapshot.group, generation=0, issued_at="")
    policy = snapshot.policy or WITHOUT_POLICY
    is_orderly = snapshot.spec is not None and snapshot.spec.is_orderly
    member_states = classify_members(snapshot.pods, snapshot.deleted_uids, policy, document, is_orderly=is_orderly)
    return Situation(snapshot, member_states, document, now)


def _report_only_plan(situation: Situation) -> Plan:
    """Return a plan that writes no assignment; of the status, only conditions, lag and observedGeneration change."""
    reduced = _build_plan(situation, Draft(), document=None, is_complete=False)
    unchanged = {name: value for name, value in situation.snapshot.status.items() if name not in _ALWAYS_UPDATED_FIELDS}
    return replace(reduced, status={**reduced.status, **unchanged})


def _recovery_plan(snapshot: Snapshot, damage: str, now: float) -> Plan:
    situation = _derive_situation(snapshot, now)
    document = record.rebuild_assignment(snapshot, now)
    if snapshot.spec and snapshot.spec.message_model == "Broadcasting":
        queues = {queue for share in document.members.values() for queue in share.queues}
        members = {name: Share(share.uid) for name, share in document.members.items()}
        everyone = tuple(sorted(queues.union(situation.queues)))
        document = replace(document, strategy="", members=members, everyone=everyone, barrier=0, incarnations_since=0)
    recovery = _build_plan(situation, Draft(), document)
    finding = Finding(Reason.ASSIGNMENT_LOST, f"{damage}; it was rebuilt from the members' reports")
    lines = [
        {**line, "reason": finding.reason, "message": finding.message} if line["kind"] == "plan" else line
        for line in recovery.journal_records
    ]
    return replace(
        recovery,
        events=(*recovery.events, Event(*finding, warning=True)),
        journal_records=tuple(lines),
        requeue_after=0.0 if recovery.document else recovery.requeue_after,
    )


def _needs_write(situation: Situation, draft: Draft) -> bool:
    """Whether to write a document now: queues change hands, or an informational change has waited long enough."""
    if draft.with_acts(*URGENT_ACTS) or situation.snapshot.document is None:
        return True
    return (
        bool(draft.with_acts(Act.DROP) or _has_outdated_fields(situation, draft.strategy))
        and _seconds_until_informational_write(situation) <= 0
    )


def _has_outdated_fields(situation: Situation, strategy: str) -> bool:
    """Whether entries, strategy, settings, budget times, forced grants or incarnations on record are out of date."""
    recorded = {name: share.uid for name, share in situation.document.members.items()}
    entries = record.member_entries(situation.document, situation.snapshot, situation.counted_members)
    owners = {holder.name: holder.uid for holder in situation.owners.values()}
    new_settings = situation.snapshot.settings != situation.snapshot.desired_settings
    future_moves = any(record.seconds_since(at, situation.now) < 0 for at, _ in situation.document.spent)
    resolved_grant = any(
        situation.is_forced_grant_resolved(queue, since) for queue, since in situation.document.forced.items()
    )
    entries_differ = recorded != {**entries, **owners} or situation.document.strategy != strategy
    return new_settings or future_moves or resolved_grant or entries_differ or _has_outdated_incarnations(situation)


def _has_outdated_incarnations(situation: Situation) -> bool:
    """Whether the document must begin or stop naming incarnations, or a restarted process has inherited a share."""
    if situation.document.everyone is not None:
        return False
    if bool(situation.incarnations_since) != bool(situation.document.incarnations_since):
        return True
    restarted = [pod for pod in situation.snapshot.pods if incarnations.has_restarted(situation.document, pod)]
    return any(incarnations.has_inherited(situation.document, pod) for pod in restarted)


def _seconds_until_informational_write(situation: Situation) -> float:
    """Return the seconds until a document with only informational changes may follow the last one."""
    age = record.seconds_since(situation.document.issued_at, situation.now)
    return situation.policy.triggers.debounce - age if age >= 0 else 0.0


def _broadcasting_plan(situation: Situation) -> Plan:
    """Return the plan of a Broadcasting group: every member consumes every queue, without handover."""
    current = situation.document
    strategy = ""
    everyone = tuple(sorted(situation.queues))
    differs = current.everyone != everyone
    if situation.missing_metadata and current.everyone is not None:  # without metadata, keep the queues
        everyone = current.everyone
        differs = False
    if not differs and not (
        _has_outdated_fields(situation, strategy) and _seconds_until_informational_write(situation) <= 0
    ):
        return _build_plan(situation, Draft(), document=None)
    entries = record.member_entries(current, situation.snapshot, situation.counted_members)
    document = replace(
        current,
        generation=current.generation + 1,
        issued_at=format_time(situation.now),
        strategy=strategy,
        members={name: Share(uid) for name, uid in entries.items()},
        everyone=everyone,
        releasing={},
        forced={},
        barrier=0,
        incarnations_since=0,
    )
    return _build_plan(situation, Draft(), document)


def _clustering_document(situation: Situation) -> Assignment:
    """Switch to Clustering: with this barrier, a queue is granted only once no member can still consume all queues."""
    generation = situation.document.generation + 1
    at = format_time(situation.now)
    return replace(situation.document, generation=generation, issued_at=at, everyone=None, barrier=generation)


def _build_plan(situation: Situation, draft: Draft, document: Assignment | None, *, is_complete: bool = True) -> Plan:
    """Build the plan around a draft. `is_complete`: report all problems, also queues without an owner."""
    snapshot = situation.snapshot
    data, too_large = _encode_document(document)
    if too_large:
        draft = Draft(hold=draft.hold, problem=too_large)
        document = None
    assignment = document or situation.document
    settings_text = snapshot.desired_settings if document else snapshot.settings
    settings = settings_digest(settings_text) if settings_text else ""
    behind = pokes.pods_behind(snapshot.pods, assignment, snapshot.deleted_uids, settings)
    for_settings = pokes.pods_behind_in_settings(behind, assignment, snapshot.deleted_uids)
    due = pokes.due_pokes(behind, assignment)
    leaving = _leaving_pods(situation)
    without_owner = situation.unowned_queues(assignment)
    unmanaged = unmanaged_queues(situation).intersection(without_owner) if without_owner else frozenset()
    unowned = len(without_owner) - len(unmanaged)
    findings = problems.find_problems(situation, draft, unowned if is_complete else 0)
    are_settings_new = document is not None and snapshot.settings != snapshot.desired_settings
    outdated = problems.members_with_old_settings(situation, settings)
    if outdated and problems.are_settings_overdue(situation, 0.0 if are_settings_new else snapshot.settings_age):
        findings.append(problems.late_members_problem(outdated))
        outdated = []  # reported as a problem, no longer as progress
    moving = _count_moving(situation, assignment, [pod for pod in behind if pod.name not in for_settings])
    idle = group_status.count_idle_members(situation, assignment)
    progress = conditions.compute_progress(situation, draft, findings, moving, outdated)
    is_at_rest = not (unowned or progress.is_active or situation.in_transition)
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
    awaited = _members_to_poll(situation, assignment, _pods_to_watch(snapshot, behind, for_settings, settings))
    journal = document_records(situation, draft, document) if document else []
    requeue_after = min(pokes.seconds_until_next_poke(behind, due), *_deadlines(situation, draft, assignment, findings))
    if document and not awaited:
        requeue_after = 0.0  # no awaited report will enqueue the group: plan again from the document just written
    return Plan(
        document=document,
        config_map_data=data,
        pokes=due,
        settings_only_pokes=for_settings & due.keys(),
        members_to_drain=tuple(pod.holder for pod in leaving if not (pod.report and pod.report.final)),
        members_to_poll=awaited,
        verify_ended=_holders_to_verify(situation, assignment),
        status=published,
        events=tuple(events.build_events(situation, draft, published, findings)),
        journal_records=(*journal, *condition_records(situation, published)),
        member_states=situation.member_states,
        unmanaged_queues=unmanaged,
        hold=Finding(draft.hold.reason, draft.hold.message) if draft.hold else None,
        problems=tuple(findings),
        requeue_after=requeue_after,
    )


def _count_moving(situation: Situation, assignment: Assignment, behind: Sequence[PodSnapshot]) -> int:
    """Count queues in transition, members that have yet to obey the assignment, and members that leave with queues."""
    pending = [pod for pod in behind if not pod.evidence.is_lost(situation.policy.handover)]
    leaving_owners = [pod for pod in _leaving_pods(situation) if owns_queues(assignment, pod)]
    return group_status.count_in_transition(assignment, len(pending) + len(leaving_owners))


def _leaving_pods(situation: Situation) -> list[PodSnapshot]:
    states = situation.member_states
    return [pod for pod in situation.snapshot.pods if states[pod.name] is MemberState.LEAVING and pod.terminating]


def _encode_document(document: Assignment | None) -> tuple[Mapping[str, str | bytes], Finding | None]:
    try:
        return encode_assignment(document) if document else {}, None
    except AssignmentTooLargeError as error:
        return {}, Finding(Reason.ASSIGNMENT_TOO_LARGE, f"{error}; the present assignment stays in force")


def _pods_to_watch(
    snapshot: Snapshot, behind: Sequence[PodSnapshot], for_settings: Container[str], settings: str
) -> list[PodSnapshot]:
    """Return the pods that have yet to obey an assignment or settings.

    A policy change can alter the settings of a thousand groups at once: watch only members that were already poked.
    """
    watched = [pod for pod in behind if pod.name not in for_settings]
    return watched + [pod for pod in snapshot.pods if pod.poke.attempts and pokes.has_other_settings(pod, settings)]


def _members_to_poll(situation: Situation, assignment: Assignment, behind: Sequence[PodSnapshot]) -> frozenset[str]:
    """Return the names of the pods to poll because their next report could change the plan."""
    holders = {release.holder for release in assignment.releasing.values()}
    pods = situation.snapshot.pods
    missed = {broker for pod in pods if not pod.ended for broker in pod.cut_off_brokers}
    reached = frozenset().union(*(pod.reachable_brokers for pod in pods))
    contested = missed & reached  # a report may be a minute old: only new ones show which pods are cut off
    watched = [
        pod
        for pod in pods
        if pod.holder in holders
        or incarnations.has_restarted(assignment, pod)
        or pod.unreachable_for  # poll until it responds: otherwise it would count as silent for ever
        or situation.member_states[pod.name] is not MemberState.READY
        or (pod.report and pod.report.state != "serving")  # it may resume its queues without a new document
        or (contested and pod.report and not contested.isdisjoint(pod.report.brokers))
        or (assignment.barrier and pod.report and pod.report.releasing)
    ]
    return frozenset(pod.name for pod in (*behind, *watched) if pod.started and not pod.ended)


def _holders_to_verify(situation: Situation, assignment: Assignment) -> tuple[Holder, ...]:
    """Return the holders that are neither among the pods nor known to have ended."""
    holders = {Holder(name, share.uid) for name, share in assignment.members.items()}
    holders |= {release.holder for release in assignment.releasing.values()}
    present = {pod.holder for pod in situation.snapshot.pods}
    return tuple(sorted(holder for holder in holders - present if holder.uid not in situation.snapshot.deleted_uids))


def _deadlines(situation: Situation, draft: Draft, current: Assignment, findings: Sequence[Finding]) -> Iterator[float]:
    """Yield the seconds after which time alone may change the plan."""
    handover = situation.policy.handover
    triggers = situation.policy.triggers
    yield triggers.resync
    limits = [
        problems.start_seconds_left(situation),
        conditions.stall_seconds_left(situation, findings),
        *situation.in_transition.values(),
    ]
    if draft.hold and draft.hold.seconds_left:
        limits.append(draft.hold.seconds_left)
    if current is situation.snapshot.document:
        limits.append(_seconds_until_informational_write(situation))
    for pod in situation.snapshot.pods:
        if not pod.ended and not pod.ready:
            limits += [triggers.unready_grace - pod.stable_for, handover.lost_after - pod.unreachable_for]
        limits += [triggers.unready_grace - seconds for seconds in pod.cut_off_brokers.values()]
        limits.append(incarnations.pause_seconds_left(pod, current))
    limits += [SHRINK_PATIENCE_SECONDS - view.stable_for for view in situation.snapshot.views.values() if view]
    limits += [
        lost_after_seconds(handover) - record.seconds_since(release.at, situation.now)
        for release in current.releasing.values()
    ]
    yield from (seconds for seconds in limits if seconds > 0)
