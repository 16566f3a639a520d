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
from typing import Any

import msgspec

from rota.kube.telemetry.journal.journal_files import LineAppender, RotatingFiles, WriteFailedError
from rota.model import plain
from rota.records import SCHEMA
from rota.timestamps import format_time

STDOUT = "-"
LIMIT = "8Gi"
LEAST_LIMIT = 2**20
MOST_LIMIT = 2**60  # no disk is so large: a larger value is a typing error
MOST_WAITING = 1_000_000  # values in records that wait for a slow disk: about 60 MB
MOST_AT_ONCE = 200  # records in one write
RETRY_SECONDS = 5.0
CLOSE_SECONDS = 5.0
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}  # may pass; others are fatal at start

Fact = Mapping[str, Any]
_Line = tuple[str, str, bytes]  # its time, its hour, and its text

_UNITS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


def size(text: str) -> int:
    """Parse the size limit of the journal, a Kubernetes quantity, to bytes; raise ValueError if it is unusable."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kKMGTP]?)(i?)", text.strip(), re.ASCII)
    if not match or (match[3] and not match[2]):
        raise ValueError(f"--journal-limit {text!r} is no size; give one such as 8Gi or 500Mi")
    limit = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]])
    if limit < LEAST_LIMIT:
        raise ValueError(f"--journal-limit {text!r} is too little to keep a journal in; give 1Mi or more")
    if limit > MOST_LIMIT:
        raise ValueError(f"--journal-limit {text!r} is more than any disk holds; give one such as 8Gi")
    return limit


class Journal:
    """Writes records in a thread of its own, so that a rebalance never waits for a disk.

    Records that cannot be written are dropped and counted; once writing works again, a `gap` record has their number.
    """

    def __init__(self, where: str, writer: str, limit: str = LIMIT) -> None:
        """`where` is a folder, `-` for standard output, or empty: no journal. `writer` names this process's files."""
        self.lost = 0  # dropped records since the start
        self._where, self._writer, self._limit = where, writer, size(limit)
        self._waiting: list[Fact] = []
        self._behind = 0  # values in records that are not written yet
        self._missing, self._since = 0, ""  # dropped records that no `gap` record covers yet, and the first one's time
        self._retry_at = 0.0
        self._closing = False
        self._news = threading.Condition()  # also the lock of the fields above
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if where:
            self._append, self._let_go = self._output()
            self._thread.start()

    def _output(self) -> tuple[Callable[[str, bytes], None], Callable[[], None]]:
        """Return the functions that append lines and close the output."""
        if self._where == STDOUT:
            ending = LineAppender(sys.stdout.fileno())
            return lambda _, lines: ending.append(lines), lambda: None
        self._check()
        hours = RotatingFiles(Path(self._where), self._writer, self._limit)
        return hours.append, hours.close

    def _check(self) -> None:
        """Raise ValueError if the folder is not writable, unless the cause may pass."""
        try:
            Path(self._where).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._where):
                pass
        except OSError as error:
            if error.errno not in PASSING:
                text = f"--journal {self._where}: nothing can be written there: {error.strerror}; give another folder"
                raise ValueError(text) from None

    def write(self, records: Iterable[Fact]) -> None:
        """Queue records for writing, each with its own time; the caller must not change them afterwards."""
        facts = list(records)
        if not self._where or not facts:
            return
        weight = sum(map(_weight, facts))
        with self._news:
            is_dropped = self._closing or (self._behind and self._behind + weight > MOST_WAITING)
            if not is_dropped:
                self._waiting += facts
                self._behind += weight
                self._news.notify()
        if is_dropped:
            self._leave_out(facts[0]["at"], len(facts), "the disk is too slow")

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS until all records are written."""
        if not self._where:
            return
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.error("The journal ends before all of it is written: its disk hangs")

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._news:
                idle = RETRY_SECONDS if self._missing else None  # write the gap record even if no other record follows
                self._news.wait_for(lambda: self._waiting or self._closing, idle)
                facts, self._waiting = self._waiting, []
                weight, is_last = self._behind, self._closing
            self._put(facts[:MOST_AT_ONCE], gap=self._missing, at_once=is_last)  # at most one gap record per batch
            for start in range(MOST_AT_ONCE, len(facts), MOST_AT_ONCE):
                self._put(facts[start : start + MOST_AT_ONCE])
            with self._news:
                self._behind -= weight
        self._let_go()

    def _put(self, facts: list[Fact], *, gap: int = 0, at_once: bool = False) -> None:
        """Write records, then one about a `gap`. Within RETRY_SECONDS of a failure, drop them unless `at_once`."""
        fact_lines = self._lines(facts)
        lines = fact_lines + self._lines([self._gap(gap)] if gap else [])
        unwritten, reason = len(lines), "it could not be written just now"
        if at_once or time.monotonic() >= self._retry_at:
            unwritten, reason = self._appended(lines)
        if gap and not unwritten:
            _log.warning("The journal is written again; %d facts were left out", gap)
            with self._news:
                self._missing -= gap
        lost = fact_lines[len(lines) - unwritten :]
        if lost:
            self._leave_out(lost[0][0], len(lost), reason)

    def _appended(self, lines: list[_Line]) -> tuple[int, str]:
        """Write lines, one write per hour; return how many could not be written, and the reason."""
        unwritten = len(lines)
        try:
            for hour, run in groupby(lines, key=lambda line: line[1]):
                texts = [text for _, _, text in run]
                unwritten -= len(texts)
                self._append(hour, b"".join(texts))
        except WriteFailedError as stopped:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return unwritten + stopped.lines.count(b"\n"), str(stopped)
        return 0, ""

    def _lines(self, facts: list[Fact]) -> list[_Line]:
        lines = []
        for fact in facts:
            try:
                lines.append((at := fact["at"], _hour(at), _encode(fact) + b"\n"))
            except Exception as error:  # noqa: BLE001 - an invalid record must not affect the others
                self._leave_out(format_time(time.time()), 1, f"{plain(repr(fact))}: {error}")
        return lines

    def _gap(self, missing: int) -> Fact:
        fields = {"writer": self._writer, "since": self._since, "missing": missing}
        return {"schema": SCHEMA, "kind": "gap", "at": format_time(time.time()), **fields}

    def _leave_out(self, at: str, count: int, why: str) -> None:
        with self._news:
            is_first = not self._missing
            self._since = at if is_first else self._since
            self._missing += count
            self.lost += count
        if is_first:
            where = "on standard output" if self._where == STDOUT else f"in {self._where}"
            _log.error("The journal %s cannot be written: %s; facts are left out until it can", where, why)


def _weight(fact: Fact) -> int:
    """Estimate the number of values in a record. Elements of a container are assumed to be alike, for speed."""
    return len(fact) + sum(_inside(value) for value in fact.values() if type(value) is dict)


def _inside(value: Any) -> int:
    if not value or type(value) not in {dict, list}:
        return 1
    return len(value) * (1 + _inside(next(iter(value.values() if type(value) is dict else value))))


@lru_cache(100)
def _hour(at: str) -> str:
    """Return the UTC hour of a time, such as 2026-11-21T08."""
    return f"{datetime.fromisoformat(at).astimezone(UTC):%Y-%m-%dT%H}"
