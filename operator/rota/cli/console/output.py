"""What commands print: values for programs, tables for people."""

# ruff: noqa: PLC0415, T201 - rich is for tables only; this is where we speak

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from rota.model import Queue, Roster

GAP = 3  # spaces between two columns

_unseen = re.compile(r"[^ -~\n]")


def show(value: Any, output: str, people: Callable[[], None]) -> None:
    """Print a value as it was asked for; `people` prints it for those."""
    if output == "json":
        print(_unseen.sub(_escaped, json.dumps(value, indent=2, ensure_ascii=False)))
    elif output == "yaml":
        told = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        harmless = all(letter.isprintable() for letter in told.replace("\n", ""))
        print(told if harmless else yaml.safe_dump(value, sort_keys=False), end="")
    else:
        people()


def clean(text: str) -> str:
    """Return a text in one line, without what a terminal would obey: a client id is any stranger's."""
    return _harmless(" ".join(text.split()))


def _harmless(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _escaped(found: re.Match[str]) -> str:
    """Return a letter as JSON may spell it, where a terminal would obey it; of JSON only texts have such ones."""
    letter = found[0]
    return letter if letter.isprintable() else json.dumps(letter)[1:-1] if letter > "\x7f" else f"\\u{ord(letter):04x}"


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows in columns, as kubectl does: without lines, and nothing is cut."""
    if not rows:
        return
    cells = [[_harmless(str(value)) for value in row.values()] for row in rows]
    header = [name.upper() for name in rows[0]]
    lines = _folded(header, cells) if sys.stdout.isatty() else _aligned([header, *cells])
    print("\n".join(line.rstrip() for line in lines if line.strip()))


def _aligned(lines: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield (" " * GAP).join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))


def _folded(header: list[str], cells: list[list[str]]) -> list[str]:
    """Return the lines of a table that is as wide as the terminal; wider cells continue on the next line."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = (Column(name, overflow="fold") for name in header)
    shown = Table(*columns, box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for row in cells:
        shown.add_row(*map(Text, row))
    console = Console()
    with console.capture() as captured:  # rich would end the program itself where nobody reads
        console.print(shown)
    return captured.get().splitlines()


def move(roster: "Roster", queue: "Queue", was: int, now: int) -> dict[str, Any]:
    """Say what becomes of a queue in values."""
    before, after = (roster.members[owner] if owner >= 0 else None for owner in (was, now))
    return {"topic": queue.topic, "broker": queue.broker, "id": queue.id, "from": before, "to": after}
