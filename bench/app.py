"""A minimal app: `python -m bench.app ADDRESS PORT [LOG]` responds 204 to each message, and logs the message.

It implements as little HTTP as necessary, because the benchmark measures the sidecar. A line of the log has a message's
time of delivery, its number (the first word of its body), its queue, and its send time. A redelivered message is from
the retry topic and not from one of the topic's queues: its queue is logged as -1.
"""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"ontent-[Ll]ength: (\d+)\r\n")  # Rota writes a lower-case C, Java's client an upper-case one


class App(asyncio.Protocol):
    """A connection of the sidecar, or of another client that posts messages."""

    transport: asyncio.Transport

    def __init__(self, log: Path | None) -> None:
        """Open the log, if any."""
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if log else None
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport for the responses."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio's signature says less than it gives
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Respond to each complete request."""
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            header = _LENGTH.search(self._read, 0, end + 2)
            length = int(header[1]) if header else 0
            if len(self._read) < end + 4 + length:
                return
            if self._log is not None:
                self._note(self._log, self._read[:end], self._read[end + 4 : end + 4 + length])
            self._read = self._read[end + 4 + length :]
            self.transport.write(ANSWER)

    @staticmethod
    def _note(log: int, head: bytes, body: bytes) -> None:
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        entry = b"%d %s %s %s\n" % (
            time.time_ns() // 1000,
            body.split(b" ", 1)[0],
            fields[b"ce-rocketmqqueue"] if fields[b"ce-rotaattempt"] == b"1" else b"-1",
            fields[b"ce-time"],
        )
        os.write(log, entry)  # unbuffered: the app may be killed at any time


async def main(address: str, port: str, log: str = "") -> None:
    """Serve until the process is stopped."""
    server = await asyncio.get_running_loop().create_server(lambda: App(Path(log) if log else None), address, int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
