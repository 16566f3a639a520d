"""Segments that cannot be stored, or whose files have lost records: what can be kept is, and the rest is counted."""

import os
import resource
from pathlib import Path

import pytest

from ground.poll import eventually
from journal_segments import segments
from journal_shipping import AT, HOUR, LATER, PROCESS, Shipping, a_line
from rota.kube.telemetry.journal import segment_rules
from rota.kube.telemetry.journal.segment_rules import LostRecords
from rota.kube.telemetry.journal.spool import Spool


def append_segments(spool: Spool, *lines: bytes) -> None:
    for line in lines:
        spool.append(HOUR, line)
        spool.close_all()


def test_journal_segment_that_is_never_stored_is_dropped_before_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_rules, "MAX_RETRY_SECONDS", 0.001)
    shipping = Shipping(tmp_path, max_bytes=50_000)
    shipping.store.refused = PROCESS._replace(hour=HOUR, sequence=1).key
    spool = shipping.spool()
    append_segments(spool, a_line(0, 5_000))
    thread = shipping.shipper(spool)
    thread.start()
    eventually(lambda: thread.failed_attempts > 1)
    number = 1
    while not thread.shipped_segments:  # it is not dropped while an attempt is under way
        append_segments(spool, a_line(number, 5_000))
        number += 1
    thread.close(30.0)
    assert sum(lost.records for lost in shipping.lost) + len(shipping.lines) == number
    assert a_line(0, 5_000) not in shipping.lines
    assert shipping.lines[-1] == a_line(number - 1, 5_000)


def test_journal_spool_is_shipped_over_hours_into_a_folder_that_one_hour_fills(tmp_path: Path) -> None:
    shipping = Shipping(tmp_path, store_bytes=20_000)
    spool = shipping.spool()
    thread = shipping.shipper(spool)
    thread.start()
    for number in range(120):
        noise = os.urandom(500).hex().encode()
        spool.append(f"2026-11-21T{number // 40:02}", a_line(number).replace(b'"plan"', b'"' + noise + b'"'))
        spool.close_all()
    thread.close(30.0)
    assert (thread.failed_attempts, shipping.lost, spool.size_bytes) == (0, [], 0)
    assert [key[:18] for key in segments(tmp_path / "store")][-1] == "date=2026-11-21/02"


def test_journal_failure_at_the_end_is_tried_again(shipping: Shipping) -> None:
    spool = shipping.spool()
    append_segments(spool, *map(a_line, range(3)))
    shipping.store.failures = 3
    thread = shipping.ship(spool, seconds=10.0)
    assert shipping.lines == [*map(a_line, range(3))]
    assert thread.failed_attempts == 3


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_journal_segment_takes_the_next_number_where_a_user_has_something_else(shipping: Shipping, kind: str) -> None:
    path = shipping.folder / "store" / PROCESS._replace(hour=HOUR, sequence=1).key
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("missing")
    spool = shipping.spool()
    append_segments(spool, a_line(1))
    shipping.ship(spool)
    assert shipping.store.read(PROCESS._replace(hour=HOUR, sequence=2).key)
    assert not shipping.left


def test_journal_records_that_the_disk_has_not_kept_are_counted(
    shipping: Shipping, caplog: pytest.LogCaptureFixture
) -> None:
    spool = shipping.spool()
    append_segments(spool, b"".join(map(a_line, range(10))))
    (path,) = shipping.folder.glob("spool/*/*.jsonl")
    os.truncate(path, path.stat().st_size // 2)
    shipping.ship(spool)
    assert shipping.lines == [*map(a_line, range(5))]
    assert shipping.lost == [LostRecords(5, AT)]
    assert "5 records of the journal were not kept by the spool's disk" in caplog.text


def test_journal_error_of_a_disk_that_is_reported_when_a_file_is_closed_is_logged(
    shipping: Shipping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    spool = shipping.spool()
    spool.append(HOUR, a_line(0) + a_line(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        spool.close_all()
    (path,) = shipping.folder.glob("spool/*/*.jsonl")
    path.write_bytes(a_line(0) + b"\0" * 20 + b"\n")
    shipping.ship(spool)
    assert shipping.lines == [a_line(0)]
    assert shipping.lost == [LostRecords(1, AT)]
    assert "spool's disk: No space left on device" in caplog.text


def test_journal_segment_that_another_operator_has_stored_is_not_lost(shipping: Shipping) -> None:
    spool = shipping.spool()
    append_segments(spool, a_line(1))
    (path,) = shipping.folder.glob("spool/*/*.jsonl")
    shipping.store.create(PROCESS._replace(hour=HOUR, sequence=1).key, b"stored")
    path.unlink()
    shipping.ship(spool)
    assert shipping.lost == []


def test_journal_segment_of_an_ended_process_that_another_operator_has_stored_is_not_lost(shipping: Shipping) -> None:
    ended = shipping.spool()
    append_segments(ended, a_line(1))
    ended.close()
    spool = shipping.spool(LATER)
    spool.adopt()
    (path,) = shipping.folder.glob("spool/*/*.jsonl")
    path.unlink()
    shipping.ship(spool)
    assert shipping.lost == []
    assert not shipping.left


def test_journal_deleted_segment_holds_up_no_others_where_a_bucket_answers_403_for_missing_objects(
    shipping: Shipping,
) -> None:
    spool = shipping.spool()
    append_segments(spool, a_line(1), a_line(2))
    shipping.store.may_read = False
    next(shipping.folder.glob("spool/*/*-000001.jsonl")).unlink()
    shipping.ship(spool, seconds=10.0)
    assert shipping.lost == [LostRecords(1, AT)]
    assert shipping.lines == [a_line(2)]


def test_journal_segment_is_kept_while_the_process_has_no_file_descriptors(
    shipping: Shipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_rules, "MAX_RETRY_SECONDS", 0.001)
    spool = shipping.spool()
    append_segments(spool, a_line(1))
    thread = shipping.shipper(spool)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        thread.start()
        eventually(lambda: thread.failed_attempts or shipping.lost)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: thread.shipped_segments or shipping.lost)
    thread.close(30.0)
    assert shipping.lost == []
    assert shipping.lines == [a_line(1)]


@pytest.mark.parametrize(
    "content",
    [b"{damaged\n", b"123\n", b'{"kind":"gap","missing":"41"}\n', 100_000 * b"[" + b"\n"],
    ids=["no JSON", "no object", "no number", "nested"],
)
def test_journal_damaged_segment_of_an_ended_process_is_lost_since_its_hour(tmp_path: Path, content: bytes) -> None:
    shipping = Shipping(tmp_path, max_bytes=100)
    ended = shipping.spool()
    append_segments(ended, a_line(1))
    ended.close()
    (path,) = shipping.folder.glob("spool/*/*.jsonl")
    path.write_bytes(content)
    spool = shipping.spool(LATER)
    spool.adopt()
    spool.append("2026-11-21T10", a_line(2, 200))
    assert shipping.lost[0] == LostRecords(1, f"{HOUR}:00:00.000Z")


def test_journal_shipper_survives_any_error_of_the_spool(
    shipping: Shipping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_rules, "MAX_RETRY_SECONDS", 0.001)
    spool = shipping.spool()
    append_segments(spool, a_line(1))
    failures = [RuntimeError("a defect"), MemoryError()]
    adopt = spool.adopt

    def fail() -> None:
        if failures:
            raise failures.pop()
        adopt()

    monkeypatch.setattr(spool, "adopt", fail)
    thread = shipping.ship(spool)
    assert shipping.lines == [a_line(1)]
    assert thread.failed_attempts
    assert "MemoryError" in caplog.text
