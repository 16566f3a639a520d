"""A real node: kubelet, kube-proxy, containerd and DNS under a control plane of their own, in namespaces of their own.

Everything runs in one sandbox and ends with it. This machine reaches the API server and the pods. Pods reach servers
that are started with `prefix`, or listen on the machine's address in the sandbox's network.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ground import packages, programs
from ground.cluster import PROJECT, NodeCluster
from ground.controlplane import ControlPlane
from ground.instance import Instance
from ground.node import dns, kubelet
from ground.node.build import build_image
from ground.node.runtime import Runtime
from ground.node.sandbox import Sandbox, need_privileges
from ground.report import progress

# Debian's package for each program; a program that is installed from elsewhere (Docker brings containerd) is kept.
_PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
}
_DOWN = "import sys; from ground.instance import Instance; (it := Instance.find(sys.argv[1])) and it.down(grace=0)"


def prepare() -> None:
    """Install and build the programs of a node."""
    need_privileges()
    path = "/usr/sbin:/sbin:/usr/bin:/bin"
    packages.debian(*(package for tool, package in _PACKAGES.items() if not shutil.which(tool, path=path)))
    programs.ensure(*programs.CONTROL_PLANE, *programs.NODE)


class RealNode(NodeCluster):
    """A cluster of one real node."""

    name = kubelet.NAME

    def __init__(self, instance: Instance) -> None:
        """Describe the node that belongs to this ground; `up` starts it."""
        need_privileges()
        # An instance of its own, because the ground may have another control plane already.
        name = f"{instance.name}-node"
        instance.at_down(sys.executable, "-c", _DOWN, name)
        self.instance = Instance.open(name)
        self.sandbox = Sandbox(self.instance)
        self._runtime = Runtime(self.instance, self.sandbox)
        self.kubeconfig = self.instance.folder / "admin.kubeconfig"

    @property
    def address(self) -> str:
        """The node's address, for pods and for this machine."""
        return self.sandbox.network.inside

    @property
    def prefix(self) -> Sequence[str]:
        """The command prefix that starts a server where pods can reach it."""
        return self.sandbox.network_prefix

    def up(self) -> None:
        """Start the programs that do not run; then the node is Ready and its DNS responds."""
        prepare()
        with progress("starting a real node"):
            self.sandbox.up()
            self.control_plane = ControlPlane(self.instance, address=self.address, prefix=self.prefix)
            with ThreadPoolExecutor() as executor:
                runtime = executor.submit(self._runtime.up)
                self.control_plane.up()
                runtime.result()
            kubelet.start_kubelet(self.instance, self.sandbox, self.control_plane)
            kubelet.start_proxy(self.instance, self.sandbox, self.control_plane)
            self.kubectl("apply", "--server-side", "--force-conflicts", "--validate=false", "-f-", feed=dns.manifests())
            self.instance.wait("kubelet", self._ready, 60, "The real node")
            self.instance.wait("kube-proxy", lambda: dns.answers(self.address), 60, "The cluster's DNS")

    def down(self) -> None:
        """End the node and its control plane, and remove everything that they created."""
        self.instance.down(grace=0)  # nothing is kept, so no program needs an orderly end

    @contextmanager
    def cut(self, first: str, second: str) -> Iterator[None]:
        """Drop all packets between two addresses, of pods or of the node, while the block runs."""
        directions = [("-s", first, "-d", second), ("-s", second, "-d", first)]
        chains = ("INPUT", "OUTPUT", "FORWARD")
        rules = [(chain, *direction, "-j", "DROP") for chain in chains for direction in directions]
        with ExitStack() as cuts:
            for rule in rules:
                self.sandbox.run("Cutting the node's network", "iptables", "--wait", "--insert", *rule)
                mend = ("iptables", "--wait", "--delete", *rule)
                cuts.callback(self.sandbox.run, "Mending the node's network", *mend)
            yield

    def build(self, target: str, *, tag: str = "test", source: Path = PROJECT) -> str:
        """Build one image of the Dockerfile in `source` by buildah, load it into containerd and return its name."""
        name = f"rota.local/{target}:{tag}"
        self._runtime.load(build_image(target, name, source))
        return name

    def tag(self, image: str, *names: str) -> None:
        """Give an image more names in containerd."""
        for name in names:
            self._runtime.tag(image, name)

    def _ready(self) -> bool:
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self.kubectl("get", "node", self.name, "-o", path, check=False) == "True"
