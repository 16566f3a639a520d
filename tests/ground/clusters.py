"""Which cluster an instance works on: the user's own, one made by kind, or our own control plane.

The first that fits is taken, once: an instance stays with its choice until it is taken down.
"""

import os
import shutil
import subprocess
from pathlib import Path

from ground.cluster import Cluster
from ground.controlplane import ControlPlane
from ground.instance import Instance
from ground.kind import Kind
from ground.report import Missing, say

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


def cluster_of(instance: Instance) -> Given | Kind | ControlPlane:
    """Return the instance's cluster."""
    source = source_of(instance)
    if source == "given":
        return Given(instance)
    return Kind(instance) if source == "kind" else ControlPlane(instance)


def source_of(instance: Instance) -> str:
    """Return where the instance's clusters come from: "given", "kind" or "own"; decided at the first call."""
    return instance.note("cluster", "") or instance.note("cluster", _first_that_fits())


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
