"""containerd, runc and CNI of the node: from Debian's packages, on files of the instance's own."""

import json
from pathlib import Path

from ground.instance import Instance
from ground.node import images
from ground.node.sandbox import Sandbox

SOCKET = "/run/containerd/containerd.sock"  # in the sandbox, where /run is its own
_CTR = ("ctr", "--address", SOCKET, "--namespace", "k8s.io")
_CAP_SYS_RESOURCE = 24

# Every plugin and path that would touch the machine outside the instance is off or led into its folder.
_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.nri.v1.nri"]
[grpc]
address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
disable_apparmor = true
restrict_oom_score_adj = {restrict}
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{snapshotter}"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/cni"
"""


class Runtime:
    """The container runtime of one sandbox."""

    def __init__(self, instance: Instance, sandbox: Sandbox) -> None:
        """Describe the runtime; `up` starts it."""
        self.instance = instance
        self.sandbox = sandbox
        self.folder = instance.folder / "runtime"

    def up(self) -> None:
        """Start containerd with the images that every node needs."""
        self._network()
        config = self.instance.write(
            "runtime/containerd.toml",
            _CONTAINERD.format(
                folder=self.folder,
                socket=SOCKET,
                pause=images.PAUSE,
                restrict=str(not _may_lower_oom_scores()).lower(),
                snapshotter="overlayfs" if images.overlays(Path(f"{self.sandbox.root}{self.folder}")) else "native",
            ),
        )
        self.instance.start("containerd", [*self.sandbox.prefix, "containerd", "--config", config])
        self.instance.wait("containerd", self._has_socket, 30, "containerd")
        self.load(images.own("pause", images.PAUSE))
        self.load(images.own("coredns", images.COREDNS))

    def load(self, archive: Path) -> None:
        """Import an image archive, unless it was."""
        mark = f"loaded/{archive.parent.name}-{archive.name}-{archive.stat().st_mtime_ns}"
        if not (self.folder / mark).exists():
            self.sandbox.run(f"Loading {archive.name} into containerd", *_CTR, "images", "import", archive)
            self.instance.write(f"runtime/{mark}", "")

    def tag(self, image: str, name: str) -> None:
        """Add a name to an image."""
        self.sandbox.run(f"Naming {image}", *_CTR, "images", "tag", "--force", image, name)

    def _has_socket(self) -> bool:
        return Path(f"{self.sandbox.root}{SOCKET}").is_socket()

    def _network(self) -> None:
        """Write what pods are joined by: one bridge, addresses from the node's block."""
        ranges = [[{"subnet": self.sandbox.network.pods}]]
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": True,
            "hairpinMode": True,  # a pod reaches itself through its Service
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni-addresses",  # as long-lived as the pods
                "ranges": ranges,
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
        config = {"cniVersion": "0.4.0", "name": "ground", "plugins": plugins}
        self.instance.write("runtime/cni/10-ground.conflist", json.dumps(config))


def _may_lower_oom_scores() -> bool:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["CapEff"], 16) >> _CAP_SYS_RESOURCE & 1)
