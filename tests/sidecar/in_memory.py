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
from rota.sidecar.delivery.push import PushDelivery
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
    """What the app was given."""

    body: str
    queue: int
    attempt: int
    path: str
    port: int


@dataclass
class App:
    """An app that notes what it is given, and answers as a test says."""

    answer: Callable[[Event], Awaitable[int]]
    heard: list[Event] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    open: int = 0
    most: int = 0  # that were open at once

    async def serve(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.post("/{path:.*}", self._handle)])
        cancel_at_cleanup(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _handle(self, asked: web.Request) -> web.Response:
        headers, port = asked.headers, asked.transport.get_extra_info("sockname")[1] if asked.transport else 0
        event = Event(
            (await asked.read()).decode(),
            int(headers["ce-rocketmqqueue"]),
            int(headers["ce-rotaattempt"]),
            asked.path,
            port,
        )
        self.heard.append(event)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            status = await self.answer(event)
        finally:
            self.open -= 1
        if status < 300:
            self.done.append(event.body)
        return web.Response(status=status)


async def well(_: Event) -> int:
    return 204


class Gate:
    """An app that answers once it is let."""

    def __init__(self) -> None:
        self.opens = asyncio.Event()

    async def __call__(self, _: Event) -> int:
        await self.opens.wait()
        return 204


def port_of(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])


class MemoryMember:
    """A member; `a_member` makes one."""

    def __init__(self, folder: Path, memory: MemoryCluster, session: ClientSession, name: str = NAME) -> None:
        self.folder, self.memory, self._session = folder, memory, session
        self.app = App(well)
        self.settings: dict[str, Any] = {"startFrom": {"position": "Earliest"}}
        self.port = 0  # of the app
        self.generation, self.drain_timeout = 0, 30.0
        self.who = PodIdentity(
            name, "ns", f"uid-{name}", config_folder=str(folder / "documents"), state_folder=str(folder / "state")
        )
        self.connect: Callable[[MemoryCluster, Membership], Consumer] = MemoryConsumer
        for it in (self.who.config_folder, self.who.state_folder):
            Path(it).mkdir(parents=True)

    # Its life.

    async def start(self) -> None:
        """Start a sidecar with the folders that are there."""
        self.ending = asyncio.Event()
        self.sidecar = Agent(
            self.who, lambda _, it: self.connect(self.memory, it), lambda shell: PushDelivery(shell, "127.0.0.1")
        )
        self._page = await StatusApi(self.sidecar, ControlApi(self.sidecar)).serve("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port_of(self._page)}"
        self.running = asyncio.create_task(self.sidecar.run(self.ending))

    async def end(self) -> None:
        """End it as SIGTERM does."""
        self.ending.set()
        await self.running
        await self._page.cleanup()

    # Its documents.

    def spec(self) -> dict[str, Any]:
        delivery = self.settings.get("delivery", {})
        return self.settings | {"delivery": delivery | {"push": {"port": self.port} | delivery.get("push", {})}}

    def assignment(self, queues: Iterable[Queue], **changed: Any) -> str:
        """Write a document that gives it these queues."""
        told = tuple(queues)
        everyone = told if self.settings.get("messageModel") == "Broadcasting" else None
        fields: dict[str, Any] = {
            "group": "ns/orders",
            "generation": self.generation,
            "issued_at": "2026-11-21T08:00:00.000Z",
            "members": {self.who.name: Share(self.who.uid, () if everyone else told)},
            "everyone": everyone,
        }
        return str(encode_assignment(Assignment(**(fields | changed)))[PLAIN_KEY])

    def show(self, queues: Iterable[Queue], **changed: Any) -> None:
        """Show it the next generation, as a kubelet does."""
        self.generation += 1
        settings = encode_settings(GROUP, a_spec(**self.spec()), self.drain_timeout, None)
        self.put(settings, self.assignment(queues, **changed))

    def put(self, settings: str | None, assignment: str | None) -> None:
        """Put files there, both at once."""
        documents = Path(self.who.config_folder)
        place = documents / f"..{len(list(documents.iterdir()))}"
        place.mkdir()
        for name, text in (("group.json", settings), (PLAIN_KEY, assignment)):
            if text is not None:
                place.joinpath(name).write_text(text)
        link = documents / "..data_tmp"
        link.symlink_to(place.name)
        link.rename(documents / "..data")

    async def obeys(self, queues: Iterable[Queue], **changed: Any) -> WholeReport:
        """Show it the next generation, and wait until it works just these queues, and is known."""
        wanted = frozenset(queues)
        self.show(sorted(wanted), **changed)
        await soon(lambda: self.so(lambda it: it.generation == self.generation and it.active_queues == wanted))
        await soon(self.ready)
        return await self.report()

    # What it says.

    async def ask(self, path: str, method: str = "GET", body: str = "") -> tuple[int, str]:
        async with self._session.request(method, self.url + path, data=body) as answer:
            return answer.status, await answer.text()

    def begin_drain(self) -> None:
        """Drain as the pod's preStop hook has it."""
        self.sidecar.start_task(self.sidecar.drain())

    async def report(self) -> WholeReport:
        return await whole_report(self._text)

    async def _text(self, path: str) -> str:
        return (await self.ask(path))[1]

    async def so(self, true: Callable[[WholeReport], bool]) -> bool:
        return true(await self.report())

    async def until(self, true: Callable[[WholeReport], bool]) -> WholeReport:
        """Wait until its report is so."""

        async def found() -> WholeReport | None:
            report = await self.report()
            return report if true(report) else None

        report = await soon(found)
        assert report
        return report

    async def ready(self) -> bool:
        return (await self.ask("/readyz"))[0] == 200

    # Its messages.

    async def queues(self) -> list[Queue]:
        return list(await self.memory.queues(TOPIC))

    async def send(self, *bodies: str, queue: int | None = None) -> None:
        for body in bodies:
            where = None if queue is None else Queue(TOPIC, BROKER, queue)
            await self.memory.send(TOPIC, body.encode(), queue=where)

    async def did(self, *bodies: str) -> None:
        """Wait until the app has done these, in any order."""
        await self.until(lambda _: sorted(self.app.done) == sorted(bodies))

    def offset(self, queue: int) -> int | None:
        return self.memory.committed_offsets[GROUP].get(Queue(TOPIC, BROKER, queue))


class Clock:
    """The time of day at a cluster."""

    now = 1_763_712_000.0

    def __call__(self) -> float:
        return self.now


async def turn(memory: MemoryCluster, clock: Clock, seconds: float) -> None:
    """Let time pass at the cluster, and what was delayed until then come."""
    clock.now += seconds
    await memory.check_reachable(BROKER)


@asynccontextmanager
async def a_member(
    folder: Path, memory: MemoryCluster | None = None, name: str = NAME, **settings: Any
) -> AsyncIterator[MemoryMember]:
    """Start a member that has no documents yet, at a cluster with a topic of four queues; end it if it was not."""
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
                member.app.answer = well
                await member.end()
            await app.cleanup()
