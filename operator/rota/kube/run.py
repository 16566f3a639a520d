"""The operator as a whole: what is watched, who leads, what is told; from its start to its end."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import kopf

from rota.kube import handlers
from rota.kube.api import Api
from rota.kube.brain import Brain
from rota.kube.follow import Follower
from rota.kube.leader import Leader
from rota.kube.objects import GROUP_LABEL, ConfigMap, Pod, path
from rota.kube.places import Places
from rota.kube.reports import Reports

_LABELLED = {"labelSelector": GROUP_LABEL}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an operator is started with."""

    namespaces: Sequence[str] = ()  # that it looks after; none: all
    own_namespace: str = "default"  # where its Lease is
    identity: str = ""


class LoginFailed(ValueError):  # noqa: N818 - it is what happened
    """There is no way to the API server."""


def access() -> kopf.ConnectionInfo:
    """Find the way to the API server: the pod's own account, or else the kubeconfig."""
    found = kopf.login_with_service_account(settings=handlers.settings()) or kopf.login_with_kubeconfig(
        settings=handlers.settings()
    )
    if found is None:
        raise LoginFailed("There is no kubeconfig and no service account; set KUBECONFIG to the cluster's file")
    return found


async def operate(options: Options, stop: asyncio.Event | None = None) -> None:
    """Run until stopped, by `stop` or by a signal."""
    stop = stop or _stopped()
    async with AsyncExitStack() as open_:
        api = await open_.enter_async_context(Api(access()))
        reports, places = Reports(), Places(api)
        open_.push_async_callback(places.close)
        open_.push_async_callback(reports.close)
        brain = Brain(api, reports, places)
        open_.push_async_callback(brain.close)
        following = [*_follow(api, brain, options.namespaces)]
        async with asyncio.TaskGroup() as tasks:
            running = [
                *(tasks.create_task(it.run(), name="follow") for it in following),
                tasks.create_task(places.run(), name="secrets"),
                tasks.create_task(_kopf(brain, options.namespaces, stop), name="kopf"),
            ]
            for it in following:
                await it.listed.wait()
            leader = Leader(api, options.own_namespace, options.identity or _identity(), _leads(brain))
            running.append(tasks.create_task(leader.run(), name="leader"))
            await stop.wait()
            for task in reversed(running):
                task.cancel()


def _leads(brain: Brain) -> Any:
    return lambda leads: brain.lead(leads=leads)


def _follow(api: Api, brain: Brain, namespaces: Sequence[str]) -> list[Follower[Any]]:
    found: list[Follower[Any]] = []
    for namespace in namespaces or [""]:
        found += [
            Follower(
                api,
                path("configmaps", namespace),
                ConfigMap,
                seen=brain.record_seen,
                gone=brain.record_gone,
                params=_LABELLED,
            ),
            Follower(api, path("pods", namespace), Pod, seen=brain.pod_seen, gone=brain.pod_gone, params=_LABELLED),
        ]
    return found


async def _kopf(brain: Brain, namespaces: Sequence[str], stop: asyncio.Event) -> None:
    registry = handlers.registry(
        (brain.group_seen, brain.group_gone),
        (brain.policy_seen, brain.policy_gone),
    )
    try:
        await kopf.operator(
            registry=registry,
            settings=handlers.settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )
    finally:
        stop.set()  # kopf takes the signals that end a process for itself


def _identity() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _stopped() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
