"""The operator as a whole: what is watched, who leads, what is told; from its start to its end."""

import asyncio
import gc
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import kopf

from rota.brokers.rocketmq.address_policy import AddressPolicy, read_networks
from rota.kube import handlers
from rota.kube.api import Api, ApiError, Unanswered
from rota.kube.assignment_record import RecordLimits
from rota.kube.brain import Brain
from rota.kube.fleets import Fleets
from rota.kube.follow import Follower, counted
from rota.kube.group import Group
from rota.kube.hearing import hear_all
from rota.kube.journal import LIMIT, Journal
from rota.kube.leader import Leader
from rota.kube.measures import Measures
from rota.kube.member_keys import MemberKeys
from rota.kube.objects import GROUP_LABEL, ConfigMap, Custom, Deployment, Pod
from rota.kube.otlp import Exporter, settings
from rota.kube.outlets import Outlets
from rota.kube.page import PORT, PROBE_PORT, Page, ages, metrics
from rota.kube.paths import GROUPS, POLICIES
from rota.kube.places import Places
from rota.kube.queue_quota import MAX_QUEUES, QueueQuota
from rota.kube.reports import Reports
from rota.kube.sight import Sight
from rota.kube.site import Hub, routes
from rota.model import plain
from rota.spec.names import is_dns_label, is_dns_subdomain

RESYNC_SECONDS = 60.0
LOOK_AGAIN, LIST_AGAIN = 0.02, 2.0  # while it is not known what is there at the start; after a list that failed

# When Python looks for garbage. A look at all that is kept of a thousand groups takes 0.3 s, in which nothing else is
# done, and by Python's own thresholds it comes every few seconds; by these it is rare, and other looks take ≤ 20 ms.
COLLECTED = (5_000, 10, 100)

NESTED_TOO_DEEPLY = -1  # what `operate` returns when kopf cannot read a group or policy

VERSION = version("rota-operator")

Told = Callable[[Any], None]
News = Callable[[tuple[str, str]], None]  # told of a group of which something is known anew

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
    probe_port: int = PROBE_PORT
    journal: str = ""
    journal_limit: str = LIMIT  # how much its folder may hold
    queue_metrics: bool = True  # whether each queue has series of its own
    broker_networks: Sequence[str] = ()  # that name servers and brokers are in; none: they are not checked
    max_queues: int = MAX_QUEUES  # of all groups together
    fleets: bool = True  # whether it manages the Deployments of groups with a template
    image: str = ""  # of sidecars


def namespaces(texts: Sequence[str]) -> list[str]:
    """Read names, each alone or several with commas between them."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    for name in names:
        if not is_dns_label(name):
            raise ValueError(f"--namespace {plain(name, 100)!r} is no name; give one that kubectl get namespaces shows")
    return names


def check(options: Options) -> None:
    """Refuse names that nothing can have: what uses them would only fail, again and again."""
    if not is_dns_label(options.own_namespace):
        told = f"--own-namespace {plain(options.own_namespace, 100)!r} is no name"
        raise ValueError(f"{told}; give one that kubectl get namespaces shows")
    if not is_dns_subdomain(options.lease):
        told = f"--lease {plain(options.lease, 100)!r} is no name"
        raise ValueError(f"{told} that an object can have; give lower-case letters, digits and -, such as rota")
    if options.identity and not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_.]{,239}", options.identity):
        told = f"--identity {plain(options.identity, 100)!r} is no name"
        raise ValueError(f"{told}; files of the journal have it, too: give 240 letters, digits, -, _ and . at most")
    read_networks(options.broker_networks)


def process(options: Options) -> int:
    """Run as a process of its own; return the exit code."""
    check(options)
    gc.set_threshold(*COLLECTED)
    code = asyncio.run(operate(options))
    if code == NESTED_TOO_DEEPLY:
        _log.warning("A group or policy is nested too deeply for kopf; the operator starts again and watches by itself")
        code = asyncio.run(operate(options, has_kopf=False))
    return code


async def operate(options: Options, stop: asyncio.Event | None = None, *, has_kopf: bool = True) -> int:
    """Run until stopped, by `stop` or by a signal; return the exit code, or NESTED_TOO_DEEPLY."""
    stop, code = stop or _heed(asyncio.Event()), 0
    async with AsyncExitStack() as open_:
        api = await open_.enter_async_context(Api(handlers.access))
        beside = await open_.enter_async_context(Api(handlers.access))  # the Lease waits for nothing else
        places, hub = _places(api, options), Hub()
        open_.push_async_callback(places.close)
        identity = options.identity or _identity()
        journal = open_.enter_context(closing(Journal(options.journal, identity, options.journal_limit)))
        traces = Exporter(settings(os.environ, identity, VERSION))
        open_.push_async_callback(traces.close)
        # No group's Secret has a name with this end, whatever the group is called.
        keys = MemberKeys(api, options.own_namespace, f"{options.lease}-operator-key")
        brain, reports = _brain(open_, api, places, keys, options)
        followed: list[Follower[Any]] = []
        measures = _measures(brain, followed, journal, options)
        sight = Sight(brain, places, measures, identity, VERSION, _now, asyncio.Lock())
        outlets = Outlets(journal, sight, hub, traces)
        brain.done, places.worked, places.looked = outlets.done, sight.worked, outlets.looked
        kinds = [
            (
                followers(api, brain, [it], outlets.heard, fleets=options.fleets),
                our_kinds(api, brain, [it], outlets.heard),
            )
            for it in options.namespaces or [""]
        ]
        followed += [it for before, ours in kinds for it in [*before, *ours]]
        leader = Leader(beside, options.own_namespace, identity, _leads(brain, outlets), options.lease)
        page = Page(followed, lambda: leader.leading, [metrics(measures, sight), *routes(sight, hub)])
        await open_.enter_async_context(await page.serve(options.address, options.port, options.probe_port))
        open_.push_async_callback(hub.close)
        async with asyncio.TaskGroup() as tasks:
            here: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
            running = [
                *(tasks.create_task(it.run(), name="follow") for before, _ in kinds for it in before),
                *(tasks.create_task(_look_after(*it, here), name="look after") for it in kinds),
                tasks.create_task(places.run(), name="secrets"),
                tasks.create_task(traces.run(), name="traces"),
                tasks.create_task(hear_all(_led(brain), reports, brain.wake), name="hear all"),
            ]

            async def watch() -> None:
                nonlocal code
                code = await _kopf(brain, here.result(), outlets.heard, stop) if has_kopf else 0

            async def begin() -> None:
                here.set_result(await _here(followed, has_kopf=has_kopf))
                await keys.load()
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(watch(), name="kopf")
                    inner.create_task(leader.run(), name="leader")
                    inner.create_task(keys.run(lambda: brain.leads, _wake_all(brain)), name="keys")

            running.append(tasks.create_task(begin(), name="begin"))
            await stop.wait()
            for task in reversed(running):
                task.cancel()
    return code


def _brain(
    open_: AsyncExitStack, api: Api, places: Places, keys: MemberKeys, options: Options
) -> tuple[Brain, Reports]:
    reports = Reports(keys.of)
    open_.push_async_callback(reports.close)
    fleets = Fleets(api, options.image, enabled=options.fleets, keys=keys)
    brain = Brain(api, reports, places, fleets)
    brain.record_limits = RecordLimits(options.max_queues)
    open_.push_async_callback(brain.close)
    return brain, reports


def _places(api: Api, options: Options) -> Places:
    networks = read_networks(options.broker_networks)
    policy = AddressPolicy(networks, _api_server_endpoints()) if networks else None
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    return Places(api, quota=QueueQuota(total=options.max_queues), address_policy=policy, is_pod=is_pod)


def _api_server_endpoints() -> list[tuple[str, int]]:
    """Return the addresses of the API server's Service; some clusters give a host name in the environment."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        return []
    try:
        return [(str(entry[4][0]), int(port)) for entry in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _measures(brain: Brain, followed: Sequence[Follower[Any]], journal: Journal, options: Options) -> Measures:
    return Measures(
        lambda: brain.leads,
        lambda: ages(followed),
        lambda: journal.lost,
        version=VERSION,
        queues=options.queue_metrics,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _led(brain: Brain) -> Callable[[], Mapping[tuple[str, str], Group]]:
    return lambda: brain.groups if brain.leads else {}


def _wake_all(brain: Brain) -> Callable[[], None]:
    def wake() -> None:
        for key in brain.groups:
            brain.wake(key)

    return wake


def _leads(brain: Brain, outlets: Outlets) -> Callable[[bool], None]:
    def led(leads: bool) -> None:  # noqa: FBT001 - a value
        brain.lead(leads=leads)
        outlets.led(leads=leads)

    return led


def followers(
    api: Api, brain: Brain, namespaces: Sequence[str], news: News = lambda _: None, *, fleets: bool = True
) -> list[Follower[Any]]:
    """Return what is followed for the brain: records, fleets and pods, by the label that all of them carry."""
    kinds: list[tuple[str, type[Any], Told, Told]] = [
        ("configmaps", ConfigMap, _telling(brain.record_seen, news), _telling(brain.record_gone, news)),
        ("deployments", Deployment, brain.deployment_seen, brain.deployment_gone),
        ("pods", Pod, brain.pod_seen, brain.pod_gone),
    ]
    return [
        Follower(api, kind, namespace, read_as, seen=seen, gone=gone, kept=_identity_of, params=_LABELLED)
        for namespace in namespaces or [""]
        for kind, read_as, seen, gone in kinds
        if fleets or read_as is not Deployment
    ]


def our_kinds(api: Api, brain: Brain, namespaces: Sequence[str], news: News = lambda _: None) -> list[Follower[Any]]:
    """Return what can be followed of policies and groups, policies first."""
    kinds: list[tuple[str, Told, Told]] = [
        (POLICIES, brain.policy_seen, brain.policy_gone),
        (GROUPS, *_groups(brain, news)),
    ]
    return [
        Follower(api, kind, namespace, Custom, seen=seen, gone=gone, kept=_identity_of)
        for namespace in namespaces or [""]
        for kind, seen, gone in kinds
    ]


def _identity_of(it: Any) -> Any:
    """Return what has to be known of an object to tell that it is gone; of a pod that is how it was at last."""
    return it if isinstance(it, Pod) else type(it)(it.metadata)


def _groups(brain: Brain, news: News) -> tuple[Told, Told]:
    return _telling(brain.group_seen, news), _telling(brain.group_gone, news)


def _telling(take: Told, news: News) -> Told:
    """Tell of the group, too: one that stands by makes no rounds, and of one that is gone there are none."""

    def told(it: Custom | ConfigMap) -> None:
        take(it)
        news(it.metadata.key if isinstance(it, Custom) else it.metadata.group)

    return told


async def _here(followed: Sequence[Follower[Any]], *, has_kopf: bool) -> list[str]:
    """Return the namespaces that kopf can watch: it gives up on kinds that are not there, or not ours to see."""
    while True:
        known = {it.namespace for it in followed}
        known -= {it.namespace for it in followed if it.refused or not it.listed.is_set()}
        if known and all(it.listed.is_set() for it in counted(followed)):
            return sorted(known) if has_kopf else []
        await asyncio.sleep(LOOK_AGAIN)


async def _look_after(
    before: Sequence[Follower[Any]], ours: Sequence[Follower[Any]], here: "asyncio.Future[list[str]]"
) -> None:
    """Know policies and groups of a namespace, also if it comes late, when kopf watches others already.

    Whatever kopf's watch has lost is known a minute later, for all is listed again. What it does not watch is followed.
    A group comes last: without its pods and its policy it would look like one that has none.
    """
    for it in before:
        await it.listed.wait()
    for it in ours:
        while not await _listed(it):  # noqa: ASYNC110 - it may be a server that is not there yet
            await asyncio.sleep(LIST_AGAIN)
    if ours[0].namespace in await asyncio.shield(here):
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for it in ours:
                await _listed(it)
    await asyncio.gather(*(it.run() for it in ours))


async def _listed(follower: Follower[Any]) -> bool:
    try:
        await follower.relist()
    except (ApiError, Unanswered) as error:
        _log.warning("%s cannot be listed: %s", follower.path, error)
        return False
    return True


async def _kopf(brain: Brain, namespaces: Sequence[str], news: News, stop: asyncio.Event) -> int:
    registry = handlers.registry(_groups(brain, news), (brain.policy_seen, brain.policy_gone))
    try:
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=registry,
            identity="rota",  # nobody hears it; kopf's own needs a user with a name
            settings=handlers.settings(),
            standalone=True,
            clusterwide="" in namespaces,
            namespaces=[it for it in namespaces if it],
        )
        _heed(stop)  # kopf has taken the signals for itself, and would wait 5 s for whatever we are at
        await kopf.run_tasks(tasks, ignored=others)
    except RecursionError:  # of the JSON decoder that kopf uses
        return NESTED_TOO_DEEPLY
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
