"""The journal: whole lines in hourly files of limited size; callers never wait for a disk."""

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ground.poll import eventually
from rota import records
from rota.kube.telemetry.journal import journal_writer
from rota.kube.telemetry.journal.journal_files import LineAppender, RotatingFiles, WriteFailedError
from rota.kube.telemetry.journal.journal_writer import STDOUT, Journal, parse_size_limit
from rota.records import GapRecord, decode_record, journal_record
from sidecar.small_disk import a_small_disk, fill

HOUR = "date=2026-11-21/09-a.jsonl"


def a_record(number: int = 1, at: str = "2026-11-21T09:00:00.000Z", message: str = "b joined") -> dict[str, object]:
    fields: dict[str, Any] = {"strategy": "Sticky", "reason": "MemberJoined", "members": 3, "queues": 8, "held": None}
    return journal_record("plan", "shop/orders", at, generation=number, message=message, **fields)


EARLY = a_record(1, "2026-11-21T08:59:59.999Z")
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


def decode_lines(text: bytes) -> list[records.AnyRecord | bytes]:
    """Decode each line; return a line that is no record as bytes."""
    decoded: list[records.AnyRecord | bytes] = []
    for line in text.splitlines():
        try:
            decoded.append(decode_record(line))
        except ValueError:
            decoded.append(line)
    return decoded


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Limit the size of files: the system cuts off a write at the limit, even within a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry writes without a pause."""
    monkeypatch.setattr(journal_writer, "RETRY_SECONDS", 0.0)


def test_journal_records_go_to_the_file_of_their_hour_and_writer(tmp_path: Path) -> None:
    for _ in range(2):
        write_records(str(tmp_path), "operator-a", EARLY, LATE)
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.glob("*/*")}
    assert files == {
        "date=2026-11-21/08-operator-a.jsonl": 2 * (encode_line(EARLY) + b"\n"),
        "date=2026-11-21/09-operator-a.jsonl": 2 * (encode_line(LATE) + b"\n"),
    }


def test_journal_clock_jump_back_puts_records_into_their_own_hour(tmp_path: Path) -> None:
    later = a_record(3)
    write_records(str(tmp_path), "a", LATE, EARLY, later)
    assert (tmp_path / HOUR).read_bytes().splitlines() == [encode_line(LATE), encode_line(later)]
    assert (tmp_path / "date=2026-11-21/08-a.jsonl").read_bytes().splitlines() == [encode_line(EARLY)]


def test_journal_hours_are_utc(tmp_path: Path) -> None:
    write_records(str(tmp_path), "a", a_record(at="2026-11-21T23:30:00-04:00"))
    assert (tmp_path / "date=2026-11-22/03-a.jsonl").exists()


def test_journal_writes_records_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_records(STDOUT, "a", EARLY, LATE)
    assert capfdbinary.readouterr().out.splitlines() == [encode_line(EARLY), encode_line(LATE)]


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
    assert (tmp_path / HOUR).exists()


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


def test_journal_does_not_write_to_a_pipe_in_place_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "date=2026-11-21" / "09-rota-0.jsonl"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    journal = Journal(str(tmp_path), "rota-0")
    journal.write([a_record()])
    journal.close()
    assert journal.dropped_records == 1
    assert f"The journal in {tmp_path} cannot be written: {pipe} is not a regular file" in caplog.text


def test_journal_truncated_line_never_joins_the_next(tmp_path: Path) -> None:
    path = tmp_path / HOUR
    path.parent.mkdir()
    full_line, previous_line = encode_line(a_record(1)), encode_line(a_record(0)) + b"\n"
    for cut in range(len(full_line) + 1):
        path.write_bytes(previous_line + full_line[:cut])
        RotatingFiles(tmp_path, "a", 2**20).append("2026-11-21T09", encode_line(LATE) + b"\n")
        assert path.read_bytes() == previous_line + full_line[:cut] + b"\n" * (cut > 0) + encode_line(LATE) + b"\n"


def test_journal_line_cut_off_by_the_system_is_ended_and_rewritten(tmp_path: Path) -> None:
    first, second = encode_line(a_record(1)) + b"\n", encode_line(a_record(2)) + b"\n"
    for cut in range(len(second)):
        files = RotatingFiles(tmp_path, f"a{cut}", 2**20)
        with file_size_limit(len(first) + cut), pytest.raises(WriteFailedError, match="File too large") as caught:
            files.append("2026-11-21T09", first + second)
        assert caught.value.missing_lines == second
        files.append("2026-11-21T09", caught.value.missing_lines)
        written = (tmp_path / f"date=2026-11-21/09-a{cut}.jsonl").read_bytes()
        assert written == first + second[:cut] + b"\n" * (cut > 0) + second


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
    torn_lines = 0
    path = tmp_path / HOUR
    for run in range(runs):
        goal = (path.stat().st_size if path.exists() else 0) + 10_000 * (1 + run)
        command = [sys.executable, "-c", WRITING, str(tmp_path), str(run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            while not path.exists() or path.stat().st_size < goal:
                writer.stdout.readline()
            writer.kill()
    generations_by_run: dict[str, list[int]] = {str(run): [] for run in range(runs)}
    for record in decode_lines(path.read_bytes()):
        if isinstance(record, records.PlanRecord):
            generations_by_run[record.message].append(record.generation)
        else:
            torn_lines += 1
    assert torn_lines <= runs
    assert all(generations == list(range(len(generations))) for generations in generations_by_run.values())
    assert all(generations_by_run.values())


def test_journal_folder_stays_within_its_limit_across_writers_and_restarts(tmp_path: Path) -> None:
    limit = 2**20
    lines = 9_999 * b"x" + b"\n"
    foreign_files = [
        tmp_path / "notes.jsonl",
        tmp_path / "date=2026-11-01/notes",
        tmp_path / "date=2026-11-01/x-1.jsonl",
    ]
    foreign_files[1].parent.mkdir()
    for path in foreign_files:
        path.write_bytes(b"y")
    hours = [f"2026-11-{day:02}T{hour:02}" for day in range(1, 5) for hour in range(24)]
    for number, hour in enumerate(hours):
        for writer in "ab" if number % 2 else "bc":
            RotatingFiles(tmp_path, writer, limit).append(hour, lines)
            RotatingFiles(tmp_path, writer, limit).append(hour, lines)
            assert sum(path.stat().st_size for path in tmp_path.glob("*/*.jsonl")) <= limit
    kept_hours = {f"{path.parent.name[5:]}T{path.name[:2]}" for path in tmp_path.glob("*/??-?.jsonl")}
    assert 20 <= len(kept_hours) <= 26
    assert sorted(kept_hours) == hours[-len(kept_hours) :]
    assert all(path.exists() for path in foreign_files)
    assert {path.name for path in tmp_path.glob("date=*")} == {"date=2026-11-01", "date=2026-11-03", "date=2026-11-04"}


def test_journal_folder_of_two_concurrent_writers_stays_within_its_limit(tmp_path: Path) -> None:
    limit = 2**20
    writers = [RotatingFiles(tmp_path, writer, limit) for writer in "ab"]
    for number in range(400):
        for writer in writers:
            writer.append(f"2026-11-{1 + number // 240:02}T{number // 10 % 24:02}", 999 * b"x" + b"\n")
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= limit


def test_journal_hour_that_fills_the_limit_stops_writing_until_the_next(tmp_path: Path) -> None:
    files = RotatingFiles(tmp_path, "a", 2**20)
    lines = 9_999 * b"x" + b"\n"
    for _ in range(100):
        files.append("2026-11-21T09", lines)
    with pytest.raises(WriteFailedError, match=r"^the current hour alone fills the limit of 1048576 bytes$"):
        files.append("2026-11-21T09", 5 * lines)
    with pytest.raises(WriteFailedError):
        RotatingFiles(tmp_path, "b", 2**20).append("2026-11-21T09", 5 * lines)
    files.append("2026-11-21T09", 3 * lines)
    assert 0.95 * 2**20 < (tmp_path / HOUR).stat().st_size <= 2**20
    with pytest.raises(WriteFailedError):
        files.append("2026-11-21T09", b"not even a short one\n")
    files.append("2026-11-21T10", lines)
    assert not (tmp_path / HOUR).exists()


def test_journal_deletes_hours_of_a_fast_clock_only_when_nothing_is_older(tmp_path: Path) -> None:
    lines = 99_999 * b"x" + b"\n"
    for hour in range(12):
        RotatingFiles(tmp_path, "a", 2**20).append(f"2031-01-01T{hour:02}", lines)
    for number in range(5):
        RotatingFiles(tmp_path, "a", 2**20).append(f"2026-11-21T{number:02}", lines)
    kept_hours = sorted(f"{path.parent.name[5:]}T{path.name[:2]}" for path in tmp_path.glob("*/*"))
    assert kept_hours[0] == "2026-11-21T04"
    assert kept_hours[-1] == "2031-01-01T11"


def test_journal_recreates_a_deleted_file_or_folder(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "journal"), "a")
    write_and_wait(journal, a_record(1))
    (tmp_path / "journal" / HOUR).unlink()
    write_and_wait(journal, a_record(2))
    assert (tmp_path / "journal" / HOUR).read_bytes() == encode_line(a_record(2)) + b"\n"
    shutil.rmtree(tmp_path / "journal")
    write_and_wait(journal, a_record(3))
    journal.close()
    assert (tmp_path / "journal" / HOUR).read_bytes() == encode_line(a_record(3)) + b"\n"
    assert not journal.dropped_records


def test_journal_write_failure_is_logged_once_and_blocks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "journal"
    journal = Journal(str(folder), "a")
    folder.rmdir()
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
    folder.rmdir()
    folder.touch()
    write_and_wait(journal, EARLY)
    write_and_wait(journal, LATE, a_record(3))
    folder.unlink()
    gap_files = eventually(lambda: list(folder.glob("*/*.jsonl")))  # the retry needs no new record
    write_and_wait(journal, a_record(4))
    journal.close()
    journal_records = [record for path in {*gap_files, folder / HOUR} for record in decode_lines(path.read_bytes())]
    (gap,) = [record for record in journal_records if isinstance(record, GapRecord)]
    assert (gap.writer, gap.missing, gap.since) == ("a", 3, decode_record(encode_line(EARLY)).at)
    assert [record.generation for record in journal_records if isinstance(record, records.PlanRecord)] == [4]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert caplog.messages[1] == "The journal is writable again; 3 records were dropped"
    assert journal.dropped_records == 3


@pytest.mark.usefixtures("retry_at_once")
def test_journal_resumes_after_a_full_disk(tmp_path: Path) -> None:
    with a_small_disk(tmp_path):
        journal = Journal(str(tmp_path), "a")
        write_and_wait(journal, a_record(0))
        fill(tmp_path)
        for number in range(1, 31):
            write_and_wait(journal, a_record(number, message=400 * "x"))
        dropped = journal.dropped_records
        (tmp_path / "filler").unlink()
        write_and_wait(journal, a_record(31))
        journal.close()
        journal_records = [record for path in tmp_path.glob("*/*.jsonl") for record in decode_lines(path.read_bytes())]
    assert 0 < dropped < 30
    assert journal.dropped_records == dropped
    assert [record.missing for record in journal_records if isinstance(record, GapRecord)] == [dropped]
    assert [record.generation for record in journal_records if isinstance(record, records.PlanRecord)] == [
        *range(31 - dropped),
        31,
    ]


def test_journal_on_a_hanging_disk_blocks_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_writer, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(journal_writer, "MAX_QUEUED_VALUES", 1000)
    released = threading.Event()
    monkeypatch.setattr(RotatingFiles, "append", lambda *_: released.wait())
    journal = Journal(str(tmp_path), "a")
    for number in range(2000):
        journal.write([a_record(number, message=1000 * "x")])
    journal.close()
    assert journal.dropped_records > 1500
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "the disk is too slow; records are dropped until it can" in caplog.messages[0]
    assert caplog.messages[1] == "The journal was closed before all records were written: its disk does not respond"
    caplog.set_level(logging.CRITICAL)
    released.set()
    journal._thread.join()


def test_journal_drops_only_records_that_cannot_be_encoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    invalid = [a_record(message="\ud800"), a_record() | {"held": object()}, a_record(at="yesterday")]
    journal = Journal(str(tmp_path), "a")
    write_and_wait(journal, a_record(1), *invalid, a_record(2))
    journal.close()
    assert (tmp_path / HOUR).read_bytes().splitlines() == [encode_line(a_record(1)), encode_line(a_record(2))]
    assert journal.dropped_records == 3
    assert "surrogates not allowed" in caplog.messages[0]
