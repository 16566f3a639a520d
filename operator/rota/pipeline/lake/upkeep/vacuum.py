"""Removes files of a table that no live version needs, and the log files of older versions."""

import re
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rota.object_store import FOLDER_SCHEME, ObjectInfo, ObjectStore, parse_location

_LOG_FILE = re.compile(r"(\d{20})\.(json|checkpoint\.parquet)", re.ASCII)


class RemovedFiles(NamedTuple):
    """Number and size of removed data files."""

    files: int
    size_bytes: int


def remove_unused_files(
    store: ObjectStore, name: str, needed: Collection[str], modified_before: datetime
) -> RemovedFiles:
    """Remove unneeded files that were modified before a time, since a command may be writing younger files.

    Removed are files of expired versions, and orphans: files of killed commands, or of commands that lost a conflict.
    """
    unused: list[ObjectInfo] = []
    for info in store.list_objects(name):
        path = info.key.removeprefix(f"{name}/")
        if info.modified < modified_before and _is_unused(path, needed):
            unused.append(info)
    size_bytes = 0
    for info in unused:
        store.delete(info.key)
        size_bytes += info.size_bytes
        if parse_location(store.uri).scheme == FOLDER_SCHEME:
            _remove_empty_folders(Path(store.uri), info.key, name)
    return RemovedFiles(len(unused), size_bytes)


def _is_unused(path: str, needed: Collection[str]) -> bool:
    return not path.startswith("_delta_log/") and path not in needed


def _remove_empty_folders(root: Path, key: str, name: str) -> None:
    """Remove the folders of a removed file that have become empty."""
    with suppress(OSError):
        for folder in (root / key).parents:
            if folder == root / name:
                break
            folder.rmdir()


def trim_log(store: ObjectStore, folder: str, oldest_version: int) -> int:
    """Remove the log files that are not needed to read `oldest_version` and later versions; return their number."""
    versions: dict[str, int] = {}  # by key
    checkpoints: list[int] = []  # versions of the checkpoints that are not after `oldest_version`
    for info in store.list_objects(folder):
        match = _LOG_FILE.fullmatch(info.key.removeprefix(f"{folder}/"))
        if match:
            versions[info.key] = int(match[1])
            if match[2] != "json" and int(match[1]) <= oldest_version:
                checkpoints.append(int(match[1]))
    start = max(checkpoints, default=0)  # the checkpoint contains all earlier commits
    unneeded = [key for key, version in versions.items() if version < start]
    for key in unneeded:
        store.delete(key)
    return len(unneeded)
