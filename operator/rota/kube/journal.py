"""The journal: a line of JSON for each fact, in files by hour, or on standard output; the pipeline reads it back."""

import logging
import queue
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

STDOUT = "-"
MOST_WAITING = 10_000  # writes that a slow disk may be behind
CLOSE_SECONDS = 5.0

_Line = tuple[str, bytes]  # when it was, and what

_log = logging.getLogger(__name__)


class Journal:
    """Where facts are written down. A thread of its own writes them: a rebalance never waits for a disk."""

    def __init__(self, where: str, writer: str) -> None:
        """`where` is a folder, - for standard output, or nothing; each writer has files of its own."""
        self._where, self._writer = where, writer
        self._failing = False
        self._waiting: queue.Queue[list[_Line] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if where:
            self._check()
            self._thread.start()

    def _check(self) -> None:
        """Say at once that nothing can be written there."""
        if self._where == STDOUT:
            return
        try:
            Path(self._where).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._where):
                pass
        except OSError as error:
            told = f"--journal {self._where}: nothing can be written there: {error.strerror}; give another folder"
            raise ValueError(told) from None

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Have records written, each with its own time."""
        lines = [(it["at"], msgspec.json.encode(it) + b"\n") for it in records]
        if self._where and lines:
            try:
                self._waiting.put_nowait(lines)
            except queue.Full:
                self._fails("the disk is too slow; facts are left out")

    def close(self) -> None:
        """Wait until all is written, but not for a disk that hangs."""
        if self._where:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while lines := self._waiting.get():
            try:
                self._put(lines)
                self._failing = False
            except OSError as error:
                self._fails(str(error))

    def _put(self, lines: list[_Line]) -> None:
        if self._where == STDOUT:
            sys.stdout.buffer.write(b"".join(line for _, line in lines))
            sys.stdout.buffer.flush()
            return
        for at, line in lines:
            with self._file(at).open("ab", buffering=0) as file:  # whole lines, though the process may end any time
                file.write(line)

    def _fails(self, why: str) -> None:
        if not self._failing:
            _log.error("The journal cannot be written: %s", why)
        self._failing = True

    def _file(self, at: str) -> Path:
        told = datetime.fromisoformat(at).astimezone(UTC)
        folder = Path(self._where) / f"date={told:%Y-%m-%d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{told:%H}-{self._writer}.jsonl"
