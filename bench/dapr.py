"""Dapr's sidecar and an app as processes: daprd consumes a topic by its RocketMQ component and posts each message.

Dapr is not built here: `ROTA_BENCH_DAPRD` names the program daprd.
"""

import json
import os
import re
import urllib.request
from pathlib import Path

from bench.bench_member import APP_PORT, TOPIC, BenchApp, Delivered
from ground.rocketmq import RocketMQ
from rota.spec import Push

_HTTP_PORT = 3500
_GRPC_PORT = 50001
_INTERNAL_PORT = 50002
_METRICS_PORT = 9090
_START_SECONDS = 30
_DONE = re.compile(r'^dapr_component_pubsub_ingress_count\{[^}]*process_status="success"[^}]*\} (\S+)$', re.MULTILINE)


def find_daprd() -> str:
    """Return the path of daprd, or an empty text."""
    return os.environ.get("ROTA_BENCH_DAPRD", "")


class DaprSidecar:
    """A daprd with as many concurrent requests as a sidecar's, and its app.

    `pull_pause_ms` is the pause between two pulls of a queue; the component's default is 100.
    """

    def __init__(
        self, rocketmq: RocketMQ, group: str, topic: str = TOPIC, *, pull_pause_ms: int, log: bool = False
    ) -> None:
        """Start both; daprd waits for its app."""
        self.instance = rocketmq.instance
        self._app = BenchApp(self.instance, log=log)
        self._address = self._app.address
        self._app.start()
        settings = {
            "nameServer": rocketmq.name_server,
            "consumerGroup": group,
            "fromWhere": "ConsumeFromFirstOffset",
            "pullInterval": str(pull_pause_ms),
        }
        self._write_resources(topic, settings)
        self.name = f"{self._app.member}-daprd"
        self.process = self.instance.start(self.name, self._command(group))
        self.instance.wait(self.name, self._is_ready, _START_SECONDS, "daprd")

    def _write_resources(self, topic: str, settings: dict[str, str]) -> None:
        component = {
            "apiVersion": "dapr.io/v1alpha1",
            "kind": "Component",
            "metadata": {"name": "messages"},
            "spec": {
                "type": "pubsub.rocketmq",
                "version": "v1",
                "metadata": [{"name": name, "value": value} for name, value in settings.items()],
            },
        }
        subscription = {
            "apiVersion": "dapr.io/v2alpha1",
            "kind": "Subscription",
            "metadata": {"name": "messages"},
            "spec": {"pubsubname": "messages", "topic": topic, "routes": {"default": "/"}},
        }
        for resource in (component, subscription):
            name = str(resource["kind"]).lower()
            (self._resources / f"{name}.yaml").write_text(json.dumps(resource))  # JSON is YAML

    @property
    def _resources(self) -> Path:
        folder = self._app.folder / "resources"
        folder.mkdir(exist_ok=True)
        return folder

    def _command(self, app_id: str) -> list[str]:
        options = {
            "app-id": app_id,
            "app-port": APP_PORT,
            "app-channel-address": self._address,
            "app-max-concurrency": Push().concurrency,
            "resources-path": self._resources,
            "dapr-listen-addresses": self._address,
            "dapr-http-port": _HTTP_PORT,
            "dapr-grpc-port": _GRPC_PORT,
            "dapr-internal-grpc-listen-address": self._address,
            "dapr-internal-grpc-port": _INTERNAL_PORT,
            "metrics-listen-address": self._address,
            "metrics-port": _METRICS_PORT,
        }
        return [find_daprd(), *(f"--{name}={value}" for name, value in options.items())]

    def _is_ready(self) -> bool:
        return self._get(_HTTP_PORT, "v1.0/healthz") is not None

    def _get(self, port: int, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://{self._address}:{port}/{path}", timeout=5) as response:
                text: str = response.read().decode()
        except OSError:
            return None
        return text

    def done(self) -> int:
        """Return how many messages the app has accepted."""
        return round(sum(map(float, _DONE.findall(self._get(_METRICS_PORT, "metrics") or ""))))

    def deliveries(self) -> list[Delivered]:
        """Return the app's log; it is complete once both processes have ended."""
        return self._app.deliveries()

    def end(self) -> None:
        """Stop daprd gracefully, then the app."""
        self.instance.stop(self.name, grace=30)
        self._app.end()
