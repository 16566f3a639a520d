"""One member in this process, at a cluster in memory, and the requests of an app in Pull mode."""

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
LONG_VISIBILITY = {"mode": "Pull", "pull": {"visibilityTimeout": "5m"}}

PulledMessage = dict[str, Any]

_numbers = count(1)


class Clock:
    """The cluster's time of day, `ahead` seconds in the future."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class ProcessMember:
    """A member and its app; created by `a_member`."""

    def __init__(self, folder: Path, address: str, session: ClientSession) -> None:
        self.address = address
        self.session = session
        self.clock = Clock()
        self.stop_requested = asyncio.Event()
        self.memory = MemoryCluster(clock=self.clock)
        self.queues: tuple[Queue, ...] = ()
        self.generation = 0
        self.settings: dict[str, Any] = {"startFrom": {"position": "Earliest"}, "delivery": LONG_VISIBILITY}
        self.drain_timeout = 0.1  # a test may end with unacknowledged messages
        self.identity = PodIdentity(
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
        for created in (self.identity.config_folder, self.identity.state_folder, self.identity.hook_folder):
            Path(created).mkdir()

    @property
    def is_broadcasting(self) -> bool:
        return self.settings.get("messageModel") == "Broadcasting"

    @property
    def all_queues(self) -> list[Queue]:
        """The queues of the topic, and the retry topic's if the group has one."""
        return [*self.queues, *([] if self.is_broadcasting else [RETRIES])]

    async def run(self) -> None:
        """Run until `stop_requested` is set."""
        await run_member(
            self.identity, lambda _, membership: MemoryConsumer(self.memory, membership), self.stop_requested
        )

    # Its configuration and status.

    def publish(self, queues: Iterable[Queue]) -> None:
        """Mount the next generation, as a kubelet does."""
        self.generation += 1
        settings = encode_settings(GROUP, a_spec(**self.settings), self.drain_timeout, None)
        shares = {self.identity.name: Share(self.identity.uid, tuple(queues))}
        assignment = Assignment(
            group=f"ns/{GROUP}",
            generation=self.generation,
            issued_at="2026-11-21T08:00:00.000Z",
            members=shares,
            everyone=tuple(queues) if self.is_broadcasting else None,
        )
        mounted = Path(self.identity.config_folder)
        folder = mounted / f"..{self.generation}"
        folder.mkdir()
        for name, text in {"group.json": settings, **encode_assignment(assignment)}.items():
            folder.joinpath(name).write_bytes(text.encode() if isinstance(text, str) else text)
        link = mounted / "..data_tmp"
        link.symlink_to(folder.name)
        link.rename(mounted / "..data")

    async def assign(self, queues: Iterable[Queue]) -> None:
        """Publish an assignment of these queues, and wait until the member owns exactly them."""
        assigned = frozenset(queues)
        self.publish(assigned)

        async def is_obeyed() -> bool:
            try:
                report = await self.report()
            except OSError:  # the member is starting
                return False
            return report.generation == self.generation and report.active_queues == assigned

        await soon(is_obeyed)

    async def wait_until_buffered(self, count: int) -> None:
        """Wait until the member's windows hold `count` messages."""

        async def are_buffered() -> bool:
            return sum(queue.buffered for queue in (await self.report()).queues) == count

        await soon(are_buffered)

    async def fetch(self, path: str) -> str:
        """Return the response of the status port."""
        async with self.session.get(f"http://{self.address}:{http_api.PORT}{path}") as response:
            return await response.text()

    async def begin_drain(self) -> None:
        """Start a drain by the pod's preStop hook."""
        hook = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rota.sidecar.prestop", env={**os.environ, "ROTA_RUN": self.identity.hook_folder}
        )
        assert await hook.wait() == 0

    async def report(self) -> WholeReport:
        return await whole_report(self.fetch)

    async def metric(self, name: str) -> float:
        """Return a metric by its name and labels; 0 if it does not exist."""
        samples = [line.rpartition(" ") for line in (await self.fetch("/metrics")).splitlines()]
        return sum(float(value) for head, _, value in samples if head == f"rota_sidecar_{name}")

    # The cluster.

    async def send(self, *bodies: str, queue: int = 0, **properties: str) -> None:
        for body in bodies:
            await self.memory.send(TOPIC, body.encode(), properties, self.queues[queue])

    async def advance_clock(self, seconds: float) -> None:
        """Advance the cluster's clock, and deliver the messages that were delayed until then."""
        self.clock.ahead += seconds
        await self.memory.simulate_request(BROKER)

    async def wait_for_messages(self, queue: Queue) -> Sequence[Message]:
        """Return the messages of a queue, once it has any."""

        async def read_messages() -> Sequence[Message]:
            return await self.memory.messages_of(queue) if queue in await self.memory.queues(queue.topic) else ()

        return await soon(read_messages)

    async def wait_until_committed(self, number: int, offset: int) -> None:
        """Wait until the offset of a queue is committed."""

        async def is_committed() -> bool:
            return self.memory.groups.committed_offsets[GROUP].get(self.queues[number]) == offset

        await soon(is_committed)

    # Its app.

    async def get(
        self, max_messages: int = 32, wait: str = "10s", session: ClientSession | None = None
    ) -> list[PulledMessage]:
        """Request messages by one long poll."""
        url = f"{self.app}/v1/messages?max={max_messages}&wait={wait}"
        async with (session or self.session).get(url) as response:
            assert response.status == 200, await response.text()
            messages: list[PulledMessage] = (await response.json())["messages"]
            return messages

    async def get_all(self, count: int) -> list[PulledMessage]:
        """Request messages until `count` were received."""
        messages: list[PulledMessage] = []
        while len(messages) < count:
            messages += await self.get()
        return messages

    async def ack(self, *messages: PulledMessage) -> list[str]:
        return await self._post_ids("acks", messages)

    async def nack(self, *messages: PulledMessage) -> list[str]:
        return await self._post_ids("nacks", messages)

    async def _post_ids(self, path: str, messages: Iterable[PulledMessage]) -> list[str]:
        body = {"ids": [message["id"] for message in messages]}
        async with self.session.post(f"{self.app}/v1/{path}", json=body) as response:
            assert response.status == 200, await response.text()
            unknown: list[str] = (await response.json())["unknown"]
            return unknown

    async def wait_for_pull_port(self) -> None:
        """Wait until the member serves the pull port; a HEAD request takes no message."""

        async def is_served() -> bool:
            try:
                async with self.session.head(f"{self.app}/v1/messages") as response:
                    return response.status == 405
            except OSError:
                return False

        await soon(is_served)


@asynccontextmanager
async def a_member(
    instance: Instance, folder: Path, *, queues: int = 1, shares_node_network: bool = False, **settings: Any
) -> AsyncIterator[ProcessMember]:
    """Run a member that owns all queues of a topic and of the group's retry topic."""
    async with ClientSession() as session:
        member = ProcessMember(folder, f"{instance.block}.3.{next(_numbers)}", session)
        if shares_node_network:
            member.identity = member.identity._replace(node_address=member.identity.address)
        await member.memory.create_topic(TOPIC, BROKER, queues)
        member.queues = await member.memory.queues(TOPIC)
        member.settings |= settings
        running = asyncio.create_task(member.run())
        try:
            await member.assign(member.all_queues)
            if member.settings["delivery"]["mode"] == "Pull" and not shares_node_network:
                await member.wait_for_pull_port()
            yield member
        finally:
            member.stop_requested.set()
            await running


async def read_event(stream: ClientResponse) -> tuple[str, dict[str, object]]:
    """Read the next event."""
    name = (await stream.content.readline()).decode().removeprefix("event: ").strip()
    data = json.loads((await stream.content.readline()).removeprefix(b"data: "))
    assert await stream.content.readline() == b"\n"
    return name, data
