"""Together with Kubernetes' own controllers: autoscalers set replicas, workload controllers create and delete pods."""

from collections.abc import AsyncIterator, Mapping
from functools import partial

import pytest
import yaml
from click.testing import CliRunner

from ground.api import Api, ApiError, Object
from ground.cluster import Cluster
from ground.poll import soon
from kube.in_process_operator import Operator
from kube.members import NODE
from kube.world import GROUP, OperatedNamespace, a_group
from rota.brokers.memory import BROKER, MemoryCluster
from rota.cli import main
from rota.kube.client.objects import DELETION_COST_ANNOTATION, GROUP_LABEL

pytestmark = pytest.mark.usefixtures("crds", "node")

APP = {"containers": [{"name": "app", "image": "app"}]}
HERE = {
    **APP,
    "nodeName": NODE,
    "tolerations": [{"operator": "Exists"}],
}  # the simulated node, whose pods members can adopt


# Replicas.


class Scaled:
    """A group with a template, and its autoscaler."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self.namespace = api, namespace
        self.groups = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"
        self.autoscalers = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"

    async def make(self, replicas: int, name: str = GROUP) -> None:
        await self.api.create(self.groups, a_group(name, replicas=replicas, template={"spec": APP}))

    async def autoscale(self, least: int, most: int) -> None:
        target = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "name": GROUP}
        spec = {"scaleTargetRef": target, "minReplicas": least, "maxReplicas": most}
        await self.api.create(self.autoscalers, {"metadata": {"name": GROUP}, "spec": spec})

    async def autoscaler(self) -> Object:
        status: Object = (await self.api.get(f"{self.autoscalers}/{GROUP}")).get("status") or {}
        return status

    async def scale(self) -> Object:
        return await self.api.get(f"{self.groups}/{GROUP}/scale")

    async def pods(self, *, controlled_by: str) -> set[str]:
        """Return the names of a Deployment's pods, found by owner references, not by labels."""
        sets = await self.api.list(f"/apis/apps/v1/namespaces/{self.namespace}/replicasets")
        set_uids = {
            replica_set["metadata"]["uid"]
            for replica_set in sets
            if replica_set["metadata"]["ownerReferences"][0]["name"] == controlled_by
        }
        pods = await self.api.list(f"/api/v1/namespaces/{self.namespace}/pods")
        owners = {pod["metadata"]["name"]: pod["metadata"].get("ownerReferences") or [] for pod in pods}
        return {
            name for name, references in owners.items() if set_uids & {reference["uid"] for reference in references}
        }

    async def has(self, replicas: int) -> bool:
        """Whether the group's scale and its pods have this number of replicas."""
        scale = await self.scale()
        scale_replicas = scale["spec"].get("replicas", 0), scale["status"].get("replicas", 0)
        return (*scale_replicas, len(await self.pods(controlled_by=GROUP))) == (replicas, replicas, replicas)


@pytest.fixture
def scaled(api: Api, namespace: str, operator: Operator) -> Scaled:
    assert operator.controller.is_leading
    return Scaled(api, namespace)


@pytest.mark.slow("Kubernetes' own autoscaler scales a group")
async def test_autoscaling_finds_the_scale_of_a_group_and_grows_it_to_min_replicas(scaled: Scaled) -> None:
    await scaled.make(1)
    await scaled.autoscale(3, 5)
    await soon(partial(scaled.has, 3))
    assert (await scaled.api.get(f"{scaled.groups}/{GROUP}"))["spec"]["replicas"] == 3

    async def active_conditions() -> dict[str, str]:
        status = await scaled.autoscaler()
        reasons = {condition["type"]: condition["reason"] for condition in status.get("conditions") or []}
        return reasons if "ScalingActive" in reasons else {}

    reasons = await soon(active_conditions)
    assert (
        reasons["ScalingActive"] == "FailedGetResourceMetric"
    )  # it accepted the selector; no metrics server runs here


async def test_autoscaling_selector_matches_and_counts_only_pods_of_the_group(scaled: Scaled) -> None:
    await scaled.make(2)
    await scaled.make(1, "orders-eu")
    labels = {"app": GROUP, "app.kubernetes.io/managed-by": "rota"}
    app = {"metadata": {"name": "orders-app", "labels": labels}, "spec": APP}
    await scaled.api.create(f"/api/v1/namespaces/{scaled.namespace}/pods", app)
    await soon(partial(scaled.has, 2))

    async def has_other_pods() -> bool:
        return len(await scaled.pods(controlled_by="orders-eu")) == 1

    await soon(has_other_pods)
    selector = (await scaled.scale())["status"]["selector"]
    selected = await scaled.api.list(f"/api/v1/namespaces/{scaled.namespace}/pods", labelSelector=selector)
    assert {pod["metadata"]["name"] for pod in selected} == await scaled.pods(controlled_by=GROUP)


async def test_autoscaling_to_zero_and_back_works_through_the_scale_subresource(scaled: Scaled) -> None:
    await scaled.make(1)
    await soon(partial(scaled.has, 1))

    async def is_accepted(spec: Object) -> bool:
        """Whether the scale was accepted: a status write since the read causes a conflict."""
        scale = await scaled.scale()
        try:
            await scaled.api.replace(f"{scaled.groups}/{GROUP}/scale", scale | {"spec": spec})
        except ApiError as error:
            if error.status != 409:
                raise
            return False
        return True

    for replicas in (0, 1):  # as KEDA does without and with work
        spec = {"replicas": replicas} if replicas else {}  # Go clients omit 0
        await soon(partial(is_accepted, spec))
        await soon(partial(scaled.has, replicas))
        assert (await scaled.scale())["status"]["selector"] == f"{GROUP_LABEL}={GROUP}"


# Deletion costs.


async def wait_for_costs(world: OperatedNamespace, costs: Mapping[str, str]) -> None:
    """Wait until the pods have these deletion costs: members may obey an assignment before all pods are annotated."""

    async def has_costs() -> bool:
        pods = await world.api.list(f"/api/v1/namespaces/{world.namespace}/pods")
        annotations = {pod["metadata"]["name"]: pod["metadata"].get("annotations", {}) for pod in pods}
        return {name: texts.get(DELETION_COST_ANNOTATION) for name, texts in annotations.items()} == costs

    await world.soon(has_costs)


async def test_deletion_cost_of_a_pod_is_its_number_of_owned_queues(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    await world.fleet.add("orders-c")
    await world.wait_for_shares(3, 3, 2)
    await wait_for_costs(world, {name: str(share) for name, share in world.fleet.shares.items()})
    await world.fleet.members.pop("orders-a").kill()
    await world.wait_for_shares(4, 4)
    await wait_for_costs(world, {"orders-b": "4", "orders-c": "4"})


async def test_deletion_cost_that_is_wrong_is_corrected(world: OperatedNamespace) -> None:
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    path = f"/api/v1/namespaces/{world.namespace}/pods/orders-a"
    await world.api.patch(path, {"metadata": {"annotations": {DELETION_COST_ANNOTATION: "9"}}})
    await wait_for_costs(world, {"orders-a": "4", "orders-b": "4"})


async def test_scale_down_deletes_the_pod_with_fewest_queues_even_if_it_is_the_oldest(world: OperatedNamespace) -> None:
    names: list[str] = []

    async def new_pod() -> str:
        pods = await world.api.list(f"/api/v1/namespaces/{world.namespace}/pods", labelSelector=GROUP_LABEL)
        return next((pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"] not in names), "")

    for replicas in (1, 2, 3):
        await world.api.patch(world.path, {"spec": {"replicas": replicas, "template": {"spec": HERE}}})
        names.append(await soon(new_pod, 60))
        await world.fleet.adopt_pods(names[-1])
        await world.soon(world.settled)
    shares = dict(zip(names, ("0", "1-3", "4-7"), strict=True))
    members = [
        {"index": index, "queues": [{"topic": "orders", "broker": BROKER, "ids": shares[name]}]}
        for index, name in enumerate(sorted(names))
    ]
    policy = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": {"name": "uneven"}}
    spec = {"strategy": "ByConfig", "options": {"byConfig": {"members": members}}}
    await world.api.create(f"{world.path.partition('/consumergroups')[0]}/rebalancepolicies", policy | {"spec": spec})
    await world.api.patch(world.path, {"spec": {"policyRef": {"name": "uneven"}}})
    await world.wait_for_shares(1, 3, 4)
    await world.api.patch(world.path, {"spec": {"replicas": 2}})

    async def terminating() -> list[str]:
        pods = await world.api.list(f"/api/v1/namespaces/{world.namespace}/pods")
        return [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" in pod["metadata"]]

    assert await soon(terminating, 60) == names[:1]


# Pods that keep their names.


@pytest.fixture
async def shop(world: OperatedNamespace) -> AsyncIterator[OperatedNamespace]:
    """Let a StatefulSet with an injected sidecar create members."""
    labels = {"app": "shop"}
    manifest = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "shop"},
        "spec": {
            "replicas": 2,
            "serviceName": "shop",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": HERE},
        },
    }
    injected = CliRunner().invoke(main, ["inject", "--group", GROUP, "-f", "-"], input=yaml.safe_dump(manifest))
    assert injected.exit_code == 0, injected.output
    sets = f"/apis/apps/v1/namespaces/{world.namespace}/statefulsets"
    await world.api.create(sets, yaml.safe_load(injected.stdout))
    await world.fleet.adopt_pods("shop-0", "shop-1")
    await world.wait_for_shares(4, 4)
    yield world
    await world.api.delete(f"{sets}/shop", {"propagationPolicy": "Orphan"})


def recorded_uids(world: OperatedNamespace) -> dict[str, str]:
    """Return the members of the newest assignment, and the uids of their pods."""
    return {name: share["uid"] for name, share in world.fleet.documents[-1]["members"].items()}


@pytest.mark.parametrize("how", ["crashes", "drains"])
async def test_stateful_set_pod_replaced_under_its_name_is_a_new_member_with_the_same_queues(
    shop: OperatedNamespace, how: str
) -> None:
    owners = shop.fleet.owners()
    old = shop.fleet.members["shop-0"]
    assert recorded_uids(shop)["shop-0"] == old.uid
    if how == "drains":
        await old.delete_pod()
        await shop.wait_for_shares(8, 0)
    del shop.fleet.members["shop-0"]
    await old.kill()
    await shop.fleet.adopt_pods("shop-0")
    new = shop.fleet.members["shop-0"]
    assert new.uid != old.uid
    await shop.wait_for_shares(4, 4)
    assert shop.fleet.owners() == owners
    assert recorded_uids(shop) == {name: pod.uid for name, pod in shop.fleet.members.items()}


async def test_stateful_set_pod_replaced_while_no_operator_leads_is_a_new_member(
    shop: OperatedNamespace, control_plane: Cluster, memory: MemoryCluster
) -> None:
    owners = shop.fleet.owners()
    await soon(shop.at_rest)
    await shop.operator.controller.close()
    await shop.fleet.members.pop("shop-0").kill()
    await shop.fleet.adopt_pods("shop-0")
    assert shop.shares(4, 0)
    async with Operator(control_plane.kubeconfig, shop.namespace, memory):
        await shop.wait_for_shares(4, 4)
    assert shop.fleet.owners() == owners
    assert recorded_uids(shop)["shop-0"] == shop.fleet.members["shop-0"].uid
