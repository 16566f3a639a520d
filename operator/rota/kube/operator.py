"""The operator as a whole: what is watched, who leads, what is told; from its start to its end."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from rota.aio import supervise
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy, read_networks
from rota.kube.brokers.registry import Places
from rota.kube.client.api import Api
from rota.kube.client.informer import Follower
from rota.kube.client.leader_election import KUBERNETES, PAGE_AUTH, POD_UID, Leader
from rota.kube.client.login.accounts import find_account
from rota.kube.client.login.session import Login
from rota.kube.http.access.access import is_by_token
from rota.kube.http.access.page_security import OPEN, PageSecurity, cluster_users
from rota.kube.http.events import Hub
from rota.kube.http.leader_relay import LeaderPage, LeaderRelay, announce, leader_page
from rota.kube.http.operator_probes import Page, ages, metrics
from rota.kube.http.read_model import Sight
from rota.kube.http.site import routes
from rota.kube.informers import NESTED_TOO_DEEPLY, followers, our_kinds, run_kopf, watch_own_kinds, watchable_namespaces
from rota.kube.members.delivery_poller import poll_deliveries
from rota.kube.members.progress_poller import ProgressPoller
from rota.kube.members.report_client import Reports
from rota.kube.members.report_poller import poll_reports
from rota.kube.observers import Outlets
from rota.kube.options import VERSION, Options, check
from rota.kube.policies.policy_status import PolicyStatuses
from rota.kube.reconcile.controller import Brain
from rota.kube.state.group import Group
from rota.kube.state.queue_quota import QueueQuota
from rota.kube.state.stored_assignment import RecordLimits
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.operator_metrics import Measures
from rota.kube.telemetry.trace_export import Exporter, open_recorder
from rota.kube.workload.deployments import Fleets
from rota.kube.workload.member_keys import MemberKeys

# When Python looks for garbage. A look at all that is kept of a thousand groups takes 0.3 s, in which nothing else is
# done, and by Python's own thresholds it comes every few seconds; by these it is rare, and other looks take ≤ 20 ms.
COLLECTED = (5_000, 10, 100)


_log = logging.getLogger(__name__)


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
    code = 0
    async with AsyncExitStack() as open_:
        login, api, lease_api = await _log_in(open_, options)  # signals end the process until it is done
        stop = stop or _heed(asyncio.Event())
        places, hub = _places(open_, api, options), Hub()
        identity = options.identity or f"{socket.gethostname()}-{os.getpid()}"
        journal = open_.enter_context(closing(Journal(options.journal, identity, options.journal_limit)))
        traces = _traces(open_, identity)
        # No group's Secret has a name with this end, whatever the group is called.
        keys = MemberKeys(api, options.own_namespace, f"{options.lease}-operator-key")
        brain, reports = _brain(open_, api, places, keys, options)
        followed: list[Follower[Any]] = []
        measures = _measures(brain, followed, journal, traces, options)
        sight = Sight(brain, places, measures, identity, VERSION, _now, asyncio.Lock())
        outlets = Outlets(journal, sight, hub, traces)
        brain.done, places.worked, places.looked = outlets.done, sight.worked, outlets.looked
        kinds = _kinds(api, brain, outlets, options)
        followed += [it for before, ours in kinds for it in [*before, *ours]]
        security = await _security(open_, login, options)
        leader = _leader(lease_api, identity, _leads(brain, outlets), options, security)
        page = Page(
            followed,
            lambda: leader.leading,
            [metrics(measures, sight), *routes(sight, hub)],
            is_rejected=lambda: bool(login.problem),
        )
        await _serve(open_, page, leader, security, options)
        open_.push_async_callback(hub.close)
        async with asyncio.TaskGroup() as tasks:
            here: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
            running = [
                *(tasks.create_task(it.run(), name="follow") for before, _ in kinds for it in before),
                *(tasks.create_task(watch_own_kinds(*it, here), name="look after") for it in kinds),
                tasks.create_task(places.run(), name="secrets"),
                tasks.create_task(poll_reports(_led(brain), reports, brain.wake), name="report poller"),
                tasks.create_task(_poll_progress(brain, reports, outlets), name="progress poller"),
                tasks.create_task(_poll_deliveries(brain, reports), name="delivery poller"),
                tasks.create_task(_write_policy_statuses(api, brain), name="policy statuses"),
            ]

            async def watch() -> None:
                nonlocal code
                if has_kopf:  # it handles the signals until `_heed` does
                    code = await run_kopf(
                        login, brain, here.result(), outlets.heard, stop=stop, on_started=lambda: _heed(stop)
                    )

            async def begin() -> None:
                here.set_result(await watchable_namespaces(followed, has_kopf=has_kopf))
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


async def _log_in(open_: AsyncExitStack, options: Options) -> tuple[Login, Api, Api]:
    """Return the login, connections, and connections for the Lease alone, which must not wait for other requests."""
    login = await open_.enter_async_context(await Login.create(find_account(options.login)))
    await login.verify()
    return login, await open_.enter_async_context(Api(login)), await open_.enter_async_context(Api(login))


async def _security(open_: AsyncExitStack, login: Login, options: Options) -> PageSecurity:
    if options.page_auth != KUBERNETES:
        return OPEN
    names = ["localhost", "127.0.0.1", options.address, f"{options.lease}.{options.own_namespace}.svc"]
    folder = Path(options.page_tls) if options.page_tls else None
    return await open_.enter_async_context(cluster_users(login, list(dict.fromkeys(names)), folder))


async def _serve(open_: AsyncExitStack, page: Page, leader: Leader, security: PageSecurity, options: Options) -> None:
    has_tls = security.tls is not None

    def find_leader() -> LeaderPage | None:
        return leader_page(leader.holder_annotations, options.address, has_tls=has_tls)

    can_be_passed_on = is_by_token if has_tls else lambda _: True
    relay = await open_.enter_async_context(LeaderRelay(find_leader, can_be_passed_on))
    served = page.serve(options.address, options.port, options.probe_port, security, [relay.pass_on])
    await open_.enter_async_context(await served)


def _kinds(
    api: Api, brain: Brain, outlets: Outlets, options: Options
) -> list[tuple[list[Follower[Any]], list[Follower[Any]]]]:
    """Return, for each namespace that is watched, what is followed first, and then groups and policies."""
    heard, fleets = outlets.heard, options.fleets
    return [
        (followers(api, brain, [it], heard, fleets=fleets), our_kinds(api, brain, [it], heard))
        for it in options.namespaces or [""]
    ]


def _traces(open_: AsyncExitStack, identity: str) -> Exporter:
    traces = Exporter(open_recorder(os.environ, identity, VERSION))
    open_.push_async_callback(traces.close)
    return traces


def _leader(api: Api, identity: str, leads: Callable[[bool], None], options: Options, security: PageSecurity) -> Leader:
    def annotations() -> dict[str, str]:
        page = announce(options.address, options.port, security.certificate_digest())
        known = {POD_UID: options.pod_uid, PAGE_AUTH: options.page_auth.removeprefix("None"), **page}
        return {name: value for name, value in known.items() if value}

    return Leader(api, options.own_namespace, identity, leads, options.lease, annotations=annotations)


def _brain(
    open_: AsyncExitStack, api: Api, places: Places, keys: MemberKeys, options: Options
) -> tuple[Brain, Reports]:
    reports = Reports(keys.of)
    open_.push_async_callback(reports.close)
    fleets = Fleets(api, options.image, enabled=options.fleets, keys=keys)
    brain = Brain(api, reports, places, fleets)
    brain.events.record_limits = RecordLimits(options.max_queues, options.document_schema)
    open_.push_async_callback(brain.close)
    return brain, reports


def _places(open_: AsyncExitStack, api: Api, options: Options) -> Places:
    networks = read_networks(options.broker_networks)
    policy = AddressPolicy(networks, _api_server_endpoints()) if networks else None
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    places = Places(api, quota=QueueQuota(total=options.max_queues), address_policy=policy, is_pod=is_pod)
    open_.push_async_callback(places.close)
    return places


def _api_server_endpoints() -> list[tuple[str, int]]:
    """Return the addresses of the API server's Service; some clusters give a host name in the environment."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        return []
    try:
        return [(str(entry[4][0]), int(port)) for entry in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _measures(
    brain: Brain, followed: Sequence[Follower[Any]], journal: Journal, traces: Exporter, options: Options
) -> Measures:
    return Measures(
        lambda: brain.leads,
        lambda: ages(followed),
        lambda: journal.lost,
        version=VERSION,
        queues=options.queue_metrics,
        trace_of=traces.trace_of,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _led(brain: Brain) -> Callable[[], Mapping[tuple[str, str], Group]]:
    return lambda: brain.groups if brain.leads else {}


async def _poll_progress(brain: Brain, reports: Reports, outlets: Outlets) -> None:
    await supervise("progress poller", ProgressPoller(_led(brain), reports, outlets.redelivered).run)


async def _poll_deliveries(brain: Brain, reports: Reports) -> None:
    await supervise("delivery poller", partial(poll_deliveries, _led(brain), reports, brain.wake))


async def _write_policy_statuses(api: Api, brain: Brain) -> None:
    statuses = PolicyStatuses(api, lambda: brain.events.policies, brain.events.policy_users, lambda: brain.leads)
    await supervise("policy statuses", statuses.run)


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


def _heed(stop: asyncio.Event) -> asyncio.Event:
    """Have the signals that end a process set it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
