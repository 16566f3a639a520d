"""`python -m ground` on the command line, and the source of its cluster."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ground.cluster import Cluster
from ground.clusters import CLUSTER, KUBECONFIG, cluster_of
from ground.controlplane import ControlPlane
from ground.instance import Instance
from ground.kind import Kind
from ground.local import LocalNode
from ground.poll import eventually
from ground.report import Missing
from ground.rocketmq import RocketMQ


def ground(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-m", "ground", *arguments], capture_output=True, text=True, check=False, env=env
    )


def write_program(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep grounds in a home of their own and on our own control plane, whatever the test run's environment says."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("ROTA_GROUND_HOME", str(home))
    monkeypatch.setenv(CLUSTER, "own")
    monkeypatch.delenv(KUBECONFIG, raising=False)
    yield home
    for path in home.glob("*/instance.json"):
        Instance(path.parent).down()


@pytest.mark.usefixtures("own_home")
@pytest.mark.slow("two commands start one ground at the same time")
def test_ground_up_twice_concurrently_then_env_status_and_down(control_plane: Cluster) -> None:
    command = [sys.executable, "-m", "ground", "up", "control-plane", "local"]
    ups = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [up.communicate(timeout=300)[1] for up in ups]
    assert [up.returncode for up in ups] == [0, 0], errors
    status = ground("status").stdout
    assert [status.count(f" {program}\n") for program in ("etcd", "kube-apiserver", "local")] == [1, 1, 1]
    shell = 'eval "$(python -m ground env)"; kubectl get nodes -o name'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kubectl = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
    )
    assert kubectl.stdout == "node/local\n"
    assert ground("down").returncode == 0
    assert "nothing stands" in ground("status").stdout
    assert ground("down").returncode == 0
    assert "/readyz" in control_plane.kubectl("get", "--raw", "/"), "another ground was taken down"


@pytest.mark.usefixtures("own_home")
def test_ground_reports_a_missing_ground_or_kubeconfig_in_one_sentence() -> None:
    no_ground = ground("env")
    assert no_ground.returncode == 1
    assert no_ground.stderr == "ground: No ground default stands; see `python -m ground status`.\n"
    no_file = ground("up", "control-plane", **{KUBECONFIG: "/nowhere"})
    assert no_file.returncode == 1
    assert no_file.stderr.endswith("/nowhere, which is not there; unset it to get a cluster made.\n")
    assert len(no_file.stderr.splitlines()) == 1


def test_ground_up_that_is_interrupted_leaves_nothing_running(own_home: Path) -> None:
    up = subprocess.Popen([sys.executable, "-m", "ground", "up", "control-plane"], stderr=subprocess.PIPE, text=True)
    eventually(lambda: list(own_home.glob("default/log/kube-apiserver.log")))
    pid = Instance(own_home / "default").processes()[0].pid
    for _ in range(3):  # users press Ctrl-C again if a command does not end at once
        up.send_signal(signal.SIGTERM)
    assert "interrupted" in up.communicate(timeout=180)[1]
    assert up.returncode == 130
    assert not list(own_home.glob("*/instance.json"))
    assert not Path("/proc").joinpath(str(pid)).exists()


def test_ground_uses_the_users_own_cluster_and_leaves_it_running(
    own_home: Path, control_plane: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KUBECONFIG, str(control_plane.kubeconfig))
    instance = Instance.open("given")
    cluster = cluster_of(instance)
    cluster.up()
    node = LocalNode(instance, cluster)
    node.up()
    assert node.name in control_plane.kubectl("get", "nodes", "-o", "name")
    monkeypatch.delenv(KUBECONFIG)
    assert cluster_of(instance).kubeconfig == control_plane.kubeconfig, "an instance stays with its choice"
    instance.down()
    assert node.name not in control_plane.kubectl("get", "nodes", "-o", "name")
    assert list(own_home.glob("*/instance.json")) == []


@pytest.mark.usefixtures("own_home")
def test_ground_reports_a_cluster_that_does_not_answer(
    control_plane: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = tmp_path / "kubeconfig"
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    for entry in config["clusters"]:
        entry["cluster"]["server"] = "https://127.0.0.1:9"
    unreachable.write_text(yaml.safe_dump(config))
    monkeypatch.setenv(KUBECONFIG, str(unreachable))
    with pytest.raises(Missing, match=f"^The cluster of {unreachable} does not answer: "):
        cluster_of(Instance.open("gone")).up()


@pytest.mark.usefixtures("own_home")
def test_ground_cluster_kind_is_configurable(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, kind in {"own": ControlPlane, "kind": Kind}.items():
        monkeypatch.setenv(CLUSTER, choice)
        assert isinstance(cluster_of(Instance.open(choice)), kind)


def test_control_plane_uses_kubebuilder_assets_of_a_supported_version(tmp_path: Path) -> None:
    for name, version in {"etcd": "etcd 3.5", "kube-apiserver": "v1.20.0", "kube-scheduler": "v1.34.9"}.items():
        write_program(tmp_path / name, f"echo Kubernetes {version}")
    names = ("etcd", "kube-apiserver", "kube-scheduler", "kubelet")
    ask = f"from ground.programs import _user_program\nfor name in {names}: print(_user_program(name))"
    printed = subprocess.run(
        [sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KUBEBUILDER_ASSETS": str(tmp_path)},
    )
    assert printed.stdout.split() == [f"{tmp_path}/etcd", "None", f"{tmp_path}/kube-scheduler", "None"]
    assert "kube-apiserver is not v1.34.x; taking our own kube-apiserver instead" in printed.stderr


def test_control_plane_does_not_build_programs_of_kubebuilder_assets(tmp_path: Path) -> None:
    for name in ("etcd", "kube-apiserver", "kubectl"):  # the programs that setup-envtest installs
        write_program(tmp_path / name, "echo Kubernetes v1.34.1")
    answers = 'case "$*" in *GOVERSION) echo go1.26.0;; env*) echo /tmp; echo /tmp;; *) echo "$@" > arguments;; esac'
    write_program(tmp_path / "bin" / "go", f"cd {tmp_path}; {answers}")
    ask = "from ground import programs; programs.ensure(*programs.CONTROL_PLANE)"
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    env = {
        **os.environ,
        "KUBEBUILDER_ASSETS": str(tmp_path),
        "ROTA_GROUND_CACHE": str(tmp_path / "cache"),
        "PATH": path,
    }
    subprocess.run([sys.executable, "-c", ask], check=True, env=env)
    packages = [f"k8s.io/kubernetes/cmd/{name}" for name in ("kube-controller-manager", "kube-scheduler")]
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("-o") + 2 :] == packages


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["up", "--name", "../x"], "A ground cannot be named '../x'"),
        (["down", "--name", "../x"], "A ground cannot be named '../x'"),
        (["up", "nonsense"], "There is no part nonsense; the parts are control-plane, local"),
        (["topic", "orders", "8"], "No ground default stands"),
        (["topic", "orders", "0"], "A topic has no fewer than 1 queue, and 0 were asked for"),
    ],
)
def test_ground_rejects_invalid_arguments_in_one_sentence(arguments: list[str], sentence: str) -> None:
    ended = ground(*arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"ground: {sentence}")


def test_ground_topic_creates_or_resizes_a_topic_and_rejects_an_invalid_name(rocketmq: RocketMQ) -> None:
    for queues in (3, 5):
        ended = ground("topic", "--name", rocketmq.instance.name, "by-hand", str(queues))
        assert (ended.returncode, ended.stderr) == (0, f"ground: topic by-hand has {queues} queues\n")
        assert rocketmq.queues("by-hand") == {"broker-0": queues}
    rejected = ground("topic", "--name", rocketmq.instance.name, "by hand", "3")
    assert rejected.returncode == 1
    assert rejected.stderr.startswith("ground: The topic by hand was not made: RocketMQ answered 29: ")


@pytest.mark.usefixtures("own_home")
def test_ground_topic_without_a_broker_is_rejected_in_one_sentence() -> None:
    Instance.open("default")
    errors = ground("topic", "orders", "8").stderr
    assert errors == "ground: No broker runs in the ground default; `python -m ground up rocketmq` starts one.\n"


def test_control_plane_reports_a_failing_etcd_and_keeps_its_log(own_home: Path, tmp_path: Path) -> None:
    write_program(tmp_path / "etcd", "echo my disk is broken >&2\nexit 1")
    errors = ground("up", "control-plane", KUBEBUILDER_ASSETS=str(tmp_path)).stderr
    log = own_home / "default-failed" / "etcd.log"
    assert f"ground: etcd ended at start: my disk is broken (all of it: {log})." in errors
    assert log.read_text() == "my disk is broken\n"
