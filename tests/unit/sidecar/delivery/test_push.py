"""Push delivery with queues and a host of the test's own, to a real server."""

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from builders import a_spec
from rota.brokers.message import Message
from rota.brokers.port import PullResult
from rota.model import Queue, Reason
from rota.sidecar.delivery.push import PushDelivery
from rota.sidecar.member.window import QueueWindow
from rota.sidecar.status.delivery_counts import DeliveryCounts
from rota.sidecar.status.problems import Problems
from rota.sidecar.status.sidecar_metrics import SidecarMetrics
from rota.spec.resolved import GroupSettings, decode_settings, encode_settings

A = Queue("orders", "broker-a", 0)
B = Queue("orders", "broker-a", 1)


@dataclass
class _Member:
    """The part of a member that push delivery needs."""

    settings: GroupSettings
    may_send: Callable[[Queue, float], bool]
    problems: Problems = field(default_factory=Problems)
    metrics: SidecarMetrics = field(default_factory=SidecarMetrics)
    delivery_counts: DeliveryCounts = field(default_factory=lambda: DeliveryCounts(0.0))
    readers: dict[Queue, Any] = field(default_factory=dict)
    outcomes: list[tuple[str, list[Queue]]] = field(default_factory=list)
    obeyed_generation: int = 1

    def add_queue(self, queue: Queue) -> Any:
        """Return a reader with one message."""
        window = QueueWindow(next_offset=0, committed_offset=0)
        window.add_pull(0, PullResult((Message(queue, 0, str(queue.id).encode(), {}),), 1, 0, 1))
        reader = SimpleNamespace(
            queue=queue, window=window, is_retry_topic=False, on_change=lambda: None, delivered_at=0.0
        )
        self.readers[queue] = reader
        return reader

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def reader_of(self, queue: Queue) -> Any:
        return self.readers.get(queue)

    def may_deliver(self, queue: Queue) -> bool:
        return queue in self.readers

    def on_delivery_ended(self, messages: Sequence[Message], outcome: str, _: float) -> None:
        self.outcomes.append((outcome, [message.queue for message in messages]))


def _a_member(port: int, may_send: Callable[[Queue, float], bool] = lambda _, __: True) -> Any:
    """Return a member with one delivery at a time."""
    push = {"port": port, "concurrency": 1}
    settings = decode_settings(encode_settings("shop", a_spec(delivery={"push": push}), 30.0, None))
    return _Member(settings, may_send)


async def _end(delivery: PushDelivery, member: _Member) -> None:
    """Release all queues, and wait until no delivery is open."""
    readers = [*member.readers.values()]
    member.readers.clear()
    for reader in readers:
        delivery.abort_deliveries(reader)
    while delivery._workers:  # noqa: ASYNC110 - nothing to await
        await asyncio.sleep(0)
    await delivery.close()


async def test_push_delivery_that_is_aborted_too_late_does_not_abort_the_next_one() -> None:
    """After a stall, the look for it aborts the queue's deliveries while one of them is being settled."""
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError), closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                bodies.append(await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0])))
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % (500 if len(bodies) == 1 else 200))

    def may_send(queue: Queue, _: float) -> bool:
        if queue == A and bodies:
            delivery.abort_deliveries(member.readers.pop(A))
            return False
        return True

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    member = _a_member(server.sockets[0].getsockname()[1], may_send)
    delivery = PushDelivery(member, "127.0.0.1")
    with closing(server):
        for queue in (A, B):
            delivery.offer(member.add_queue(queue))
        async with asyncio.timeout(30):
            while member.readers[B].window.unfinished_count:  # noqa: ASYNC110 - nothing to await
                await asyncio.sleep(0.01)
        await _end(delivery, member)
    assert bodies == [b"0", b"1"]
    assert member.outcomes == [("cut", [A]), ("done", [B])]


async def test_push_delivery_that_hangs_keeps_no_finished_message_in_memory() -> None:
    """The memory budget does not count finished messages."""
    is_hanging = asyncio.Event()
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n0")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n1")
            is_hanging.set()
            await ended.wait()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    member = _a_member(server.sockets[0].getsockname()[1])
    delivery = PushDelivery(member, "127.0.0.1")
    finished, hanging = member.add_queue(A), member.add_queue(B)
    message = Message(A, 0, b"0", {})
    references = sys.getrefcount(message)
    finished.window.rewind(0)
    finished.window.add_pull(0, PullResult((message,), 1, 0, 1))
    with closing(server):
        delivery.offer(finished)
        delivery.offer(hanging)
        async with asyncio.timeout(30):
            await is_hanging.wait()
        assert sys.getrefcount(message) == references
        ended.set()
        await _end(delivery, member)


async def test_push_delivery_that_fails_is_logged_with_the_place_of_the_error(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n0")
            writer.write(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n")

    async def fail_to_send_back(_: Message, **__: int) -> None:
        await asyncio.sleep(0)
        raise KeyError("a defect of the client")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    member = _a_member(server.sockets[0].getsockname()[1])
    delivery = PushDelivery(member, "127.0.0.1")
    reader = member.add_queue(A)
    reader.session = SimpleNamespace(consumer=SimpleNamespace(send_back=fail_to_send_back))
    with closing(server):
        delivery.offer(reader)
        async with asyncio.timeout(30):
            while not member.outcomes:  # noqa: ASYNC110 - nothing to await
                await asyncio.sleep(0.01)
        await _end(delivery, member)
    assert member.outcomes == [("failed", [A])]
    assert "in fail_to_send_back" in caplog.text


async def test_push_problem_stays_if_the_next_try_becomes_due_while_deliveries_are_started() -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # and not listening
        member = _a_member(unused.getsockname()[1])
        time = 0.0

        def now() -> float:
            nonlocal time
            time += 0.03  # so that time passes between any two looks at the clock
            return time

        member.now = now
        delivery = PushDelivery(member, "127.0.0.1")
        reader = member.add_queue(A)
        async with asyncio.timeout(30):
            while Reason.APP_NOT_LISTENING not in member.problems.messages:
                delivery.offer(reader)
                await asyncio.sleep(0)
        for _ in range(200):
            delivery.offer(reader)
            await asyncio.sleep(0)
            assert Reason.APP_NOT_LISTENING in member.problems.messages
        delivery.abort_deliveries(member.readers.pop(A))
        while delivery._workers:  # noqa: ASYNC110 - nothing to await
            await asyncio.sleep(0)
        await delivery.close()
