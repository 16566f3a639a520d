"""The fleets' environment with a real node: kubelet, containers of our images, the operator installed by its chart."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from shutil import copy

from bench import app
from bench.fleets import PODS, Ground, app_container
from chart.charts import Helm
from e2e.consumers import broker_of
from e2e.release import Installation
from ground.api import Object
from ground.instance import Instance
from ground.node import RealNode

APPS = "/deliveries"  # in its container, the folder of the app and its log


class NodeGround(Ground):
    """A real node, and a broker that its pods can reach."""

    def __init__(self, instance: Instance) -> None:
        """Start nothing yet."""
        super().__init__(instance)
        self._node = RealNode(instance)

    def up(self) -> None:
        """Start node and broker, and install the chart."""
        self.deliveries.mkdir()
        self.deliveries.chmod(0o777)  # apps do not run as root
        copy(str(app.__file__), self.deliveries / "app.py")
        self._node.up()
        self.rocketmq = broker_of(self._node)  # needs the node's address, known after its start
        self.rocketmq.up()
        Installation.build(self._node, Helm(self.instance.folder)).ensure_installed()
        self.connect(self._node.kubeconfig)

    def pods(self, log: str) -> Object:
        """Return a spec whose app is a container; it listens at the pod's address, which the kubelet probes."""
        argv = ["python", f"{APPS}/app.py", "0.0.0.0", "8080", f"{APPS}/{log}"]  # noqa: S104 - the pod's own
        container = app_container("rota.local/sidecar:test", argv)
        container["volumeMounts"] = [{"name": "deliveries", "mountPath": APPS}]
        volume = {"name": "deliveries", "hostPath": {"path": str(self.deliveries)}}
        return {"containers": [container], "volumes": [volume]}

    def signal(self, pod: str, number: signal.Signals) -> None:
        """Send the signal to all processes of the pod but the pause container's, which holds the pod's network."""
        uid = self.runner.run(self.api.get(f"{PODS}/{pod}"))["metadata"]["uid"]
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
                is_of_pod = f"/pod{uid}/" in (process / "cgroup").read_text()
                if is_of_pod and (process / "comm").read_text().strip() != "pause":
                    os.kill(int(process.name), number)
