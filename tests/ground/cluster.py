"""The interface of a cluster for tests, whatever its origin."""

import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from ground import programs
from ground.instance import Instance

PROJECT = Path(__file__).parents[2]


class Cluster:
    """A Kubernetes API server, with an admin's kubeconfig."""

    kubeconfig: Path

    def kubectl(self, *arguments: str, feed: str | None = None, check: bool = True) -> str:
        """Run kubectl as admin and return what it printed."""
        argv = [str(programs.program("kubectl")), "--kubeconfig", str(self.kubeconfig), *arguments]
        ended = subprocess.run(argv, input=feed, capture_output=True, text=True, check=False)
        if check and ended.returncode != 0:
            raise RuntimeError(f"kubectl {shlex.join(arguments)}: {ended.stderr.strip()}")
        return ended.stdout


class NodeCluster(Cluster, ABC):
    """A cluster with one node, whose pods are containers of images that this machine builds."""

    name: str  # of the node
    instance: Instance  # starts the servers that the pods use

    @property
    @abstractmethod
    def address(self) -> str:
        """The address at which pods reach a server of this machine that was started with `prefix`."""

    @property
    @abstractmethod
    def prefix(self) -> Sequence[str]:
        """The command prefix that starts a server at `address`; empty where none is needed."""

    @abstractmethod
    def up(self) -> None:
        """Create the cluster unless it exists, and wait until its node is Ready."""

    @abstractmethod
    def down(self) -> None:
        """Delete the cluster."""

    @abstractmethod
    def build(self, target: str, *, tag: str = "test", source: Path = PROJECT) -> str:
        """Build one image of the Dockerfile in `source`, load it into the node and return its name."""

    @abstractmethod
    def tag(self, image: str, *names: str) -> None:
        """Give an image of the node more names, as if it had been pulled by them."""
