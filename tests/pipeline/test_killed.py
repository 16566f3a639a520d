"""A real `rota pipeline ingest` that is killed while it runs: nevertheless the lake has each line once."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipeline.lake_folders import table_rows, write_segment
from pipeline.small_spark import LONGEST, delete_lease, kill_when, run_ingest
from rota.pipeline.common.schemas import JOURNAL_SCHEMAS
from rota.pipeline.synthetic.generate import HOUR_CHARACTERS
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.journaling_replay import JournalingReplay, JournalLine


def lines_by_hour() -> dict[str, list[bytes]]:
    """Return the lines of three hours of a group, by hour."""
    lines: defaultdict[str, list[bytes]] = defaultdict(list)

    def collect_line(line: JournalLine) -> None:
        lines[str(line["at"])[:HOUR_CHARACTERS]].append(msgspec.json.encode(line) + b"\n")

    JournalingReplay(generate_history(1, 7, 2.5), collect_line).run()
    return lines


def kill_ingest(lake: Path, is_reached: Callable[[], bool]) -> None:
    """Start an ingest, and kill it with its Java as soon as a condition is met."""
    with run_ingest(str(lake), lake.parent) as process:
        kill_when(process, is_reached)
    delete_lease(str(lake))


def count_rows(lake: Path) -> Counter[str]:
    """Count each row of each kind in the newest snapshot, read without Spark."""
    counts: Counter[str] = Counter()
    for kind in JOURNAL_SCHEMAS:
        counts.update(f"{kind} {row['digest']!r}" for row in table_rows(lake, kind))
    return counts


@pytest.mark.timeout(3 * LONGEST)
@pytest.mark.slow("an ingest that is killed at random times")
def test_ingest_killed_at_any_point_leaves_each_line_in_the_lake_once(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    first, *later_hours = lines_by_hour().items()
    write_hour(lake, *first)
    kill_ingest(lake, lambda: any(lake.glob("_rota/runs/*.json")))
    for lines_of_hour in later_hours:
        write_hour(lake, *lines_of_hour)
    kill_ingest(lake, lambda: any(lake.glob("lake/*/_delta_log/*.json")))
    with run_ingest(str(lake), tmp_path) as last:
        assert last.wait(LONGEST) == 0, (tmp_path / "stderr").read_text()
    assert not json.loads((tmp_path / "stdout").read_text())["quarantine"]
    segments = [gzip.decompress(path.read_bytes()) for path in lake.glob("journal/date=*/*.jsonl.gz")]
    lines = {line for segment in segments for line in segment.splitlines()}
    kinds = Counter(json.loads(line)["kind"] for line in lines)
    row_counts = count_rows(lake)
    assert set(row_counts.values()) == {1}
    assert Counter(row.partition(" ")[0] for row in row_counts) == kinds


def write_hour(lake: Path, hour: str, lines: list[bytes]) -> None:
    day, _, number = hour.partition("T")
    write_segment(lake, f"{number}-a.jsonl.gz", *lines, day=f"date={day}")
