"""What is wrong with a group's pods: those without a sidecar, and members whose reports are ignored."""

from collections.abc import Collection, Mapping, Sequence

from rota.kube.client.objects import Pod
from rota.kube.state.pod_state import GroupPods, Known
from rota.model import Reason, Verdict

_NAMED = 3  # pods in one sentence

_OF_DOUBT = {
    Reason.MEMBER_NOT_AUTHENTICATED: (
        "{} are not authenticated by the group's key. They keep their queues. A new pod may not have its key for up to"
        " two minutes; if this lasts, check the group's Secret with the key, and delete the pods"
    ),
    Reason.REPORT_TOO_LARGE: (
        "{} send reports that are too large to be read, so their handovers cannot complete; subscribe to fewer topics,"
        " or to topics with shorter names"
    ),
}


def member_problems(pods: GroupPods, key_problems: Sequence[Verdict] = ()) -> list[Verdict]:
    """Return what is wrong, worst first; `key_problems`: with the Secret that members mount."""
    found = [_too_many_members(len(pods) + len(pods.surplus), pods.limit)] if pods.surplus else []
    found += key_problems
    if pods.strangers:
        some = _some(pods.strangers)
        message = f"{len(pods.strangers)} pods carry the group's label but no sidecar of it, such as {some}"
        found.append(Verdict(Reason.NO_SIDECAR, f"{message}; use rota inject"))
    for reason, message in _OF_DOUBT.items():
        names = [name for name, known in pods.items() if known.doubt is reason]
        if names:
            found.append(Verdict(reason, message.format(f"{len(names)} members, such as {_some(names)},")))
    unsigned = [name for name, known in pods.items() if not (known.has_key or known.pod.ended)]
    if unsigned:
        message = f"{len(unsigned)} members, such as {_some(unsigned)}, do not mount the group's key, so any client can"
        found.append(
            Verdict(Reason.UNSIGNED_MEMBERS, f"{message} drain them; change the template, or run rota inject again")
        )
    return found


def _too_many_members(pods: int, limit: int) -> Verdict:
    message = f"{pods:,} pods carry the group's label; a group may have {limit:,} members"
    return Verdict(Reason.TOO_MANY_MEMBERS, f"{message}, and no queue is moved while it has more: scale the group down")


def unauthenticated(pods: Mapping[str, Known]) -> list[Pod]:
    """Return the pods of members that do not sign with the group's key, although they mount it."""
    return [known.pod for known in pods.values() if known.doubt is Reason.MEMBER_NOT_AUTHENTICATED]


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_NAMED])
