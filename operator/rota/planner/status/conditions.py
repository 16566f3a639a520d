"""The conditions of a group's status.

`Ready`, `Progressing` and `Degraded` are always there, and so are `Reconciling` and `Stalled`, which Flux and Helm read
through kstatus, and Argo CD through the script of docs/gitops.md. Each problem is also a condition, with its reason as
type. When a problem is over, its condition stays with status False; a reader has to compare a condition's status, not
its presence.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rota.model import Reason, Use, Verdict, reason_named
from rota.planner import record
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.status import problems
from rota.sentences import count, listed
from rota.timestamps import format_time

PAST_PROBLEMS = 10  # conditions of problems that are over; the oldest ones are dropped
# A problem that only a user can fix makes the group Stalled after this time. Until then the group is Reconciling: what
# is missing may be created a moment later, by the same commit.
STALL_SECONDS = 60.0
DERIVED = {"Reconciling", "Stalled"}  # they repeat what Progressing and the problems' conditions report
# Not BudgetSpent: the moves that are left may take hours.
_RECONCILING = {
    Reason.HANDOVER_IN_FLIGHT,
    Reason.MEMBERS_STILL_JOINING,
    Reason.SETTINGS_NOT_OBEYED,
    Reason.DEBOUNCE,
}
_NOTHING_KNOWN = Verdict(Reason.NO_VIEW, "No queue of the group is known yet")
_WELL = Verdict(Reason.SETTLED, "Nothing is wrong")


class Condition(NamedTuple):
    """A condition as it is now, without its times."""

    type: str
    verdict: Verdict
    holds: bool = True


def present(status: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Return the condition of this type; None if the status has none with status True."""
    conditions: Sequence[Mapping[str, Any]] = status.get("conditions") or ()
    return next((it for it in conditions if it["type"] == kind and it["status"] == "True"), None)


def holds(status: Mapping[str, Any], kind: str) -> bool:
    """Return whether a status has this condition with status True."""
    return present(status, kind) is not None


def conditions(
    it: Situation, found: Sequence[Verdict], progress: tuple[bool, Verdict], *, whole: bool
) -> list[dict[str, Any]]:
    """Return the group's conditions: the fixed ones, present problems by name, then past problems, the latest first.

    `whole`: every problem was looked for. Otherwise published problems that were not found may still be there.
    """
    before = {condition["type"]: condition for condition in it.snapshot.status.get("conditions") or []}
    if not whole:
        found = [*found, *_not_looked_for(before.values(), found)]
    stalled = _stalled(it, found)
    first_of_each = {verdict.reason: verdict for verdict in reversed(found)}
    current = [
        _ready(it, found),
        _progressing(progress),
        _degraded(found),
        _reconciling(it, found, progress, stalled),
        stalled,
        *(Condition(str(reason), verdict=verdict) for reason, verdict in sorted(first_of_each.items())),
    ]
    published = [_publish(condition, before.get(condition.type, {}), it) for condition in current]
    return published + _past_problems(it, before.values(), {condition.type for condition in current})


def stall_seconds_left(it: Situation, found: Sequence[Verdict]) -> float:
    """Return after how many seconds a present problem makes the group Stalled; 0 if none does, or it already is."""
    waits = [STALL_SECONDS - _seconds_of(it, verdict) for verdict in found if _is_reconciling_at_first(verdict)]
    return min((seconds for seconds in waits if seconds > 0), default=0.0)


def progress(
    it: Situation, draft: Draft, found: Sequence[Verdict], moving: int, awaiting: Sequence[str] = ()
) -> tuple[bool, Verdict]:
    """Return whether queues change hands or are about to, and why or why not.

    `awaiting` names members with old settings.
    """
    if moving:
        under_way = "1 queue or member is" if moving == 1 else f"{moving} queues or members are"
        return True, Verdict(Reason.HANDOVER_IN_FLIGHT, f"{under_way} under way")
    if without_members := _progress_without_members(it, found):
        return without_members
    if draft.held and draft.held.reason is not Reason.NOTHING_WOULD_CHANGE:
        frozen = draft.held.reason in {Reason.PAUSED, Reason.NO_VIEW, Reason.INVALID_POLICY}
        frozen |= draft.held.reason is Reason.BUDGET_SPENT and draft.held.seconds is None
        missing = any(verdict.reason is Reason.MISSING_POLICY for verdict in it.snapshot.problems)
        reason = Reason.MISSING_POLICY if missing and frozen else draft.held.reason
        return not frozen, Verdict(reason, draft.held.message)
    if awaiting:
        message = f"{listed(awaiting)} {'does' if len(awaiting) == 1 else 'do'} not use the group's new settings yet"
        return True, Verdict(Reason.SETTINGS_NOT_OBEYED, message)
    return False, Verdict(Reason.SETTLED, "Every queue is where the policy wants it")


def _progress_without_members(it: Situation, found: Sequence[Verdict]) -> tuple[bool, Verdict] | None:
    """Return the progress of a group without queues or members; None if it has both."""
    if not it.queues:
        return False, _NOTHING_KNOWN
    if _is_starting(it):
        return True, _no_member_yet(it)
    no_members = next((verdict for verdict in found if verdict.reason is Reason.NO_MEMBERS), None)
    return (False, no_members) if no_members else None


def _ready(it: Situation, found: Sequence[Verdict]) -> Condition:
    if obstacle := _why_not_ready(it, found):
        return Condition("Ready", obstacle, holds=False)
    sizes = f"{count(len(it.queues), 'queue')}, {count(len(it.counted), 'member')}"
    return Condition("Ready", Verdict(Reason.SETTLED, sizes))


def _why_not_ready(it: Situation, found: Sequence[Verdict]) -> Verdict | None:
    if it.snapshot.spec is None:
        return next(iter(found), Verdict(Reason.INVALID_SPEC, "The group cannot be understood"))
    if it.snapshot.spec.paused:
        return Verdict(Reason.GROUP_PAUSED, "spec.paused is set: nobody consumes")
    if _is_starting(it):
        return _no_member_yet(it)
    stopped = next((verdict for verdict in found if Use.NOT_READY in verdict.reason.use), None)
    if stopped or it.queues:
        return stopped
    return next((verdict for verdict in found if Use.HARMLESS not in verdict.reason.use), _NOTHING_KNOWN)


def _is_starting(it: Situation) -> bool:
    return bool(it.queues) and not it.counted and problems.start_seconds_left(it) > 0


def _no_member_yet(it: Situation) -> Verdict:
    message = f"{count(len(it.queues), 'queue')} wait for the group's first member{problems.describe_obstacles(it)}"
    return Verdict(Reason.MEMBERS_STILL_JOINING, message)


def _progressing(progress: tuple[bool, Verdict]) -> Condition:
    is_progressing, verdict = progress
    return Condition("Progressing", verdict, holds=is_progressing)


def _degraded(found: Sequence[Verdict]) -> Condition:
    harmful = [verdict for verdict in found if Use.HARMLESS not in verdict.reason.use]
    return Condition("Degraded", _summary(harmful), holds=bool(harmful))


def _reconciling(
    it: Situation, found: Sequence[Verdict], progress: tuple[bool, Verdict], stalled: Condition
) -> Condition:
    if stalled.holds:  # the two exclude each other
        return Condition("Reconciling", Verdict(Reason.SETTLED, "The group is stalled"), holds=False)
    is_progressing, verdict = progress
    if is_progressing and verdict.reason in _RECONCILING:
        return Condition("Reconciling", verdict)
    fresh = [
        problem for problem in found if _is_reconciling_at_first(problem) and _seconds_of(it, problem) < STALL_SECONDS
    ]
    if fresh:
        return Condition("Reconciling", fresh[0])
    return Condition("Reconciling", Verdict(Reason.SETTLED, "No change is under way"), holds=False)


def _is_reconciling_at_first(problem: Verdict) -> bool:
    """Return whether a group with this problem is Reconciling for the first STALL_SECONDS."""
    return Use.STALLS in problem.reason.use or problem.reason is Reason.NO_VIEW


def _stalled(it: Situation, found: Sequence[Verdict]) -> Condition:
    stalling = [verdict for verdict in found if Use.STALLS in verdict.reason.use]
    lasting = [verdict for verdict in stalling if _seconds_of(it, verdict) >= STALL_SECONDS]
    return Condition("Stalled", _summary(lasting), holds=bool(lasting))


def _summary(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the first reason with the messages of all."""
    if not verdicts:
        return _WELL
    return Verdict(verdicts[0].reason, "; ".join(verdict.message for verdict in verdicts))


def _seconds_of(it: Situation, verdict: Verdict) -> float:
    """Return how long the status has named a problem."""
    condition = present(it.snapshot.status, verdict.reason)
    return max(0.0, record.ago(condition["lastTransitionTime"], it.now)) if condition else 0.0


def _not_looked_for(before: Iterable[Mapping[str, Any]], found: Sequence[Verdict]) -> list[Verdict]:
    """Return the published problems that a plan did not look for, which therefore are not over."""
    present = {str(verdict.reason) for verdict in found}
    return [
        Verdict(reason, condition["message"])
        for condition in before
        if condition["status"] == "True"
        and condition["type"] not in present
        and (reason := reason_named(condition["type"]))
    ]


def _past_problems(it: Situation, before: Iterable[Mapping[str, Any]], current: set[str]) -> list[dict[str, Any]]:
    """Return the conditions of problems that are over, the latest first."""
    past = []
    for condition in before:
        if condition["type"] in current:
            continue
        if condition["status"] == "True":
            over = Verdict(Reason.SETTLED, f"Resolved. The last message was: {condition['message']}")
            past.append(_publish(Condition(condition["type"], over, holds=False), condition, it))
        else:
            past.append({**condition, "observedGeneration": it.snapshot.observed})
    past.sort(key=lambda condition: condition["type"])
    past.sort(key=lambda condition: condition["lastTransitionTime"], reverse=True)
    return past[:PAST_PROBLEMS]


def _publish(condition: Condition, before: Mapping[str, Any], it: Situation) -> dict[str, Any]:
    status = str(condition.holds)
    since = before.get("lastTransitionTime") if before.get("status") == status else None
    return {
        "type": condition.type,
        "status": status,
        "reason": str(condition.verdict.reason),
        "message": condition.verdict.message,
        "lastTransitionTime": since or format_time(it.now),
        "observedGeneration": it.snapshot.observed,
    }
