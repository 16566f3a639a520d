"""Namespaces of the node's own: network, mounts and processes, held open by one process, the keeper.

When the keeper ends, the kernel ends all processes in them and removes their interfaces, rules and mounts. The machine
itself gets one end of a veth pair with one route, and cgroups under one name; nothing else of it is touched.
"""

import ipaddress
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ground.cache import run
from ground.controlplane import SERVICES
from ground.instance import TAG, Instance
from ground.report import Missing

KEEPER = "keeper"
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = {
    "cpu",
    "cpuset",
    "hugetlb",
    "memory",
    "pids",
}  # those that the kubelet requires, where the machine has them
_NUMBERS = range(200, 256)
_SERVICES = f"{SERVICES}.0.0/16"

# The keeper's first commands. /run is new, so sockets at well-known paths are our own; writes to /var go to memory. The
# kubelet requires settings of the whole machine and would change them: files with the required values cover these.
_SETUP = """
mount --make-rshared /
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/netns /run/over/upper /run/over/work /run/shown
mount -t overlay overlay -o lowerdir=/var,upperdir=/run/over/upper,workdir=/run/over/work /var
for wish in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \\
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  shown=/run/shown/$(echo "${wish%=*}" | tr / .)
  echo "${wish#*=}" >"$shown"
  mount --bind "$shown" "/proc/sys/${wish%=*}"
done
ip link set lo up
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/ipv4/tcp_orphan_retries
[ -e /proc/sys/net/bridge ] || modprobe br_netfilter || true
# Without this the answer of a pod on the same bridge is not translated back to the Service it was asked by.
echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables
touch /run/set-up
# As the first process it inherits orphans; with this signal ignored the kernel buries them.
exec env --ignore-signal=CHLD sleep infinity
"""


@dataclass(frozen=True)
class Network:
    """The addresses of one sandbox: a /16 that no route of the machine touches."""

    number: int

    @property
    def block(self) -> str:
        """All addresses, as the machine routes them into the sandbox."""
        return f"10.{self.number}.0.0/16"

    @property
    def outside(self) -> str:
        """The machine's address in this network."""
        return f"10.{self.number}.0.1"

    @property
    def inside(self) -> str:
        """The node's address."""
        return f"10.{self.number}.0.2"

    @property
    def pods(self) -> str:
        """The addresses of pods."""
        return f"10.{self.number}.128.0/17"


class Sandbox:
    """The namespaces of one instance."""

    def __init__(self, instance: Instance) -> None:
        """Describe the namespaces; `up` creates them."""
        self.instance = instance
        self.cgroup = f"/rota-ground-{instance.id}"
        self.link = f"rota{instance.id[:10]}"  # the machine's end of a veth pair
        self._record = instance.folder / "sandbox.json"

    @property
    def network(self) -> Network:
        """The addresses; available once the sandbox is up."""
        return Network(json.loads(self._record.read_text())["number"])

    @property
    def network_prefix(self) -> list[str]:
        """The command prefix that runs a command in the node's network, but as a process of the machine."""
        return ["nsenter", f"--net=/proc/{self._keeper()}/ns/net", "--"]

    @property
    def prefix(self) -> list[str]:
        """The command prefix that runs a command wholly inside the sandbox."""
        ns = f"/proc/{self._keeper()}/ns"
        enter = ["nsenter", f"--net={ns}/net", f"--mount={ns}/mnt", f"--pid={ns}/pid_for_children", "--"]
        # nsenter stays outside and represents the program, which ends with it. So only nsenter carries the instance's
        # tag; processes that the program leaves behind do not: containers outlive containerd.
        return [*enter, "setpriv", "--pdeathsig=TERM", "env", f"--unset={TAG}"]

    @property
    def root(self) -> Path:
        """The root of the sandbox's files, as a path of the machine."""
        return Path(f"/proc/{self._keeper()}/root")

    def up(self) -> None:
        """Create the namespaces and connect them to the machine, unless they exist."""
        if self._is_up():
            return
        for leftover in self.instance.processes():  # processes that outlived their network are of no use
            self.instance.stop(leftover.program, grace=0)
        self._make_cgroups()
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        keeper = self.instance.start(KEEPER, [*unshare, "sh", "-euc", _SETUP])
        ready = Path(f"/proc/{keeper.pid}/root/run/set-up")
        self.instance.wait(KEEPER, ready.exists, 10, "The node's sandbox (network, mount and process namespaces)")
        network = self._join(keeper.pid)
        self._record.write_text(json.dumps({"keeper": keeper.pid, "number": network.number}))

    def run(self, what: str, *argv: str | Path) -> str:
        """Run one command inside and return its output."""
        return run([*self.prefix, *argv], what)

    def _is_up(self) -> bool:
        keeper = self.instance.process(KEEPER)
        return bool(keeper and self._record.exists() and json.loads(self._record.read_text())["keeper"] == keeper.pid)

    def _keeper(self) -> int:
        number: int = json.loads(self._record.read_text())["keeper"]
        return number

    def _make_cgroups(self) -> None:
        """Create the node's own root in every hierarchy (version 1), or in the only one (version 2)."""
        find = ["find", str(_CGROUPS), "-depth", "-type", "d", "-path", f"*{self.cgroup}*", "-exec", "rmdir", "{}", ";"]
        self.instance.at_down(*find)
        for root in _hierarchies():
            Path(f"{root}{self.cgroup}").mkdir(exist_ok=True)

    def _join(self, keeper: int) -> Network:
        """Connect the machine and the sandbox by a veth pair."""
        # A sandbox ends with its last process, but a closing connection may hold the pair for minutes.
        remove_link = ["ip", "link", "delete", self.link]
        subprocess.run(remove_link, capture_output=True, check=False)
        self.instance.at_down(*remove_link)
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(keeper))
        _ip("link", "set", self.link, "up")
        network = self._claim()
        inside = ("nsenter", f"--net=/proc/{keeper}/ns/net", "--")
        _ip("address", "add", f"{network.inside}/30", "dev", "eth0", prefix=inside)
        _ip("link", "set", "eth0", "up", prefix=inside)
        # Packets are routed before they are translated; one to an unknown Service must be rejected, not forwarded.
        _ip("route", "add", _SERVICES, "via", network.outside, prefix=inside)
        for chain in ("OUTPUT", "FORWARD"):
            run([*inside, "iptables", "-A", chain, "-d", _SERVICES, "-j", "REJECT"], "Closing the node's network")
        return network

    def _claim(self) -> Network:
        """Reserve a free number, or the previous one, by its route: two sandboxes cannot have the same."""
        candidates = [json.loads(self._record.read_text())["number"]] if self._record.exists() else _NUMBERS
        taken = _routes()
        for network in map(Network, candidates):
            if any(route.overlaps(ipaddress.ip_network(network.block)) for route in taken):
                continue
            _ip("address", "add", f"{network.outside}/30", "dev", self.link)
            try:
                _ip("route", "add", network.block, "via", network.inside)
            except Missing:  # another ground was faster
                _ip("address", "flush", "dev", self.link)
            else:
                return network
        raise Missing("No block from 10.200.0.0/16 to 10.255.0.0/16 is free for a real node; take down one that stands")


def need_privileges() -> None:
    """Raise with the missing requirement if this machine cannot run a real node."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Missing("A real node needs root on Linux; run as root, or go without what needs a real node")
    if not os.access(_CGROUPS, os.W_OK):
        raise Missing(f"A real node needs cgroups; make {_CGROUPS} writable for this machine or container")
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        raise Missing("A real node needs network, mount and process namespaces; this machine refuses to make them")


def _hierarchies() -> list[Path]:
    """Return the roots of all cgroup hierarchies: one each of version 1, or the one of version 2."""
    offered = _CGROUPS / "cgroup.controllers"
    if not offered.exists():
        return [path for path in _CGROUPS.iterdir() if (path / "tasks").exists()]
    passed_on = _CGROUPS / "cgroup.subtree_control"
    for controller in _CONTROLLERS & {*offered.read_text().split()} - {*passed_on.read_text().split()}:
        passed_on.write_text(f"+{controller}")
    return [_CGROUPS]


def _ip(*argv: str, prefix: tuple[str, ...] = ()) -> None:
    run([*prefix, "ip", *argv], "Joining the node's network to this machine's")


def _routes() -> list[ipaddress.IPv4Network]:
    """Return the destinations of the machine's routes, without default routes and their equivalents (0.0.0.0/1)."""
    listed = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"], "Reading the routes"))
    routes = [ipaddress.IPv4Network(route["dst"]) for route in listed if route["dst"] != "default"]
    return [route for route in routes if route.prefixlen >= 8]
