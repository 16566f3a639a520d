"""The pipeline over a synthetic fleet, compared with DuckDB and polars, which compute a part of the rollup.

`ROTA_BENCH_GROUPS` (100) is the number of groups, for one day; a group writes some 2,000 records a day. Each figure
includes the start of Spark, as it does for a user of the command.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.measure import Row, Sample

ROTA = [str(Path(sys.executable).with_name("rota")), "pipeline"]
PEERS = [sys.executable, "-m", "bench.rollups"]
STRATEGIES = ("Averagely", "AveragelyByCircle", "Sticky", "Balanced")


def rows() -> Iterator[Row]:
    """Generate one journal, and time each step once, because the steps take minutes."""
    groups = os.environ.get("ROTA_BENCH_GROUPS", "100")
    with tempfile.TemporaryDirectory() as folder:
        lake = str(Path(folder) / "lake")
        yield Row(f"generate a day of {groups} groups", _timed(*ROTA, "generate", "--groups", groups, "--to", lake))
        yield Row("ingest", _timed(*ROTA, "ingest", lake))
        ours = _timed(*ROTA, "rollup", lake)
        yield Row("rollup of the lake, peer: DuckDB's part of it", ours, _timed(*PEERS, "duckdb", lake))
        yield Row("rollup of the lake, peer: polars' part of it", ours, _timed(*PEERS, "polars", lake))
        played = ["simulate", lake, "--policies", _policies(Path(folder))]
        one_core, two_cores = (_timed(*ROTA, *played, cores=cores) for cores in (1, 2))
        yield Row(f"simulation of {len(STRATEGIES)} policies on 2 cores, peer: on 1", two_cores, one_core)


def _policies(folder: Path) -> str:
    """Write a policy for each strategy, and return the file's path."""
    path = folder / "policies.yaml"
    policy = "kind: RebalancePolicy\nmetadata: {{name: {0}}}\nspec: {{strategy: {1}}}\n"
    path.write_text("---\n".join(policy.format(strategy.lower(), strategy) for strategy in STRATEGIES))
    return str(path)


def _timed(*command: str, cores: int | None = None) -> Sample:
    env = os.environ | ({"ROTA_SPARK_CORES": str(cores)} if cores else {})
    began = time.perf_counter()
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-500:]}")
    return Sample([time.perf_counter() - began])
