"""An HTTP proxy in front of a server that refuses, delays or loses requests as a test asks.

Run as a program, `faults.py HOST PORT STATUS CODE EVERY TEXT`, it prints its URL, and answers every n-th of the
requests whose path contains a text with a status and an error code of S3.
"""

import contextlib
import http.client
import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

Address = tuple[str, int]
_NOT_FORWARDED = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"}


class Request(NamedTuple):
    """A request that has arrived."""

    method: str
    path: str


@contextlib.contextmanager
def proxy_process(target: Address, status: int, code: str, *, every: int = 1, path_has: str = "") -> Iterator[str]:
    """Run a proxy as a process, and yield its URL: for clients that hold Python's global lock while they wait."""
    arguments = [target[0], str(target[1]), str(status), code, str(every), path_has]
    with subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


class FaultProxy(ThreadingHTTPServer):
    """Forwards requests to a server, but those that match a fault."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, target: Address) -> None:
        """Listen on loopback, on a free port."""
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.target = target
        self.requests: list[Request] = []  # all that have arrived
        self.fault: Callable[[_Exchange], None] | None = None
        self._remaining: int | None = None  # requests until the fault is over; None: no end
        self._open: set[socket.socket] = set()
        self.released = threading.Event()  # ends the wait of held requests

    @property
    def endpoint(self) -> str:
        """The proxy's URL."""
        return f"http://127.0.0.1:{self.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        """Forward requests while the block runs."""
        with self:
            thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.released.set()
                self.shutdown()
                thread.join()
                for connection in [*self._open]:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def answer(self, status: int, body: bytes = b"", *, times: int | None = None) -> None:
        """Answer further requests, all or so many, with this status; these are not forwarded."""
        self.fault = lambda exchange: exchange.reply(status, {}, body)
        self._remaining = times

    def hold(self) -> None:
        """Accept all further requests, and answer none."""
        self.fault = lambda exchange: exchange.hold()

    def cut_uploads(self, after_bytes: int) -> None:
        """End the connection of each further upload within its body; nothing of it is forwarded."""
        self.fault = lambda exchange: exchange.cut(after_bytes)

    def lose_answers(self) -> None:
        """Forward further requests, and end the connection instead of answering."""
        self.fault = lambda exchange: exchange.lose_answer()

    def ignore_conditions(self) -> None:
        """Forward further requests without their conditions, as servers do that do not know these."""
        self.fault = lambda exchange: exchange.forward_unconditionally()

    def heal(self) -> None:
        """Forward all further requests."""
        self.fault = None
        self._remaining = None

    def take_fault(self) -> "Callable[[_Exchange], None] | None":
        """Return the fault that the next request meets."""
        if self._remaining is not None:
            if self._remaining == 0:
                return None
            self._remaining -= 1
        return self.fault

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Register the connection, so that the end of the proxy ends it."""
        if isinstance(request, socket.socket):
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Forget a connection that has ended."""
        if isinstance(request, socket.socket):
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients end connections while a request is held: that is no error."""


class _Exchange(BaseHTTPRequestHandler):
    """One connection."""

    server: FaultProxy
    protocol_version = "HTTP/1.1"
    _read: bytes | None = None  # the present request's body

    def handle_one_request(self) -> None:
        """Read one request and answer it."""
        self.raw_requestline = self.rfile.readline(2**16)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        self.server.requests.append(Request(self.command, self.path))
        self._read = None
        fault = self.server.take_fault()
        if fault:
            fault(self)
        else:
            self.reply(*self._forward())
        self.wfile.flush()

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Answer the client."""
        self._body()
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def hold(self) -> None:
        """Do not answer until the proxy ends."""
        self.server.released.wait()
        self.close_connection = True

    def cut(self, after_bytes: int) -> None:
        """End the connection within the body."""
        self.rfile.read(min(after_bytes, int(self.headers.get("Content-Length", 0))))
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def lose_answer(self) -> None:
        """Forward the request, and end the connection."""
        self._forward()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def forward_unconditionally(self) -> None:
        """Forward the request without the condition that no such object exists."""
        del self.headers["If-None-Match"]
        self.reply(*self._forward())

    def _body(self) -> bytes:
        """Return the request's body, which is read once."""
        if self._read is None:
            self._read = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return self._read

    def _forward(self) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.server.target, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_FORWARDED}
            connection.request(self.command, self.path, self._body(), headers)
            answer = connection.getresponse()
            body = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in _NOT_FORWARDED}
            if self.command == "HEAD":  # the length is that of the object
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            return answer.status, kept, body
        finally:
            connection.close()


def main(host: str, port: str, *fault: str) -> None:
    """Run a proxy until the process is ended."""
    status, code, every, path_has = fault
    numbers = itertools.count(1)
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()

    def answer(exchange: _Exchange) -> None:
        if path_has in exchange.path and next(numbers) % int(every) == 0:
            exchange.reply(int(status), {}, b"" if exchange.command == "HEAD" else body)
        else:
            exchange.reply(*exchange._forward())

    with FaultProxy((host, int(port))) as proxy:
        proxy.fault = answer
        print(proxy.endpoint, flush=True)
        proxy.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
