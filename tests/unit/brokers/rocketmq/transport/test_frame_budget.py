"""The frame budget: what brokers that never end their frames can make a process hold, and what others still get."""

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

HOSTILE = 10
FITTING = BUDGET_BYTES // MAX_FRAME_BYTES  # largest frames
ONE_READ_BYTES = 256 * 1024  # that asyncio reads at once
LARGE = MAX_FRAME_BYTES - 1024  # a body


def a_request() -> Frame:
    return Frame(code=RequestCode.GET_BROKER_CLUSTER_INFO)


def large(frame: Frame) -> bytes:
    return encode(frame.reply(ResponseCode.SUCCESS, bytes(LARGE)))


def endless(_: Frame) -> bytes:
    """Send all of a largest frame but its last byte."""
    return (MAX_FRAME_BYTES - 4).to_bytes(4) + bytes(MAX_FRAME_BYTES - 5)


def small(frame: Frame) -> bytes:
    return encode(frame.reply(ResponseCode.SUCCESS, b"small"))


class Brokers:
    """Servers, and the connections of one client to each of them, all with one budget."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.budget = FrameBudget()
        self._stack = stack
        self._clients: list[ConnectionPool] = []
        self._asked: list[asyncio.Task[Frame]] = []

    def client(self) -> ConnectionPool:
        made = ConnectionPool(lambda _: None, frame_budget=self.budget)
        self._clients.append(made)
        self._stack.callback(made.close)
        return made

    async def ask(self, client: ConnectionPool, say: Say, times: int = 1) -> list[asyncio.Task[Frame]]:
        """Ask new brokers that answer so, and do not wait."""
        servers = [await self._stack.enter_async_context(a_server(say)) for _ in range(times)]
        tasks = [asyncio.create_task(client.call(it.address, a_request(), 3600)) for it in servers]
        self._asked += tasks
        return tasks

    @property
    def held_bytes(self) -> int:
        """What all connections hold of frames that are not complete."""
        places = [place for client in self._clients for place in client._states.values()]
        return sum(it.connection._decoder.buffered_bytes for it in places if it.connection)

    def rooms(self, client: ConnectionPool) -> list[FrameReservation]:
        """Return the reservations of a client that are granted."""
        rooms = [place.connection._reservation for place in client._states.values() if place.connection]
        return [room for room in rooms if room and room.granted]

    async def fails(self, asked: asyncio.Task[Frame]) -> str:
        with pytest.raises(UnreachableError) as failed:
            await asked
        return str(failed.value)

    async def end(self) -> None:
        for client in self._clients:
            client.close()
        await asyncio.gather(*self._asked, return_exceptions=True)


@pytest.fixture
async def brokers() -> AsyncIterator[Brokers]:
    async with AsyncExitStack() as stack:
        made = Brokers(stack)
        yield made
        await made.end()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let frames wait for room, and have it, for as long as the test takes."""
    monkeypatch.setattr(frame_budget, "HOLD_SECONDS", 3600.0)
    monkeypatch.setattr(frame_budget, "WAIT_SECONDS", 3600.0)


@pytest.mark.usefixtures("patient")
async def test_frame_budget_limits_what_is_held_of_frames_that_never_end(brokers: Brokers) -> None:
    most_bytes = 0

    def is_all_sent() -> bool:
        nonlocal most_bytes
        most_bytes = max(most_bytes, brokers.held_bytes)
        return most_bytes >= FITTING * (MAX_FRAME_BYTES - 1) and brokers.budget.waiting_count == HOSTILE - FITTING

    await brokers.ask(brokers.client(), endless, HOSTILE)
    await until(is_all_sent)
    assert brokers.budget.used_bytes == BUDGET_BYTES
    assert most_bytes <= BUDGET_BYTES + (HOSTILE - FITTING) * ONE_READ_BYTES


async def test_frame_that_never_ends_costs_its_connection(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_budget, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(frame_budget, "WAIT_SECONDS", 3600.0)
    for failed in await brokers.ask(brokers.client(), endless, HOSTILE):
        assert "it did not arrive completely within 0.1 s" in await brokers.fails(failed)
    assert brokers.held_bytes == brokers.budget.used_bytes == brokers.budget.waiting_count == 0


@pytest.mark.usefixtures("patient")
async def test_frame_of_another_client_is_read_once_those_that_never_end_had_their_time(brokers: Brokers) -> None:
    hostile, honest = brokers.client(), brokers.client()
    failed = await brokers.ask(hostile, endless, HOSTILE)
    await until(lambda: brokers.budget.used_bytes == BUDGET_BYTES)
    asked = await brokers.ask(honest, large, 2 * FITTING)
    await until(lambda: brokers.budget.waiting_count == HOSTILE - FITTING + 2 * FITTING)
    for room in brokers.rooms(hostile):
        room._on_frame_timeout()  # as its timer would
    for task in asked:
        assert len((await task).body) == LARGE
    assert len(brokers.rooms(hostile)) == FITTING // 2
    assert sum(task.done() for task in failed) == FITTING


async def test_frame_that_finds_no_room_in_time_costs_its_connection(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_budget, "HOLD_SECONDS", 3600.0)
    hostile = await brokers.ask(brokers.client(), endless, FITTING)
    await until(lambda: brokers.budget.used_bytes == BUDGET_BYTES)
    monkeypatch.setattr(frame_budget, "WAIT_SECONDS", 0.1)
    (late,) = await brokers.ask(brokers.client(), large)
    assert "no memory became available within 0.1 s" in await brokers.fails(late)
    assert not any(it.done() for it in hostile)
    assert brokers.budget.waiting_count == 0


@pytest.mark.usefixtures("patient")
async def test_frame_that_is_small_needs_no_room(brokers: Brokers) -> None:
    await brokers.ask(brokers.client(), endless, FITTING)
    await until(lambda: brokers.budget.used_bytes == BUDGET_BYTES)
    (asked,) = await brokers.ask(brokers.client(), small)
    assert (await asked).body == b"small"


@pytest.mark.usefixtures("patient")
async def test_frame_room_is_free_again_once_a_connection_is_closed(brokers: Brokers) -> None:
    hostile = brokers.client()
    await brokers.ask(hostile, endless, HOSTILE)
    await until(lambda: brokers.budget.used_bytes == BUDGET_BYTES and brokers.budget.waiting_count == HOSTILE - FITTING)
    hostile.close()
    assert (brokers.budget.used_bytes, brokers.budget.waiting_count) == (0, 0)
    (asked,) = await brokers.ask(brokers.client(), large)
    assert len((await asked).body) == LARGE


async def test_frame_budget_of_other_connections_is_no_concern_of_a_client_without_one() -> None:
    """A sidecar has one trusted cluster of brokers, and a budget for messages."""
    free = ConnectionPool(lambda _: None)
    async with a_server(large) as server:
        answers = await asyncio.gather(*(free.call(server.address, a_request()) for _ in range(3)))
        assert [len(answer.body) for answer in answers] == [LARGE] * 3
        free.close()


# The line, without connections.


class Line:
    """Reservations by name, and what has become of them."""

    def __init__(self) -> None:
        self.budget = FrameBudget()
        self.granted: list[str] = []
        self.rejected: dict[str, str] = {}

    def reserve(self, account: FrameAccount, name: str, size_bytes: int = MAX_FRAME_BYTES) -> FrameReservation:
        return account.reserve(size_bytes, self._grant(name), lambda why: self.rejected.update({name: why}))

    def _grant(self, name: str) -> Callable[[], None]:
        return lambda: self.granted.append(name)


async def test_frame_does_not_overtake_a_larger_one_that_waits_for_room() -> None:
    line = Line()
    account = FrameAccount(line.budget)
    holding = [line.reserve(account, f"{number}") for number in range(FITTING - 1)]
    holding += [line.reserve(account, "half", MAX_FRAME_BYTES // 2)]
    line.reserve(account, "large")
    line.reserve(account, "little", 100_000)
    assert line.granted == ["0", "1", "2", "half"]
    holding[-1].release()
    assert line.granted[FITTING:] == ["large"]
    holding[0].release()
    holding[0].release()
    assert line.granted[FITTING:] == ["large", "little"]
    assert line.budget.used_bytes == (FITTING - 1) * MAX_FRAME_BYTES + 100_000


async def test_frame_of_a_distrusted_client_waits_behind_others_and_finds_room_in_half_of_the_budget() -> None:
    line = Line()
    hostile, honest = FrameAccount(line.budget), FrameAccount(line.budget)
    hostile.distrust()
    holding = [line.reserve(hostile, f"hostile-{number}") for number in range(FITTING)]
    assert line.granted == ["hostile-0", "hostile-1"]
    line.reserve(honest, "honest-0")
    line.reserve(honest, "honest-1")
    line.reserve(honest, "honest-2")
    assert line.granted[2:] == ["honest-0", "honest-1"]
    holding[0].release()
    assert line.granted[4:] == ["honest-2"]
    assert line.budget.waiting_count == 2


async def test_frame_line_that_is_full_rejects_the_last_one_of_a_distrusted_client_first() -> None:
    line = Line()
    hostile, honest = FrameAccount(line.budget), FrameAccount(line.budget)
    hostile.distrust()
    for number in range(FITTING):
        line.reserve(honest, f"holding-{number}")
    for number in range(MAX_WAITING_FRAMES):
        line.reserve(hostile, f"hostile-{number}")
    assert not line.rejected
    line.reserve(honest, "honest")
    assert [*line.rejected] == [f"hostile-{MAX_WAITING_FRAMES - 1}"]
    assert line.rejected.popitem()[1].endswith(f"more than {MAX_WAITING_FRAMES} frames wait for memory")
    for number in range(1, MAX_WAITING_FRAMES):
        line.reserve(honest, f"honest-{number}")
    assert len(line.rejected) == MAX_WAITING_FRAMES - 1
    line.reserve(honest, "too many")
    assert [*line.rejected][-1] == "too many"
    assert line.budget.waiting_count == MAX_WAITING_FRAMES


def test_frame_budget_has_room_for_two_largest_frames_at_least() -> None:
    with pytest.raises(
        ValueError, match=r"^A frame budget must hold at least two frames of the maximum size, 33,554,432 bytes$"
    ):
        FrameBudget(2 * MAX_FRAME_BYTES - 1)


def test_frame_in_single_bytes_takes_no_object_for_each() -> None:
    decoder, sent = Decoder(), 20 * SMALL_PIECE_BYTES
    for byte in encode(Frame(code=0, body=bytes(2 * sent)))[:sent]:
        assert not [*decoder.feed(bytes([byte]))]
    assert decoder.buffered_bytes == sent
    assert len(decoder._pieces) <= 20


async def test_frame_budget_of_the_operator_is_one_for_the_brokers_of_all_groups() -> None:
    no_api: Any = None  # without Secrets nothing is asked of it
    access = BrokerAccessReader(no_api, None)
    first, second = [
        (await access.read("shop", RocketMQ(name_servers=[address]), ())).config for address in ("a:9876", "b:9876")
    ]
    assert first.frame_budget is not None
    assert first.frame_budget is second.frame_budget
