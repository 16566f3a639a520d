"""Loads versions of a Delta table from the table's log, and names the damaged file if loading fails."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from rota.object_store import ObjectStore
from rota.pipeline.lake.reading.log_damage import find_damage, find_empty_commit
from rota.pipeline.lake.storage import storage_errors, storage_options

_READER_VERSION = 1  # highest reader version of Delta's protocol that is supported
_COMMIT_READERS = 16


class LogReader:
    """Log of the table below `name` in a lake's store."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.uri = f"{store.uri}/{name}"
        self.folder = f"{name}/_delta_log"
        self._store = store
        self._options = storage_options(store.uri)
        self._checked_versions: set[int] = set()

    def load(self, version: int | None = None) -> DeltaTable | None:
        """Load a version, by default the newest; None if the table does not exist.

        Raise ValueError if a requested version does not exist, or a file of the log is damaged.
        """
        try:
            with storage_errors(self.uri):
                table = DeltaTable(self.uri, version, self._options)
        except TableNotFoundError:
            if version is None:
                return None
            raise ValueError(f"{self.uri} has no version {version}: its log is gone; recreate the lake") from None
        except DeltaError as error:
            raise ValueError(self._explain(error, version)) from error
        self._check_format(table)
        self._check_commits(table.version())
        return table

    def paths_since(self, version: int) -> set[str]:
        """Return the paths of all files that this version or any later one lists, relative to the table."""
        table = self.load(version)
        newest = self.load()
        if table is None or newest is None:
            return set()
        paths = set(pa.table(table.get_add_actions())["path"].to_pylist())
        keys = [f"{self.folder}/{number:020}.json" for number in range(version + 1, newest.version() + 1)]
        with ThreadPoolExecutor(_COMMIT_READERS) as pool:
            for content in pool.map(self._read_commit, keys):
                paths.update(_added_paths(content))
        return paths

    def _read_commit(self, key: str) -> bytes:
        try:
            return self._store.read(key)
        except FileNotFoundError:
            raise ValueError(self._damage_sentence(f"{self._store.uri}/{key} is missing")) from None

    def _check_format(self, table: DeltaTable) -> None:
        protocol = table.protocol()
        if protocol.min_reader_version > _READER_VERSION:
            features = ", ".join(protocol.reader_features or ()) or f"reader version {protocol.min_reader_version}"
            raise ValueError(f"{self.uri} was changed by another program, which uses {features}: Rota cannot read that")

    def _check_commits(self, version: int) -> None:
        """Raise ValueError for an empty or truncated commit, which deltalake takes for a commit without changes."""
        if version in self._checked_versions:
            return
        damage = find_empty_commit(self._store, self.folder, version)
        if damage:
            raise ValueError(self._damage_sentence(damage))
        self._checked_versions.add(version)

    def _explain(self, error: DeltaError, version: int | None) -> str:
        damage = find_damage(self._store, self.folder, version)
        if damage is None and version is not None:
            newest = self.load()
            if newest is not None and newest.version() < version:
                return f"{self.uri} has no version {version}: the newest is {newest.version()}; recreate the lake"
        return self._damage_sentence(damage or f"{self.uri} cannot be read: {first_line(error)}")

    def _damage_sentence(self, damage: str) -> str:
        return f"{damage}; restore it, read an older snapshot with --snapshot, or recreate the lake from the journal"


def _added_paths(commit: bytes) -> Iterator[str]:
    for line in commit.splitlines():
        action = json.loads(line).get("add")
        if action:
            yield unquote(action["path"])


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]
