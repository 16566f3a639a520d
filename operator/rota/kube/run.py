"""The operator as a whole: what is watched, who leads, what is told; from its start to its end."""

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import kopf

from rota.kube import handlers
from rota.kube.api import Api, ApiError, Unanswered
from rota.kube.brain import Brain
from rota.kube.fleets import Fleets
from rota.kube.follow import Follower
from rota.kube.journal import Journal
from rota.kube.leader import Leader
from rota.kube.objects import GROUP_LABEL, GROUPS, POLICIES, ConfigMap, Custom, Deployment, Pod, path
from rota.kube.page import PORT, Page
from rota.kube.places import Places
from rota.kube.reports import Reports

RESYNC_SECONDS = 60.0

Told = Callable[[Any], None]

_LABELLED = {"labelSelector": GROUP_LABEL}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an operator is started with."""

    namespaces: Sequence[str] = ()  # that it looks after; none: all
    own_namespace: str = "default"  # where its Lease is
    lease: str = "rota"  # and what it is called: operators who share it take turns
    identity: str = ""
    address: str = "127.0.0.1"  # where it answers
    port: int = PORT
    journal: str = ""
    image: str = ""  # of sidecars


def namespaces(texts: Sequence[str]) -> list[str]:
    """Read names, each alone or several with commas between them."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    for name in names:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{,61}[a-z0-9])?", name):
            raise ValueError(f"--namespace {name!r} is no name; give one that kubectl get namespaces shows")
    return names


async def operate(options: Options, stop: asyncio.Event | None = None) -> int:
    """Run until stopped, by `stop` or by a signal; return the exit code."""
    stop, code = stop or _heed(asyncio.Event()), 0
    async with AsyncExitStack() as open_:
        api = await open_.enter_async_context(Api(handlers.access))
        beside = await open_.enter_async_context(Api(handlers.access))  # the Lease waits for nothing else
        reports, places = Reports(), Places(api)
        open_.push_async_callback(places.close)
        open_.push_async_callback(reports.close)
        identity = options.identity or _identity()
        journal = Journal(options.journal, identity)
        open_.callback(journal.close)
        brain = Brain(api, reports, places, Fleets(api, options.image), lambda done: journal.write(done.plan.records))
        open_.push_async_callback(brain.close)
        following, listing = followers(api, brain, options.namespaces), our_kinds(api, brain, options.namespaces)
        leader = Leader(beside, options.own_namespace, identity, _leads(brain), options.lease)
        page = Page([*following, *listing], lambda: leader.leading)
        open_.push_async_callback((await page.serve(options.address, options.port)).cleanup)
        async with asyncio.TaskGroup() as tasks:
            running = [
                *(tasks.create_task(it.run(), name="follow") for it in following),
                *(tasks.create_task(_again(it), name="resync") for it in listing),
                tasks.create_task(places.run(), name="secrets"),
            ]

            async def watch() -> None:
                nonlocal code
                code = await _kopf(brain, options.namespaces, stop)

            async def begin() -> None:
                for it in [*following, *listing]:  # kopf gives up on kinds that are not there yet
                    await it.listed.wait()
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(watch(), name="kopf")
                    inner.create_task(leader.run(), name="leader")

            running.append(tasks.create_task(begin(), name="begin"))
            await stop.wait()
            for task in reversed(running):
                task.cancel()
    return code


def _leads(brain: Brain) -> Any:
    return lambda leads: brain.lead(leads=leads)


def followers(api: Api, brain: Brain, namespaces: Sequence[str]) -> list[Follower[Any]]:
    """Return what is followed for the brain: records, fleets and pods, by the label that all of them carry."""
    kinds: list[tuple[str, type[Any], Told, Told]] = [
        ("configmaps", ConfigMap, brain.record_seen, brain.record_gone),
        ("deployments", Deployment, brain.deployment_seen, brain.deployment_gone),
        ("pods", Pod, brain.pod_seen, brain.pod_gone),
    ]
    return [
        Follower(api, path(kind, namespace), read_as, seen=seen, gone=gone, params=_LABELLED)
        for namespace in namespaces or [""]
        for kind, read_as, seen, gone in kinds
    ]


def our_kinds(api: Api, brain: Brain, namespaces: Sequence[str]) -> list[Follower[Any]]:
    """Return what can be followed of policies and groups, policies first."""
    kinds: list[tuple[str, Told, Told]] = [
        (POLICIES, brain.policy_seen, brain.policy_gone),
        (GROUPS, brain.group_seen, brain.group_gone),
    ]
    return [
        Follower(api, path(kind, namespace), Custom, seen=seen, gone=gone)
        for namespace in namespaces or [""]
        for kind, seen, gone in kinds
    ]


async def _again(follower: Follower[Any]) -> None:
    """List what kopf watches, too: whatever its watch has lost is known a minute later."""
    while True:
        try:
            await follower.relist()
        except (ApiError, Unanswered) as error:
            _log.warning("%s cannot be listed: %s", follower.path, error)
        await asyncio.sleep(RESYNC_SECONDS if follower.listed.is_set() else 2.0)


async def _kopf(brain: Brain, namespaces: Sequence[str], stop: asyncio.Event) -> int:
    registry = handlers.registry(
        (brain.group_seen, brain.group_gone),
        (brain.policy_seen, brain.policy_gone),
    )
    try:
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=registry,
            identity="rota",  # nobody hears it; kopf's own needs a user with a name
            settings=handlers.settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )
        _heed(stop)  # kopf has taken the signals for itself, and would wait 5 s for whatever we are at
        await kopf.run_tasks(tasks, ignored=others)
    except Exception as error:  # noqa: BLE001 - kopf's own are not public; the kinds are gone, or not ours to see
        _log.error("Groups and policies cannot be watched any more, so this operator ends: %s", error)
        return 1
    else:
        return 0
    finally:
        stop.set()


def _identity() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _heed(stop: asyncio.Event) -> asyncio.Event:
    """Have the signals that end a process set it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
