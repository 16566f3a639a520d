"""Problems of a group, each with its reason and a sentence.

Causes come before their consequences: first problems that keep the operator from reading or planning, then problems of
members, then queues without an owner. The condition `Degraded` has the reason of the first problem that is not harmless
(`ReasonKind.HARMLESS`): users should solve this one first.
"""

from collections.abc import Container, Sequence

from rota.model import Finding, Reason, reason_named
from rota.planner.members.member_states import MemberState
from rota.planner.moves import Draft
from rota.planner.pokes import has_other_settings
from rota.planner.situation import Situation
from rota.sentences import join_names, pluralize

# Time for members to use new settings, beyond drainTimeout: even without a poke, a kubelet has updated the volume then.
SETTINGS_PATIENCE_SECONDS = 90.0
FIRST_MEMBER_SECONDS = 60.0  # a new group reports NoMembers only after this time

# Names that sidecars of earlier versions report, and the present reasons.
_FORMER_NAMES = {
    "MessageNotTakenBack": Reason.RETRY_REJECTED,
    "PullNotAnswered": Reason.PULL_PORT_UNAVAILABLE,
    "QueuesNotTakenUp": Reason.QUEUE_START_FAILED,
    "SettingsNotRead": Reason.UNSUPPORTED_SETTINGS,
    "StateNotWritten": Reason.STATE_WRITE_FAILED,
}


def find_problems(situation: Situation, draft: Draft, unowned: int) -> list[Finding]:
    """Return all problems, causes before consequences; `unowned` is the number of queues without an owner."""
    findings = [*situation.snapshot.problems]
    if draft.problem:
        findings.append(draft.problem)
    if situation.subscribed.missing_metadata:
        names = join_names(situation.subscribed.missing_metadata)
        message = f"The broker returned no metadata of {names}; the present assignment stays in force"
        findings.append(Finding(Reason.BROKER_METADATA_UNAVAILABLE, message))
    findings += _member_problems(situation, {finding.reason for finding in findings})
    if situation.queues and not situation.counted_members and not start_seconds_left(situation):
        findings.append(Finding(Reason.NO_MEMBERS, _describe_no_members(situation)))
    elif unowned and situation.counted_members:
        findings.append(Finding(Reason.QUEUES_UNOWNED, f"{pluralize(unowned, 'queue')} without an owner"))
    if situation.snapshot.unmanaged_consumers:
        findings.append(Finding(Reason.UNMANAGED_CONSUMERS, describe_unmanaged(situation.snapshot.unmanaged_consumers)))
    return findings


def join_findings(findings: Sequence[Finding]) -> Finding:
    """Return one finding: the reason of the first one, with the messages of all."""
    return Finding(findings[0].reason, "; ".join(finding.message for finding in findings))


def describe_unmanaged(ids: Sequence[str]) -> str:
    """Return the sentence about unmanaged consumers."""
    subject = f"{pluralize(len(ids), 'unmanaged consumer')} {'is' if len(ids) == 1 else 'are'}"
    return f"{subject} in the group: {join_names(ids)}; queues are shared by their strategy, Averagely"


def idle_problem(situation: Situation, idle: int) -> Finding:
    """Return the problem of members without a queue."""
    verb = "is" if idle == 1 else "are"
    queues = pluralize(len(situation.queues), "queue")
    text = f"{len(situation.counted_members)} members share {queues}: {idle} of them {verb} idle"
    return Finding(Reason.IDLE_MEMBERS, text)


def start_seconds_left(situation: Situation) -> float:
    """Return the seconds until a new group without members is a problem; until then its pods may be starting."""
    if situation.document.begun:  # members have been given queues before, so the group is not new
        return 0.0
    if situation.snapshot.unmanaged_consumers:  # they own all queues
        return 0.0
    ready = situation.snapshot.published_conditions.get("Ready")
    waited = 0.0
    if ready and ready["status"] == "False":
        waited = situation.seconds_since(ready["lastTransitionTime"])
    return max(0.0, FIRST_MEMBER_SECONDS - waited)


def members_with_old_settings(situation: Situation, settings: str) -> list[str]:
    """Return the names of the counted members that do not use these settings (a digest) yet."""
    return [pod.name for pod in situation.counted_pods if has_other_settings(pod, settings)]


def find_late_members(situation: Situation, outdated: Sequence[str], settings_age: float) -> Finding | None:
    """Return the problem of `outdated` members, which still use old settings; None if the change was not long ago."""
    if not outdated or settings_age <= situation.policy.handover.drain_timeout + SETTINGS_PATIENCE_SECONDS:
        return None
    verb = "uses" if len(outdated) == 1 else "use"
    message = f"{join_names(outdated)} still {verb} old settings, long after the change"
    return Finding(Reason.SETTINGS_NOT_OBEYED, message)


def describe_obstacles(situation: Situation) -> str:
    """Return why pods do not run: the obstacle of the first such pod, and all pods with this obstacle; or empty."""
    stuck = [pod for pod in situation.snapshot.pods if pod.obstacle and not pod.ended]
    if not stuck:
        return ""
    names = [pod.name for pod in stuck if pod.obstacle == stuck[0].obstacle]
    return f"{join_names(names)} {'does' if len(names) == 1 else 'do'} not run: {stuck[0].obstacle}"


def _describe_no_members(situation: Situation) -> str:
    """Return the sentence about a group without members, and what keeps pods from being members."""
    queues = pluralize(len(situation.queues), "queue")
    if situation.snapshot.unmanaged_consumers:
        return f"Only unmanaged consumers consume {queues}"
    out = situation.pods_in_state(MemberState.OUT)
    if not out:
        obstacles = describe_obstacles(situation)
        if obstacles:
            return f"No member can consume {queues}: {obstacles}"
        return f"The group has no member to consume {queues}"
    # Pods in the state OUT stay owners in the assignment, because there is no member to take their queues over.
    names = join_names([pod.name for pod in out])
    missed = sorted(set().union(*(pod.report.missed_brokers for pod in out if pod.report)))
    verb = "is" if len(out) == 1 else "are"
    explanation = f"{names} cannot reach {join_names(missed)}" if missed else f"{names} {verb} not ready"
    return f"No member can consume {queues}: {explanation}; the present assignment stays in force"


def _member_problems(situation: Situation, found_reasons: Container[Reason]) -> list[Finding]:
    """Return problems that members report; MEMBER_PROBLEM stands for those that only a later version knows.

    Problems with a reason that the operator has found itself (`found_reasons`) are left out.
    """
    members: dict[Reason, list[str]] = {}
    first_sentences: dict[Reason, str] = {}
    for pod in situation.snapshot.pods:
        if pod.ended or not pod.report:
            continue
        for name, sentence in pod.report.troubles.items():
            reason = reason_named(_FORMER_NAMES.get(name, name)) or Reason.MEMBER_PROBLEM
            if reason not in found_reasons:
                members.setdefault(reason, []).append(pod.name)
                first_sentences.setdefault(reason, sentence)
    return [Finding(reason, f"{join_names(names)}: {first_sentences[reason]}") for reason, names in members.items()]
