"""Composition root of the operator: creates, connects and runs all components until the process is stopped."""

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
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api
from rota.kube.client.informer import Informer
from rota.kube.client.leader_election import KUBERNETES, PAGE_AUTH, POD_UID, Leader
from rota.kube.client.login.accounts import find_account
from rota.kube.client.login.session import Login
from rota.kube.http.access.access import is_by_token
from rota.kube.http.access.page_security import OPEN, PageSecurity, cluster_users
from rota.kube.http.events import Broadcaster
from rota.kube.http.leader_relay import LeaderPage, LeaderRelay, announce, leader_page
from rota.kube.http.operator_probes import ProbeServer, ages, metrics
from rota.kube.http.read_model import ReadModel
from rota.kube.http.site import routes
from rota.kube.informers import (
    NESTED_TOO_DEEPLY,
    custom_informers,
    object_informers,
    run_kopf,
    watch_own_kinds,
    watchable_namespaces,
)
from rota.kube.members.delivery_poller import poll_deliveries
from rota.kube.members.progress_poller import ProgressPoller
from rota.kube.members.report_client import ReportClient
from rota.kube.members.report_poller import poll_reports
from rota.kube.observers import Observers
from rota.kube.options import VERSION, Options, check
from rota.kube.policies.policy_status import PolicyStatuses
from rota.kube.reconcile.controller import Controller
from rota.kube.state.group import Group
from rota.kube.state.queue_quota import QueueQuota
from rota.kube.state.stored_assignment import RecordLimits
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.trace_export import TraceExporter, open_recorder
from rota.kube.workload.deployments import Deployments
from rota.kube.workload.member_keys import MemberKeys

# Thresholds of garbage collection. A full collection with a thousand groups blocks the event loop for 0.3 s, and with
# Python's defaults it runs every few seconds; with these it is rare, and smaller collections take ≤ 20 ms.
COLLECTED = (5_000, 10, 100)

_log = logging.getLogger(__name__)


def process(options: Options) -> int:
    """Run the operator as this process; return the exit code."""
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
        login, api, lease_api = await _log_in(open_, options)  # until it returns, a signal ends the process
        stop = stop or _stop_on_signals(asyncio.Event())
        places, hub = _broker_registry(open_, api, options), Broadcaster()
        identity = options.identity or f"{socket.gethostname()}-{os.getpid()}"
        journal = open_.enter_context(closing(Journal(options.journal, identity, options.journal_limit)))
        traces = _traces(open_, identity)
        # The names of groups' Secrets end otherwise, so no group can claim this name.
        keys = MemberKeys(api, options.own_namespace, f"{options.lease}-operator-key")
        brain, reports = _controller(open_, api, places, keys, options)
        informers: list[Informer[Any]] = []
        measures = _measures(brain, informers, journal, traces, options)
        sight = ReadModel(brain, places, measures, identity, VERSION, _now, asyncio.Lock())
        outlets = Observers(journal, sight, hub, traces)
        brain.done, places.worked, places.looked = outlets.done, sight.worked, outlets.looked
        namespaces = _kinds(api, brain, outlets, options)
        informers += [informer for objects, customs in namespaces for informer in [*objects, *customs]]
        security = await _security(open_, login, options)
        leader = _leader(lease_api, identity, _leadership_handler(brain, outlets), options, security)
        page = ProbeServer(
            informers,
            lambda: leader.leading,
            [metrics(measures, sight), *routes(sight, hub)],
            is_rejected=lambda: bool(login.problem),
        )
        await _serve(open_, page, leader, security, options)
        open_.push_async_callback(hub.close)
        async with asyncio.TaskGroup() as tasks:
            kopf_namespaces: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
            running = [
                *(tasks.create_task(it.run(), name="follow") for objects, _ in namespaces for it in objects),
                *(tasks.create_task(watch_own_kinds(*pair, kopf_namespaces), name="look after") for pair in namespaces),
                tasks.create_task(places.run(), name="secrets"),
                tasks.create_task(poll_reports(_led_groups(brain), reports, brain.wake), name="report poller"),
                tasks.create_task(_poll_progress(brain, reports, outlets), name="progress poller"),
                tasks.create_task(_poll_deliveries(brain, reports), name="delivery poller"),
                tasks.create_task(_write_policy_statuses(api, brain), name="policy statuses"),
            ]

            async def watch() -> None:
                nonlocal code
                if has_kopf:  # it handles the signals until `_stop_on_signals` does
                    code = await run_kopf(
                        login,
                        brain,
                        kopf_namespaces.result(),
                        outlets.heard,
                        stop=stop,
                        on_started=lambda: _stop_on_signals(stop),
                    )

            async def begin() -> None:
                kopf_namespaces.set_result(await watchable_namespaces(informers, has_kopf=has_kopf))
                await keys.load()
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(watch(), name="kopf")
                    inner.create_task(leader.run(), name="leader")
                    inner.create_task(keys.run(lambda: brain.leads, _enqueue_all(brain)), name="keys")

            running.append(tasks.create_task(begin(), name="begin"))
            await stop.wait()
            for task in reversed(running):
                task.cancel()
    return code


async def _log_in(open_: AsyncExitStack, options: Options) -> tuple[Login, Api, Api]:
    """Return the login, connections, and separate ones for the Lease: its renewal must not wait for other requests."""
    login = await open_.enter_async_context(await Login.create(find_account(options.login)))
    await login.verify()
    return login, await open_.enter_async_context(Api(login)), await open_.enter_async_context(Api(login))


async def _security(open_: AsyncExitStack, login: Login, options: Options) -> PageSecurity:
    if options.page_auth != KUBERNETES:
        return OPEN
    names = ["localhost", "127.0.0.1", options.address, f"{options.lease}.{options.own_namespace}.svc"]
    folder = Path(options.page_tls) if options.page_tls else None
    return await open_.enter_async_context(cluster_users(login, list(dict.fromkeys(names)), folder))


async def _serve(
    open_: AsyncExitStack, page: ProbeServer, leader: Leader, security: PageSecurity, options: Options
) -> None:
    has_tls = security.tls is not None

    def find_leader() -> LeaderPage | None:
        return leader_page(leader.holder_annotations, options.address, has_tls=has_tls)

    can_be_passed_on = is_by_token if has_tls else lambda _: True
    relay = await open_.enter_async_context(LeaderRelay(find_leader, can_be_passed_on))
    served = page.serve(options.address, options.port, options.probe_port, security, [relay.pass_on])
    await open_.enter_async_context(await served)


def _kinds(
    api: Api, brain: Controller, outlets: Observers, options: Options
) -> list[tuple[list[Informer[Any]], list[Informer[Any]]]]:
    """Return, for each watched namespace, the informers of its objects, and those of its policies and groups."""
    notify, fleets = outlets.heard, options.fleets
    return [
        (
            object_informers(api, brain, [namespace], notify, fleets=fleets),
            custom_informers(api, brain, [namespace], notify),
        )
        for namespace in options.namespaces or [""]
    ]


def _traces(open_: AsyncExitStack, identity: str) -> TraceExporter:
    traces = TraceExporter(open_recorder(os.environ, identity, VERSION))
    open_.push_async_callback(traces.close)
    return traces


def _leader(api: Api, identity: str, leads: Callable[[bool], None], options: Options, security: PageSecurity) -> Leader:
    def annotations() -> dict[str, str]:
        page = announce(options.address, options.port, security.certificate_digest())
        values = {POD_UID: options.pod_uid, PAGE_AUTH: options.page_auth.removeprefix("None"), **page}
        return {name: value for name, value in values.items() if value}

    return Leader(api, options.own_namespace, identity, leads, options.lease, annotations=annotations)


def _controller(
    open_: AsyncExitStack, api: Api, places: BrokerRegistry, keys: MemberKeys, options: Options
) -> tuple[Controller, ReportClient]:
    reports = ReportClient(keys.of)
    open_.push_async_callback(reports.close)
    fleets = Deployments(api, options.image, enabled=options.fleets, keys=keys)
    brain = Controller(api, reports, places, fleets)
    brain.events.record_limits = RecordLimits(options.max_queues, options.document_schema)
    open_.push_async_callback(brain.close)
    return brain, reports


def _broker_registry(open_: AsyncExitStack, api: Api, options: Options) -> BrokerRegistry:
    networks = read_networks(options.broker_networks)
    policy = AddressPolicy(networks, _api_server_endpoints()) if networks else None
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    places = BrokerRegistry(api, quota=QueueQuota(total=options.max_queues), address_policy=policy, is_pod=is_pod)
    open_.push_async_callback(places.close)
    return places


def _api_server_endpoints() -> list[tuple[str, int]]:
    """Return the addresses of the API server's Service; in some clusters the environment has a host name."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        return []
    try:
        return [(str(entry[4][0]), int(port)) for entry in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _measures(
    brain: Controller, informers: Sequence[Informer[Any]], journal: Journal, traces: TraceExporter, options: Options
) -> OperatorMetrics:
    return OperatorMetrics(
        lambda: brain.leads,
        lambda: ages(informers),
        lambda: journal.lost,
        version=VERSION,
        queues=options.queue_metrics,
        trace_of=traces.trace_of,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _led_groups(brain: Controller) -> Callable[[], Mapping[tuple[str, str], Group]]:
    return lambda: brain.groups if brain.leads else {}


async def _poll_progress(brain: Controller, reports: ReportClient, outlets: Observers) -> None:
    await supervise("progress poller", ProgressPoller(_led_groups(brain), reports, outlets.redelivered).run)


async def _poll_deliveries(brain: Controller, reports: ReportClient) -> None:
    await supervise("delivery poller", partial(poll_deliveries, _led_groups(brain), reports, brain.wake))


async def _write_policy_statuses(api: Api, brain: Controller) -> None:
    statuses = PolicyStatuses(api, lambda: brain.events.policies, brain.events.policy_users, lambda: brain.leads)
    await supervise("policy statuses", statuses.run)


def _enqueue_all(brain: Controller) -> Callable[[], None]:
    def wake() -> None:
        for key in brain.groups:
            brain.wake(key)

    return wake


def _leadership_handler(brain: Controller, outlets: Observers) -> Callable[[bool], None]:
    def led(leads: bool) -> None:  # noqa: FBT001 - a value
        brain.lead(leads=leads)
        outlets.led(leads=leads)

    return led


def _stop_on_signals(stop: asyncio.Event) -> asyncio.Event:
    """Set the event on SIGTERM and SIGINT; return it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
