"""The operator without a process of its own: its parts run in the test's event loop, so tests can inspect them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, TypeVar

from ground.poll import soon
from kube.members import KEY
from logins import log_in
from rota.brokers.memory import MemoryCluster
from rota.brokers.port import Brokers
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.kube import informers
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api, ApiError, NoResponseError, Params, WatchedEvent
from rota.kube.client.informer import Informer
from rota.kube.client.login.session import Login
from rota.kube.http.read_model import ReadModel
from rota.kube.members.report_client import ReportClient
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.event_handlers import EventHandlers
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.trace_export import TraceExporter
from rota.kube.workload.deployments import Deployments

T = TypeVar("T")


class Killed(BaseException):
    """Ends the operator between two writes; no handler catches it."""


class DelayedWrite:
    """A write that the client has sent and that has not reached the API server yet."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.may_arrive = asyncio.Event()


class RecordingApi(Api):
    """An API client that records requests and injects faults; `on_write` runs before and after each write."""

    def __init__(self, login: Login, on_write: Callable[[], None]) -> None:
        super().__init__(login)
        self.writes: list[str] = []
        self.open_writes = 0  # requests without a response
        self.reads: list[str] = []  # paths of objects and collections, without watches
        self.rejected: list[tuple[str, int]] = []  # rejected writes, and the HTTP status
        self.delayed: dict[str, DelayedWrite] = {}  # by method and path
        self.lost_responses: set[str] = set()  # writes that succeed the next time, but whose response is lost
        self.duplicated: set[str] = set()  # writes that are sent twice the next time, as after a broken connection
        self.muted_watches: set[str] = set()  # paths of collections whose watches lose every event
        self.fault: Callable[[str, str], None] = lambda _method, _path: None  # called before each request; may raise
        self._on_write = on_write

    async def watch(
        self, path: str, kind: type[T], version: str, params: Params | None = None
    ) -> AsyncGenerator[WatchedEvent[T]]:
        """Watch a collection; while its path is muted, all events are dropped."""
        async with aclosing(super().watch(path, kind, version, params)) as events:
            async for event in events:
                if path not in self.muted_watches:
                    yield event

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> bytes:
        self.fault(method, path)
        if method == "GET":
            self.reads.append(path)
            return await super()._request(method, path, body, **options)
        self.open_writes += 1
        try:
            return await self._write(method, path, body, **options)
        finally:
            self.open_writes -= 1

    async def _write(self, method: str, path: str, body: Mapping[str, Any] | None, **options: Any) -> bytes:
        self._on_write()
        write = f"{method} {path}"
        if late := self.delayed.get(write):
            late.sent.set()
            await late.may_arrive.wait()
        if write in self.duplicated:
            self.duplicated.remove(write)
            await super()._request(method, path, body, **options)
        try:
            response = await super()._request(method, path, body, **options)
        except ApiError as error:
            self.rejected.append((write, error.status))
            raise
        self.writes.append(write)
        self._on_write()
        if write in self.lost_responses:
            self.lost_responses.remove(write)
            raise NoResponseError(f"The response to {write} was lost")
        return response


class Operator:
    """One leading replica. `ends_at`: the count of write boundaries (two a write) at which it is killed; 0: never."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        memory: MemoryCluster,
        ends_at: int = 0,
        more_namespaces: Collection[str] = (),
        *,
        traces: TraceExporter | None = None,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._namespaces = [namespace, *more_namespaces]
        self._memory = memory
        self._traces = traces or TraceExporter(None)
        self._boundaries_left = ends_at
        self.connections: list[ConnectionConfig] = []  # of each connection to brokers, in order
        self.dead = False
        self._running: list[asyncio.Task[None]] = []
        self.informers: list[Informer[Any]] = []
        self.reconciles: list[ReconcileResult] = []

    async def __aenter__(self) -> Self:
        self.login = await log_in(self._kubeconfig)
        self.api = RecordingApi(self.login, self._count_write_boundary)
        self.reports = ReportClient(lambda _: (KEY,))
        self.registry = BrokerRegistry(self.api, self._connect)
        self.controller = Controller(self.api, self.reports, self.registry, Deployments(self.api))
        self.controller.reconciler.on_reconciled = self._record_reconcile
        self.metrics = OperatorMetrics(lambda: self.controller.is_leading, trace_of=self._traces.trace_id_of)
        clock = asyncio.get_running_loop().time
        self.read_model = ReadModel(
            self.controller, self.registry, self.metrics, "a test's", "0", clock, asyncio.Lock()
        )
        self.registry.consumed_queues = self.read_model.consumed_queues
        self.events = EventHandlers(self.controller)
        arguments = (self.api, self.events, self._namespaces)
        self.informers = followed = [
            *informers.custom_resource_informers(*arguments),
            *informers.object_informers(*arguments),
        ]
        self._running = [
            asyncio.create_task(work) for work in (self.registry.run(), *(informer.run() for informer in followed))
        ]
        for informer in followed:
            await informer.listed.wait()
        self.controller.set_leading(is_leading=True)
        return self

    def _record_reconcile(self, result: ReconcileResult) -> None:
        self.reconciles.append(result)
        changes = self.metrics.record_reconcile(result, asyncio.get_running_loop().time())
        self._traces.export((result.group.namespace, result.group.name), changes)

    async def relist(self, path: str) -> None:
        """List a collection again, as after a watch that cannot be resumed."""
        for informer in self.informers:
            if informer.path == path:
                await informer.relist()

    async def wait_for_reconcile(self, count: int) -> None:
        """Wait until more than this number of reconciles have run."""

        async def has_reconciled() -> bool:
            return len(self.reconciles) > count

        await soon(has_reconciled)

    def _connect(self, config: ConnectionConfig) -> Brokers:
        """Return a real client for brokers on this machine, and the in-memory cluster for any other address."""
        self.connections.append(config)
        return AdminClient(config) if config.name_servers[0].startswith("127.") else self._memory

    def _count_write_boundary(self) -> None:
        self._boundaries_left -= 1
        self.dead |= self._boundaries_left == 0
        if self.dead:
            raise Killed

    async def __aexit__(self, *_: object) -> None:
        self.controller.set_leading(is_leading=False)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.controller.close()
        await self.registry.close()
        await self.reports.close()
        await self.api.__aexit__(None, None, None)
        await self.login.__aexit__()
