"""The specs of groups: each ConsumerGroup together with the RebalancePolicy that it names."""

from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.objects import CustomResource, ObjectKey
from rota.kube.state.group import Group


class GroupSpecs:
    """Sets the specs of groups; `policies` has all RebalancePolicies, as last seen."""

    def __init__(self, registry: BrokerRegistry) -> None:
        self._registry = registry
        self.policies: dict[ObjectKey, CustomResource] = {}

    def set_spec(self, group: Group, body: CustomResource) -> None:
        """Set the spec and policy that a group has now."""
        group.set_spec(body, self.policies.get((group.namespace, body.policy_name)))
        self._registry.update_group(group)
