"""The decision: `plan(snapshot, now)` says everything to write, in one pass, without I/O or clock.

It remembers nothing between calls. The record of who owns what is the group's document; whatever happened since, the
plan goes on from there. So it makes no difference who calls it, how often, or what was missed in between.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from rota.documents import Assignment, Share, TooLarge, write_assignment
from rota.handover import Act, given_up
from rota.model import Holder, Queue, Reason, Verdict
from rota.planner import pokes, record
from rota.planner.explain import Why, whys
from rota.planner.members import incarnations
from rota.planner.members.standings import Standing, standings, works
from rota.planner.moves import Draft, decide, document_of, foreign_queues
from rota.planner.situation import SHRINK_PATIENCE, WITHOUT_POLICY, Situation
from rota.planner.snapshot import Event, Heard, Plan, Pod, Snapshot, View
from rota.planner.status import conditions, events, group_status, problems
from rota.planner.status.journal_records import beginning, records, verdict_records
from rota.planner.target import Measured, beside_foreigners, target
from rota.spec.resolved import settings_digest
from rota.timestamps import format_time

__all__ = [
    "Event",
    "Heard",
    "Measured",
    "Plan",
    "Pod",
    "Snapshot",
    "View",
    "Why",
    "beginning",
    "beside_foreigners",
    "plan",
    "target",
    "why",
]


URGENT = (Act.REVOKE, Act.RETURN, Act.GRANT, Act.FORCE)  # to forget a queue that nobody works can wait


def why(snapshot: Snapshot, now: float, queues: Sequence[Queue] = ()) -> list[Why]:
    """Say why queues have their owners; of none: of one queue of each member."""
    return whys(_situation(snapshot, now), queues)


_BLOCKING = (Reason.RECORD_TOO_NEW, Reason.TOO_MANY_MEMBERS)
_NEWS = ("observedGeneration", "conditions", "lag")


def plan(snapshot: Snapshot, now: float) -> Plan:
    """Decide what is to be done about a group; `now` is the time of day in seconds."""
    is_blocked = any(verdict.reason in _BLOCKING for verdict in snapshot.problems)
    is_new_duplicate = snapshot.document is None and snapshot.is_duplicate and not record.damage(snapshot)
    if snapshot.spec is None or is_blocked or is_new_duplicate:
        return _left_alone(_situation(snapshot, now))
    damaged = record.damage(snapshot)
    if (damaged or snapshot.document is None) and not snapshot.fresh:
        return Plan(reread=True, status=snapshot.status, again=1.0)
    if damaged:
        return _recovery(snapshot, damaged, now)
    it = _situation(snapshot, now)
    if snapshot.spec.message_model == "Broadcasting":
        return _to_everyone(it)
    if it.document.everyone is not None:
        return _told(it, Draft(), _to_owners(it))
    draft = decide(it)
    return _told(it, draft, document_of(it, draft) if _differs(it, draft) else None)


def _situation(snapshot: Snapshot, now: float) -> Situation:
    document = snapshot.document or Assignment(group=snapshot.group, generation=0, issued_at="")
    policy = snapshot.policy or WITHOUT_POLICY
    is_orderly = snapshot.spec is not None and snapshot.spec.orderly
    found = standings(snapshot.pods, snapshot.gone, policy, document, is_orderly=is_orderly)
    return Situation(snapshot, found, document, now)


def _left_alone(it: Situation) -> Plan:
    """Change nothing and tell only what is wrong; how many queues there are, and whose, is as it was."""
    found = _told(it, Draft(), None, whole=False)
    before = {name: value for name, value in it.snapshot.status.items() if name not in _NEWS}
    return replace(found, status={**found.status, **before})


def _recovery(snapshot: Snapshot, damaged: str, now: float) -> Plan:
    it = _situation(snapshot, now)
    document = record.recovered(snapshot, now)
    if snapshot.spec and snapshot.spec.message_model == "Broadcasting":
        known = {queue for share in document.members.values() for queue in share.queues}
        members = {name: Share(share.uid) for name, share in document.members.items()}
        everyone = tuple(sorted(known.union(it.queues)))
        document = replace(document, strategy="", members=members, everyone=everyone, barrier=0, incarnations_since=0)
    found = _told(it, Draft(), document)
    why = Verdict(Reason.RECORD_LOST, f"{damaged}; written anew from what the members report")
    lines = [
        {**line, "reason": why.reason, "message": why.message} if line["kind"] == "plan" else line
        for line in found.records
    ]
    return replace(
        found,
        events=(*found.events, Event(*why, warning=True)),
        records=tuple(lines),
        again=0.0 if found.document else found.again,
    )


def _differs(it: Situation, draft: Draft) -> bool:
    """Whether a new document is worth writing now: queues change hands, or what only informs has waited long enough."""
    if draft.of(*URGENT) or it.snapshot.document is None:
        return True
    return bool(draft.of(Act.DROP) or _stale(it, draft.strategy)) and _quiet_for(it) <= 0


def _stale(it: Situation, strategy: str) -> bool:
    """Whether entries, strategy, settings, the budget's times or who may be contested are not what the record says."""
    known = {name: share.uid for name, share in it.document.members.items()}
    entries = record.entries(it.document, it.snapshot, it.counted)
    owning = {holder.name: holder.uid for holder in it.owned.values()}
    settings = it.snapshot.settings != it.snapshot.wanted_settings
    ahead = any(record.ago(at, it.now) < 0 for at, _ in it.document.spent)
    overcome = any(it.overcome(queue, since) for queue, since in it.document.forced.items())
    others = known != {**entries, **owning} or it.document.strategy != strategy
    return settings or ahead or overcome or others or _names_other_incarnations(it)


def _names_other_incarnations(it: Situation) -> bool:
    """Whether the record names no incarnations though it could, some that it must not, or others than those at work."""
    if it.document.everyone is not None:
        return False
    if bool(it.incarnations_since) != bool(it.document.incarnations_since):
        return True
    restarted = [pod for pod in it.snapshot.pods if incarnations.has_restarted(it.document, pod)]
    return any(incarnations.inherits(it.document, pod) for pod in restarted)


def _quiet_for(it: Situation) -> float:
    """Return the seconds until the last document is old enough for one that only informs."""
    written = record.ago(it.document.issued_at, it.now)
    return it.policy.triggers.debounce - written if written >= 0 else 0.0


def _to_everyone(it: Situation) -> Plan:
    """Broadcasting: every member works every queue; there is nothing to hand over."""
    before, strategy = it.document, ""
    everyone = tuple(sorted(it.queues))
    differs = before.everyone != everyone
    if it.unseen and before.everyone is not None:  # what is not seen changes nothing
        everyone, differs = before.everyone, False
    if not differs and not (_stale(it, strategy) and _quiet_for(it) <= 0):
        return _told(it, Draft(), None)
    entries = record.entries(before, it.snapshot, it.counted)
    document = replace(
        before,
        generation=before.generation + 1,
        issued_at=format_time(it.now),
        strategy=strategy,
        members={name: Share(uid) for name, uid in entries.items()},
        everyone=everyone,
        releasing={},
        forced={},
        barrier=0,
        incarnations_since=0,
    )
    return _told(it, Draft(), document)


def _to_owners(it: Situation) -> Assignment:
    """From Broadcasting back to Clustering: nobody owns anything until nobody works everything any more."""
    generation = it.document.generation + 1
    at = format_time(it.now)
    return replace(it.document, generation=generation, issued_at=at, everyone=None, barrier=generation)


def _told(it: Situation, draft: Draft, document: Assignment | None, *, whole: bool = True) -> Plan:
    """Build the plan around a draft; `whole`: every problem is looked for, queues without an owner among them."""
    snapshot = it.snapshot
    data, too_large = _written(document)
    if too_large:
        draft, document = Draft(held=draft.held, problem=too_large), None
    standing = document or it.document
    text = snapshot.wanted_settings if document else snapshot.settings
    settings = settings_digest(text) if text else ""
    behind = pokes.behind(snapshot.pods, standing, snapshot.gone, settings)
    for_settings = pokes.only_for_settings(behind, standing, snapshot.gone)
    due = pokes.due(behind, standing)
    leaving = [pod for pod in snapshot.pods if it.standings[pod.name] is Standing.LEAVING and pod.terminating]
    without = it.without_owner(standing)
    foreign = foreign_queues(it).intersection(without) if without else frozenset()
    unowned = len(without) - len(foreign)
    found = problems.problems(it, draft, unowned if whole else 0)
    are_new = document is not None and snapshot.settings != snapshot.wanted_settings
    late, awaiting = problems.members_with_old_settings(it, settings, 0.0 if are_new else snapshot.settings_age)
    found += problems.late_members_problem(late)
    going = [pod for pod in leaving if works(standing, pod)]
    waited_for = [pod for pod in behind if pod.name not in for_settings and not pod.seen.lost(it.policy.handover)]
    moving = group_status.count_in_transition(standing, len(waited_for) + len(going))
    idle = group_status.idle_members(it, standing)
    progressing = conditions.progress(it, draft, found, moving, awaiting)
    is_at_rest = not (unowned or progressing[0] or it.motion)
    if idle and it.queues and is_at_rest:
        found.append(problems.idle_problem(it, idle))
    published = group_status.status(
        it,
        draft,
        standing,
        conditions=conditions.conditions(it, found, progressing, whole=whole),
        moving=moving,
        idle=idle,
        unowned=unowned,
    )
    awaited = _awaited(it, standing, _watched(snapshot, behind, for_settings, settings))
    lines = records(it, draft, document) if document else []
    again = min(pokes.next_due(behind, due), *_deadlines(it, draft, standing, found))
    if document and not awaited:
        again = 0.0  # no report is awaited that would enqueue the group: plan again from the document just written
    return Plan(
        document=document,
        data=data,
        pokes=due,
        for_settings=for_settings & due.keys(),
        drains=tuple(pod.holder for pod in leaving if not (pod.report and pod.report.final)),
        awaited=awaited,
        confirm=_unknown(it, standing),
        status=published,
        events=tuple(events.events(it, draft, published, found)),
        records=(*lines, *verdict_records(it, published)),
        standings=it.standings,
        foreign=foreign,
        held=Verdict(draft.held.reason, draft.held.message) if draft.held else None,
        problems=tuple(found),
        again=again,
    )


def _written(document: Assignment | None) -> tuple[Mapping[str, str | bytes], Verdict | None]:
    try:
        return write_assignment(document) if document else {}, None
    except TooLarge as error:
        return {}, Verdict(Reason.DOCUMENT_TOO_LARGE, f"{error}; what was assigned stays")


def _watched(snapshot: Snapshot, behind: Sequence[Pod], for_settings: Container[str], settings: str) -> list[Pod]:
    """Return the pods that have yet to obey an assignment or settings.

    A policy change can alter the settings of a thousand groups at once: watch only members that were already poked.
    """
    watched = [pod for pod in behind if pod.name not in for_settings]
    return watched + [pod for pod in snapshot.pods if pod.poke.times and pokes.has_other_settings(pod, settings)]


def _awaited(it: Situation, standing: Assignment, behind: Sequence[Pod]) -> frozenset[str]:
    """Return whose report could change the next plan."""
    holders = {release.holder for release in standing.releasing.values()}
    contested = {broker for pod in it.snapshot.pods if not pod.ended for broker in pod.cut_off}
    contested &= frozenset().union(*(pod.reaches for pod in it.snapshot.pods))  # their word may be a minute old
    watched = [
        pod
        for pod in it.snapshot.pods
        if pod.holder in holders
        or incarnations.has_restarted(standing, pod)
        or pod.unheard  # asked again until it answers: a silence that nobody ends would count as one for ever
        or it.standings[pod.name] is not Standing.READY
        or (pod.report and pod.report.state != "serving")  # it takes its queues up again without another document
        or (contested and pod.report and not contested.isdisjoint(pod.report.brokers))
        or (standing.barrier and pod.report and pod.report.releasing)
    ]
    return frozenset(pod.name for pod in (*behind, *watched) if pod.started and not pod.ended)


def _unknown(it: Situation, standing: Assignment) -> tuple[Holder, ...]:
    """Return the holders who are neither among the pods nor known to have ended."""
    holders = {Holder(name, share.uid) for name, share in standing.members.items()}
    holders |= {release.holder for release in standing.releasing.values()}
    there = {pod.holder for pod in it.snapshot.pods}
    return tuple(sorted(holder for holder in holders - there if holder.uid not in it.snapshot.gone))


def _deadlines(it: Situation, draft: Draft, standing: Assignment, found: Sequence[Verdict]) -> Iterator[float]:
    """Yield the seconds after which time alone may change the plan."""
    handover, triggers = it.policy.handover, it.policy.triggers
    yield triggers.resync
    limits = [problems.start_seconds_left(it), conditions.stall_seconds_left(it, found), *it.motion.values()]
    if draft.held and draft.held.seconds:
        limits.append(draft.held.seconds)
    if standing is it.snapshot.document:
        limits.append(_quiet_for(it))
    for pod in it.snapshot.pods:
        if not pod.ended and not pod.ready:
            limits += [triggers.unready_grace - pod.steady, handover.lost_after - pod.unheard]
        limits += [triggers.unready_grace - seconds for seconds in pod.cut_off.values()]
        limits.append(incarnations.seconds_left(pod, standing))
    limits += [SHRINK_PATIENCE - view.steady for view in it.snapshot.views.values() if view]
    limits += [given_up(handover) - record.ago(release.at, it.now) for release in standing.releasing.values()]
    yield from (seconds for seconds in limits if seconds > 0)
