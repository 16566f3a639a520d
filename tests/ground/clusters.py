"""Which cluster an instance works on: the user's own, one made by kind, or our own control plane.

The first that fits is taken, once: an instance stays with its choice until it is taken down.
"""

import os
import shutil
import subprocess
from pathlib import Path

from ground.cache import run
from ground.controlplane import Cluster, ControlPlane
from ground.instance import Instance
from ground.programs import KUBERNETES
from ground.report import Missing, progress, say

KUBECONFIG = "ROTA_GROUND_KUBECONFIG"  # not KUBECONFIG: nobody's cluster is taken for tests without being asked

CLUSTER = "ROTA_GROUND_CLUSTER"  # "kind" or "own" where the choice shall not be left to what is found


class Given(Cluster):
    """The user's cluster: used, never started or stopped."""

    def __init__(self, instance: Instance) -> None:
        """Take the kubeconfig that the user named."""
        self.kubeconfig = Path(instance.note("kubeconfig", "") or os.environ.get(KUBECONFIG, ""))
        if not self.kubeconfig.is_file():
            raise Missing(f"{KUBECONFIG} names {self.kubeconfig}, which is not there; unset it to get a cluster made")
        instance.note("kubeconfig", str(self.kubeconfig.absolute()))

    def up(self) -> None:
        """See that it answers."""
        try:
            self.kubectl("get", "--raw", "/readyz")
        except RuntimeError as error:
            raise Missing(f"The cluster of {self.kubeconfig} does not answer: {error}") from None


class Kind(Cluster):
    """A cluster that kind makes in the user's container engine."""

    def __init__(self, instance: Instance) -> None:
        """Name it after the instance."""
        self.instance = instance
        self.name = f"rota-{instance.name}"
        self.kubeconfig = instance.folder / "kind.kubeconfig"

    def up(self) -> None:
        """Make it, unless it is there."""
        if self.name not in run(["kind", "get", "clusters"], "Asking kind for its clusters").split():
            self.instance.at_down("kind", "delete", "cluster", "--name", self.name)
            step = ["kind", "create", "cluster", "--name", self.name, "--image", f"kindest/node:{KUBERNETES}"]
            with progress(f"kind makes the cluster {self.name}"):
                run([*step, "--kubeconfig", self.kubeconfig, "--wait", "120s"], "Making a cluster with kind")


def cluster_of(instance: Instance) -> Given | Kind | ControlPlane:
    """Return the instance's cluster; which kind of it is decided at the first call."""
    source = instance.note("cluster", "") or instance.note("cluster", _first_that_fits())
    if source == "given":
        return Given(instance)
    return Kind(instance) if source == "kind" else ControlPlane(instance)


def _first_that_fits() -> str:
    if os.environ.get(KUBECONFIG):
        return "given"
    if os.environ.get(CLUSTER) in {"kind", "own"}:
        return os.environ[CLUSTER]
    if shutil.which("kind") and any(map(_answers, ("docker", "podman"))):
        say("a container engine answers: the cluster is made by kind")
        return "kind"
    return "own"


def _answers(engine: str) -> bool:
    if not shutil.which(engine):
        return False
    try:
        return subprocess.run([engine, "info"], capture_output=True, timeout=10, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
