"""What fleets stand on where the node is a real one: kubelet, containers of our images, the operator by its chart."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from shutil import copy

from bench import app
from bench.fleets import PODS, Ground, an_app
from chart.charts import Helm
from e2e.consumers import broker_of
from e2e.release import Installation
from ground.api import Object
from ground.instance import Instance
from ground.node import RealNode

APPS = "/deliveries"  # where an app and its notes are, in its container


class NodeGround(Ground):
    """A node, and a broker that its pods can reach."""

    def __init__(self, instance: Instance) -> None:
        """Describe it."""
        super().__init__(instance)
        self._node = RealNode(instance)

    def up(self) -> None:
        """Start node and broker, and install the chart."""
        self.deliveries.mkdir()
        self.deliveries.chmod(0o777)  # apps are not root
        copy(str(app.__file__), self.deliveries / "app.py")
        self._node.up()
        self.rocketmq = broker_of(self._node)  # which has an address by now
        self.rocketmq.up()
        Installation.build(self._node, Helm(self.instance.folder)).ensure_installed()
        self.connect(self._node.kubeconfig)

    def pods(self, log: str) -> Object:
        """Have the app in a container; it listens at the pod's address, where the kubelet asks whether it does."""
        argv = ["python", f"{APPS}/app.py", "0.0.0.0", "8080", f"{APPS}/{log}"]  # noqa: S104 - the pod's own
        container = an_app("rota.local/sidecar:test", argv)
        container["volumeMounts"] = [{"name": "deliveries", "mountPath": APPS}]
        volume = {"name": "deliveries", "hostPath": {"path": str(self.deliveries)}}
        return {"containers": [container], "volumes": [volume]}

    def signal(self, pod: str, number: signal.Signals) -> None:
        """Signal the processes of its containers, as this machine sees them, but not that which holds its network."""
        uid = self.runner.run(self.api.get(f"{PODS}/{pod}"))["metadata"]["uid"]
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                is_of_pod = f"/pod{uid}/" in (process / "cgroup").read_text()
                if is_of_pod and (process / "comm").read_text().strip() != "pause":
                    os.kill(int(process.name), number)
