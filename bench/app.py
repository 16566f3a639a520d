"""A minimal app: `python -m bench.app ADDRESS PORT [LOG]` responds 204 to each message, and logs the message.

It implements as little HTTP as necessary, because the benchmark measures the sidecar. A line of the log has a message's
time of delivery, its number (the first word of its body), its queue, and its send time. A redelivered message is from
the retry topic and not from one of the topic's queues: its queue is logged as -1.

Dapr sends a message as one JSON text without its send time, which is then the second word of the body.
"""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
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
        at_us = time.time_ns() // 1000
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if b"ce-id" in fields:
            entry = _binary_entry(fields, body)
        elif b"Pubsubname" in fields:
            entry = _dapr_entry(fields, body)
        else:
            return  # Dapr asks for the app's configuration
        os.write(log, b"%d %s\n" % (at_us, entry))  # unbuffered: the app may be killed at any time


def _binary_entry(fields: Mapping[bytes, bytes], body: bytes) -> bytes:
    number = body.split(b" ", 1)[0]
    queue = fields[b"ce-rocketmqqueue"] if fields[b"ce-rotaattempt"] == b"1" else b"-1"
    return b"%s %s %s" % (number, queue, fields[b"ce-time"])


def _dapr_entry(fields: Mapping[bytes, bytes], body: bytes) -> bytes:
    number, sent_ms = json.loads(body)["data"].split(maxsplit=2)[:2]
    sent = datetime.fromtimestamp(int(sent_ms) / 1000, UTC).isoformat()
    return b"%s %s %s" % (number.encode(), fields[b"Rocketmq-Queue-Id"], sent.encode())


async def main(address: str, port: str, log: str = "") -> None:
    """Serve until the process is stopped."""
    server = await asyncio.get_running_loop().create_server(lambda: App(Path(log) if log else None), address, int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
