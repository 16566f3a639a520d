"""What a member must not forget when its container restarts: what it obeyed, and a Broadcasting group's offsets.

Every file is written whole beside its place, brought to the disk and renamed: at any time, after any end, it is the
one before or the new one. Writing is synchronous and raises OSError; then the one before is still in its place.
"""

import errno
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from rota.documents import Whole
from rota.model import Queue
from rota.ranges import unnested

QUOTA_BYTES = 240 * 2**20  # of all files: the volume that is put into pods has 256 MiB
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
            _write(self._path.parent, self._path, _Note(self._uid, *kept))
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


class _Places(msgspec.Struct):
    group: str
    topic: str
    offsets: dict[str, dict[str, Whole]]  # by broker and id
    begun: Annotated[float, msgspec.Meta(ge=0, le=2**40)] | None = None  # seconds since 1970


class Offsets:
    """How far this member is with the queues of a Broadcasting group, and since when, a file for each topic.

    The folder is this member's alone. It waits for the disk, so call it in a thread, one call at a time.
    """

    def __init__(self, folder: Path, group: str) -> None:
        """Read nothing yet; groups and topics have names as the spec allows them, without slashes and dots."""
        self._root = folder
        self._folder = folder / group
        self._group = group
        self._kept: dict[str, dict[Queue, int]] = {}
        self._begun: dict[str, float] = {}

    def load(self, topic: str) -> dict[Queue, int]:
        """Return what was kept of a topic; a torn file is set aside and told, an unreadable one an OSError.

        For who cannot read does not know that there is no offset.
        """
        self._kept[topic] = self._read(topic)
        return dict(self._kept[topic])

    def begun(self, topic: str) -> float:
        """Return when a loaded topic was first loaded, in seconds since 1970; kept with the first offset."""
        return self._begun[topic]

    def keep(self, offsets: Mapping[Queue, int]) -> None:
        """Put offsets on the disk, forward or back; queues that are not named stay.

        What can be written is, also where another topic's file cannot; then an OSError is raised.
        """
        failed: list[OSError] = []
        for topic in sorted({queue.topic for queue in offsets}):
            try:
                self._keep(topic, {queue: offset for queue, offset in offsets.items() if queue.topic == topic})
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _keep(self, topic: str, offsets: Mapping[Queue, int]) -> None:
        before = self._kept[topic] if topic in self._kept else self.load(topic)
        after = {**before, **offsets}
        if after == before:
            return
        nested: dict[str, dict[str, int]] = {}
        for queue, offset in sorted(after.items()):
            nested.setdefault(queue.broker, {})[str(queue.id)] = offset
        _write(self._root, self._path(topic), _Places(self._group, topic, nested, self._begun[topic]))
        self._kept[topic] = after

    def _path(self, topic: str) -> Path:
        return self._folder / f"{topic}.json"

    def _read(self, topic: str) -> dict[Queue, int]:
        path = self._path(topic)
        self._begun[topic] = time.time()
        try:
            return self._understood(topic, path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            aside = path.with_name(f"{path.name}.torn")
            path.replace(aside)
            _log.error("The offsets of %s cannot be read, and are set aside as %s: %s", topic, aside, error)
            return {}

    def _understood(self, topic: str, text: bytes) -> dict[Queue, int]:
        places = msgspec.json.decode(text, type=_Places)
        if (places.group, places.topic) != (self._group, topic):
            raise ValueError(f"they are those of {places.topic} in group {places.group}")
        offsets = dict(unnested({topic: places.offsets}))
        self._begun[topic] = places.begun or self._begun[topic]
        return offsets


def _check_quota(root: Path, size: int) -> None:
    """Raise an OSError if our files would exceed the quota: a pod whose volume exceeds its limit is evicted."""
    used = 0
    for file in [*root.glob("*.json"), *root.glob("*/*.json"), *root.glob("*/*.json.torn")]:
        with suppress(FileNotFoundError):  # another thread has replaced it
            used += file.stat().st_size
    if used + size > QUOTA_BYTES:
        raise OSError(errno.EDQUOT, f"The state would take more than {QUOTA_BYTES // 2**20} MiB", str(root))


def _write(root: Path, path: Path, body: msgspec.Struct) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    text = msgspec.json.encode(body)
    _check_quota(root, len(text))
    try:
        with new.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
