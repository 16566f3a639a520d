"""Samples by pyarrow from a lake's files: in order of group and time, whatever the files are, and in little memory."""

import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rota.object_store import StoreError
from rota.pipeline.history.group_records import GroupRecords
from rota.pipeline.history.reading import sample_files, sorted_rows
from rota.pipeline.history.reading.group_rows import read_groups
from rota.pipeline.history.reading.sample_files import KEY_COLUMNS, SampleFiles

OFFSETS = pa.list_(pa.int64())
COLUMNS = pa.struct([("ids", pa.list_(pa.int32())), ("first", OFFSETS), ("last", OFFSETS), ("committed", OFFSETS)])
SCHEMA = pa.schema(
    [
        ("group", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("topics", pa.map_(pa.string(), pa.map_(pa.string(), COLUMNS))),
    ]
)
BUCKET = 3
Row = dict[str, Any]


def row(group: str, at: int, queues: int = 2) -> Row:
    offsets = [at] * queues
    columns = {"ids": list(range(queues)), "first": offsets, "last": offsets, "committed": [None] * queues}
    return {"group": group, "at": at, "topics": [("t", [("a", columns)])]}


def rows_of(groups: int, times: Iterable[int]) -> list[Row]:
    """Return rows in order of group and time."""
    return [row(f"shop/g{number}", at) for number in range(groups) for at in sorted(times)]


def write_files(folder: Path, *files: Sequence[Row]) -> SampleFiles:
    sizes: dict[str, int] = {}
    for number, rows in enumerate(files):
        path = folder / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), path, row_group_size=7)
        sizes[path.name] = path.stat().st_size
    return SampleFiles(str(folder), {BUCKET: sizes})


def read_keys(
    files: SampleFiles, columns: Sequence[str] = SCHEMA.names, since: datetime | None = None
) -> list[tuple[str, int]]:
    keys: list[tuple[str, int]] = []
    for batch in files.read(BUCKET, columns, since):
        keys += zip(batch["group"].to_pylist(), batch["at"].cast(pa.int64()).to_pylist(), strict=True)
    return keys


def keys_of(*files: Sequence[Row]) -> list[tuple[str, int]]:
    return sorted((one["group"], one["at"]) for rows in files for one in rows)


@pytest.fixture(params=[1, 5, 1000], ids=lambda size: f"{size}-samples")
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read batches, and sort parts, of few samples, and merge few runs at once."""
    monkeypatch.setattr(sample_files, "MAX_BUFFERED_SAMPLES", request.param)
    monkeypatch.setattr(sample_files, "MAX_SORTED_SAMPLES", 4 * request.param)
    monkeypatch.setattr(sorted_rows, "MAX_RUNS", 3)


DAY = rows_of(3, range(10))
NEXT_DAY = rows_of(4, range(10, 20))


@pytest.mark.parametrize(
    "files",
    [
        [],
        [[]],
        [DAY],
        [DAY, NEXT_DAY],
        [NEXT_DAY, [], DAY],
        [DAY[::2], DAY[1::2]],
        [DAY, DAY],
        [NEXT_DAY + DAY],
        [NEXT_DAY + DAY, DAY[::-1], NEXT_DAY[::3]],
        [DAY[number::8] for number in range(8)],
    ],
    ids=["none", "empty", "one", "days", "days-reversed", "interleaved", "equal", "joined", "unsorted", "many"],
)
@pytest.mark.usefixtures("sizes")
def test_rollup_reads_samples_in_order_of_group_and_time(tmp_path: Path, files: list[list[Row]]) -> None:
    stored = write_files(tmp_path, *files)
    assert read_keys(stored) == keys_of(*files)
    assert read_keys(stored, KEY_COLUMNS) == keys_of(*files)


@pytest.mark.usefixtures("sizes")
def test_rollup_reads_samples_in_order_from_random_files(tmp_path: Path) -> None:
    chance = random.Random(7)
    rows = rows_of(5, range(40))
    files: list[list[Row]] = [[] for _ in range(6)]
    for one in rows:
        chance.choice(files).append(one)
    chance.shuffle(files[0])
    assert read_keys(write_files(tmp_path, *files)) == keys_of(rows)


@pytest.mark.usefixtures("sizes")
def test_rollup_reads_only_late_samples_of_files_in_any_order(tmp_path: Path) -> None:
    files = [NEXT_DAY + DAY, DAY[::-1], NEXT_DAY[::-1]]
    stored = write_files(tmp_path, *files)
    for since in range(21):
        late = [[one for one in rows if one["at"] >= since] for rows in files]
        assert read_keys(stored, since=datetime.fromtimestamp(since / 1e6, UTC)) == keys_of(*late)


def test_rollup_reads_a_large_group_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_files, "MAX_BUFFERED_SAMPLES", 60)
    rows = [row("shop/large", at, queues=10) for at in range(100)]
    files = write_files(tmp_path, rows[:40], rows[40:])
    assert max(batch.num_rows for batch in files.read(BUCKET, SCHEMA.names)) <= 60 / 10
    assert len(read_keys(files)) == 100


def test_rollup_reads_a_large_group_among_small_ones_in_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_files, "_MAX_DECODED_ROWS", 2)
    monkeypatch.setattr(sample_files, "MAX_BUFFERED_SAMPLES", 5000)
    monkeypatch.setattr(sample_files, "MAX_SORTED_SAMPLES", 5000)
    large = [row("shop/large", at, queues=1000) for at in range(40)]
    small = rows_of(20, range(40))
    for rows in (small + large, large + small):  # in order, and not
        files = write_files(tmp_path, rows)
        assert read_keys(files) == keys_of(rows)
        batches = list(files.read(BUCKET, SCHEMA.names))
        assert max(batch["group"].to_pylist().count("shop/large") for batch in batches) <= 8


def test_rollup_leaves_no_temporary_files_of_unsorted_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spark_folder = tmp_path / "spark"
    spark_folder.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{spark_folder},/other")
    batches = write_files(tmp_path, DAY[::-1]).read(BUCKET, SCHEMA.names)
    next(batches)
    assert len(list(spark_folder.iterdir())) == 1
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert list(spark_folder.iterdir()) == []


def test_rollup_names_a_missing_or_damaged_file_of_samples(tmp_path: Path) -> None:
    files = write_files(tmp_path, DAY, DAY)
    content = (tmp_path / "1.parquet").read_bytes()
    for damaged in (content[: len(content) // 2], content[:4] + b"\xff" * 40 + content[44:]):
        (tmp_path / "1.parquet").write_bytes(damaged)
        with pytest.raises(StoreError, match=r"/1\.parquet is damaged; restore it, or recreate the lake: "):
            read_keys(files)
    (tmp_path / "0.parquet").unlink()
    with pytest.raises(StoreError, match=r"/0\.parquet is missing; restore it, read a newer snapshot"):
        read_keys(files)


RECORD = pa.schema([("group", pa.string()), ("kind", pa.string()), ("at", pa.timestamp("us", "UTC"))])


def verdict_times(*groups: str) -> Iterator[pa.RecordBatch]:
    """Yield a batch for each row."""
    for at, group in enumerate(groups):
        yield pa.RecordBatch.from_pylist([{"group": group, "kind": "verdict", "at": at}], RECORD)


def test_rollup_joins_records_and_samples_of_each_group() -> None:
    offsets = pa.RecordBatch.from_pylist([row("b", 5), row("b", 6), row("d", 7), row("e", 8)], SCHEMA)
    groups: dict[str, tuple[GroupRecords, int]] = {}
    for rows in read_groups(verdict_times("a", "b", "b", "c"), [offsets], "e".__ne__):
        groups[rows.group] = (rows.records, sum(batch.num_rows for batch in rows.offsets))
    assert {group: samples for group, (_, samples) in groups.items()} == {"a": 0, "b": 2, "c": 0, "d": 1}
    times = {group: records.recorded_until for group, (records, _) in groups.items()}
    assert [time and time.microsecond for time in times.values()] == [0, 2, 3, None]
