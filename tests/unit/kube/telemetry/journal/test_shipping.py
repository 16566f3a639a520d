"""Segments from the spool to their store: each once, in order, whatever happens to process, disk or store."""

import gzip
import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ground.poll import eventually
from journal_segments import segments
from journal_shipping import AT, HOUR, LATER, OTHER_POD, PROCESS, Shipping, a_line, file_size_limit
from rota.kube.telemetry.journal import segment_rules, shipper, spool_folders
from rota.kube.telemetry.journal.line_appender import WriteFailedError
from rota.kube.telemetry.journal.segment_rules import LostRecords
from rota.kube.telemetry.journal.shipper import SegmentShipper
from rota.object_store.segments import parse_segment


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
    shipping.ship(first, seconds=0.1)
    shipping.store.failures = 0
    assert "1 segment of the journal could not be stored; left in" in caplog.messages[-1]
    second = shipping.spool(LATER)
    second.append(HOUR, a_line(2))
    shipping.ship(second)
    names = [*map(parse_segment, segments(shipping.folder / "store"))]
    assert [name.start for name in names if name] == [PROCESS.start, LATER.start]
    assert shipping.lines == [a_line(1), a_line(2)]
    assert not shipping.left


@pytest.mark.parametrize("failures", [0, 1000], ids=["shipped", "left"])
def test_journal_lines_that_a_slow_disk_delays_until_the_spool_is_closed_are_shipped_by_the_next_process(
    shipping: Shipping, failures: int
) -> None:
    shipping.store.failures = failures
    first = shipping.spool()
    first.append(HOUR, a_line(1))
    shipping.ship(first, seconds=0.1 if failures else 30.0)
    first.append(HOUR, a_line(2))
    first.close_all()
    first.close()  # unlocks its folder, as the end of the process does
    shipping.store.failures = 0
    shipping.ship(shipping.spool(LATER))
    assert shipping.lines == [a_line(1), a_line(2)]
    assert not shipping.left
    assert not shipping.lost


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
    assert shipping.lost == [LostRecords(2, AT)]
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
    assert "1 segment of the journal could not be stored; left in" in caplog.text
    os.write(write, b"x")
    thread._thread.join()
    assert not [*(shipping.folder / "spool").iterdir()]  # its lock does not remain
    os.close(read)
    os.close(write)


class KillingCalls:
    """Counts calls of functions that change files, and ends the process by SIGKILL just before or after one of them."""

    NAMES = ("open", "write", "fsync", "link", "unlink", "mkdir", "rmdir", "close")

    def __init__(self, last: int, *, is_executed: bool) -> None:
        self._remaining = last
        self._is_executed = is_executed

    def install(self) -> None:
        for name in self.NAMES:
            setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._remaining -= 1
            if self._remaining == 0 and not self._is_executed:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*arguments, **options)
            finally:
                if self._remaining == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call


def ship_three_lines(shipping: Shipping, written: int, calls: KillingCalls) -> None:
    """Write and ship two segments, with a byte to the pipe `written` for each line that is in the spool."""
    report = os.write
    calls.install()
    spool = shipping.spool()
    for number in range(3):
        spool.append(HOUR, a_line(number))
        report(written, b"x")
        if number == 1:
            spool.close_all()
    shipping.ship(spool)


def run_in_fork(function: Callable[[int], None]) -> tuple[bool, int]:
    """Run a function with a pipe in another process; return whether it was killed, and how many bytes it wrote."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        count = len(pipe.read())
    _, status = os.waitpid(process, 0)
    assert status in {0, signal.SIGKILL}
    return status != 0, count


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the other threads do not run in a fork
@pytest.mark.parametrize("is_executed", [False, True], ids=["before", "after"])
def test_journal_killed_at_any_call_loses_no_written_line_and_stores_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_executed: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the machine does not fail
    for last in count(1):
        shipping = Shipping(tmp_path / str(last))
        calls = KillingCalls(last, is_executed=is_executed)
        was_killed, written = run_in_fork(partial(ship_three_lines, shipping, calls=calls))
        shipping.ship(shipping.spool(LATER))
        assert len(shipping.lines) >= written
        assert shipping.lines == [*map(a_line, range(len(shipping.lines)))]
        assert shipping.lost == []
        assert not [*shipping.folder.glob("spool/*")]
        if not was_killed:
            break
    assert last > 20
