"""A real `rota pipeline ingest`, killed by the system in the midst: the lake has each line once all the same."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from ground.poll import eventually
from pipeline.small_spark import LONGEST, SMALL
from rota.pipeline.common.paths import HOUR_CHARACTERS
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.journaling_replay import JournalingReplay, JournalLine


def hours() -> dict[str, list[bytes]]:
    """Return the lines of three hours of a group's, by hour."""
    found: defaultdict[str, list[bytes]] = defaultdict(list)

    def keep(line: JournalLine) -> None:
        found[str(line["at"])[:HOUR_CHARACTERS]].append(msgspec.json.encode(line) + b"\n")

    JournalingReplay(generate_history(1, 7, 2.5), keep).run()
    return found


def wrote(journal: Path, hour: str, lines: list[bytes]) -> None:
    day, _, number = hour.partition("T")
    path = journal / f"date={day}" / f"{number}-a.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))


@contextmanager
def begun(journal: Path, lake: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run it; what is left of it in the end is killed."""
    words = ["pipeline", "ingest", str(journal), "--to", str(lake), "--all", "-o", "json"]
    with (lake.parent / "said").open("wb") as said, (lake.parent / "complained").open("wb") as complained:
        process = subprocess.Popen(
            [sys.executable, "-m", "rota.cli", *words],
            stdout=said,
            stderr=complained,
            env=os.environ | SMALL,
            start_new_session=True,  # its Java is in its group, and nothing else
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def killed(journal: Path, lake: Path, there: Callable[[], bool]) -> None:
    """Begin, and kill it and its Java as soon as something is there."""
    with begun(journal, lake) as process:
        eventually(lambda: there() or process.poll() is not None, LONGEST)
        assert process.poll() is None, "it was done before"


def rows(lake: Path) -> Counter[str]:
    """Return how often each row of each table is there, read without Spark."""
    found: Counter[str] = Counter()
    for path in lake.glob("[!_]*/date=*/batch=*/*.parquet"):
        kind = path.relative_to(lake).parts[0]
        found.update(f"{kind} {json.dumps(row, default=str)}" for row in pq.ParquetFile(path).read().to_pylist())
    return found


@pytest.mark.timeout(3 * LONGEST)
@pytest.mark.slow("an ingest that is killed at any moment of its run")
def test_ingest_killed_at_any_point_leaves_each_line_in_the_lake_once(tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    first, *others = hours().items()
    wrote(journal, *first)
    killed(journal, lake, lambda: any(lake.glob("_checkpoint/offsets/0")))
    for hour in others:
        wrote(journal, *hour)
    killed(journal, lake, lambda: any(lake.glob("[!_]*/date=*/batch=*/*.parquet")))
    with begun(journal, lake) as last:
        assert last.wait(LONGEST) == 0, (tmp_path / "complained").read_text()
    assert not json.loads((tmp_path / "said").read_text())["quarantine"]
    lines = {line for path in journal.glob("date=*/*.jsonl") for line in path.read_bytes().splitlines()}
    kinds = Counter(json.loads(line)["kind"] for line in lines)
    found = rows(lake)
    assert set(found.values()) == {1}
    assert Counter(row.partition(" ")[0] for row in found) == kinds
