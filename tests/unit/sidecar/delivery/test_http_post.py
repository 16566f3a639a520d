"""POST over persistent connections, against servers with responses that a test chooses byte by byte."""

import asyncio
import re
import socket
import sys
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
CLOSE = None

ResponseBytes = bytes | None
Responder = Callable[["ReceivedRequest"], "ResponseBytes | Iterator[ResponseBytes]"]


@dataclass
class ReceivedRequest:
    """A request, the number of its connection, and how many requests preceded it on that connection."""

    head: str
    body: bytes
    connection: int
    requests_before: int


@dataclass
class Server:
    """A test server that records its requests and connections."""

    respond: Responder
    port: int = 0
    host: str = "127.0.0.1"
    requests: list[ReceivedRequest] = field(default_factory=list)
    connections: int = 0
    ended_connections: list[int] = field(default_factory=list)  # closed by the client
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer every request; None closes the connection, the pieces of an iterator are sent one by one."""
        self.connections += 1
        self.writers.append(writer)
        number, requests_before = self.connections, 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"\r\ncontent-length: (\d+)\r\n", head)
                assert length
                request = ReceivedRequest(head, await reader.readexactly(int(length[1])), number, requests_before)
                self.requests.append(request)
                requests_before += 1
                response = self.respond(request)
                for piece in [response] if response is None or isinstance(response, bytes) else response:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended_connections.append(number)
        finally:
            writer.close()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 - the server under test has no event to await
                await asyncio.sleep(0.005)


@asynccontextmanager
async def run_server(
    response: ResponseBytes | Responder, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Server, HttpPoster]]:
    """Start a server that always gives this response, or the response of a function, and a poster to it."""
    server = Server((lambda _: response) if response is None or isinstance(response, bytes) else response, host=host)
    listener = await asyncio.start_server(server.serve_connection, host, 0)
    server.port = listener.sockets[0].getsockname()[1]
    post = HttpPoster(host, server.port)
    try:
        yield server, post
    finally:
        post.close()
        listener.close()
        for writer in server.writers:
            writer.close()


async def post_body(
    post: HttpPoster,
    body: bytes = b"hello",
    seconds: float = 10.0,
    path: str = "/",
    may_send: Callable[[], bool] = lambda: True,
) -> int:
    return await post.post(path, b"ce-id: 1\r\n", body, seconds, may_send)


# Requests.


async def test_push_request_has_path_host_headers_length_and_body() -> None:
    async with run_server(NO_CONTENT) as (server, post):
        assert await post_body(post, b"hello", path="/orders?x=1") == 204
        head = f"POST /orders?x=1 HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nce-id: 1\r\ncontent-length: 5\r\n\r\n"
        assert (server.requests[0].head, server.requests[0].body) == (head, b"hello")


@pytest.mark.parametrize("body", [b"", bytes(5_000_000)], ids=["empty", "5 MB"])
async def test_push_request_delivers_an_empty_or_large_body_completely(body: bytes) -> None:
    async with run_server(NO_CONTENT) as (server, post):
        assert await post_body(post, body) == 204
        assert server.requests[0].body == body


@pytest.mark.parametrize(
    ("path", "line"),
    [("/a b", "/a%20b"), ("/a\r\nx: y", "/a%0D%0Ax:%20y"), ("/ü", "/%C3%BC"), ("/a%20b?c=%25&d#e", "/a%20b?c=%25&d#e")],
)
async def test_push_request_line_cannot_be_broken_by_the_path(path: str, line: str) -> None:
    async with run_server(NO_CONTENT) as (server, post):
        await post_body(post, path=path)
        assert server.requests[0].head.split("\r\n")[0] == f"POST {line} HTTP/1.1"


async def test_push_that_is_forbidden_after_connecting_sends_nothing_and_disconnects() -> None:
    async with run_server(NO_CONTENT) as (server, post):
        with pytest.raises(SendForbiddenError):
            await post_body(post, b"late", may_send=lambda: False)
        assert await post_body(post, b"hello") == 204
        assert [request.body for request in server.requests] == [b"hello"]
        assert 1 in server.ended_connections, "an app that serves one connection at a time would serve no other client"


def test_push_request_host_of_an_ipv6_address_is_in_brackets() -> None:
    assert HttpPoster("::1", 8080)._host_header == b"host: [::1]:8080\r\n"
    assert HttpPoster("localhost", 8080)._host_header == b"host: localhost:8080\r\n"


# Responses.


CHUNKED = b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n"
RESPONSES = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200),
    "no reason": (b"HTTP/1.1 201 \r\ncontent-length:0\r\n\r\n", 201),
    "no blank": (b"HTTP/1.1 422\r\ncontent-length:  2  \r\nx:\r\n\r\nno", 422),
    "no body": (NO_CONTENT, 204),
    "no body in spite of its headers": (b"HTTP/1.1 304 No\r\ntransfer-encoding: chunked\r\n\r\n", 304),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nabc\r\n0a\r\n0\r\n\r\n34567\r\n0\r\n\r\n",
        200,
    ),
    "extensions and trailers": (
        CHUNKED + b"3;a=b\r\nabc\r\nF ; c\r\n0\r\n\r\n5678901234\r\n000;x\r\nx-sum: 1\r\nx-more: 2\r\n\r\n",
        503,
    ),
    "no chunk": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 200),
    "chunks in spite of a length": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        200,
    ),
    "provisional": (
        b"HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 103 Hints\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
        200,
    ),
}


@pytest.mark.parametrize("name", RESPONSES)
async def test_push_response_end_is_detected_and_its_connection_is_reused(name: str) -> None:
    response, status = RESPONSES[name]
    async with run_server(response) as (server, post):
        assert [await post_body(post) for _ in range(3)] == [status] * 3
        assert [request.requests_before for request in server.requests] == [0, 1, 2]
        assert server.connections == 1


@pytest.mark.parametrize("name", RESPONSES)
async def test_push_response_is_assembled_wherever_it_is_split(name: str) -> None:
    response, status = RESPONSES[name]

    def respond_split(request: ReceivedRequest) -> Iterator[bytes]:
        yield response[: request.requests_before]
        yield response[request.requests_before :]

    async with run_server(respond_split) as (server, post):
        for _ in response:
            assert await post_body(post) == status
        assert server.connections == 1


@pytest.mark.parametrize("name", RESPONSES)
async def test_push_response_may_arrive_byte_by_byte(name: str) -> None:
    response, status = RESPONSES[name]
    async with run_server(lambda _: (bytes([byte]) for byte in response)) as (server, post):
        assert [await post_body(post), await post_body(post)] == [status] * 2
        assert server.connections == 1


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 202 OK\r\ncontent-length: 2\r\nConnection: Close\r\n\r\nok",
        b"HTTP/1.1 202 OK\r\ntransfer-encoding: chunked\r\nconnection: upgrade, close\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.0 202 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 202 OK\r\ncontent-length: 2\r\n\r\nok, and more",
    ],
    ids=["length", "chunks", "HTTP/1.0", "more than the response"],
)
async def test_push_connection_that_ends_with_its_response_is_closed_and_the_next_is_new(response: bytes) -> None:
    async with run_server(response) as (server, post):
        assert [await post_body(post), await post_body(post)] == [202, 202]
        assert [(request.connection, request.requests_before) for request in server.requests] == [(1, 0), (2, 0)]
        await server.wait_until(lambda: server.ended_connections == [1, 2])


@pytest.mark.parametrize(
    "response", [b"HTTP/1.1 202 OK\r\n\r\n", b"HTTP/1.0 202 OK\r\n\r\nsome", b"HTTP/1.1 202 OK\r\n\r\nsome"]
)
async def test_push_response_without_a_length_ends_with_its_connection(response: bytes) -> None:
    async with run_server(lambda _: iter([response, b"more", CLOSE])) as (server, post):
        assert [await post_body(post), await post_body(post)] == [202, 202]
        assert server.connections == 2


@pytest.mark.parametrize(
    "response",
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
async def test_push_response_that_is_cut_off_is_an_error(response: bytes) -> None:
    async with run_server(lambda _: iter([response, CLOSE])) as (server, post):
        with pytest.raises(BadResponseError, match="closed the connection without a response"):
            await post_body(post)
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
    async with run_server(lambda request: GARBAGE[name] if request.connection == 1 else NO_CONTENT) as (server, post):
        with pytest.raises(BadResponseError, match="not valid HTTP"):
            await post_body(post)
        await server.wait_until(lambda: server.ended_connections == [1])
        assert await post_body(post) == 204
        assert server.connections == 2


@pytest.mark.parametrize("seed", range(20))
async def test_push_response_of_random_bytes_is_an_error(seed: int) -> None:
    random = Random(f"{seed}/post")
    async with run_server(lambda _: iter([random.randbytes(random.randint(1, 200)), CLOSE])) as (_, post):
        for _ in range(3):
            with pytest.raises(BadResponseError):
                await post_body(post)


async def test_push_connection_is_closed_by_an_unsolicited_response() -> None:
    async with run_server(NO_CONTENT) as (server, post):
        await post_body(post)
        server.writers[0].write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await server.wait_until(lambda: server.ended_connections == [1])
        assert await post_body(post) == 204
        assert server.connections == 2


# Connections.


async def test_push_requests_have_a_connection_each_when_concurrent_and_reuse_them() -> None:
    async with run_server(NO_CONTENT) as (server, post):
        for _ in range(3):
            await asyncio.gather(*(post_body(post) for _ in range(7)))
        assert (server.connections, len(server.requests)) == (7, 21)


async def test_push_connection_that_was_closed_while_idle_is_not_reused() -> None:
    async with run_server(NO_CONTENT) as (server, post):
        await post_body(post)
        server.writers[0].close()
        await server.wait_until(lambda: all(connection.closed for connection in post._idle))
        assert await post_body(post) == 204
        assert server.connections == 2


async def test_push_on_a_reused_connection_that_ends_is_repeated_on_a_new_one() -> None:
    def respond(request: ReceivedRequest) -> ResponseBytes:
        return CLOSE if request.requests_before else EMPTY

    async with run_server(respond) as (server, post):
        await asyncio.gather(*(post_body(post) for _ in range(3)))
        assert await post_body(post, b"again") == 200
        assert [request.connection for request in server.requests if request.body == b"again"] == [3, 4], (
            "all idle connections may have ended together"
        )


async def test_push_that_is_repeated_gives_no_context_to_errors_of_other_tasks() -> None:
    current_errors: list[BaseException | None] = []

    def respond(request: ReceivedRequest) -> ResponseBytes:
        current_errors.append(sys.exception())
        return CLOSE if request.requests_before else EMPTY

    async with run_server(respond) as (_, post):
        await post_body(post)
        await post_body(post)
    assert current_errors == [None, None, None]  # the last one while the client waits for the repeated request


async def test_push_on_a_reused_connection_with_a_partial_response_is_not_repeated() -> None:
    def respond(request: ReceivedRequest) -> ResponseBytes | Iterator[ResponseBytes]:
        return iter([b"HTTP/1.1 100 Continue\r\n\r\n", CLOSE]) if request.requests_before else EMPTY

    async with run_server(respond) as (server, post):
        await post_body(post)
        with pytest.raises(BadResponseError):
            await post_body(post)
        assert len(server.requests) == 2


async def test_push_on_a_new_connection_that_breaks_is_not_repeated() -> None:
    async with run_server(CLOSE) as (server, post):
        with pytest.raises(BadResponseError):
            await post_body(post)
        assert len(server.requests) == 1


async def test_push_to_a_port_without_listener_reports_the_app_as_unreachable() -> None:
    async with run_server(NO_CONTENT) as (_, post):
        await post_body(post)
        port = post.port
    with pytest.raises(ConnectFailedError, match=rf"^No process listens at 127\.0\.0\.1, port {port}: "):
        await post_body(HttpPoster("127.0.0.1", port))


async def test_push_that_times_out_while_connecting_reports_the_app_as_unreachable() -> None:
    with closing(socket.socket()) as listener, closing(socket.socket()) as first, closing(socket.socket()) as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for client in (first, second):  # connections beyond these two wait for ever
            client.setblocking(False)  # noqa: FBT003 - its name
            client.connect_ex(listener.getsockname())
        with pytest.raises(ConnectFailedError, match="The app does not accept connections"):
            await post_body(HttpPoster(*listener.getsockname()), seconds=0.1)


@pytest.mark.parametrize(
    "response", [SILENCE, b"HTTP/1.1 200 OK\r\ncontent-le", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"]
)
async def test_push_timeout_closes_the_connection_and_the_next_is_new(response: bytes) -> None:
    async with run_server(lambda request: response if request.requests_before else NO_CONTENT) as (server, post):
        assert await post_body(post) == 204  # a slow machine may not open a connection within the time-out below
        with pytest.raises(TimeoutError):
            await post_body(post, seconds=0.05)
        await server.wait_until(lambda: server.ended_connections == [1])
        assert await post_body(post) == 204
        assert server.connections == 2


async def test_push_deadline_of_an_answered_request_does_not_end_the_next_one() -> None:
    async with run_server(lambda request: SILENCE if request.requests_before else NO_CONTENT) as (server, post):
        assert await post_body(post, seconds=0.2) == 204
        next_post = asyncio.create_task(post_body(post))
        await asyncio.sleep(0.3)
        assert not next_post.done()
        server.writers[0].write(NO_CONTENT)
        assert await next_post == 204
        assert server.connections == 1


async def test_push_that_ends_its_connection_is_repeated_once_however_many_connections_are_idle() -> None:
    async with run_server(lambda request: CLOSE if request.body == b"poison" else NO_CONTENT) as (server, post):
        await asyncio.gather(*(post_body(post) for _ in range(4)))
        assert server.connections == 4
        with pytest.raises(BadResponseError):
            await post_body(post, b"poison")
        assert [request.body for request in server.requests].count(b"poison") == 2


async def test_push_response_that_arrived_while_the_process_stalled_counts() -> None:
    def respond_stalled(_: ReceivedRequest) -> bytes:
        time.sleep(0.2)  # one loop runs both sides: at its next step the response has arrived, and the time is up
        return NO_CONTENT

    async with run_server(respond_stalled) as (_, post):
        assert await post_body(post) == 204  # opens the connection
        assert await post_body(post, seconds=0.1) == 204


async def test_push_timeout_discards_the_unsent_part_of_the_request() -> None:
    timed_out, read_bytes, ended = asyncio.Event(), [0], asyncio.Event()

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await timed_out.wait()
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                read_bytes[0] += len(data)
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve_connection, "127.0.0.1", 0, limit=1024)
    post = HttpPoster(*server.sockets[0].getsockname())

    async def post_until_connected() -> None:
        while True:
            with suppress(ConnectFailedError):  # a slow machine did not open the connection within the time-out
                await post_body(post, bytes(50_000_000), seconds=0.05)

    with pytest.raises(TimeoutError):
        await post_until_connected()
    timed_out.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await ended.wait()
    assert read_bytes[0] < 50_000_000
    server.close()


async def test_push_that_is_cancelled_closes_its_connection() -> None:
    async with run_server(lambda request: NO_CONTENT if request.connection == 2 else SILENCE) as (server, post):
        push = asyncio.create_task(post_body(post))
        await server.wait_until(lambda: bool(server.requests))
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        await server.wait_until(lambda: server.ended_connections == [1])
        assert await post_body(post) == 204


async def test_push_response_may_arrive_before_the_request_is_complete() -> None:
    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        while await reader.read(65536):
            pass
        writer.close()

    server = await asyncio.start_server(serve_connection, "127.0.0.1", 0)
    post = HttpPoster(*server.sockets[0].getsockname())
    assert await post_body(post, bytes(20_000_000)) == 413
    server.close()


async def test_push_response_before_the_request_is_complete_closes_the_connection() -> None:
    ended = asyncio.Event()

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)  # the request's body stays unread meanwhile
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve_connection, "127.0.0.1", 0)
    post = HttpPoster(*server.sockets[0].getsockname())
    assert await post_body(post, bytes(20_000_000)) == 413
    async with asyncio.timeout(PATIENCE_SECONDS):
        await ended.wait()
    server.close()


async def test_push_client_that_is_closed_keeps_neither_idle_nor_busy_connections() -> None:
    async with run_server(lambda request: SILENCE if request.body == b"held" else NO_CONTENT) as (server, post):
        push = asyncio.create_task(post_body(post, b"held"))
        await server.wait_until(lambda: bool(server.requests))
        await post_body(post)
        post.close()
        await server.wait_until(lambda: server.ended_connections == [2])
        server.writers[0].write(NO_CONTENT)
        assert await push == 204
        await server.wait_until(lambda: server.ended_connections == [2, 1])
