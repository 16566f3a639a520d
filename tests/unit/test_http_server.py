"""Tests the HTTP server: slow, silent or hostile clients cost little and do not block other clients."""

import asyncio
import gzip
import re
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from aiohttp import ClientSession, web

from ground.poll import soon
from rota import aio, http_server
from rota.http_server import BodyReader, ServerLimits, SharedResponse, responses
from rota.http_server.limited_site import LimitedSite

GET_REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
GET_LATER = GET_REQUEST.replace(b"/ ", b"/later ", 1)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RunningServer:
    """A running application; it responds at /later once the test sets `may_respond`."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self.runner = runner
        self.port = port
        self.may_respond = asyncio.Event()
        self.requested = asyncio.Event()

    async def connect(self, data: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def is_responding(self) -> bool:
        return (await self.status_line(GET_REQUEST)).startswith(b"HTTP/1.1 200")

    async def has_no_connections(self) -> bool:
        return not (self.runner.server and self.runner.server.connections)

    async def status_line(self, data: bytes) -> bytes:
        """Send bytes on a new connection and return the first line of the response."""
        reader, writer = await self.connect(data)
        try:
            return await reader.readline()
        finally:
            writer.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def serving(limits: ServerLimits | None = None, body: BodyReader | None = None) -> AsyncIterator[RunningServer]:
    async def now(_: web.Request) -> web.Response:
        return web.Response(text="here\n")

    async def later(_: web.Request) -> web.Response:
        server.requested.set()
        await server.may_respond.wait()
        return web.Response(text="later\n")

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await (body or BodyReader(8, 2)).read(request))

    app = web.Application()
    large = SharedResponse(large_body, {"content-type": "text/plain"})
    app.add_routes([web.get("/", now), web.get("/later", later), web.get("/large", large.respond)])
    app.add_routes([web.post("/echo", echo)])
    port = free_port()
    runner = await http_server.listen(app, "127.0.0.1", port, limits=limits)
    assert runner.addresses == [("127.0.0.1", port)]
    server = RunningServer(runner, port)
    yield server
    await runner.cleanup()


LARGE_BYTES = 32 * 2**20  # more than all buffers between server and client hold


async def large_body() -> bytes:
    return b"x" * LARGE_BYTES


def post(path: str, headers: str, body: bytes = b"") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n".encode() + body


async def test_http_server_at_its_connection_limit_closes_idle_ones_to_serve_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(ServerLimits(4)) as server, AsyncExitStack() as stack:
        response, writer = await server.connect(GET_LATER)
        stack.callback(writer.close)
        await server.requested.wait()
        idle = [await server.connect(b"GET / HT") for _ in range(20)]
        for _, idle_writer in idle:
            stack.callback(idle_writer.close)
        assert await server.is_responding()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await idle[0][0].readexactly(1)
        server.may_respond.set()
        assert (await response.readline()).startswith(b"HTTP/1.1 200"), "a request in progress is not interrupted"
    assert [record.getMessage() for record in caplog.records if record.name == "rota.http_server"] == [
        "The limit of 4 connections is reached; idle ones are closed"
    ]


async def test_http_server_continues_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    handle_connection = LimitedSite._handle_connection
    connections = list[socket.socket]()

    async def fails_at_first(site: LimitedSite, connection: socket.socket) -> None:
        connections.append(connection)
        if len(connections) == 1:
            connection.close()
            raise ZeroDivisionError
        await handle_connection(site, connection)

    monkeypatch.setattr(aio, "MIN_RESTART_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(LimitedSite, "_handle_connection", fails_at_first)
    async with serving() as server:
        assert await server.status_line(GET_REQUEST) == b""
        assert await server.is_responding()


async def test_http_server_closes_new_connections_while_all_open_ones_await_a_response() -> None:
    async with serving(ServerLimits(1)) as server:
        response, writer = await server.connect(GET_LATER)
        await server.requested.wait()
        new_reader, new_writer = await server.connect()
        assert await new_reader.read() == b""
        server.may_respond.set()
        assert (await response.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        new_writer.close()


@pytest.mark.parametrize("data", [b"", b"GET / HT", GET_REQUEST])
async def test_http_server_closes_a_connection_that_stays_idle(data: bytes) -> None:
    async with serving(ServerLimits(keepalive_seconds=0.02)) as server:
        reader, writer = await server.connect(data)
        assert (await reader.read()).startswith(b"HTTP/1.1 200" if data == GET_REQUEST else b"")
        writer.close()


async def test_http_server_does_not_cut_off_a_slow_response() -> None:
    async with serving(ServerLimits(keepalive_seconds=0.02)) as server:
        response, writer = await server.connect(GET_LATER)
        await server.requested.wait()
        idle_reader, idle_writer = await server.connect()
        assert await idle_reader.read() == b"", "the idle connection is closed"
        server.may_respond.set()
        assert (await response.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        idle_writer.close()


async def test_http_server_cancels_the_request_of_a_disconnected_client() -> None:
    async with serving() as server:
        _, writer = await server.connect(GET_LATER)
        await server.requested.wait()
        writer.close()
        await soon(server.has_no_connections)
        assert not [task for task in asyncio.all_tasks() if "_handle_request" in repr(task)]


@pytest.mark.parametrize(("path", "status"), [("/none", b"404"), ("/", b"405")])
@pytest.mark.parametrize("headers", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_http_server_answers_an_unknown_route_or_method_before_reading_the_body(
    path: str, status: bytes, headers: str
) -> None:
    async with serving() as server:
        assert (await server.status_line(post(path, headers))).split()[1] == status


async def test_http_server_leaves_the_body_of_a_route_without_one_unread() -> None:
    async with serving() as server:
        request = GET_REQUEST.replace(b"\r\n\r\n", b"\r\ncontent-length: 1000000\r\n\r\n")
        assert (await server.status_line(request)).split()[1] == b"200"


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ("content-length: 8", b"12345678", b"200"),
        ("content-length: 9", b"", b"413"),
        ("transfer-encoding: chunked", b"9\r\n123456789\r\n", b"413"),
        ("transfer-encoding: chunked", b"5\r\n12345\r\n5\r\n12345\r\n", b"413"),
        ("content-encoding: gzip\r\ncontent-length: 8", b"", b"415"),
        ("content-encoding: br\r\ncontent-length: 8", b"", b"415"),
    ],
)
async def test_http_server_rejects_a_body_that_is_too_large_or_compressed(
    headers: str, body: bytes, status: bytes
) -> None:
    async with serving() as server:
        assert (await server.status_line(post("/echo", headers, body))).split()[1] == status


async def test_http_server_answers_408_to_a_body_that_stays_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_SECONDS", 0.02)
    async with serving() as server:
        assert (await server.status_line(post("/echo", "content-length: 8", b"x"))).startswith(b"HTTP/1.1 408")


async def test_http_server_reads_a_limited_number_of_bodies_at_once_and_rejects_more() -> None:
    body = BodyReader(8, 2)
    async with serving(body=body) as server, AsyncExitStack() as stack:
        incomplete = [await server.connect(post("/echo", "content-length: 8", b"x")) for _ in range(2)]
        for _, writer in incomplete:
            stack.callback(writer.close)

        async def is_full() -> bool:
            return (await server.status_line(post("/echo", "content-length: 8"))).split()[1] == b"503"

        await soon(is_full)
        incomplete[0][1].write(b"2345678")
        assert (await incomplete[0][0].readline()).startswith(b"HTTP/1.1 200")
        assert (await server.status_line(post("/echo", "content-length: 1", b"x"))).split()[1] == b"200"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("host: localhost:8080", b"200"),
        ("host: 127.0.0.1", b"200"),
        ("host: [::1]:8080", b"200"),
        ("host: localhost\r\norigin: http://127.0.0.1:8080", b"200"),
        ("host: attacker.example", b"403"),
        ("host: attacker.example:8080", b"403"),
        ("host: 10.0.0.1", b"403"),
        ("host: localhost.attacker.example", b"403"),
        ("host: [x", b"403"),
        ("host: localhost\r\norigin: https://attacker.example", b"403"),
        ("host: localhost\r\norigin: null", b"403"),
    ],
)
async def test_http_server_on_loopback_rejects_requests_of_web_pages(headers: str, status: bytes) -> None:
    async with serving() as server:
        assert (await server.status_line(f"GET / HTTP/1.1\r\n{headers}\r\n\r\n".encode())).split()[1] == status


async def test_http_server_rejects_more_headers_than_a_client_needs() -> None:
    async with serving() as server:
        many = "\r\n".join(f"x-{number}: y" for number in range(http_server.MAX_HEADERS + 1))
        long = f"x: {'y' * (http_server.MAX_HEADER_BYTES + 1)}"
        for headers in (many, long):
            line = await server.status_line(f"GET / HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n".encode())
            assert line.split()[1] == b"400"


async def test_http_server_closes_a_client_that_does_not_read_a_large_response() -> None:
    async with serving(ServerLimits(1)) as server:
        reader, writer = await server.connect(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert await server.is_responding(), "the connection of the slow client is closed to accept another"
        with suppress(ConnectionError):
            assert len(await reader.read()) < LARGE_BYTES
        writer.close()


async def test_http_server_closes_a_client_that_takes_too_long_for_a_large_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "SEND_TIMEOUT_SECONDS", 0.1)
    async with serving() as server:
        reader, writer = await server.connect(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await soon(server.has_no_connections)
        writer.close()


@pytest.mark.parametrize("accepts", ["", "gzip"])
async def test_http_server_sends_a_large_response_whole(accepts: str) -> None:
    async with (
        serving() as server,
        ClientSession(auto_decompress=False) as session,
        session.get(f"http://127.0.0.1:{server.port}/large", headers={"accept-encoding": accepts}) as response,
    ):
        body = await response.read()
        assert response.headers.get("content-encoding", "") == accepts
        assert (gzip.decompress(body) if accepts else body) == await large_body()


async def test_http_server_compresses_a_shared_response_once_and_only_for_clients_that_accept_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compress = gzip.compress
    compressed: list[int] = []

    def counting_compress(body: bytes, level: int) -> bytes:
        compressed.append(len(body))
        return compress(body, level)

    monkeypatch.setattr(gzip, "compress", counting_compress)
    may_render = asyncio.Event()
    may_render.set()

    async def render() -> bytes:
        await may_render.wait()
        return b"large"

    app = web.Application()
    app.add_routes([web.get("/", SharedResponse(render, {}).respond)])
    port = free_port()
    runner = await http_server.listen(app, "127.0.0.1", port)
    async with ClientSession() as session:

        async def request_page(accepts: str) -> bytes:
            headers = {"accept-encoding": accepts}
            async with session.get(f"http://127.0.0.1:{port}/", headers=headers) as response:
                assert response.headers.get("content-encoding", "") == accepts
                return await response.read()

        async def all_wait() -> bool:
            return len(app[responses.BUSY_CONNECTIONS]) == 6

        assert [await request_page("") for _ in range(3)] == [b"large"] * 3
        assert compressed == []
        may_render.clear()
        requests = [asyncio.create_task(request_page(accepts)) for accepts in ("", "gzip") * 3]
        await soon(all_wait)
        may_render.set()
        assert await asyncio.gather(*requests) == [b"large"] * 6
        assert len(compressed) in {1, 2}, "once for each rendered version"
    await runner.cleanup()


async def test_http_server_limits_connections_by_the_file_descriptor_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    async with serving() as server:
        idle = [await server.connect() for _ in range(5)]
        assert await server.is_responding()
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()


WITHOUT_DESCRIPTORS = """
    import asyncio, logging, os, sys
    from aiohttp import web
    from rota import aio, http_server
    from rota.http_server import limited_site

    async def run():
        limited_site.ACCEPT_RETRY_SECONDS = 0.001
        logging.basicConfig(level=logging.WARNING)
        app = web.Application()
        runner = await http_server.listen(app, "127.0.0.1", int(sys.argv[1]))
        descriptors = []
        try:
            while True:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            print("none left", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        for descriptor in descriptors:
            os.close(descriptor)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await runner.cleanup()

    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(loop.run_in_executor(None, str))  # start its thread before descriptors run out
    loop.run_until_complete(run())
"""


async def test_http_server_without_file_descriptors_logs_once_and_recovers() -> None:
    port = free_port()
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_DESCRIPTORS), str(port)]
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    assert await process.stdout.readline() == b"none left\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET_REQUEST)
    line = await process.stderr.readline()
    assert b"Cannot accept a connection: Too many open files" in line
    process.stdin.write(b"\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 404")
    writer.close()
    _, more_errors = await process.communicate(b"\n")
    assert more_errors == b""


async def test_http_server_rejects_an_unresolvable_address_with_a_sentence() -> None:
    sentence = re.escape("Cannot listen on foo.invalid, port 80: that address cannot be resolved; give another")
    with pytest.raises(ValueError, match=sentence):
        await http_server.listen(web.Application(), "foo.invalid", 80, "; give another")


async def test_http_server_rejects_an_address_in_use_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"on 127.0.0.1, port {port}: Address already in use"):
            await http_server.listen(web.Application(), "127.0.0.1", port)


@pytest.mark.parametrize("iterations", range(7))
async def test_http_server_closes_a_connection_that_arrives_during_shutdown(iterations: int) -> None:
    """Shut down after each number of loop iterations; the warning about an unclosed socket would fail the test."""
    port = free_port()
    runner = await http_server.listen(web.Application(), "127.0.0.1", port)
    await asyncio.sleep(0)
    with socket.socket() as client:
        client.connect(("127.0.0.1", port))
        for _ in range(iterations):
            await asyncio.sleep(0)
        await runner.cleanup()
        client.settimeout(5)
        with suppress(ConnectionResetError):
            assert await asyncio.to_thread(client.recv, 1) == b""
