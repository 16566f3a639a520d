"""Deployments of groups with a template; a stand-in for the API server returns a test's responses."""

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import pytest
from msgspec import Raw
from msgspec.structs import replace

from rota.kube.client.api import Api, ApiError, ConflictError
from rota.kube.client.deployment_status import DeploymentCondition, DeploymentStatus, RolloutState
from rota.kube.client.objects import (
    MAX_DEPLOYMENT_BYTES,
    MAX_SPEC_BYTES,
    CustomResource,
    Deployment,
    Metadata,
    OwnerReference,
)
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.workload.deployments import Deployments
from rota.model import Reason

SPEC: dict[str, Any] = {
    "broker": {"rocketmq": {"nameServers": ["rmq:9876"]}},
    "subscriptions": [{"topic": "orders"}],
    "replicas": 2,
    "template": {"spec": {"containers": [{"name": "app", "image": "app"}]}},
}
BODY = CustomResource(Metadata("orders", uid="1", namespace="shop"), SPEC)
OWNED = Deployment(
    Metadata(
        "orders",
        uid="2",
        namespace="shop",
        resource_version="7",
        owner_references=[OwnerReference("1", controller=True)],
    ),
    Raw(b'{"replicas": 1}'),
)


@dataclass
class ConflictingServer:
    """An API server with a Deployment that another client has just changed, so that writes conflict."""

    deleted: list[str] = field(default_factory=list)

    async def get(self, _: str, __: type[Deployment]) -> Deployment:
        return replace(OWNED, metadata=replace(OWNED.metadata, resource_version="8"))

    async def apply(self, *_: object) -> Deployment:
        raise ApiError(HTTPStatus.CONFLICT, "Conflict", "the object has been modified")

    async def delete(self, path: str, _: str) -> None:
        self.deleted.append(path)


@dataclass
class RollingServer:
    """An API server that accepts Deployments and reports the rollout status that a test sets."""

    status: DeploymentStatus

    async def get(self, *_: object) -> Deployment:
        return OWNED

    async def apply(self, *_: object) -> Deployment:
        return self.deployment("9")

    def deployment(self, resource_version: str) -> Deployment:
        metadata = replace(OWNED.metadata, resource_version=resource_version, generation=3)
        return replace(OWNED, metadata=metadata, status=self.status)


def rollout_status(reason: str, message: str = "", **counts: int) -> DeploymentStatus:
    numbers = {"observed_generation": 3, "replicas": 2, "updated_replicas": 2} | counts
    conditions = (DeploymentCondition("Available"), DeploymentCondition("Progressing", reason, message))
    return DeploymentStatus(**numbers, conditions=conditions)


@pytest.mark.parametrize(
    ("status", "rollout"),
    [
        (rollout_status("NewReplicaSetAvailable"), RolloutState.COMPLETE),
        (rollout_status("NewReplicaSetAvailable", observed_generation=2), RolloutState.UNDER_WAY),
        (rollout_status("NewReplicaSetAvailable", updated_replicas=1), RolloutState.UNDER_WAY),
        (rollout_status("ReplicaSetUpdated"), RolloutState.UNDER_WAY),
        (rollout_status("ProgressDeadlineExceeded"), RolloutState.FAILED),
        (rollout_status("ProgressDeadlineExceeded", observed_generation=2), RolloutState.UNDER_WAY),
        (replace(rollout_status(""), conditions=()), RolloutState.COMPLETE),
        (DeploymentStatus(), RolloutState.UNDER_WAY),
    ],
)
def test_deployment_rollout_state_is_that_of_kubectl(status: DeploymentStatus, rollout: RolloutState) -> None:
    assert RollingServer(status).deployment("9").rollout is rollout


def test_deployment_change_that_ends_or_starts_a_rollout_notifies_its_group() -> None:
    server = RollingServer(rollout_status("ReplicaSetUpdated"))
    deployments = Deployments(cast("Api", server))
    assert deployments.on_upsert(server.deployment("9"))
    server.status = rollout_status("ReplicaSetUpdated", updated_replicas=1)
    assert not deployments.on_upsert(server.deployment("10")), "each new pod changes the counts"
    server.status = rollout_status("NewReplicaSetAvailable")
    assert deployments.on_upsert(server.deployment("11"))


async def test_deployment_rollout_is_part_of_its_group() -> None:
    server = RollingServer(rollout_status("ReplicaSetUpdated"))
    deployments = Deployments(cast("Api", server))
    group = Group("shop", "orders")

    def rolling_out() -> bool | None:
        return group.snapshot(0.0, BrokerState(), {}).rolling_out

    group.set_spec(replace(BODY, metadata=replace(BODY.metadata, generation=1)), None)
    assert rolling_out() is None, "nothing was applied yet"
    await deployments.sync(group)
    assert rolling_out() is True
    group.reset_observations()
    assert rolling_out() is None, "another operator may have led meanwhile"
    await deployments.sync(group)
    assert rolling_out() is True
    server.status = rollout_status("NewReplicaSetAvailable")
    deployments.on_upsert(server.deployment("10"))
    await deployments.sync(group)
    assert (rolling_out(), group.deployment_problems) == (False, ())
    group.set_spec(replace(BODY, metadata=replace(BODY.metadata, generation=2)), None)
    assert rolling_out() is None, "the new spec was not applied yet"
    server.status = rollout_status("ProgressDeadlineExceeded", 'ReplicaSet "orders-5d" has timed out progressing.')
    deployments.on_upsert(server.deployment("11"))
    await deployments.sync(group)
    assert rolling_out() is False
    sentence = (
        'The rollout of the Deployment orders makes no progress: ReplicaSet "orders-5d" has timed out progressing.'
    )
    assert group.deployment_problems == ((Reason.ROLLOUT_FAILED, sentence),)


async def test_deployment_seen_during_a_write_is_not_replaced_by_the_older_response() -> None:
    """Otherwise the group would stay Reconciling until its Deployment changes again."""

    class SlowServer(RollingServer):
        async def apply(self, *_: object) -> Deployment:
            applied = self.deployment("9")
            self.status = rollout_status("NewReplicaSetAvailable")
            deployments.on_upsert(self.deployment("11"))
            return applied

    deployments = Deployments(cast("Api", SlowServer(rollout_status("ReplicaSetUpdated"))))
    group = Group("shop", "orders")
    group.set_spec(replace(BODY, metadata=replace(BODY.metadata, generation=1)), None)
    await deployments.sync(group)
    assert group.snapshot(0.0, BrokerState(), {}).rolling_out is False
    assert [deployment.metadata.resource_version for deployment in deployments.expected] == ["11"]


async def test_deployment_that_was_deleted_during_its_apply_is_applied_again() -> None:
    """The watch may report the new Deployment and its deletion before the response to the apply arrives."""

    class DeletingServer(RollingServer):
        applies = 0

        async def get(self, *_: object) -> Deployment:
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", "deployments not found")

        async def apply(self, *_: object) -> Deployment:
            self.applies += 1
            if self.applies == 1:
                deployments.on_upsert(self.deployment("9"))
                deployments.on_delete(self.deployment("10"))
                return self.deployment("9")
            return self.deployment("11")

    server = DeletingServer(rollout_status("ReplicaSetUpdated"))
    deployments = Deployments(cast("Api", server))
    group = Group("shop", "orders")
    group.set_spec(replace(BODY, metadata=replace(BODY.metadata, generation=1)), None)
    await deployments.sync(group)
    assert list(deployments.expected) == []
    assert group.deployment_problems == ()
    await deployments.sync(group)
    assert [deployment.metadata.resource_version for deployment in deployments.expected] == ["11"]


async def test_template_is_rejected_by_an_operator_without_rights_to_deployments() -> None:
    server = ConflictingServer()
    deployments = Deployments(cast("Api", server), enabled=False)
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    assert await deployments.sync(group) == 0
    ((reason, message),) = group.deployment_problems
    assert reason is Reason.TEMPLATE_REJECTED
    assert message.startswith("This operator manages no Deployments (--no-fleets; rbac.fleets in the chart)")
    group.set_spec(replace(BODY, spec={**SPEC, "template": None, "replicas": None}), None)
    assert await deployments.sync(group) == 0
    assert group.deployment_problems == ()
    assert server.deleted == []


async def test_deployment_is_deleted_though_its_template_is_removed_after_a_write_conflict() -> None:
    server = ConflictingServer()
    deployments = Deployments(cast("Api", server))
    deployments.on_upsert(OWNED)
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    with pytest.raises(ConflictError):
        await deployments.sync(group)
    without_template = {name: value for name, value in SPEC.items() if name not in {"template", "replicas"}}
    group.set_spec(replace(BODY, spec=without_template), None)
    assert await deployments.sync(group) == 1
    assert server.deleted == ["/apis/apps/v1/namespaces/shop/deployments/orders"]


async def test_template_is_not_called_rejected_if_the_deployment_cannot_be_read_after_a_write_conflict() -> None:
    class UnreadableServer(ConflictingServer):
        async def get(self, *_: object) -> Deployment:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError", "etcd has no leader")

    deployments = Deployments(cast("Api", UnreadableServer()))
    deployments.on_upsert(OWNED)
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    with pytest.raises(ApiError, match="etcd has no leader"):
        await deployments.sync(group)
    assert group.deployment_problems == ()


@pytest.mark.parametrize("kind", ["group", "deployment"])
async def test_template_that_is_too_large_is_not_kept_in_memory(kind: str) -> None:
    deployments = Deployments(cast("Api", ConflictingServer()))
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    if kind == "group":
        image = "a" * MAX_SPEC_BYTES
        large = {**SPEC, "template": {"spec": {"containers": [{"name": "app", "image": image}]}}}
        body = replace(BODY, spec=large)
        group.set_spec(body, None)
        (problem,) = group.resolved_spec.problems
        assert (body.spec, problem.reason) == (None, Reason.INVALID_SPEC)
        assert problem.message.endswith("; the limit is 131,072: shorten spec.template")
    else:
        large_deployment = replace(OWNED, spec=Raw(b'{"paused": "%s"}' % (b"a" * MAX_DEPLOYMENT_BYTES)))
        assert bytes(large_deployment.spec) == b""
        deployments.on_upsert(large_deployment)
        await deployments.sync(group)
        ((reason, message),) = group.deployment_problems
        assert reason is Reason.TEMPLATE_REJECTED
        assert message == "The Deployment orders has a spec of more than 262,144 bytes; shorten spec.template"


def test_deployment_deleted_after_a_successor_of_its_name_was_created_leaves_the_successor_expected() -> None:
    deployments = Deployments(cast("Api", ConflictingServer()))
    recreated = replace(OWNED, metadata=replace(OWNED.metadata, uid="3", resource_version="9"))
    deployments.on_upsert(recreated)
    deployments.on_delete(replace(OWNED, metadata=replace(OWNED.metadata, resource_version="8")))
    assert [*deployments.expected] == [recreated]
    deployments.on_delete(Deployment(replace(recreated.metadata, resource_version="10")))
    assert [*deployments.expected] == []
