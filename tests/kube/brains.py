"""An operator without its process: its own parts, in the test's loop, so that it can be looked into."""

import asyncio
import math
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
from rota.kube.client.api import Api, ApiError, NoResponseError, Params
from rota.kube.client.informer import Informer
from rota.kube.client.login.session import Login
from rota.kube.http.read_model import ReadModel
from rota.kube.members.report_client import ReportClient
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.reconciler import ReconcileResult
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.trace_export import TraceExporter
from rota.kube.workload.deployments import Deployments

T = TypeVar("T")


class Killed(BaseException):
    """The operator ends here, in the middle of what it does; nothing catches that."""


class Late:
    """A write that somebody sends and that does not arrive yet."""

    def __init__(self) -> None:
        self.sent, self.arrives = asyncio.Event(), asyncio.Event()


class Counting(Api):
    """The API server, and how often it was written to; `moment` is told before and after each write."""

    def __init__(self, login: Login, moment: Callable[[], None]) -> None:
        super().__init__(login)
        self.writes: list[str] = []
        self.reads: list[str] = []  # paths of objects and collections, watches aside
        self.refused: list[tuple[str, int]] = []  # writes that were not taken, and why
        self.late: dict[str, Late] = {}  # by write
        self.lost: set[str] = set()  # writes that are taken, and whose next answer gets lost
        self.repeated: set[str] = set()  # writes that are sent twice the next time, as where a connection breaks
        self.silent: set[str] = set()  # paths of collections whose watches lose every event
        self.fault: Callable[[str, str], None] = lambda _method, _path: None  # called before each request; may raise
        self._moment = moment

    async def watch(
        self, path: str, kind: type[T], version: str, params: Params | None = None
    ) -> AsyncGenerator[tuple[str, T | None, str]]:
        """Watch a collection; while it is silent, nothing of what happens is told."""
        async with aclosing(super().watch(path, kind, version, params)) as events:
            async for event in events:
                if path not in self.silent:
                    yield event

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Params | None = None,
        content_type: str = "application/json",
        limit_bytes: float = math.inf,
    ) -> bytes:
        self.fault(method, path)
        if method == "GET":
            self.reads.append(path)
            return await super()._request(
                method, path, body, params=params, content_type=content_type, limit_bytes=limit_bytes
            )
        self._moment()
        write = f"{method} {path}"
        if late := self.late.get(write):
            late.sent.set()
            await late.arrives.wait()
        if write in self.repeated:
            self.repeated.remove(write)
            await super()._request(method, path, body, params=params, content_type=content_type)
        try:
            found = await super()._request(method, path, body, params=params, content_type=content_type)
        except ApiError as error:
            self.refused.append((write, error.status))
            raise
        self.writes.append(write)
        self._moment()
        if write in self.lost:
            self.lost.remove(write)
            raise NoResponseError(f"The answer to {write} got lost")
        return found


class Operator:
    """One replica that leads; `ends_at`: before or after which write it ends, in the middle of it; 0: never."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        memory: MemoryCluster,
        ends_at: int = 0,
        also: Collection[str] = (),
        *,
        traces: TraceExporter | None = None,
    ) -> None:
        self._kubeconfig, self._namespaces, self._memory = kubeconfig, [namespace, *also], memory
        self._traces = traces or TraceExporter(None)
        self._left = ends_at
        self.sites: list[ConnectionConfig] = []  # that it has connected to, in that order
        self.dead = False
        self._running: list[asyncio.Task[None]] = []
        self.following: list[Informer[Any]] = []
        self.done: list[ReconcileResult] = []

    async def __aenter__(self) -> Self:
        self.login = await log_in(self._kubeconfig)
        self.api = Counting(self.login, self._moment)
        self.reports = ReportClient(lambda _: (KEY,))
        self.places = BrokerRegistry(self.api, self._connect)
        self.brain = Controller(self.api, self.reports, self.places, Deployments(self.api))
        self.brain.on_reconciled = self._round
        self.measures = OperatorMetrics(lambda: self.brain.is_leading, trace_of=self._traces.trace_id_of)
        clock = asyncio.get_running_loop().time
        self.sight = ReadModel(self.brain, self.places, self.measures, "a test's", "0", clock, asyncio.Lock())
        self.places.consumed_queues = self.sight.consumed_queues
        served = (self.api, self.brain, self._namespaces)
        self.following = following = [*informers.custom_informers(*served), *informers.object_informers(*served)]
        self._running = [asyncio.create_task(work) for work in (self.places.run(), *(it.run() for it in following))]
        for it in following:
            await it.listed.wait()
        self.brain.set_leading(is_leading=True)
        return self

    def _round(self, done: ReconcileResult) -> None:
        self.done.append(done)
        self._traces.export((done.group.namespace, done.group.name), self.sight.record_reconcile(done))

    async def lists_again(self, path: str) -> None:
        """List a collection again, as after a watch that cannot be resumed."""
        for informer in self.following:
            if informer.path == path:
                await informer.relist()

    async def looks_again(self, rounds: int) -> None:
        """Wait until it has looked at something more than so often."""

        async def looked() -> bool:
            return len(self.done) > rounds

        await soon(looked)

    def _connect(self, site: ConnectionConfig) -> Brokers:
        """Return the brokers in memory, whatever they are called; those on this machine are real, or not there."""
        self.sites.append(site)
        return AdminClient(site) if site.name_servers[0].startswith("127.") else self._memory

    def _moment(self) -> None:
        self._left -= 1
        self.dead |= self._left == 0
        if self.dead:
            raise Killed

    async def __aexit__(self, *_: object) -> None:
        self.brain.set_leading(is_leading=False)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.brain.close()
        await self.places.close()
        await self.reports.close()
        await self.api.__aexit__(None, None, None)
        await self.login.__aexit__()
