"""A cluster of one node that kind makes in Docker.

kind is built from its Go module, because node images fit one version of it. Docker must be installed by the user.
"""

import ipaddress
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from ground import cache, programs
from ground.cluster import PROJECT, NodeCluster
from ground.instance import Instance
from ground.report import Missing, progress

# The image that was published with the version of kind in go/oracles/go.mod.
IMAGE = f"kindest/node:{programs.KUBERNETES}@sha256:08497ee19eace7b4b5348db5c6a1591d7752b164530a36f855cb0f2bdcbadd48"
READY_SECONDS = 300
_GATEWAYS = "{{range .IPAM.Config}}{{.Gateway}} {{end}}"


class Kind(NodeCluster):
    """A cluster that kind makes in the user's container engine."""

    prefix: Sequence[str] = ()

    def __init__(self, instance: Instance, suffix: str = "", shared: Path | None = None) -> None:
        """Name the cluster after the instance; its pods see the folder `shared` under the same path."""
        self.instance = instance
        self.cluster_name = "-".join(filter(None, ("rota", instance.name, suffix)))
        self.name = f"{self.cluster_name}-control-plane"
        self.kubeconfig = instance.folder / f"{self.cluster_name}.kubeconfig"
        self._shared = shared

    @property
    def address(self) -> str:
        """This machine's address in the network that kind's nodes share."""
        printed = self._docker("network", "inspect", "kind", "--format", _GATEWAYS).split()
        gateways = [ipaddress.ip_interface(gateway).ip for gateway in printed]
        ipv4 = next((gateway for gateway in gateways if gateway.version == 4), None)
        if ipv4 is None:
            raise Missing("Docker's network kind has no IPv4 gateway; remove it (docker network rm kind) and try again")
        return str(ipv4)

    def up(self) -> None:
        """Create the cluster unless it exists, and wait until its node is Ready."""
        named = ("--name", self.cluster_name, "--kubeconfig", self.kubeconfig)
        if self.cluster_name in self._kind("get", "clusters").split():
            self._kind("export", "kubeconfig", *named)
        else:
            self.instance.at_down(str(programs.program("kind")), "delete", "cluster", *map(str, named))
            config = self.instance.write(f"{self.cluster_name}.json", json.dumps(self._configuration()))
            with progress(f"kind makes the cluster {self.cluster_name}"):
                self._kind("create", "cluster", *named, "--config", config)
        self.kubectl("wait", "--for=condition=Ready", "node", "--all", f"--timeout={READY_SECONDS}s")

    def down(self) -> None:
        """Delete the cluster."""
        self._kind("delete", "cluster", "--name", self.cluster_name, "--kubeconfig", self.kubeconfig)

    def build(self, target: str, *, tag: str = "test", source: Path = PROJECT) -> str:
        """Build one image of the Dockerfile in `source` by Docker, load it into the node and return its name."""
        name = f"rota.local/{target}:{tag}"
        with progress(f"building {name}"):
            # One image without attestations: `kind load` takes no other from Docker's containerd image store.
            self._docker("build", "--quiet", "--provenance=false", "--target", target, "--tag", name, source)
        self._kind("load", "docker-image", name, "--name", self.cluster_name)
        return name

    def tag(self, image: str, *names: str) -> None:
        """Give an image more names on the node; Docker's own images of these names stay as they are."""
        for name in names:
            self._docker("exec", self.name, "ctr", "--namespace=k8s.io", "images", "tag", "--force", image, name)

    def _configuration(self) -> dict[str, object]:
        node: dict[str, object] = {"role": "control-plane", "image": IMAGE}
        if self._shared:
            node["extraMounts"] = [{"hostPath": str(self._shared), "containerPath": str(self._shared)}]
        return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", "nodes": [node]}

    def _kind(self, *arguments: str | Path) -> str:
        return cache.run([programs.program("kind"), *arguments], f"kind {arguments[0]} {arguments[1]}")

    def _docker(self, *arguments: str | Path) -> str:
        docker = shutil.which("docker")
        if not docker:
            raise Missing("Images for kind's node need Docker, and there is no command docker; install it")
        return cache.run([docker, *arguments], f"docker {arguments[0]}")
