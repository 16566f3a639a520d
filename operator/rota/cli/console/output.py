"""What commands print: values for programs, tables for people."""

# ruff: noqa: PLC0415, T201 - rich is for tables only; this is where we speak

import json
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from rota.model import Queue, Roster

ENDLESS = 1_000_000  # the width of what is no terminal

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
    """Print rows as a table: nothing is cut, and names are no markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    if rows:
        columns = [Column(name.upper(), overflow="fold") for name in rows[0]]
        shown = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            shown.add_row(*(Text(_harmless(str(value))) for value in row.values()))
        console = Console(width=None if sys.stdout.isatty() else ENDLESS)
        with console.capture() as captured:  # rich would end the program itself where nobody reads
            console.print(shown)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        print("\n".join(line for line in lines if line))


def move(roster: "Roster", queue: "Queue", was: int, now: int) -> dict[str, Any]:
    """Say what becomes of a queue in values."""
    before, after = (roster.members[owner] if owner >= 0 else None for owner in (was, now))
    return {"topic": queue.topic, "broker": queue.broker, "id": queue.id, "from": before, "to": after}
