"""Snapshots of a lake: the versions of all tables that belong together, each in an object that is created once."""

import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from rota.object_store import ObjectStore, check_create_only, create_same, is_missing_folder
from rota.pipeline.lake.runs import CREATE_ONLY_KEY
from rota.sentences import join_names

FOLDER = "_rota/snapshots"
_KEY_PATTERN = re.compile(rf"{FOLDER}/([1-9]\d{{0,17}})\.json", re.ASCII)
_ID_BYTES = 8

TableVersion = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # of the Delta log


class LakeSnapshot(msgspec.Struct, frozen=True):
    """Versions of all tables that belong together; number 0 is the empty lake before the first snapshot."""

    number: int
    created_at: datetime  # never earlier than the previous snapshot's, even if a writer's clock is slow
    run: int  # the last ingest run that has added its rows to all tables
    tables: dict[str, TableVersion]  # by name of the table, such as lake/offsets
    id: str = ""  # random: distinguishes two attempts to publish the same number

    def version(self, table: str) -> int | None:
        """Return the version of a table; None if the table did not exist."""
        return self.tables.get(table)


EMPTY_SNAPSHOT = LakeSnapshot(number=0, created_at=datetime.fromtimestamp(0, UTC), run=0, tables={})


class SnapshotConflictError(ValueError):
    """Two commands have written the same table at the same time; the text is a sentence for users."""


class SnapshotStore:
    """Reads and publishes the snapshots of a lake; a published snapshot never changes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def numbers(self) -> list[int]:
        """Return the numbers of all snapshots, ascending."""
        return sorted(self._list_times())

    def latest(self) -> LakeSnapshot:
        """Return the newest snapshot, or the empty one; raise ValueError if its object is damaged."""
        numbers = self.numbers()
        return self._read(numbers[-1]) if numbers else EMPTY_SNAPSHOT

    def get(self, number: int) -> LakeSnapshot:
        """Return a snapshot; raise ValueError, with the existing numbers, if that snapshot does not exist."""
        try:
            return self._read(number)
        except FileNotFoundError:
            existing = _format_numbers(self.numbers())
            raise ValueError(f"{self._store.uri} has no snapshot {number}; it has {existing}") from None

    def as_of(self, time: datetime) -> LakeSnapshot:
        """Return the newest snapshot that was created at a time or earlier; raise ValueError if all are newer."""
        numbers = self.numbers()
        while True:
            try:
                return self._newest_until(time, numbers)
            except FileNotFoundError:
                remaining = self.numbers()
                if remaining == numbers:
                    raise
                numbers = remaining  # a maintenance has removed expired snapshots since the last listing

    def _newest_until(self, time: datetime, numbers: list[int]) -> LakeSnapshot:
        # Times never decrease, so a bisection finds the snapshot: a dozen requests for thousands of snapshots.
        index = bisect_right(numbers, time, key=lambda number: self._read(number).created_at)
        if index:
            return self._read(numbers[index - 1])
        oldest = f"the oldest is of {self._read(numbers[0]).created_at.isoformat()}" if numbers else "it has none"
        raise ValueError(f"{self._store.uri} has no snapshot as old as {time.isoformat()}; {oldest}")

    def choose(self, number: int | None, time: datetime | None) -> LakeSnapshot:
        """Return a snapshot by number or time, else the newest; raise ValueError if the lake has no such snapshot."""
        if number is not None and time is not None:
            raise ValueError("--snapshot and --as-of both choose a snapshot; give one of them")
        if number is not None:
            return self.get(number)
        if time is not None:
            return self.as_of(time)
        newest = self.latest()
        if not newest.number:
            raise ValueError(self.explain_missing())
        return newest

    def explain_missing(self) -> str:
        """Return a sentence for the user of a lake without a snapshot, whose path may be wrong."""
        uri = self._store.uri
        problem = "does not exist" if is_missing_folder(uri) else "has no snapshot yet"
        return f"{uri} {problem}; `rota pipeline ingest {uri}` makes one from a journal"

    def publish(self, base: LakeSnapshot, tables: Mapping[str, int | None], run: int | None = None) -> LakeSnapshot:
        """Publish new versions of tables on top of a snapshot; a version of None is of a table that does not exist.

        If other snapshots were published since `base`, the new one continues the newest of them:

        - Without `run`, raise SnapshotConflictError if one of `tables` has changed in them.
        - With `run`, keep the newer version of each table. Tables of a run are only appended to and compacted, so the
          newer of two versions has the rows of both. If the newest snapshot has the run and no older versions, return
          that snapshot.

        Raise StoreError if the store would overwrite snapshots.
        """
        check_create_only(self._store, CREATE_ONLY_KEY)
        versions = {table: version for table, version in tables.items() if version is not None}
        newest = base
        while True:
            draft = LakeSnapshot(
                number=newest.number + 1,
                created_at=max(datetime.now(UTC), newest.created_at),
                run=newest.run if run is None else max(newest.run, run),
                tables={**newest.tables, **versions},
                id=secrets.token_hex(_ID_BYTES),
            )
            if create_same(self._store, _key(draft.number), msgspec.json.encode(draft)):
                return draft
            newest = self.latest()
            if run is None:
                self._check_unchanged(base, newest, versions)
                continue
            versions = _newer_versions(versions, newest)
            if newest.run >= run and not versions:
                return newest

    def expire(self, expiry: datetime) -> LakeSnapshot:
        """Remove the snapshots that newer ones had replaced by `expiry`; return the oldest remaining snapshot.

        The snapshot of any time after `expiry` can still be read. The newest snapshot always stays. The store's times
        are compared instead of `created_at`, because one writer's wrong clock makes this time wrong in all later
        snapshots.
        """
        while stored_at := self._list_times():
            numbers = sorted(stored_at)
            while len(numbers) > 1 and stored_at[numbers[1]] <= expiry:
                self._store.delete(_key(numbers.pop(0)))
            with suppress(FileNotFoundError):  # another maintenance has removed more, so list again
                return self._read(numbers[0])
        return EMPTY_SNAPSHOT

    def _list_times(self) -> dict[int, datetime]:
        """Return when each snapshot was stored, by number."""
        stored_at: dict[int, datetime] = {}
        for info in self._store.list_objects(FOLDER):
            match = _KEY_PATTERN.fullmatch(info.key)
            if match:
                stored_at[int(match[1])] = info.modified
        return stored_at

    def _check_unchanged(self, base: LakeSnapshot, newest: LakeSnapshot, versions: Mapping[str, int]) -> None:
        """Raise SnapshotConflictError if another command has published one of the tables since `base`."""
        changed = [table for table in versions if base.version(table) != newest.version(table)]
        if changed:
            raise SnapshotConflictError(
                f"{self._store.uri}: another command has published {join_names(changed)} in snapshot {newest.number} "
                f"since this one read snapshot {base.number}; run this command again"
            )

    def _read(self, number: int) -> LakeSnapshot:
        key = _key(number)
        try:
            snapshot = msgspec.json.decode(self._store.read(key), type=LakeSnapshot)
        except msgspec.MsgspecError as error:
            remedy = "restore it, or delete it: those before and after it can be read by their numbers"
            raise ValueError(f"{self._store.uri}/{key} is damaged ({error}); {remedy}") from error
        if snapshot.number != number or snapshot.created_at.tzinfo is None:
            raise ValueError(f"{self._store.uri}/{key} is damaged: it is of snapshot {snapshot.number}")
        return snapshot


def _newer_versions(versions: Mapping[str, int], snapshot: LakeSnapshot) -> dict[str, int]:
    """Return the versions that are newer than the snapshot's."""
    return {table: version for table, version in versions.items() if version > snapshot.tables.get(table, -1)}


def _key(number: int) -> str:
    return f"{FOLDER}/{number}.json"


def _format_numbers(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    existing = set(numbers)
    spans: list[str] = []
    first = numbers[0]
    for number in numbers:
        if number - 1 not in existing:
            first = number
        if number + 1 not in existing:
            spans.append(str(number) if number == first else f"{first}-{number}")
    return join_names(spans, max_names=10)
