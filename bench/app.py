"""An app that does nothing: `python -m bench.app ADDRESS PORT [LOG]` answers 204, and notes what came in its log.

As little HTTP as will do: what is measured is the sidecar. A line of the log is one message: when it came, its number,
its queue, all it was told of (its body's first word is its number), and when it was sent. What was tried before comes
out of another topic, so it is of none of these queues: -1.
"""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"content-length: (\d+)\r\n")


class App(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, log: Path | None) -> None:
        """Note into a file, or nothing."""
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if log else None
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio's signature says less than it gives
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._read, 0, end + 2)
            length = int(found[1]) if found else 0
            if len(self._read) < end + 4 + length:
                return
            if self._log is not None:
                self._note(self._log, self._read[:end], self._read[end + 4 : end + 4 + length])
            self._read = self._read[end + 4 + length :]
            self.transport.write(ANSWER)

    @staticmethod
    def _note(log: int, head: bytes, body: bytes) -> None:
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        told = b"%d %s %s %s\n" % (
            time.time_ns() // 1000,
            body.split(b" ", 1)[0],
            fields[b"ce-rocketmqqueue"] if fields[b"ce-rotaattempt"] == b"1" else b"-1",
            fields[b"ce-time"],
        )
        os.write(log, told)  # at once: it may be killed at any time


async def main(address: str, port: str, log: str = "") -> None:
    """Answer until ended."""
    server = await asyncio.get_running_loop().create_server(lambda: App(Path(log) if log else None), address, int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
