"""Times until members use a changed subscription, on a real node.

Ours: the operator writes the ConfigMap and annotates the pods, so that the kubelet syncs it at once. The peer: the same
ConfigMap is changed by hand while no operator runs. The kubelet then syncs it at its next periodic sync of the pods, as
in versions that did not poke for settings.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import ClientSession

from bench.fleets import PODS, WHERE, Ground, Rota, standing
from bench.measure import Row, Sample
from bench.node import NodeGround
from e2e.release import OPERATOR_NAMESPACE
from ground.api import Object
from ground.ours import at_rest
from ground.poll import soon
from rota.spec.resolved import settings_digest

MEMBERS, QUEUES = 3, 12
RUNS, PEER_RUNS = 9, 3
PATIENCE_SECONDS = 300.0
POLL_SECONDS = 0.01  # between two requests for a report
PEER_APART_SECONDS = 20.0  # more each time: the kubelet's own syncs are about a minute apart
OPERATOR = f"/apis/apps/v1/namespaces/{OPERATOR_NAMESPACE}/deployments/rota"
OPERATOR_PODS = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods"


def rows() -> Iterator[Row]:
    """Change the subscription of a group of three, and wait until each member reports the new settings."""
    with standing("bench-settings", NodeGround) as ground:
        group = Rota(ground, "settings", QUEUES)
        group.make(MEMBERS)
        ours, peer = ground.runner.run(_measured(_Fleet(ground, group.topic)))
    what = f"a subscription of a group of {MEMBERS} is changed"
    yield Row(f"{what}: until the last member uses it", Sample(ours.last), Sample(peer.last), "≤ 2 s")
    yield Row("the same: from the first member to the last", Sample(ours.apart), Sample(peer.apart))


class _Times:
    """For each change, the seconds until the last member used it, and for how many seconds members differed."""

    def __init__(self) -> None:
        self.last: list[float] = []
        self.apart: list[float] = []


class _Fleet:
    """The group, and its members' reports."""

    def __init__(self, ground: Ground, topic: str) -> None:
        self.api = ground.api
        self._topic = topic
        self._group = f"{WHERE}/consumergroups/{topic}"
        self._config_map = f"/api/v1/namespaces/default/configmaps/{topic}-rota"

    async def change_group(self, tag: str) -> None:
        """Patch the expression of the group's subscription."""
        subscription = {"topic": self._topic, "expression": f"paid || {tag}"}
        await self.api.patch(self._group, {"spec": {"subscriptions": [subscription]}})

    async def change_config_map(self, tag: str) -> None:
        """Patch the expression in the settings that members read."""
        settings = json.loads(await self._settings())
        settings["subscriptions"][0]["expression"] = f"paid || {tag}"
        await self.api.patch(self._config_map, {"data": {"group.json": json.dumps(settings)}})

    async def is_settled(self) -> bool:
        """Whether all members consume, and no handover is in progress."""
        return at_rest(await self.api.get(self._group), MEMBERS)

    async def measure_change(self, change: Callable[[str], Awaitable[None]], tag: str, times: _Times) -> None:
        """Change the settings; record the time until each member reports new ones."""
        pods = await self.api.list(PODS, labelSelector=f"rota.dev/group={self._topic}")
        async with ClientSession() as session:
            old_digest = settings_digest(await self._settings())
            began = time.perf_counter()
            await change(tag)
            change_times = await asyncio.gather(*(_time_of_change(session, pod, old_digest) for pod in pods))
            new_digest = settings_digest(await self._settings())
            reported_digests = {await _fetch_digest(session, pod) for pod in pods}
        if reported_digests != {new_digest}:
            raise RuntimeError(
                f"members use {', '.join(sorted(reported_digests))}; the group's settings are {new_digest}"
            )
        times.last.append(max(change_times) - began)
        times.apart.append(max(change_times) - min(change_times))

    async def stop_operators(self) -> None:
        """Stop all operators."""
        await self.api.patch(OPERATOR, {"spec": {"replicas": 0}})
        await soon(self._without_operators, PATIENCE_SECONDS)

    async def _without_operators(self) -> bool:
        return not await self.api.list(OPERATOR_PODS, labelSelector="app.kubernetes.io/component=operator")

    async def _settings(self) -> str:
        text: str = (await self.api.get(self._config_map))["data"]["group.json"]
        return text


async def _measured(fleet: _Fleet) -> tuple[_Times, _Times]:
    ours, peer = _Times(), _Times()
    for number in range(RUNS):
        await soon(fleet.is_settled, PATIENCE_SECONDS)
        await fleet.measure_change(fleet.change_group, f"ours{number}", ours)
    await soon(fleet.is_settled, PATIENCE_SECONDS)
    await fleet.stop_operators()
    for number in range(PEER_RUNS):
        await asyncio.sleep(number * PEER_APART_SECONDS)
        await fleet.measure_change(fleet.change_config_map, f"peer{number}", peer)
    return ours, peer


async def _time_of_change(session: ClientSession, pod: Object, old_digest: str) -> float:
    """Return the time at which a member first reports settings other than the old ones."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await _fetch_digest(session, pod) == old_digest:
            await asyncio.sleep(POLL_SECONDS)
    return time.perf_counter()


async def _fetch_digest(session: ClientSession, pod: Object) -> str:
    async with session.get(f"http://{pod['status']['podIP']}:9911/v1/report") as response:
        digest: str = (await response.json())["settings"]
    return digest
