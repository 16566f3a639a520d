"""Simulated nodes and pods (kwok), thousands of them, on a real control plane.

Pods get a status and nothing else: no containers, probes, logs or files.
"""

import json
from functools import partial
from pathlib import Path

from ground import programs
from ground.cluster import Cluster
from ground.instance import Instance
from ground.poll import answers

_MARK = "kwok.x-k8s.io/node"
_PODS = 1100  # on a node


class Kwok:
    """A kwok that plays kubelet for its own nodes only."""

    # The fields of a pod's spec that let it be simulated.
    selector = {_MARK: "fake"}  # noqa: RUF012 - never changed
    tolerations = [{"key": _MARK, "operator": "Exists"}]  # noqa: RUF012

    def __init__(self, instance: Instance, control_plane: Cluster, addresses: str = "") -> None:
        """Describe the program; `up` starts it. `addresses` is the pods' range, such as 127.64.0.1/16."""
        self.instance = instance
        self.control_plane = control_plane
        self.addresses = addresses

    def up(self) -> None:
        """Start the program and wait until it responds."""
        programs.ensure("kwok")
        address = f"{self.instance.address()}:{self.instance.port('kwok', 10247)}"
        flags = {
            "kubeconfig": self.control_plane.kubeconfig,
            "manage-all-nodes": "false",
            "manage-nodes-with-annotation-selector": f"{_MARK}=fake",
            "node-lease-duration-seconds": 40,
            "server-address": address,
            "v": "WARN",  # else it logs a line for each pod
        }
        if self.addresses:
            flags["cidr"] = self.addresses
        argv: list[str | Path] = [programs.program("kwok"), *(f"--{name}={value}" for name, value in flags.items())]
        self.instance.start("kwok", argv, env={"HOME": str(self.instance.folder)})  # kwok would read ~/.kwok
        self.instance.wait("kwok", partial(answers, f"http://{address}/healthz"), 30, "kwok")

    def down(self) -> None:
        """Delete the simulated nodes and end the program."""
        self.control_plane.kubectl("delete", "nodes", "--selector", f"{_MARK}=fake", "--wait=false", check=False)
        self.instance.stop("kwok")

    def nodes(self, count: int) -> list[str]:
        """Create simulated nodes until `count` are Ready, and return their names."""
        names = [f"kwok-{number}" for number in range(count)]
        nodes = {"apiVersion": "v1", "kind": "List", "items": [_node(name) for name in names]}
        self.control_plane.kubectl("apply", "--server-side", "-f", "-", feed=json.dumps(nodes))
        ready = ("wait", "--for=condition=Ready", "--timeout=180s", *(f"node/{name}" for name in names))
        self.control_plane.kubectl(*ready)
        return names


def _node(name: str) -> dict[str, object]:
    labels = {_MARK: "fake", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/role": "agent"}
    room = {"cpu": "1000", "memory": "1Ti", "pods": str(_PODS)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {_MARK: "fake"}, "labels": labels},
        "spec": {"taints": [{"key": _MARK, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }
