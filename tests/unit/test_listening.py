"""Listening: strangers who open connections and ask nothing take no descriptors, time or room in the log for long."""

import asyncio
import re
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from aiohttp import web

from rota import listening

ASKS = b"GET / HTTP/1.1\r\nhost: it\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """An application whose answer at /later comes when a test says so."""

    def __init__(self, runner: web.AppRunner, port: int, may: asyncio.Event, asked: asyncio.Event) -> None:
        self.runner, self.port, self.may, self.asked = runner, port, may, asked

    async def connected(self, sends: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sends)
        return reader, writer

    async def answers(self) -> bool:
        reader, writer = await self.connected(ASKS)
        line = await reader.readline()
        writer.close()
        return line.startswith(b"HTTP/1.1 200")


def a_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    may, asked = asyncio.Event(), asyncio.Event()

    async def now(_: web.Request) -> web.Response:
        return web.Response(text="here\n")

    async def later(_: web.Request) -> web.Response:
        asked.set()
        await may.wait()
        return web.Response(text="later\n")

    app = web.Application()
    app.add_routes([web.get("/", now), web.post("/", now), web.get("/later", later)])
    port = a_port()
    runner = await listening.listen(app, "127.0.0.1", port)
    assert runner.addresses == [("127.0.0.1", port)]
    yield Served(runner, port, may, asked)
    await runner.cleanup()


async def test_http_server_at_its_connection_limit_closes_idle_ones_to_serve_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "MOST", 4)
    async with serving() as it, AsyncExitStack() as open_:
        waits, writer = await it.connected(ASKS.replace(b"/ ", b"/later ", 1))
        open_.callback(writer.close)
        await it.asked.wait()
        silent = [await it.connected(b"GET / HT") for _ in range(20)]
        for _, their in silent:
            open_.callback(their.close)
        assert await it.answers()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await silent[0][0].readexactly(1)
        it.may.set()
        assert (await waits.readline()).startswith(b"HTTP/1.1 200"), "who waits for an answer is not cut off"
    assert [record.getMessage() for record in caplog.records if record.name == "rota.listening"] == [
        "4 connections are open, as many as may be; those that ask nothing are closed"
    ]


async def test_http_server_closes_new_connections_while_all_open_ones_await_a_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "MOST", 1)
    async with serving() as it:
        waits, writer = await it.connected(ASKS.replace(b"/ ", b"/later ", 1))
        await it.asked.wait()
        more, other = await it.connected()
        assert await more.read() == b""
        it.may.set()
        assert (await waits.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        other.close()


@pytest.mark.parametrize("sends", [b"", b"GET / HT", ASKS])
async def test_http_server_closes_a_connection_that_stays_idle(sends: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "KEPT", 0.02)
    async with serving() as it:
        reader, writer = await it.connected(sends)
        assert (await reader.read()).startswith(b"HTTP/1.1 200" if sends == ASKS else b"")
        writer.close()


async def test_http_server_does_not_cut_off_a_slow_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "KEPT", 0.02)
    async with serving() as it:
        waits, writer = await it.connected(ASKS.replace(b"/ ", b"/later ", 1))
        await it.asked.wait()
        silent, other = await it.connected()
        assert await silent.read() == b"", "the time is over"
        it.may.set()
        assert (await waits.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        other.close()


async def test_http_server_answers_408_to_a_body_that_stays_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "KEPT", 0.02)
    async with serving() as it:
        reader, writer = await it.connected(b"POST / HTTP/1.1\r\nhost: it\r\ncontent-length: 9\r\n\r\nx")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_http_server_limits_connections_by_the_file_descriptor_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    async with serving() as it:
        silent = [await it.connected() for _ in range(5)]
        assert await it.answers()
        assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()


EMPTY_HANDED = """
    import asyncio, logging, os, sys
    from aiohttp import web
    from rota import listening

    async def run():
        listening.AGAIN = 0.001
        logging.basicConfig(level=logging.WARNING)
        app = web.Application()
        runner = await listening.listen(app, "127.0.0.1", int(sys.argv[1]))
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
    command = [sys.executable, "-c", textwrap.dedent(EMPTY_HANDED), str(port)]
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    assert await process.stdout.readline() == b"none left\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASKS)
    said = await process.stderr.readline()
    assert b"No connection can be taken: Too many open files" in said
    process.stdin.write(b"\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 404")
    writer.close()
    _, rest = await process.communicate(b"\n")
    assert rest == b""


async def test_http_server_rejects_an_unresolvable_address_with_a_sentence() -> None:
    told = re.escape("Nothing can be answered at foo.invalid, port 80: that address cannot be resolved; give another")
    with pytest.raises(ValueError, match=told):
        await listening.listen(web.Application(), "foo.invalid", 80, "; give another")


async def test_http_server_rejects_an_address_in_use_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ValueError, match=f"at 127.0.0.1, port {port}: Address already in use"):
            await listening.listen(web.Application(), "127.0.0.1", port)


@pytest.mark.parametrize("turns", range(7))
async def test_http_server_closes_a_connection_that_arrives_during_shutdown(turns: int) -> None:
    """At whichever turn of the loop it ends: what nobody closes is told of by the interpreter, and fails this."""
    port = a_port()
    runner = await listening.listen(web.Application(), "127.0.0.1", port)
    await asyncio.sleep(0)
    with socket.socket() as knocking:
        knocking.connect(("127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await runner.cleanup()
        knocking.settimeout(5)
        with suppress(ConnectionResetError):
            assert await asyncio.to_thread(knocking.recv, 1) == b""
