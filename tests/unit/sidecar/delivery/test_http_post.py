"""POST over connections that are kept, against servers that say just what a test wants, byte by byte."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from random import Random

import pytest

from ground.poll import PATIENCE_SECONDS
from rota.sidecar.delivery.http_post import (
    MAX_HEAD_BYTES,
    BadResponseError,
    ConnectFailedError,
    HttpPoster,
    SendForbiddenError,
)

NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
SILENCE = b""
CLOSES = None

Said = bytes | None
Say = Callable[["Heard"], "Said | Iterator[Said]"]


@dataclass
class Heard:
    """A request, by which connection it came, and how many there were on it before."""

    head: str
    body: bytes
    connection: int
    before: int


@dataclass
class Server:
    """What a test looks at."""

    say: Say
    port: int = 0
    host: str = "127.0.0.1"
    heard: list[Heard] = field(default_factory=list)
    connections: int = 0
    ended: list[int] = field(default_factory=list)  # connections that the other side closed
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer every request; None closes, several answers go out one by one."""
        self.connections += 1
        self.writers.append(writer)
        number, before = self.connections, 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"\r\ncontent-length: (\d+)\r\n", head)
                assert length
                heard = Heard(head, await reader.readexactly(int(length[1])), number, before)
                self.heard.append(heard)
                before += 1
                said = self.say(heard)
                for piece in [said] if said is None or isinstance(said, bytes) else said:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.append(number)
        finally:
            writer.close()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():  # noqa: ASYNC110 - what is waited for is a server's, not an event of ours
                await asyncio.sleep(0.005)


@asynccontextmanager
async def a_server(say: Said | Say, host: str = "127.0.0.1") -> AsyncIterator[tuple[Server, HttpPoster]]:
    """Start one that says this to everybody, or what a function says, and a Post to it."""
    found = Server((lambda _: say) if say is None or isinstance(say, bytes) else say, host=host)
    server = await asyncio.start_server(found.talk, host, 0)
    found.port = server.sockets[0].getsockname()[1]
    post = HttpPoster(host, found.port)
    try:
        yield found, post
    finally:
        post.close()
        server.close()
        for writer in found.writers:
            writer.close()


async def ask(
    post: HttpPoster,
    body: bytes = b"hello",
    seconds: float = 10.0,
    path: str = "/",
    may: Callable[[], bool] = lambda: True,
) -> int:
    return await post.post(path, b"ce-id: 1\r\n", body, seconds, may)


# What is sent.


async def test_push_request_has_path_host_headers_length_and_body() -> None:
    async with a_server(NO_CONTENT) as (server, post):
        assert await ask(post, b"hello", path="/orders?x=1") == 204
        told = f"POST /orders?x=1 HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nce-id: 1\r\ncontent-length: 5\r\n\r\n"
        assert (server.heard[0].head, server.heard[0].body) == (told, b"hello")


@pytest.mark.parametrize("body", [b"", bytes(5_000_000)], ids=["empty", "5 MB"])
async def test_push_request_delivers_an_empty_or_large_body_completely(body: bytes) -> None:
    async with a_server(NO_CONTENT) as (server, post):
        assert await ask(post, body) == 204
        assert server.heard[0].body == body


@pytest.mark.parametrize(
    ("path", "line"),
    [("/a b", "/a%20b"), ("/a\r\nx: y", "/a%0D%0Ax:%20y"), ("/ü", "/%C3%BC"), ("/a%20b?c=%25&d#e", "/a%20b?c=%25&d#e")],
)
async def test_push_request_line_cannot_be_broken_by_the_path(path: str, line: str) -> None:
    async with a_server(NO_CONTENT) as (server, post):
        await ask(post, path=path)
        assert server.heard[0].head.split("\r\n")[0] == f"POST {line} HTTP/1.1"


async def test_push_that_is_forbidden_after_connecting_sends_nothing_and_disconnects() -> None:
    async with a_server(NO_CONTENT) as (server, post):
        with pytest.raises(SendForbiddenError):
            await ask(post, b"late", may=lambda: False)
        assert await ask(post, b"hello") == 204
        assert [it.body for it in server.heard] == [b"hello"]
        assert 1 in server.ended, "an app that serves one connection at a time would serve nobody else"


def test_push_request_host_of_an_ipv6_address_is_in_brackets() -> None:
    assert HttpPoster("::1", 8080)._host_header == b"host: [::1]:8080\r\n"
    assert HttpPoster("localhost", 8080)._host_header == b"host: localhost:8080\r\n"


# What comes back.


CHUNKED = b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWERS = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200),
    "no reason": (b"HTTP/1.1 201 \r\ncontent-length:0\r\n\r\n", 201),
    "no blank": (b"HTTP/1.1 422\r\ncontent-length:  2  \r\nx:\r\n\r\nno", 422),
    "no body": (NO_CONTENT, 204),
    "no body whatever it says": (b"HTTP/1.1 304 No\r\ntransfer-encoding: chunked\r\n\r\n", 304),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\n0a\r\n0\r\n\r\n34567\r\n0\r\n\r\n",
        200,
    ),
    "extensions and trailers": (
        CHUNKED + b"3;a=b\r\nabc\r\nF ; c\r\n0\r\n\r\n5678901234\r\n000;x\r\nx-sum: 1\r\nx-more: 2\r\n\r\n",
        503,
    ),
    "no chunk": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 200),
    "chunks whatever the length": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        200,
    ),
    "provisional": (
        b"HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 103 Hints\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
        200,
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_push_response_end_is_detected_and_its_connection_is_reused(name: str) -> None:
    said, status = ANSWERS[name]
    async with a_server(said) as (server, post):
        assert [await ask(post) for _ in range(3)] == [status] * 3
        assert [it.before for it in server.heard] == [0, 1, 2]
        assert server.connections == 1


@pytest.mark.parametrize("name", ANSWERS)
async def test_push_response_is_assembled_wherever_it_is_split(name: str) -> None:
    said, status = ANSWERS[name]

    def split(heard: Heard) -> Iterator[bytes]:
        yield said[: heard.before]
        yield said[heard.before :]

    async with a_server(split) as (server, post):
        for _ in said:
            assert await ask(post) == status
        assert server.connections == 1


@pytest.mark.parametrize("name", ANSWERS)
async def test_push_response_may_arrive_byte_by_byte(name: str) -> None:
    said, status = ANSWERS[name]
    async with a_server(lambda _: (bytes([it]) for it in said)) as (server, post):
        assert [await ask(post), await ask(post)] == [status] * 2
        assert server.connections == 1


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 202 OK\r\ncontent-length: 2\r\nConnection: Close\r\n\r\nok",
        b"HTTP/1.1 202 OK\r\ntransfer-encoding: chunked\r\nconnection: upgrade, close\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.0 202 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 202 OK\r\ncontent-length: 2\r\n\r\nok, and more",
    ],
    ids=["length", "chunks", "HTTP/1.0", "more than was asked"],
)
async def test_push_connection_that_ends_with_its_response_is_closed_and_the_next_is_new(said: bytes) -> None:
    async with a_server(said) as (server, post):
        assert [await ask(post), await ask(post)] == [202, 202]
        assert [(it.connection, it.before) for it in server.heard] == [(1, 0), (2, 0)]
        await server.until(lambda: server.ended == [1, 2])


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 202 OK\r\n\r\n", b"HTTP/1.0 202 OK\r\n\r\nsome", b"HTTP/1.1 202 OK\r\n\r\nsome"]
)
async def test_push_response_without_a_length_ends_with_its_connection(said: bytes) -> None:
    async with a_server(lambda _: iter([said, b"more", CLOSES])) as (server, post):
        assert [await ask(post), await ask(post)] == [202, 202]
        assert server.connections == 2


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"",
    ],
    ids=["body", "chunks", "the last line", "head", "provisional only", "nothing"],
)
async def test_push_response_that_is_cut_off_is_an_error(said: bytes) -> None:
    async with a_server(lambda _: iter([said, CLOSES])) as (server, post):
        with pytest.raises(BadResponseError, match="closed the connection without a response"):
            await ask(post)
        assert server.connections == 1


GARBAGE = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a low status": b"HTTP/1.1 099 OK\r\n\r\n",
    "a long status": b"HTTP/1.1 2000 OK\r\n\r\n",
    "a signed status": b"HTTP/1.1 +20 OK\r\n\r\n",
    "an empty line": b"\r\n\r\n",
    "a word for a length": b"HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\nhello",
    "a length below nothing": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 5, 6\r\n\r\nhello",
    "an endless length": b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\nhello",
    "a word for a chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nhello\r\n",
    "a chunk below nothing": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk in Python": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0x1_0\r\n",
    "a chunk whose line never ends": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0;" + bytes(MAX_HEAD_BYTES),
    "a head that never ends": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (MAX_HEAD_BYTES // 6),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_push_response_that_is_no_http_is_an_error_and_closes_the_connection(name: str) -> None:
    async with a_server(lambda heard: GARBAGE[name] if heard.connection == 1 else NO_CONTENT) as (server, post):
        with pytest.raises(BadResponseError, match="not valid HTTP"):
            await ask(post)
        await server.until(lambda: server.ended == [1])
        assert await ask(post) == 204
        assert server.connections == 2


@pytest.mark.parametrize("seed", range(20))
async def test_push_response_of_random_bytes_is_an_error(seed: int) -> None:
    chance = Random(f"{seed}/post")
    async with a_server(lambda _: iter([chance.randbytes(chance.randint(1, 200)), CLOSES])) as (_, post):
        for _ in range(3):
            with pytest.raises(BadResponseError):
                await ask(post)


async def test_push_connection_is_closed_by_an_unsolicited_response() -> None:
    async with a_server(NO_CONTENT) as (server, post):
        await ask(post)
        server.writers[0].write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await server.until(lambda: server.ended == [1])
        assert await ask(post) == 204
        assert server.connections == 2


# Connections.


async def test_push_requests_have_a_connection_each_when_concurrent_and_reuse_them() -> None:
    async with a_server(NO_CONTENT) as (server, post):
        for _ in range(3):
            await asyncio.gather(*(ask(post) for _ in range(7)))
        assert (server.connections, len(server.heard)) == (7, 21)


async def test_push_connection_that_was_closed_while_idle_is_not_reused() -> None:
    async with a_server(NO_CONTENT) as (server, post):
        await ask(post)
        server.writers[0].close()
        await server.until(lambda: all(it.closed for it in post._idle))
        assert await ask(post) == 204
        assert server.connections == 2


async def test_push_on_a_reused_connection_that_ends_is_repeated_on_a_new_one() -> None:
    def say(heard: Heard) -> Said:
        return CLOSES if heard.before else EMPTY

    async with a_server(say) as (server, post):
        await asyncio.gather(*(ask(post) for _ in range(3)))
        assert await ask(post, b"again") == 200
        assert [it.connection for it in server.heard if it.body == b"again"] == [3, 4], (
            "what lies idle may have ended all together"
        )


async def test_push_on_a_reused_connection_with_a_partial_response_is_not_repeated() -> None:
    def say(heard: Heard) -> Said | Iterator[Said]:
        return iter([b"HTTP/1.1 100 Continue\r\n\r\n", CLOSES]) if heard.before else EMPTY

    async with a_server(say) as (server, post):
        await ask(post)
        with pytest.raises(BadResponseError):
            await ask(post)
        assert len(server.heard) == 2


async def test_push_on_a_new_connection_that_breaks_is_not_repeated() -> None:
    async with a_server(CLOSES) as (server, post):
        with pytest.raises(BadResponseError):
            await ask(post)
        assert len(server.heard) == 1


async def test_push_to_a_port_without_listener_reports_the_app_as_unreachable() -> None:
    async with a_server(NO_CONTENT) as (_, post):
        await ask(post)
        port = post.port
    with pytest.raises(ConnectFailedError, match=rf"^No process listens at 127\.0\.0\.1, port {port}: "):
        await ask(HttpPoster("127.0.0.1", port))


async def test_push_that_times_out_while_connecting_reports_the_app_as_unreachable() -> None:
    with closing(socket.socket()) as deaf, closing(socket.socket()) as first, closing(socket.socket()) as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for filling in (first, second):  # who comes after them is kept waiting for ever
            filling.setblocking(False)  # noqa: FBT003 - its name
            filling.connect_ex(deaf.getsockname())
        with pytest.raises(ConnectFailedError, match="The app does not accept connections"):
            await ask(HttpPoster(*deaf.getsockname()), seconds=0.1)


@pytest.mark.parametrize(
    "said", [SILENCE, b"HTTP/1.1 200 OK\r\ncontent-le", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"]
)
async def test_push_timeout_closes_the_connection_and_the_next_is_new(said: bytes) -> None:
    async with a_server(lambda heard: said if heard.before else NO_CONTENT) as (server, post):
        assert await ask(post) == 204  # a slow machine may not open a connection within the time-out below
        with pytest.raises(TimeoutError):
            await ask(post, seconds=0.05)
        await server.until(lambda: server.ended == [1])
        assert await ask(post) == 204
        assert server.connections == 2


async def test_push_that_ends_its_connection_is_repeated_once_however_many_connections_are_idle() -> None:
    async with a_server(lambda heard: CLOSES if heard.body == b"poison" else NO_CONTENT) as (server, post):
        await asyncio.gather(*(ask(post) for _ in range(4)))
        assert server.connections == 4
        with pytest.raises(BadResponseError):
            await ask(post, b"poison")
        assert [it.body for it in server.heard].count(b"poison") == 2


async def test_push_response_that_arrived_while_the_process_stalled_counts() -> None:
    def still(_: Heard) -> bytes:
        time.sleep(0.2)  # the one loop of both sides: its next look finds an answer, and that the time is up
        return NO_CONTENT

    async with a_server(still) as (_, post):
        assert await ask(post) == 204  # opens the connection
        assert await ask(post, seconds=0.1) == 204


async def test_push_timeout_discards_the_unsent_part_of_the_request() -> None:
    given_up, read, ended = asyncio.Event(), [0], asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await given_up.wait()
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                read[0] += len(data)
        ended.set()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, limit=1024)
    post = HttpPoster(*server.sockets[0].getsockname())

    async def ask_until_connected() -> None:
        while True:
            with suppress(ConnectFailedError):  # a slow machine did not open the connection in that time
                await ask(post, bytes(50_000_000), seconds=0.05)

    with pytest.raises(TimeoutError):
        await ask_until_connected()
    given_up.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await ended.wait()
    assert read[0] < 50_000_000
    server.close()


async def test_push_that_is_cancelled_closes_its_connection() -> None:
    async with a_server(lambda heard: NO_CONTENT if heard.connection == 2 else SILENCE) as (server, post):
        asking = asyncio.create_task(ask(post))
        await server.until(lambda: bool(server.heard))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.until(lambda: server.ended == [1])
        assert await ask(post) == 204


async def test_push_response_may_arrive_before_the_request_is_complete() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        while await reader.read(65536):
            pass
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    post = HttpPoster(*server.sockets[0].getsockname())
    assert await ask(post, bytes(20_000_000)) == 413
    server.close()


async def test_push_response_before_the_request_is_complete_closes_the_connection() -> None:
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)  # nothing is read meanwhile
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass
        ended.set()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    post = HttpPoster(*server.sockets[0].getsockname())
    assert await ask(post, bytes(20_000_000)) == 413
    async with asyncio.timeout(PATIENCE_SECONDS):
        await ended.wait()
    server.close()


async def test_push_client_that_is_closed_keeps_neither_idle_nor_busy_connections() -> None:
    async with a_server(lambda heard: SILENCE if heard.body == b"held" else NO_CONTENT) as (server, post):
        asking = asyncio.create_task(ask(post, b"held"))
        await server.until(lambda: bool(server.heard))
        await ask(post)
        post.close()
        await server.until(lambda: server.ended == [2])
        server.writers[0].write(NO_CONTENT)
        assert await asking == 204
        await server.until(lambda: server.ended == [2, 1])
