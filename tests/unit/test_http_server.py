"""The HTTP server: clients that are slow, silent or hostile cost little and do not keep others out."""

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

ASKS = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """An application whose response at /later comes when the test says so."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self.runner = runner
        self.port = port
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()

    async def connected(self, sends: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sends)
        return reader, writer

    async def answers(self) -> bool:
        return (await self.status_line(ASKS)).startswith(b"HTTP/1.1 200")

    async def disconnected(self) -> bool:
        return not (self.runner.server and self.runner.server.connections)

    async def status_line(self, sends: bytes) -> bytes:
        """Send bytes on a new connection and return the first line of the response."""
        reader, writer = await self.connected(sends)
        try:
            return await reader.readline()
        finally:
            writer.close()


def a_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@asynccontextmanager
async def serving(limits: ServerLimits | None = None, body: BodyReader | None = None) -> AsyncIterator[Served]:
    async def now(_: web.Request) -> web.Response:
        return web.Response(text="here\n")

    async def later(_: web.Request) -> web.Response:
        served.asked.set()
        await served.may_answer.wait()
        return web.Response(text="later\n")

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await (body or BodyReader(8, 2)).read(request))

    app = web.Application()
    large = SharedResponse(large_body, {"content-type": "text/plain"})
    app.add_routes([web.get("/", now), web.get("/later", later), web.get("/large", large.respond)])
    app.add_routes([web.post("/echo", echo)])
    port = a_port()
    runner = await http_server.listen(app, "127.0.0.1", port, limits=limits)
    assert runner.addresses == [("127.0.0.1", port)]
    served = Served(runner, port)
    yield served
    await runner.cleanup()


LARGE_BYTES = 32 * 2**20  # more than all buffers between server and client hold


async def large_body() -> bytes:
    return b"x" * LARGE_BYTES


def post(path: str, headers: str, body: bytes = b"") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n".encode() + body


async def test_http_server_at_its_connection_limit_closes_idle_ones_to_serve_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(ServerLimits(4)) as it, AsyncExitStack() as open_:
        waits, writer = await it.connected(ASKS.replace(b"/ ", b"/later ", 1))
        open_.callback(writer.close)
        await it.asked.wait()
        silent = [await it.connected(b"GET / HT") for _ in range(20)]
        for _, their in silent:
            open_.callback(their.close)
        assert await it.answers()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await silent[0][0].readexactly(1)
        it.may_answer.set()
        assert (await waits.readline()).startswith(b"HTTP/1.1 200"), "a request that is being handled is not cut off"
    assert [record.getMessage() for record in caplog.records if record.name == "rota.http_server"] == [
        "The limit of 4 connections is reached; idle ones are closed"
    ]


async def test_http_server_goes_on_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right, taken = LimitedSite._handle_connection, list[socket.socket]()

    async def fails_at_first(site: LimitedSite, connection: socket.socket) -> None:
        taken.append(connection)
        if len(taken) == 1:
            connection.close()
            raise ZeroDivisionError
        await right(site, connection)

    monkeypatch.setattr(aio, "MIN_RESTART_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(LimitedSite, "_handle_connection", fails_at_first)
    async with serving() as served:
        assert await served.status_line(ASKS) == b""
        assert await served.answers()


async def test_http_server_closes_new_connections_while_all_open_ones_await_a_response() -> None:
    async with serving(ServerLimits(1)) as it:
        waits, writer = await it.connected(ASKS.replace(b"/ ", b"/later ", 1))
        await it.asked.wait()
        more, other = await it.connected()
        assert await more.read() == b""
        it.may_answer.set()
        assert (await waits.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        other.close()


@pytest.mark.parametrize("sends", [b"", b"GET / HT", ASKS])
async def test_http_server_closes_a_connection_that_stays_idle(sends: bytes) -> None:
    async with serving(ServerLimits(keepalive_seconds=0.02)) as it:
        reader, writer = await it.connected(sends)
        assert (await reader.read()).startswith(b"HTTP/1.1 200" if sends == ASKS else b"")
        writer.close()


async def test_http_server_does_not_cut_off_a_slow_response() -> None:
    async with serving(ServerLimits(keepalive_seconds=0.02)) as it:
        waits, writer = await it.connected(ASKS.replace(b"/ ", b"/later ", 1))
        await it.asked.wait()
        silent, other = await it.connected()
        assert await silent.read() == b"", "the time is over"
        it.may_answer.set()
        assert (await waits.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        other.close()


async def test_http_server_forgets_a_request_whose_client_has_gone() -> None:
    async with serving() as it:
        _, writer = await it.connected(ASKS.replace(b"/ ", b"/later ", 1))
        await it.asked.wait()
        writer.close()
        await soon(it.disconnected)
        assert not [task for task in asyncio.all_tasks() if "_handle_request" in repr(task)]


@pytest.mark.parametrize(("path", "status"), [("/none", b"404"), ("/", b"405")])
@pytest.mark.parametrize("headers", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_http_server_answers_an_unknown_route_or_method_before_reading_the_body(
    path: str, status: bytes, headers: str
) -> None:
    async with serving() as it:
        assert (await it.status_line(post(path, headers))).split()[1] == status


async def test_http_server_leaves_the_body_of_a_route_without_one_unread() -> None:
    async with serving() as it:
        asks = ASKS.replace(b"\r\n\r\n", b"\r\ncontent-length: 1000000\r\n\r\n")
        assert (await it.status_line(asks)).split()[1] == b"200"


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
    async with serving() as it:
        assert (await it.status_line(post("/echo", headers, body))).split()[1] == status


async def test_http_server_answers_408_to_a_body_that_stays_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_SECONDS", 0.02)
    async with serving() as it:
        assert (await it.status_line(post("/echo", "content-length: 8", b"x"))).startswith(b"HTTP/1.1 408")


async def test_http_server_reads_so_many_bodies_at_once_and_rejects_further_ones() -> None:
    body = BodyReader(8, 2)
    async with serving(body=body) as it, AsyncExitStack() as open_:
        slow = [await it.connected(post("/echo", "content-length: 8", b"x")) for _ in range(2)]
        for _, writer in slow:
            open_.callback(writer.close)

        async def is_full() -> bool:
            return (await it.status_line(post("/echo", "content-length: 8"))).split()[1] == b"503"

        await soon(is_full)
        slow[0][1].write(b"2345678")
        assert (await slow[0][0].readline()).startswith(b"HTTP/1.1 200")
        assert (await it.status_line(post("/echo", "content-length: 1", b"x"))).split()[1] == b"200"


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
    async with serving() as it:
        assert (await it.status_line(f"GET / HTTP/1.1\r\n{headers}\r\n\r\n".encode())).split()[1] == status


async def test_http_server_rejects_more_headers_than_a_client_needs() -> None:
    async with serving() as it:
        many = "\r\n".join(f"x-{number}: y" for number in range(http_server.MAX_HEADERS + 1))
        long = f"x: {'y' * (http_server.MAX_HEADER_BYTES + 1)}"
        for headers in (many, long):
            line = await it.status_line(f"GET / HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n\r\n".encode())
            assert line.split()[1] == b"400"


async def test_http_server_closes_a_client_that_does_not_read_a_large_response() -> None:
    async with serving(ServerLimits(1)) as it:
        reader, writer = await it.connected(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert await it.answers(), "the slow client's connection is closed for another"
        with suppress(ConnectionError):
            assert len(await reader.read()) < LARGE_BYTES
        writer.close()


async def test_http_server_closes_a_client_that_takes_too_long_for_a_large_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "SEND_TIMEOUT_SECONDS", 0.1)
    async with serving() as it:
        reader, writer = await it.connected(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await soon(it.disconnected)
        writer.close()


@pytest.mark.parametrize("accepts", ["", "gzip"])
async def test_http_server_sends_a_large_response_whole(accepts: str) -> None:
    async with (
        serving() as it,
        ClientSession(auto_decompress=False) as session,
        session.get(f"http://127.0.0.1:{it.port}/large", headers={"accept-encoding": accepts}) as response,
    ):
        body = await response.read()
        assert response.headers.get("content-encoding", "") == accepts
        assert (gzip.decompress(body) if accepts else body) == await large_body()


async def test_http_server_compresses_a_shared_response_once_and_only_for_clients_that_accept_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compress = gzip.compress
    compressed: list[int] = []

    def counted(body: bytes, level: int) -> bytes:
        compressed.append(len(body))
        return compress(body, level)

    monkeypatch.setattr(gzip, "compress", counted)
    may_render = asyncio.Event()
    may_render.set()

    async def render() -> bytes:
        await may_render.wait()
        return b"large"

    app = web.Application()
    app.add_routes([web.get("/", SharedResponse(render, {}).respond)])
    port = a_port()
    runner = await http_server.listen(app, "127.0.0.1", port)
    async with ClientSession() as session:

        async def ask(accepts: str) -> bytes:
            headers = {"accept-encoding": accepts}
            async with session.get(f"http://127.0.0.1:{port}/", headers=headers) as response:
                assert response.headers.get("content-encoding", "") == accepts
                return await response.read()

        async def all_wait() -> bool:
            return len(app[responses.BUSY_CONNECTIONS]) == 6

        assert [await ask("") for _ in range(3)] == [b"large"] * 3
        assert compressed == []
        may_render.clear()
        asking = [asyncio.create_task(ask(accepts)) for accepts in ("", "gzip") * 3]
        await soon(all_wait)
        may_render.set()
        assert await asyncio.gather(*asking) == [b"large"] * 6
        assert len(compressed) in {1, 2}, "once for each version that is rendered"
    await runner.cleanup()


async def test_http_server_limits_connections_by_the_file_descriptor_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    async with serving() as it:
        silent = [await it.connected() for _ in range(5)]
        assert await it.answers()
        assert await silent[0][0].read() == b""
        for _, writer in silent:
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
        tries, accept = 0, asyncio.get_running_loop().sock_accept
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            print("none left", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        for it in taken:
            os.close(it)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await runner.cleanup()

    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(loop.run_in_executor(None, str))  # its thread is there
    loop.run_until_complete(run())
"""


async def test_http_server_without_file_descriptors_logs_once_and_recovers() -> None:
    port = a_port()
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_DESCRIPTORS), str(port)]
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    assert await process.stdout.readline() == b"none left\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASKS)
    said = await process.stderr.readline()
    assert b"Cannot accept a connection: Too many open files" in said
    process.stdin.write(b"\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 404")
    writer.close()
    _, rest = await process.communicate(b"\n")
    assert rest == b""


async def test_http_server_rejects_an_unresolvable_address_with_a_sentence() -> None:
    told = re.escape("Cannot listen on foo.invalid, port 80: that address cannot be resolved; give another")
    with pytest.raises(ValueError, match=told):
        await http_server.listen(web.Application(), "foo.invalid", 80, "; give another")


async def test_http_server_rejects_an_address_in_use_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ValueError, match=f"on 127.0.0.1, port {port}: Address already in use"):
            await http_server.listen(web.Application(), "127.0.0.1", port)


@pytest.mark.parametrize("turns", range(7))
async def test_http_server_closes_a_connection_that_arrives_during_shutdown(turns: int) -> None:
    """At whichever turn of the loop it ends: what nobody closes is told of by the interpreter, and fails this."""
    port = a_port()
    runner = await http_server.listen(web.Application(), "127.0.0.1", port)
    await asyncio.sleep(0)
    with socket.socket() as knocking:
        knocking.connect(("127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await runner.cleanup()
        knocking.settimeout(5)
        with suppress(ConnectionResetError):
            assert await asyncio.to_thread(knocking.recv, 1) == b""
