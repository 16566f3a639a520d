"""Specs of a group and its policy, parsed from their objects, with the problems found in them."""

from dataclasses import dataclass
from typing import Any

from rota.kube.client.objects import MAX_SPEC_BYTES, CustomResource
from rota.model import Finding, Reason
from rota.spec import GroupSpec, InvalidSpecError, PolicySpec, parse_group, parse_policy


@dataclass(frozen=True)
class ResolvedSpec:
    """The specs of a group and its policy, parsed once for each version of them."""

    spec: GroupSpec | None = None  # None: invalid
    policy: PolicySpec | None = None  # None: invalid, or the policy that the group names does not exist
    problems: tuple[Finding, ...] = ()

    @property
    def needs_weights(self) -> bool:
        """Whether the policy balances queues by the traffic of each."""
        return self.policy is not None and self.policy.strategy == "Balanced"


def resolve_spec(body: CustomResource, policy: CustomResource | None) -> ResolvedSpec:
    """Parse a group and the policy that it names; `policy` is None if it does not exist."""
    problems: list[Finding] = []
    spec: GroupSpec | None = None
    policy_spec: PolicySpec | None = PolicySpec()  # the defaults, for a group that names no policy
    try:
        spec = parse_group(_spec_mapping(body, "shorten spec.template"))
    except InvalidSpecError as mistake:
        problems.append(Finding(Reason.INVALID_SPEC, str(mistake)))
    policy_name = spec.policy_ref.name if spec and spec.policy_ref else None
    if policy_name and policy is None:
        policy_spec = None
        message = f"RebalancePolicy {policy_name}, which spec.policyRef names, does not exist; until it does, queues"
        message += " keep their owners, and an unowned queue is assigned only if its member has ended"
        problems.append(Finding(Reason.MISSING_POLICY, message))
    elif policy_name and policy:
        try:
            policy_spec = policy_of_resource(policy)
        except InvalidSpecError as mistake:
            policy_spec = None
            problems.append(Finding(Reason.INVALID_POLICY, f"RebalancePolicy {policy_name}: {mistake}"))
    return ResolvedSpec(spec, policy_spec, tuple(problems))


def policy_of_resource(body: CustomResource) -> PolicySpec:
    """Parse a policy. Raise InvalidSpecError if it is invalid."""
    return parse_policy(_spec_mapping(body, "shorten it"))


def _spec_mapping(body: CustomResource, advice: str) -> dict[str, Any]:
    if body.too_large_bytes:
        raise InvalidSpecError(f"spec takes {body.too_large_bytes:,} bytes; the limit is {MAX_SPEC_BYTES:,}: {advice}")
    return {"metadata": {"name": body.metadata.name}, "spec": body.spec}
