"""Specs of a group and its policy, parsed from their objects, with the problems found in them."""

from dataclasses import dataclass
from typing import Any

from rota.kube.client.objects import MAX_SPEC_BYTES, Custom
from rota.model import Reason, Verdict
from rota.spec import GroupSpec, InvalidSpecError, PolicySpec, group_spec, policy_spec


@dataclass(frozen=True)
class ResolvedSpec:
    """The specs of a group and its policy, parsed once for each version of them."""

    spec: GroupSpec | None = None
    policy: PolicySpec | None = None
    problems: tuple[Verdict, ...] = ()


def resolve_spec(body: Custom, policy: Custom | None) -> ResolvedSpec:
    """Parse a group and the policy that it names; `policy` is None if it does not exist."""
    problems: list[Verdict] = []
    spec: GroupSpec | None = None
    rules: PolicySpec | None = PolicySpec()
    try:
        spec = group_spec(_plain(body, "shorten spec.template"))
    except InvalidSpecError as mistake:
        problems.append(Verdict(Reason.INVALID_SPEC, str(mistake)))
    policy_name = spec.policy_ref.name if spec and spec.policy_ref else None
    if policy_name and policy is None:
        rules = None
        text = f"There is no RebalancePolicy {policy_name}, which spec.policyRef names"
        text += "; until there is, queues keep their owners, and those without one get none unless their member ended"
        problems.append(Verdict(Reason.MISSING_POLICY, text))
    elif policy_name and policy:
        try:
            rules = policy_of(policy)
        except InvalidSpecError as mistake:
            rules = None
            problems.append(Verdict(Reason.INVALID_POLICY, f"RebalancePolicy {policy_name}: {mistake}"))
    return ResolvedSpec(spec, rules, tuple(problems))


def policy_of(body: Custom) -> PolicySpec:
    """Parse a policy. Raise InvalidSpecError if it is invalid."""
    return policy_spec(_plain(body, "shorten it"))


def _plain(body: Custom, advice: str) -> dict[str, Any]:
    if body.too_large_bytes:
        raise InvalidSpecError(
            f"spec takes {body.too_large_bytes:,} bytes, and {MAX_SPEC_BYTES:,} are the most: {advice}"
        )
    return {"metadata": {"name": body.metadata.name}, "spec": body.spec}
