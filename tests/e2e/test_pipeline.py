"""The pipeline in the cluster: the chart's CronJob, run once with the image of the Dockerfile."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chart.charts import CHART
from e2e.release import OPERATOR_NAMESPACE, WAIT, Installation

pytestmark = pytest.mark.node

JOURNAL = "journal"
HISTORY = "history"
POLICIES = "tried"
POLICY = "kind: RebalancePolicy\nmetadata: {name: even}\nspec: {strategy: Balanced}\n"
RESOURCES = {"requests": {"cpu": "100m", "memory": "1Gi"}}  # fits on a node with other pods
JOB_TIMEOUT = "1800s"  # for a busy machine


@pytest.fixture
def folders(installation: Installation, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Create a volume claim for the journal and one for the tables, each on a folder of the node."""
    paths = {name: tmp_path / name for name in (JOURNAL, HISTORY)}
    for name, folder in paths.items():
        folder.mkdir()
        folder.chmod(0o777)
        storage: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = {"hostPath": {"path": str(folder)}, "capacity": {"storage": "1Gi"}}
        claim = {"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
        for kind, namespace, spec in (
            ("PersistentVolume", {}, volume),
            ("PersistentVolumeClaim", {"namespace": OPERATOR_NAMESPACE}, claim),
        ):
            body = {
                "apiVersion": "v1",
                "kind": kind,
                "metadata": {"name": name, **namespace},
                "spec": {**storage, **spec},
            }
            installation.node.kubectl("apply", "-f-", feed=json.dumps(body))
    yield paths
    installation.operator_kubectl("delete", "pvc", *paths)
    installation.operator_kubectl("delete", "pv", *paths)


@pytest.fixture
def scheduled(installation: Installation, folders: dict[str, Path]) -> Iterator[dict[str, Path]]:
    """Upgrade to a release that writes a journal, with a CronJob that reads it."""
    image, _, tag = installation.node.build("pipeline").partition(":")
    installation.operator_kubectl("create", "configmap", POLICIES, f"--from-literal=policies.yaml={POLICY}")
    pipeline_values = {
        "journal": {"kind": "volume", "claim": {"existing": JOURNAL}},
        "pipeline": {
            "enabled": True,
            "image": {"repository": image, "tag": tag, "pullPolicy": "Never"},
            "claim": HISTORY,
            "policies": POLICIES,
            "memory": "1g",
            "resources": RESOURCES,
        },
    }
    installation.helm_release("upgrade", str(CHART), *WAIT, values={**installation.values, **pipeline_values})
    yield folders
    installation.helm_release("upgrade", str(CHART), *WAIT, values=installation.values)
    installation.operator_kubectl("delete", "configmap", POLICIES)
    installation.operator_kubectl("delete", "jobs", "--all")


@pytest.mark.slow("the pipeline as a CronJob, with its image, on a node")
def test_pipeline_cronjob_of_the_chart_writes_tables_and_a_recommendation(
    installation: Installation, scheduled: dict[str, Path]
) -> None:
    generate_journal(scheduled[JOURNAL])
    installation.operator_kubectl("create", "job", "once", "--from=cronjob/rota-pipeline")
    try:
        installation.operator_kubectl("wait", "job/once", "--for=condition=Complete", f"--timeout={JOB_TIMEOUT}")
    finally:
        print(installation.operator_kubectl("logs", "job/once", "--all-containers", check=False))
    results = {path.name for path in scheduled[HISTORY].iterdir()}
    assert results == {"lake", "recommendation"}
    assert list(scheduled[HISTORY].glob("lake/marts/rollup/**/*.parquet"))
    steps = ("ingest", "rollup", "timeline", "simulate", "recommend")
    # The operator writes to the same journal: a segment that it stores meanwhile is ingested by a run of its own.
    assert len(list(scheduled[HISTORY].glob("lake/_rota/snapshots/*.json"))) >= len(steps)
    assert (scheduled[HISTORY] / "recommendation" / "report.html").exists()


def generate_journal(journal: Path) -> None:
    """Write two hours of a group to the journal."""
    lake = journal.parent / "generated"
    command = [sys.executable, "-m", "rota.cli", "pipeline", "generate", "--groups=1", "--hours=2", "--to", str(lake)]
    subprocess.run(command, check=True, env={**os.environ, "ROTA_SPARK_MEMORY": "1g"})
    for path in sorted((lake / "journal").rglob("*.jsonl.gz")):
        target = journal / path.relative_to(lake / "journal")
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
