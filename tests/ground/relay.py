"""A TCP relay that can cut off some processes of this machine, and no others; it needs no privileges."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

Address = tuple[str, int]


class Relay(socketserver.ThreadingTCPServer):
    """Forwards every connection, except those of the processes that are cut off."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, here: Address, target: Address) -> None:
        """Listen on `here`, and forward to `target`."""
        super().__init__(here, _Passage)
        self.target = target
        self._mark = b""
        self._passing: set[socket.socket] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator["Relay"]:
        """Forward connections while the block runs."""
        with self:
            threading.Thread(target=self.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                self.shutdown()

    @contextlib.contextmanager
    def cut(self, mark: str) -> Iterator[None]:
        """Cut connections of processes whose environment contains `mark`, and refuse new ones while the block runs."""
        self._mark = mark.encode()
        for connection in [*self._passing]:
            if self.refuses(connection):
                _shut(connection)
        try:
            yield
        finally:
            self._mark = b""

    def refuses(self, connection: socket.socket) -> bool:
        """Whether a connection comes from a process that is cut off."""
        return bool(self._mark) and _inode(connection) in _socket_inodes(self._mark)

    @contextlib.contextmanager
    def passing(self, connection: socket.socket) -> Iterator[None]:
        """Register a connection while it is open, before the mark is checked: a cut misses none."""
        self._passing.add(connection)
        try:
            yield
        finally:
            self._passing.discard(connection)


class _Passage(socketserver.BaseRequestHandler):
    """One connection."""

    server: Relay

    def handle(self) -> None:
        """Forward both ways until one side ends."""
        with self.server.passing(self.request), contextlib.suppress(OSError):
            if self.server.refuses(self.request):
                return
            with socket.create_connection(self.server.target) as target:
                back = threading.Thread(target=_pass_on, args=(target, self.request), daemon=True)
                back.start()
                _pass_on(self.request, target)
                back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
    _shut(source)
    _shut(sink)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _inode(connection: socket.socket) -> str:
    """Return the inode of the other end of a connection within this machine."""
    with contextlib.suppress(OSError):
        ends = _proc_address(connection.getpeername()), _proc_address(connection.getsockname())
        for line in Path("/proc/net/tcp").read_text().splitlines():
            fields = line.split()
            if (fields[1], fields[2]) == ends:
                return fields[9]
    return ""


def _proc_address(address: Address) -> str:
    """Format an address as /proc/net/tcp does."""
    host, port = address
    return f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"


def _socket_inodes(mark: bytes) -> set[str]:
    """Return the inodes of all sockets of processes whose environment contains `mark`."""
    targets = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if mark in (process / "environ").read_bytes():
                    targets |= {_target(link) for link in (process / "fd").iterdir()}
    return {target[len("socket:[") : -1] for target in targets if target.startswith("socket:[")}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""
