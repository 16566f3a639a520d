"""The journal: each record once, in segments of its hour; callers never wait for a disk."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ground.poll import eventually
from journal_segments import lines_by_hour, segments, stored_records
from journal_shipping import file_size_limit
from rota import records
from rota.kube.telemetry.journal import journal_writer, segment_rules
from rota.kube.telemetry.journal.journal_writer import STDOUT, Journal, parse_size_limit
from rota.kube.telemetry.journal.line_appender import LineAppender, WriteFailedError
from rota.kube.telemetry.journal.segment_rules import LostRecords
from rota.kube.telemetry.journal.spool import Spool
from rota.object_store.segments import parse_segment
from rota.records import GapRecord, decode_record, journal_record

HOUR = "2026-11-21T09"


def a_record(number: int = 1, at: str = "2026-11-21T09:00:00.000Z", message: str = "b joined") -> dict[str, object]:
    fields: dict[str, Any] = {"strategy": "Sticky", "reason": "MemberJoined", "members": 3, "queues": 8, "held": None}
    return journal_record("plan", "shop/orders", at, generation=number, message=message, **fields)


EARLY = a_record(1, "2026-11-21T08:59:59.999Z")
EARLY_TOO = a_record(4, "2026-11-21T08:59:59.999Z")
LATE = a_record(2)


def encode_line(record: dict[str, object]) -> bytes:
    return msgspec.json.encode(record)


def write_records(location: str, writer: str, *journal_records: dict[str, object]) -> None:
    journal = Journal(location, writer)
    journal.write(journal_records)
    journal.close()


def write_and_wait(journal: Journal, *journal_records: dict[str, object]) -> None:
    """Write records, and wait until they are written or dropped."""
    journal.write(journal_records)
    eventually(lambda: not journal._unwritten_values)


@pytest.fixture
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry writes without a pause."""
    monkeypatch.setattr(journal_writer, "RETRY_SECONDS", 0.0)


def test_journal_records_go_to_segments_of_their_hour_and_pod(tmp_path: Path) -> None:
    write_records(str(tmp_path), "operator-a", EARLY, LATE)
    write_records(str(tmp_path), "operator-a", EARLY_TOO, a_record(3))
    assert lines_by_hour(tmp_path) == {
        "2026-11-21T08": [encode_line(EARLY), encode_line(EARLY_TOO)],
        HOUR: [encode_line(LATE), encode_line(a_record(3))],
    }
    names = [parse_segment(key) for key in segments(tmp_path)]
    assert {name.pod for name in names if name} == {"operator-a"}
    assert len({*names}) == 4
    assert not [*(tmp_path / ".spool").iterdir()]


def test_journal_segments_have_the_uid_of_their_pod(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), "rota-6c8d-x2", pod_uid="0f8e1c5a-93b7-4d2f-8a61-000000000001")
    journal.write([LATE])
    journal.close()
    (name,) = map(parse_segment, segments(tmp_path))
    assert name
    assert name.uid == "0f8e1c5a93b74d2f8a61000000000001"


def test_journal_clock_jump_back_puts_records_into_their_own_hour(tmp_path: Path) -> None:
    later = a_record(3)
    write_records(str(tmp_path), "a", LATE, EARLY, later)
    assert lines_by_hour(tmp_path) == {
        "2026-11-21T08": [encode_line(EARLY)],
        HOUR: [encode_line(LATE), encode_line(later)],
    }


def test_journal_hours_are_utc(tmp_path: Path) -> None:
    write_records(str(tmp_path), "a", a_record(at="2026-11-21T23:30:00-04:00"))
    assert [*lines_by_hour(tmp_path)] == ["2026-11-22T03"]


def test_journal_segment_is_stored_while_the_operator_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_rules, "SEGMENT_SECONDS", 0.01)
    journal = Journal(str(tmp_path), "a")
    write_and_wait(journal, LATE)
    eventually(lambda: journal.counts.shipped_segments == 1 and not journal.counts.spool_bytes)
    assert lines_by_hour(tmp_path) == {HOUR: [encode_line(LATE)]}
    journal.close()


def test_journal_writes_records_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_records(STDOUT, "a", EARLY, LATE)
    assert capfdbinary.readouterr().out.splitlines() == [encode_line(EARLY), encode_line(LATE)]


def test_journal_where_standard_output_is_closed_is_refused_only_if_it_is_written_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    write_records("", "a", EARLY)
    with pytest.raises(ValueError, match=r"^--journal - cannot be used: standard output is closed; "):
        Journal(STDOUT, "a")


def test_journal_without_a_location_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_records("", "a", EARLY)
    assert not list(tmp_path.iterdir())


def test_journal_rejects_a_location_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--journal .*file/a is not writable: Not a directory; choose "):
        Journal(str(tmp_path / "file" / "a"), "a")


def test_journal_accepts_a_disk_that_is_full_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", raise_full)
    write_records(str(tmp_path), "a", LATE)
    assert lines_by_hour(tmp_path) == {HOUR: [encode_line(LATE)]}


@pytest.mark.parametrize(
    ("text", "size"),
    [("8Gi", 8 * 2**30), ("500Mi", 500 * 2**20), ("1.5G", 1_500_000_000), ("2000k", 2_000_000), ("1048576", 2**20)],
)
def test_journal_limit_is_a_kubernetes_quantity(text: str, size: int) -> None:
    assert parse_size_limit(text) == size


@pytest.mark.parametrize("text", ["", "much", "8 Gi", "-1Gi", "8i", "8GB", "1e9", "\u0968Gi"])
def test_journal_limit_that_is_no_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--journal-limit .* is not a size; use one such as 8Gi or 500Mi$"):
        Journal("", "a", text)


def test_journal_limit_that_is_too_small_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^--journal-limit '8' is too small; the minimum is 1Mi$"):
        Journal("", "a", "8")


@pytest.mark.parametrize("text", ["999999999999999Pi", "1025Pi", "999999999999999P"])
def test_journal_limit_beyond_any_disk_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=f"--journal-limit '{text}' is too large"):
        parse_size_limit(text)


def test_journal_rejects_a_folder_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ValueError, match=r"^--journal: .* has no hard links, .*; use a bucket$"):
        Journal(str(tmp_path), "a")


@pytest.mark.parametrize(
    ("destination", "mistake"),
    [("ftp://x/y", "unknown scheme ftp"), ("s3:///x", "names no bucket"), ("//bucket/x", "has no scheme")],
)
def test_journal_rejects_a_uri_that_is_none(destination: str, mistake: str) -> None:
    with pytest.raises(ValueError, match=f"^--journal: .*{mistake}"):
        Journal(destination, "a")


def test_journal_rejects_a_spool_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--journal-spool .*file/a is not writable: Not a directory; choose "):
        Journal("s3://bucket/x", "a", spool=str(tmp_path / "file" / "a"))


def test_journal_stream_continues_on_a_new_line_after_a_cut_off(tmp_path: Path) -> None:
    first, second = encode_line(a_record(1)) + b"\n", encode_line(a_record(2)) + b"\n"
    for cut in range(len(second)):
        path = tmp_path / str(cut)
        with path.open("wb", buffering=0) as file:
            appender = LineAppender(file.fileno())
            with file_size_limit(len(first) + cut):
                for _ in range(2):
                    with pytest.raises(WriteFailedError) as caught:
                        appender.append(first + second if not path.stat().st_size else second)
                    assert caught.value.missing_lines == second
            appender.append(second)
        assert path.read_bytes() == first + second[:cut] + b"\n" * (cut > 0) + second


WRITING = """
import itertools, sys
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.records import journal_record
folder, run = sys.argv[1:]
journal = Journal(folder, "a")
fields = dict(strategy="Sticky", reason="MemberJoined", message=run, members=3, queues=8, held=None)
for start in itertools.count(0, 50):
    at = "2026-11-21T09:00:00.000Z"
    journal.write([journal_record("plan", "a/b", at, generation=n, **fields) for n in range(start, start + 50)])
    while journal._unwritten_values > 100_000:
        pass
    print(start, flush=True)
"""


def test_journal_of_a_killed_writer_loses_only_its_end_and_mixes_no_lines(tmp_path: Path) -> None:
    runs = 4
    spool = tmp_path / ".spool"
    for run in range(runs):
        command = [sys.executable, "-c", WRITING, str(tmp_path), str(run)]
        former = {*spool.glob("*")}
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            while sum(map(folder_bytes, {*spool.glob("*")} - former)) < 10_000 * (1 + run):
                writer.stdout.readline()
            writer.kill()
    write_records(str(tmp_path), "a", EARLY)  # the next process of this pod stores what the killed ones have left
    generations_by_run: dict[str, list[int]] = {str(run): [] for run in range(runs)}
    for record in stored_records(tmp_path):
        if isinstance(record, records.PlanRecord) and record.message in generations_by_run:
            generations_by_run[record.message].append(record.generation)
    assert all(generations == list(range(len(generations))) for generations in generations_by_run.values())
    assert all(generations_by_run.values())
    assert not [*spool.iterdir()]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def delete_folder(folder: Path) -> None:
    """Delete a folder in which a journal may just create files."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}-deleted")))


@pytest.mark.usefixtures("retry_at_once")
def test_journal_recreates_a_deleted_spool_or_folder(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"), "a")
    write_and_wait(journal, a_record(1))
    delete_folder(tmp_path / "journal" / ".spool")
    write_and_wait(journal, a_record(2))
    delete_folder(tmp_path / "journal")
    write_and_wait(journal, a_record(3))
    journal.close()
    assert 2 <= journal.dropped_records <= 3  # a gap record of the first one may have been deleted, too
    stored = stored_records(tmp_path / "journal")
    assert [record.generation for record in stored if isinstance(record, records.PlanRecord)] == [3]


def test_journal_write_failure_is_logged_once_and_blocks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "journal"
    journal = Journal(str(folder), "a")
    shutil.rmtree(folder)
    folder.touch()
    write_and_wait(journal, EARLY)
    write_and_wait(journal, LATE, a_record(3))
    journal.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert journal.dropped_records == 3


@pytest.mark.usefixtures("retry_at_once")
def test_journal_gap_record_counts_missing_records_after_recovery(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "journal"
    journal = Journal(str(folder), "a")
    shutil.rmtree(folder)
    folder.touch()
    write_and_wait(journal, EARLY)
    write_and_wait(journal, LATE, a_record(3))
    folder.unlink()
    eventually(lambda: [*folder.glob(".spool/*/*.jsonl")])  # the retry needs no new record
    write_and_wait(journal, a_record(4))
    journal.close()
    journal_records = stored_records(folder)
    (gap,) = [record for record in journal_records if isinstance(record, GapRecord)]
    assert (gap.writer, gap.missing, gap.since) == ("a", 3, decode_record(encode_line(EARLY)).at)
    assert [record.generation for record in journal_records if isinstance(record, records.PlanRecord)] == [4]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert caplog.messages[1] == "The journal is writable again; 3 records were dropped"
    assert journal.dropped_records == 3


def test_journal_on_a_hanging_disk_blocks_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_writer, "CLOSE_WRITE_SECONDS", 0.01)
    monkeypatch.setattr(journal_writer, "MAX_QUEUED_VALUES", 1000)
    released = threading.Event()
    monkeypatch.setattr(Spool, "append", lambda *_: released.wait())
    journal = Journal(str(tmp_path), "a")
    for number in range(2000):
        journal.write([a_record(number, message=1000 * "x")])
    journal.close()
    assert journal.dropped_records > 1500
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert caplog.messages[0].startswith(f"The journal's spool {tmp_path}/.spool cannot be written: the disk is too sl")
    assert caplog.messages[1] == "The journal was closed before all records were written: its disk does not respond"
    caplog.set_level(logging.CRITICAL)
    released.set()
    journal._thread.join()
    journal._output.close(30.0)


def test_journal_has_a_limited_time_at_the_end_for_its_disk_and_its_store_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "CLOSE_SECONDS", 0.02)
    monkeypatch.setattr(journal_writer, "CLOSE_WRITE_SECONDS", 0.01)
    released = threading.Event()
    monkeypatch.setattr(Spool, "append", lambda *_: released.wait())
    journal = Journal(str(tmp_path), "a")
    journal.write([LATE])
    close_output = journal._output.close
    granted: list[float] = []
    monkeypatch.setattr(journal._output, "close", granted.append)
    journal.close()
    assert [seconds for seconds in granted if seconds > 0.01] == []
    released.set()
    journal._thread.join()
    close_output(30.0)


def test_journal_writes_all_last_records_if_the_disk_has_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "MAX_BATCH_RECORDS", 1)
    journal = Journal(str(tmp_path), "a")
    with journal._condition:  # so that the thread meets the records and the end together
        journal._retry_at = float("inf")
        journal.write([LATE, LATE, LATE])
        journal._closing = True
    journal.close()
    assert lines_by_hour(tmp_path) == {HOUR: 3 * [encode_line(LATE)]}


def test_journal_gap_is_written_without_a_further_record(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), "a")
    journal._note_spool_drop(LostRecords(2, "2026-11-21T09:00:00.000Z", reported=3))
    journal._note_spool_drop(LostRecords(1, "2026-11-21T08:00:00.000Z"))
    eventually(lambda: not journal._unreported_drops)
    journal.close()
    gaps = [record for record in stored_records(tmp_path) if isinstance(record, GapRecord)]
    assert sum(gap.missing for gap in gaps) == 6
    assert journal.dropped_records == 3


def test_journal_survives_an_error_that_nothing_expects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(str(tmp_path), "a")
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_append_lines", lambda _: 1 // 0)
        write_and_wait(journal, a_record(1), a_record(2))
    write_and_wait(journal, a_record(3))
    assert journal.dropped_records == 3  # the third one soon after the error
    journal._retry_at = 0.0
    write_and_wait(journal, a_record(4))
    journal.close()
    written = [record for record in stored_records(tmp_path) if isinstance(record, records.PlanRecord)]
    assert [record.generation for record in written] == [4]


def test_journal_drops_only_records_that_cannot_be_encoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    invalid = [a_record(message="\ud800"), a_record() | {"held": object()}, a_record(at="yesterday")]
    journal = Journal(str(tmp_path), "a")
    write_and_wait(journal, a_record(1), *invalid, a_record(2))
    journal.close()
    assert lines_by_hour(tmp_path)[HOUR] == [encode_line(a_record(1)), encode_line(a_record(2))]
    assert journal.dropped_records == 3
    assert "surrogates not allowed" in caplog.messages[0]


def count_values(value: object) -> int:
    elements = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return len(elements) + sum(map(count_values, elements))


def test_journal_counts_all_values_that_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(Spool, "append", lambda *_: released.wait())
    columns = {name: [*range(1000)] for name in ("ids", "first", "last", "committed")}
    retries = {name: [0] for name in columns}
    topics = {"%RETRY%g": {"broker-a": retries}, "orders": {"broker-a": columns, "broker-b": columns}}
    releasing = [{"from": "a", "queues": {}}, {"from": "b", "queues": {"orders": {"broker-a": "1-3"}}}]
    record = a_record() | {"topics": topics, "releasing": releasing}
    journal = Journal(str(tmp_path), "a")
    journal.write([record])
    assert journal._unwritten_values >= count_values(record) > 8000
    released.set()
    journal.close()
