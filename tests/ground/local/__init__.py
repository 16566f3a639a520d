"""Local pods: a node whose pods run as plain processes, without root or containers.

The agent (`python -m ground.local`) plays kubelet. Each pod has an address of its own in 127.0.0.0/8, in the variable
`ROTA_LOCAL`, for its servers. Volumes are in the pod's folder; mount paths in commands, arguments and variables are
rewritten.
"""

import contextlib
import json
import shlex
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from ground import programs
from ground.api import Access
from ground.cluster import Cluster
from ground.controlplane import ControlPlane
from ground.instance import Instance
from ground.local.agent import LABEL, boot_id
from ground.local.processes import kill

__all__ = ["LABEL", "LocalNode"]

_AWAY = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
_SOURCES = Path(__file__).parents[2]


class LocalNode:
    """A node of an instance's cluster whose pods are processes; pods choose it by the label rota.dev/ground=local."""

    def __init__(
        self,
        instance: Instance,
        cluster: Cluster,
        name: str = "local",
        *,
        images: Mapping[str, Sequence[str]] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Describe it; `up` starts it. `images` say what to run for an image, `options` go to the agent as they are."""
        self.instance, self.cluster = instance, cluster
        self.program = self.label = name
        self.name = name if isinstance(cluster, ControlPlane) else f"{name}-{instance.name}"
        self.folder = instance.folder / name
        self.selector = {"kubernetes.io/hostname": self.name}  # exact, where a cluster has several local nodes
        self.tolerations = [{"key": LABEL, "operator": "Exists"}]  # of the taint that keeps others' pods away
        self._options = [f"--image={image}={shlex.join(argv)}" for image, argv in (images or {}).items()] + [*options]

    def up(self) -> None:
        """Start the agent if it does not run, and wait until its Node is Ready."""
        kubeconfig = self.cluster.kubeconfig
        if not isinstance(self.cluster, ControlPlane):  # the user's cluster stays when the instance goes
            kubectl = str(programs.program("kubectl"))
            self.instance.at_down(kubectl, "--kubeconfig", str(kubeconfig), "delete", "node", self.name)
        options = {
            "kubeconfig": kubeconfig,
            "node": self.name,
            "label": self.label,
            "folder": self.folder,
            "block": self.instance.block,
            "addresses": self.instance.folder / "addresses",  # one book for all nodes of the instance
        }
        argv = [sys.executable, "-m", "ground.local", *(f"--{key}={value}" for key, value in options.items())]
        argv += [] if isinstance(self.cluster, ControlPlane) else ["--guarded"]
        self.instance.start(self.program, [*argv, *self._options], env={"PYTHONPATH": str(_SOURCES)})
        self.instance.wait(self.program, self._ready, 30, "The agent of local pods")

    def down(self) -> None:
        """End the agent and all its containers, and take its Node away."""
        for program in (self.program, f"{self.program}-pods", f"{self.program}-watcher"):
            self.instance.stop(program)
        with contextlib.suppress(OSError):  # the control plane may be gone already
            self._ask("DELETE", f"/api/v1/nodes/{self.name}")

    def log(self, namespace: str, pod: str, container: str) -> Path:
        """Return where a container's output goes."""
        return self.folder / "pods" / f"{namespace}_{pod}" / f"{container}.log"

    def signal(self, namespace: str, pod: str, number: Signals) -> None:
        """Signal every process of a pod, as nearly at once as can be."""
        kill(f"{self.folder}/pods/{namespace}_{pod}/", number)

    def _ready(self) -> bool:
        try:
            node = self._ask("GET", f"/api/v1/nodes/{self.name}")
        except OSError:
            return False
        agent = self.instance.process(self.program)
        status = node.get("status", {})
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
        ours = agent is not None and status.get("nodeInfo", {}).get("bootID") == boot_id(agent.pid)
        away = any(taint["key"] in _AWAY for taint in node["spec"].get("taints", []))
        return ready and ours and not away

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        access = Access.read(self.cluster.kubeconfig)
        request = urllib.request.Request(access.server + path, method=method, headers=access.headers)
        with urllib.request.urlopen(request, timeout=5, context=access.trust) as answer:
            resource: dict[str, Any] = json.load(answer)
            return resource
