"""The Java consumer that posts messages to an app, as benchmarks compare it with a sidecar."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from bench.bench_member import HttpBridge
from ground import java
from ground.fixtures import skip_what_is_missing
from ground.peers import http_bridge, producer
from ground.poll import eventually
from ground.rocketmq import RocketMQ

MESSAGES = 300
QUEUES = 4
THREADS = 8


class RecordingApp(ThreadingHTTPServer):
    """An app that records requests, and rejects the first attempt of some messages."""

    daemon_threads = False  # `server_close` waits for them, and so for the end of all connections

    def __init__(self, address: str, rejected: frozenset[bytes] = frozenset()) -> None:
        super().__init__((address, 0), Recorder)
        self.rejected = rejected
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.connections: set[object] = set()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/"


class Recorder(BaseHTTPRequestHandler):
    """A connection of the consumer."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    server: RecordingApp

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((headers, body))
        self.server.connections.add(self.client_address)
        is_rejected = headers["ce-rotaattempt"] == "1" and body.split()[0] in self.server.rejected
        self.send_response(500 if is_rejected else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


@contextmanager
def recording_app(address: str, rejected: frozenset[bytes] = frozenset()) -> Iterator[RecordingApp]:
    with RecordingApp(address, rejected) as app:
        thread = Thread(target=app.serve_forever)
        thread.start()
        yield app
        app.shutdown()
        thread.join()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not java.javac():
        with skip_what_is_missing():
            java.classes()


def test_broker_java_bridge_posts_each_message_once_over_kept_alive_connections(rocketmq: RocketMQ) -> None:
    rocketmq.create_topic("posted", QUEUES)
    with recording_app(rocketmq.address) as app:
        bridge = http_bridge(rocketmq, "posters", "posted", app.url, threads=THREADS)
        sender = producer(rocketmq, "posted", MESSAGES, tags="odd")
        eventually(lambda: sender.done)
        eventually(lambda: bridge.count >= MESSAGES)
        bridge.stop()
        numbers = sorted(int(body.split()[0]) for _, body in app.requests)
        connections = len(app.connections)
    assert numbers == list(range(MESSAGES))
    assert connections <= THREADS


def test_broker_java_bridge_sends_the_headers_of_a_sidecar(rocketmq: RocketMQ) -> None:
    rocketmq.create_topic("described", 1)
    with recording_app(rocketmq.address) as app:
        bridge = http_bridge(rocketmq, "describers", "described", app.url)
        sender = producer(rocketmq, "described", 1, first=7, tags="odd")
        eventually(lambda: sender.done and app.requests)
        bridge.stop()
        [(headers, _)] = app.requests
    assert headers.pop("ce-id")
    assert headers.pop("ce-time").endswith("Z")
    assert {name: value for name, value in headers.items() if name.startswith(("ce-", "content-"))} == {
        "ce-specversion": "1.0",
        "ce-source": "/rocketmq/described",
        "ce-type": "dev.rota.rocketmq.message",
        "ce-rocketmqtopic": "described",
        "ce-rocketmqbroker": "broker-0",
        "ce-rocketmqqueue": "0",
        "ce-rocketmqoffset": "0",
        "ce-rocketmqtag": "odd",
        "ce-rocketmqkeys": "7",
        "ce-rotaattempt": "1",
        "content-type": "application/octet-stream",
        "content-length": "100",
    }


def test_broker_java_bridge_posts_to_the_app_of_benchmarks(rocketmq: RocketMQ) -> None:
    rocketmq.create_topic("measured", QUEUES)
    bridge = HttpBridge(rocketmq, "measurers", "measured", log=True)
    bridge.wait_for_queues()
    producer(rocketmq, "measured", MESSAGES)
    eventually(lambda: bridge.done() >= MESSAGES)
    bridge.end()
    deliveries = bridge.deliveries()
    assert len(deliveries) == MESSAGES
    assert {delivery.queue for delivery in deliveries} == set(range(QUEUES))
    assert all(0 <= delivery.at - delivery.sent < 60 for delivery in deliveries)


@pytest.mark.slow("the Java consumer that posts messages gets rejected ones again")
def test_broker_java_bridge_posts_a_rejected_message_again(rocketmq: RocketMQ) -> None:
    rocketmq.create_topic("rejected", 1)
    with recording_app(rocketmq.address, frozenset({b"3"})) as app:
        bridge = http_bridge(rocketmq, "rejecters", "rejected", app.url)
        producer(rocketmq, "rejected", 5)
        eventually(lambda: bridge.count >= 5)
        bridge.stop()
        attempts = [headers["ce-rotaattempt"] for headers, body in app.requests if body.split()[0] == b"3"]
    assert attempts == ["1", "2"]
