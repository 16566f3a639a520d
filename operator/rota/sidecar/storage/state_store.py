"""What a member must not forget when its container restarts: which generation it obeyed, and whether it drained.

Every file is written whole beside its place, brought to the disk and renamed: at any time, after any end, it is the
one before or the new one. Writing is synchronous and raises OSError; then the one before is still in its place.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from rota.documents import Whole
from rota.sidecar.storage.limited_files import write_file

_LARGEST = 4096  # bytes of a note, a block of most disks

_log = logging.getLogger(__name__)


class Remembered(NamedTuple):
    """What a member starts from: the generation it obeyed last, and whether it drained for good."""

    obeyed: int = 0
    final: bool = False


class _Note(msgspec.Struct):
    uid: str
    obeyed: Whole
    final: bool


class Notes:
    """What one pod's member obeyed, on the pod's emptyDir."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self._path = folder / "obeyed.json"
        self._uid: str | None = None
        self._kept = Remembered()

    def load(self, uid: str) -> Remembered:
        """Return what this pod's member kept; what cannot be read, or is another pod's, is as nothing, and is told."""
        self._uid, self._kept = uid, self._read(uid)
        return self._kept

    def need_room(self) -> None:
        """Raise the OSError that `keep` would most likely raise; so that nothing is decided that cannot be noted."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        tried = self._path.with_name(f"{self._path.name}.tried")
        try:
            tried.write_bytes(bytes(_LARGEST))
        finally:
            tried.unlink(missing_ok=True)

    def keep(self, *, obeyed: int | None = None, final: bool = False) -> None:
        """Put it on the disk before this returns; neither ever goes back.

        On an OSError the caller must not obey: after a restart nobody would know of it.
        """
        if self._uid is None:
            raise RuntimeError("Notes are a pod's: load them before they are kept")
        kept = Remembered(max(self._kept.obeyed, obeyed or 0), self._kept.final or final)
        if kept != self._kept:
            write_file(self._path.parent, self._path, _Note(self._uid, *kept))
            self._kept = kept

    def _read(self, uid: str) -> Remembered:
        try:
            note = msgspec.json.decode(self._path.read_bytes(), type=_Note)
        except FileNotFoundError:
            return Remembered()
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            _log.warning("%s cannot be read, so nothing was obeyed yet: %s", self._path, error)
            return Remembered()
        if note.uid != uid:
            _log.warning("%s is of pod %s, not of %s, so nothing was obeyed yet", self._path, note.uid, uid)
            return Remembered()
        return Remembered(note.obeyed, note.final)
