"""Writer of the journal: one line of JSON per record, to segments or standard output; see docs/journal.md."""

import logging
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import msgspec

from rota.kube.telemetry.journal.line_appender import LineAppender, WriteFailedError
from rota.kube.telemetry.journal.segment_output import JournalPlace, SegmentOutput
from rota.kube.telemetry.journal.segment_rules import LostRecords
from rota.model import single_line
from rota.records import RECORD_SCHEMA
from rota.timestamps import format_time

STDOUT = "-"
DEFAULT_LIMIT = "8Gi"
MIN_LIMIT_BYTES = 2**20
MAX_LIMIT_BYTES = 2**60  # a larger value is mistyped, since no disk is so large
MAX_QUEUED_VALUES = 1_000_000  # values in records that wait for a slow disk: about 60 MB
MAX_BATCH_RECORDS = 200  # records in one write
RETRY_SECONDS = 5.0  # after a failed write; meanwhile, records are dropped without an attempt
CLOSE_SECONDS = 10.0  # for the last records when the operator ends
CLOSE_WRITE_SECONDS = 5.0  # part of CLOSE_SECONDS: until the last records are in the spool

JournalRecord = Mapping[str, Any]

_UNIT_EXPONENTS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}  # of 1000, or of 1024 with an i

_CONTAINERS = {dict, list}
_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


class _Line(NamedTuple):
    at: str
    hour: str  # UTC hour of the segment that the line belongs to
    text: bytes  # the record, as a line of JSON


class JournalCounts(NamedTuple):
    """Counts of a journal since its start."""

    dropped_records: int = 0
    shipped_segments: int = 0
    failed_attempts: int = 0  # to ship a segment
    spool_bytes: int = 0  # now


class _Output(Protocol):
    """Where lines go to: segments, or standard output, which has nothing to close."""

    log_subject: str  # subject of log messages

    def append(self, hour: str, lines: bytes) -> None:
        """Append lines of an hour; raise WriteFailedError with the failed lines."""

    def close_due(self) -> float | None:
        """Close segments that are old or large enough; return the seconds until the next is due; None: none is open."""

    def finish(self) -> None:
        """Close all segments, after the last line."""

    def close(self, seconds: float) -> None:
        """Ship the closed segments, for at most `seconds`; called by another thread, maybe before `finish` returns."""


class _StdoutOutput:
    """Appends lines to standard output. Without a journal, it is created but never written to."""

    log_subject = "The journal on standard output"

    def __init__(self) -> None:
        # -1: without a journal, standard output may be closed.
        self._appender = LineAppender(sys.stdout.fileno() if sys.stdout else -1)

    def append(self, _hour: str, lines: bytes) -> None:
        self._appender.append(lines)

    def close_due(self) -> float | None:
        return None

    def finish(self) -> None:
        pass

    def close(self, seconds: float) -> None:
        pass


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

    def __init__(
        self, destination: str, writer: str, limit: str = DEFAULT_LIMIT, *, pod_uid: str = "", spool: str = ""
    ) -> None:
        """Open the journal; raise ValueError, with a sentence for users, if that is not possible.

        `destination` is a folder, a URI, `-` for standard output, or empty for none. `writer` and `pod_uid` are part of
        segments' names. `limit`: maximum size of the folder, or of the local spool if `destination` is a URI.
        """
        self.dropped_records = 0  # dropped records since the start
        self._destination = destination
        self._writer = writer
        self._queued: list[JournalRecord] = []
        self._unwritten_values = 0  # values in records that are not written yet
        self._unreported_drops = 0
        self._first_drop_at = ""
        self._is_failure_logged = False
        self._closing = False
        self._condition = threading.Condition()  # also the lock of the fields above
        self._retry_at = 0.0  # used only by the thread
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if destination == STDOUT and sys.stdout is None:
            raise ValueError("--journal - cannot be used: standard output is closed; name a folder or a URI")
        place = JournalPlace(destination, parse_size_limit(limit), spool)
        self._segments: SegmentOutput | None = None
        if destination not in {"", STDOUT}:
            self._segments = SegmentOutput(place, writer, pod_uid, self._note_spool_drop)
            self._segments.start()
        self._output: _Output = self._segments or _StdoutOutput()
        if destination:
            self._thread.start()

    @property
    def counts(self) -> JournalCounts:
        """Counts since the start."""
        segments = self._segments
        if segments is None:
            return JournalCounts(self.dropped_records)
        return JournalCounts(
            self.dropped_records, segments.shipped_segments, segments.failed_attempts, segments.spool_bytes
        )

    def write(self, records: Iterable[JournalRecord]) -> None:
        """Queue records for writing, each with its own time; the caller must not change them afterwards."""
        queued = list(records)
        if not self._destination or not queued:
            return
        values = sum(map(_count_values, queued))
        with self._condition:
            # Records that exceed the limit by themselves are queued if none wait; else they could never be written.
            is_full = self._unwritten_values > 0 and self._unwritten_values + values > MAX_QUEUED_VALUES
            is_dropped = self._closing or is_full
            if not is_dropped:
                self._queued += queued
                self._unwritten_values += values
                self._condition.notify()
        if is_dropped:
            self._note_dropped(queued[0]["at"], len(queued), "the disk is too slow")

    def close(self) -> None:
        """Wait until all records are written and all segments are shipped, for at most CLOSE_SECONDS."""
        if not self._destination:
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(CLOSE_WRITE_SECONDS)
        if self._thread.is_alive():
            _log.error("The journal was closed before all records were written: its disk does not respond")
        self._output.close(deadline - time.monotonic())

    def _run(self) -> None:
        is_last = False
        while not is_last:
            idle_seconds = self._close_due()
            with self._condition:
                drops = self._unreported_drops
                # Wake for new records, for the end, and for new drops. While earlier drops are unreported, also wake
                # after RETRY_SECONDS, to write their gap record even without other records.
                self._condition.wait_for(
                    lambda: self._queued or self._closing or self._unreported_drops > drops,  # noqa: B023 - used at once
                    RETRY_SECONDS if drops else idle_seconds,
                )
                records = self._queued
                self._queued = []
                values = self._unwritten_values
                is_last = self._closing
            self._write_batches(records, is_last=is_last)
            with self._condition:
                self._unwritten_values -= values
        try:
            self._output.finish()
        except Exception as error:  # noqa: BLE001 - closed segments are stored all the same
            _log.error("The journal's last segment cannot be closed: %r", error)

    def _close_due(self) -> float | None:
        try:
            return self._output.close_due()
        except Exception as error:  # noqa: BLE001 - the thread must not end before the operator does
            _log.error("A segment of the journal cannot be closed: %r", error)
            return RETRY_SECONDS

    def _write_batches(self, records: list[JournalRecord], *, is_last: bool) -> None:
        """Write records in batches; the first also reports drops. A batch is dropped if writing it fails."""
        for start in range(0, max(len(records), 1), MAX_BATCH_RECORDS):
            batch = records[start : start + MAX_BATCH_RECORDS]
            dropped = self._unreported_drops if start == 0 else 0
            # At the end, try the disk once more, before `_retry_at`; if that fails, the other batches are dropped.
            is_forced = is_last and start == 0
            try:
                self._write_batch(batch, dropped=dropped, is_forced=is_forced)
            except Exception as error:  # noqa: BLE001 - the thread must not end before the operator does
                self._retry_at = time.monotonic() + RETRY_SECONDS
                if batch:
                    self._note_dropped(str(batch[0].get("at", "")), len(batch), repr(error))

    def _write_batch(self, records: list[JournalRecord], *, dropped: int = 0, is_forced: bool = False) -> None:
        """Write records, and a `gap` record if some were dropped; until `_retry_at`, drop them unless `is_forced`."""
        record_lines = self._encode_records(records)
        gap_lines = self._encode_records([self._gap_record(dropped)]) if dropped else []
        lines = record_lines + gap_lines
        unwritten = len(lines)
        reason = "the last write failed"
        if is_forced or time.monotonic() >= self._retry_at:
            unwritten, reason = self._append_lines(lines)
        if dropped and not unwritten:
            with self._condition:
                self._unreported_drops -= dropped
                was_logged = self._is_failure_logged
                self._is_failure_logged = False
            if was_logged:
                _log.warning("The journal is writable again; %d records were dropped", dropped)
        written = len(lines) - unwritten
        # The gap line is not in `record_lines`: if it is unwritten, a later gap record reports the same drops.
        lost = record_lines[written:]
        if lost:
            self._note_dropped(min(line.at for line in lost), len(lost), reason)

    def _append_lines(self, lines: list[_Line]) -> tuple[int, str]:
        """Write lines, one write per hour; return how many could not be written, and the reason."""
        unwritten = len(lines)
        try:
            for hour, run in groupby(lines, key=lambda line: line.hour):
                texts = [line.text for line in run]
                unwritten -= len(texts)  # the handler below adds those that failed
                self._output.append(hour, b"".join(texts))
        except WriteFailedError as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return unwritten + error.missing_lines.count(b"\n"), str(error)
        self._retry_at = 0.0
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

    def _note_spool_drop(self, lost: LostRecords) -> None:
        """Count records that were dropped because they could not be shipped; the shipper has logged the reason."""
        self._note_dropped(lost.since, lost.records, "", reported=lost.reported)

    def _note_dropped(self, at: str, count: int, reason: str, *, reported: int = 0) -> None:
        """Count dropped records; log the first reason since records could be written.

        `reported`: records that a gap record in a dropped segment had reported. That gap record is lost, so the next
        one reports them again; `dropped_records` has counted them already.
        """
        with self._condition:
            self._first_drop_at = min(at, self._first_drop_at) if self._unreported_drops else at
            self._unreported_drops += count + reported
            self.dropped_records += count
            self._condition.notify()
            is_logged = bool(reason) and not self._is_failure_logged
            self._is_failure_logged |= is_logged
        if is_logged:
            _log.error("%s cannot be written: %s; records are dropped until it can", self._output.log_subject, reason)


def _count_values(container: Mapping[str, Any] | list[Any]) -> int:
    """Count the values in a record, nested ones included; elements of a list are all of the type of the first."""
    if isinstance(container, list):
        nested = container if container and type(container[0]) in _CONTAINERS else []
        return len(container) + sum(map(_count_values, nested))
    return len(container) + sum(_count_values(value) for value in container.values() if type(value) in _CONTAINERS)


@lru_cache(100)
def _utc_hour(at: str) -> str:
    """Return the UTC hour of a time, such as 2026-11-21T08."""
    return f"{datetime.fromisoformat(at).astimezone(UTC):%Y-%m-%dT%H}"
