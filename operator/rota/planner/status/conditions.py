"""The conditions of a group's status.

These conditions always exist:

- `Ready`, `Progressing` and `Degraded`;
- `Reconciling` and `Stalled`, which Flux and Helm read through kstatus, and Argo CD through the script of
  docs/gitops.md.

Each problem is also a condition, with its reason as type. When a problem is over, its condition stays, with status
False. So readers must look at a condition's status: its presence does not mean that the problem exists.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rota.model import Finding, Reason, ReasonKind, reason_named
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.status import problems
from rota.sentences import join_names, pluralize

MAX_PAST_PROBLEMS = 10  # conditions of problems that are over; the oldest ones are dropped
# A problem that only a user can fix makes the group Stalled after this time. Until then the group is Reconciling: a
# missing object may be created a moment later, by the same commit.
STALL_SECONDS = 60.0
DERIVED_CONDITIONS = {"Reconciling", "Stalled"}  # they follow from Progressing and the problems' conditions
# Reasons of Progressing with which the group is also Reconciling. BudgetSpent is not among them, although queues still
# have to move: that may take hours.
_RECONCILING_REASONS = {
    Reason.HANDOVER_IN_FLIGHT,
    Reason.MEMBERS_STILL_JOINING,
    Reason.SETTINGS_NOT_OBEYED,
    Reason.DEBOUNCE,
}
_NO_QUEUES_KNOWN = Finding(Reason.BROKER_METADATA_UNAVAILABLE, "No queue of the group is known yet")
_NO_PROBLEM = Finding(Reason.SETTLED, "No problems")


class GroupProgress(NamedTuple):
    """The condition Progressing: whether queues change hands, or will without a user's action; and why or why not."""

    finding: Finding
    is_active: bool


class Condition(NamedTuple):
    """A condition as it is now, without its time of transition."""

    type: str
    finding: Finding
    holds: bool = True


def find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Return the condition of this type; None if the status has none with status True."""
    conditions: Sequence[Mapping[str, Any]] = status.get("conditions") or ()
    for condition in conditions:
        if (condition["type"], condition["status"]) == (kind, "True"):
            return condition
    return None


def has_condition(status: Mapping[str, Any], kind: str) -> bool:
    """Return whether a status has this condition with status True."""
    return find_condition(status, kind) is not None


def build_conditions(
    situation: Situation, findings: Sequence[Finding], progress: GroupProgress, *, is_complete: bool
) -> list[dict[str, Any]]:
    """Return the group's conditions: the fixed ones, present problems by name, then past problems, the latest first.

    `is_complete`: whether every problem was looked for. If not, published problems that were not found stay: they may
    still exist.
    """
    prior = situation.snapshot.published_conditions
    if not is_complete:
        findings = [*findings, *_unchecked_problems(prior.values(), findings)]
    stalled = _problems_condition("Stalled", [finding for finding in findings if _is_stalling(situation, finding)])
    current = [
        _ready(situation, findings),
        Condition("Progressing", progress.finding, holds=progress.is_active),
        _problems_condition("Degraded", [finding for finding in findings if finding.is_harmful]),
        _reconciling(situation, findings, progress, stalled),
        stalled,
        *(Condition(str(finding.reason), finding) for finding in sorted(first_of_each_reason(findings))),
    ]
    bodies = [_condition_body(condition, prior.get(condition.type, {}), situation) for condition in current]
    return bodies + _past_problems(situation, prior.values(), {condition.type for condition in current})


def first_of_each_reason(findings: Sequence[Finding]) -> Iterable[Finding]:
    """Return the first finding of each reason; the reasons that were found last come first."""
    return {finding.reason: finding for finding in reversed(findings)}.values()


def stall_seconds_left(situation: Situation, findings: Sequence[Finding]) -> float:
    """Return the seconds until the next problem has lasted for STALL_SECONDS; 0 if no problem is about to.

    From that moment on the group is Stalled; with BrokerMetadataUnavailable it is only no longer Reconciling.
    """
    seconds_left = []
    for finding in filter(_is_reconciling_at_first, findings):
        seconds = _seconds_published(situation, finding)
        if seconds < STALL_SECONDS:
            seconds_left.append(STALL_SECONDS - seconds)
    return min(seconds_left, default=0.0)


def compute_progress(
    situation: Situation, draft: Draft, findings: Sequence[Finding], moving: int, outdated_members: Sequence[str] = ()
) -> GroupProgress:
    """Return the group's progress.

    `moving` is the number of queues and members in transition, `outdated_members` use old settings.
    """
    if moving:
        subject = "1 queue or member is" if moving == 1 else f"{moving} queues or members are"
        return GroupProgress(Finding(Reason.HANDOVER_IN_FLIGHT, f"{subject} in transition"), is_active=True)
    if without_members := _progress_without_members(situation, findings):
        return without_members
    if draft.hold and draft.hold.reason is not Reason.NOTHING_WOULD_CHANGE:
        is_lasting = draft.hold.seconds_left is None  # only a user or a broker can end the hold
        is_policy_missing = Reason.MISSING_POLICY in situation.snapshot.problem_reasons  # a more exact reason
        reason = Reason.MISSING_POLICY if is_policy_missing and is_lasting else draft.hold.reason
        return GroupProgress(Finding(reason, draft.hold.message), is_active=not is_lasting)
    if outdated_members:
        verb = "does" if len(outdated_members) == 1 else "do"
        message = f"{join_names(outdated_members)} {verb} not use the group's new settings yet"
        return GroupProgress(Finding(Reason.SETTINGS_NOT_OBEYED, message), is_active=True)
    return GroupProgress(
        Finding(Reason.SETTLED, "Every queue is with the member that the policy chooses"), is_active=False
    )


def _progress_without_members(situation: Situation, findings: Sequence[Finding]) -> GroupProgress | None:
    """Return the progress of a group without queues or members; None if it has both."""
    if not situation.queues:
        return GroupProgress(_NO_QUEUES_KNOWN, is_active=False)
    if _is_starting(situation):
        return GroupProgress(_first_member_awaited(situation), is_active=True)
    no_members = next((finding for finding in findings if finding.reason is Reason.NO_MEMBERS), None)
    return GroupProgress(no_members, is_active=False) if no_members else None


def _ready(situation: Situation, findings: Sequence[Finding]) -> Condition:
    spec = situation.snapshot.spec
    if spec and spec.paused:  # like 0 replicas, this is what the user wants: Ready once all queues are released
        document = situation.document
        is_released = not (situation.owners or document.releasing or document.everyone)
        return Condition("Ready", Finding(Reason.GROUP_PAUSED, "spec.paused is set: no member consumes"), is_released)
    if obstacle := _why_not_ready(situation, findings):
        return Condition("Ready", obstacle, holds=False)
    sizes = f"{pluralize(len(situation.queues), 'queue')}, {pluralize(len(situation.counted_members), 'member')}"
    return Condition("Ready", Finding(Reason.SETTLED, sizes))


def _why_not_ready(situation: Situation, findings: Sequence[Finding]) -> Finding | None:
    if situation.snapshot.spec is None:
        return next(iter(findings), Finding(Reason.INVALID_SPEC, "The group's spec is invalid"))
    if _is_starting(situation):
        return _first_member_awaited(situation)
    for finding in findings:
        if ReasonKind.NOT_READY in finding.reason.kinds:
            return finding
    if situation.queues:
        return None
    return next((finding for finding in findings if finding.is_harmful), _NO_QUEUES_KNOWN)


def _is_starting(situation: Situation) -> bool:
    return bool(situation.queues) and not situation.counted_members and problems.start_seconds_left(situation) > 0


def _first_member_awaited(situation: Situation) -> Finding:
    message = f"{pluralize(len(situation.queues), 'queue')} wait for the group's first member"
    obstacles = problems.describe_obstacles(situation)
    return Finding(Reason.MEMBERS_STILL_JOINING, f"{message}: {obstacles}" if obstacles else message)


def _problems_condition(kind: str, findings: Sequence[Finding]) -> Condition:
    """Return a condition that holds while there are such problems."""
    return Condition(kind, problems.join_findings(findings) if findings else _NO_PROBLEM, holds=bool(findings))


def _reconciling(
    situation: Situation, findings: Sequence[Finding], progress: GroupProgress, stalled: Condition
) -> Condition:
    if stalled.holds:  # the two exclude each other
        return Condition("Reconciling", Finding(Reason.SETTLED, "The group is stalled"), holds=False)
    if progress.finding.reason in _RECONCILING_REASONS:
        return Condition("Reconciling", progress.finding)
    if _is_rolling_out(situation):
        return Condition("Reconciling", Finding(Reason.ROLLING_OUT, "The group's Deployment is being rolled out"))
    for finding in findings:
        if _is_reconciling_at_first(finding) and _seconds_published(situation, finding) < STALL_SECONDS:
            return Condition("Reconciling", finding)
    return Condition("Reconciling", Finding(Reason.SETTLED, "No change is in progress"), holds=False)


def _is_rolling_out(situation: Situation) -> bool:
    """Return whether the group's Deployment is being rolled out, or will be, as a new spec was not applied yet.

    A new leader has applied no Deployment yet, not even those of unchanged specs. Until it has, Reconciling stays as it
    is published.
    """
    snapshot = situation.snapshot
    if snapshot.rolling_out is not None:
        return snapshot.rolling_out
    # The status has the metadata.generation that the previous plan was made for.
    is_new_spec = snapshot.status.get("observedGeneration") != snapshot.observed_generation
    return is_new_spec or has_condition(snapshot.status, "Reconciling")


def _is_reconciling_at_first(problem: Finding) -> bool:
    """Return whether a group with this problem is Reconciling for the first STALL_SECONDS."""
    return ReasonKind.STALLS in problem.reason.kinds or problem.reason is Reason.BROKER_METADATA_UNAVAILABLE


def _is_stalling(situation: Situation, problem: Finding) -> bool:
    return ReasonKind.STALLS in problem.reason.kinds and _seconds_published(situation, problem) >= STALL_SECONDS


def _seconds_published(situation: Situation, finding: Finding) -> float:
    """Return how long the status has named a problem."""
    condition = find_condition(situation.snapshot.status, finding.reason)
    return max(0.0, situation.seconds_since(condition["lastTransitionTime"])) if condition else 0.0


def _unchecked_problems(prior: Iterable[Mapping[str, Any]], findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the published problems that are not in `findings`: the plan may not have looked for them."""
    current = {finding.reason for finding in findings}
    for condition in prior:
        reason = reason_named(condition["type"])
        if reason and condition["status"] == "True" and reason not in current:
            yield Finding(reason, condition["message"])


def _past_problems(situation: Situation, prior: Iterable[Mapping[str, Any]], current: set[str]) -> list[dict[str, Any]]:
    """Return the conditions of problems that are over, the latest first."""
    past = []
    for condition in prior:
        if condition["type"] in current:
            continue
        if condition["status"] == "True":
            over = Finding(Reason.SETTLED, f"Resolved. The last message was: {condition['message']}")
            past.append(_condition_body(Condition(condition["type"], over, holds=False), condition, situation))
        else:
            past.append({**condition, "observedGeneration": situation.snapshot.observed_generation})
    # Conditions with the same time stay in the order of their types.
    past.sort(key=lambda condition: condition["type"])
    past.sort(key=lambda condition: condition["lastTransitionTime"], reverse=True)
    return past[:MAX_PAST_PROBLEMS]


def _condition_body(condition: Condition, prior: Mapping[str, Any], situation: Situation) -> dict[str, Any]:
    status = str(condition.holds)
    since = prior.get("lastTransitionTime") if prior.get("status") == status else None
    return {
        "type": condition.type,
        "status": status,
        "reason": str(condition.finding.reason),
        "message": condition.finding.message,
        "lastTransitionTime": since or situation.formatted_now,
        "observedGeneration": situation.snapshot.observed_generation,
    }
