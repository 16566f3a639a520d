"""Shared by tests of a group's life: a namespace with an operator and simulated members."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from ground import ours
from ground.api import Api, ApiError, Object
from ground.poll import PATIENCE_SECONDS, soon
from kube.in_process_operator import Operator
from kube.members import GroupMembers
from rota.kube.client.objects import parse_poke
from rota.model import Poke

GROUP = "orders"


def a_group(name: str = GROUP, **spec: Any) -> Object:
    broker = {"rocketmq": {"nameServers": ["memory:9876"]}}
    return {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "ConsumerGroup",
        "metadata": {"name": name},
        "spec": {"broker": broker, "subscriptions": [{"topic": "orders"}], **spec},
    }


class OperatedNamespace:
    """One namespace with an operator and simulated members."""

    def __init__(self, api: Api, namespace: str, fleet: GroupMembers, operator: Operator) -> None:
        self.api = api
        self.namespace = namespace
        self.fleet = fleet
        self.operator = operator
        self.path = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups/{fleet.group}"

    async def wait_for_document(self) -> None:
        """Wait for the first assignment: pods that run without one look like a group that has lost its assignment."""

        async def was_written() -> bool:
            return bool(self.fleet.documents)

        await self.soon(was_written)

    async def wait_for_shares(self, *shares: int) -> None:
        """Wait until the members consume these numbers of queues, in any order."""

        async def has_shares() -> bool:
            return self.shares(*shares)

        await self.soon(has_shares)

    async def soon(self, is_so: Callable[[], Awaitable[bool]], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until the condition holds; on timeout, add the state of the namespace to the error."""
        try:
            await soon(is_so, seconds)
        except TimeoutError as error:
            error.add_note(await self.describe())
            raise

    def shares(self, *shares: int) -> bool:
        """Whether the members consume these numbers of queues now."""
        return sorted(self.fleet.shares.values()) == sorted(shares)

    async def settled(self) -> bool:
        """Whether the status counts all members and is not Progressing."""
        status = await self.status()
        progressing = ours.conditions({"status": status}).get("Progressing", {}).get("status")
        return progressing == "False" and status.get("members") == len(self.fleet.members)

    async def at_rest(self) -> bool:
        """Whether it is settled, and the next timed reconcile is not due within a second."""
        delays = [done.plan.requeue_after for done in self.operator.reconciles if done.group.name == self.fleet.group]
        return bool(delays) and delays[-1] > 1 and await self.settled()

    async def wait_for_counts(self, members: int, pods: int | None = None) -> None:
        """Wait until the status has these numbers of members and of pods; by default one pod per simulated member."""

        async def has_counts() -> bool:
            status = await self.status()
            return (status.get("members"), status.get("replicas")) == (members, pods or len(self.fleet.members))

        await self.soon(has_counts)

    async def describe(self) -> str:
        """Return the state of the namespace, for the error of a failed test."""
        pods = await self.api.list(f"/api/v1/namespaces/{self.namespace}/pods")
        pokes = {pod["metadata"]["name"]: pod["metadata"].get("annotations") for pod in pods}
        reports = {
            name: (member.member.state, member.member.obeyed_generation) for name, member in self.fleet.members.items()
        }
        written = self.fleet.documents[-1:]
        return f"{self.fleet.shares=}\n{await self.status()=}\n{written=}\n{pokes=}\n{reports=}"

    async def pokes(self) -> dict[str, Poke]:
        """Return the last poke of each pod."""
        pods = await self.api.list(f"/api/v1/namespaces/{self.namespace}/pods")
        return {pod["metadata"]["name"]: parse_poke(pod["metadata"].get("annotations") or {}) for pod in pods}

    async def status(self) -> Object:
        status: Object = (await self.api.get(self.path)).get("status") or {}
        return status

    async def wait_for_condition(self, kind: str) -> Object:
        """Wait for a condition, and return it."""

        async def condition() -> Object:
            return (await self.conditions()).get(kind, {})

        return await soon(condition)

    async def wait_until_cleared(self, kind: str) -> None:
        """Wait until the status has been written without this condition."""

        async def is_cleared() -> bool:
            conditions = await self.conditions()
            return "Ready" in conditions and kind not in conditions

        await soon(is_cleared)

    async def conditions(self) -> dict[str, Object]:
        """Return all conditions by type."""
        return ours.conditions({"status": await self.status()})

    async def events(self) -> list[Object]:
        """Return the Events about the group."""
        events = await self.api.list(f"/api/v1/namespaces/{self.namespace}/events")
        return [event for event in events if event["involvedObject"]["name"] == self.fleet.group]


@asynccontextmanager
async def billing_group(world: OperatedNamespace, namespace: str = "") -> AsyncIterator[OperatedNamespace]:
    """Create another group, which reads another topic from another broker, with two members."""
    namespace = namespace or world.namespace
    async with GroupMembers(world.api, namespace, "billing", world.fleet.addresses) as fleet:
        billing = OperatedNamespace(world.api, namespace, fleet, world.operator)
        group = a_group("billing", subscriptions=[{"topic": "bills"}])
        await world.api.create(billing.path.rpartition("/")[0], group)
        await fleet.add("billing-a", "billing-b")
        await billing.wait_for_shares(3, 3)
        yield billing


async def assert_unaffected(group: OperatedNamespace) -> None:
    """Assert that the operator still serves this group: a new member gets its share."""
    await group.fleet.add("billing-c")
    await group.wait_for_shares(2, 2, 2)
    assert (await group.wait_for_condition("Degraded"))["status"] == "False"


async def add_two_members(world: OperatedNamespace) -> dict[str, Any]:
    """Add two members, wait until the status counts them, and return the owner of each queue."""
    await world.fleet.add("orders-a", "orders-b")
    await world.wait_for_shares(4, 4)
    await soon(world.settled)
    return world.fleet.owners()


async def is_gone(api: Api, path: str) -> bool:
    try:
        await api.get(path)
    except ApiError as error:
        return error.status == 404
    return False
