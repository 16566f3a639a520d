"""`rota pipeline` on Spark's own cluster, by the commands of docs/pipeline.md: the results are those of one machine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from ground.cluster import PROJECT
from ground.s3 import Bucket
from ground.spark import SparkCluster, plain_python
from kube.pages import typed_commands
from pipeline.lake_files import table_rows
from pipeline.small_spark import LONGEST, delete_lease, kill_when, killed_at_the_end
from rota.cli import main
from rota.object_store import open_store
from rota.pipeline.lake.tables import RECORD_TABLES

pytestmark = [pytest.mark.slow("the pipeline on a Spark cluster that loses a worker"), pytest.mark.timeout(3 * LONGEST)]

PAGE = PROJECT / "docs" / "pipeline.md"
COMPARED = (*(spec.name for spec in RECORD_TABLES.values()), "marts/rollup", "marts/intervals", "marts/violations")
DEFAULTS = """
spark.driver.host {host}
spark.driver.memory 1g
spark.driver.defaultJavaOptions -XX:TieredStopAtLevel=1
spark.executor.memory 700m
spark.executor.defaultJavaOptions -XX:TieredStopAtLevel=1
spark.ui.enabled false
"""
# `pip` of the page: the wheel of this checkout instead of a release, and the versions of uv.lock.
PIP = """#!/bin/sh
exec {uv} pip install --quiet --python {python} --constraint {folder}/locked.txt --target "$3" \\
  'rota-operator[pipeline] @ file://{wheel}'
"""


class Submission:
    """Types the page's commands into a shell whose programs are those of the cluster."""

    def __init__(self, cluster: SparkCluster, folder: Path) -> None:
        self.folder = folder
        pack, in_folder, jars, in_bucket = _page_commands()
        self._pack = pack
        self.in_folder = in_folder
        self.in_bucket = f"{jars}{in_bucket}"
        self._cluster = cluster
        self._environment = os.environ | cluster.variables
        self._environment |= {"SPARK_CONF_DIR": str(folder), "PATH": f"{folder}/bin:{cluster.variables['PATH']}"}
        (folder / "spark-defaults.conf").write_text(DEFAULTS.format(host=cluster.host))

    def prepare(self) -> None:
        """Build the wheel, and pack it with its libraries as the page says."""
        program = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert program, "uv is not installed"
        uv = (program, "--quiet", "--project", str(PROJECT))
        subprocess.run([*uv, "build", "--wheel", "--out-dir", self.folder, PROJECT], check=True)
        export = [*uv, "export", "--frozen", "--no-dev", "--no-hashes", "--no-emit-workspace", "--extra=pipeline"]
        (self.folder / "locked.txt").write_bytes(subprocess.run(export, check=True, stdout=subprocess.PIPE).stdout)
        [wheel] = self.folder.glob("*.whl")
        (self.folder / "bin").mkdir()
        pip = self.folder / "bin" / "pip"
        pip.write_text(PIP.format(uv=program, python=plain_python(), folder=self.folder, wheel=wheel))
        pip.chmod(0o755)
        with self.typing(self._pack) as shell:
            assert shell.wait(LONGEST) == 0, self.errors()

    @contextmanager
    def typing(self, commands: str, variables: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """Run commands; their remaining processes are killed in the end."""
        exports = next(line for line in self._pack.splitlines() if line.startswith("export "))
        script = f"set -eu\n{exports}\n{commands}"
        with self._errors.open("wb") as errors:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", script],
                cwd=self.folder,
                env={**self._environment, **(variables or {})},
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        with killed_at_the_end(shell):
            yield shell

    def to(self, commands: str, lake: str) -> str:
        """Return commands of the page for the cluster and a lake."""
        for shown, own in {
            "spark://SPARK:7077": self._cluster.url,
            "/shared/lake": lake,
            "s3://example-rota/lake": lake,
        }.items():
            commands = commands.replace(shown, own)
        return commands

    def errors(self) -> str:
        """Return what the commands have printed."""
        return self._errors.read_text()

    @property
    def _errors(self) -> Path:
        return self.folder / "printed"


def _page_commands() -> tuple[str, str, str, str]:
    """Return the page's commands that pack, submit with a lake in a folder, fetch jars, and submit with a bucket."""
    commands = [typed.command for typed in typed_commands(PAGE, "Where it runs")]
    commands = commands[commands.index(next(command for command in commands if command.startswith("pip "))) :]
    first, second = (number for number, command in enumerate(commands) if command.startswith("spark-submit"))
    return "".join(commands[:first]), commands[first], "".join(commands[first + 1 : second]), commands[second]


@pytest.fixture(scope="module")
def submission(spark_cluster: SparkCluster, tmp_path_factory: pytest.TempPathFactory) -> Submission:
    submission = Submission(spark_cluster, tmp_path_factory.mktemp("submission"))
    submission.prepare()
    return submission


@pytest.fixture(scope="module")
def expected(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a lake that one machine has made."""
    assert spark.version  # the commands take its session
    lake = tmp_path_factory.mktemp("expected") / "lake"
    rota("generate", "--groups", 4, "--hours", 3, "--to", lake)
    rota("run", lake)
    return lake


def rota(*arguments: object) -> None:
    result = CliRunner().invoke(main, ["pipeline", *map(str, arguments)])
    assert result.exit_code == 0, (result.stderr, result.exception)


def copy_journal(expected: Path, lake: str) -> None:
    source, target = open_store(f"{expected}/journal"), open_store(f"{lake}/journal")
    for info in source.list_objects():
        target.create(info.key, source.read(info.key))


def contents(lake: str) -> dict[str, list[dict[str, Any]]]:
    return {name: table_rows(lake, name) for name in COMPARED}


def has_commit(lake: str, folder: str) -> Callable[[], bool]:
    return lambda: any("_delta_log" in info.key for info in open_store(lake).list_objects(folder))


def test_pipeline_on_a_spark_cluster_gives_the_same_tables(
    submission: Submission, expected: Path, tmp_path: Path
) -> None:
    lake = str(tmp_path / "lake")
    copy_journal(expected, lake)
    with submission.typing(submission.to(submission.in_folder, lake)) as shell:
        assert shell.wait(LONGEST) == 0, submission.errors()
    assert contents(lake) == contents(str(expected))


def test_pipeline_on_a_spark_cluster_with_a_lake_in_a_bucket_gives_the_same_tables_after_its_driver_was_killed(
    submission: Submission, expected: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.variables.items():
        monkeypatch.setenv(name, value)
    lake = f"{bucket.uri}/lake"
    copy_journal(expected, lake)
    commands = submission.to(submission.in_bucket, lake)
    with submission.typing(commands, bucket.variables) as shell:
        kill_when(shell, has_commit(lake, "lake"))
    delete_lease(lake)
    with submission.typing(commands, bucket.variables) as shell:
        assert shell.wait(LONGEST) == 0, submission.errors()
    assert contents(lake) == contents(str(expected))


def test_pipeline_on_a_spark_cluster_that_loses_a_worker_gives_the_same_tables(
    submission: Submission, spark_cluster: SparkCluster, expected: Path, tmp_path: Path
) -> None:
    lake = str(tmp_path / "lake")
    copy_journal(expected, lake)
    with submission.typing(submission.to(submission.in_folder, lake)) as shell:
        kill_when(
            shell, has_commit(lake, "marts/rollup")
        )  # a small ingest needs no executor, and ends before they start
        spark_cluster.kill_worker(2)
        assert shell.wait(LONGEST) == 0, submission.errors()
    spark_cluster.start_worker(2)
    assert "Lost executor" in submission.errors()
    assert contents(lake) == contents(str(expected))
