"""A relay that is cut for some processes, and open for others."""

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
# Prints one line for each word on its input: the answer of the server, or "broken" where no answer is possible.
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
    """Echo every word."""

    def serve(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=repeat, args=(connection,), daemon=True).start()

    def repeat(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


class Client:
    """A process of its own that sends words and reads the answers."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def send(self, word: str) -> str:
        """Send a word and return the answer."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextmanager
def start_client(port: int, **env: str) -> Iterator[Client]:
    argv = [sys.executable, "-c", CLIENT, str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **env}) as process:
        yield Client(process)
        process.kill()


def test_relay_cut_blocks_old_and_new_connections_of_marked_processes_only(echo: int) -> None:
    name, _, value = MARK.partition("=")
    with (
        Relay(("127.0.0.1", 0), ("127.0.0.1", echo)).running() as relay,
        start_client(relay.server_address[1], **{name: value}) as marked,
        start_client(relay.server_address[1]) as unmarked,
    ):
        assert [marked.send("one"), unmarked.send("one")] == ["one", "one"]
        with relay.cut(MARK):
            assert [marked.send("two"), unmarked.send("two")] == ["broken", "two"]
            assert [marked.send("three"), unmarked.send("three")] == ["broken", "three"]
        assert [marked.send("four"), unmarked.send("four")] == ["four", "four"]
