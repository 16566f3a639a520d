"""State that a member keeps over container restarts: its obeyed generation, final drain and incarnation.

The incarnation is a number that each process of the sidecar in the pod increases. The operator requests a final drain
from a pod that is being deleted; once it has started, no process of the pod consumes any more.

A file is written completely under another name, flushed to the disk and renamed: after a crash at any time it is either
the previous or the new file. Writing is synchronous and raises OSError; then the caller must not rely on the new state,
and writes it again. It may be on the disk all the same, if only flushing the folder failed (see `limited_files`).
"""

import logging
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from rota.documents import NonNegativeInt
from rota.sidecar.storage.limited_files import check_quota, replace_within_quota

_MAX_STATE_BYTES = 4096  # above any state file's size, and one block of most disks

_log = logging.getLogger(__name__)


class SavedState(NamedTuple):
    """The state with which a member starts; `final` says that its final drain has started."""

    obeyed_generation: int = 0
    final: bool = False
    incarnation: int = 0  # number of the pod's last sidecar process; 0: none yet, or a process of an earlier version


class _StoredState(msgspec.Struct):
    """A pod's uid, and the fields of SavedState in the same order."""

    uid: str
    obeyed: NonNegativeInt
    final: bool
    incarnation: NonNegativeInt = 0


class StateStore:
    """The state of one pod's member, on the pod's emptyDir."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "obeyed.json"
        self._uid: str | None = None
        self._saved = SavedState()

    def load(self, uid: str) -> SavedState:
        """Return this pod's stored state; an unreadable state, or another pod's, is logged and counts as empty."""
        self._uid = uid
        self._saved = self._read(uid)
        return self._saved

    def store_incarnation(self) -> int:
        """Write the incarnation of this process to the disk and return it: each process of a pod has a higher one.

        After an OSError the process has no incarnation and must not consume: the next process would have the same.
        """
        state = self._saved._replace(incarnation=self._saved.incarnation + 1)
        self._write(state)
        return state.incarnation

    def check_space(self) -> None:
        """Raise OSError if `store_state` would probably fail: then the member must not obey a new assignment."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        check_quota(self._path.parent, _MAX_STATE_BYTES)
        probe_file = self._path.with_name(f"{self._path.name}.tried")
        try:
            probe_file.write_bytes(bytes(_MAX_STATE_BYTES))
        finally:
            probe_file.unlink(missing_ok=True)

    def store_state(self, *, obeyed_generation: int | None = None, final: bool = False) -> None:
        """Write the state to the disk before returning; neither value ever goes back.

        After an OSError the caller must not obey: after a restart the generation would be lost.
        """
        previous = self._saved
        generation = max(previous.obeyed_generation, obeyed_generation or 0)
        state = SavedState(generation, previous.final or final, previous.incarnation)
        if state != previous:
            self._write(state)

    def _write(self, state: SavedState) -> None:
        if self._uid is None:
            raise RuntimeError("Call load() first")
        replace_within_quota(self._path.parent, self._path, _StoredState(self._uid, *state))
        self._saved = state

    def _read(self, uid: str) -> SavedState:
        try:
            stored = msgspec.json.decode(self._path.read_bytes(), type=_StoredState)
        except FileNotFoundError:
            return SavedState()
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            _log.warning("%s cannot be read; the member starts without stored state: %s", self._path, error)
            return SavedState(incarnation=int(time.time()))  # seconds since 1970: above any count of earlier processes
        if stored.uid != uid:
            text = "%s belongs to pod %s, not to %s; the member starts without stored state"
            _log.warning(text, self._path, stored.uid, uid)
            return SavedState()
        return SavedState(stored.obeyed, stored.final, stored.incarnation)
