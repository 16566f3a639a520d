"""Hostile HTTP clients: many connections that send compressed bodies, send slowly, wait, or do not read."""

import asyncio
import gzip
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

CONNECTIONS = 512
MEBIBYTE = 2**20
BOMB = gzip.compress(bytes(64 * MEBIBYTE), 9)  # 64 KB
HOLD_SECONDS = 1.0  # for which a client keeps its connection before it opens another
PIPELINED = 64  # requests on a connection that reads no response


def slow_post(path: str) -> bytes:
    """Return a request with an incomplete body."""
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n".encode() + b"{"


def bomb(path: str) -> bytes:
    """Return a request with a body that is small only while it is compressed."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-encoding: gzip\r\ncontent-length: {len(BOMB)}\r\n\r\n"
    return head.encode() + BOMB


def get(path: str) -> bytes:
    """Return a request without a body."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def large_head(header_bytes: int) -> bytes:
    """Return a request with a hundred headers of this size."""
    headers = [b"x-%d: %s\r\n" % (number, b"y" * header_bytes) for number in range(100)]
    return b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"".join(headers)


ATTACKS: dict[str, Sequence[bytes]] = {
    "compressed bodies": [bomb("/v1/drain"), bomb("/v1/groups"), bomb("/nothing"), bomb("/metrics")],
    "slow bodies, long polls and event streams": [
        slow_post("/v1/drain"),
        slow_post("/nothing"),
        get("/v1/report?after=1&wait=30s"),
        get("/v1/drained"),
        get("/v1/events"),
    ],
    "responses that are not read": [get(path) * PIPELINED for path in ("/metrics", "/v1/report", "/v1/groups")],
    "endless headers": [large_head(2000), large_head(8000)],  # just below the limits of sidecar and operator
}


@asynccontextmanager
async def attacked(address: str, port: int, attack: str) -> AsyncIterator[None]:
    """Attack from another process until the block ends; it starts when every client has connected once."""
    argv = [sys.executable, "-m", "http_attacks", address, str(port), attack]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    try:
        assert await process.stdout.readline() == b"all have connected\n"
        yield
    finally:
        process.kill()
        await process.wait()


async def main(address: str, port: int, attack: str) -> None:
    """Keep CONNECTIONS connections open, each for HOLD_SECONDS, until the process is killed."""
    requests = ATTACKS[attack]
    connected = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as clients:
        for number in range(CONNECTIONS):
            clients.create_task(_attack(address, port, requests[number % len(requests)], connected))
        for _ in range(CONNECTIONS):
            await connected.acquire()
        print("all have connected", flush=True)


async def _attack(address: str, port: int, request: bytes, connected: asyncio.Semaphore) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(address, port)
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # the server's response stays unread
            try:
                connected.release()
                writer.write(request)
                await writer.drain()
                await asyncio.sleep(HOLD_SECONDS)
            finally:
                writer.transport.abort()


async def probed(address: str, port: int, path: str) -> int:
    """Return the status of a probe's response; like a kubelet, ask once more if the connection is closed."""
    with suppress(OSError, IndexError):
        return await status_of(address, port, path)
    return await status_of(address, port, path)


async def status_of(address: str, port: int, path: str) -> int:
    """Return the status of the response to a request on a new connection; raise if the server closes it."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        line = await reader.readline()
        return int(line.split()[1])
    finally:
        writer.transport.abort()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
