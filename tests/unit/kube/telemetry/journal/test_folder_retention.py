"""The journal's folder stays within its limit: the oldest segments go first, and other files never."""

import os
from pathlib import Path

import pytest

from journal_shipping import HOUR, PROCESS
from rota.kube.telemetry.journal.folder_retention import FolderRetention
from rota.object_store import FolderStore, StoreError
from rota.object_store.segments import parse_segment


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
    stored_hours = {key[:18] for key in segments_in(tmp_path)}
    assert 20 <= len(stored_hours) <= 26
    assert sorted(stored_hours) == [f"date={hour.replace('T', '/')}" for hour in hours[-len(stored_hours) :]]
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
def test_journal_hour_that_fills_the_limit_loses_its_oldest_segments(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    retention = FolderRetention(store, 2**20)
    for number in range(200):
        store_segment(retention, store, HOUR, number, 10_000)
    assert folder_bytes(tmp_path) <= 2**20
    sequences = [name.sequence for name in map(parse_segment, sorted(segments_in(tmp_path))) if name]
    assert sequences == [*range(200 - len(sequences), 200)]
    assert len(sequences) > 90
    with pytest.raises(StoreError, match=r"^a segment of 2000000 bytes exceeds nine tenths of the journal's limit$"):
        retention.make_room(HOUR, 2_000_000)


def test_journal_removes_hours_of_a_fast_clock_only_when_nothing_is_older(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for number in range(12):
        store_segment(FolderRetention(store, 2**20), store, f"2031-01-01T{number:02}", number, 100_000)
    for number in range(5):
        store_segment(FolderRetention(store, 2**20), store, f"2026-11-21T{number:02}", number, 100_000)
    hours = sorted(key[5:18] for key in segments_in(tmp_path))
    assert hours[0] == "2026-11-21/04"
    assert hours[-1] == "2031-01-01/11"


def test_journal_drafts_of_killed_processes_are_removed_but_no_files_of_users(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.create(PROCESS._replace(hour=HOUR, sequence=1).key, b"x")
    names = (f".{'0' * 16}.draft", f".{'1' * 16}.draft", ".notes.draft")
    old, new, foreign = [tmp_path / "date=2026-11-21" / name for name in names]
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (1e9, 1e9))
    FolderRetention(store, 2**20).make_room(HOUR, 10)
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()


def test_journal_other_folders_are_not_listed_but_dates_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_scandir = os.scandir
    unreadable = tmp_path / "private"
    date = tmp_path / "date=2026-11-21"
    for folder in (unreadable, date):
        folder.mkdir()

    def refuse(path: Path | str) -> object:
        if Path(path) == unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    FolderRetention(FolderStore(tmp_path), 2**20).make_room(HOUR, 10)
    unreadable = date
    with pytest.raises(StoreError, match="cannot be listed: Permission denied"):
        FolderRetention(FolderStore(tmp_path), 2**20).make_room(HOUR, 10)
