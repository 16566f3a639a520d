"""What is wrong with a group: each problem with its reason and a sentence."""

from collections.abc import Container, Sequence

from rota.model import Reason, Verdict, reason_named
from rota.planner import record
from rota.planner.members.standings import Standing
from rota.planner.moves import Draft
from rota.planner.pokes import has_other_settings
from rota.planner.situation import Situation
from rota.sentences import count, listed

# In addition to drainTimeout: a kubelet updates a mounted ConfigMap within this time even without a poke.
SETTINGS_PATIENCE_SECONDS = 90.0
FIRST_MEMBER_SECONDS = 60.0  # a new group reports NoMembers only after this time


def problems(it: Situation, draft: Draft, unowned: int) -> list[Verdict]:
    """Return everything that is wrong, the worst first."""
    found = [*it.snapshot.problems, *([draft.problem] if draft.problem else [])]
    found += _of_members(it, {verdict.reason for verdict in found})
    if it.unseen:
        message = f"The broker does not tell of {listed(it.unseen)}; what was assigned stays"
        found.append(Verdict(Reason.NO_VIEW, message))
    if it.queues and not it.counted and not start_seconds_left(it):
        found.append(Verdict(Reason.NO_MEMBERS, _no_members(it)))
    elif unowned and it.counted:
        found.append(Verdict(Reason.QUEUES_UNOWNED, f"{count(unowned, 'queue')} that nobody works"))
    if it.snapshot.foreigners:
        found.append(Verdict(Reason.FOREIGN_MEMBERS, describe_unmanaged(it.snapshot.foreigners)))
    return found


def describe_unmanaged(ids: Sequence[str]) -> str:
    """Return the sentence about unmanaged consumers."""
    who = "1 consumer that is not Rota's is" if len(ids) == 1 else f"{len(ids)} consumers that are not Rota's are"
    return f"{who} in the group: {listed(ids)}; queues are shared as they do it"


def idle_problem(it: Situation, idle: int) -> Verdict:
    """Return the problem of members without a queue."""
    are = "is" if idle == 1 else "are"
    message = f"{len(it.counted)} members share {count(len(it.queues), 'queue')}: {idle} of them {are} idle"
    return Verdict(Reason.IDLE_MEMBERS, message)


def start_seconds_left(it: Situation) -> float:
    """Return for how many seconds more a new group may be without a member; its pods need that to start."""
    if it.document.begun or it.snapshot.foreigners:  # a queue was assigned before, or unmanaged consumers have all
        return 0.0
    conditions = it.snapshot.status.get("conditions") or []
    ready = next((condition for condition in conditions if condition["type"] == "Ready"), None)
    waited = record.ago(ready["lastTransitionTime"], it.now) if ready and ready["status"] == "False" else 0.0
    return max(0.0, FIRST_MEMBER_SECONDS - waited)


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
    message = f"{listed(late)} still {'uses' if len(late) == 1 else 'use'} old settings, long after the change"
    return [Verdict(Reason.SETTINGS_NOT_OBEYED, message)]


def describe_obstacles(it: Situation) -> str:
    """Return what keeps pods from running, by the first pod that reports something; empty if none does."""
    stuck = [pod for pod in it.snapshot.pods if pod.obstacle and not pod.ended]
    if not stuck:
        return ""
    names = [pod.name for pod in stuck if pod.obstacle == stuck[0].obstacle]
    return f": {listed(names)} {'does' if len(names) == 1 else 'do'} not run: {stuck[0].obstacle}"


def _no_members(it: Situation) -> str:
    """Return the sentence about a group without members; pods that cannot work keep their queues."""
    queues = count(len(it.queues), "queue")
    if it.snapshot.foreigners:
        return f"Only foreigners are there to work {queues}"
    unable = [pod for pod in it.snapshot.pods if it.standings[pod.name] in {Standing.OUT, Standing.CUT_OFF}]
    if not unable:
        obstacles = describe_obstacles(it)
        return f"No member can work {queues}{obstacles}" if obstacles else f"Nobody is there to work {queues}"
    names = listed([pod.name for pod in unable])
    reports = [pod.report.brokers for pod in unable if pod.report]
    missed = sorted({broker for brokers in reports for broker, reached in brokers.items() if not reached})
    are = "is" if len(unable) == 1 else "are"
    why = f"{names} cannot reach {listed(missed)}" if missed else f"{names} {are} not ready"
    return f"No member can work {queues}: {why}; what was assigned stays"


def _of_members(it: Situation, known: Container[Reason]) -> list[Verdict]:
    """Return the problems that members report, except those that the operator has found itself.

    A sidecar of a later version may report a problem that this operator does not know.
    """
    reported: dict[Reason, list[tuple[str, str]]] = {}
    for pod in it.snapshot.pods:
        for name, sentence in (pod.report.troubles if pod.report and not pod.ended else {}).items():
            reason = reason_named(name) or Reason.MEMBER_PROBLEM
            if reason not in known:
                reported.setdefault(reason, []).append((pod.name, sentence))
    return [
        Verdict(reason, f"{listed([name for name, _ in members])}: {members[0][1]}")
        for reason, members in reported.items()
    ]
