"""Connections to a server with responses that a test scripts byte by byte."""

import asyncio
import gc
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest

from brokers.scripted import Say, a_server, silent, until
from ground.keys import Authority
from ground.poll import soon
from rota.brokers.errors import UnreachableError
from rota.brokers.rocketmq.transport import connection, connection_pool, connector
from rota.brokers.rocketmq.transport.connection_pool import ConnectionPool
from rota.brokers.rocketmq.wire.codes import RequestCode, ResponseCode
from rota.brokers.rocketmq.wire.frames import Decoder, Frame, encode
from rota.brokers.rocketmq.wire.signing import Credentials


@pytest.fixture
async def connections() -> AsyncIterator[ConnectionPool]:
    opened = ConnectionPool(lambda request: request.make_response(ResponseCode.SUCCESS, b"ours"))
    yield opened
    opened.close()


def a_request(name: str = "1") -> Frame:
    return Frame(code=RequestCode.GET_MAX_OFFSET, fields={"name": name})


def good(frame: Frame) -> bytes:
    return encode(frame.make_response(ResponseCode.SUCCESS, frame.fields.get("name", "").encode()))


async def test_response_order_may_differ_from_the_request_order(connections: ConnectionPool) -> None:
    waiting: list[Frame] = []

    def say(frame: Frame) -> bytes:
        waiting.append(frame)
        return b"".join(good(request) for request in reversed(waiting)) if len(waiting) == 3 else b""

    async with a_server(say) as server:
        answers = await asyncio.gather(*(connections.call(server.address, a_request(name)) for name in "123"))
        assert [answer.body for answer in answers] == [b"1", b"2", b"3"]
        assert server.connections == 1


async def test_request_from_the_broker_is_not_taken_for_a_response_of_the_same_number(
    connections: ConnectionPool,
) -> None:
    def say(frame: Frame) -> bytes:
        if frame.is_response:
            return b""
        request = Frame(code=RequestCode.GET_CONSUMER_RUNNING_INFO, opaque=frame.opaque)
        return encode(request) + encode(request.as_one_way()) + good(frame)

    async with a_server(say) as server:
        assert (await connections.call(server.address, a_request("mine"))).body == b"mine"
        await until(lambda: len(server.frames) > 1)
        assert [frame.body for frame in server.frames if frame.is_response] == [b"ours"], (
            "a one-way request gets no response"
        )


async def test_connection_attempt_that_is_cancelled_at_any_moment_leaves_no_socket() -> None:
    async with a_server(good) as server:
        for turns in range(20):
            opening = asyncio.create_task(connector.open_connection(server.address, lambda _asked: None))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                (await opening).close()
    gc.collect()  # pytest fails a test that leaves a socket open


async def test_request_timeout_fails_only_that_request_and_keeps_the_connection(connections: ConnectionPool) -> None:
    held: list[Frame] = []

    def say(frame: Frame) -> bytes:
        if frame.fields["name"] == "slow":
            held.append(frame)
            return b""
        return b"".join(good(request) for request in [*held, frame])

    async with a_server(say) as server:
        with pytest.raises(UnreachableError, match=r"did not respond within 0\.05 s"):
            await connections.call(server.address, a_request("slow"), 0.05)
        assert (await connections.call(server.address, a_request("quick"))).body == b"quick"
        assert server.connections == 1


@pytest.mark.parametrize(
    "response",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x7f\xff\xff\xff\x00\x00\x00\x00", b"\0\0\0\x08\0\0\0\x04nope"],
    ids=["HTTP", "oversized", "no JSON"],
)
async def test_frame_that_is_malformed_closes_the_connection_and_fails_pending_requests(
    connections: ConnectionPool, response: bytes
) -> None:
    async with a_server(lambda frame: response if frame.fields["name"] == "last" else b"") as server:
        calls = [connections.call(server.address, a_request(name)) for name in ("first", "last")]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, UnreachableError)
            assert "was closed: A frame" in str(error)


async def test_connection_that_breaks_fails_the_pending_request_and_is_reopened(connections: ConnectionPool) -> None:
    async with a_server(lambda frame: None if frame.fields["name"] == "bad" else good(frame)) as server:
        await connections.call(server.address, a_request("good"))
        with pytest.raises(UnreachableError, match="was closed"):
            await connections.call(server.address, a_request("bad"), 60)
        assert (await connections.call(server.address, a_request("good"))).body == b"good"
        assert server.connections == 2


async def test_connection_is_replaced_after_go_away_and_the_request_repeated(connections: ConnectionPool) -> None:
    def say(frame: Frame) -> bytes:
        away = encode(frame.make_response(ResponseCode.GO_AWAY, remark="closing"))
        return away if len(server.frames) == 1 else good(frame)

    async with a_server(say) as server:
        assert (await connections.call(server.address, a_request())).code == ResponseCode.SUCCESS
        assert server.connections == 2


async def test_signature_of_a_repeated_request_is_by_the_renewed_credentials() -> None:
    credentials = [Credentials("old", "secret")]

    def say(frame: Frame) -> bytes:
        if len(server.frames) > 1:
            return good(frame)
        credentials[0] = Credentials("new", "secret")
        return encode(frame.make_response(ResponseCode.GO_AWAY))

    async with a_server(say) as server:
        pool = ConnectionPool(lambda _: None, credentials=lambda: credentials[0])
        assert (await pool.call(server.address, a_request())).code == ResponseCode.SUCCESS
        assert [frame.fields["AccessKey"] for frame in server.frames] == ["old", "new"]
        pool.close()


class ClientCertificates:
    """Client certificates that are presented one after the other, and a server that requires one of their authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "authority")
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        own = self.authority.issue("server", "server", ips=["127.0.0.1"])
        self.server.load_cert_chain(own.certificate, own.key)
        self.server.load_verify_locations(self.authority.own.certificate)
        self.server.verify_mode = ssl.CERT_REQUIRED
        self.present("one")

    def present(self, name: str) -> None:
        """Renew the client's certificate."""
        pair = self.authority.issue(name, name)
        self.client = ssl.create_default_context(cafile=str(self.authority.own.certificate))
        self.client.load_cert_chain(pair.certificate, pair.key)


@pytest.fixture
def certificates(tmp_path: Path) -> ClientCertificates:
    return ClientCertificates(tmp_path)


async def test_tls_certificate_renewed_is_presented_next_and_the_former_connection_ends_with_its_requests(
    certificates: ClientCertificates,
) -> None:
    pending: list[Frame] = []

    def say(frame: Frame) -> bytes:
        if frame.fields["name"] == "slow":
            pending.append(frame)
            return b""
        return good(frame)

    connections = ConnectionPool(lambda _: None, tls=lambda: certificates.client)
    async with a_server(say, certificates.server) as server:
        slow = asyncio.create_task(connections.call(server.address, a_request("slow"), 60))
        await until(lambda: bool(pending))
        certificates.present("two")
        connections.renew()
        assert (await connections.call(server.address, a_request("quick"))).body == b"quick"
        assert server.presented == ["one", "two"]
        assert server.ended == [], "a request is pending there"
        server.writers[0].write(good(pending[0]))
        assert (await slow).body == b"slow"
        await until(lambda: server.ended == [1])
        connections.renew()
        await until(lambda: server.ended == [1, 2])
        connections.close()


async def test_tls_certificate_renewed_while_a_connection_opens_is_used_for_requests(
    certificates: ClientCertificates,
) -> None:
    contexts: list[ssl.SSLContext] = []

    def present() -> ssl.SSLContext:
        contexts.append(context := certificates.client)
        if len(contexts) == 1:
            certificates.present("two")
            asyncio.get_running_loop().call_soon(pool.renew)
        return context

    pool = ConnectionPool(lambda _: None, tls=present)
    async with a_server(good, certificates.server) as server:
        assert (await pool.call(server.address, a_request())).code == ResponseCode.SUCCESS
        await until(lambda: 1 in server.ended)
        assert server.presented == ["one", "two"]
        assert server.frame_connections == [2]
        pool.close()


async def test_tls_certificate_renewed_after_a_refused_one_is_tried_at_once(certificates: ClientCertificates) -> None:
    right = certificates.client
    certificates.client = ssl.create_default_context()  # it trusts another authority
    connections = ConnectionPool(lambda _: None, tls=lambda: certificates.client)
    async with a_server(good, certificates.server) as server:
        with pytest.raises(UnreachableError, match="certificate"):
            await connections.call(server.address, a_request())
        certificates.client = right
        with pytest.raises(UnreachableError, match="the next attempt follows shortly"):
            await connections.call(server.address, a_request())
        connections.renew()
        assert (await connections.call(server.address, a_request())).code == ResponseCode.SUCCESS
        connections.close()


async def test_connection_to_a_silent_address_delays_no_other(connections: ConnectionPool) -> None:
    async with a_server(lambda _: b"") as silent_server, a_server(good) as quick:
        slow = asyncio.create_task(connections.call(silent_server.address, a_request(), 60))
        assert (await connections.call(quick.address, a_request())).code == ResponseCode.SUCCESS
        assert not slow.done()
        connections.close()
        with pytest.raises(UnreachableError):
            await slow


async def test_connection_that_is_refused_is_not_retried_at_once(connections: ConnectionPool) -> None:
    async with a_server(good) as server:
        address = server.address
    with pytest.raises(UnreachableError, match="cannot be reached"):
        await connections.call(address, a_request())
    with pytest.raises(UnreachableError, match=r"cannot be reached.*; the next attempt follows shortly"):
        await connections.call(address, a_request())


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:port", ":", "127.0.0.1:99999", "no.such.host.invalid:1"])
async def test_connection_error_names_the_invalid_address(connections: ConnectionPool, address: str) -> None:
    with pytest.raises(UnreachableError) as caught:
        await connections.call(address, a_request())
    assert address in str(caught.value)


async def test_connection_to_an_address_that_is_no_longer_used_is_closed(connections: ConnectionPool) -> None:
    async with a_server(good) as old, a_server(good) as new:
        await connections.call(old.address, a_request())
        await connections.call(new.address, a_request())
        connections.close_others([new.address])
        await connections.call(new.address, a_request())
        await connections.call(old.address, a_request())
        assert (old.connections, new.connections) == (2, 1)


async def test_connection_opened_while_all_are_closed_is_closed(connections: ConnectionPool) -> None:
    async with a_server(good) as server:
        opening = asyncio.create_task(connections.call(server.address, a_request()))
        await asyncio.sleep(0)
        connections.close()
        with pytest.raises(UnreachableError, match="no longer needed"):
            await opening
        with pytest.raises(UnreachableError, match="the client is closed"):
            await connections.call(server.address, a_request())


async def test_connection_is_shared_by_concurrent_requests(connections: ConnectionPool) -> None:
    async with a_server(good) as server:
        await asyncio.gather(*(connections.call(server.address, a_request()) for _ in range(50)))
        assert server.connections == 1


async def test_frame_in_pieces_is_reassembled(connections: ConnectionPool) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (frame,) = Decoder().feed(await reader.read(65536))
        for byte in good(frame):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    assert (await connections.call(f"{host}:{port}", a_request("whole"))).body == b"whole"
    connections.close()
    server.close()


async def test_request_numbers_wrap_around_at_the_java_maximum(connections: ConnectionPool) -> None:
    async with a_server(good) as server:
        await connections.call(server.address, a_request())
        connections._states[server.address].connection._last_opaque = connection.MAX_OPAQUE - 1  # type: ignore[union-attr]
        for _ in range(2):
            await connections.call(server.address, a_request())
        assert [frame.opaque for frame in server.frames] == [1, connection.MAX_OPAQUE, 1]


async def test_response_before_malformed_bytes_is_accepted(connections: ConnectionPool) -> None:
    async with a_server(lambda frame: good(frame) + b"HTTP/1.1 400 Bad Request") as server:
        assert (await connections.call(server.address, a_request("good"))).body == b"good"
        assert (await connections.call(server.address, a_request("again"))).body == b"again"
        assert server.connections == 2


@pytest.mark.parametrize("seed", range(20))
async def test_frame_of_random_bytes_closes_the_connection_or_times_out(connections: ConnectionPool, seed: int) -> None:
    chance = Random(f"{seed}/bytes")
    async with a_server(lambda _: chance.randbytes(chance.randint(1, 100))) as server:
        for _ in range(3):
            with pytest.raises(UnreachableError):
                await connections.call(server.address, a_request(), 0.05)


# Silence.


def cut_off(_: Frame) -> bytes:
    return encode(Frame(code=0, flag=1))[:-5]


def a_wrong_length(frame: Frame) -> bytes:
    """Announce so many bytes that the following responses are read as part of this one."""
    return (1_000_000).to_bytes(4) + good(frame)[4:]


@pytest.mark.parametrize(
    ("say", "limit"), [(silent, "SILENT"), (cut_off, "INCOMPLETE_FRAME"), (a_wrong_length, "INCOMPLETE_FRAME")]
)
async def test_connection_that_yields_no_more_responses_is_replaced(
    connections: ConnectionPool, monkeypatch: pytest.MonkeyPatch, say: Say, limit: str
) -> None:
    monkeypatch.setattr(connection, f"{limit}_SECONDS", 0.1)

    def spoilt(frame: Frame) -> bytes | None:
        if frame.fields["name"] == "spoil":
            return say(frame)
        return good(frame) if say is not silent or server.frame_connections[-1] != 1 or len(server.frames) == 1 else b""

    async with a_server(spoilt) as server:
        await connections.call(server.address, a_request())
        with pytest.raises(UnreachableError, match="did not respond"):
            await connections.call(server.address, a_request("spoil"), 0.02)

        async def gets_a_response() -> bool:
            try:
                return bool(await connections.call(server.address, a_request(), 0.02))
            except UnreachableError:
                return False

        assert await soon(gets_a_response)
        assert server.connections == 2


async def test_connection_is_kept_when_only_some_requests_are_unanswered(
    connections: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.1)

    async with a_server(lambda frame: b"" if frame.fields["name"] == "slow" else good(frame)) as server:
        for _ in range(3):
            with pytest.raises(UnreachableError, match="did not respond"):
                await connections.call(server.address, a_request("slow"), 0.06)
            await connections.call(server.address, a_request("quick"))
        assert server.connections == 1


async def test_connection_is_kept_when_a_request_times_out_that_was_sent_long_before_the_last_response(
    connections: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull may be held for longer than SILENT_SECONDS, while other requests are answered."""
    monkeypatch.setattr(connection, "SILENT_SECONDS", 1.0)
    async with a_server(lambda frame: b"" if frame.fields["name"] == "slow" else good(frame)) as server:
        slow = asyncio.create_task(connections.call(server.address, a_request("slow"), 1.2))
        while not slow.done():
            await connections.call(server.address, a_request("quick"))
            await asyncio.sleep(0.02)
        with pytest.raises(UnreachableError, match="did not respond"):
            await slow
        await connections.call(server.address, a_request("quick"))
        assert server.connections == 1


async def test_connection_closed_before_any_response_is_not_reopened_at_once(
    connections: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "MIN_BACKOFF_SECONDS", 60.0)
    async with a_server(lambda _: None) as server:
        with pytest.raises(UnreachableError, match="the peer closed the connection"):
            await connections.call(server.address, a_request())
        with pytest.raises(UnreachableError, match="peer closed the connection; the next attempt follows shortly"):
            await connections.call(server.address, a_request())
        assert server.connections == 1


async def test_connection_after_go_away_still_gets_pending_responses(connections: ConnectionPool) -> None:
    held: list[Frame] = []

    def say(frame: Frame) -> bytes:
        if frame.fields["name"] == "held":
            held.append(frame)
            return b""
        return good(frame) if server.connections > 1 else encode(frame.make_response(ResponseCode.GO_AWAY))

    async with a_server(say) as server:
        waiting = asyncio.create_task(connections.call(server.address, a_request("held"), 60))
        await until(lambda: bool(held))
        assert (await connections.call(server.address, a_request("new"))).body == b"new"
        assert not waiting.done()
        server.writers[0].write(good(held[0]))
        assert (await waiting).body == b"held"
        await until(lambda: server.ended == [1])


async def test_connection_close_includes_those_after_go_away(connections: ConnectionPool) -> None:
    def say(frame: Frame) -> bytes:
        if frame.fields["name"] == "held":
            return b""
        return good(frame) if server.connections > 1 else encode(frame.make_response(ResponseCode.GO_AWAY))

    async with a_server(say) as server:
        waiting = asyncio.create_task(connections.call(server.address, a_request("held"), 60))
        await connections.call(server.address, a_request("new"))
        connections.close()
        with pytest.raises(UnreachableError):
            await waiting
        await until(lambda: sorted(server.ended) == [1, 2])


async def test_request_handler_error_is_returned_and_keeps_the_connection() -> None:
    def fail(_: Frame) -> Frame | None:
        raise KeyError("a mistake of the caller's")

    def say(frame: Frame) -> bytes:
        if frame.is_response:
            return b""
        request = Frame(code=RequestCode.GET_CONSUMER_RUNNING_INFO, opaque=5)
        return encode(request) + encode(request.as_one_way()) + good(frame)

    failing = ConnectionPool(fail)
    async with a_server(say) as server:
        assert (await failing.call(server.address, a_request("mine"))).body == b"mine"
        await until(lambda: len(server.frames) > 1)
        assert [(frame.code, frame.opaque) for frame in server.frames if frame.is_response] == [
            (ResponseCode.SYSTEM_ERROR, 5)
        ]
        assert (await failing.call(server.address, a_request("again"))).body == b"again"
        assert server.connections == 1
    failing.close()


async def test_connection_stops_reading_requests_of_a_peer_that_reads_no_responses() -> None:
    number = 20_000
    reading = asyncio.Event()
    requests = encode(Frame(code=RequestCode.GET_CONSUMER_RUNNING_INFO, opaque=5)) * 100
    answers: list[Frame] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder()
        list(decoder.feed(await reader.read(65536)))
        for _ in range(number // 100):
            writer.write(requests)
        await reading.wait()
        while data := await reader.read(65536):
            answers.extend(frame for frame in decoder.feed(data) if frame.code == ResponseCode.SUCCESS)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, limit=1024)
    host, port = server.sockets[0].getsockname()
    generous = ConnectionPool(lambda request: request.make_response(ResponseCode.SUCCESS, bytes(10_000)))
    request = asyncio.create_task(generous.call(f"{host}:{port}", a_request(), 60))

    def transport() -> asyncio.Transport | None:
        place = generous._states.get(f"{host}:{port}")
        return place.connection._transport if place and place.connection else None

    await until(lambda: bool((opened := transport()) and not opened.is_reading()))
    assert (opened := transport())
    assert opened.get_write_buffer_size() < 50_000_000, "unbounded it would be 200 MB"
    reading.set()
    await until(lambda: len(answers) >= number)
    generous.close()
    server.close()
    with pytest.raises(UnreachableError):
        await request


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address of their own only")
async def test_connection_to_a_name_with_a_dead_address_uses_the_other_address(
    connections: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_server(good) as server:
        port = int(server.address.rpartition(":")[2])
        with closing(socket.socket()) as dead, closing(socket.socket()) as first, closing(socket.socket()) as second:
            dead.bind(("127.0.0.9", port))
            dead.listen(0)
            for client in (first, second):  # they fill the backlog: further connections hang
                client.setblocking(False)  # noqa: FBT003 - its name
                client.connect_ex(("127.0.0.9", port))

            async def resolve(*_: object, **__: object) -> list[object]:
                stream = socket.AF_INET, socket.SOCK_STREAM, 6, ""
                return [(*stream, (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            assert (await connections.call(f"name-server:{port}", a_request("through"))).body == b"through"
