"""Problems of a group's pods: too many of them, no sidecar, reports that are ignored, a missing or wrong key."""

from collections.abc import Collection, Mapping, Sequence

from rota.kube.client.objects import Pod
from rota.kube.state.pod_state import GroupPods, PodState
from rota.model import Finding, Reason

_MAX_NAMES = 3  # pods in one sentence

_MESSAGE_BY_REASON = {  # for members whose reports are ignored; {} stands for their number and some names
    Reason.MEMBER_NOT_AUTHENTICATED: (
        "{} are not authenticated by the group's key. They keep their queues. A new pod may not have its key for up to"
        " two minutes; if this lasts, check the group's Secret with the key, and delete the pods"
    ),
    Reason.REPORT_TOO_LARGE: (
        "{} send reports that are too large to be read, so their handovers cannot complete; subscribe to fewer topics,"
        " or to topics with shorter names"
    ),
}


def member_problems(pods: GroupPods, key_problems: Sequence[Finding] = ()) -> list[Finding]:
    """Return the problems, worst first; `key_problems` concern the Secret that members mount."""
    problems = [_too_many_members(len(pods) + len(pods.surplus), pods.max_members)] if pods.surplus else []
    problems += key_problems
    if pods.without_sidecar:
        examples = _first_names(pods.without_sidecar)
        message = f"{len(pods.without_sidecar)} pods carry the group's label but no sidecar of it, such as {examples}"
        problems.append(Finding(Reason.NO_SIDECAR, f"{message}; use rota inject"))
    for reason, message in _MESSAGE_BY_REASON.items():
        names = [name for name, state in pods.items() if state.ignored_reason is reason]
        if names:
            problems.append(Finding(reason, message.format(f"{len(names)} members, such as {_first_names(names)},")))
    # These mount no key; members that mount one but do not sign with it are MEMBER_NOT_AUTHENTICATED.
    unsigned = [name for name, state in pods.items() if not (state.has_key or state.pod.ended)]
    if unsigned:
        examples = _first_names(unsigned)
        message = f"{len(unsigned)} members, such as {examples}, do not mount the group's key, so any client can drain"
        message += " them; change the template, or run rota inject again"
        problems.append(Finding(Reason.UNSIGNED_MEMBERS, message))
    return problems


def _too_many_members(pod_count: int, limit: int) -> Finding:
    message = f"{pod_count:,} pods carry the group's label; a group may have {limit:,} members"
    return Finding(Reason.TOO_MANY_MEMBERS, f"{message}, and no queue is moved while it has more: scale the group down")


def unauthenticated_pods(pods: Mapping[str, PodState]) -> list[Pod]:
    """Return the pods of members that mount the group's key, but do not sign their reports with it."""
    return [state.pod for state in pods.values() if state.ignored_reason is Reason.MEMBER_NOT_AUTHENTICATED]


def _first_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_MAX_NAMES])
