"""What a group and its policy ask for, read from their objects; what cannot be meant is told."""

from dataclasses import dataclass
from typing import Any

from rota.kube.client.objects import MAX_SPEC_BYTES, Custom
from rota.model import Reason, Verdict
from rota.spec import GroupSpec, Mistake, PolicySpec, group_spec, policy_spec


@dataclass(frozen=True)
class Wish:
    """What a group and its policy ask for, parsed once for each version of them."""

    spec: GroupSpec | None = None
    policy: PolicySpec | None = None
    problems: tuple[Verdict, ...] = ()


def wish_of(body: Custom, policy: Custom | None) -> Wish:
    """Read a group and the policy that it names; None: there is none."""
    problems: list[Verdict] = []
    spec: GroupSpec | None = None
    rules: PolicySpec | None = PolicySpec()
    try:
        spec = group_spec(_plain(body, "shorten spec.template"))
    except Mistake as mistake:
        problems.append(Verdict(Reason.INVALID_SPEC, str(mistake)))
    wanted = spec.policy_ref.name if spec and spec.policy_ref else None
    if wanted and policy is None:
        rules = None
        told = f"There is no RebalancePolicy {wanted}, which spec.policyRef names"
        told += "; until there is, queues keep their owners, and those without one get none unless their member ended"
        problems.append(Verdict(Reason.MISSING_POLICY, told))
    elif wanted and policy:
        try:
            rules = policy_of(policy)
        except Mistake as mistake:
            rules = None
            problems.append(Verdict(Reason.INVALID_POLICY, f"RebalancePolicy {wanted}: {mistake}"))
    return Wish(spec, rules, tuple(problems))


def policy_of(body: Custom) -> PolicySpec:
    """Read a policy. Raise Mistake for one that cannot be meant."""
    return policy_spec(_plain(body, "shorten it"))


def _plain(body: Custom, advice: str) -> dict[str, Any]:
    if body.too_large_bytes:
        raise Mistake(f"spec takes {body.too_large_bytes:,} bytes, and {MAX_SPEC_BYTES:,} are the most: {advice}")
    return {"metadata": {"name": body.metadata.name}, "spec": body.spec}
