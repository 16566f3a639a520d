"""Segments from the spool to their store: each once, in order, whatever happens to process, disk or store."""

import gzip
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ground.poll import eventually
from journal_segments import lines_by_hour, segments
from rota.kube.telemetry.journal import segment_rules, shipper, spool_folders
from rota.kube.telemetry.journal.folder_retention import FolderRetention
from rota.kube.telemetry.journal.line_appender import WriteFailedError
from rota.kube.telemetry.journal.segment_rules import LostRecords
from rota.kube.telemetry.journal.shipper import SegmentShipper
from rota.kube.telemetry.journal.spool import Spool
from rota.object_store import FolderStore, StoreError
from rota.object_store.segments import SegmentName, parse_segment

HOUR = "2026-11-21T09"
PROCESS = SegmentName("", "rota-a", "0f8e1c5a", "20261121T075812Z", 0)
LATER = PROCESS._replace(start="20261121T080000Z")
OTHER_POD = PROCESS._replace(pod="rota-b", uid="93b7d2f4")
AT = f"{HOUR}:00:00.000Z"


def a_line(number: int, size_bytes: int = 0) -> bytes:
    return msgspec.json.encode({"kind": "plan", "at": AT, "number": number, "text": size_bytes * "x"}) + b"\n"


class UnreliableStore(FolderStore):
    """A folder that fails as often as a test wants, after it has stored the object or before."""

    failures = 0
    is_stored = False

    def create(self, key: str, data: bytes) -> bool:
        if self.failures:
            self.failures -= 1
            if self.is_stored:
                super().create(key, data)
            raise StoreError(f"{self.uri}: {key} cannot be written: the server answered 503 Service Unavailable")
        return super().create(key, data)


class Shipping:
    """A spool and a store, with what was lost."""

    def __init__(self, folder: Path, max_bytes: int = 2**20) -> None:
        self.folder = folder
        self.store = UnreliableStore(folder / "store")
        self.lost: list[LostRecords] = []
        self._max_bytes = max_bytes

    def spool(self, process: SegmentName = PROCESS) -> Spool:
        return Spool(self.folder / "spool", process, self._max_bytes, self.lost.append)

    def ship(self, spool: Spool) -> SegmentShipper:
        """Ship what is in the spool, as a process does that ends."""
        spool.close_all()
        thread = SegmentShipper(self.store, spool, None)
        thread.start()
        thread.close(30.0)
        return thread

    @property
    def lines(self) -> list[bytes]:
        """The stored lines, in the order of the segments' names."""
        return [line + b"\n" for lines in lines_by_hour(self.folder / "store").values() for line in lines]

    @property
    def left(self) -> list[str]:
        """The files in the spool."""
        return sorted(path.name for path in self.folder.glob("spool/*/*"))


@pytest.fixture
def shipping(tmp_path: Path) -> Shipping:
    return Shipping(tmp_path)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Limit the size of files: the system cuts off a write at the limit, even within a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_journal_segments_are_shipped_and_leave_the_spool_empty(shipping: Shipping) -> None:
    spool = shipping.spool()
    for number in range(3):
        spool.append(HOUR, a_line(number))
        spool.close_all()
    assert spool.size_bytes == 3 * len(a_line(0))
    thread = shipping.ship(spool)
    assert shipping.lines == [a_line(number) for number in range(3)]
    assert (thread.shipped_segments, thread.failed_attempts, spool.size_bytes) == (3, 0, 0)
    assert not [*(shipping.folder / "spool").iterdir()]


def test_journal_segment_that_is_large_is_closed(shipping: Shipping) -> None:
    spool = shipping.spool()
    spool.append(HOUR, a_line(1, 30_000))
    assert spool.has_closed
    spool.append(HOUR, a_line(2))
    shipping.ship(spool)
    assert len(segments(shipping.folder / "store")) == 2


def test_journal_answer_that_was_lost_stores_no_segment_twice(shipping: Shipping) -> None:
    shipping.store.failures = 1
    shipping.store.is_stored = True
    spool = shipping.spool()
    spool.append(HOUR, a_line(1))
    shipping.ship(spool)
    shipping.ship(shipping.spool(LATER))
    assert shipping.lines == [a_line(1)]
    assert not shipping.left


@pytest.mark.parametrize(
    "former",
    [gzip.compress(a_line(0)), b"no gzip", gzip.compress(2 * a_line(1)), b""],
    ids=["another line", "no gzip", "more lines", "empty"],
)
def test_journal_segment_never_overwrites_another_one(shipping: Shipping, former: bytes) -> None:
    name = PROCESS._replace(hour=HOUR, sequence=1)
    shipping.store.create(name.key, former)
    spool = shipping.spool()
    spool.append(HOUR, a_line(1))
    shipping.ship(spool)
    assert shipping.store.read(name.key) == former
    assert gzip.decompress(shipping.store.read(name._replace(sequence=2).key)) == a_line(1)


def test_journal_store_that_fails_is_logged_once_and_tried_again(
    shipping: Shipping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_rules, "MAX_RETRY_SECONDS", 0.001)
    shipping.store.failures = 5
    spool = shipping.spool()
    for number in range(2):
        spool.append(HOUR, a_line(number))
        spool.close_all()
    thread = SegmentShipper(shipping.store, spool, None)
    thread.start()
    eventually(lambda: thread.shipped_segments == 2)
    thread.close(30.0)
    assert thread.failed_attempts == 5
    assert shipping.lines == [a_line(0), a_line(1)]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "503 Service Unavailable; its segments wait in" in caplog.messages[0]
    assert "again, after" in caplog.messages[1]


def test_journal_segments_that_are_left_are_shipped_by_the_next_process_under_their_names(
    shipping: Shipping, caplog: pytest.LogCaptureFixture
) -> None:
    shipping.store.failures = 1000
    first = shipping.spool()
    first.append(HOUR, a_line(1))
    shipping.ship(first)
    shipping.store.failures = 0
    assert "1 segment of the journal could not be shipped; left in" in caplog.messages[-1]
    second = shipping.spool(LATER)
    second.append(HOUR, a_line(2))
    shipping.ship(second)
    names = [*map(parse_segment, segments(shipping.folder / "store"))]
    assert [name.start for name in names if name] == [PROCESS.start, LATER.start]
    assert shipping.lines == [a_line(1), a_line(2)]
    assert not shipping.left


def test_journal_segments_of_a_running_process_are_its_own(shipping: Shipping) -> None:
    running = shipping.spool()
    running.append(HOUR, a_line(1))
    same_names = shipping.spool()
    same_names.append(HOUR, a_line(2))
    shipping.ship(same_names)
    assert shipping.lines == [a_line(2)]
    shipping.ship(running)
    assert shipping.lines == [a_line(1), a_line(2)]
    assert len(segments(shipping.folder / "store")) == 2


def test_journal_segments_of_another_pod_are_shipped_when_it_is_idle(
    shipping: Shipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = shipping.spool(OTHER_POD)
    ended.append(HOUR, a_line(1))
    ended.close_all()
    ended.close()
    shipping.ship(shipping.spool())
    assert shipping.lines == []
    monkeypatch.setattr(spool_folders, "IDLE_SECONDS", -1.0)
    shipping.ship(shipping.spool())
    assert shipping.lines == [a_line(1)]
    assert not shipping.left


def test_journal_segments_of_ended_processes_are_searched_again(
    shipping: Shipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper, "ADOPT_SECONDS", 0.01)
    monkeypatch.setattr(spool_folders, "IDLE_SECONDS", -1.0)
    other = shipping.spool(OTHER_POD)
    other.append(HOUR, a_line(1))
    thread = SegmentShipper(shipping.store, shipping.spool(), None)
    thread.start()
    other.close_all()
    other.close()
    eventually(lambda: thread.shipped_segments)
    thread.close(30.0)
    assert shipping.lines == [a_line(1)]


def test_journal_other_files_in_the_spool_stay(shipping: Shipping) -> None:
    folder = shipping.folder / "spool" / "rota-a-0f8e1c5a-20261121T070000Z"
    folder.mkdir(parents=True)
    (folder / "notes").write_text("mine")
    (folder / "2026-11-21T07-000001.jsonl").symlink_to("/etc/passwd")
    (shipping.folder / "spool" / "file").write_text("mine")
    shipping.ship(shipping.spool())
    assert shipping.lines == []
    assert shipping.left == ["2026-11-21T07-000001.jsonl", "notes"]


def test_journal_spool_over_its_limit_drops_the_oldest_records_and_counts_them(tmp_path: Path) -> None:
    shipping = Shipping(tmp_path, max_bytes=50_000)
    spool = shipping.spool()
    for number in range(20):
        spool.append(HOUR, a_line(number, 5_000))
        assert spool.size_bytes <= 50_000
    shipping.ship(spool)
    dropped = sum(lost.records for lost in shipping.lost)
    assert 10 < dropped < 15
    assert {lost.since for lost in shipping.lost} == {AT}
    assert shipping.lines == [a_line(number, 5_000) for number in range(dropped, 20)]


def test_journal_line_cut_off_by_the_system_is_not_shipped(tmp_path: Path) -> None:
    for cut in range(len(a_line(2))):
        shipping = Shipping(tmp_path / str(cut))
        spool = shipping.spool()
        with file_size_limit(len(a_line(1)) + cut), pytest.raises(WriteFailedError, match="File too large") as caught:
            spool.append(HOUR, a_line(1) + a_line(2))
        assert caught.value.missing_lines == a_line(2)
        spool.append(HOUR, caught.value.missing_lines)
        shipping.ship(spool)
        assert shipping.lines == [a_line(1), a_line(2)]


def test_journal_segment_whose_file_cannot_be_read_is_lost_and_counted(
    shipping: Shipping, caplog: pytest.LogCaptureFixture
) -> None:
    spool = shipping.spool()
    for number in range(2):
        spool.append(HOUR, a_line(number) + a_line(number))
        spool.close_all()
    (path,) = shipping.folder.glob("spool/*/*-000001.jsonl")
    path.unlink()
    shipping.ship(spool)
    assert shipping.lost == [LostRecords(2, "")]
    assert shipping.lines == 2 * [a_line(1)]
    assert "cannot be read; its records are lost" in caplog.text


def test_journal_empty_segment_of_a_killed_process_is_removed(shipping: Shipping) -> None:
    folder = shipping.folder / "spool" / "rota-a-0f8e1c5a-20261121T070000Z"
    folder.mkdir(parents=True)
    (folder / "2026-11-21T07-000001.jsonl").write_text('{"kind"')
    shipping.ship(shipping.spool())
    assert shipping.lines == []
    assert not shipping.left


def test_journal_store_that_does_not_end_does_not_hold_up_the_end(
    shipping: Shipping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(shipping.store, "create", lambda *_: bool(os.read(read, 1)))
    spool = shipping.spool()
    spool.append(HOUR, a_line(1))
    spool.close_all()
    thread = SegmentShipper(shipping.store, spool, None)
    thread.start()
    thread.close(0.0)
    assert "was closed before all segments were shipped" in caplog.text
    os.write(write, b"x")
    thread._thread.join()
    os.close(read)
    os.close(write)


def store_segment(retention: FolderRetention, store: FolderStore, hour: str, sequence: int, size_bytes: int) -> None:
    retention.make_room(hour, size_bytes)
    assert store.create(PROCESS._replace(hour=hour, sequence=sequence).key, size_bytes * b"x")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.jsonl.gz"))


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: many segments are stored."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("fast_disk")
def test_journal_folder_stays_within_its_limit_across_operators_and_restarts(tmp_path: Path) -> None:
    limit = 2**20
    store = FolderStore(tmp_path)
    foreign = ["notes.jsonl.gz", "date=2026-11-01/notes", "date=2026-11-01/x-1.jsonl.gz", ".spool/a/b.jsonl"]
    for key in foreign:
        store.create(key, b"y")
    hours = [f"2026-11-{day:02}T{hour:02}" for day in range(1, 5) for hour in range(24)]
    for number, hour in enumerate(hours):
        for sequence in range(4):
            store_segment(FolderRetention(store, limit), store, hour, 4 * number + sequence, 10_000)
            assert folder_bytes(tmp_path) <= limit
    kept = [*{key[:18] for key in segments_in(tmp_path)}]
    assert 20 <= len(kept) <= 26
    assert sorted(kept) == [f"date={hour.replace('T', '/')}" for hour in hours[-len(kept) :]]
    assert all((tmp_path / key).exists() for key in foreign)
    assert {path.name for path in tmp_path.glob("date=*")} == {"date=2026-11-01", "date=2026-11-03", "date=2026-11-04"}


def segments_in(folder: Path) -> list[str]:
    keys = (str(path.relative_to(folder)) for path in folder.glob("*/*.jsonl.gz"))
    return [key for key in keys if parse_segment(key)]


@pytest.mark.usefixtures("fast_disk")
def test_journal_folder_of_two_concurrent_operators_stays_within_its_limit(tmp_path: Path) -> None:
    limit = 2**20
    store = FolderStore(tmp_path)
    operators = [FolderRetention(store, limit) for _ in "ab"]
    for number in range(400):
        for index, retention in enumerate(operators):
            hour = f"2026-11-{1 + number // 240:02}T{number // 10 % 24:02}"
            store_segment(retention, store, hour, 2 * number + index, 1_000)
        assert folder_bytes(tmp_path) <= limit


@pytest.mark.usefixtures("fast_disk")
def test_journal_hour_that_fills_the_limit_waits_for_the_next(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    retention = FolderRetention(store, 2**20)
    for number in range(100):
        store_segment(retention, store, HOUR, number, 10_000)
    with pytest.raises(StoreError, match=f"^the hour {HOUR} alone fills nine tenths of the journal's limit$"):
        retention.make_room(HOUR, 50_000)
    store_segment(retention, store, "2026-11-21T10", 200, 10_000)
    assert PROCESS._replace(hour=HOUR, sequence=0).key not in segments_in(tmp_path)


def test_journal_removes_hours_of_a_fast_clock_only_when_nothing_is_older(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for number in range(12):
        store_segment(FolderRetention(store, 2**20), store, f"2031-01-01T{number:02}", number, 100_000)
    for number in range(5):
        store_segment(FolderRetention(store, 2**20), store, f"2026-11-21T{number:02}", number, 100_000)
    kept = sorted(key[5:18] for key in segments_in(tmp_path))
    assert kept[0] == "2026-11-21/04"
    assert kept[-1] == "2031-01-01/11"
