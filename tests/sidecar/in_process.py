"""One member in this process, at a cluster in memory: its documents, and what an app in Pull mode asks of it."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse, ClientSession

from builders import a_spec
from ground.instance import Instance
from ground.poll import soon
from rota.brokers.memory import BROKER, MemoryCluster, MemoryConsumer
from rota.brokers.message import Message
from rota.documents import Assignment, Share, encode_assignment
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.sidecar.delivery import pull
from rota.sidecar.main import run_member
from rota.sidecar.status import http_api
from rota.sidecar.storage.environment import PodIdentity
from rota.spec.resolved import encode_settings
from sidecar.whole_report import WholeReport, whole_report

TOPIC, GROUP = "orders", "shop"
RETRIES = Queue(RETRY_TOPIC_PREFIX + GROUP, BROKER, 0)
DEAD = Queue("%DLQ%" + GROUP, BROKER, 0)
UNHURRIED = {"mode": "Pull", "pull": {"visibilityTimeout": "5m"}}

Handed = dict[str, Any]

_numbers = count(1)


class Clock:
    """The time of day at the cluster; turn it forward by `ahead`."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class ProcessMember:
    """A member and its app; `a_member` makes one."""

    def __init__(self, folder: Path, address: str, session: ClientSession) -> None:
        """Start nothing yet."""
        self.address, self.session = address, session
        self.clock, self.ending = Clock(), asyncio.Event()
        self.memory = MemoryCluster(clock=self.clock)
        self.queues: tuple[Queue, ...] = ()
        self.generation = 0
        self.settings: dict[str, Any] = {"startFrom": {"position": "Earliest"}, "delivery": UNHURRIED}
        self.drain_timeout = 0.1  # so that a test need not answer for every message
        self.who = PodIdentity(
            "a",
            "ns",
            "u",
            address,
            app_host=address,
            config_folder=str(folder / "documents"),
            state_folder=str(folder / "state"),
            hook_folder=str(folder / "run"),
        )
        self.app = f"http://{address}:{pull.PORT}"
        for it in (self.who.config_folder, self.who.state_folder, self.who.hook_folder):
            Path(it).mkdir()

    @property
    def everything(self) -> list[Queue]:
        """The queues that there are for it."""
        return [*self.queues, *([] if self.settings.get("messageModel") == "Broadcasting" else [RETRIES])]

    async def run(self) -> None:
        """Work until `ending`."""
        await run_member(self.who, lambda _, membership: MemoryConsumer(self.memory, membership), self.ending)

    # Its documents, and what it says of itself.

    def show(self, queues: Iterable[Queue]) -> None:
        """Show it the next generation, as a kubelet does."""
        self.generation += 1
        settings = encode_settings(GROUP, a_spec(**self.settings), self.drain_timeout, None)
        shares = {self.who.name: Share(self.who.uid, tuple(queues))}
        broadcasting = self.settings.get("messageModel") == "Broadcasting"
        assignment = Assignment(
            group=f"ns/{GROUP}",
            generation=self.generation,
            issued_at="2026-11-21T08:00:00.000Z",
            members=shares,
            everyone=tuple(queues) if broadcasting else None,
        )
        place, link = Path(self.who.config_folder, f"..{self.generation}"), Path(self.who.config_folder, "..data_tmp")
        place.mkdir()
        for name, text in {"group.json": settings, **encode_assignment(assignment)}.items():
            place.joinpath(name).write_bytes(text.encode() if isinstance(text, str) else text)
        link.symlink_to(place.name)
        link.rename(link.with_name("..data"))

    async def obeys(self, queues: Iterable[Queue]) -> None:
        """Show it the next generation, and wait until it works just these queues."""
        wanted = frozenset(queues)
        self.show(wanted)

        async def so() -> bool:
            try:
                report = await self.report()
            except OSError:  # it is about to begin
                return False
            return report.generation == self.generation and report.active_queues == wanted

        await soon(so)

    async def fetched(self, number: int) -> None:
        """Wait until so many messages lie in its windows."""

        async def so() -> bool:
            return sum(it.buffered for it in (await self.report()).queues) == number

        await soon(so)

    async def ask(self, path: str) -> str:
        """Return what it answers on the pod's address."""
        async with self.session.get(f"http://{self.address}:{http_api.PORT}{path}") as answer:
            return await answer.text()

    async def begin_drain(self) -> None:
        """Drain as the pod's preStop hook has it."""
        hook = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rota.sidecar.prestop", env={**os.environ, "ROTA_RUN": self.who.hook_folder}
        )
        assert await hook.wait() == 0

    async def report(self) -> WholeReport:
        return await whole_report(self.ask)

    async def counted(self, name: str) -> float:
        """Return a metric of it, by name and labels."""
        found = [line.rpartition(" ") for line in (await self.ask("/metrics")).splitlines()]
        return sum(float(value) for head, _, value in found if head == f"rota_sidecar_{name}")

    # The cluster.

    async def send(self, *bodies: str, queue: int = 0, **properties: str) -> None:
        for body in bodies:
            await self.memory.send(TOPIC, body.encode(), properties, self.queues[queue])

    async def turn(self, seconds: float) -> None:
        """Let time pass at the cluster."""
        self.clock.ahead += seconds
        await self.memory.check_reachable(BROKER)

    async def holds(self, queue: Queue) -> Sequence[Message]:
        """Return what lies in a queue, once there is something."""

        async def found() -> Sequence[Message]:
            return await self.memory.messages_of(queue) if queue in await self.memory.queues(queue.topic) else ()

        return await soon(found)

    async def committed(self, number: int, offset: int) -> None:
        """Wait until it has committed so far in a queue."""

        async def so() -> bool:
            return self.memory.committed_offsets[GROUP].get(self.queues[number]) == offset

        await soon(so)

    # Its app.

    async def get(self, most: int = 32, wait: str = "10s", session: ClientSession | None = None) -> list[Handed]:
        """Ask for messages."""
        where = f"{self.app}/v1/messages?max={most}&wait={wait}"
        async with (session or self.session).get(where) as answer:
            assert answer.status == 200, await answer.text()
            messages: list[Handed] = (await answer.json())["messages"]
            return messages

    async def get_all(self, number: int) -> list[Handed]:
        """Ask until there are so many."""
        messages: list[Handed] = []
        while len(messages) < number:
            messages += await self.get()
        return messages

    async def ack(self, *messages: Handed) -> list[str]:
        return await self._tell("acks", messages)

    async def nack(self, *messages: Handed) -> list[str]:
        return await self._tell("nacks", messages)

    async def _tell(self, what: str, messages: Iterable[Handed]) -> list[str]:
        told = {"ids": [it["id"] for it in messages]}
        async with self.session.post(f"{self.app}/v1/{what}", json=told) as answer:
            assert answer.status == 200, await answer.text()
            unknown: list[str] = (await answer.json())["unknown"]
            return unknown

    async def answers(self) -> None:
        """Wait until the app can ask, without asking for anything."""

        async def so() -> bool:
            try:
                async with self.session.head(f"{self.app}/v1/messages") as answer:
                    return answer.status == 405
            except OSError:
                return False

        await soon(so)


@asynccontextmanager
async def a_member(
    instance: Instance, folder: Path, *, queues: int = 1, shares_node_network: bool = False, **settings: Any
) -> AsyncIterator[ProcessMember]:
    """Run a member that works all queues of a topic, and its group's retries if it has any."""
    async with ClientSession() as session:
        member = ProcessMember(folder, f"{instance.block}.3.{next(_numbers)}", session)
        if shares_node_network:
            member.who = member.who._replace(node_address=member.who.address)
        await member.memory.create_topic(TOPIC, BROKER, queues)
        member.queues = await member.memory.queues(TOPIC)
        member.settings |= settings
        running = asyncio.create_task(member.run())
        try:
            await member.obeys(member.everything)
            if member.settings["delivery"]["mode"] == "Pull" and not shares_node_network:
                await member.answers()
            yield member
        finally:
            member.ending.set()
            await running


async def event(stream: ClientResponse) -> tuple[str, dict[str, object]]:
    """Read the next event."""
    name = (await stream.content.readline()).decode().removeprefix("event: ").strip()
    data = json.loads((await stream.content.readline()).removeprefix(b"data: "))
    assert await stream.content.readline() == b"\n"
    return name, data
