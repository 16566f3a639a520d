"""A member in this process that pushes to an app in this process, at a cluster in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientSession, web

from builders import a_spec
from ground.handlers import cancel_at_cleanup
from ground.poll import soon
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.port import Consumer, Membership
from rota.documents import PLAIN_KEY, Assignment, Share, encode_assignment
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.sidecar.agent import Agent
from rota.sidecar.delivery.switch import DeliverySwitch
from rota.sidecar.status.control_api import ControlApi
from rota.sidecar.status.http_api import StatusApi
from rota.sidecar.storage.environment import PodIdentity
from rota.spec.resolved import encode_settings
from sidecar.whole_report import WholeReport, whole_report

TOPIC, GROUP = "orders", "shop"
RETRIES = Queue(RETRY_TOPIC_PREFIX + GROUP, BROKER, 0)
DEAD = Queue("%DLQ%" + GROUP, BROKER, 0)
NAME, UID = "a", "uid-a"


class Event(NamedTuple):
    """A message that was pushed to the app."""

    body: str
    queue: int
    attempt: int
    path: str
    port: int


@dataclass
class App:
    """An app that records its requests, and responds with the status that `answer` returns."""

    answer: Callable[[Event], Awaitable[int]]
    events: list[Event] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0

    async def serve(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.post("/{path:.*}", self._handle)])
        cancel_at_cleanup(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _handle(self, request: web.Request) -> web.Response:
        event = Event(
            (await request.read()).decode(),
            int(request.headers["ce-rocketmqqueue"]),
            int(request.headers["ce-rotaattempt"]),
            request.path,
            request.transport.get_extra_info("sockname")[1] if request.transport else 0,
        )
        self.events.append(event)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            status = await self.answer(event)
        finally:
            self.in_flight -= 1
        if status < 300:
            self.done.append(event.body)
        return web.Response(status=status)


async def accept(_: Event) -> int:
    return 204


class Latch:
    """An app's answer that waits until the latch is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, _: Event) -> int:
        await self.opened.wait()
        return 204


def port_of(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])


class MemoryMember:
    """A member; created by `a_member`."""

    def __init__(self, folder: Path, memory: MemoryCluster, session: ClientSession, name: str = NAME) -> None:
        self.folder = folder
        self.memory = memory
        self._session = session
        self.app = App(accept)
        self.settings: dict[str, Any] = {"startFrom": {"position": "Earliest"}}
        self.port = 0  # of the app
        self.generation = 0
        self.drain_timeout = 30.0
        self.identity = PodIdentity(
            name, "ns", f"uid-{name}", config_folder=str(folder / "documents"), state_folder=str(folder / "state")
        )
        self.connect: Callable[[MemoryCluster, Membership], Consumer] = MemoryConsumer
        for created in (self.identity.config_folder, self.identity.state_folder):
            Path(created).mkdir(parents=True)

    # Its process.

    async def start(self) -> None:
        """Start a sidecar on the existing folders, as at a restart."""
        self.stop_requested = asyncio.Event()
        self.sidecar = Agent(
            self.identity,
            lambda _, membership: self.connect(self.memory, membership),
            lambda agent: DeliverySwitch(agent, "127.0.0.1"),
        )
        self._page = await StatusApi(self.sidecar, ControlApi(self.sidecar)).serve("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port_of(self._page)}"
        self.running = asyncio.create_task(self.sidecar.run(self.stop_requested))

    async def end(self) -> None:
        """End the sidecar as SIGTERM does."""
        self.stop_requested.set()
        await self.running
        await self._page.cleanup()

    # Its configuration.

    def spec(self) -> dict[str, Any]:
        delivery = self.settings.get("delivery", {})
        return self.settings | {"delivery": delivery | {"push": {"port": self.port} | delivery.get("push", {})}}

    def assignment(self, queues: Iterable[Queue], **changed: Any) -> str:
        """Encode an assignment of these queues to the member."""
        assigned = tuple(queues)
        everyone = assigned if self.settings.get("messageModel") == "Broadcasting" else None
        fields: dict[str, Any] = {
            "group": "ns/orders",
            "generation": self.generation,
            "issued_at": "2026-11-21T08:00:00.000Z",
            "members": {self.identity.name: Share(self.identity.uid, () if everyone else assigned)},
            "everyone": everyone,
        }
        return str(encode_assignment(Assignment(**(fields | changed)))[PLAIN_KEY])

    def publish(self, queues: Iterable[Queue], **changed: Any) -> None:
        """Mount the settings and the next generation, as a kubelet does."""
        self.generation += 1
        settings = encode_settings(GROUP, a_spec(**self.spec()), self.drain_timeout, None)
        self.mount(settings, self.assignment(queues, **changed))

    def mount(self, settings: str | None, assignment: str | None) -> None:
        """Mount both files atomically; None leaves a file out."""
        documents = Path(self.identity.config_folder)
        folder = documents / f"..{len(list(documents.iterdir()))}"
        folder.mkdir()
        for name, text in (("group.json", settings), (PLAIN_KEY, assignment)):
            if text is not None:
                folder.joinpath(name).write_text(text)
        link = documents / "..data_tmp"
        link.symlink_to(folder.name)
        link.rename(documents / "..data")

    async def assign(self, queues: Iterable[Queue], **changed: Any) -> WholeReport:
        """Publish an assignment of these queues; wait until the member owns exactly them and is ready."""
        assigned = frozenset(queues)
        self.publish(sorted(assigned), **changed)
        await self.wait_until(lambda report: report.generation == self.generation and report.active_queues == assigned)
        await soon(self.ready)
        return await self.report()

    # Its status.

    async def request(self, path: str, method: str = "GET", body: str = "") -> tuple[int, str]:
        async with self._session.request(method, self.url + path, data=body) as response:
            return response.status, await response.text()

    def begin_drain(self) -> None:
        """Start a drain as the pod's preStop hook does."""
        self.sidecar.host.start_task(self.sidecar.drain())

    async def report(self) -> WholeReport:
        return await whole_report(self._get)

    async def _get(self, path: str) -> str:
        return (await self.request(path))[1]

    async def wait_until(self, predicate: Callable[[WholeReport], bool]) -> WholeReport:
        """Return the first report that fulfils the predicate."""

        async def matching_report() -> WholeReport | None:
            report = await self.report()
            return report if predicate(report) else None

        report = await soon(matching_report)
        assert report
        return report

    async def ready(self) -> bool:
        return (await self.request("/readyz"))[0] == 200

    # Its messages.

    async def queues(self) -> list[Queue]:
        return list(await self.memory.queues(TOPIC))

    async def send(self, *bodies: str, queue: int | None = None) -> None:
        for body in bodies:
            target = None if queue is None else Queue(TOPIC, BROKER, queue)
            await self.memory.send(TOPIC, body.encode(), queue=target)

    async def wait_until_done(self, *bodies: str) -> None:
        """Wait until the app has accepted exactly these messages, in any order."""
        await self.wait_until(lambda _: sorted(self.app.done) == sorted(bodies))

    def offset(self, queue: int) -> int | None:
        return self.memory.groups.committed_offsets[GROUP].get(Queue(TOPIC, BROKER, queue))


class Clock:
    """A cluster's time of day."""

    now = 1_763_712_000.0

    def __call__(self) -> float:
        return self.now


async def advance_clock(memory: MemoryCluster, clock: Clock, seconds: float) -> None:
    """Advance the cluster's clock, and deliver the messages that were delayed until then."""
    clock.now += seconds
    await memory.simulate_request(BROKER)


@asynccontextmanager
async def a_member(
    folder: Path, memory: MemoryCluster | None = None, name: str = NAME, **settings: Any
) -> AsyncIterator[MemoryMember]:
    """Start a member without an assignment, at a cluster with a topic of four queues; end it if it still runs."""
    memory = memory or MemoryCluster()
    await memory.create_topic(TOPIC, BROKER, 4)
    async with ClientSession() as session:
        member = MemoryMember(folder / name, memory, session, name)
        member.settings |= settings
        app = await member.app.serve()
        member.port = port_of(app)
        await member.start()
        try:
            yield member
        finally:
            if not member.running.done():
                member.app.answer = accept
                await member.end()
            await app.cleanup()
