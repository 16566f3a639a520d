"""Target: an app's responses to the sidecar's POST."""

import asyncio
from collections.abc import Sequence

from fuzz.target import Target, mutated
from rota.sidecar.delivery.http_post import BadResponseError, HttpPoster

ANSWERS = [
    b"HTTP/1.1 204 No Content\r\nDate: Fri, 27 Nov 2026 08:00:00 GMT\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
]
TIMEOUT_SECONDS = 20.0  # never reached: the app closes the connection


def check_answers(data: bytes) -> None:
    """Read a response in one piece and in two; both must give the same status, or none."""
    half = len(data) // 2
    assert asyncio.run(_status([data])) == asyncio.run(_status([data[:half], data[half:]])), "it depends on the split"


async def _status(pieces: Sequence[bytes]) -> int | None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    app = HttpPoster("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        return await app.post("/", b"", b"", TIMEOUT_SECONDS, lambda: True)
    except BadResponseError:
        return None
    finally:
        app.close()
        server.close()


TARGETS = (Target("answers", check_answers, (mutated(ANSWERS),)),)
