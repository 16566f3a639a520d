"""What a member must not forget when its container restarts: what it obeyed, and how often it was started.

Every file is written whole beside its place, brought to the disk and renamed: at any time, after any end, it is the
one before or the new one. Writing is synchronous and raises OSError; then the one before is still in its place.
"""

import logging
import time
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
    incarnation: int = 0  # of the process that wrote it; 0: none yet, or one of an earlier version


class _Note(msgspec.Struct):
    uid: str
    obeyed: Whole
    final: bool
    incarnation: Whole = 0


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

    def start(self) -> int:
        """Put the number of this process on the disk, and return it: each process of a pod has a higher one.

        On an OSError the process has no number, and must not consume: the next one would have the same.
        """
        if self._uid is None:
            raise RuntimeError("Notes are a pod's: load them before a process is counted")
        started = self._kept._replace(incarnation=self._kept.incarnation + 1)
        write_file(self._path.parent, self._path, _Note(self._uid, *started))
        self._kept = started
        return started.incarnation

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
        before = self._kept
        kept = Remembered(max(before.obeyed, obeyed or 0), before.final or final, before.incarnation)
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
            return Remembered(incarnation=int(time.time()))  # above whatever was counted
        if note.uid != uid:
            _log.warning("%s is of pod %s, not of %s, so nothing was obeyed yet", self._path, note.uid, uid)
            return Remembered()
        return Remembered(note.obeyed, note.final, note.incarnation)
