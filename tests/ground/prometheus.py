"""A real Prometheus that scrapes every second."""

import json
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ground import packages
from ground.instance import Instance
from ground.poll import answers

_CONFIG = {
    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
    "scrape_configs": [{"job_name": "ground", "file_sd_configs": [{"files": ["targets.json"]}]}],
}


def promtool() -> Path:
    """Return Prometheus' own tool, which checks rules and metrics."""
    return _program("promtool")


def _program(name: str) -> Path:
    if not shutil.which(name):
        packages.debian("prometheus")
    return Path(shutil.which(name) or f"/usr/bin/{name}")


class Prometheus:
    """A Prometheus of one instance."""

    def __init__(self, instance: Instance, targets: Sequence[str]) -> None:
        """Describe the server; `up` starts it. A target is an "ip:port" that serves /metrics."""
        self.instance = instance
        self._targets = targets

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://{self.instance.address()}:{self.instance.port('prometheus', 9090)}"

    def up(self) -> None:
        """Start the server and wait until it answers queries."""
        if not self.instance.process("prometheus") or self._targets:
            self.scrape(self._targets)
        config = self.instance.write("prometheus/prometheus.yml", json.dumps(_CONFIG))  # JSON is YAML
        flags = {
            "config.file": config,
            "storage.tsdb.path": self.instance.folder / "prometheus" / "data",
            "web.listen-address": self.url.removeprefix("http://"),
            "log.level": "warn",
            "enable-feature": "exemplar-storage",
        }
        self.instance.start("prometheus", [_program("prometheus"), *(f"--{key}={flags[key]}" for key in flags)])
        self.instance.wait("prometheus", partial(answers, f"{self.url}/-/ready"), 30, "Prometheus")

    def down(self) -> None:
        """Stop the server and remove its data."""
        self.instance.stop("prometheus", grace=2)
        shutil.rmtree(self.instance.folder / "prometheus", ignore_errors=True)

    def scrape(self, targets: Sequence[str], labelled: Sequence[str] = (), **labels: str) -> None:
        """Scrape these targets from now on, the labelled ones with these labels; no restart is needed."""
        groups = [{"targets": list(targets)}, {"targets": list(labelled), "labels": labels}]
        self.instance.write("prometheus/targets.json", json.dumps(groups))

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the present samples of an expression: each with its `metric` labels and `value` (time and text)."""
        return self._query_result("query", query=expression)

    def graph(self, expression: str, seconds: float) -> list[dict[str, Any]]:
        """Return the samples of an expression over the last seconds: each with its `metric` labels and `values`."""
        now = time.time()
        return self._query_result("query_range", query=expression, start=now - seconds, end=now, step=1)

    def exemplars(self, expression: str, seconds: float) -> list[dict[str, Any]]:
        """Return the exemplars of an expression's series: each with `seriesLabels` and `exemplars`."""
        now = time.time()
        exemplars: list[dict[str, Any]] = self._data("query_exemplars", query=expression, start=now - seconds, end=now)
        return exemplars

    def _query_result(self, what: str, **parameters: str | float) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._data(what, **parameters)["result"]
        return result

    def _data(self, what: str, **parameters: str | float) -> Any:
        address = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]
