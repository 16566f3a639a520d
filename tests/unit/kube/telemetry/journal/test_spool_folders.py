"""The spool's folders: each locked by its process, and nothing else in the spool is touched."""

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rota.kube.telemetry.journal import segment_output, spool_folders
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.kube.telemetry.journal.segment_rules import ClosedSegment, spool_folder
from rota.kube.telemetry.journal.spool_folders import SpoolFolders
from rota.object_store.segments import SegmentName
from rota.records import journal_record

HOUR = "2026-11-21T09"
PROCESS = SegmentName("", "rota-a", "0f8e1c5a", "20261121T075812Z", 0)
LONG_AGO = 1_000_000_000.0


def refuse_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def refuse_to_open_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: Path, *arguments: int) -> int:
        if Path(path).name == "lock":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_open(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)


def a_record() -> dict[str, object]:
    fields = {"strategy": "Sticky", "reason": "MemberJoined", "message": "", "members": 3, "queues": 8, "held": None}
    return journal_record("plan", "shop/orders", f"{HOUR}:00:00.000Z", generation=1, **fields)


def test_journal_rejects_a_spool_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch)
    sentence = (
        r"^--journal .*: files cannot be locked .*\(No locks available\); choose a local folder by --journal-spool$"
    )
    with pytest.raises(ValueError, match=sentence):
        Journal(str(tmp_path), "a")
    with pytest.raises(ValueError, match=r"^--journal-spool .*: files cannot be locked"):
        Journal("s3://bucket/x", "a", spool=str(tmp_path))


@pytest.mark.parametrize("refuse", [refuse_locks, refuse_to_open_locks])
def test_journal_that_can_no_longer_lock_its_spool_drops_records_and_makes_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuse: Callable[..., None]
) -> None:
    journal = Journal(str(tmp_path), "a")
    refuse(monkeypatch)
    journal.write([a_record(), a_record()])
    journal.close()
    assert journal.dropped_records == 2
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not [*(tmp_path / ".spool").iterdir()]


def test_journal_spool_takes_the_next_name_where_another_process_has_its_folder(tmp_path: Path) -> None:
    first = SpoolFolders(tmp_path, PROCESS)
    first.create_own()
    second = SpoolFolders(tmp_path, PROCESS)
    second.create_own()
    assert (first.own_name.start, second.own_name.start) == ("20261121T075812Z", "20261121T075813Z")


@pytest.mark.parametrize("name", ["photos", "lost+found", "rota-a", "a-b-20261121"])
def test_journal_spool_leaves_folders_of_users(tmp_path: Path, name: str) -> None:
    empty = tmp_path / name
    locked = tmp_path / f"{name}-2"
    for folder in (empty, locked):
        folder.mkdir()
    (locked / "lock").touch()
    for path in (locked / "lock", locked, empty):
        os.utime(path, (LONG_AGO, LONG_AGO))
    folders = SpoolFolders(tmp_path, PROCESS)
    assert folders.adopt() == []
    folders.release_except([])
    assert [*locked.iterdir()] == [locked / "lock"]
    assert empty.is_dir()


def test_journal_spool_follows_no_link_to_a_folder(tmp_path: Path) -> None:
    linked_folder = tmp_path / "other"
    linked_folder.mkdir()
    (linked_folder / f"{HOUR}-000001.jsonl").write_text("{}\n")
    root = tmp_path / "spool"
    root.mkdir()
    (root / "rota-a-0f8e1c5a-20261121T070000Z").symlink_to(linked_folder)
    folders = SpoolFolders(root, PROCESS)
    assert folders.adopt() == []
    folders.release_except([])
    assert [path.name for path in linked_folder.iterdir()] == [f"{HOUR}-000001.jsonl"]


def test_journal_spool_adopts_the_folder_of_an_ended_process(tmp_path: Path) -> None:
    folder = tmp_path / "rota-a-0f8e1c5a-20261121T070000Z"
    folder.mkdir()
    (folder / f"{HOUR}-000001.jsonl").write_text("{}\n")
    name = PROCESS._replace(hour=HOUR, start="20261121T070000Z", sequence=1)
    assert SpoolFolders(tmp_path, PROCESS).adopt() == [ClosedSegment(name, 3, None)]


def test_journal_spool_takes_the_next_name_where_it_has_adopted_a_folder_with_its_own(tmp_path: Path) -> None:
    former = SpoolFolders(tmp_path, PROCESS)
    former.create_own()
    former.unlock()
    folders = SpoolFolders(tmp_path, PROCESS)
    folders.adopt()
    folders.create_own()
    assert folders.own_name.start == "20261121T075813Z"
    folders.unlock()


@pytest.mark.parametrize("deleted", ["folder", "lock"])
def test_journal_spool_whose_lock_was_deleted_locks_its_folder_again(tmp_path: Path, deleted: str) -> None:
    folders = SpoolFolders(tmp_path, PROCESS)
    folders.create_own()
    own = tmp_path / spool_folder(PROCESS)
    if deleted == "folder":
        shutil.rmtree(own)
    else:
        (own / "lock").unlink()
    folders.create_own()
    current = tmp_path / spool_folder(folders.own_name)
    (current / f"{HOUR}-000001.jsonl").write_text("{}\n")
    assert SpoolFolders(tmp_path, PROCESS._replace(start="20261121T090000Z")).adopt() == []
    folders.unlock()


def test_journal_spool_of_another_pod_is_adopted_with_a_link_that_points_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_folders, "IDLE_SECONDS", -1.0)
    folder = tmp_path / "rota-b-93b7d2f4-20261121T070000Z"
    folder.mkdir()
    (folder / f"{HOUR}-000001.jsonl").write_text("{}\n")
    (folder / "link").symlink_to("missing")
    assert [segment.name.pod for segment in SpoolFolders(tmp_path, PROCESS).adopt()] == ["rota-b"]


def test_journal_spool_measures_idleness_by_the_clock_of_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rota-b-93b7d2f4-20261121T070000Z"
    folder.mkdir()
    (folder / f"{HOUR}-000001.jsonl").write_text("{}\n")
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this node's clock is fast
    assert SpoolFolders(tmp_path, PROCESS).adopt() == []


def test_journal_with_a_folder_that_does_not_answer_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_output, "CHECK_SECONDS", 0.01)
    answered = threading.Event()
    real_flock = fcntl.flock

    def hang(*arguments: int) -> None:
        answered.wait()
        real_flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", hang)
    journal = Journal(str(tmp_path), "a")
    assert "does not respond" in caplog.messages[0]
    answered.set()
    journal.write([a_record()])
    journal.close()
    assert not journal.dropped_records


def test_journal_rejects_a_default_spool_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be created: Not a directory; choose a folder by --journal-spool$"):
        Journal("s3://bucket/x", "a")


def test_journal_removes_the_probe_of_a_process_that_was_killed_at_its_start(tmp_path: Path) -> None:
    (tmp_path / ".spool").mkdir()
    (tmp_path / ".spool" / ".probe").touch()
    Journal(str(tmp_path), "a").close()
    assert not [*(tmp_path / ".spool").iterdir()]
