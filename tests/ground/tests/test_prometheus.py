"""The Prometheus of the ground."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ground.fixtures import skip_what_is_missing
from ground.instance import Instance
from ground.poll import eventually
from ground.prometheus import Prometheus, promtool


class Exporter(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(b'# TYPE answer gauge\nanswer{to="everything"} 42\n')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def exporter(instance: Instance) -> Iterator[str]:
    with ThreadingHTTPServer((instance.address(), 0), Exporter) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"{instance.address()}:{server.server_port}"
        server.shutdown()
        thread.join()


def test_prometheus_scrapes_an_exporter_and_answers_queries(instance: Instance, exporter: str) -> None:
    with skip_what_is_missing():
        promtool()  # of the same package
    prometheus = Prometheus(instance, [exporter])
    try:
        prometheus.up()
        (sample,) = eventually(lambda: prometheus.query('answer{to="everything"}'))
        assert sample["metric"]["instance"] == exporter
        assert float(sample["value"][1]) == 42
    finally:
        prometheus.down()
    assert instance.process("prometheus") is None
