"""Connections to a server that says just what a test wants, byte by byte."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from rota.brokers import Unreachable
from rota.brokers.rocketmq.codes import Answer, Request
from rota.brokers.rocketmq.connections import Connections
from rota.brokers.rocketmq.frames import Decoder, Frame, encode

Say = Callable[[Frame], bytes | None]


@dataclass
class Server:
    """What a test looks at."""

    address: str
    heard: list[Frame] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def a_server(say: Say) -> AsyncIterator[Server]:
    """Answer every frame with bytes; None closes the connection."""
    found = Server("")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        decoder = Decoder()
        try:
            while data := await reader.read(65536):
                for frame in decoder.feed(data):
                    found.heard.append(frame)
                    answer = say(frame)
                    if answer is None:
                        return
                    writer.write(answer)
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    found.address = f"{host}:{port}"
    try:
        yield found
    finally:
        server.close()


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    opened = Connections(lambda asked: asked.reply(Answer.SUCCESS, b"ours"))
    yield opened
    opened.close()


def a_request(name: str = "1") -> Frame:
    return Frame(code=Request.GET_MAX_OFFSET, fields={"name": name})


def good(frame: Frame) -> bytes:
    return encode(frame.reply(Answer.SUCCESS, frame.fields.get("name", "").encode()))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - what is waited for is a server's, not an event of ours
            await asyncio.sleep(0.005)


async def test_answers_may_come_in_any_order(connections: Connections) -> None:
    waiting: list[Frame] = []

    def say(frame: Frame) -> bytes:
        waiting.append(frame)
        return b"".join(good(it) for it in reversed(waiting)) if len(waiting) == 3 else b""

    async with a_server(say) as server:
        answers = await asyncio.gather(*(connections.ask(server.address, a_request(name)) for name in "123"))
        assert [answer.body for answer in answers] == [b"1", b"2", b"3"]
        assert server.connections == 1


async def test_what_the_broker_asks_is_told_from_an_answer_by_its_flag_though_it_has_the_same_number(
    connections: Connections,
) -> None:
    def say(frame: Frame) -> bytes:
        if frame.answers:
            return b""
        asked = Frame(code=Request.GET_CONSUMER_RUNNING_INFO, opaque=frame.opaque)
        return encode(asked) + encode(asked.unanswered()) + good(frame)

    async with a_server(say) as server:
        assert (await connections.ask(server.address, a_request("mine"))).body == b"mine"
        await until(lambda: len(server.heard) > 1)
        assert [it.body for it in server.heard if it.answers] == [b"ours"], "nobody waits for an answer to the other"


async def test_who_is_told_something_does_not_answer(connections: Connections) -> None:
    async with a_server(good) as server:
        await connections.tell(server.address, a_request("told"))
        assert (await connections.ask(server.address, a_request("asked"))).body == b"asked"
        assert [it.one_way for it in server.heard] == [True, False]
        assert server.connections == 1


async def test_who_does_not_answer_in_time_is_given_up_alone_and_the_connection_stays(connections: Connections) -> None:
    held: list[Frame] = []

    def say(frame: Frame) -> bytes:
        if frame.fields["name"] == "slow":
            held.append(frame)
            return b""
        return b"".join(good(it) for it in [*held, frame])

    async with a_server(say) as server:
        with pytest.raises(Unreachable, match=r"did not answer within 0\.05 s"):
            await connections.ask(server.address, a_request("slow"), 0.05)
        assert (await connections.ask(server.address, a_request("quick"))).body == b"quick"
        assert server.connections == 1


@pytest.mark.parametrize(
    "said",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x7f\xff\xff\xff\x00\x00\x00\x00", b"\0\0\0\x08\0\0\0\x04nope"],
    ids=["HTTP", "oversized", "no JSON"],
)
async def test_what_cannot_be_read_ends_the_connection_and_all_that_waits_on_it(
    connections: Connections, said: bytes
) -> None:
    async with a_server(lambda frame: said if frame.fields["name"] == "last" else b"") as server:
        asked = [connections.ask(server.address, a_request(name)) for name in ("first", "last")]
        for found in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(found, Unreachable)
            assert "closed the connection: A frame" in str(found)


async def test_a_connection_that_breaks_fails_what_waits_at_once_and_is_opened_again(connections: Connections) -> None:
    async with a_server(lambda frame: None if frame.fields["name"] == "bad" else good(frame)) as server:
        with pytest.raises(Unreachable, match="closed the connection"):
            await connections.ask(server.address, a_request("bad"), 60)
        assert (await connections.ask(server.address, a_request("good"))).body == b"good"
        assert server.connections == 2


async def test_a_server_that_sends_everybody_away_is_asked_again_by_a_new_connection(connections: Connections) -> None:
    def say(frame: Frame) -> bytes:
        away = encode(frame.reply(Answer.GO_AWAY, remark="closing"))
        return away if len(server.heard) == 1 else good(frame)

    async with a_server(say) as server:
        assert (await connections.ask(server.address, a_request())).code == Answer.SUCCESS
        assert server.connections == 2


async def test_an_address_that_stands_still_delays_no_other(connections: Connections) -> None:
    async with a_server(lambda _: b"") as still, a_server(good) as quick:
        slow = asyncio.create_task(connections.ask(still.address, a_request(), 60))
        assert (await connections.ask(quick.address, a_request())).code == Answer.SUCCESS
        assert not slow.done()
        connections.close()
        with pytest.raises(Unreachable):
            await slow


async def test_an_address_that_refuses_is_left_alone_for_a_while(connections: Connections) -> None:
    async with a_server(good) as server:
        address = server.address
    with pytest.raises(Unreachable, match="cannot be reached"):
        await connections.ask(address, a_request())
    with pytest.raises(Unreachable, match=r"cannot be reached.*; it is tried again in 0.\d s"):
        await connections.ask(address, a_request())


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:port", ":", "127.0.0.1:99999", "no.such.host.invalid:1"])
async def test_what_is_no_address_is_said(connections: Connections, address: str) -> None:
    with pytest.raises(Unreachable) as said:
        await connections.ask(address, a_request())
    assert address in str(said.value)


async def test_connections_to_other_addresses_are_closed_when_only_some_are_kept(connections: Connections) -> None:
    async with a_server(good) as old, a_server(good) as new:
        await connections.ask(old.address, a_request())
        await connections.ask(new.address, a_request())
        connections.keep([new.address])
        await connections.ask(new.address, a_request())
        await connections.ask(old.address, a_request())
        assert (old.connections, new.connections) == (2, 1)


async def test_a_connection_that_is_opened_while_all_are_closed_does_not_stay(connections: Connections) -> None:
    async with a_server(good) as server:
        opening = asyncio.create_task(connections.ask(server.address, a_request()))
        await asyncio.sleep(0)
        connections.close()
        with pytest.raises(Unreachable, match="went out of use"):
            await opening
        with pytest.raises(Unreachable, match="this client was closed"):
            await connections.ask(server.address, a_request())


async def test_everybody_who_asks_at_once_shares_one_connection(connections: Connections) -> None:
    async with a_server(good) as server:
        await asyncio.gather(*(connections.ask(server.address, a_request()) for _ in range(50)))
        assert server.connections == 1


async def test_frames_in_pieces_are_put_together(connections: Connections) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frame = Decoder().feed(await reader.read(65536))[0]
        for byte in good(frame):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    assert (await connections.ask(f"{host}:{port}", a_request("whole"))).body == b"whole"
    connections.close()
    server.close()
