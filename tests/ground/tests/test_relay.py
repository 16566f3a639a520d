"""A way that is cut for some processes, and open for others."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ground.relay import Relay

MARK = "ROTA_TEST_OF_RELAY=it"
# Says hello once connected, then one line for each that it is told to send: what came back, or that nothing can.
CLIENT = """
import socket, sys
way = None
for word in sys.stdin:
    try:
        way = way or socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
        way.sendall(word.encode())
        answer = way.recv(100).decode().strip()
    except OSError:
        answer = ""
    if not answer:
        way = None
    print(answer or "broken", flush=True)
"""


@pytest.fixture
def echo() -> Iterator[int]:
    """Answer with what was said."""

    def serve(server: socket.socket) -> None:
        while True:
            try:
                one, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=repeat, args=(one,), daemon=True).start()

    def repeat(one: socket.socket) -> None:
        with one:
            while data := one.recv(100):
                one.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


class Client:
    """A process of its own that says words, and hears what comes back."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def says(self, word: str) -> str:
        """Return the answer."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextmanager
def a_client(port: int, **env: str) -> Iterator[Client]:
    argv = [sys.executable, "-c", CLIENT, str(port)]
    both = subprocess.PIPE
    with subprocess.Popen(argv, stdin=both, stdout=both, text=True, env={**os.environ, **env}) as process:
        yield Client(process)
        process.kill()


def test_relay_cut_blocks_old_and_new_connections_of_marked_processes_only(echo: int) -> None:
    name, _, value = MARK.partition("=")
    with (
        Relay(("127.0.0.1", 0), ("127.0.0.1", echo)).running() as relay,
        a_client(relay.server_address[1], **{name: value}) as lonely,
        a_client(relay.server_address[1]) as other,
    ):
        assert [lonely.says("one"), other.says("one")] == ["one", "one"]
        with relay.cut(MARK):
            assert [lonely.says("two"), other.says("two")] == ["broken", "two"]
            assert [lonely.says("three"), other.says("three")] == ["broken", "three"]
        assert [lonely.says("four"), other.says("four")] == ["four", "four"]
