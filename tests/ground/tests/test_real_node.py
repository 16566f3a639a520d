"""The real node: pods in containers, from images of the project's own Dockerfile, and no remains after its end."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ground.instance import Process, temporary
from ground.node import RealNode
from ground.poll import eventually
from ground.programs import program

pytestmark = pytest.mark.node

POLITE = """
trap 'echo told $(date +%s%N); sleep 0.3; echo ended $(date +%s%N); exit' TERM
echo began; while :; do sleep 0.05; done
"""
ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=2).read().decode())"
SAFE = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}

Object = dict[str, Any]


@dataclass(frozen=True)
class Namespace:
    """A namespace on the real node with these tests' web server in it."""

    node: RealNode
    name: str

    def kubectl(self, *arguments: str, feed: str | None = None, check: bool = True) -> str:
        return self.node.kubectl("--namespace", self.name, *arguments, feed=feed, check=check)

    def ask(self, url: str) -> str:
        """Return the response that a pod gets from a URL; a Service works a moment later than its pods."""
        command = ("exec", "deploy/web", "--", "python", "-c", ASK, url)
        return eventually(lambda: self.kubectl(*command, check=False).strip())

    def address(self) -> str:
        return self.kubectl("get", "pod", "-l", "app=web", "-o", "jsonpath={.items[0].status.podIP}")


def container(name: str, image: str, *command: str, **fields: object) -> Object:
    return {"name": name, "image": image, "command": list(command), "securityContext": SAFE, **fields}


def web(image: str) -> str:
    """Return the manifests of a web server on a mounted ConfigMap, with a sidecar, behind a Service."""
    labels = {"app": "web"}
    server = container(
        "app", image, "python", "-m", "http.server", "8080", "--directory", "/etc/settings",
        readinessProbe={"httpGet": {"path": "/text", "port": 8080}, "periodSeconds": 1},
        volumeMounts=[{"name": "settings", "mountPath": "/etc/settings"}],
    )  # fmt: skip
    pod = {
        "terminationGracePeriodSeconds": 5,
        "initContainers": [container("sidecar", image, "sh", "-c", POLITE, restartPolicy="Always")],
        "containers": [server],
        "volumes": [{"name": "settings", "configMap": {"name": "settings"}}],
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    items = [
        {"kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"text": "old"}},
        {"kind": "Service", "metadata": {"name": "web"}, "spec": {"selector": labels, "ports": [{"port": 8080}]}},
        {
            "kind": "Deployment",
            "apiVersion": "apps/v1",
            "metadata": {"name": "web"},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", **item} for item in items]})


@pytest.fixture(scope="module")
def image(real_node: RealNode) -> str:
    return real_node.build("sidecar")


@pytest.fixture(scope="module")
def namespace(real_node: RealNode, image: str) -> Namespace:
    created = Namespace(real_node, "web")
    real_node.kubectl("create", "namespace", created.name)
    created.kubectl("apply", "-f-", feed=web(image))
    created.kubectl("rollout", "status", "deploy/web", "--timeout=180s")
    return created


def test_real_node_deployment_of_the_projects_image_becomes_ready(namespace: Namespace) -> None:
    assert namespace.kubectl("get", "deploy", "web", "-o", "jsonpath={.status.readyReplicas}") == "1"
    assert namespace.kubectl("exec", "deploy/web", "--", "id", "-u").strip() == "65532"
    assert version("rota-operator") in namespace.kubectl("exec", "deploy/web", "--", "rota", "--version")
    assert namespace.kubectl("logs", "deploy/web", "-c", "sidecar").split() == ["began"]


def test_real_node_config_map_change_reaches_the_file_when_an_annotation_changes(namespace: Namespace) -> None:
    file = f"http://{namespace.address()}:8080/text"
    namespace.kubectl("patch", "configmap", "settings", "--patch", '{"data": {"text": "new"}}')
    namespace.kubectl("annotate", "pod", "-l", "app=web", "poke=1")
    eventually(lambda: urllib.request.urlopen(file, timeout=5).read() == b"new")


def test_real_node_pod_reaches_services_by_dns_name(namespace: Namespace) -> None:
    for name in ("web", "web.web", "web.web.svc.cluster.local"):
        assert namespace.ask(f"http://{name}:8080/text") in {"old", "new"}


def test_real_node_pod_reaches_a_process_outside_the_cluster(namespace: Namespace, tmp_path: Path) -> None:
    (tmp_path / "hello").write_text("hello from beside")
    node = namespace.node
    serve = [sys.executable, "-m", "http.server", "7000", "--bind", node.address, "--directory", str(tmp_path)]
    node.instance.start("beside", [*node.prefix, *serve])
    assert namespace.ask(f"http://{node.address}:7000/hello") == "hello from beside"
    node.instance.stop("beside")


def test_real_node_native_sidecar_outlives_its_app(namespace: Namespace, image: str) -> None:
    sidecar = container("sidecar", image, "sh", "-c", POLITE, restartPolicy="Always")
    spec = {"initContainers": [sidecar], "containers": [container("app", image, "sh", "-c", POLITE)]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "polite"}, "spec": spec}
    namespace.kubectl("create", "-f-", feed=json.dumps(pod))
    namespace.kubectl("wait", "--for=condition=Ready", "pod/polite", "--timeout=180s")
    access = ["--kubeconfig", str(namespace.node.kubeconfig), "--namespace", namespace.name]
    follow = [str(program("kubectl")), *access, "logs", "polite", "--follow", "--all-containers", "--prefix"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as logs:
        namespace.kubectl("delete", "pod", "polite")
        lines = logs.communicate(timeout=180)[0].splitlines()
    fields = [line.strip("[").replace("]", "").split() for line in lines if "began" not in line]
    at = {(source.rpartition("/")[2], word): int(when) for source, word, when in fields}
    assert at["app", "told"] < at["app", "ended"] < at["sidecar", "told"] < at["sidecar", "ended"]


@pytest.fixture(scope="module")
def second_node(real_node: RealNode) -> Iterator[RealNode]:  # only where a second node can run
    """Start a second node at the same time as the first."""
    with temporary("second") as instance:
        node = RealNode(instance)
        node.up()
        assert node.address != real_node.address
        yield node


@pytest.mark.slow("a node of the ground after a kill of its processes")
def test_real_node_restarts_after_its_processes_are_killed(second_node: RealNode) -> None:
    for name in ("containerd", "keeper"):  # pods outlive containerd, but not the keeper
        process = second_node.instance.process(name)
        assert process
        kill(process)
        second_node.up()
        second_node.kubectl("rollout", "status", "-n", "kube-system", "deploy/coredns", "--timeout=180s")


@pytest.mark.slow("remains of a node of the ground after its end")
def test_real_node_down_leaves_no_process_network_or_mount(second_node: RealNode) -> None:
    second_node.up()
    link, cgroup, folder = second_node.sandbox.link, second_node.sandbox.cgroup, second_node.instance.folder
    network = Path(f"/proc/{second_node.instance.processes()[0].pid}/ns/net").readlink()
    assert len(processes_in(network)) > 10
    assert list(Path("/sys/fs/cgroup").rglob(f"{cgroup[1:]}/**/cgroup.procs"))
    second_node.down()
    eventually(lambda: not processes_in(network))
    assert not Path(f"/sys/class/net/{link}").exists()
    assert not list(Path("/sys/fs/cgroup").rglob(cgroup[1:]))
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert not folder.exists()


def kill(process: Process) -> None:
    process.signal(signal.SIGKILL)
    eventually(lambda: not process.alive)


def processes_in(network: Path) -> list[Path]:
    """Return the processes in this network namespace."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            processes += [process] if (process / "ns" / "net").readlink() == network else []
        except OSError:  # the process has just ended
            continue
    return processes
