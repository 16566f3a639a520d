"""Writer of the journal: one line of JSON per record, to hourly files or standard output; see docs/journal.md."""

import errno
import logging
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rota.kube.telemetry.journal.journal_files import LineAppender, RotatingFiles, WriteFailedError
from rota.model import single_line
from rota.records import RECORD_SCHEMA
from rota.timestamps import format_time

STDOUT = "-"
DEFAULT_LIMIT = "8Gi"
MIN_LIMIT_BYTES = 2**20
MAX_LIMIT_BYTES = 2**60  # no disk is so large: a larger value is a typing error
MAX_QUEUED_VALUES = 1_000_000  # values in records that wait for a slow disk: about 60 MB
MAX_BATCH_RECORDS = 200  # records in one write
RETRY_SECONDS = 5.0  # after a failed write, for which records are dropped without a try
CLOSE_SECONDS = 5.0  # for the last writes when the operator ends
TRANSIENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}  # may pass; others are fatal at start

JournalRecord = Mapping[str, Any]

_UNIT_EXPONENTS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}  # of 1000, or of 1024 with an i

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


class _Line(NamedTuple):
    at: str
    hour: str  # of the file, in UTC
    text: bytes  # the record, as a line of JSON


def parse_size_limit(text: str) -> int:
    """Parse the size limit of the journal, a Kubernetes quantity, to bytes; raise ValueError if it is unusable."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kKMGTP]?)(i?)", text.strip(), re.ASCII)
    if not match or (match[3] and not match[2]):
        raise ValueError(f"--journal-limit {text!r} is not a size; use one such as 8Gi or 500Mi")
    number, unit, binary = match.groups()
    limit = int(float(number) * (1024 if binary else 1000) ** _UNIT_EXPONENTS[unit])
    if limit < MIN_LIMIT_BYTES:
        raise ValueError(f"--journal-limit {text!r} is too small; the minimum is 1Mi")
    if limit > MAX_LIMIT_BYTES:
        raise ValueError(f"--journal-limit {text!r} is too large; use one such as 8Gi")
    return limit


class Journal:
    """Writes records in a thread of its own, so that a rebalance never waits for a disk.

    Records that cannot be written are dropped and counted; once writing works again, a `gap` record has their number.
    """

    def __init__(self, destination: str, writer: str, limit: str = DEFAULT_LIMIT) -> None:
        """`destination` is a folder, `-` for standard output, or empty for none; `writer` is part of file names."""
        self.dropped_records = 0  # dropped records since the start
        self._destination = destination
        self._writer = writer
        self._limit = parse_size_limit(limit)
        self._queued: list[JournalRecord] = []
        self._unwritten_values = 0  # values in records that are not written yet
        self._unreported_drops = 0
        self._first_drop_at = ""
        self._retry_at = 0.0
        self._closing = False
        self._condition = threading.Condition()  # also the lock of the fields above
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if destination:
            self._append_to_output, self._close_output = self._open_output()
            self._thread.start()

    def _open_output(self) -> tuple[Callable[[str, bytes], None], Callable[[], None]]:
        """Return the functions that append lines and close the output."""
        if self._destination == STDOUT:
            appender = LineAppender(sys.stdout.fileno())
            return lambda _, lines: appender.append(lines), lambda: None
        self._check_folder()
        files = RotatingFiles(Path(self._destination), self._writer, self._limit)
        return files.append, files.close

    def _check_folder(self) -> None:
        """Raise ValueError if the folder is not writable, unless the cause may pass."""
        try:
            Path(self._destination).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._destination):
                pass
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS:
                text = f"--journal {self._destination} is not writable: {error.strerror}"
                raise ValueError(f"{text}; choose another folder") from None

    def write(self, records: Iterable[JournalRecord]) -> None:
        """Queue records for writing, each with its own time; the caller must not change them afterwards."""
        queued = list(records)
        if not self._destination or not queued:
            return
        values = sum(map(_count_values, queued))
        with self._condition:
            # Records that exceed the limit alone are queued if no others wait: they could never be written otherwise.
            is_full = self._unwritten_values > 0 and self._unwritten_values + values > MAX_QUEUED_VALUES
            is_dropped = self._closing or is_full
            if not is_dropped:
                self._queued += queued
                self._unwritten_values += values
                self._condition.notify()
        if is_dropped:
            self._note_dropped(queued[0]["at"], len(queued), "the disk is too slow")

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS until all records are written."""
        if not self._destination:
            return
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.error("The journal was closed before all records were written: its disk does not respond")

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._condition:
                # While drops are unreported, stop waiting after a while: the gap record needs no other record.
                timeout = RETRY_SECONDS if self._unreported_drops else None
                self._condition.wait_for(lambda: self._queued or self._closing, timeout)
                records = self._queued
                self._queued = []
                values = self._unwritten_values
                is_last = self._closing
            # Only the first batch has a gap record.
            self._write_batch(records[:MAX_BATCH_RECORDS], dropped=self._unreported_drops, is_forced=is_last)
            for start in range(MAX_BATCH_RECORDS, len(records), MAX_BATCH_RECORDS):
                self._write_batch(records[start : start + MAX_BATCH_RECORDS])
            with self._condition:
                self._unwritten_values -= values
        self._close_output()

    def _write_batch(self, records: list[JournalRecord], *, dropped: int = 0, is_forced: bool = False) -> None:
        """Write records, and a `gap` record of `dropped` ones; soon after a failure, only if `is_forced`."""
        record_lines = self._encode_records(records)
        gap_lines = self._encode_records([self._gap_record(dropped)]) if dropped else []
        lines = record_lines + gap_lines
        unwritten = len(lines)
        reason = "the last write failed"
        if is_forced or time.monotonic() >= self._retry_at:
            unwritten, reason = self._append_lines(lines)
        if dropped and not unwritten:
            _log.warning("The journal is writable again; %d records were dropped", dropped)
            with self._condition:
                self._unreported_drops -= dropped
        # The unwritten lines are the last ones. A gap line among them is not lost: the next batch counts again.
        lost = record_lines[len(lines) - unwritten :]
        if lost:
            self._note_dropped(lost[0].at, len(lost), reason)

    def _append_lines(self, lines: list[_Line]) -> tuple[int, str]:
        """Write lines, one write per hour; return how many could not be written, and the reason."""
        unwritten = len(lines)
        try:
            for hour, run in groupby(lines, key=lambda line: line.hour):
                texts = [line.text for line in run]
                unwritten -= len(texts)
                self._append_to_output(hour, b"".join(texts))
        except WriteFailedError as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return unwritten + error.missing_lines.count(b"\n"), str(error)
        return 0, ""

    def _encode_records(self, records: list[JournalRecord]) -> list[_Line]:
        lines = []
        for record in records:
            try:
                lines.append(_Line(record["at"], _utc_hour(record["at"]), _encode(record) + b"\n"))
            except Exception as error:  # noqa: BLE001 - an invalid record must not affect the others
                self._note_dropped(format_time(time.time()), 1, f"{single_line(repr(record))}: {error}")
        return lines

    def _gap_record(self, missing: int) -> JournalRecord:
        fields = {"writer": self._writer, "since": self._first_drop_at, "missing": missing}
        return {"schema": RECORD_SCHEMA, "kind": "gap", "at": format_time(time.time()), **fields}

    def _note_dropped(self, at: str, count: int, reason: str) -> None:
        with self._condition:
            is_first = not self._unreported_drops
            self._first_drop_at = at if is_first else self._first_drop_at
            self._unreported_drops += count
            self.dropped_records += count
        if is_first:
            where = "on standard output" if self._destination == STDOUT else f"in {self._destination}"
            _log.error("The journal %s cannot be written: %s; records are dropped until it can", where, reason)


def _count_values(record: JournalRecord) -> int:
    """Estimate the number of values in a record. Elements of a container count like its first one, for speed."""
    return len(record) + sum(_count_nested_values(value) for value in record.values() if type(value) is dict)


def _count_nested_values(value: Any) -> int:
    if not value or type(value) not in {dict, list}:
        return 1
    elements = value.values() if type(value) is dict else value
    return len(value) * (1 + _count_nested_values(next(iter(elements))))


@lru_cache(100)
def _utc_hour(at: str) -> str:
    """Return the UTC hour of a time, such as 2026-11-21T08."""
    return f"{datetime.fromisoformat(at).astimezone(UTC):%Y-%m-%dT%H}"
