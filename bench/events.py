"""How late kopf delivers changes of two thousand groups, with our settings and with its default idle timeout.

On a real API server, each group's status is written once a minute on average. The lateness of an event is the time from
the API server's response to that write until kopf calls the handler.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import kopf

from bench.measure import Row, Sample
from bench.scale import all_of
from ground.api import Api
from ground.controlplane import ControlPlane
from ground.instance import temporary
from ground.ours import define
from ground.report import say
from rota.kube.client import kopf_watch
from rota.kube.client.login.accounts import find_account
from rota.kube.client.login.kubeconfig import LoginOptions
from rota.kube.client.login.session import Login
from rota.kube.client.objects import CustomResource

GROUPS = int(os.environ.get("EVENTS_GROUPS", "2000"))
WRITES = int(os.environ.get("EVENTS_WRITES", "4000"))
MOST_MERGED = WRITES // 100  # events that may be missing: of several events of one group kopf may deliver only the last
EACH_SECONDS = 60.0  # between two writes of a group's status
KOPFS_DEFAULTS = {"worker_limit": 100, "idle_timeout": 5.0}  # the limit is our previous setting: kopf's own is none

PATH = "/apis/rota.dev/v1alpha1/namespaces/default/consumergroups"


def rows() -> Iterator[Row]:
    """List all groups, then follow their changes."""
    with temporary("bench-events") as instance:
        cluster = ControlPlane(instance)
        cluster.up()
        yield from asyncio.run(_measured(cluster))


async def _measured(cluster: ControlPlane) -> list[Row]:
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
    async with Api.connect(cluster.kubeconfig) as api:
        await define(api)
        say(f"making {GROUPS:,} groups.")
        await all_of(lambda number: api.create(PATH, _group(number)), range(GROUPS))
        async with await Login.create(find_account(LoginOptions())) as login:
            ours = await _measure_watch(api, login, {})
            peer = await _measure_watch(api, login, KOPFS_DEFAULTS)
    each = f"{GROUPS:,} groups, a status write a minute in each"
    return [
        Row(f"the first list of {GROUPS:,} groups passed on by kopf", Sample(ours.listed), Sample(peer.listed)),
        Row(f"{each}: an event is late by", Sample(ours.late), Sample(peer.late), "median ≤ 0.1 s"),
    ]


def _group(number: int) -> dict[str, Any]:
    spec = {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": "orders"}]}
    metadata = {"name": f"group-{number:04}"}
    return {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": metadata, "spec": spec}


class _Lateness(NamedTuple):
    """The seconds of the first list, and the lateness of each event in seconds."""

    listed: list[float]
    late: list[float]


class _Watch:
    """kopf as the operator runs it; records when it called the handler for each version of each group."""

    def __init__(self, login: Login, queueing_settings: dict[str, float]) -> None:
        self._login = login
        self.listed_groups: set[str] = set()
        self.listed = asyncio.Event()
        self.called: dict[tuple[str, str], float] = {}
        self._settings = kopf_watch.build_settings()
        for name, value in queueing_settings.items():
            setattr(self._settings.queueing, name, value)

    def handle(self, group: CustomResource) -> None:
        """Record the time of an event."""
        self.listed_groups.add(group.metadata.name)
        if len(self.listed_groups) == GROUPS:
            self.listed.set()
        self.called[group.metadata.name, group.metadata.resource_version] = time.perf_counter()

    async def run(self) -> None:
        """Watch until cancelled."""
        registry = kopf_watch.build_registry(self._login, (self.handle, self.handle), (_ignore, _ignore))
        tasks_before = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=registry, identity="bench", settings=self._settings, standalone=True, clusterwide=True
        )
        await kopf.run_tasks(tasks, ignored=tasks_before)


def _ignore(_: CustomResource) -> None:
    """Ignore a deleted object or an object of another kind."""


async def _measure_watch(api: Api, login: Login, queueing_settings: dict[str, float]) -> _Lateness:
    """Wait for the first list, then write statuses and collect the lateness of their events."""
    watch = _Watch(login, queueing_settings)
    written = dict[tuple[str, str], float]()
    began = time.perf_counter()
    running = asyncio.create_task(watch.run())
    await watch.listed.wait()
    listed = time.perf_counter() - began
    say(f"listed in {listed:.1f} s; writing {WRITES:,} statuses.")
    pause = EACH_SECONDS / GROUPS
    due = time.perf_counter()
    for number in islice(_shuffled(), WRITES):
        due += pause
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        name = f"group-{number:04}"
        response = await api.patch(f"{PATH}/{name}/status", {"status": {"queues": len(written) + 1}})
        written[name, response["metadata"]["resourceVersion"]] = time.perf_counter()
    while len(written.keys() - watch.called.keys()) > MOST_MERGED:
        await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait([running])
    late = [max(0.0, watch.called[version] - at) for version, at in written.items() if version in watch.called]
    say(f"{len(late):,} of {len(written):,} events were passed on one by one.")
    return _Lateness([listed], late)


def _shuffled() -> Iterator[int]:
    """Yield group numbers so that each comes once per cycle, with many other groups between two of its turns."""
    while True:
        yield from (number * 7919 % GROUPS for number in range(GROUPS))
