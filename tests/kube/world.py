"""What tests of a group's life share: a namespace with an operator and a fleet of simulated members."""

from typing import Any

from ground.api import Api, Object
from ground.poll import soon
from kube.brains import Operator
from kube.members import Fleet

GROUP = "orders"


def a_group(name: str = GROUP, **spec: Any) -> Object:
    broker = {"rocketmq": {"nameServers": ["memory:9876"]}}
    return {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "ConsumerGroup",
        "metadata": {"name": name},
        "spec": {"broker": broker, "subscriptions": [{"topic": "orders"}], **spec},
    }


class World:
    """One namespace with an operator and a fleet."""

    def __init__(self, api: Api, namespace: str, fleet: Fleet, operator: Operator) -> None:
        self.api, self.namespace, self.fleet, self.operator = api, namespace, fleet, operator
        self.path = f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups/{GROUP}"

    async def until(self, *shares: int) -> None:
        """Wait until the members work so many queues each, whoever it is."""

        async def shared() -> bool:
            return self.shares(*shares)

        try:
            await soon(shared, 60)
        except TimeoutError as error:
            error.add_note(await self.story())
            raise

    def shares(self, *shares: int) -> bool:
        """Whether the members work so many queues each now."""
        return sorted(self.fleet.shares.values()) == sorted(shares)

    async def settled(self) -> bool:
        """Whether people are told that nothing goes on, about the members that there are."""
        status = await self.status()
        conditions = {one["type"]: one["status"] for one in status.get("conditions") or []}
        return conditions.get("Progressing") == "False" and status.get("members") == len(self.fleet.members)

    async def story(self) -> str:
        """Return all that can be known, for people who look for what went wrong."""
        pods = await self.api.list(f"/api/v1/namespaces/{self.namespace}/pods")
        pokes = {pod["metadata"]["name"]: pod["metadata"].get("annotations") for pod in pods}
        reports = {name: (one.member.state, one.member.obeyed) for name, one in self.fleet.members.items()}
        written = self.fleet.documents[-1:]
        return f"{self.fleet.shares=}\n{await self.status()=}\n{written=}\n{pokes=}\n{reports=}"

    async def status(self) -> Object:
        found: Object = (await self.api.get(self.path)).get("status") or {}
        return found

    async def condition(self, kind: str) -> Object:
        """Wait for a condition."""

        async def told() -> Object:
            conditions = (await self.status()).get("conditions") or []
            return next((one for one in conditions if one["type"] == kind), {})

        return await soon(told, 60)
