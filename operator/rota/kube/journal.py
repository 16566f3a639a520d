"""The journal: a line of JSON for each fact, in files by hour, or on standard output; the pipeline reads it back."""

import logging
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

STDOUT = "-"

_log = logging.getLogger(__name__)


class Journal:
    """Where facts are written down. Who cannot write goes on without: a rebalance never waits for a disk."""

    def __init__(self, where: str, writer: str) -> None:
        """`where` is a folder, - for standard output, or nothing; each writer has files of its own."""
        self._where, self._writer = where, writer
        self._failing = False

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records, each with its own time."""
        lines = [(it["at"], msgspec.json.encode(it) + b"\n") for it in records]
        if not self._where or not lines:
            return
        if self._where == STDOUT:
            sys.stdout.buffer.write(b"".join(line for _, line in lines))
            sys.stdout.buffer.flush()
            return
        try:
            for at, line in lines:
                with self._file(at).open("ab", buffering=0) as file:  # whole lines, though the process may end any time
                    file.write(line)
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.error("The journal cannot be written: %s", error)
            self._failing = True

    def _file(self, at: str) -> Path:
        told = datetime.fromisoformat(at).astimezone(UTC)
        folder = Path(self._where) / f"date={told:%Y-%m-%d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{told:%H}-{self._writer}.jsonl"
