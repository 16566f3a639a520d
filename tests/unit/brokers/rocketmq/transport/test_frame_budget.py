"""The frame budget: it limits the memory that endless frames of brokers take, and leaves some for other frames."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from brokers.scripted import Say, a_server, until
from rota.brokers.errors import UnreachableError
from rota.brokers.rocketmq.transport import frame_budget
from rota.brokers.rocketmq.transport.connection_pool import ConnectionPool
from rota.brokers.rocketmq.transport.frame_budget import (
    BUDGET_BYTES,
    MAX_WAITING_FRAMES,
    FrameAccount,
    FrameBudget,
    FrameReservation,
)
from rota.brokers.rocketmq.wire.codes import RequestCode, ResponseCode
from rota.brokers.rocketmq.wire.frames import MAX_FRAME_BYTES, SMALL_PIECE_BYTES, Decoder, Frame, encode
from rota.kube.brokers.broker_access import BrokerAccessReader
from rota.spec import RocketMQ

HOSTILE_BROKERS = 10
LARGEST_FRAMES_IN_BUDGET = BUDGET_BYTES // MAX_FRAME_BYTES  # frames of the maximum size
ONE_READ_BYTES = 256 * 1024  # the most that asyncio reads at once
LARGE_BODY_BYTES = MAX_FRAME_BYTES - 1024  # of a body


def a_request() -> Frame:
    return Frame(code=RequestCode.GET_BROKER_CLUSTER_INFO)


def respond_large(frame: Frame) -> bytes:
    return encode(frame.make_response(ResponseCode.SUCCESS, bytes(LARGE_BODY_BYTES)))


def respond_endlessly(_: Frame) -> bytes:
    """Send a frame of the maximum size without its last byte."""
    return (MAX_FRAME_BYTES - 4).to_bytes(4) + bytes(MAX_FRAME_BYTES - 5)


def respond_small(frame: Frame) -> bytes:
    return encode(frame.make_response(ResponseCode.SUCCESS, b"small"))


class Brokers:
    """Brokers, and clients with connections to them; all clients share one budget."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.budget = FrameBudget()
        self._stack = stack
        self._clients: list[ConnectionPool] = []
        self._calls: list[asyncio.Task[Frame]] = []

    def client(self) -> ConnectionPool:
        pool = ConnectionPool(lambda _: None, frame_budget=self.budget)
        self._clients.append(pool)
        self._stack.callback(pool.close)
        return pool

    async def call_new_brokers(self, client: ConnectionPool, respond: Say, count: int = 1) -> list[asyncio.Task[Frame]]:
        """Call new brokers with this response, without waiting for it."""
        servers = [await self._stack.enter_async_context(a_server(respond)) for _ in range(count)]
        tasks = [asyncio.create_task(client.call(server.address, a_request(), 3600)) for server in servers]
        self._calls += tasks
        return tasks

    @property
    def held_bytes(self) -> int:
        """Bytes of incomplete frames that all connections hold."""
        states = [state for client in self._clients for state in client._states.values()]
        return sum(state.connection._decoder._buffered_bytes for state in states if state.connection)

    def granted_reservations(self, client: ConnectionPool) -> list[FrameReservation]:
        """Return a client's granted reservations."""
        granted_reservations = [
            state.connection._read_flow.reservation for state in client._states.values() if state.connection
        ]
        return [reservation for reservation in granted_reservations if reservation and reservation.granted]

    async def failure_of(self, call: asyncio.Task[Frame]) -> str:
        with pytest.raises(UnreachableError) as raised:
            await call
        return str(raised.value)

    async def end(self) -> None:
        for client in self._clients:
            client.close()
        await asyncio.gather(*self._calls, return_exceptions=True)


@pytest.fixture
async def brokers() -> AsyncIterator[Brokers]:
    async with AsyncExitStack() as stack:
        brokers = Brokers(stack)
        yield brokers
        await brokers.end()


@pytest.fixture
def no_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let frames wait for a reservation, and hold it, for as long as the test takes."""
    monkeypatch.setattr(frame_budget, "HOLD_SECONDS", 3600.0)
    monkeypatch.setattr(frame_budget, "WAIT_SECONDS", 3600.0)


@pytest.mark.usefixtures("no_timeouts")
async def test_frame_budget_limits_the_memory_of_frames_that_never_end(brokers: Brokers) -> None:
    max_held_bytes = 0

    def is_all_sent() -> bool:
        nonlocal max_held_bytes
        max_held_bytes = max(max_held_bytes, brokers.held_bytes)
        return (
            max_held_bytes >= LARGEST_FRAMES_IN_BUDGET * (MAX_FRAME_BYTES - 1)
            and len(brokers.budget._waiting) == HOSTILE_BROKERS - LARGEST_FRAMES_IN_BUDGET
        )

    await brokers.call_new_brokers(brokers.client(), respond_endlessly, HOSTILE_BROKERS)
    await until(is_all_sent)
    assert brokers.budget.used_bytes == BUDGET_BYTES
    assert max_held_bytes <= BUDGET_BYTES + (HOSTILE_BROKERS - LARGEST_FRAMES_IN_BUDGET) * ONE_READ_BYTES


async def test_frame_that_never_ends_costs_its_connection(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_budget, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(frame_budget, "WAIT_SECONDS", 3600.0)
    for call in await brokers.call_new_brokers(brokers.client(), respond_endlessly, HOSTILE_BROKERS):
        assert "it did not arrive completely within 0.1 s" in await brokers.failure_of(call)
    assert brokers.held_bytes == brokers.budget.used_bytes == len(brokers.budget._waiting) == 0


@pytest.mark.usefixtures("no_timeouts")
async def test_frame_of_another_client_is_read_once_those_that_never_end_had_their_time(brokers: Brokers) -> None:
    hostile = brokers.client()
    honest = brokers.client()
    hostile_calls = await brokers.call_new_brokers(hostile, respond_endlessly, HOSTILE_BROKERS)
    await until(lambda: brokers.budget.used_bytes == BUDGET_BYTES)
    honest_calls = await brokers.call_new_brokers(honest, respond_large, 2 * LARGEST_FRAMES_IN_BUDGET)
    await until(
        lambda: (
            len(brokers.budget._waiting) == HOSTILE_BROKERS - LARGEST_FRAMES_IN_BUDGET + 2 * LARGEST_FRAMES_IN_BUDGET
        )
    )
    for reservation in brokers.granted_reservations(hostile):
        reservation._on_frame_timeout()  # in place of its timer
    for call in honest_calls:
        assert len((await call).body) == LARGE_BODY_BYTES
    assert len(brokers.granted_reservations(hostile)) == LARGEST_FRAMES_IN_BUDGET // 2
    assert sum(call.done() for call in hostile_calls) == LARGEST_FRAMES_IN_BUDGET


async def test_frame_that_finds_no_room_in_time_costs_its_connection(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_budget, "HOLD_SECONDS", 3600.0)
    hostile_calls = await brokers.call_new_brokers(brokers.client(), respond_endlessly, LARGEST_FRAMES_IN_BUDGET)
    await until(lambda: brokers.budget.used_bytes == BUDGET_BYTES)
    monkeypatch.setattr(frame_budget, "WAIT_SECONDS", 0.1)
    (late_call,) = await brokers.call_new_brokers(brokers.client(), respond_large)
    assert "no memory became available within 0.1 s" in await brokers.failure_of(late_call)
    assert not any(call.done() for call in hostile_calls)
    assert len(brokers.budget._waiting) == 0


@pytest.mark.usefixtures("no_timeouts")
async def test_frame_that_is_small_needs_no_room(brokers: Brokers) -> None:
    await brokers.call_new_brokers(brokers.client(), respond_endlessly, LARGEST_FRAMES_IN_BUDGET)
    await until(lambda: brokers.budget.used_bytes == BUDGET_BYTES)
    (call,) = await brokers.call_new_brokers(brokers.client(), respond_small)
    assert (await call).body == b"small"


@pytest.mark.usefixtures("no_timeouts")
async def test_frame_room_is_free_again_once_a_connection_is_closed(brokers: Brokers) -> None:
    hostile = brokers.client()
    await brokers.call_new_brokers(hostile, respond_endlessly, HOSTILE_BROKERS)
    await until(
        lambda: (
            brokers.budget.used_bytes == BUDGET_BYTES
            and len(brokers.budget._waiting) == HOSTILE_BROKERS - LARGEST_FRAMES_IN_BUDGET
        )
    )
    hostile.close()
    assert (brokers.budget.used_bytes, len(brokers.budget._waiting)) == (0, 0)
    (call,) = await brokers.call_new_brokers(brokers.client(), respond_large)
    assert len((await call).body) == LARGE_BODY_BYTES


async def test_frame_budget_of_other_connections_does_not_limit_a_client_without_one() -> None:
    """A sidecar has one trusted cluster of brokers, and limits its memory by a budget for messages."""
    pool = ConnectionPool(lambda _: None)
    async with a_server(respond_large) as server:
        responses = await asyncio.gather(*(pool.call(server.address, a_request()) for _ in range(3)))
        assert [len(response.body) for response in responses] == [LARGE_BODY_BYTES] * 3
        pool.close()


# The queue of reservations, without connections.


class ReservationQueue:
    """Reservations by name, and whether they were granted or rejected."""

    def __init__(self) -> None:
        self.budget = FrameBudget()
        self.granted: list[str] = []
        self.rejected: dict[str, str] = {}

    def reserve(self, account: FrameAccount, name: str, size_bytes: int = MAX_FRAME_BYTES) -> FrameReservation:
        return account.reserve(size_bytes, self._grant(name), lambda reason: self.rejected.update({name: reason}))

    def _grant(self, name: str) -> Callable[[], None]:
        return lambda: self.granted.append(name)


async def test_frame_does_not_overtake_a_larger_one_that_waits_for_room() -> None:
    queue = ReservationQueue()
    account = FrameAccount(queue.budget)
    reservations = [queue.reserve(account, f"{number}") for number in range(LARGEST_FRAMES_IN_BUDGET - 1)]
    reservations += [queue.reserve(account, "half", MAX_FRAME_BYTES // 2)]
    queue.reserve(account, "large")
    queue.reserve(account, "little", 100_000)
    assert queue.granted == ["0", "1", "2", "half"]
    reservations[-1].release()
    assert queue.granted[LARGEST_FRAMES_IN_BUDGET:] == ["large"]
    reservations[0].release()
    reservations[0].release()
    assert queue.granted[LARGEST_FRAMES_IN_BUDGET:] == ["large", "little"]
    assert queue.budget.used_bytes == (LARGEST_FRAMES_IN_BUDGET - 1) * MAX_FRAME_BYTES + 100_000


async def test_frame_of_a_distrusted_client_waits_behind_others_and_finds_room_in_half_of_the_budget() -> None:
    queue = ReservationQueue()
    hostile = FrameAccount(queue.budget)
    honest = FrameAccount(queue.budget)
    hostile.distrust()
    reservations = [queue.reserve(hostile, f"hostile-{number}") for number in range(LARGEST_FRAMES_IN_BUDGET)]
    assert queue.granted == ["hostile-0", "hostile-1"]
    queue.reserve(honest, "honest-0")
    queue.reserve(honest, "honest-1")
    queue.reserve(honest, "honest-2")
    assert queue.granted[2:] == ["honest-0", "honest-1"]
    reservations[0].release()
    assert queue.granted[4:] == ["honest-2"]
    assert len(queue.budget._waiting) == 2


async def test_frame_line_that_is_full_rejects_the_last_one_of_a_distrusted_client_first() -> None:
    queue = ReservationQueue()
    hostile = FrameAccount(queue.budget)
    honest = FrameAccount(queue.budget)
    hostile.distrust()
    for number in range(LARGEST_FRAMES_IN_BUDGET):
        queue.reserve(honest, f"holding-{number}")
    for number in range(MAX_WAITING_FRAMES):
        queue.reserve(hostile, f"hostile-{number}")
    assert not queue.rejected
    queue.reserve(honest, "honest")
    assert [*queue.rejected] == [f"hostile-{MAX_WAITING_FRAMES - 1}"]
    assert queue.rejected.popitem()[1].endswith(f"more than {MAX_WAITING_FRAMES} frames wait for memory")
    for number in range(1, MAX_WAITING_FRAMES):
        queue.reserve(honest, f"honest-{number}")
    assert len(queue.rejected) == MAX_WAITING_FRAMES - 1
    queue.reserve(honest, "too many")
    assert [*queue.rejected][-1] == "too many"
    assert len(queue.budget._waiting) == MAX_WAITING_FRAMES


def test_frame_budget_has_room_for_two_largest_frames_at_least() -> None:
    with pytest.raises(
        ValueError, match=r"^A frame budget must hold at least two frames of the maximum size, 33,554,432 bytes$"
    ):
        FrameBudget(2 * MAX_FRAME_BYTES - 1)


def test_frame_in_single_bytes_takes_no_object_for_each() -> None:
    decoder = Decoder()
    sent_bytes = 20 * SMALL_PIECE_BYTES
    for byte in encode(Frame(code=0, body=bytes(2 * sent_bytes)))[:sent_bytes]:
        assert not [*decoder.feed(bytes([byte]))]
    assert decoder._buffered_bytes == sent_bytes
    assert len(decoder._pieces) <= 20


async def test_frame_budget_of_the_operator_is_one_for_the_brokers_of_all_groups() -> None:
    unused_api: Any = None  # without Secrets it receives no requests
    access = BrokerAccessReader(unused_api, None)
    first, second = [
        (await access.read("shop", RocketMQ(name_servers=[address]), ())).config for address in ("a:9876", "b:9876")
    ]
    assert first.frame_budget is not None
    assert first.frame_budget is second.frame_budget
