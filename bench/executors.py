"""Rollups on 1, 2 and 4 Spark executors, of a journal that one group dominates, and with too little memory.

The executors are processes of their own, with one core each. Times include the start of Spark. All runs over one
journal must produce the same rows. `ROTA_BENCH_GROUPS` (300) is the number of groups in the first journal, for one day;
the run with too little memory has a journal of its own, with SPILL_GROUPS.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import rota.cli
from bench.measure import Row, Sample
from ground.report import Missing
from ground.spark import spark_home
from rota.pipeline.lake.reading.arrow_rows import open_rows
from rota.pipeline.lake.tables import Lake

MARTS = ("marts/rollup", "marts/intervals", "marts/violations")
EXECUTOR_MB = 1024
SMALL_EXECUTOR_MB = 640  # enough for SPILL_GROUPS if sorts spill every 100 rows, not for 60 groups
SPILL_GROUPS = 40
DOMINANT_QUEUES = 1000  # of one group: half of all samples, since 30 other groups have some 30 queues each
# Event logs are written by name to the folder of the application, and not compressed: they are read below.
SETTINGS = """spark.driver.host 127.0.0.1
spark.driver.memory 1g
spark.executor.memory {executor_mb}m
spark.eventLog.enabled true
spark.eventLog.compress false
spark.eventLog.rolling.enabled false
spark.eventLog.dir {folder}
{additional}
"""


def rows() -> Iterator[Row]:
    """Time rollups of one journal with few and many executors, and of another one with a dominant group."""
    groups = int(os.environ.get("ROTA_BENCH_GROUPS", "300"))
    with tempfile.TemporaryDirectory() as folder:
        even = _Journal(Path(folder, "even"), "--groups", groups)
        first = even.compute(1)
        for executors in (1, 2, 4):
            sample = even.compute(executors) if executors > 1 else first
            yield Row(f"run over {groups} groups: {executors} executors, peer: 1", sample, first)
        yield _spilling_row(Path(folder, "spilling"))
        skewed = _Journal(Path(folder, "skewed"), "--groups", 31, "--largest", DOMINANT_QUEUES)
        first = skewed.compute(1)
        yield Row(
            f"one group of {DOMINANT_QUEUES:,} queues and 30 others: 2 executors, peer: 1", skewed.compute(2), first
        )


def _spilling_row(folder: Path) -> Row:
    """Time a run whose executors have too little memory, against one whose executors have enough."""
    journal = _Journal(folder, "--groups", SPILL_GROUPS)
    with_enough = journal.compute(2)
    sample = journal.compute(2, SMALL_EXECUTOR_MB, "spark.shuffle.spill.numElementsForceSpillThreshold 100")
    what = f"run over {SPILL_GROUPS} groups: 2 executors of {SMALL_EXECUTOR_MB} MB, which spill {journal.spilled}"
    return Row(f"{what}, peer: 2 of {EXECUTOR_MB} MB", sample, with_enough)


class _Journal:
    """A generated journal, and the lake that is computed from it."""

    def __init__(self, folder: Path, *options: object) -> None:
        self._lake = folder / "lake"
        self._settings = folder / "settings"
        self._settings.mkdir(parents=True)
        self._marts: list[list[str]] = []
        self.spilled = ""
        _call(sys.executable, "-m", "rota.cli", "pipeline", "generate", *options, "--to", self._lake)
        _call(sys.executable, "-m", "rota.cli", "pipeline", "ingest", self._lake)

    def compute(self, executors: int, executor_mb: int = EXECUTOR_MB, additional: str = "") -> Sample:
        """Compute rollups and owners with so many executors; raise Missing if rows differ from those before."""
        events = self._settings / "events"
        shutil.rmtree(events, ignore_errors=True)
        events.mkdir()
        settings = SETTINGS.format(executor_mb=executor_mb, folder=events, additional=additional)
        (self._settings / "spark-defaults.conf").write_text(settings)
        seconds = self._submit(f"local-cluster[{executors},1,{executor_mb}]")
        self.spilled = f"{_spilled_bytes(events) / 2**20:,.0f} MiB"
        marts = self._read_marts()
        if self._marts and marts != self._marts:
            raise Missing(f"the rows with {executors} executors differ from those of the run before")
        self._marts = marts
        return Sample([seconds])

    def _submit(self, master: str) -> float:
        started = time.perf_counter()
        _call(
            spark_home() / "bin" / "spark-submit",
            "--master",
            master,
            rota.cli.__path__[0] + "/__main__.py",
            "pipeline",
            "run",
            self._lake,
            "-o",
            "json",
            SPARK_CONF_DIR=str(self._settings),
        )
        return time.perf_counter() - started

    def _read_marts(self) -> list[list[str]]:
        lake = Lake(str(self._lake))
        snapshot = lake.snapshot()
        marts: list[list[str]] = []
        for name in MARTS:
            version = snapshot.version(name)
            rows = [] if version is None else open_rows(lake.store, name, version).to_table().to_pylist()
            marts.append(sorted(map(str, rows)))
        return marts


def _call(*command: object, **variables: str) -> None:
    own = {"SPARK_HOME": str(spark_home()), "SPARK_SCALA_VERSION": "2.13", "PYSPARK_PYTHON": sys.executable}
    environment = os.environ | own | variables
    ended = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise Missing(f"{command[0]} ended with {ended.returncode}: {ended.stderr[-500:]}")


def _spilled_bytes(events: Path) -> int:
    """Return how much all tasks wrote to disk because it did not fit in memory, from Spark's event logs."""
    spilled = 0
    for path in events.iterdir():
        for line in path.read_text().splitlines():
            metrics = json.loads(line).get("Task Metrics") or {}
            spilled += metrics.get("Disk Bytes Spilled", 0)
    return spilled
