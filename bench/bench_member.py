"""A member as processes: a sidecar, or a Java push consumer that posts messages itself, each with an app."""

import os
import re
import sys
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compiled import compiled_package
from ground import peers
from ground.instance import Instance, Process
from ground.poll import eventually
from ground.rocketmq import RocketMQ
from rota.documents import Assignment, Share, encode_assignment
from rota.model import Queue
from rota.signing import KEY_BYTES
from rota.spec import Push, parse_group
from rota.spec.resolved import encode_settings

TOPIC = "bench"  # of members that are given no other
QUEUES = 16
APP_PORT = 8080
_ROOT = Path(__file__).parent.parent


class Delivered:
    """A delivery as the app logged it."""

    def __init__(self, line: str) -> None:
        """Parse a line of the app's log."""
        at, self.number, queue, sent = line.split()
        self.at = int(at) / 1e6
        self.queue = int(queue)
        self.sent = datetime.fromisoformat(sent).astimezone(UTC).timestamp()


class BenchApp:
    """The app of a member, at an address of its own."""

    _count = 0

    def __init__(self, instance: Instance, *, log: bool) -> None:
        """Choose a name and an address; `start` starts the process."""
        BenchApp._count += 1
        self.member = f"member-{BenchApp._count}"
        self.address = instance.address(100 + BenchApp._count)
        self.folder = instance.folder / self.member
        self.folder.mkdir()
        self._instance = instance
        self._log = self.folder / "deliveries" if log else None

    def start(self, mode: str = "Push") -> None:
        """Start the app: it serves HTTP, or polls the sidecar (mode Pull)."""
        arguments = ["-m", "bench.app", self.address, str(APP_PORT), *([str(self._log)] if self._log else [])]
        if mode == "Pull":
            arguments = ["-m", "bench.asker", self.address]
        self._instance.start(f"{self.member}-app", [sys.executable, *arguments], cwd=_ROOT)

    def deliveries(self) -> list[Delivered]:
        """Return the app's log, if it writes one; it is complete once the member has ended."""
        return list(map(Delivered, self._log.read_text().splitlines())) if self._log else []

    def end(self) -> None:
        """Stop the process."""
        self._instance.stop(f"{self.member}-app")


class BenchMember:
    """A sidecar and its app; a folder stands for the pod's mounted ConfigMap."""

    def __init__(
        self, rocketmq: RocketMQ, group: str, *, topic: str = TOPIC, log: bool = False, **options: Any
    ) -> None:
        """Start both; the member owns no queues yet."""
        self.instance = rocketmq.instance
        self._app = BenchApp(self.instance, log=log)
        self.name = self._app.member
        self.address = self._app.address
        self.folder = self._app.folder
        mode = options.pop("mode", "Push")
        program = options.pop("program", ("-m", "rota.sidecar"))
        # A sidecar's image has compiled modules.
        self._package = compiled_package() if options.pop("compiled", True) else _ROOT / "operator"
        spec = {
            "broker": {"rocketmq": {"nameServers": [rocketmq.name_server]}},
            "subscriptions": [{"topic": topic}],
            "group": group,
            "startFrom": options.pop("startFrom", {"position": "Earliest"}),
            "delivery": {"mode": mode, "push": options},
        }
        self._write_files(group, spec)
        self.process = self.instance.start(self.name, [sys.executable, *program], env=self._environment())
        self.instance.wait(self.name, lambda: bool(self.get("healthz")), 30, "the sidecar")
        self._app.start(mode)

    def _write_files(self, group: str, spec: dict[str, Any]) -> None:
        for folder in ("documents", "state", "key"):
            (self.folder / folder).mkdir()
        (self.folder / "key/current").write_bytes(os.urandom(KEY_BYTES))
        settings = encode_settings(group, parse_group({"metadata": {"name": group}, "spec": spec}), 30, None)
        (self.folder / "documents/group.json").write_text(settings)

    def _environment(self) -> dict[str, str]:
        return {
            "POD_NAME": self.name,
            "POD_NAMESPACE": "bench",
            "POD_UID": f"uid-{self.name}",
            "POD_IP": self.address,
            "ROTA_LOCAL": self.address,
            "ROTA_DOCUMENTS": str(self.folder / "documents"),
            "ROTA_STATE": str(self.folder / "state"),
            "ROTA_KEY": str(self.folder / "key"),
            "PYTHONPATH": str(self._package),
        }

    def give(self, generation: int, queues: Sequence[Queue]) -> None:
        """Write an assignment that gives these queues to the member."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        members = {self.name: Share(f"uid-{self.name}", tuple(queues))}
        document = Assignment(group="bench/bench", generation=generation, issued_at=now, members=members)
        for name, text in encode_assignment(document).items():
            new = self.folder / f"documents/{name}.new"
            new.write_text(text) if isinstance(text, str) else new.write_bytes(text)
            new.rename(self.folder / "documents" / name)

    def get(self, path: str) -> str:
        """Return a response of the sidecar, or an empty text if it does not respond."""
        try:
            with urllib.request.urlopen(f"http://{self.address}:9911/{path}", timeout=5) as response:
                text: str = response.read().decode()
        except OSError:
            return ""
        return text

    def done(self) -> int:
        """Return how many messages the sidecar has delivered."""
        counts = re.findall(
            r'^rota_sidecar_messages_total\{[^}]*outcome="done"[^}]*\} (\S+)$', self.get("metrics"), re.MULTILINE
        )
        return round(sum(map(float, counts)))

    def deliveries(self) -> list[Delivered]:
        """Return the app's log; it is complete once both processes have ended."""
        return self._app.deliveries()

    def end(self) -> None:
        """Stop the sidecar gracefully, then the app."""
        self.instance.stop(self.name, grace=30)
        self._app.end()


class HttpBridge:
    """A Java push consumer that posts each message to an app, with as many concurrent requests as a sidecar's."""

    def __init__(
        self, rocketmq: RocketMQ, group: str, topic: str = TOPIC, *, log: bool = False, **options: Any
    ) -> None:
        """Start both; the consumer gets its queues by Java's own rebalance."""
        self._app = BenchApp(rocketmq.instance, log=log)
        self._app.start()
        url = f"http://{self._app.address}:{APP_PORT}/"
        self.peer = peers.http_bridge(rocketmq, group, topic, url, threads=Push().concurrency, **options)
        process = rocketmq.instance.process(self.peer.program)
        assert process  # noqa: S101 - it was just started
        self.process: Process = process

    def wait_for_queues(self) -> None:
        """Wait for the first rebalance: it is usually done at once, otherwise after 20 s."""
        eventually(lambda: self.peer.lines("rebalance"), 60)

    def done(self) -> int:
        """Return how many messages the app has accepted."""
        return self.peer.count

    def deliveries(self) -> list[Delivered]:
        """Return the app's log; it is complete once both processes have ended."""
        return self._app.deliveries()

    def end(self) -> None:
        """Stop the consumer, then the app."""
        self.peer.stop()
        self._app.end()
