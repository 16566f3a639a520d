"""Observations that arrive out of order: of a leadership that was lost meanwhile, and of a deleted assignment."""

from http import HTTPStatus
from typing import Any

import msgspec

from ground.poll import soon
from rota.brokers.memory import BROKER
from rota.documents import Assignment, encode_assignment
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import ApiError, NoResponseError
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, CustomResource, Metadata
from rota.kube.reconcile.assignment_writer import AssignmentWriter, PendingPlan
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.reconcile.observe import GroupStateReader, PriorityLimiter
from rota.kube.state.group import Group
from rota.kube.workload.deployments import Deployments
from rota.planner import Plan
from slow_cluster import SlowCluster

UNUSED: Any = None


class EmptyServer:
    """An API server without objects, which responds to no write."""

    async def get(self, *_: object) -> Any:
        raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", "")

    async def create(self, *_: object) -> Any:
        raise NoResponseError("no response")

    apply = merge_patch = replace = create


class DeletingServer:
    """An API server that stores an assignment, which is deleted before the response to the write arrives."""

    events: EventHandlers

    async def replace(self, *_: object) -> ConfigMap:
        self.events.assignments.on_upsert(a_version(3))
        self.events.assignments.on_delete(a_version(4))
        return a_version(3)


class RestoringRegistry:
    """Brokers; while they are polled for the first time, a user restores an old copy of the assignment."""

    def __init__(self) -> None:
        self.polls = 0

    async def poll_group(self, group: Group) -> None:
        self.polls += 1
        if self.polls == 1:
            group.set_assignment(a_version(3))


BODY = CustomResource(
    Metadata("orders", uid="1", namespace="shop", resource_version="1", generation=1),
    {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": "orders"}]},
)
ASSIGNMENT = Assignment(group="shop/orders", generation=1, issued_at="2026-11-29T00:00:00.000Z")
STORED = ConfigMap(
    Metadata("orders-rota", namespace="shop", resource_version="2", labels={GROUP_LABEL: "orders"}),
    data={name: str(text) for name, text in encode_assignment(ASSIGNMENT).items()},
)


def a_version(number: int) -> ConfigMap:
    metadata = msgspec.structs.replace(STORED.metadata, resource_version=str(number))
    return msgspec.structs.replace(STORED, metadata=metadata)


async def test_leader_election_that_overtakes_an_observation_repeats_it() -> None:
    """Otherwise the group would stay without a connection to its brokers, and its queues without an owner."""
    cluster = SlowCluster()
    await cluster.create_topic("orders", BROKER, 4)
    api: Any = EmptyServer()
    registry = BrokerRegistry(api, lambda _: cluster)
    controller = Controller(api, UNUSED, registry, Deployments(api))
    events = EventHandlers(controller)
    events.groups.on_upsert(BODY)
    events.assignments.on_upsert(STORED)
    controller.set_leading(is_leading=True)
    await cluster.asked.wait()
    controller.set_leading(is_leading=False)
    controller.set_leading(is_leading=True)
    cluster.released.set()
    group = controller.groups["shop", "orders"]

    async def is_observed() -> bool:
        return group.was_observed

    await soon(is_observed)
    assert registry.state_of(group, 0.0).views.get("orders")
    await controller.close()
    await registry.close()


async def test_assignment_restored_during_an_observation_repeats_it() -> None:
    """The reports that were read before cannot show that it is an old copy."""
    api: Any = EmptyServer()
    registry: Any = RestoringRegistry()
    reader = GroupStateReader(api, UNUSED, registry, PriorityLimiter(1))
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.set_assignment(STORED)
    await reader.refresh_state(group)
    assert not group.was_observed
    await reader.refresh_state(group)
    assert group.was_observed
    assert registry.polls == 2


async def test_assignment_deleted_before_the_response_to_its_write_arrives_stays_deleted() -> None:
    """Otherwise it would not be written again until something else changes, and no new pod could mount it."""
    api: Any = DeletingServer()
    controller = Controller(api, UNUSED, BrokerRegistry(api), Deployments(api))
    events = EventHandlers(controller)
    events.groups.on_upsert(BODY)
    group = controller.groups["shop", "orders"]
    events.assignments.on_upsert(STORED)
    group.was_observed = True
    api.events = events
    await AssignmentWriter(api, group).write(PendingPlan(Plan(document=ASSIGNMENT), 0.0))
    assert group.stored_assignment.resource_version == ""
    assert group.assignment.is_outdated, "it is read again"
    assert group.was_observed, "the watch reported this operator's own write"
