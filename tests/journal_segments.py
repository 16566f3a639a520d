"""Reads the journal of an operator in tests: what is stored, and what still is in the spool."""

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ground.deliveries import whole_lines
from rota import records
from rota.records import decode_record


def segments(folder: Path) -> dict[str, bytes]:
    """Return the content of each stored segment, by its key."""
    paths = sorted(folder.glob("date=*/*.jsonl.gz"))
    return {str(path.relative_to(folder)): gzip.decompress(path.read_bytes()) for path in paths}


def lines_by_hour(folder: Path) -> dict[str, list[bytes]]:
    """Return the stored lines of each hour, such as 2026-11-21T08, in the order in which they were written."""
    hours: dict[str, list[bytes]] = {}
    for key, content in segments(folder).items():
        date, _, name = key.removeprefix("date=").partition("/")
        hours.setdefault(f"{date}T{name[:2]}", []).extend(content.splitlines())
    return hours


def stored_records(folder: Path) -> list[records.AnyRecord]:
    """Return all stored records; a line that is none fails the test."""
    return [decode_record(line) for content in segments(folder).values() for line in content.splitlines()]


def written_records(folder: Path) -> list[dict[str, Any]]:
    """Return all records of running operators, stored or not; one that is just being stored may be there twice."""
    lines: list[bytes] = []
    for path in folder.glob(".spool/*/*.jsonl"):
        with suppress(FileNotFoundError):  # it has just been stored
            lines += whole_lines(path)
    return [json.loads(line) for line in [*lines, *b"".join(segments(folder).values()).splitlines()]]
