"""Finds the damaged file of a table's log: deltalake reports a damaged log, but not always the damaged file."""

import io
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq

from rota.object_store import ObjectStore

_COMMIT_PATTERN = re.compile(r"(\d{20})\.json", re.ASCII)
_CHECKPOINT_PATTERN = re.compile(r"(\d{20})\.checkpoint.*\.parquet", re.ASCII)


def find_damage(store: ObjectStore, log_folder: str, version: int | None) -> str | None:
    """Describe the newest damaged or missing file that a version needs; return None if all files can be parsed."""
    commits: dict[int, str] = {}
    checkpoints: dict[int, str] = {}
    for info in store.list_objects(log_folder):
        name = info.key.rpartition("/")[2]
        for pattern, keys in ((_COMMIT_PATTERN, commits), (_CHECKPOINT_PATTERN, checkpoints)):
            match = pattern.fullmatch(name)
            if match and (version is None or int(match[1]) <= version):
                keys[int(match[1])] = info.key
    newest = max([*commits, *checkpoints], default=-1)
    for number in range(newest, -1, -1):
        if number in commits and not _is_commit(store.read(commits[number])):
            return f"{store.uri}/{commits[number]} is damaged"
        if number in checkpoints:
            is_damaged = not _is_parquet(store.read(checkpoints[number]))
            return f"{store.uri}/{checkpoints[number]} is damaged" if is_damaged else None
        if number not in commits:
            return f"{store.uri}/{log_folder}/{number:020}.json is missing"
    return None


def _is_commit(content: bytes) -> bool:
    lines = content.splitlines()
    try:
        for line in lines:
            if not isinstance(json.loads(line), dict):
                return False
    except ValueError:
        return False
    return bool(lines)


def _is_parquet(content: bytes) -> bool:
    try:
        pq.ParquetFile(io.BytesIO(content))
    except (pa.ArrowException, OSError):
        return False
    return True
