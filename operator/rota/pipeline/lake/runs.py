"""Plans of ingest runs: the journal's segments of each run, stored before the run appends its first row."""

from typing import Annotated

import msgspec

from rota.object_store import ObjectStore, StoreError, check_create_only

FOLDER = "_rota/runs"
CREATE_ONLY_KEY = "_rota/create-only"  # an empty object; see check_create_only


class PlannedSegment(msgspec.Struct, frozen=True):
    """A segment of the journal, as the store has listed the object."""

    key: str
    size_bytes: int
    etag: str


class RunPlan(msgspec.Struct, frozen=True):
    """The segments that one ingest run takes; a repeated run takes exactly these."""

    number: int
    journal: str  # URI of the journal; the segments' keys are relative to its root
    segments: Annotated[tuple[PlannedSegment, ...], msgspec.Meta(min_length=1)]


class RunStore:
    """Reads and creates the plans of ingest runs; a stored plan never changes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read(self, number: int) -> RunPlan | None:
        """Return the plan of a run, None if no plan is stored; raise ValueError if its object is damaged."""
        key = _key(number)
        try:
            plan = msgspec.json.decode(self._store.read(key), type=RunPlan)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self._store.uri}/{key} is damaged ({error}); {_remedy(number)}") from error
        if plan.number != number:
            raise ValueError(f"{self._store.uri}/{key} is damaged: it is of run {plan.number}; {_remedy(number)}")
        return plan

    def create(self, number: int, journal: str, segments: tuple[PlannedSegment, ...]) -> RunPlan:
        """Store the plan of a run, and return it; return the stored plan if the run has one already.

        Raise StoreError if the store would overwrite a plan. The plan is the first object that a run writes.
        """
        check_create_only(self._store, CREATE_ONLY_KEY)
        plan = RunPlan(number, journal, segments)
        if self._store.create(_key(number), msgspec.json.encode(plan)):
            return plan
        stored = self.read(number)
        if stored is None:
            raise StoreError(f"{self._store.uri}/{_key(number)} was deleted while the run was planned; ingest again")
        return stored

    def delete_before(self, number: int) -> None:
        """Remove the plans of earlier runs, which are all complete."""
        for info in self._store.list_objects(FOLDER):
            name = info.key.removeprefix(f"{FOLDER}/").removesuffix(".json")
            if name.isdecimal() and int(name) < number:
                self._store.delete(info.key)


def _key(number: int) -> str:
    return f"{FOLDER}/{number}.json"


def _remedy(number: int) -> str:
    return f"restore it; delete it only if no table has rows of run {number}"
