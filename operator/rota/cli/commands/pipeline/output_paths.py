"""The folders that the pipeline's commands write: what is in one and not theirs is somebody's, and stays.

All of it is looked at before Spark begins, so that a slip of the pen costs nobody a minute.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rota.pipeline.common import paths

TABLES = {  # the folders that each command writes anew; beside them it writes nothing that could be somebody's
    "rollup": ["."],
    "timeline": ["intervals", "violations"],
    "simulate": ["results", "series"],
    "recommend": ["results", "series", "costs", "chosen"],
}
WORDS = {  # the files that it writes anew, and how those begin
    "recommend": {"policies/*.yaml": paths.ADVICE, "report.html": "<!doctype html>"},
}
THEIRS = ("part-", "_", ".")  # how all names begin that Spark gives in such a folder
OF_THE_DISK = {"lost+found"}


def holds_any(source: str) -> bool:
    """Say whether there is anything to read."""
    return any(holds(Path(source)) for holds in (paths.is_lake, paths.is_journal, is_simulation))


def check(command: str, given: Mapping[str, Any]) -> None:
    """Refuse a source that is none, and a --to that cannot be meant."""
    to, source = given.get("to", given.get("lake")), given.get("source", given.get("journal"))
    if command != "ingest" and source and not (command == "recommend" and is_simulation(Path(source))):
        paths.check_source(source)
    if to is not None:
        _check_to(command, to, source)
    if command == "ingest":  # of a folder that is somebody's nobody shall hear that he should make it anew
        paths.check_ingest(Path(given["journal"]), Path(given["lake"]), given["form"])


def _check_to(command: str, to: str, source: str | None) -> None:
    folder = Path(to).absolute()
    _check_place(to, folder)
    if source and not is_simulation(Path(source)):
        _check_apart(to, folder.resolve(), Path(source).resolve())
    if command == "ingest":
        _check_lake(to, folder)
    elif command == "generate" and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--to {to} is not empty; give a folder that is, or is not there yet")
    elif command in TABLES:
        _check_tables(to, folder, TABLES[command])
        _check_files(folder, WORDS.get(command, {}))


def is_simulation(folder: Path) -> bool:
    """Say whether `rota pipeline simulate` wrote, or began to write, into a folder that is no lake."""
    return not (folder / "_lock").exists() and (folder / "results").is_dir()


def _check_place(to: str, folder: Path) -> None:
    if not to.strip():
        raise ValueError("--to is empty; name a folder")
    there = next(it for it in (folder, *folder.parents) if os.path.exists(it))  # noqa: PTH110 - it says no, and throws not
    if not there.is_dir():
        raise ValueError(f"--to {to} cannot be a folder, for {there} is a file; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--to {to} cannot be written: nobody may write {there} but others; name another folder")


def _check_apart(to: str, folder: Path, source: Path) -> None:
    if source in (folder, *folder.parents):
        raise ValueError(f"--to {to} is within {source}, which is read; name a folder elsewhere")


def _check_lake(to: str, folder: Path) -> None:
    if (folder / "_lock").exists():
        return
    for name in _strange(folder):
        raise ValueError(f"--to {to} is no lake, and holds something else: {name}; name a folder of its own")


def _check_tables(to: str, folder: Path, tables: list[str]) -> None:
    if (folder / "_lock").exists() or paths.is_journal(folder):
        raise ValueError(f"--to {to} is a lake or a journal; name a folder of its own")
    for table in tables:
        for name in _strange(folder / table):
            raise ValueError(f"{folder / table} would be replaced, and holds something else: {name}; name another --to")


def _check_files(folder: Path, words: Mapping[str, str]) -> None:
    for pattern, begins in words.items():
        for path in folder.glob(pattern):
            with path.open("rb") as file:
                if file.read(len(begins)) != begins.encode():
                    raise ValueError(f"{path} would be replaced, and holds something else; name another --to")


def _strange(folder: Path) -> Iterator[str]:
    """Return what Spark did not put into a folder, nor into one for a day in it."""
    if folder.is_file():
        yield folder.name
    for it in sorted(folder.iterdir()) if folder.is_dir() else []:
        if it.name.startswith("date=") and it.is_dir():
            yield from (f"{it.name}/{name}" for name in _strange(it))
        elif not it.name.startswith(THEIRS) and it.name not in OF_THE_DISK:
            yield it.name
