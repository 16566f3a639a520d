"""Groups with a template: the Deployment that Rota creates for them, and its changes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ground.api import Api, ApiError, Object
from ground.cluster import Cluster
from ground.ours import conditions, made
from ground.poll import soon
from kube.in_process_operator import DelayedWrite, Operator
from rota.brokers.memory import BROKER, MemoryCluster

pytestmark = pytest.mark.usefixtures("crds", "operator")

TEMPLATE = {"spec": {"containers": [{"name": "app", "image": "app"}]}}


@pytest.fixture
async def operator(control_plane: Cluster, namespace: str) -> AsyncIterator[Operator]:
    memory = MemoryCluster()
    await memory.create_topic("orders", BROKER, 4)
    async with Operator(control_plane.kubeconfig, namespace, memory) as leading:
        yield leading


class Orders:
    """The group `orders` and its Deployment."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.groups = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"
        self.fleets = f"/apis/apps/v1/namespaces/{namespace}/deployments"

    async def make(self, **spec: Any) -> None:
        broker = {"rocketmq": {"nameServers": ["memory:9876"]}}
        default_spec = {"broker": broker, "subscriptions": [{"topic": "orders"}], "replicas": 2, "template": TEMPLATE}
        await self.api.create(
            self.groups,
            {
                "apiVersion": "rota.dev/v1alpha1",
                "kind": "ConsumerGroup",
                "metadata": {"name": "orders"},
                "spec": default_spec | spec,
            },
        )

    async def deployment(self) -> Object:
        """Return the Deployment, or an empty object."""
        try:
            return await self.api.get(f"{self.fleets}/orders")
        except ApiError as error:
            if error.status != 404:
                raise
            return {}

    async def wait_for_replicas(self, expected: int) -> None:
        async def has_replicas() -> bool:
            fleet = await self.deployment()
            return bool(fleet) and fleet["spec"]["replicas"] == expected

        await soon(has_replicas)

    async def message_of(self, kind: str) -> str:
        """Return the message of a condition; empty if it does not hold."""
        group = await self.api.get(f"{self.groups}/orders")
        return str(conditions(group).get(kind, {}).get("message", ""))

    async def wait_for_condition(self, kind: str) -> str:
        return await soon(lambda: self.message_of(kind))


@pytest.fixture
def orders(api: Api, namespace: str) -> Orders:
    return Orders(api, namespace)


async def test_template_creates_a_deployment_that_is_scaled_and_deleted_with_its_group(
    orders: Orders,
) -> None:
    await orders.make()
    await orders.wait_for_replicas(2)
    deployment = await orders.deployment()
    pod = deployment["spec"]["template"]
    assert [container["name"] for container in pod["spec"]["initContainers"]] == ["rota-sidecar"]
    assert pod["metadata"]["labels"]["rota.dev/group"] == "orders"
    await orders.api.patch(f"{orders.groups}/orders/scale", {"spec": {"replicas": 5}})
    await orders.wait_for_replicas(5)
    await orders.api.delete(f"{orders.groups}/orders")

    async def is_deleted() -> bool:
        return not await orders.deployment()

    await soon(is_deleted)


async def test_deployment_edited_by_hand_is_restored_and_then_not_written_again(
    orders: Orders, operator: Operator
) -> None:
    await orders.make()
    await orders.wait_for_replicas(2)
    await orders.api.patch(f"{orders.fleets}/orders", {"spec": {"replicas": 9}})
    await orders.wait_for_replicas(2)

    async def is_restored() -> bool:
        return len(operator.reconciles) > 3 and not any(
            result.write_counts["deployment"] for result in operator.reconciles[-3:]
        )

    await soon(is_restored)


async def test_deployment_of_the_same_name_from_another_owner_is_left_alone(orders: Orders) -> None:
    labels = {"rota.dev/group": "orders"}
    spec = {"replicas": 0, "selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}}}
    body = {"metadata": {"name": "orders", "labels": labels}, "spec": spec}
    spec["template"] = {"metadata": {"labels": {"a": "b"}}, **TEMPLATE}
    await orders.api.create(orders.fleets, body)
    await orders.make()
    assert "is not owned by this group" in await orders.wait_for_condition("ResourceConflict")
    assert (await orders.deployment())["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ({"spec": {"containers": [{"name": "Not A Name", "image": "app"}]}}, "The API server rejected spec.template: "),
        ({"spec": {"containers": []}}, "spec.template.spec.containers: "),
        ({"nonsense": True}, "spec.template: object missing required field"),
        (
            {"spec": {"containers": [{"name": "app", "imge": "app"}]}},
            "The API server rejected spec.template: .spec.template.spec",
        ),
    ],
)
async def test_template_that_is_invalid_is_reported_in_a_condition(
    orders: Orders, template: Object, sentence: str
) -> None:
    await orders.make(template=template)
    assert (await orders.wait_for_condition("TemplateRejected")).startswith(sentence)


async def test_template_rejected_for_another_reason_updates_the_condition(orders: Orders) -> None:
    calm = made("RebalancePolicy", "calm", triggers={"resync": "1h"})  # no other event reconciles the group
    await orders.api.create(orders.groups.replace("consumergroups", "rebalancepolicies"), calm)
    await orders.make(policyRef={"name": "calm"}, template={"spec": {"containers": []}})
    await orders.wait_for_condition("TemplateRejected")
    invalid = {"spec": {"containers": [{"name": "Not A Name", "image": "app"}]}}
    await orders.api.patch(f"{orders.groups}/orders", {"spec": {"template": invalid}})

    async def has_new_message() -> bool:
        return (await orders.wait_for_condition("TemplateRejected")).startswith(
            "The API server rejected spec.template: "
        )

    await soon(has_new_message)


@pytest.mark.parametrize("template", [TEMPLATE, {"spec": {"containers": [{"name": "Not A Name", "image": "app"}]}}])
async def test_deployment_write_that_is_slow_keeps_its_condition_and_delays_no_other(
    orders: Orders, operator: Operator, template: Object
) -> None:
    await orders.make()
    await orders.wait_for_replicas(2)
    group = f"{orders.groups}/orders"
    rejected = template is not TEMPLATE
    if rejected:
        await orders.api.patch(group, {"spec": {"template": template}})
        await orders.wait_for_condition("TemplateRejected")
    late = operator.api.delayed[f"PATCH {orders.fleets}/orders"] = DelayedWrite()
    await orders.api.patch(group, {"spec": {"replicas": 3}})
    await late.sent.wait()
    await orders.api.patch(group, {"spec": {"policyRef": {"name": "none"}}})
    await orders.wait_for_condition("MissingPolicy")
    assert bool(await orders.message_of("TemplateRejected")) is rejected
    late.may_arrive.set()
    if not rejected:
        await orders.wait_for_replicas(3)


async def test_deployment_deleted_before_the_watch_reported_it_is_created_again(
    orders: Orders, operator: Operator
) -> None:
    """The Deployment was created and deleted while the watch was interrupted, so the next list does not show it."""
    operator.api.muted_watches.add(orders.fleets)
    await orders.make()
    await orders.wait_for_replicas(2)
    first = await orders.deployment()
    await orders.api.delete(f"{orders.fleets}/orders", {"propagationPolicy": "Background"})
    await operator.relist(orders.fleets)
    await orders.wait_for_replicas(2)
    assert (await orders.deployment())["metadata"]["uid"] != first["metadata"]["uid"]


async def test_template_removed_from_a_group_deletes_its_deployment(orders: Orders) -> None:
    await orders.make()
    await orders.wait_for_replicas(2)
    await orders.api.patch(f"{orders.groups}/orders", {"spec": {"template": None, "replicas": None}})

    async def is_deleted() -> bool:
        return not await orders.deployment()

    await soon(is_deleted)
