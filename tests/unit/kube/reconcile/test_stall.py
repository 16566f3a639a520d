"""An operator whose process is stopped for a while: silence that it did not observe costs no member its queues."""

import asyncio
import contextlib
import selectors
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from rota.brokers.memory import BROKER, MemoryCluster
from rota.documents import Assignment, Share, encode_assignment
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import ApiError
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, CustomResource, Metadata, Pod
from rota.kube.members.report_client import Endpoint, MemberResponse
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.workload.deployments import Deployments
from rota.model import Queue
from rota.ranges import to_ranges
from rota.reports import Report
from unit.kube.state.test_group import a_pod

QUEUES = tuple(Queue("orders", BROKER, number) for number in range(4))
BODY = CustomResource(
    Metadata("orders", uid="1", namespace="shop", resource_version="1", generation=1),
    {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": "orders"}]},
)
ASSIGNMENT = Assignment(
    group="shop/orders",
    generation=1,
    issued_at="2026-11-29T00:00:00.000Z",
    members={"orders-a": Share("a", QUEUES), "orders-b": Share("b", ())},
)
STALL_SECONDS = 30.0


class JumpingSelector(selectors.DefaultSelector):
    """Skips waiting times instead of waiting, and counts the skipped seconds."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class Server:
    """An API server that accepts writes of the assignment, and knows no other object."""

    def __init__(self) -> None:
        self.written: list[Mapping[str, Any]] = []

    async def get(self, *_: object) -> Any:
        raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", "")

    async def replace(self, _: str, body: Mapping[str, Any], __: object) -> ConfigMap:
        self.written.append(body["data"])
        return a_config_map(2 + len(self.written), body["data"])

    create = apply = merge_patch = get


class Members:
    """The sidecars of both members; `orders-a` does not respond while `is_silent`."""

    is_silent = False

    async def read(self, member: Endpoint) -> MemberResponse:
        requested_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.01)
        if member.uid == "a" and self.is_silent:
            return MemberResponse(None, requested_at)
        held = to_ranges(QUEUES) if member.uid == "a" else {}
        report = Report(member=f"orders-{member.uid}", uid=member.uid, generation=1, held=held)
        return MemberResponse(report, requested_at)

    async def long_poll(self, member: Endpoint, _: int, seconds: float = 10.0) -> MemberResponse:
        await asyncio.sleep(seconds)
        return await self.read(member)


def a_config_map(version: int, data: Mapping[str, Any]) -> ConfigMap:
    metadata = Metadata("orders-rota", namespace="shop", resource_version=str(version), labels={GROUP_LABEL: "orders"})
    return ConfigMap(metadata, data=dict(data))


def an_unready_pod() -> Pod:
    pod = a_pod(name="a", started=True)
    return msgspec.structs.replace(pod, status=msgspec.structs.replace(pod.status, conditions=[]))


async def stall_after_one_missing_response(selector: JumpingSelector) -> list[Mapping[str, Any]]:
    """Return the assignments that the operator writes if it stalls while a member that is not Ready seems silent."""
    cluster = MemoryCluster()
    await cluster.create_topic("orders", BROKER, 4)
    server: Any = Server()
    members: Any = Members()
    registry = BrokerRegistry(server, lambda _: cluster)
    controller = Controller(server, members, registry, Deployments(server))
    events = EventHandlers(controller)
    for name in ("a", "b"):
        events.pods.on_upsert(a_pod(name=name, started=True))
    events.groups.on_upsert(BODY)
    events.assignments.on_upsert(a_config_map(2, encode_assignment(ASSIGNMENT)))
    controller.set_leading(is_leading=True)
    await asyncio.sleep(1.0)
    members.is_silent = True
    events.pods.on_upsert(an_unready_pod())
    await asyncio.sleep(1.5)
    assert controller.groups["shop", "orders"].pods["orders-a"].unreachable_since
    server.written.clear()
    members.is_silent = False
    selector.now += STALL_SECONDS
    await asyncio.sleep(1.0)
    await controller.close()
    await registry.close()
    written: list[Mapping[str, Any]] = server.written
    return written


def test_member_is_not_silent_while_the_operator_is_stalled() -> None:
    """The member would be lost after `lostAfter`, and its queues would be granted while it consumes them."""
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with contextlib.closing(loop):
        assert loop.run_until_complete(stall_after_one_missing_response(selector)) == []
