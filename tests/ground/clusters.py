"""The cluster of an instance: the user's own, one made by kind, or our own control plane.

The first that is available is chosen, once: an instance stays with its choice until it is taken down.
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

KUBECONFIG = "ROTA_GROUND_KUBECONFIG"  # not KUBECONFIG: tests use a user's cluster only on request

CLUSTER = "ROTA_GROUND_CLUSTER"  # "kind" or "own", to override the choice


class UserCluster(Cluster):
    """The user's cluster: used, never started or stopped."""

    def __init__(self, instance: Instance) -> None:
        """Read the kubeconfig that the user named."""
        self.kubeconfig = Path(instance.note("kubeconfig", "") or os.environ.get(KUBECONFIG, ""))
        if not self.kubeconfig.is_file():
            raise Missing(f"{KUBECONFIG} names {self.kubeconfig}, which is not there; unset it to get a cluster made")
        instance.note("kubeconfig", str(self.kubeconfig.absolute()))

    def up(self) -> None:
        """Check that the cluster responds."""
        try:
            self.kubectl("get", "--raw", "/readyz")
        except RuntimeError as error:
            raise Missing(f"The cluster of {self.kubeconfig} does not answer: {error}") from None


def cluster_of(instance: Instance) -> UserCluster | Kind | ControlPlane:
    """Return the instance's cluster."""
    source = source_of(instance)
    if source == "given":
        return UserCluster(instance)
    return Kind(instance) if source == "kind" else ControlPlane(instance)


def source_of(instance: Instance) -> str:
    """Return the source of the instance's clusters: "given", "kind" or "own"; decided at the first call."""
    return instance.note("cluster", "") or instance.note("cluster", _first_available())


def _first_available() -> str:
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
