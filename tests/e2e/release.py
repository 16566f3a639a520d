"""The chart, installed as people install it, with images of the Dockerfile, on a real node."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from chart.charts import CHART, STRICT, Helm
from ground.cluster import NodeCluster
from ground.ours import conditions
from ground.poll import eventually

SECONDS = 600  # that a node may take on a slow machine
WAIT = ("--wait", f"--timeout={SECONDS}s")
HOME, SHOP = "rota-system", "shop"  # where the operator is, and where groups are
VERSIONS = {"Secret": "v1", "Pod": "v1", "ConsumerGroup": "rota.dev/v1alpha1", "RebalancePolicy": "rota.dev/v1alpha1"}


@dataclass(frozen=True)
class Installed:
    """The release, and a namespace with groups that it looks after."""

    node: NodeCluster
    helm: Helm
    values: dict[str, Any]

    @classmethod
    def on(cls, node: NodeCluster, helm: Helm) -> "Installed":
        """Build the images; nothing is installed yet."""
        image, _, tag = node.build("operator").partition(":")
        sidecar, _, of_sidecar = node.build("sidecar").partition(":")
        values = {
            "image": {"repository": image, "tag": tag, "pullPolicy": "Never"},
            "sidecar": {"image": {"repository": sidecar, "tag": of_sidecar}},
            "networkPolicy": {
                "enabled": True,
                "memberNamespaces": [SHOP],
            },  # the real node's network enforces none, kind's does
        }
        return cls(node, helm, values)

    def namespace(self, name: str) -> None:
        """Make a namespace, unless it is there."""
        if not self.node.kubectl("get", "namespace", name, "--ignore-not-found", "-o", "name"):
            self.node.kubectl("create", "namespace", name)

    def ensure(self) -> None:
        """Install what is not installed, as the chart's README says."""
        for name in (HOME, SHOP):
            self.namespace(name)
        strict = (f"{label}={value}" for label, value in STRICT.items())
        self.node.kubectl("label", "--overwrite", "namespace", HOME, *strict)
        if "rota" not in self.release("list", "--short").split():
            self.release("install", str(CHART), *WAIT, values=self.values)

    def release(self, command: str, *options: str, values: dict[str, Any] | None = None) -> str:
        """Run a command of helm about the release."""
        where = ("--kubeconfig", str(self.node.kubeconfig), "--namespace", HOME)
        named = () if command == "list" else ("rota",)
        return self.helm(*command.split(), *named, *options, *where, values=values)

    def home(self, *arguments: str, check: bool = True) -> str:
        """Run kubectl where the operator is."""
        return self.node.kubectl("--namespace", HOME, *arguments, check=check).strip()

    def shop(self, *arguments: str, feed: str | None = None, check: bool = True) -> str:
        """Run kubectl where groups are."""
        return self.node.kubectl("--namespace", SHOP, *arguments, feed=feed, check=check).strip()

    def apply(self, *bodies: dict[str, Any]) -> None:
        """Apply objects of ours where groups are."""
        items = [{"apiVersion": VERSIONS[str(body["kind"])], **body} for body in bodies]
        self.shop("apply", "-f-", feed=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

    def rota(self, *arguments: str) -> Any:
        """Ask the operator by a command of ours, through the API server, as people with a kubeconfig do."""
        argv = [sys.executable, "-m", "rota.cli", *arguments, "-o", "json"]
        env = {**os.environ, "KUBECONFIG": str(self.node.kubeconfig)}
        asked = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert asked.returncode == 0, asked.stderr
        return json.loads(asked.stdout)

    def serve(self, namespace: str, name: str, name_server: str) -> None:
        """Make a Service (port 9876) for a name server, "ip:port", that runs outside of the cluster."""
        address, _, port = name_server.rpartition(":")
        service = {"kind": "Service", "metadata": {"name": name}, "spec": {"ports": [{"port": 9876}]}}
        places = {"endpoints": [{"addresses": [address]}], "addressType": "IPv4", "ports": [{"port": int(port)}]}
        labels = {"kubernetes.io/service-name": name}
        slices = {"kind": "EndpointSlice", "metadata": {"name": name, "labels": labels}, **places}
        for version, body in (("v1", service), ("discovery.k8s.io/v1", slices)):
            feed = json.dumps({"apiVersion": version} | body)
            self.node.kubectl("--namespace", namespace, "apply", "-f-", feed=feed)

    def pods(self) -> set[str]:
        """Return the operator's pods."""
        return {*self.home("get", "pods", "-l", "app.kubernetes.io/component=operator", "-o", "name").split()}

    def addresses(self) -> list[str]:
        """Return where the operator's pods are."""
        return [self.home("get", pod, "-o", "jsonpath={.status.podIP}") for pod in sorted(self.pods())]

    def whole(self) -> None:
        """Wait until both operators are there, and one of them leads."""
        self.home("rollout", "status", "deploy/rota", f"--timeout={SECONDS}s")
        eventually(lambda: len(self.pods()) == 2 and self.leader() in self.pods(), SECONDS)

    def leader(self) -> str:
        """Return the pod that the Lease names, or "" if it names none."""
        holder = self.home("get", "lease", "rota", "-o", "jsonpath={.spec.holderIdentity}", check=False)
        return f"pod/{holder}" if holder else ""

    def conditions(self, group: str) -> dict[str, tuple[str, str]]:
        """Return status and reason of a group's conditions, by type."""
        found = json.loads(self.shop("get", "cg", group, "-o", "json", check=False) or "{}")
        return {kind: (one["status"], one["reason"]) for kind, one in conditions(found).items()}

    def log(self) -> str:
        """Return what all operators that there are have logged."""
        return "\n".join(self.home("logs", pod, check=False) for pod in sorted(self.pods()))

    def story(self) -> str:
        """Return all that can be known, for people who look for what went wrong."""
        told = self.shop("describe", "cg,pods", check=False)
        return f"{self.leader()=}\n{told}\n{self.home('describe', 'pods', check=False)}\n{self.log()}"

    def left(self) -> set[str]:
        """Return all that is in the operator's namespace, of whatever kind."""
        kinds = self.home("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        lasting = [kind for kind in kinds if not kind.startswith("events")]
        return {*self.home("get", ",".join(lasting), "-o", "name").split()}
