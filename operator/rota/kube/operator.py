"""Composition root of the operator: creates, connects and runs all components until the process is stopped."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rota.aio import loop_time, supervise
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy, read_networks
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api
from rota.kube.client.informer import Informer
from rota.kube.client.leader_election import (
    PAGE_AUTH_ANNOTATION,
    PAGE_AUTH_KUBERNETES,
    POD_UID_ANNOTATION,
    LeaderElector,
)
from rota.kube.client.login.accounts import find_account
from rota.kube.client.login.session import Login
from rota.kube.http.access.access import is_by_token
from rota.kube.http.access.page_security import UNRESTRICTED_PAGE, PageSecurity, cluster_page_security
from rota.kube.http.broadcaster import Broadcaster
from rota.kube.http.leader_relay import LeaderPage, LeaderRelay, page_annotations, parse_leader_page
from rota.kube.http.operator_probes import ProbeServer, metrics_route, watch_ages
from rota.kube.http.read_model import ReadModel
from rota.kube.http.site import page_routes
from rota.kube.informers import (
    NESTED_TOO_DEEPLY,
    custom_resource_informers,
    object_informers,
    run_kopf,
    wait_for_kopf_namespaces,
    watch_custom_resources,
)
from rota.kube.members.delivery_poller import poll_deliveries
from rota.kube.members.progress_poller import ProgressPoller
from rota.kube.members.report_client import ReportClient
from rota.kube.members.report_poller import poll_reports
from rota.kube.observers import Observers
from rota.kube.options import VERSION, Options, check_options
from rota.kube.policies.policy_status import PolicyStatusWriter
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.state.group import Group
from rota.kube.state.queue_quota import QueueQuota
from rota.kube.state.stored_assignment import AssignmentLimits
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.trace_export import TraceExporter, open_recorder
from rota.kube.workload.deployments import Deployments
from rota.kube.workload.member_keys import MemberKeys

# Thresholds of garbage collection. A full collection with a thousand groups blocks the event loop for 0.3 s, and with
# Python's defaults it runs every few seconds; with these it is rare, and smaller collections take ≤ 20 ms.
GC_THRESHOLDS = (5_000, 10, 100)

_log = logging.getLogger(__name__)


def run_process(options: Options) -> int:
    """Run the operator as this process; return the exit code."""
    check_options(options)
    gc.set_threshold(*GC_THRESHOLDS)
    code = asyncio.run(operate(options))
    if code == NESTED_TOO_DEEPLY:
        _log.warning("A group or policy is nested too deeply for kopf; restarting with the operator's own watches")
        code = asyncio.run(operate(options, has_kopf=False))
    return code


class _Informers(NamedTuple):
    """The informers of one watched namespace, or of all namespaces together."""

    builtin: list[Informer[Any]]  # of assignments, Deployments and pods
    custom: list[Informer[Any]]  # of policies and groups


@dataclass(frozen=True)
class _Parts:
    """The components that run until the operator is stopped."""

    login: Login
    api: Api
    keys: MemberKeys
    registry: BrokerRegistry
    controller: Controller
    reports: ReportClient
    observers: Observers
    events: EventHandlers
    namespaces: list[_Informers]
    elector: LeaderElector

    @property
    def informers(self) -> list[Informer[Any]]:
        """All informers of all watched namespaces."""
        informers: list[Informer[Any]] = []
        for namespace in self.namespaces:
            informers += [*namespace.builtin, *namespace.custom]
        return informers


async def operate(options: Options, stop: asyncio.Event | None = None, *, has_kopf: bool = True) -> int:
    """Run until stopped, by `stop` or by a signal; return the exit code, or NESTED_TOO_DEEPLY."""
    async with AsyncExitStack() as stack:
        login, api, lease_api = await _log_in(stack, options)  # during the login, a signal ends the process at once
        stop = stop or _stop_on_signals(asyncio.Event())
        parts = await _build(stack, login, api, lease_api, options)
        return await _run(parts, stop, has_kopf=has_kopf)


async def _build(stack: AsyncExitStack, login: Login, api: Api, lease_api: Api, options: Options) -> _Parts:
    """Create and connect all components, and serve the page and probes."""
    identity = options.identity or f"{socket.gethostname()}-{os.getpid()}"
    registry = _build_broker_registry(stack, api, options)
    broadcaster = Broadcaster()
    journal = stack.enter_context(closing(_open_journal(options, identity)))
    trace_exporter = TraceExporter(open_recorder(os.environ, identity, VERSION))
    stack.push_async_callback(trace_exporter.close)
    # Names of groups' Secrets end with another suffix, so no group can claim this name.
    keys = MemberKeys(api, options.own_namespace, f"{options.lease}-operator-key")
    controller, reports = _build_controller(stack, api, registry, keys, options)
    # Filled below, to break a cycle: metrics show the informers, whose handlers need the observers, which need metrics.
    informers: list[Informer[Any]] = []
    metrics = _build_metrics(controller, informers, journal, trace_exporter, options)
    read_model = ReadModel(
        controller, registry, metrics, identity, VERSION, loop_time=loop_time, explain_lock=asyncio.Lock()
    )
    observers = Observers(
        controller, metrics, registry.lag_of, journal=journal, broadcaster=broadcaster, trace_exporter=trace_exporter
    )
    controller.reconciler.on_reconciled = observers.on_reconciled
    # Lag states depend on whether a queue has a consumer. Brokers do not say that: the read model derives it from the
    # group's assignment, its pods and its unmanaged consumers.
    registry.consumed_queues = read_model.consumed_queues
    registry.on_lag_polled = observers.on_lag_polled
    events = EventHandlers(controller, observers.on_group_changed)
    namespaces = _build_informers(api, events, options)
    security = await _open_page_security(stack, login, options)
    elector = _build_elector(lease_api, identity, _leadership_handler(controller, observers), options, security)
    parts = _Parts(login, api, keys, registry, controller, reports, observers, events, namespaces, elector)
    informers += parts.informers
    probe_server = ProbeServer(
        informers,
        lambda: elector.is_leading,
        [metrics_route(metrics, read_model), *page_routes(read_model, broadcaster)],
        is_login_rejected=lambda: bool(login.problem),
    )
    await _serve(stack, probe_server, elector, security, options)
    stack.push_async_callback(broadcaster.close)
    return parts


async def _run(parts: _Parts, stop: asyncio.Event, *, has_kopf: bool) -> int:
    """Run all long-lived tasks until stopped; return the exit code."""
    code = 0
    controller = parts.controller
    reports = parts.reports
    get_groups = _led_groups(controller)
    progress_poller = ProgressPoller(get_groups, reports, parts.observers.on_redelivered)
    policies = controller.specs.policies
    groups_by_policy = parts.events.policies.groups_by_policy
    policy_statuses = PolicyStatusWriter(parts.api, policies, groups_by_policy, lambda: controller.is_leading)
    delivery_poller = partial(poll_deliveries, get_groups, reports, controller.queue.enqueue)
    async with asyncio.TaskGroup() as tasks:
        # The namespaces in which kopf watches groups and policies; in all others, informers do.
        kopf_namespaces: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        running: list[asyncio.Task[Any]] = []
        for builtin_informers, custom_informers in parts.namespaces:
            running += [tasks.create_task(informer.run(), name="informer") for informer in builtin_informers]
            watch = watch_custom_resources(builtin_informers, custom_informers, kopf_namespaces)
            running.append(tasks.create_task(watch, name="custom resources"))
        running += [
            tasks.create_task(parts.registry.run(), name="broker secrets"),
            tasks.create_task(poll_reports(get_groups, reports, controller.queue.enqueue), name="report poller"),
            tasks.create_task(supervise("progress poller", progress_poller.run), name="progress poller"),
            tasks.create_task(supervise("delivery poller", delivery_poller), name="delivery poller"),
            tasks.create_task(supervise("policy statuses", policy_statuses.run), name="policy statuses"),
        ]

        async def run_kopf_watch() -> None:
            nonlocal code
            if has_kopf:
                code = await run_kopf(
                    parts.login,
                    parts.events,
                    kopf_namespaces.result(),
                    stop=stop,
                    on_started=lambda: _stop_on_signals(stop),  # again, since kopf has replaced the signal handlers
                )

        def enqueue_all() -> None:
            for key in controller.groups:
                controller.queue.enqueue(key)

        async def start() -> None:
            """Run kopf, leader election and keys, once the first lists have arrived and the keys were loaded."""
            kopf_namespaces.set_result(await wait_for_kopf_namespaces(parts.informers, has_kopf=has_kopf))
            await parts.keys.load()
            async with asyncio.TaskGroup() as inner:
                inner.create_task(run_kopf_watch(), name="kopf")
                inner.create_task(parts.elector.run(), name="leader")
                inner.create_task(parts.keys.run(lambda: controller.is_leading, enqueue_all), name="keys")

        running.append(tasks.create_task(start(), name="start"))
        await stop.wait()  # set by a signal, and by `run_kopf` when it ends for any reason, such as NESTED_TOO_DEEPLY
        for task in reversed(running):  # `start` first: it runs the leader election, and only a leader writes
            task.cancel()
    return code


async def _log_in(stack: AsyncExitStack, options: Options) -> tuple[Login, Api, Api]:
    """Return the login, the API client, and one for the Lease only, whose renewal must not wait for other requests."""
    login = await stack.enter_async_context(await Login.create(find_account(options.login)))
    await login.verify()
    return login, await stack.enter_async_context(Api(login)), await stack.enter_async_context(Api(login))


async def _open_page_security(stack: AsyncExitStack, login: Login, options: Options) -> PageSecurity:
    if options.page_auth != PAGE_AUTH_KUBERNETES:
        return UNRESTRICTED_PAGE
    service_name = f"{options.lease}.{options.own_namespace}.svc"
    names = list(dict.fromkeys(["localhost", "127.0.0.1", options.address, service_name]))  # without duplicates
    folder = Path(options.page_tls) if options.page_tls else None
    return await stack.enter_async_context(cluster_page_security(login, names, folder))


async def _serve(
    stack: AsyncExitStack, page: ProbeServer, elector: LeaderElector, security: PageSecurity, options: Options
) -> None:
    has_tls = security.tls is not None

    def find_leader() -> LeaderPage | None:
        return parse_leader_page(elector.holder_annotations, options.address, has_tls=has_tls)

    # With TLS, a request is relayed only if it has a token: a client's certificate cannot be passed on.
    may_relay = is_by_token if has_tls else lambda _: True
    relay = await stack.enter_async_context(LeaderRelay(find_leader, may_relay))
    served = page.serve(options.address, options.port, options.probe_port, security, [relay.relay])
    await stack.enter_async_context(await served)


def _build_informers(api: Api, events: EventHandlers, options: Options) -> list[_Informers]:
    """Return the informers of each watched namespace."""
    informers: list[_Informers] = []
    for namespace in options.namespaces or [""]:  # "": all namespaces
        objects = object_informers(api, events, [namespace], with_deployments=options.fleets)
        informers.append(_Informers(objects, custom_resource_informers(api, events, [namespace])))
    return informers


def _build_elector(
    api: Api, identity: str, on_leadership: Callable[[bool], None], options: Options, security: PageSecurity
) -> LeaderElector:
    def annotations() -> dict[str, str]:
        page = page_annotations(options.address, options.port, security.certificate_digest())
        values = {
            POD_UID_ANNOTATION: options.pod_uid,
            PAGE_AUTH_ANNOTATION: "" if options.page_auth == "None" else options.page_auth,
            **page,
        }
        return {name: value for name, value in values.items() if value}

    return LeaderElector(api, options.own_namespace, identity, on_leadership, options.lease, annotations=annotations)


def _build_controller(
    stack: AsyncExitStack, api: Api, registry: BrokerRegistry, keys: MemberKeys, options: Options
) -> tuple[Controller, ReportClient]:
    reports = ReportClient(keys.keys_of)
    stack.push_async_callback(reports.close)
    fleets = Deployments(api, options.image, enabled=options.fleets, keys=keys)
    limits = AssignmentLimits(options.max_queues, options.document_schema)
    controller = Controller(api, reports, registry, fleets, assignment_limits=limits)
    stack.push_async_callback(controller.close)
    return controller, reports


def _build_broker_registry(stack: AsyncExitStack, api: Api, options: Options) -> BrokerRegistry:
    networks = read_networks(options.broker_networks)
    policy = AddressPolicy(networks, _api_server_endpoints()) if networks else None
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    registry = BrokerRegistry(api, quota=QueueQuota(max_total=options.max_queues), address_policy=policy, is_pod=is_pod)
    stack.push_async_callback(registry.close)
    return registry


def _api_server_endpoints() -> list[tuple[str, int]]:
    """Return the addresses of the API server's Service, which brokers must not have; empty outside a cluster."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        return []
    try:  # in some clusters the environment has a host name instead of an address
        entries = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(str(socket_address[0]), int(port)) for *_, socket_address in entries]


def _build_metrics(
    controller: Controller,
    informers: Sequence[Informer[Any]],
    journal: Journal,
    traces: TraceExporter,
    options: Options,
) -> OperatorMetrics:
    return OperatorMetrics(
        lambda: controller.is_leading,
        lambda: watch_ages(informers),
        lambda: journal.counts,
        version=VERSION,
        with_queues=options.queue_metrics,
        trace_of=traces.trace_id_of,
    )


def _open_journal(options: Options, identity: str) -> Journal:
    return Journal(
        options.journal, identity, options.journal_limit, pod_uid=options.pod_uid, spool=options.journal_spool
    )


def _led_groups(controller: Controller) -> Callable[[], Mapping[tuple[str, str], Group]]:
    """Return a function that returns all groups while this operator leads, otherwise none."""
    return lambda: controller.groups if controller.is_leading else {}


def _leadership_handler(controller: Controller, observers: Observers) -> Callable[[bool], None]:
    def handle(is_leading: bool) -> None:  # noqa: FBT001 - a value
        controller.set_leading(is_leading=is_leading)
        observers.on_leadership(is_leading=is_leading)

    return handle


def _stop_on_signals(stop: asyncio.Event) -> asyncio.Event:
    """Set the event on SIGTERM and SIGINT; return it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
