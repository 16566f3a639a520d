"""The journal on real disks without space or inodes: it counts what it drops, and goes on when there is space again."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ground.poll import eventually
from journal_segments import stored_records
from journal_shipping import AT, HOUR, OTHER_POD, Shipping, a_line
from rota.kube.telemetry.journal import journal_writer, segment_rules, spool_folders
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.records import GapRecord, PlanRecord, journal_record
from sidecar.small_disk import a_small_disk, fill, fill_inodes

MAX_INODES = 20


def write_and_wait(journal: Journal, number: int) -> None:
    """Write a record, and wait until it is written or dropped."""
    fields: dict[str, Any] = {"strategy": "Sticky", "reason": "MemberJoined", "members": 3, "queues": 8, "held": None}
    journal.write([journal_record("plan", "shop/orders", AT, generation=number, message=400 * "x", **fields)])
    eventually(lambda: not journal._unwritten_values)


def free(folder: Path) -> None:
    """Delete what filled the disk."""
    if (folder / "filler").is_dir():
        shutil.rmtree(folder / "filler")
    else:
        (folder / "filler").unlink()


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close each segment at once, and retry writes without a pause."""
    monkeypatch.setattr(journal_writer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(segment_rules, "SEGMENT_SECONDS", 0.0)
    monkeypatch.setattr(segment_rules, "MAX_RETRY_SECONDS", 0.01)


@pytest.mark.parametrize("take_all", [fill, fill_inodes])
@pytest.mark.usefixtures("without_pauses")
def test_journal_whose_spool_is_on_a_full_disk_counts_what_it_drops_and_recovers(
    tmp_path: Path, take_all: Callable[[Path], None]
) -> None:
    store = tmp_path / "store"
    spool = tmp_path / "spool"
    spool.mkdir()
    with a_small_disk(spool, MAX_INODES):
        journal = Journal(str(store), "a", spool=str(spool))
        write_and_wait(journal, 0)
        eventually(lambda: not journal.counts.spool_bytes)
        take_all(spool)
        for number in range(1, 6):
            write_and_wait(journal, number)
        dropped = journal.dropped_records
        free(spool)
        eventually(lambda: not journal._unreported_drops)  # without a further record
        write_and_wait(journal, 6)
        journal.close()
    assert dropped == 5
    written = stored_records(store)
    assert [record.generation for record in written if isinstance(record, PlanRecord)] == [0, 6]
    assert sum(record.missing for record in written if isinstance(record, GapRecord)) == 5


def test_journal_on_a_disk_that_becomes_full_within_a_write_counts_what_it_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "RETRY_SECONDS", 0.0)
    with a_small_disk(tmp_path):
        journal = Journal(str(tmp_path), "a")
        write_and_wait(journal, 0)
        fill(tmp_path)
        for number in range(1, 31):
            write_and_wait(journal, number)
        dropped = journal.dropped_records
        free(tmp_path)
        write_and_wait(journal, 31)
        journal.close()
        written = stored_records(tmp_path)
    assert 0 < dropped < 30
    assert journal.dropped_records == dropped
    assert [record.missing for record in written if isinstance(record, GapRecord)] == [dropped]
    plans = [record.generation for record in written if isinstance(record, PlanRecord)]
    assert plans == [*range(31 - dropped), 31]


@pytest.mark.parametrize("take_all", [fill, fill_inodes])
@pytest.mark.usefixtures("without_pauses")
def test_journal_whose_folder_is_on_a_full_disk_keeps_its_segments_in_the_spool(
    tmp_path: Path, take_all: Callable[[Path], None]
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with a_small_disk(store, MAX_INODES):
        journal = Journal(str(store), "a", spool=str(tmp_path / "spool"))
        take_all(store)
        for number in range(3):
            write_and_wait(journal, number)
            eventually(lambda: journal.counts.failed_attempts)
        assert journal.counts.spool_bytes
        assert not [*store.rglob("*.draft")]
        free(store)
        eventually(lambda: not journal.counts.spool_bytes)
        journal.close()
        written = [record for record in stored_records(store) if isinstance(record, PlanRecord)]
    assert [record.generation for record in written] == [0, 1, 2]
    assert journal.dropped_records == 0


def test_journal_segments_of_another_pod_are_adopted_where_no_inode_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_folders, "IDLE_SECONDS", -1.0)
    shipping = Shipping(tmp_path)
    root = tmp_path / "spool"
    root.mkdir()
    with a_small_disk(root, MAX_INODES):
        ended = shipping.spool(OTHER_POD)
        ended.append(HOUR, a_line(1))
        ended.close_all()
        ended.close()
        fill_inodes(root)
        shipping.ship(shipping.spool())
    assert shipping.lines == [a_line(1)]
