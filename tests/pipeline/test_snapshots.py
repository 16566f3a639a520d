"""Snapshots of a lake and plans of ingest runs: created once, never lost, and read by number or time."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from pipeline.lake_files import publish_snapshots
from rota.cli.commands.pipeline.opened_lake import open_snapshot
from rota.object_store import FolderStore, ObjectStore, StoreError, open_store
from rota.pipeline.lake.runs import PlannedSegment, RunStore
from rota.pipeline.lake.snapshots import EMPTY_SNAPSHOT, LakeSnapshot, SnapshotStore
from rota.pipeline.lake.tables import Lake

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def store(lake_uri: str) -> ObjectStore:
    return open_store(lake_uri)


def store_snapshot(store: ObjectStore, number: int, created_at: datetime) -> None:
    snapshot = LakeSnapshot(number, created_at, run=number, tables={"lake/offsets": number})
    assert store.create(f"_rota/snapshots/{number}.json", msgspec.json.encode(snapshot))


def test_lake_without_snapshots_has_the_empty_one(store: ObjectStore) -> None:
    snapshots = SnapshotStore(store)
    assert snapshots.latest() == EMPTY_SNAPSHOT
    assert EMPTY_SNAPSHOT.version("lake/offsets") is None
    with pytest.raises(ValueError, match=r"(does not exist|has no snapshot yet); `rota pipeline ingest .*` makes one"):
        Lake(store.uri).snapshot()


def test_lake_snapshot_continues_the_one_before(store: ObjectStore) -> None:
    snapshots = SnapshotStore(store)
    first = snapshots.publish(snapshots.latest(), {"lake/offsets": 0, "lake/gap": None}, run=1)
    second = snapshots.publish(first, {"marts/rollup": 4})
    assert [first.number, first.run, first.tables] == [1, 1, {"lake/offsets": 0}]
    assert [second.number, second.run, second.tables] == [2, 1, {"lake/offsets": 0, "marts/rollup": 4}]
    assert second.created_at >= first.created_at
    lake = Lake(store.uri)
    assert lake.snapshot() == second
    assert lake.snapshot(number=1) == first


def test_lake_snapshot_is_rebased_if_others_published_other_tables(store: ObjectStore) -> None:
    snapshots = SnapshotStore(store)
    base = snapshots.publish(EMPTY_SNAPSHOT, {"lake/offsets": 0, "marts/rollup": 0}, run=1)
    snapshots.publish(base, {"lake/offsets": 1}, run=2)
    rebased = snapshots.publish(base, {"marts/rollup": 1})
    assert [rebased.number, rebased.run, rebased.tables] == [3, 2, {"lake/offsets": 1, "marts/rollup": 1}]


def test_lake_snapshot_is_refused_if_another_command_published_the_same_table(store: ObjectStore) -> None:
    snapshots = SnapshotStore(store)
    snapshots.publish(EMPTY_SNAPSHOT, {"marts/rollup": 0})
    with pytest.raises(ValueError, match="has published marts/rollup in snapshot 1 since this one read snapshot 0"):
        snapshots.publish(EMPTY_SNAPSHOT, {"marts/rollup": 1})
    assert snapshots.numbers() == [1]


def test_lake_snapshot_of_a_run_that_is_published_already_is_the_newest(store: ObjectStore) -> None:
    snapshots = SnapshotStore(store)
    first = snapshots.publish(EMPTY_SNAPSHOT, {"lake/offsets": 0}, run=1)
    assert snapshots.publish(EMPTY_SNAPSHOT, {"lake/offsets": 0}, run=1) == first
    assert snapshots.numbers() == [1]


def test_lake_snapshot_of_a_run_has_also_what_a_later_process_of_the_run_has_appended(store: ObjectStore) -> None:
    snapshots = SnapshotStore(store)
    snapshots.publish(EMPTY_SNAPSHOT, {"lake/offsets": 0}, run=1)
    snapshots.publish(snapshots.latest(), {"lake/offsets": 1}, run=2)
    second = snapshots.publish(EMPTY_SNAPSHOT, {"lake/offsets": 0, "lake/gap": 0}, run=1)
    assert [second.number, second.run, second.tables] == [3, 2, {"lake/offsets": 1, "lake/gap": 0}]


class RacingSnapshots(SnapshotStore):
    """Another command publishes a snapshot just after the newest one was read."""

    def latest(self) -> LakeSnapshot:
        newest = super().latest()
        if newest.number == 1:
            self.publish(newest, {"lake/verdict": 1}, run=2)
        return newest


def test_lake_command_writes_its_marts_if_a_snapshot_is_published_while_it_starts(
    store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = Lake(store.uri)
    lake.snapshots.publish(EMPTY_SNAPSHOT, {"lake/verdict": 0}, run=1)
    lake.snapshots = RacingSnapshots(store)
    opened = open_snapshot(lake, None, None)
    opened.publish()
    assert opened.snapshot.number == 1
    assert "nothing is written" not in capsys.readouterr().err
    open_snapshot(lake, 1, None).publish()
    assert "nothing is written to the lake: snapshot 1 is an older one" in capsys.readouterr().err


def test_lake_snapshot_as_of_a_time_is_the_newest_not_later(store: ObjectStore) -> None:
    for number in range(3, 9):
        store_snapshot(store, number, NOON + timedelta(hours=number))
    snapshots = SnapshotStore(store)
    assert snapshots.as_of(NOON + timedelta(hours=5)).number == 5
    assert snapshots.as_of(NOON + timedelta(hours=5, minutes=59)).number == 5
    assert Lake(store.uri).snapshot(as_of=NOON + timedelta(days=9)).number == 8
    with pytest.raises(ValueError, match=r"no snapshot as old as 2026-11-21T12:00:00.*the oldest is of 2026-11-21T15"):
        snapshots.as_of(NOON)


class ExpiringStore(FolderStore):
    """A maintenance removes the snapshots before number 6 just after they were listed."""

    has_expired = False

    def read(self, key: str) -> bytes:
        if not self.has_expired:
            self.has_expired = True
            for number in range(1, 6):
                self.delete(f"_rota/snapshots/{number}.json")
        return super().read(key)


@pytest.mark.parametrize(("hours", "expected"), [(5, "has no snapshot as old as"), (7, "7")])
def test_lake_snapshot_as_of_a_time_is_chosen_from_those_that_have_not_expired_meanwhile(
    tmp_path: Path, hours: int, expected: str
) -> None:
    store = ExpiringStore(tmp_path)
    for number in range(1, 9):
        store_snapshot(store, number, NOON + timedelta(hours=number))
    try:
        chosen = str(SnapshotStore(store).as_of(NOON + timedelta(hours=hours)).number)
    except ValueError as error:
        chosen = str(error)
    assert expected in chosen


def test_lake_snapshots_that_two_maintenances_expire_at_once_are_listed_again(tmp_path: Path) -> None:
    store = ExpiringStore(tmp_path)
    for number in range(1, 9):
        store_snapshot(store, number, NOON)
    assert SnapshotStore(store).expire(NOON).number == 6


def test_lake_snapshot_is_never_older_than_the_one_before_whatever_the_clock_shows(store: ObjectStore) -> None:
    future = datetime.now(UTC) + timedelta(days=1)
    store_snapshot(store, 1, future)
    snapshots = SnapshotStore(store)
    assert snapshots.publish(snapshots.latest(), {}).created_at == future


def test_lake_names_existing_snapshots_if_a_number_is_missing(store: ObjectStore) -> None:
    snapshots = SnapshotStore(store)
    with pytest.raises(ValueError, match="has no snapshot 7; it has none"):
        snapshots.get(7)
    for number in (1, 2, 3, 5, 8, 9):
        store_snapshot(store, number, NOON)
    with pytest.raises(ValueError, match=r"has no snapshot 7; it has 1-3, 5, 8-9$"):
        snapshots.get(7)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"number":2}',
        b'{"number":1,"created_at":5,"run":1,"tables":{}}',
        b'{"number":2,"created_at":"2026-11-21T12:00:00Z","run":1,"tables":{"lake/files":-1}}',
    ],
)
def test_lake_names_a_damaged_snapshot_and_reads_the_others(store: ObjectStore, content: bytes) -> None:
    store_snapshot(store, 1, NOON)
    store.create("_rota/snapshots/2.json", content)
    snapshots = SnapshotStore(store)
    with pytest.raises(ValueError, match=r"_rota/snapshots/2.json is damaged \(.*can be read by their numbers"):
        snapshots.latest()
    assert snapshots.get(1).number == 1


def test_lake_snapshot_under_another_number_is_damaged(store: ObjectStore) -> None:
    store.create("_rota/snapshots/2.json", msgspec.json.encode(LakeSnapshot(1, NOON, 1, {})))
    with pytest.raises(ValueError, match=r"2.json is damaged: it is of snapshot 1"):
        SnapshotStore(store).get(2)


def test_lake_loses_no_snapshot_of_processes_that_publish_at_once(store: ObjectStore) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for publishing in [pool.submit(publish_snapshots, store.uri, table, 50) for table in ("marts/a", "marts/b")]:
            publishing.result()
    snapshots = SnapshotStore(store)
    assert snapshots.numbers() == [*range(1, 101)]
    assert snapshots.latest().tables == {"marts/a": 49, "marts/b": 49}
    versions = [snapshots.get(number).tables.get("marts/a", -1) for number in range(1, 101)]
    assert versions == sorted(versions)


def test_ingest_run_keeps_the_segments_of_its_first_attempt(store: ObjectStore) -> None:
    runs = RunStore(store)
    assert runs.read(1) is None
    first = runs.create(1, "s3://bucket/journal", (PlannedSegment("date=2026-11-21/08-a.jsonl.gz", 12, "e1"),))
    assert runs.create(1, "s3://bucket/other", ()) == first
    assert RunStore(store).read(1) == first


class DeletingStore(FolderStore):
    """Another process has stored each object already, and deletes it at once."""

    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        self.delete(key)
        return False


def test_ingest_run_whose_plan_is_not_stored_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"_rota/runs/1.json was deleted while the run was planned; ingest again"):
        RunStore(DeletingStore(tmp_path)).create(1, "s3://bucket/journal", ())


PLAN_OF_RUN_2 = b'{"number":2,"journal":"a","segments":[{"key":"a","size_bytes":1,"etag":"e"}]}'


@pytest.mark.parametrize("content", [b"[]", b'{"number":1,"journal":"a","segments":[]}', PLAN_OF_RUN_2])
def test_ingest_names_a_damaged_plan_of_a_run(store: ObjectStore, content: bytes) -> None:
    store.create("_rota/runs/1.json", content)
    with pytest.raises(ValueError, match=r"_rota/runs/1.json is damaged.*delete it only if no table has rows of run 1"):
        RunStore(store).read(1)


@pytest.mark.parametrize("name", ["_checkpoint", "offsets/date=2026-11-21", "quarantine"])
def test_lake_of_the_former_layout_says_how_to_make_it_anew(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"lake of an earlier version of Rota.*make it anew.*rota pipeline ingest"):
        Lake(str(tmp_path))


def test_lake_folder_whose_name_deltalake_would_decode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be a lake: its path contains %"):
        Lake(str(tmp_path / "a%20b"))
