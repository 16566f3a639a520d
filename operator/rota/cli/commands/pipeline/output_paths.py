"""Checks of the folders that the pipeline's commands read and write: files of other programs are never replaced.

All checks run before Spark starts, so that a typing error is reported at once.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rota.pipeline.common import paths

REPLACED_FOLDERS = {  # the folders that each command replaces; it overwrites no other files that a user may own
    "rollup": ["."],
    "timeline": ["intervals", "violations"],
    "simulate": ["results", "series"],
    "recommend": ["results", "series", "costs", "chosen"],
}
REPLACED_FILES = {  # the files that each command replaces, and the text with which such files start
    "recommend": {"policies/*.yaml": paths.MANIFEST_FIRST_LINE, "report.html": "<!doctype html>"},
}
SPARK_PREFIXES = ("part-", "_", ".")  # prefixes of all names that Spark creates in such a folder
IGNORED_NAMES = {"lost+found"}


def has_input(source: str) -> bool:
    """Return whether the source is a lake, a journal or a simulation."""
    folder = Path(source)
    return paths.is_lake(folder) or paths.is_journal(folder) or is_simulation(folder)


def check_paths(command: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an invalid source, or for a --to that would overwrite or mix up files."""
    to = options.get("to", options.get("lake"))
    source = options.get("source", options.get("journal"))
    if command != "ingest" and source and not (command == "recommend" and is_simulation(Path(source))):
        paths.check_source(source)
    if to is not None:
        _check_to(command, to, source)
    if command == "ingest":  # checked last: the message must not advise to recreate a folder of another program
        paths.check_ingest(Path(options["journal"]), Path(options["lake"]), options["form"])


def _check_to(command: str, to: str, source: str | None) -> None:
    folder = Path(to).absolute()
    _check_writable(to, folder)
    if source and not is_simulation(Path(source)) and folder.resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"--to {to} is inside the source {source}; name a folder elsewhere")
    if command == "ingest":
        _check_lake(to, folder)
    elif command == "generate" and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--to {to} is not empty; give an empty folder or a new name")
    elif command in REPLACED_FOLDERS:
        _check_tables(to, folder, REPLACED_FOLDERS[command])
        _check_files(folder, REPLACED_FILES.get(command, {}))


def is_simulation(folder: Path) -> bool:
    """Return whether `rota pipeline simulate` has written, at least partly, into a folder that is no lake."""
    return not (folder / "_lock").exists() and (folder / "results").is_dir()


def _check_writable(to: str, folder: Path) -> None:
    if not to.strip():
        raise ValueError("--to is empty; name a folder")
    parent = next(filter(os.path.exists, (folder, *folder.parents)))  # `Path.exists` may raise
    if not parent.is_dir():
        raise ValueError(f"--to {to} cannot be a folder, because {parent} is a file; name another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"--to {to} cannot be written: you have no permission to write {parent}; name another folder")


def _check_lake(to: str, folder: Path) -> None:
    if (folder / "_lock").exists():
        return
    for name in _unexpected_names(folder):
        raise ValueError(f"--to {to} is not a lake, and contains other files: {name}; name a folder of its own")


def _check_tables(to: str, folder: Path, tables: list[str]) -> None:
    if (folder / "_lock").exists() or paths.is_journal(folder):
        raise ValueError(f"--to {to} is a lake or a journal; name a folder of its own")
    for table in tables:
        for name in _unexpected_names(folder / table):
            raise ValueError(f"{folder / table} would be replaced, but contains other files: {name}; name another --to")


def _check_files(folder: Path, file_starts: Mapping[str, str]) -> None:
    for pattern, prefix in file_starts.items():
        for path in folder.glob(pattern):
            with path.open("rb") as file:
                if file.read(len(prefix)) != prefix.encode():
                    raise ValueError(f"{path} would be replaced, but is not a file of this command; name another --to")


def _unexpected_names(folder: Path) -> Iterator[str]:
    """Yield names that Spark did not create in a folder or its `date=` folders."""
    if folder.is_file():
        yield folder.name
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if entry.name.startswith("date=") and entry.is_dir():
            yield from (f"{entry.name}/{name}" for name in _unexpected_names(entry))
        elif not entry.name.startswith(SPARK_PREFIXES) and entry.name not in IGNORED_NAMES:
            yield entry.name
