"""What people are told: status and conditions, Events, journal records; all worded from one catalogue of reasons."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from rota.documents import Assignment
from rota.handover import Act, State
from rota.model import Holder, Queue, Reason, Use, Verdict
from rota.planner import record
from rota.planner.members import incarnations
from rota.planner.members.standings import Standing
from rota.planner.moves import Draft
from rota.planner.pokes import has_other_settings
from rota.planner.situation import Situation
from rota.planner.snapshot import Event
from rota.sentences import count, listed
from rota.timestamps import format_time

MOVING = (Act.REVOKE, Act.RETURN, Act.GRANT, Act.FORCE, Act.DROP)
# In addition to drainTimeout: a kubelet updates a mounted ConfigMap within this time even without a poke.
SETTINGS_PATIENCE_SECONDS = 90.0
FIRST_MEMBER_SECONDS = 60.0  # a new group reports NoMembers only after this time
SWIFT = 2.0  # seconds: a rebalance that is over so soon is one Event, not two
_REASONS = frozenset(map(str, Reason))  # a later sidecar may have others
NOTHING_KNOWN = Verdict(Reason.NO_VIEW, "No queue of the group is known yet")
_LEFT: Mapping[Standing | None, Reason] = {
    Standing.ENDED: Reason.MEMBER_ENDED,
    Standing.RESTARTING: Reason.MEMBER_RESTARTED,
    Standing.LOST: Reason.MEMBER_LOST,
    Standing.LEAVING: Reason.MEMBER_LEFT,
    Standing.OUT: Reason.MEMBER_UNREADY,
    Standing.CUT_OFF: Reason.BROKER_UNREACHABLE,
}
_TOLD = {
    Reason.MEMBER_ENDED: "{} ended",
    Reason.MEMBER_RESTARTED: "the sidecar of {} restarted",
    Reason.MEMBER_LOST: "{} {is} not ready and cannot be heard",
    Reason.MEMBER_LEFT: "{} {is} leaving",
    Reason.MEMBER_UNREADY: "{} {has} not been ready for longer than {its} grace",
    Reason.BROKER_UNREACHABLE: "{} cannot reach a broker that others reach",
    Reason.MEMBER_JOINED: "{} joined",
}


def cause(it: Situation, draft: Draft) -> Verdict:
    """Say why queues change hands now: the first thing that the record does not know yet."""
    if it.snapshot.spec and it.snapshot.spec.paused:
        return Verdict(Reason.GROUP_PAUSED, "The group is paused")
    if it.snapshot.is_duplicate:
        return Verdict(Reason.CLAIMED_TWICE, "An older ConsumerGroup has the same consumer group")
    if not it.owned and not it.document.releasing:
        resumed = it.document.generation > 1 and not it.document.barrier
        told = (Reason.GROUP_RESUMED, "Nobody owned a queue") if resumed else (Reason.FIRST_ASSIGNMENT, "A new group")
        return Verdict(*told)
    return _of_leavers(it) or _of_foreigners(it) or _of_queues(it) or _of_joiners(it) or _of_rules(it, draft)


def _of_leavers(it: Situation) -> Verdict | None:
    holders = {*it.owned.values(), *(release.holder for release in it.document.releasing.values())}
    gone = {holder: _LEFT.get(_standing(it, holder)) for holder in holders}
    told = [
        _told(reason, names)
        for reason in _LEFT.values()
        if (names := sorted(holder.name for holder, why in gone.items() if why is reason))
    ]
    return Verdict(told[0].reason, "; ".join(it.message for it in told)) if told else None


def _standing(it: Situation, holder: Holder) -> Standing | None:
    """Return how a holder stands; of one that is only out of sight nothing is known."""
    if it.seen(holder).ended:
        return Standing.ENDED
    pod = it.pods.get(holder.name)
    if pod is None or pod.uid != holder.uid:
        return None
    has_restarted = it.standings[pod.name].counts and incarnations.has_restarted(it.document, pod)
    return Standing.RESTARTING if has_restarted else it.standings[pod.name]


def _of_foreigners(it: Situation) -> Verdict | None:
    """Return that unmanaged consumers came or went: their queues, in no assignment, would look like new ones."""
    there, told = it.snapshot.foreigners, it.snapshot.status.get("conditions") or []
    were = any(one["type"] == str(Reason.FOREIGN_MEMBERS) for one in told)
    if there is None or bool(there) == were:
        return None
    gone = "No consumer that is not Rota's is in the group any more: the policy shares all queues again"
    return Verdict(Reason.FOREIGN_MEMBERS, foreign(there) if there else gone)


def _of_queues(it: Situation) -> Verdict | None:
    known, wanted = {queue for topic in it.on_record.values() for queue in topic}, set(it.queues)
    added, removed = set() if it.snapshot.foreigners else wanted - known, known - wanted
    if added and {queue.topic for queue in added} <= {*it.on_record, it.retries}:
        return Verdict(Reason.QUEUES_ADDED, f"{count(len(added), 'queue')} more: {_some(added)}")
    topics = {queue.topic for queue in wanted}
    if removed and {queue.topic for queue in removed} <= topics:
        return Verdict(Reason.QUEUES_REMOVED, f"{count(len(removed), 'queue')} less: {_some(removed)}")
    if added or removed:
        return Verdict(Reason.SUBSCRIPTION_CHANGED, f"The subscription is now {listed(sorted(topics))}")
    return None


def _of_joiners(it: Situation) -> Verdict | None:
    working = set(it.owned.values())
    names = [name for name in it.counted if it.pods[name].holder not in working]
    return _told(Reason.MEMBER_JOINED, names) if names else None


def _of_rules(it: Situation, draft: Draft) -> Verdict:
    moving = [one for one in draft.decisions if one.act in MOVING]
    if it.snapshot.foreigners and (moving or draft.strategy != it.document.strategy):
        return Verdict(Reason.FOREIGN_MEMBERS, foreign(it.snapshot.foreigners))
    if draft.strategy != it.document.strategy:
        return Verdict(Reason.POLICY_CHANGED, f"The strategy is now {draft.strategy}")
    if moving:
        begun = _begun(it) if all(one.state is State.RELEASING for one in moving) else None
        if begun:  # nothing new: what was taken then is given now
            return Verdict(begun, f"What {begun} began goes on")
        return Verdict(Reason.LOAD_SHIFTED, "What queues weigh, or who is where, has changed")
    return Verdict(Reason.SETTINGS_CHANGED, "The group's settings or members changed; no queue moves")


def _begun(it: Situation) -> Reason | None:
    """Return why the rebalance began that is still under way."""
    last = it.snapshot.status.get("lastRebalance") or {}
    reason = str(last.get("reason"))
    return Reason(reason) if reason in _REASONS and "seconds" not in last else None


def foreign(ids: Sequence[str]) -> str:
    """Say who else is there."""
    who = "1 consumer that is not Rota's is" if len(ids) == 1 else f"{len(ids)} consumers that are not Rota's are"
    return f"{who} in the group: {listed(ids)}; queues are shared as they do it"


def problems(it: Situation, draft: Draft, unowned: int) -> list[Verdict]:
    """Return everything that is wrong, worst first."""
    found = [*it.snapshot.problems, *([draft.problem] if draft.problem else [])]
    found += _troubles(it, {verdict.reason for verdict in found})
    if it.unseen:
        told = f"The broker does not tell of {listed(it.unseen)}; what was assigned stays"
        found.append(Verdict(Reason.NO_VIEW, told))
    if it.queues and not it.counted and not start_seconds_left(it):
        found.append(Verdict(Reason.NO_MEMBERS, _nobody(it)))
    elif unowned and it.counted:
        found.append(Verdict(Reason.QUEUES_UNOWNED, f"{count(unowned, 'queue')} that nobody works"))
    if it.snapshot.foreigners:
        found.append(Verdict(Reason.FOREIGN_MEMBERS, foreign(it.snapshot.foreigners)))
    return found


def idle_members(it: Situation, document: Assignment) -> int:
    """Return how many members own no queue; in Broadcasting groups none."""
    if document.everyone is not None:
        return 0
    owners = set((record.owners(document) if document is not it.document else it.owned).values())
    return sum(it.pods[name].holder not in owners for name in it.counted)


def idle_problem(it: Situation, idle: int) -> Verdict:
    """Return the problem of members without a queue."""
    are = "is" if idle == 1 else "are"
    told = f"{len(it.counted)} members share {count(len(it.queues), 'queue')}: {idle} of them {are} idle"
    return Verdict(Reason.IDLE_MEMBERS, told)


def count_in_transition(assignment: Assignment, waiting_members: int) -> int:
    """Return the number of queues in transition plus the number of members that have not obeyed yet."""
    return sum(release.to is not None for release in assignment.releasing.values()) + waiting_members


def start_seconds_left(it: Situation) -> float:
    """Return for how many seconds more a new group may be without a member; its pods need that to start."""
    if it.document.begun or it.snapshot.foreigners:  # a queue was assigned before, or unmanaged consumers have all
        return 0.0
    ready = next((one for one in it.snapshot.status.get("conditions") or [] if one["type"] == "Ready"), None)
    waited = record.ago(ready["lastTransitionTime"], it.now) if ready and ready["status"] == "False" else 0.0
    return max(0.0, FIRST_MEMBER_SECONDS - waited)


def _nobody(it: Situation) -> str:
    """Say that nobody counts; who is there, and cannot work, keeps what nobody is there to take over."""
    told = count(len(it.queues), "queue")
    if it.snapshot.foreigners:
        return f"Only foreigners are there to work {told}"
    there = [pod for pod in it.snapshot.pods if it.standings[pod.name] in {Standing.OUT, Standing.CUT_OFF}]
    if not there:
        return f"No member can work {told}{_obstacles(it)}" if _obstacles(it) else f"Nobody is there to work {told}"
    names = listed([pod.name for pod in there])
    reports = [pod.report.brokers for pod in there if pod.report]
    missed = sorted({broker for brokers in reports for broker, reached in brokers.items() if not reached})
    are = "is" if len(there) == 1 else "are"
    why = f"{names} cannot reach {listed(missed)}" if missed else f"{names} {are} not ready"
    return f"No member can work {told}: {why}; what was assigned stays"


def _troubles(it: Situation, known: Container[Reason]) -> list[Verdict]:
    """Return the problems that members report, except those that the operator has found itself.

    A sidecar of a later version may report a problem that this operator does not know.
    """
    told: dict[Reason, list[tuple[str, str]]] = {}
    for pod in it.snapshot.pods:
        for name, sentence in (pod.report.troubles if pod.report and not pod.ended else {}).items():
            reason = Reason(name) if name in _REASONS else Reason.MEMBER_PROBLEM
            if reason not in known:
                told.setdefault(reason, []).append((pod.name, sentence))
    return [
        Verdict(reason, f"{listed([name for name, _ in members])}: {members[0][1]}") for reason, members in told.items()
    ]


def status(
    it: Situation,
    draft: Draft,
    document: Assignment,
    *,
    progressing: tuple[bool, Verdict],
    moving: int,
    idle: int,
    unowned: int,
    found: Sequence[Verdict],
) -> dict[str, Any]:
    """Return the group's status; equal worlds give equal ones, so that it is written only when something changed."""
    snapshot = it.snapshot
    told = {
        "observedGeneration": snapshot.observed,
        "conditions": _conditions(it, found, progressing),
        "replicas": sum(not pod.ended for pod in snapshot.pods),
        "selector": f"rota.dev/group={snapshot.group.partition('/')[2]}",
        "members": len(it.counted),
        "queues": len(it.queues),
        # Never lower than it was: this is what tells that a record was lost, also while there is none.
        "generation": max(document.generation, record.believed(snapshot.status.get("generation"))),
        "strategy": document.strategy or None,
        "lag": snapshot.lag,
        "lastRebalance": _last_rebalance(it, draft, settled=not moving),
        "idleMembers": idle,
        "unownedQueues": unowned,
    }
    return {name: value for name, value in told.items() if value is not None}


def members_with_old_settings(it: Situation, settings: str, age: float) -> tuple[list[str], list[str]]:
    """Return the names of members that do not use these settings yet: as late ones, or, while these are new, second."""
    members = [it.pods[name] for name in it.counted if has_other_settings(it.pods[name], settings)]
    patience = it.policy.handover.drain_timeout + SETTINGS_PATIENCE_SECONDS
    names = [pod.name for pod in members]
    return (names, []) if age > patience else ([], names)


def late_members_problem(late: Sequence[str]) -> list[Verdict]:
    """Return the problem of members that still use old settings long after the change."""
    if not late:
        return []
    told = f"{listed(late)} still {'uses' if len(late) == 1 else 'use'} old settings, long after the change"
    return [Verdict(Reason.SETTINGS_NOT_OBEYED, told)]


def progress(
    it: Situation, draft: Draft, found: Sequence[Verdict], moving: int, awaiting: Sequence[str] = ()
) -> tuple[bool, Verdict]:
    """Return whether queues change hands or are about to, and why or why not.

    `awaiting` names members with old settings.
    """
    if moving:
        return True, Verdict(Reason.HANDOVER_IN_FLIGHT, _under_way(moving))
    if without_members := _progress_without_members(it, found):
        return without_members
    if draft.held and draft.held.reason is not Reason.NOTHING_WOULD_CHANGE:
        frozen = draft.held.reason in {Reason.PAUSED, Reason.NO_VIEW, Reason.INVALID_POLICY}
        frozen |= draft.held.reason is Reason.BUDGET_SPENT and draft.held.seconds is None
        missing = any(verdict.reason is Reason.MISSING_POLICY for verdict in it.snapshot.problems)
        reason = Reason.MISSING_POLICY if missing and frozen else draft.held.reason
        return not frozen, Verdict(reason, draft.held.message)
    if awaiting:
        told = f"{listed(awaiting)} {'does' if len(awaiting) == 1 else 'do'} not use the group's new settings yet"
        return True, Verdict(Reason.SETTINGS_NOT_OBEYED, told)
    return False, Verdict(Reason.SETTLED, "Every queue is where the policy wants it")


def _progress_without_members(it: Situation, found: Sequence[Verdict]) -> tuple[bool, Verdict] | None:
    """Return the progress of a group without queues or members; None if it has both."""
    if not it.queues:
        return False, NOTHING_KNOWN
    if _is_starting(it):
        return True, _no_member_yet(it)
    nobody = next((verdict for verdict in found if verdict.reason is Reason.NO_MEMBERS), None)
    return (False, nobody) if nobody else None


def _ready(it: Situation, found: Sequence[Verdict]) -> tuple[bool, Verdict]:
    if it.snapshot.spec is None:
        return False, next(iter(found), Verdict(Reason.INVALID_SPEC, "The group cannot be understood"))
    if it.snapshot.spec.paused:
        return False, Verdict(Reason.GROUP_PAUSED, "spec.paused is set: nobody consumes")
    if _is_starting(it):
        return False, _no_member_yet(it)
    stopped = next((verdict for verdict in found if Use.NOT_READY in verdict.reason.use), None)
    if stopped:
        return False, stopped
    if not it.queues:
        return False, next((verdict for verdict in found if Use.HARMLESS not in verdict.reason.use), NOTHING_KNOWN)
    return True, Verdict(Reason.SETTLED, f"{count(len(it.queues), 'queue')}, {count(len(it.counted), 'member')}")


def _is_starting(it: Situation) -> bool:
    return bool(it.queues) and not it.counted and start_seconds_left(it) > 0


def _no_member_yet(it: Situation) -> Verdict:
    told = f"{count(len(it.queues), 'queue')} wait for the group's first member{_obstacles(it)}"
    return Verdict(Reason.MEMBERS_STILL_JOINING, told)


def _obstacles(it: Situation) -> str:
    """Return what keeps pods from running, by the first that says something; empty if none does."""
    stuck = [pod for pod in it.snapshot.pods if pod.obstacle and not pod.ended]
    if not stuck:
        return ""
    names = [pod.name for pod in stuck if pod.obstacle == stuck[0].obstacle]
    return f": {listed(names)} {'does' if len(names) == 1 else 'do'} not run: {stuck[0].obstacle}"


def _conditions(it: Situation, found: Sequence[Verdict], progress: tuple[bool, Verdict]) -> list[dict[str, Any]]:
    harmful = [verdict for verdict in found if Use.HARMLESS not in verdict.reason.use]
    well = Verdict(Reason.SETTLED, "Nothing is wrong")
    worst = Verdict(harmful[0].reason, "; ".join(verdict.message for verdict in harmful)) if harmful else well
    now = [("Ready", *_ready(it, found)), ("Progressing", *progress), ("Degraded", bool(harmful), worst)]
    first_of_each = {verdict.reason: verdict for verdict in reversed(found)}
    now += [(str(reason), True, verdict) for reason, verdict in sorted(first_of_each.items())]
    before = {condition["type"]: condition for condition in it.snapshot.status.get("conditions") or []}
    return [_condition(before.get(kind, {}), kind, verdict, holds=holds, it=it) for kind, holds, verdict in now]


def _condition(before: Mapping[str, Any], kind: str, verdict: Verdict, *, holds: bool, it: Situation) -> dict[str, Any]:
    state = str(holds)
    since = before.get("lastTransitionTime") if before.get("status") == state else None
    return {
        "type": kind,
        "status": state,
        "reason": str(verdict.reason),
        "message": verdict.message,
        "lastTransitionTime": since or format_time(it.now),
        "observedGeneration": it.snapshot.observed,
    }


def _last_rebalance(it: Situation, draft: Draft, *, settled: bool) -> dict[str, Any] | None:
    """Carry the last rebalance on: begun by a document, over when everybody obeys; then it has its `seconds`."""
    last: dict[str, Any] | None = it.snapshot.status.get("lastRebalance")
    moved = len(draft.of(Act.GRANT, Act.FORCE))
    if draft.of(*MOVING):
        if last and "seconds" not in last:
            return {**last, "moved": last["moved"] + moved}
        return {"reason": str(cause(it, draft).reason), "at": format_time(it.now), "moved": moved}
    if last and "seconds" not in last and settled:
        return {**last, "seconds": round(max(record.ago(last["at"], it.now), 0.0), 3)}
    return last


def events(it: Situation, draft: Draft, status_now: Mapping[str, Any], found: Sequence[Verdict]) -> list[Event]:
    """Return what `kubectl describe` shows: few, each for something that was not so before."""
    told = []
    last, before = status_now.get("lastRebalance"), it.snapshot.status.get("lastRebalance")
    if draft.of(*MOVING) and last and (not before or last["at"] != before["at"]):
        why = cause(it, draft)
        moving = len(draft.of(Act.REVOKE, Act.GRANT, Act.FORCE))
        told.append(Event(why.reason, f"{why.message}; {count(moving, 'queue')} change{'s' * (moving == 1)} hands"))
    if last and before and "seconds" in last and "seconds" not in before and last["seconds"] >= SWIFT:
        told.append(
            Event(Reason.SETTLED, f"{last['reason']}: {count(last['moved'], 'queue')} moved in {last['seconds']:g} s")
        )
    forced = draft.of(Act.FORCE)
    if forced:
        names = listed(sorted({one.holder.name for one in forced if one.holder}) or ["a member"])
        told.append(
            Event(Reason.QUEUES_FORCED, f"{count(len(forced), 'queue')} taken from {names} unheard", warning=True)
        )
    known = {condition["type"] for condition in it.snapshot.status.get("conditions") or []}
    fresh = {verdict.reason: verdict for verdict in reversed(found) if str(verdict.reason) not in known}
    told += [Event(*verdict, warning=Use.HARMLESS not in verdict.reason.use) for verdict in fresh.values()]
    return told


def _under_way(many: int) -> str:
    return "1 queue or member is under way" if many == 1 else f"{many} queues or members are under way"


def _told(reason: Reason, names: Sequence[str]) -> Verdict:
    one, several = {"is": "is", "has": "has", "its": "its"}, {"is": "are", "has": "have", "its": "their"}
    return Verdict(reason, _TOLD[reason].format(listed(names), **(one if len(names) == 1 else several)))


def _some(queues: Iterable[Queue]) -> str:
    return listed([str(queue) for queue in sorted(queues)])
