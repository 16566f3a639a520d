"""`rota pipeline` by spark-submit on a real node: the commands of docs/pipeline.md give the tables of one machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ground import programs
from ground.cluster import PROJECT, NodeCluster
from ground.poll import eventually
from ground.s3 import Bucket, S3Server
from ground.spark import spark_home
from kube.pages import typed_commands
from pipeline.lake_files import table_rows
from rota.object_store import open_store
from rota.pipeline.lake.tables import RECORD_TABLES

LONGEST = 1200  # seconds, on a busy machine
pytestmark = [
    pytest.mark.node,
    pytest.mark.slow("driver and executors as pods of the pipeline's image, with a lake in S3"),
    pytest.mark.timeout(3 * LONGEST),
]

PAGE = PROJECT / "docs" / "pipeline.md"
COMPARED = (*(spec.name for spec in RECORD_TABLES.values()), "marts/rollup", "marts/intervals", "marts/violations")
SECRET = "bucket"
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
EXECUTORS = 2
# A small node that loads images itself; the rest is as the page has it.
DEFAULTS = {
    "spark.kubernetes.container.image.pullPolicy": "Never",
    "spark.kubernetes.driver.request.cores": "100m",
    "spark.kubernetes.executor.request.cores": "100m",
    "spark.driver.memory": "1g",
    "spark.driver.memoryOverhead": "1g",
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executor.defaultJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.kubernetes.executor.deleteOnTermination": "false",
}


class Submission:
    """Types the page's commands for a node, an image of this checkout, and a bucket."""

    def __init__(self, node: NodeCluster, folder: Path, bucket: Bucket) -> None:
        self.lake = f"{bucket.uri}/lake"
        self._node = node
        self._folder = folder
        self._bucket = bucket
        *self.preparation, self._submit = _page_commands()
        folder.mkdir()
        path = f"{programs.program('kubectl').parent}:{spark_home()}/bin:{os.environ['PATH']}"
        self._environment = {
            **os.environ,
            "PATH": path,
            "SPARK_CONF_DIR": str(folder),
            "SPARK_HOME": str(spark_home()),
            "PYTHONPATH": "",
        }

    def prepare(self) -> None:
        """Create the page's objects, and the Secret for the bucket."""
        settings = dict(DEFAULTS)
        for name, value in self._bucket.variables.items():
            if name not in CREDENTIALS:
                settings[f"spark.kubernetes.driverEnv.{name}"] = value
        literals: list[str] = []
        for name in CREDENTIALS:
            literals.append(f"--from-literal={name}={self._bucket.variables[name]}")
            for role in ("driver", "executor"):
                settings[f"spark.kubernetes.{role}.secretKeyRef.{name}"] = f"{SECRET}:{name}"
        lines = [f"{key} {value}\n" for key, value in settings.items()]
        (self._folder / "spark-defaults.conf").write_text("".join(lines))
        self._node.kubectl("create", "secret", "generic", SECRET, *literals)
        for command in self.preparation:
            environment = {**self._environment, "KUBECONFIG": str(self._node.kubeconfig)}
            subprocess.run(["/bin/sh", "-c", command], env=environment, check=True)
        self._environment["KUBECONFIG"] = str(self._write_kubeconfig())

    def remove(self) -> None:
        """Delete what the commands have created."""
        self._node.kubectl("delete", "pods,services,configmaps", "--selector=spark-app-selector", "--wait=false")
        self._node.kubectl("delete", f"secret/{SECRET}", "rolebinding/spark", "role/spark", "serviceaccount/spark")

    def submit(self) -> subprocess.Popen[bytes]:
        """Start the page's command, which waits for the driver's end."""
        command = self._submit
        for shown, own in {
            "https://APISERVER:6443": self._cluster()["server"],
            "ghcr.io/rota-dev/rota-pipeline:0.1.0": self._node.build("pipeline"),
            "spark.executor.instances=16": f"spark.executor.instances={EXECUTORS}",
            "spark.executor.cores=4": "spark.executor.cores=1",
            "spark.executor.memory=8g": "spark.executor.memory=700m",
            "memoryOverhead=4g": "memoryOverhead=1g",
            "AWS_REGION=eu-central-1": f"AWS_REGION={self._bucket.variables['AWS_REGION']}",
            "python3.13": f"python{sys.version_info.major}.{sys.version_info.minor}",
            "s3://example-rota/lake": self.lake,
        }.items():
            assert shown in command
            command = command.replace(shown, own)
        return subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], env=self._environment, stdin=subprocess.DEVNULL)

    def pods(self, role: str) -> dict[str, str]:
        """Return the phases of the application's pods, by name."""
        listed = self._node.kubectl("get", "pods", f"--selector=spark-role={role}", "-o", "json")
        pods: list[dict[str, Any]] = json.loads(listed)["items"]
        return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in pods}

    def delete(self, pod: str) -> None:
        """Delete a pod at once, as if its machine were lost."""
        self._node.kubectl("delete", "pod", pod, "--grace-period=0", "--force")

    def driver_log(self) -> str:
        """Return what the driver has printed."""
        return self._node.kubectl("logs", "--selector=spark-role=driver", "--tail=-1", check=False)

    def _write_kubeconfig(self) -> Path:
        """Write a kubeconfig with a token of the page's ServiceAccount: Spark cannot read the admin's key."""
        cluster = self._cluster()
        user = {"token": self._node.kubectl("create", "token", "spark").strip()}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "node", "cluster": cluster}],
            "users": [{"name": "spark", "user": user}],
            "contexts": [{"name": "node", "context": {"cluster": "node", "user": "spark"}}],
            "current-context": "node",
        }
        path = self._folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def _cluster(self) -> dict[str, str]:
        """Return the address of the API server and its certificate authority, as a kubeconfig has them."""
        config = json.loads(self._node.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        cluster: dict[str, str] = config["clusters"][0]["cluster"]
        return cluster


def _page_commands() -> list[str]:
    """Return the page's commands for Kubernetes, which end with the first spark-submit."""
    commands = [typed.command for typed in typed_commands(PAGE, "Where it runs")]
    last = next(number for number, command in enumerate(commands) if command.startswith("spark-submit"))
    return commands[: last + 1]


@pytest.fixture
def submission(node_cluster: NodeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submission]:
    server = S3Server(node_cluster.instance, node_cluster.address, node_cluster.prefix)
    server.up()
    bucket = server.bucket()
    for name, value in bucket.variables.items():
        monkeypatch.setenv(name, value)
    submission = Submission(node_cluster, tmp_path / "submission", bucket)
    submission.prepare()
    yield submission
    submission.remove()
    server.down()


def rota(*arguments: str) -> None:
    command = [sys.executable, "-m", "rota.cli", "pipeline", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "ROTA_SPARK_MEMORY": "1g"})


def contents(lake: str) -> dict[str, list[dict[str, Any]]]:
    return {name: table_rows(lake, name) for name in COMPARED}


def copy_journal(lake: str, target: str) -> None:
    source_store, target_store = open_store(f"{lake}/journal"), open_store(f"{target}/journal")
    for info in source_store.list_objects():
        target_store.create(info.key, source_store.read(info.key))


def has_commit(lake: str) -> Callable[[], bool]:
    return lambda: any("_delta_log" in info.key for info in open_store(lake).list_objects("lake"))


def test_pipeline_on_a_node_with_a_lake_in_s3_gives_the_same_tables_though_it_loses_an_executor(
    submission: Submission, tmp_path: Path
) -> None:
    expected = str(tmp_path / "lake")
    rota("generate", "--groups=4", "--hours=3", "--to", expected)
    rota("run", expected)
    copy_journal(expected, submission.lake)
    is_reached = has_commit(submission.lake)
    with submission.submit() as process:
        try:
            eventually(lambda: is_reached() or process.poll() is not None, LONGEST)
            assert process.poll() is None, submission.driver_log()
            first = sorted(submission.pods("executor"))
            assert len(first) == EXECUTORS
            submission.delete(first[0])
            process.wait(LONGEST)
        finally:
            process.kill()
    assert list(submission.pods("driver").values()) == ["Succeeded"], submission.driver_log()
    assert sorted(submission.pods("executor")) != first
    assert contents(submission.lake) == contents(expected)
