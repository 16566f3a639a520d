"""The journal: a line of JSON for each fact, in files by hour, or on standard output; docs/journal.md publishes it."""

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

from rota.kube.telemetry.journal.journal_files import Ending, Hours, Unwritten
from rota.model import plain
from rota.records import SCHEMA
from rota.timestamps import format_time

STDOUT = "-"
LIMIT = "8Gi"
LEAST_LIMIT = 2**20
MOST_LIMIT = 2**60  # no disk is so large: it is a slip of the pen
MOST_WAITING = 1_000_000  # values in facts that a slow disk may be behind: some 60 MB
MOST_AT_ONCE = 200  # facts in one write
RETRY_SECONDS = 5.0
CLOSE_SECONDS = 5.0
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}  # a disk's troubles, and nobody's mistake

Fact = Mapping[str, Any]
_Line = tuple[str, str, bytes]  # when it was, in which hour, and what


_UNITS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


def size(text: str) -> int:
    """Read how many bytes the journal may hold, written as Kubernetes writes sizes."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kKMGTP]?)(i?)", text.strip(), re.ASCII)
    if not found or (found[3] and not found[2]):
        raise ValueError(f"--journal-limit {text!r} is no size; give one such as 8Gi or 500Mi")
    told = int(float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2]])
    if told < LEAST_LIMIT:
        raise ValueError(f"--journal-limit {text!r} is too little to keep a journal in; give 1Mi or more")
    if told > MOST_LIMIT:
        raise ValueError(f"--journal-limit {text!r} is more than any disk holds; give one such as 8Gi")
    return told


class Journal:
    """Where facts are written down. A thread of its own writes them: a rebalance never waits for a disk.

    What cannot be written is left out and counted, and a record of the kind `gap` tells of it once one can be written.
    """

    def __init__(self, where: str, writer: str, limit: str = LIMIT) -> None:
        """`where` is a folder, - for standard output, or nothing; each writer has files of its own in it."""
        self.lost = 0  # facts, since the start
        self._where, self._writer, self._limit = where, writer, size(limit)
        self._waiting: list[Fact] = []
        self._behind = 0  # values in facts that are not written yet
        self._missing, self._since = 0, ""  # facts that no gap has told of yet, and the time of the first of them
        self._retry_at = 0.0
        self._closing = False
        self._news = threading.Condition()  # and the lock of all of these
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if where:
            self._append, self._let_go = self._output()
            self._thread.start()

    def _output(self) -> tuple[Callable[[str, bytes], None], Callable[[], None]]:
        """Return how lines are written, and how that ends."""
        if self._where == STDOUT:
            ending = Ending(sys.stdout.fileno())
            return lambda _, lines: ending.append(lines), lambda: None
        self._check()
        hours = Hours(Path(self._where), self._writer, self._limit)
        return hours.append, hours.close

    def _check(self) -> None:
        """Say at once that nothing can be written there, unless that may pass."""
        try:
            Path(self._where).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._where):
                pass
        except OSError as error:
            if error.errno not in PASSING:
                told = f"--journal {self._where}: nothing can be written there: {error.strerror}; give another folder"
                raise ValueError(told) from None

    def write(self, records: Iterable[Fact]) -> None:
        """Have records written, each with its own time; they are not to be changed any more."""
        facts = list(records)
        if not self._where or not facts:
            return
        weight = sum(map(_weight, facts))
        with self._news:
            late = self._closing or (self._behind and self._behind + weight > MOST_WAITING)
            if not late:
                self._waiting += facts
                self._behind += weight
                self._news.notify()
        if late:
            self._leave_out(facts[0]["at"], len(facts), "the disk is too slow")

    def close(self) -> None:
        """Wait until all is written, but not for a disk that hangs."""
        if not self._where:
            return
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.error("The journal ends before all of it is written: its disk hangs")

    def _run(self) -> None:
        last = False
        while not last:
            with self._news:
                idle = RETRY_SECONDS if self._missing else None  # a gap is told though nothing else happens
                self._news.wait_for(lambda: self._waiting or self._closing, idle)
                facts, self._waiting = self._waiting, []
                weight, last = self._behind, self._closing
            self._put(facts[:MOST_AT_ONCE], gap=self._missing, at_once=last)  # one gap at most for all that was taken
            for start in range(MOST_AT_ONCE, len(facts), MOST_AT_ONCE):
                self._put(facts[start : start + MOST_AT_ONCE])
            with self._news:
                self._behind -= weight
        self._let_go()

    def _put(self, facts: list[Fact], *, gap: int = 0, at_once: bool = False) -> None:
        """Write facts down, and then that so many are missing; so soon after a failure it is not tried."""
        told = self._lines(facts)
        lines = told + self._lines([self._gap(gap)] if gap else [])
        left, why = len(lines), "it could not be written just now"
        if at_once or time.monotonic() >= self._retry_at:
            left, why = self._appended(lines)
        if gap and not left:
            _log.warning("The journal is written again; %d facts were left out", gap)
            with self._news:
                self._missing -= gap
        lost = told[len(lines) - left :]
        if lost:
            self._leave_out(lost[0][0], len(lost), why)

    def _appended(self, lines: list[_Line]) -> tuple[int, str]:
        """Write lines, those of each hour at once; return how many are left then, and why."""
        left = len(lines)
        try:
            for hour, run in groupby(lines, key=lambda it: it[1]):
                some = [text for _, _, text in run]
                left -= len(some)
                self._append(hour, b"".join(some))
        except Unwritten as stopped:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return left + stopped.lines.count(b"\n"), str(stopped)
        return 0, ""

    def _lines(self, facts: list[Fact]) -> list[_Line]:
        lines = []
        for fact in facts:
            try:
                lines.append((at := fact["at"], _hour(at), _encode(fact) + b"\n"))
            except Exception as error:  # noqa: BLE001 - one that is no fact costs none of the others
                self._leave_out(format_time(time.time()), 1, f"{plain(repr(fact))}: {error}")
        return lines

    def _gap(self, missing: int) -> Fact:
        told = {"writer": self._writer, "since": self._since, "missing": missing}
        return {"schema": SCHEMA, "kind": "gap", "at": format_time(time.time()), **told}

    def _leave_out(self, at: str, count: int, why: str) -> None:
        with self._news:
            begins = not self._missing
            self._since = at if begins else self._since
            self._missing += count
            self.lost += count
        if begins:
            where = "on standard output" if self._where == STDOUT else f"in {self._where}"
            _log.error("The journal %s cannot be written: %s; facts are left out until it can", where, why)


def _weight(fact: Fact) -> int:
    """Say roughly how many values are in a fact: it must take no time, and the parts of one container are alike."""
    return len(fact) + sum(_inside(it) for it in fact.values() if type(it) is dict)


def _inside(it: Any) -> int:
    if not it or type(it) not in {dict, list}:
        return 1
    return len(it) * (1 + _inside(next(iter(it.values() if type(it) is dict else it))))


@lru_cache(100)
def _hour(at: str) -> str:
    """Return the hour of a time, in UTC."""
    return f"{datetime.fromisoformat(at).astimezone(UTC):%Y-%m-%dT%H}"
