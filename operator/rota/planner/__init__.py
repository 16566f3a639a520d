"""Planner of a group: `plan(snapshot, now)` returns everything to write, in one pass, without I/O or clock.

It keeps no state between calls. The stored assignment records the owner of each queue, and every plan continues from
it. So it does not matter which replica calls the planner, how often, or which changes it missed in between.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from rota.documents import Assignment, AssignmentTooLargeError, Share, write_assignment
from rota.handover import Act, lost_after_seconds
from rota.model import Holder, Queue, Reason, Verdict
from rota.planner import pokes, record
from rota.planner.explain import Explanation, explain_queues
from rota.planner.members import incarnations
from rota.planner.members.standings import MemberState, classify_members, owns_queues
from rota.planner.moves import Draft, decide, document_of, foreign_queues
from rota.planner.situation import SHRINK_PATIENCE, WITHOUT_POLICY, Situation
from rota.planner.snapshot import DecodedReport, Event, Plan, Pod, QueueView, Snapshot
from rota.planner.status import conditions, events, group_status, problems
from rota.planner.status.journal_records import owners_record, records, verdict_records
from rota.planner.target import Measured, share_with_unmanaged, target
from rota.spec.resolved import settings_digest
from rota.timestamps import format_time

__all__ = [
    "DecodedReport",
    "Event",
    "Explanation",
    "Measured",
    "Plan",
    "Pod",
    "QueueView",
    "Snapshot",
    "owners_record",
    "plan",
    "reason_for_no_change",
    "share_with_unmanaged",
    "target",
]


URGENT = (Act.REVOKE, Act.RETURN, Act.GRANT, Act.FORCE)  # dropping a queue that no member consumes can wait


def reason_for_no_change(snapshot: Snapshot, now: float, queues: Sequence[Queue] = ()) -> list[Explanation]:
    """Explain the owners of these queues; without queues, explain one queue of each member."""
    return explain_queues(_situation(snapshot, now), queues)


_BLOCKING = (Reason.RECORD_TOO_NEW, Reason.TOO_MANY_MEMBERS)
_ALWAYS_UPDATED_FIELDS = ("observedGeneration", "conditions", "lag")


def plan(snapshot: Snapshot, now: float) -> Plan:
    """Return the plan for a group; `now` is the wall-clock time in seconds."""
    is_blocked = any(verdict.reason in _BLOCKING for verdict in snapshot.problems)
    is_new_duplicate = snapshot.document is None and snapshot.is_duplicate and not record.damage(snapshot)
    if snapshot.spec is None or is_blocked or is_new_duplicate:
        return _report_only_plan(_situation(snapshot, now))
    damaged = record.damage(snapshot)
    if (damaged or snapshot.document is None) and not snapshot.fresh:
        return Plan(reread=True, status=snapshot.status, again=1.0)
    if damaged:
        return _recovery(snapshot, damaged, now)
    situation = _situation(snapshot, now)
    if snapshot.spec.message_model == "Broadcasting":
        return _to_everyone(situation)
    if situation.document.everyone is not None:
        return _build_plan(situation, Draft(), _to_owners(situation))
    draft = decide(situation)
    return _build_plan(situation, draft, document_of(situation, draft) if _differs(situation, draft) else None)


def _situation(snapshot: Snapshot, now: float) -> Situation:
    document = snapshot.document or Assignment(group=snapshot.group, generation=0, issued_at="")
    policy = snapshot.policy or WITHOUT_POLICY
    is_orderly = snapshot.spec is not None and snapshot.spec.orderly
    member_states = classify_members(snapshot.pods, snapshot.gone, policy, document, is_orderly=is_orderly)
    return Situation(snapshot, member_states, document, now)


def _report_only_plan(situation: Situation) -> Plan:
    """Return a plan that writes no assignment; of the status, only conditions, lag and observedGeneration change."""
    reduced = _build_plan(situation, Draft(), None, whole=False)
    unchanged = {name: value for name, value in situation.snapshot.status.items() if name not in _ALWAYS_UPDATED_FIELDS}
    return replace(reduced, status={**reduced.status, **unchanged})


def _recovery(snapshot: Snapshot, damaged: str, now: float) -> Plan:
    situation = _situation(snapshot, now)
    document = record.recovered(snapshot, now)
    if snapshot.spec and snapshot.spec.message_model == "Broadcasting":
        queues = {queue for share in document.members.values() for queue in share.queues}
        members = {name: Share(share.uid) for name, share in document.members.items()}
        everyone = tuple(sorted(queues.union(situation.queues)))
        document = replace(document, strategy="", members=members, everyone=everyone, barrier=0, incarnations_since=0)
    recovery = _build_plan(situation, Draft(), document)
    verdict = Verdict(Reason.RECORD_LOST, f"{damaged}; written anew from what the members report")
    lines = [
        {**line, "reason": verdict.reason, "message": verdict.message} if line["kind"] == "plan" else line
        for line in recovery.records
    ]
    return replace(
        recovery,
        events=(*recovery.events, Event(*verdict, warning=True)),
        records=tuple(lines),
        again=0.0 if recovery.document else recovery.again,
    )


def _differs(situation: Situation, draft: Draft) -> bool:
    """Whether to write a document now: queues change hands, or an informational change has waited long enough."""
    if draft.of(*URGENT) or situation.snapshot.document is None:
        return True
    return (
        bool(draft.of(Act.DROP) or _has_outdated_fields(situation, draft.strategy))
        and _seconds_until_informational_write(situation) <= 0
    )


def _has_outdated_fields(situation: Situation, strategy: str) -> bool:
    """Whether entries, strategy, settings, budget times, forced grants or incarnations on record are out of date."""
    recorded = {name: share.uid for name, share in situation.document.members.items()}
    entries = record.entries(situation.document, situation.snapshot, situation.counted)
    owners = {holder.name: holder.uid for holder in situation.owned.values()}
    new_settings = situation.snapshot.settings != situation.snapshot.wanted_settings
    future_moves = any(record.seconds_since(at, situation.now) < 0 for at, _ in situation.document.spent)
    resolved_grant = any(
        situation.forced_grant_resolved(queue, since) for queue, since in situation.document.forced.items()
    )
    entries_differ = recorded != {**entries, **owners} or situation.document.strategy != strategy
    return new_settings or future_moves or resolved_grant or entries_differ or _names_other_incarnations(situation)


def _names_other_incarnations(situation: Situation) -> bool:
    """Whether the record must begin or stop naming incarnations, or a restarted process has inherited a share."""
    if situation.document.everyone is not None:
        return False
    if bool(situation.incarnations_since) != bool(situation.document.incarnations_since):
        return True
    restarted = [pod for pod in situation.snapshot.pods if incarnations.has_restarted(situation.document, pod)]
    return any(incarnations.inherits(situation.document, pod) for pod in restarted)


def _seconds_until_informational_write(situation: Situation) -> float:
    """Return the seconds until a document with only informational changes may follow the last one."""
    age = record.seconds_since(situation.document.issued_at, situation.now)
    return situation.policy.triggers.debounce - age if age >= 0 else 0.0


def _to_everyone(situation: Situation) -> Plan:
    """Return the plan of a Broadcasting group: every member consumes every queue, without handover."""
    current, strategy = situation.document, ""
    everyone = tuple(sorted(situation.queues))
    differs = current.everyone != everyone
    if situation.unseen and current.everyone is not None:  # without metadata, keep the queues
        everyone, differs = current.everyone, False
    if not differs and not (
        _has_outdated_fields(situation, strategy) and _seconds_until_informational_write(situation) <= 0
    ):
        return _build_plan(situation, Draft(), None)
    entries = record.entries(current, situation.snapshot, situation.counted)
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


def _to_owners(situation: Situation) -> Assignment:
    """Switch to Clustering: with this barrier, a queue is granted only once no member can still consume all queues."""
    generation = situation.document.generation + 1
    at = format_time(situation.now)
    return replace(situation.document, generation=generation, issued_at=at, everyone=None, barrier=generation)


def _build_plan(situation: Situation, draft: Draft, document: Assignment | None, *, whole: bool = True) -> Plan:
    """Build the plan around a draft. `whole`: report all problems, also queues without an owner."""
    snapshot = situation.snapshot
    data, too_large = _written(document)
    if too_large:
        draft, document = Draft(held=draft.held, problem=too_large), None
    assignment = document or situation.document
    settings_text = snapshot.wanted_settings if document else snapshot.settings
    settings = settings_digest(settings_text) if settings_text else ""
    behind = pokes.pods_behind(snapshot.pods, assignment, snapshot.gone, settings)
    for_settings = pokes.only_for_settings(behind, assignment, snapshot.gone)
    due = pokes.due_pokes(behind, assignment)
    leaving = [pod for pod in snapshot.pods if situation.standings[pod.name] is MemberState.LEAVING and pod.terminating]
    without_owner = situation.without_owner(assignment)
    unmanaged = foreign_queues(situation).intersection(without_owner) if without_owner else frozenset()
    unowned = len(without_owner) - len(unmanaged)
    verdicts = problems.problems(situation, draft, unowned if whole else 0)
    are_new = document is not None and snapshot.settings != snapshot.wanted_settings
    late, awaiting = problems.members_with_old_settings(situation, settings, 0.0 if are_new else snapshot.settings_age)
    verdicts += problems.late_members_problem(late)
    leaving_owners = [pod for pod in leaving if owns_queues(assignment, pod)]
    pending = [pod for pod in behind if pod.name not in for_settings and not pod.seen.lost(situation.policy.handover)]
    moving = group_status.count_in_transition(assignment, len(pending) + len(leaving_owners))
    idle = group_status.idle_members(situation, assignment)
    progressing = conditions.progress(situation, draft, verdicts, moving, awaiting)
    is_at_rest = not (unowned or progressing[0] or situation.motion)
    if idle and situation.queues and is_at_rest:
        verdicts.append(problems.idle_problem(situation, idle))
    published = group_status.status(
        situation,
        draft,
        assignment,
        conditions=conditions.conditions(situation, verdicts, progressing, whole=whole),
        moving=moving,
        idle=idle,
        unowned=unowned,
    )
    awaited = _awaited(situation, assignment, _watched(snapshot, behind, for_settings, settings))
    journal = records(situation, draft, document) if document else []
    requeue_after = min(pokes.seconds_until_next_poke(behind, due), *_deadlines(situation, draft, assignment, verdicts))
    if document and not awaited:
        requeue_after = 0.0  # no awaited report will enqueue the group: plan again from the document just written
    return Plan(
        document=document,
        data=data,
        pokes=due,
        for_settings=for_settings & due.keys(),
        drains=tuple(pod.holder for pod in leaving if not (pod.report and pod.report.final)),
        awaited=awaited,
        confirm=_holders_to_verify(situation, assignment),
        status=published,
        events=tuple(events.events(situation, draft, published, verdicts)),
        records=(*journal, *verdict_records(situation, published)),
        standings=situation.standings,
        foreign=unmanaged,
        held=Verdict(draft.held.reason, draft.held.message) if draft.held else None,
        problems=tuple(verdicts),
        again=requeue_after,
    )


def _written(document: Assignment | None) -> tuple[Mapping[str, str | bytes], Verdict | None]:
    try:
        return write_assignment(document) if document else {}, None
    except AssignmentTooLargeError as error:
        return {}, Verdict(Reason.DOCUMENT_TOO_LARGE, f"{error}; what was assigned stays")


def _watched(snapshot: Snapshot, behind: Sequence[Pod], for_settings: Container[str], settings: str) -> list[Pod]:
    """Return the pods that have yet to obey an assignment or settings.

    A policy change can alter the settings of a thousand groups at once: watch only members that were already poked.
    """
    watched = [pod for pod in behind if pod.name not in for_settings]
    return watched + [pod for pod in snapshot.pods if pod.poke.times and pokes.has_other_settings(pod, settings)]


def _awaited(situation: Situation, assignment: Assignment, behind: Sequence[Pod]) -> frozenset[str]:
    """Return the names of the pods to poll because their next report could change the plan."""
    holders = {release.holder for release in assignment.releasing.values()}
    contested = {broker for pod in situation.snapshot.pods if not pod.ended for broker in pod.cut_off}
    contested &= frozenset().union(*(pod.reaches for pod in situation.snapshot.pods))  # a report may be a minute old
    watched = [
        pod
        for pod in situation.snapshot.pods
        if pod.holder in holders
        or incarnations.has_restarted(assignment, pod)
        or pod.unheard  # poll until it responds: otherwise it would count as silent for ever
        or situation.standings[pod.name] is not MemberState.READY
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
    return tuple(sorted(holder for holder in holders - present if holder.uid not in situation.snapshot.gone))


def _deadlines(situation: Situation, draft: Draft, current: Assignment, verdicts: Sequence[Verdict]) -> Iterator[float]:
    """Yield the seconds after which time alone may change the plan."""
    handover, triggers = situation.policy.handover, situation.policy.triggers
    yield triggers.resync
    limits = [
        problems.start_seconds_left(situation),
        conditions.stall_seconds_left(situation, verdicts),
        *situation.motion.values(),
    ]
    if draft.held and draft.held.seconds:
        limits.append(draft.held.seconds)
    if current is situation.snapshot.document:
        limits.append(_seconds_until_informational_write(situation))
    for pod in situation.snapshot.pods:
        if not pod.ended and not pod.ready:
            limits += [triggers.unready_grace - pod.steady, handover.lost_after - pod.unheard]
        limits += [triggers.unready_grace - seconds for seconds in pod.cut_off.values()]
        limits.append(incarnations.seconds_left(pod, current))
    limits += [SHRINK_PATIENCE - view.steady for view in situation.snapshot.views.values() if view]
    limits += [
        lost_after_seconds(handover) - record.seconds_since(release.at, situation.now)
        for release in current.releasing.values()
    ]
    yield from (seconds for seconds in limits if seconds > 0)
