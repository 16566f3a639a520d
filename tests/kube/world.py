"""What tests of a group's life share: a namespace with an operator and a fleet of simulated members."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from ground import ours
from ground.api import Api, ApiError, Object
from ground.poll import PATIENCE_SECONDS, soon
from kube.brains import Operator
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
    """One namespace with an operator and a fleet."""

    def __init__(self, api: Api, namespace: str, fleet: GroupMembers, operator: Operator) -> None:
        self.api, self.namespace, self.fleet, self.operator = api, namespace, fleet, operator
        self.path = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups/{fleet.group}"

    async def begun(self) -> None:
        """Wait for the first document: a group that has none while its pods run may have lost it."""

        async def seen() -> bool:
            return bool(self.fleet.documents)

        await self.soon(seen)

    async def until(self, *shares: int) -> None:
        """Wait until the members work so many queues each, whoever it is."""

        async def shared() -> bool:
            return self.shares(*shares)

        await self.soon(shared)

    async def soon(self, ask: Callable[[], Awaitable[bool]], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until something is so; if it never is, tell all that can be known."""
        try:
            await soon(ask, seconds)
        except TimeoutError as error:
            error.add_note(await self.story())
            raise

    def shares(self, *shares: int) -> bool:
        """Whether the members work so many queues each now."""
        return sorted(self.fleet.shares.values()) == sorted(shares)

    async def settled(self) -> bool:
        """Whether people are told that nothing goes on, about the members that there are."""
        status = await self.status()
        going_on = ours.conditions({"status": status}).get("Progressing", {}).get("status")
        return going_on == "False" and status.get("members") == len(self.fleet.members)

    async def at_rest(self) -> bool:
        """Whether it is settled, and nothing is left that time alone will change in a moment."""
        again = [done.plan.requeue_after for done in self.operator.done if done.group.name == self.fleet.group]
        return bool(again) and again[-1] > 1 and await self.settled()

    async def counts(self, members: int, pods: int | None = None) -> None:
        """Wait until people are told of so many members, and of so many pods."""

        async def told() -> bool:
            status = await self.status()
            return (status.get("members"), status.get("replicas")) == (members, pods or len(self.fleet.members))

        await self.soon(told)

    async def story(self) -> str:
        """Return all that can be known, for people who look for what went wrong."""
        pods = await self.api.list(f"/api/v1/namespaces/{self.namespace}/pods")
        pokes = {pod["metadata"]["name"]: pod["metadata"].get("annotations") for pod in pods}
        reports = {name: (one.member.state, one.member.obeyed_generation) for name, one in self.fleet.members.items()}
        written = self.fleet.documents[-1:]
        return f"{self.fleet.shares=}\n{await self.status()=}\n{written=}\n{pokes=}\n{reports=}"

    async def pokes(self) -> dict[str, Poke]:
        """Return how each pod was last poked."""
        pods = await self.api.list(f"/api/v1/namespaces/{self.namespace}/pods")
        return {it["metadata"]["name"]: parse_poke(it["metadata"].get("annotations") or {}) for it in pods}

    async def status(self) -> Object:
        found: Object = (await self.api.get(self.path)).get("status") or {}
        return found

    async def condition(self, kind: str) -> Object:
        """Wait for a condition."""

        async def told() -> Object:
            return (await self.conditions()).get(kind, {})

        return await soon(told)

    async def well(self, kind: str) -> None:
        """Wait until a condition is over."""

        async def over() -> bool:
            found = await self.conditions()
            return "Ready" in found and kind not in found

        await soon(over)

    async def conditions(self) -> dict[str, Object]:
        """Return all conditions by type."""
        return ours.conditions({"status": await self.status()})

    async def events(self) -> list[Object]:
        """Return the Events about the group."""
        found = await self.api.list(f"/api/v1/namespaces/{self.namespace}/events")
        return [one for one in found if one["involvedObject"]["name"] == self.fleet.group]


@asynccontextmanager
async def billing(world: OperatedNamespace, namespace: str = "") -> AsyncIterator[OperatedNamespace]:
    """Make another group, which reads another topic from another broker, with two members."""
    namespace = namespace or world.namespace
    async with GroupMembers(world.api, namespace, "billing", world.fleet.addresses) as fleet:
        found = OperatedNamespace(world.api, namespace, fleet, world.operator)
        group = a_group("billing", subscriptions=[{"topic": "bills"}])
        await world.api.create(found.path.rpartition("/")[0], group)
        await fleet.add("billing-a", "billing-b")
        await found.until(3, 3)
        yield found


async def goes_on(other: OperatedNamespace) -> None:
    """Find that a group is served as if nothing had happened elsewhere."""
    await other.fleet.add("billing-c")
    await other.until(2, 2, 2)
    assert (await other.condition("Degraded"))["status"] == "False"


async def two_members(world: OperatedNamespace) -> dict[str, Any]:
    """Add two members, wait until people are told of them, and return who works what."""
    await world.fleet.add("orders-a", "orders-b")
    await world.until(4, 4)
    await soon(world.settled)
    return world.fleet.as_value()


async def is_gone(api: Api, path: str) -> bool:
    try:
        await api.get(path)
    except ApiError as error:
        return error.status == 404
    return False
