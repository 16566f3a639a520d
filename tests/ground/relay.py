"""A way to a server that can be cut for some processes of this machine, and for nobody else; it needs no rights."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

Address = tuple[str, int]


class Relay(socketserver.ThreadingTCPServer):
    """Passes on whatever comes, but nothing of the processes that it was told to cut off."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, here: Address, there: Address) -> None:
        """Listen here, and lead there."""
        super().__init__(here, _Passage)
        self.there, self._mark = there, b""
        self._passing: set[socket.socket] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator["Relay"]:
        """Pass on meanwhile."""
        with self:
            threading.Thread(target=self.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                self.shutdown()

    @contextlib.contextmanager
    def cut(self, mark: str) -> Iterator[None]:
        """Break what is open of the processes in whose environment this stands, and take nothing of them meanwhile."""
        self._mark = mark.encode()
        for one in [*self._passing]:
            if self.refuses(one):
                _shut(one)
        try:
            yield
        finally:
            self._mark = b""

    def refuses(self, one: socket.socket) -> bool:
        """Whether a connection comes from who is cut off."""
        return bool(self._mark) and _inode(one) in _sockets(self._mark)

    @contextlib.contextmanager
    def passing(self, one: socket.socket) -> Iterator[None]:
        """Know of a connection while it is open: before it is looked at, so that a cut misses none."""
        self._passing.add(one)
        try:
            yield
        finally:
            self._passing.discard(one)


class _Passage(socketserver.BaseRequestHandler):
    """One connection."""

    server: Relay

    def handle(self) -> None:
        """Pass on both ways until one side ends."""
        with self.server.passing(self.request), contextlib.suppress(OSError):
            if self.server.refuses(self.request):
                return
            with socket.create_connection(self.server.there) as there:
                back = threading.Thread(target=_pass_on, args=(there, self.request), daemon=True)
                back.start()
                _pass_on(self.request, there)
                back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
    _shut(source)
    _shut(sink)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _inode(one: socket.socket) -> str:
    """Return by which number the kernel knows the other end of a connection within this machine."""
    with contextlib.suppress(OSError):
        ends = _spelled(one.getpeername()), _spelled(one.getsockname())
        for line in Path("/proc/net/tcp").read_text().splitlines():
            fields = line.split()
            if (fields[1], fields[2]) == ends:
                return fields[9]
    return ""


def _spelled(address: Address) -> str:
    """Spell an address as the kernel does."""
    host, port = address
    return f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"


def _sockets(mark: bytes) -> set[str]:
    """Return the numbers of all sockets of processes in whose environment this stands."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if mark in (process / "environ").read_bytes():
                    found |= {_target(it) for it in (process / "fd").iterdir()}
    return {it[len("socket:[") : -1] for it in found if it.startswith("socket:[")}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # it is closed meanwhile
        return ""
