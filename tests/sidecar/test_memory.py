"""Memory: a producer's messages never exceed the memory of the sidecar's container, also when decompressed.

The sidecar is a process in a container of 256 MiB, at a real broker; the app is in this process.
"""

import asyncio
import hashlib
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import pytest
from aiohttp import web

from ground.memory_limit import MemoryLimit, peak_bytes
from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.brokers import PRODUCER_GROUP
from rota.brokers.rocketmq.wire import requests
from rota.model import Queue
from sidecar.fleet import SidecarFleet, a_fleet
from sidecar.pods import APP_PORT, Pod

MEBIBYTE = 2**20
LIMIT_BYTES = 256 * MEBIBYTE
PEAK_BYTES = 200 * MEBIBYTE  # a margin: the kernel counts a socket's buffers, too
ZLIB = 0x301  # system flag: the body is compressed by ZLIB
QUEUES = 16
BUSY = QUEUES // 2  # deliveries at once: not every queue gets a body of 4 MiB beyond its share
TOO_LARGE = "it exceeds 4 MiB when decompressed, the limit in spec.delivery.buffer.mebibytesPerMessage"
PATIENCE_SECONDS = 300.0


class Body(NamedTuple):
    """A delivered message."""

    digest: str
    damage: str


class App:
    """Records the bodies of its requests; responds once `opened` is set."""

    def __init__(self) -> None:
        self.delivered: set[Body] = set()
        self.in_flight = 0
        self.opened = asyncio.Event()

    @asynccontextmanager
    async def serve_at(self, address: str) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 * MEBIBYTE)
        app.add_routes([web.post("/", self._post)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, address, APP_PORT).start()
        try:
            yield
        finally:
            await runner.cleanup()

    async def _post(self, request: web.Request) -> web.Response:
        self.in_flight += 1
        await self.opened.wait()
        body = await request.read()
        damage = request.headers.get("ce-rocketmqdamage", "")
        self.delivered.add(Body(hashlib.sha256(body).hexdigest(), damage.replace("%20", " ")))
        self.in_flight -= 1
        return web.Response(status=204)


class Sent(NamedTuple):
    """A message to send, and the delivery that is expected."""

    body: bytes
    flags: int
    expected: Body
    properties: Mapping[str, str] = MappingProxyType({})


def a_message(body: bytes, delivered: bytes, flags: int = 0, damage: str = "") -> Sent:
    return Sent(body, flags, Body(hashlib.sha256(delivered).hexdigest(), damage))


def a_bomb(number: int) -> Sent:
    """Return a message of about 31 KB that decompresses to 31 MiB."""
    packed = zlib.compress(b"%d " % number + bytes(31 * MEBIBYTE))
    assert len(packed) < 33_000
    return a_message(packed, packed, ZLIB, TOO_LARGE)


def a_large_message(number: int) -> Sent:
    """Return a compressed message that decompresses to a little less than the limit."""
    body = b"%d " % number + bytes(4 * MEBIBYTE - 100)
    return a_message(zlib.compress(body), body, ZLIB)


def an_uncompressed_message(number: int) -> Sent:
    """Return a message of about the largest size that a broker accepts."""
    body = b"%d " % number + bytes(4 * MEBIBYTE - 64 * 1024)
    return a_message(body, body)


def a_message_with_many_properties(number: int) -> Sent:
    """Return a small message with 30 KB of properties: a dictionary of nearly a megabyte."""
    body = b"%d" % number
    properties = {f"{key:04x}": "" for key in range(5000)}
    return Sent(body, 0, Body(hashlib.sha256(body).hexdigest(), ""), properties)


def a_good_message(number: int) -> Sent:
    body = b"good %d" % number
    return a_message(zlib.compress(body), body, ZLIB)


async def send(cluster: AdminClient, queues: Sequence[Queue], messages: Iterable[Sent]) -> None:
    """Send pairs of an attack and a good message: in each queue, every good message follows an attack."""
    for number, message in enumerate(messages):
        queue = queues[number // 2 % len(queues)]
        born = int(time.time() * 1000)
        properties = message.properties
        request = requests.send(
            PRODUCER_GROUP, queue.topic, message.body, properties, broker=queue.broker, queue_id=queue.id, born_ms=born
        )
        marked = msgspec.structs.replace(request, fields={**request.fields, "f": message.flags})
        await cluster._client.call_or_raise(queue.broker, marked)


@asynccontextmanager
async def attacked(
    rocketmq: RocketMQ, folder: Path, messages: Sequence[Sent], app: App
) -> AsyncIterator[tuple[SidecarFleet, Pod, MemoryLimit]]:
    """Send messages, then start a sidecar with 256 MiB."""
    try:
        container = MemoryLimit(folder.name, LIMIT_BYTES)
    except OSError as error:
        pytest.skip(f"a memory limit requires the permission to create cgroups: {error}")
    try:
        async with a_fleet(rocketmq, folder, queues=QUEUES) as fleet:
            fleet.program = container.program("-m", "rota.sidecar")
            await send(fleet.cluster, fleet.queues, messages)
            pod = await fleet.add("a", app=False)
            async with app.serve_at(pod.address):
                await fleet.grant(a=fleet.queues)
                yield fleet, pod, container
    finally:
        container.remove()


async def is_delivered(pod: Pod, app: App, messages: Sequence[Sent]) -> bool:
    assert pod.sidecar
    assert pod.sidecar.poll() is None, "the sidecar was killed"
    return {message.expected for message in messages} <= app.delivered


async def is_busy(pod: Pod, app: App) -> bool:
    assert pod.sidecar
    assert pod.sidecar.poll() is None, "the sidecar was killed"
    return app.in_flight >= BUSY


WORST = "bombs of 31 MiB"
OTHER_ATTACKS = pytest.mark.slow("large bodies and many properties, together with compression bombs")
ATTACKS: dict[str, tuple[Callable[[int], Sent], int]] = {
    WORST: (a_bomb, 64),
    "bodies of just under 4 MiB": (a_large_message, 64),
    "plain bodies of nearly 4 MiB": (an_uncompressed_message, 64),
    "30 KB of properties": (a_message_with_many_properties, 400),
}


@pytest.mark.parametrize(
    ("make", "number_of_messages"),
    [pytest.param(*attack, id=name, marks=OTHER_ATTACKS if name != WORST else []) for name, attack in ATTACKS.items()],
)
async def test_memory_stays_within_the_container_and_every_message_arrives(
    rocketmq: RocketMQ, tmp_path: Path, make: Callable[[int], Sent], number_of_messages: int
) -> None:
    attack = [make(number) for number in range(number_of_messages)]
    good = [a_good_message(number) for number in range(number_of_messages)]
    messages = [*chain.from_iterable(zip(attack, good, strict=True))]
    app = App()
    async with attacked(rocketmq, tmp_path, messages, app) as (_, pod, container):
        await soon(
            lambda: is_busy(pod, app), PATIENCE_SECONDS
        )  # the app holds as many requests as the sidecar sends at once
        app.opened.set()
        await soon(lambda: is_delivered(pod, app, messages), PATIENCE_SECONDS)
        assert pod.sidecar
        print(
            f"peak {peak_bytes(pod.sidecar.pid) / MEBIBYTE:.0f} MiB, cgroup {container.peak_bytes / MEBIBYTE:.0f} MiB"
        )
        assert peak_bytes(pod.sidecar.pid) < PEAK_BYTES
        expected = {message.expected for message in messages if message.expected.damage}
        assert {body for body in app.delivered if body.damage} == expected
        assert not pod.complaints()
