"""Events: how late kopf passes on changes of two thousand groups, with our settings and with its default idle time-out.

A status of each group is written once a minute on average, at a real API server; an event is late by the time from the
API server's answer to that write until kopf has called the handler.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from functools import partial
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
MOST_MERGED = WRITES // 100  # of several events of one group kopf may pass on the last one only
EACH_SECONDS = 60.0  # a group's status is written so often
KOPFS_DEFAULTS = {"worker_limit": 100, "idle_timeout": 5.0}  # the limit is what we set before: kopf's own is none

PATH = "/apis/rota.dev/v1alpha1/namespaces/default/consumergroups"


def rows() -> Iterator[Row]:
    """List all groups, then follow changes of them."""
    with temporary("bench-events") as instance:
        cluster = ControlPlane(instance)
        cluster.up()
        yield from asyncio.run(_measured(cluster))


async def _measured(cluster: ControlPlane) -> list[Row]:
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
    async with Api.connect(cluster.kubeconfig) as api:
        await define(api)
        say(f"making {GROUPS:,} groups.")
        await all_of(partial(api.create, PATH, _group(number)) for number in range(GROUPS))
        async with await Login.create(find_account(LoginOptions())) as login:
            ours = await _followed(api, login, {})
            peer = await _followed(api, login, KOPFS_DEFAULTS)
    each = f"{GROUPS:,} groups, a status write a minute in each"
    return [
        Row(f"the first list of {GROUPS:,} groups passed on by kopf", Sample(ours.listed), Sample(peer.listed)),
        Row(f"{each}: an event is late by", Sample(ours.late), Sample(peer.late), "median ≤ 0.1 s"),
    ]


def _group(number: int) -> dict[str, Any]:
    spec = {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": "orders"}]}
    metadata = {"name": f"group-{number:04}"}
    return {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": metadata, "spec": spec}


class _Followed(NamedTuple):
    """The seconds that the first list took, and those by which each event was late."""

    listed: list[float]
    late: list[float]


class _Watch:
    """kopf as the operator runs it, and when it called the handler for which version of which group."""

    def __init__(self, login: Login, changed: dict[str, float]) -> None:
        self._login = login
        self.seen: set[str] = set()
        self.listed = asyncio.Event()
        self.called: dict[tuple[str, str], float] = {}
        self._settings = kopf_watch.build_settings()
        for name, value in changed.items():
            setattr(self._settings.queueing, name, value)

    def handle(self, group: CustomResource) -> None:
        """Note an event."""
        self.seen.add(group.metadata.name)
        if len(self.seen) == GROUPS:
            self.listed.set()
        self.called[group.metadata.name, group.metadata.resource_version] = time.perf_counter()

    async def run(self) -> None:
        """Watch until cancelled."""
        registry = kopf_watch.build_registry(self._login, (self.handle, self.handle), (_ignore, _ignore))
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=registry, identity="bench", settings=self._settings, standalone=True, clusterwide=True
        )
        await kopf.run_tasks(tasks, ignored=others)


def _ignore(_: CustomResource) -> None:
    """Take no notice."""


async def _followed(api: Api, login: Login, changed: dict[str, float]) -> _Followed:
    """List, then write statuses."""
    watch, written = _Watch(login, changed), dict[tuple[str, str], float]()
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
        answer = await api.patch(f"{PATH}/{name}/status", {"status": {"queues": len(written) + 1}})
        written[name, answer["metadata"]["resourceVersion"]] = time.perf_counter()
    while len(written.keys() - watch.called.keys()) > MOST_MERGED:
        await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait([running])
    late = [max(0.0, watch.called[it] - at) for it, at in written.items() if it in watch.called]
    say(f"{len(late):,} of {len(written):,} events were passed on one by one.")
    return _Followed([listed], late)


def _shuffled() -> Iterator[int]:
    """Return groups in an order in which each comes once a round, and never soon after it came before."""
    while True:
        yield from (number * 7919 % GROUPS for number in range(GROUPS))
