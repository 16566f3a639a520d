"""A cluster of kind, from start to end, and GitHub's workflows.

kind is real. No container engine runs here, so `docker` is a stand-in whose node is the ground's own: the test shows
which commands are run, in which order, with which options, and that images, pods and addresses work through them.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ground.cache import run
from ground.cluster import PROJECT
from ground.instance import Instance, temporary
from ground.kind import IMAGE, Kind
from ground.node import RealNode
from ground.poll import answers, eventually
from ground.programs import program
from ground.report import Missing
from ground.tests.container_engine import Engine

SECONDS = 300
WORKFLOWS = PROJECT / ".github" / "workflows"


@pytest.fixture
def engine(real_node: RealNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Engine.install(tmp_path / "bin", real_node.instance)


@pytest.fixture
def second_instance() -> Iterator[Instance]:
    with temporary("kind") as instance:
        yield instance


def pod(image: str, folder: Path, url: str) -> str:
    """Return a pod that requests a URL and writes the response into a folder of this machine."""
    code = f"import urllib.request as it; open('/shared/got', 'wb').write(it.urlopen('{url}').read())"
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", code],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "shared", "hostPath": {"path": str(folder)}}],
        "restartPolicy": "Never",
    }
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kind"}, "spec": spec})


@pytest.mark.node
@pytest.mark.slow("a kind cluster is created, loads images, runs a pod and is deleted")
def test_kind_cluster_runs_a_pod_of_a_built_image_and_is_deleted(
    engine: Engine, second_instance: Instance, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    cluster = Kind(second_instance, "node", shared)
    cluster.up()
    cluster.up()  # the cluster exists: only the kubeconfig is written again
    (started,) = (line for line in engine.commands if line[0] == "run")
    assert IMAGE in started
    assert f"--volume={shared}:{shared}" in started
    assert [*engine.containers] == [cluster.name]

    image = cluster.build("sidecar")
    cluster.tag(image, "registry.example/app:1")
    serve = ["python3", "-m", "http.server", "--bind", cluster.address, "--directory", str(PROJECT / "docs")]
    port = second_instance.port("server", 8000, cluster.address)
    process = second_instance.start("server", [*cluster.prefix, *serve, str(port)])
    try:
        url = f"http://{cluster.address}:{port}/ground.md"
        eventually(lambda: answers(url), SECONDS)
        cluster.kubectl("create", "-f-", feed=pod("registry.example/app:1", shared, url))
        eventually(lambda: phase(cluster) in {"Succeeded", "Failed"}, SECONDS)
        assert phase(cluster) == "Succeeded", cluster.kubectl("logs", "kind")
    finally:
        cluster.kubectl("delete", "pod", "kind", "--ignore-not-found")
        second_instance.stop(process.program)
    assert (shared / "got").read_text() == (PROJECT / "docs" / "ground.md").read_text()

    cluster.down()
    assert not engine.containers


def phase(cluster: Kind) -> str:
    return cluster.kubectl("get", "pod", "kind", "-o", "jsonpath={.status.phase}")


def test_kind_without_docker_is_rejected_in_one_sentence(
    second_instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Missing, match="there is no command docker; install it"):
        _ = Kind(second_instance, "node").address


def test_workflow_files_pass_actionlint() -> None:
    files = map(str, sorted(WORKFLOWS.glob("*.yml")))
    argv = [str(program("actionlint")), "-no-color", "-shellcheck=", "-pyflakes=", *files]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_workflow_for_kind_runs_a_target_of_make() -> None:
    commands = run(["make", "--dry-run", "kind"], "make kind", cwd=PROJECT)
    assert "ROTA_GROUND_CLUSTER=kind" in commands
    jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]
    assert "make kind" in [step.get("run") for step in jobs["kind"]["steps"]]


def test_workflow_for_pages_publishes_the_strict_build_of_main() -> None:
    assert "mkdocs build --strict" in run(["make", "--dry-run", "docs"], "make docs", cwd=PROJECT)
    workflow = yaml.safe_load((WORKFLOWS / "pages.yml").read_text())
    assert workflow[True]["push"] == {"branches": ["main"]}, "YAML reads the key `on` as True"
    build = workflow["jobs"]["build"]
    deploy = workflow["jobs"]["deploy"]
    assert "make docs" in [step.get("run") for step in build["steps"]]
    site = re.search(r"^site_dir: (\S+)$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert site
    assert site[1] in [step.get("with", {}).get("path") for step in build["steps"]]
    assert deploy["needs"] == "build"
    assert deploy["permissions"] == {"pages": "write", "id-token": "write"}


def test_workflow_actions_are_pinned_by_commit() -> None:
    lines = [line for file in WORKFLOWS.glob("*.yml") for line in file.read_text().splitlines() if "uses:" in line]
    assert [line for line in lines if not re.search(r"@[0-9a-f]{40}  # v[\d.]+$", line)] == []
