"""The pipeline in the cluster: the chart's CronJob, run once with the image of the Dockerfile."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chart.charts import CHART
from e2e.release import HOME, WAIT, Installed

pytestmark = pytest.mark.node

JOURNAL, HISTORY, POLICIES = "journal", "history", "tried"
POLICY = "kind: RebalancePolicy\nmetadata: {name: even}\nspec: {strategy: Balanced}\n"
SMALL = {"requests": {"cpu": "100m", "memory": "1Gi"}}  # beside whatever else the node has
LONG = "1800s"  # on a busy machine


@pytest.fixture
def folders(installed: Installed, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Have a claim for the journal, one for tables, each on a folder of the node's."""
    made = {name: tmp_path / name for name in (JOURNAL, HISTORY)}
    for name, folder in made.items():
        folder.mkdir()
        folder.chmod(0o777)
        room: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = {"hostPath": {"path": str(folder)}, "capacity": {"storage": "1Gi"}}
        claim = {"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
        for kind, where, spec in (
            ("PersistentVolume", {}, volume),
            ("PersistentVolumeClaim", {"namespace": HOME}, claim),
        ):
            body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, **where}, "spec": {**room, **spec}}
            installed.node.kubectl("apply", "-f-", feed=json.dumps(body))
    yield made
    installed.home("delete", "pvc", *made)
    installed.home("delete", "pv", *made)


@pytest.fixture
def scheduled(installed: Installed, folders: dict[str, Path]) -> Iterator[dict[str, Path]]:
    """Have a release that writes a journal, and a CronJob that reads it."""
    image, _, tag = installed.node.build("pipeline").partition(":")
    installed.home("create", "configmap", POLICIES, f"--from-literal=policies.yaml={POLICY}")
    more = {
        "journal": {"kind": "volume", "claim": {"existing": JOURNAL}},
        "pipeline": {
            "enabled": True,
            "image": {"repository": image, "tag": tag, "pullPolicy": "Never"},
            "claim": HISTORY,
            "policies": POLICIES,
            "memory": "1g",
            "resources": SMALL,
        },
    }
    installed.release("upgrade", str(CHART), *WAIT, values={**installed.values, **more})
    yield folders
    installed.release("upgrade", str(CHART), *WAIT, values=installed.values)
    installed.home("delete", "configmap", POLICIES)
    installed.home("delete", "jobs", "--all")


@pytest.mark.slow("the pipeline as a CronJob, with its image, on a node")
def test_pipeline_cronjob_of_the_chart_writes_tables_and_a_recommendation(
    installed: Installed, scheduled: dict[str, Path]
) -> None:
    generated(scheduled[JOURNAL])
    installed.home("create", "job", "once", "--from=cronjob/rota-pipeline")
    try:
        installed.home("wait", "job/once", "--for=condition=Complete", f"--timeout={LONG}")
    finally:
        print(installed.home("logs", "job/once", "--all-containers", check=False))
    made = {path.name for path in scheduled[HISTORY].iterdir()}
    assert made == {"lake", "rollup", "recommendation"}
    assert list(scheduled[HISTORY].glob("rollup/**/*.parquet"))
    assert (scheduled[HISTORY] / "recommendation" / "report.html").exists()


def generated(journal: Path) -> None:
    """Put some hours of a group into the journal, which were over long ago."""
    made = journal.parent / "generated"
    command = [sys.executable, "-m", "rota.cli", "pipeline", "generate", "--groups=1", "--hours=2", "--to", str(made)]
    subprocess.run(command, check=True, env={**os.environ, "ROTA_SPARK_MEMORY": "1g"})
    long_ago = time.time() - 3600
    for path in sorted(made.rglob("*.jsonl")):
        where = journal / path.relative_to(made)
        where.parent.mkdir(parents=True, exist_ok=True)
        path.rename(where)
        os.utime(where, (long_ago, long_ago))
