"""What commands print: values for programs, tables for people."""

# ruff: noqa: PLC0415, T201 - rich is for tables only; this is where we speak

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from rota.model import Queue, Roster

ENDLESS = 1_000_000  # the width of what is no terminal


def show(value: Any, output: str, people: Callable[[], None]) -> None:
    """Print a value as it was asked for; `people` prints it for those."""
    if output == "json":
        print(json.dumps(value, indent=2, ensure_ascii=False))
    elif output == "yaml":
        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), end="")
    else:
        people()


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table: nothing is cut, and names are no markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    if rows:
        columns = [Column(name.upper(), overflow="fold") for name in rows[0]]
        shown = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            shown.add_row(*(Text(str(value)) for value in row.values()))
        console = Console(width=None if sys.stdout.isatty() else ENDLESS)
        with console.capture() as captured:  # rich would end the program itself where nobody reads
            console.print(shown)
        print(captured.get(), end="")


def move(roster: "Roster", queue: "Queue", was: int, now: int) -> dict[str, Any]:
    """Say what becomes of a queue in values."""
    before, after = (roster.members[owner] if owner >= 0 else None for owner in (was, now))
    return {"topic": queue.topic, "broker": queue.broker, "id": queue.id, "from": before, "to": after}
