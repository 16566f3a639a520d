"""Finds the damaged file of a table's log: deltalake reports a damaged log, but not always the damaged file."""

import io
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq

from rota.object_store import ObjectInfo, ObjectStore

_COMMIT_PATTERN = re.compile(r"(\d{20})\.json", re.ASCII)
_CHECKPOINT_PATTERN = re.compile(r"(\d{20})\.checkpoint.*\.parquet", re.ASCII)
# A commit that adds or removes a file is larger. So smaller ones are rare, and can all be read.
_SUSPECT_BYTES = 400
_CHANGES = {"add", "remove", "metaData", "protocol", "txn", "cdc", "domainMetadata"}


def find_empty_commit(store: ObjectStore, log_folder: str, version: int) -> str | None:
    """Describe a commit without changes that a version needs; return None if each commit has one.

    Deltalake reads these files as commits without changes, so that rows would be missing:

    - an empty file, such as a power failure leaves in a folder, and `{}`
    - a file that was truncated after its first line, `commitInfo`
    """
    commits, checkpoints = _list_log(store, log_folder, version)
    covered = max(checkpoints, default=-1)  # a checkpoint contains the commits up to its version
    for number, info in commits.items():
        is_suspect = number > covered and info.size_bytes < _SUSPECT_BYTES
        if is_suspect and not _has_changes(store.read(info.key)):
            return f"{store.uri}/{info.key} is damaged"
    return None


def find_damage(store: ObjectStore, log_folder: str, version: int | None) -> str | None:
    """Describe the newest damaged or missing file that a version needs; return None if all files can be parsed."""
    commits, checkpoints = _list_log(store, log_folder, version)
    newest = max([*commits, *checkpoints], default=-1)
    for number in range(newest, -1, -1):
        if number in commits and not _is_commit(store.read(commits[number].key)):
            return f"{store.uri}/{commits[number].key} is damaged"
        if number in checkpoints:
            is_damaged = not _is_parquet(store.read(checkpoints[number].key))
            return f"{store.uri}/{checkpoints[number].key} is damaged" if is_damaged else None
        if number not in commits:
            return f"{store.uri}/{log_folder}/{number:020}.json is missing"
    return None


def _list_log(
    store: ObjectStore, log_folder: str, version: int | None
) -> tuple[dict[int, ObjectInfo], dict[int, ObjectInfo]]:
    """Return the commits and the checkpoints up to a version, by default all, by their versions."""
    commits: dict[int, ObjectInfo] = {}
    checkpoints: dict[int, ObjectInfo] = {}
    for info in store.list_objects(log_folder):
        name = info.key.rpartition("/")[2]
        for pattern, files in ((_COMMIT_PATTERN, commits), (_CHECKPOINT_PATTERN, checkpoints)):
            match = pattern.fullmatch(name)
            if match and (version is None or int(match[1]) <= version):
                files[int(match[1])] = info
    return commits, checkpoints


def _is_commit(content: bytes) -> bool:
    lines = content.splitlines()
    try:
        for line in lines:
            action = json.loads(line)
            if not isinstance(action, dict) or not action:
                return False
    except ValueError:
        return False
    return bool(lines)


def _has_changes(content: bytes) -> bool:
    return _is_commit(content) and any(_CHANGES & json.loads(line).keys() for line in content.splitlines())


def _is_parquet(content: bytes) -> bool:
    try:
        pq.ParquetFile(io.BytesIO(content))
    except (pa.ArrowException, OSError):
        return False
    return True
