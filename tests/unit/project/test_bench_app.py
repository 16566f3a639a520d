"""The app of benchmarks: what it logs of messages in each client's format."""

import asyncio
import json
from pathlib import Path

import pytest

from bench.app import ANSWER, App
from bench.bench_member import Delivered

BODY = b"17 1764000000250  "
SENT = 1764000000.25
FIELDS = (
    b"ce-id: 1\r\nce-time: 2025-11-24T16:00:00.250Z\r\nce-rocketmqqueue: 3\r\nce-rotaattempt: %d\r\n"
    b"content-type: application/octet-stream\r\n"
)
DAPR_BODY = json.dumps({"id": "1", "data": BODY.decode(), "time": "2025-11-24T16:00:01Z"}).encode()


class Responses(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written.append(data)


def respond(log: Path, *parts: bytes) -> list[bytes]:
    app = App(log)
    responses = Responses()
    app.connection_made(responses)
    for part in parts:
        app.data_received(part)
    return responses.written


def rota(attempt: int = 1, length: bytes = b"content-length") -> bytes:
    return b"POST / HTTP/1.1\r\n%s%s: %d\r\n\r\n%s" % (FIELDS % attempt, length, len(BODY), BODY)


def dapr() -> bytes:
    fields = b"Content-Type: application/cloudevents+json\r\nPubsubname: mq\r\nRocketmq-Queue-Id: 3\r\n"
    return b"POST / HTTP/1.1\r\nContent-Length: %d\r\n%s\r\n%s" % (len(DAPR_BODY), fields, DAPR_BODY)


@pytest.mark.parametrize(
    "request_bytes", [rota(), rota(length=b"Content-Length"), dapr()], ids=["rota", "java", "dapr"]
)
def test_push_benchmark_app_logs_a_message(tmp_path: Path, request_bytes: bytes) -> None:
    log = tmp_path / "log"
    assert respond(log, request_bytes[:100], request_bytes[100:] + request_bytes) == [ANSWER, ANSWER]
    deliveries = [Delivered(line) for line in log.read_text().splitlines()]
    assert [(delivery.number, delivery.queue, delivery.sent) for delivery in deliveries] == [("17", 3, SENT)] * 2


def test_push_benchmark_app_logs_no_queue_of_a_redelivered_message(tmp_path: Path) -> None:
    log = tmp_path / "log"
    respond(log, rota(attempt=2))
    assert [Delivered(line).queue for line in log.read_text().splitlines()] == [-1]


def test_push_benchmark_app_does_not_log_what_dapr_asks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert respond(log, b"GET /dapr/config HTTP/1.1\r\nHost: app\r\n\r\n") == [ANSWER]
    assert log.read_text() == ""
