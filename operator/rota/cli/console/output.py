"""Output of commands as JSON, YAML or tables."""

# ruff: noqa: PLC0415, T201 - rich is for tables only; this module prints

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from rota.model import Queue, Roster

COLUMN_GAP_CHARACTERS = 3  # spaces between two columns

_MAYBE_UNPRINTABLE = re.compile(r"[^ -~\n]")


def print_value(value: Any, output_format: str, print_text: Callable[[], None]) -> None:
    """Print a value in the output format; `print_text` prints it as a table."""
    if output_format == "json":
        print(_MAYBE_UNPRINTABLE.sub(_json_escape, json.dumps(value, indent=2, ensure_ascii=False)))
    elif output_format == "yaml":
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        is_printable = text.replace("\n", "").isprintable()
        print(text if is_printable else yaml.safe_dump(value, sort_keys=False), end="")
    else:
        print_text()


def sanitize_line(text: str) -> str:
    """Return a text in one line without terminal control characters, which a client id may contain."""
    return _replace_unprintable(" ".join(text.split()))


def _replace_unprintable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _json_escape(match: re.Match[str]) -> str:
    """Return the JSON escape of an unprintable character; in JSON such characters occur only in strings."""
    char = match[0]
    if char.isprintable():
        return char
    return json.dumps(char)[1:-1] if char > "\x7f" else f"\\u{ord(char):04x}"  # json.dumps does not escape DEL


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print rows in columns, as kubectl does: without borders, and without truncation."""
    if not rows:
        return
    cells = list(map(_row_cells, rows))
    header = list(map(str.upper, rows[0]))
    lines = _fold_columns(header, cells) if sys.stdout.isatty() else _align_columns([header, *cells])
    print("\n".join(line.rstrip() for line in lines if line.strip()))


def _row_cells(row: dict[str, Any]) -> list[str]:
    return [_replace_unprintable(str(value)) for value in row.values()]


def _align_columns(lines: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield (" " * COLUMN_GAP_CHARACTERS).join(map(str.ljust, line, widths))


def _fold_columns(header: list[str], cells: list[list[str]]) -> list[str]:
    """Return the lines of a table as wide as the terminal; long cells continue on the next line."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = (Column(name, overflow="fold") for name in header)
    shown = Table(*columns, box=None, pad_edge=False, padding=(0, COLUMN_GAP_CHARACTERS, 0, 0))
    for row in cells:
        shown.add_row(*map(Text, row))
    console = Console()
    with console.capture() as captured:  # rich would exit the program if the pipe is closed
        console.print(shown)
    return captured.get().splitlines()


def describe_move(roster: "Roster", queue: "Queue", previous_index: int, next_index: int) -> dict[str, Any]:
    """Return the previous and the next owner of a queue as plain values; a negative index is no owner."""
    previous_owner = roster.members[previous_index] if previous_index >= 0 else None
    next_owner = roster.members[next_index] if next_index >= 0 else None
    return {"topic": queue.topic, "broker": queue.broker, "id": queue.id, "from": previous_owner, "to": next_owner}
