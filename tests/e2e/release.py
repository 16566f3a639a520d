"""The chart, installed as users install it, with images of the Dockerfile, on a real node."""

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

TIMEOUT_SECONDS = 600  # of waits: a node may be slow
WAIT = ("--wait", f"--timeout={TIMEOUT_SECONDS}s")
OPERATOR_NAMESPACE = "rota-system"
GROUP_NAMESPACE = "shop"
VERSIONS = {"Secret": "v1", "Pod": "v1", "ConsumerGroup": "rota.dev/v1alpha1", "RebalancePolicy": "rota.dev/v1alpha1"}


@dataclass(frozen=True)
class Installation:
    """The release, and a namespace with groups that it manages."""

    node: NodeCluster
    helm: Helm
    values: dict[str, Any]

    @classmethod
    def build(cls, node: NodeCluster, helm: Helm) -> "Installation":
        """Build the images; nothing is installed yet."""
        image, _, tag = node.build("operator").partition(":")
        sidecar, _, of_sidecar = node.build("sidecar").partition(":")
        values = {
            "image": {"repository": image, "tag": tag, "pullPolicy": "Never"},
            "sidecar": {"image": {"repository": sidecar, "tag": of_sidecar}},
            # Enforced by the network of kind, not by that of the ground's own node.
            "networkPolicy": {"enabled": True, "memberNamespaces": [GROUP_NAMESPACE]},
        }
        return cls(node, helm, values)

    def ensure_namespace(self, name: str) -> None:
        """Create a namespace unless it exists."""
        if not self.node.kubectl("get", "namespace", name, "--ignore-not-found", "-o", "name"):
            self.node.kubectl("create", "namespace", name)

    def ensure_installed(self) -> None:
        """Install the release unless it is installed, as the chart's README describes."""
        for name in (OPERATOR_NAMESPACE, GROUP_NAMESPACE):
            self.ensure_namespace(name)
        strict = (f"{label}={value}" for label, value in STRICT.items())
        self.node.kubectl("label", "--overwrite", "namespace", OPERATOR_NAMESPACE, *strict)
        if "rota" not in self.helm_release("list", "--short").split():
            self.helm_release("install", str(CHART), *WAIT, values=self.values)

    def helm_release(self, command: str, *options: str, values: dict[str, Any] | None = None) -> str:
        """Run a command of helm for the release."""
        connection = ("--kubeconfig", str(self.node.kubeconfig), "--namespace", OPERATOR_NAMESPACE)
        release_name = () if command == "list" else ("rota",)
        return self.helm(*command.split(), *release_name, *options, *connection, values=values)

    def operator_kubectl(self, *arguments: str, check: bool = True) -> str:
        """Run kubectl in the namespace of the operator."""
        return self.node.kubectl("--namespace", OPERATOR_NAMESPACE, *arguments, check=check).strip()

    def group_kubectl(self, *arguments: str, feed: str | None = None, check: bool = True) -> str:
        """Run kubectl in the namespace of the groups."""
        return self.node.kubectl("--namespace", GROUP_NAMESPACE, *arguments, feed=feed, check=check).strip()

    def apply(self, *bodies: dict[str, Any]) -> None:
        """Apply objects of the kinds in VERSIONS in the namespace of the groups."""
        items = [{"apiVersion": VERSIONS[str(body["kind"])], **body} for body in bodies]
        self.group_kubectl("apply", "-f-", feed=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

    def run_rota(self, *arguments: str) -> Any:
        """Run a `rota` command through the API server, as users with a kubeconfig do; return its JSON."""
        argv = [sys.executable, "-m", "rota.cli", *arguments, "-o", "json"]
        env = {**os.environ, "KUBECONFIG": str(self.node.kubeconfig)}
        completed = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout)

    def create_name_server_service(self, namespace: str, name: str, name_server: str) -> None:
        """Create a Service (port 9876) for a name server, "ip:port", outside of the cluster."""
        address, _, port = name_server.rpartition(":")
        service = {"kind": "Service", "metadata": {"name": name}, "spec": {"ports": [{"port": 9876}]}}
        endpoints = {"endpoints": [{"addresses": [address]}], "addressType": "IPv4", "ports": [{"port": int(port)}]}
        labels = {"kubernetes.io/service-name": name}
        endpoint_slice = {"kind": "EndpointSlice", "metadata": {"name": name, "labels": labels}, **endpoints}
        for version, body in (("v1", service), ("discovery.k8s.io/v1", endpoint_slice)):
            feed = json.dumps({"apiVersion": version} | body)
            self.node.kubectl("--namespace", namespace, "apply", "-f-", feed=feed)

    def pods(self) -> set[str]:
        """Return the operator's pods."""
        return {
            *self.operator_kubectl("get", "pods", "-l", "app.kubernetes.io/component=operator", "-o", "name").split()
        }

    def addresses(self) -> list[str]:
        """Return the addresses of the operator's pods."""
        return [self.operator_kubectl("get", pod, "-o", "jsonpath={.status.podIP}") for pod in sorted(self.pods())]

    def wait_for_operators(self) -> None:
        """Wait until both operators run, and one of them leads."""
        self.operator_kubectl("rollout", "status", "deploy/rota", f"--timeout={TIMEOUT_SECONDS}s")
        eventually(lambda: len(self.pods()) == 2 and self.leader() in self.pods(), TIMEOUT_SECONDS)

    def leader(self) -> str:
        """Return the pod that holds the Lease, or ""."""
        holder = self.operator_kubectl("get", "lease", "rota", "-o", "jsonpath={.spec.holderIdentity}", check=False)
        return f"pod/{holder}" if holder else ""

    def conditions(self, group: str) -> dict[str, tuple[str, str]]:
        """Return status and reason of a group's conditions, by type."""
        group_body = json.loads(self.group_kubectl("get", "cg", group, "-o", "json", check=False) or "{}")
        return {kind: (condition["status"], condition["reason"]) for kind, condition in conditions(group_body).items()}

    def log(self) -> str:
        """Return the logs of all running operators."""
        return "\n".join(self.operator_kubectl("logs", pod, check=False) for pod in sorted(self.pods()))

    def diagnostics(self) -> str:
        """Return objects and logs, for the analysis of a failure."""
        objects = self.group_kubectl("describe", "cg,pods", check=False)
        return f"{self.leader()=}\n{objects}\n{self.operator_kubectl('describe', 'pods', check=False)}\n{self.log()}"

    def remaining_objects(self) -> set[str]:
        """Return all objects in the operator's namespace, except for Events."""
        kinds = self.operator_kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        kinds_without_events = [kind for kind in kinds if not kind.startswith("events")]
        return {*self.operator_kubectl("get", ",".join(kinds_without_events), "-o", "name").split()}
