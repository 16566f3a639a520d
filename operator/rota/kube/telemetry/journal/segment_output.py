"""Output of the journal to a folder or bucket: a spool, and the thread that ships its segments.

A segment is a file of lines. `Spool` appends to it in a folder of its own; when it is closed, `SegmentShipper` stores
it in the journal's folder or bucket.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rota.kube.telemetry.journal.folder_retention import FolderRetention
from rota.kube.telemetry.journal.segment_rules import LostRecords
from rota.kube.telemetry.journal.shipper import SegmentShipper
from rota.kube.telemetry.journal.spool import Spool
from rota.object_store import FolderStore, ObjectStore, StoreError, open_store
from rota.object_store.segments import SegmentName

HIDDEN_SPOOL = ".spool"  # in the journal's folder
SPOOL_DIVISOR = 10  # limit_bytes // 10 of a folder journal is for its spool
CHECK_SECONDS = 5.0  # to wait for the disk at start
TRANSIENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}  # may pass; others are fatal at start

_log = logging.getLogger(__name__)


class JournalPlace(NamedTuple):
    """Where a journal is written."""

    destination: str  # a folder, or the URI of a bucket's prefix
    limit_bytes: int  # for a folder, of journal and spool together; for a bucket, of the local spool only
    spool: str = ""  # a folder; empty: the default


class SegmentOutput:
    """Appends lines to segments and ships them."""

    def __init__(
        self, place: JournalPlace, identity: str, pod_uid: str, on_dropped: Callable[[LostRecords], None]
    ) -> None:
        """Raise ValueError, with a sentence for users, if the place cannot be used.

        `identity` and `pod_uid` are part of the segments' names. `on_dropped` is called with records that the spool
        dropped because it was full, or because their file cannot be read.
        """
        try:
            store = open_store(place.destination)
        except ValueError as error:
            raise ValueError(f"--journal: {error}") from error
        spool_bytes = place.limit_bytes
        retention = None
        spool = _find_spool(place, store)
        _check_in_thread(lambda: _check_folders(store, spool), store.uri)
        if isinstance(store, FolderStore):
            spool_bytes = place.limit_bytes // SPOOL_DIVISOR
            retention = FolderRetention(store, place.limit_bytes - spool_bytes)
        uid = re.sub(r"[^0-9A-Za-z]", "", pod_uid) or "0"
        # The spool sets hour and sequence of each segment; the rest identifies this process.
        own_name = SegmentName(hour="", pod=identity, uid=uid, start=_utc_now(), sequence=0)
        self._spool = Spool(spool, own_name, spool_bytes, on_dropped)
        self._shipper = SegmentShipper(store, self._spool, retention)
        self.log_subject = f"The journal's spool {spool}"
        self.append = self._spool.append
        self.close_due = self._spool.close_due  # closes segments that are old or large enough

    def start(self) -> None:
        """Start the thread that ships; segments of ended processes come first."""
        self._shipper.start()

    def finish(self) -> None:
        """Close the open segments, so that they can be shipped."""
        self._spool.close_all()

    def close(self, seconds: float) -> None:
        """Ship the remaining segments for at most `seconds`; the next process ships the rest."""
        self._shipper.close(seconds)

    @property
    def shipped_segments(self) -> int:
        """Number of segments that were shipped."""
        return self._shipper.shipped_segments

    @property
    def failed_attempts(self) -> int:
        """Number of attempts to ship a segment that failed."""
        return self._shipper.failed_attempts

    @property
    def spool_bytes(self) -> int:
        """Size of the segments that are not shipped yet."""
        return self._spool.size_bytes


def _find_spool(place: JournalPlace, store: ObjectStore) -> Path:
    """Return the spool's folder; raise ValueError if the default one belongs to another user."""
    if place.spool:
        return Path(place.spool).absolute()
    if isinstance(store, FolderStore):
        return Path(store.uri) / HIDDEN_SPOOL
    user_folder = Path(tempfile.gettempdir()) / f"rota-journal-{os.getuid()}"
    _check_owned_by_user(user_folder)
    # A folder for each destination, so that no journal ships the segments of another one.
    return user_folder / hashlib.sha256(store.uri.encode()).hexdigest()[:16]


def _check_in_thread(check: Callable[[], None], uri: str) -> None:
    """Run a check that raises ValueError; go on without its result if a disk does not respond."""
    mistakes: list[ValueError] = []

    def run() -> None:
        try:
            check()
        except ValueError as error:
            mistakes.append(error)

    thread = threading.Thread(target=run, name="journal check", daemon=True)
    thread.start()
    thread.join(CHECK_SECONDS)
    if thread.is_alive():
        _log.error(
            "The disk of the journal %s or of its spool does not respond; records may be dropped until it does", uri
        )
    elif mistakes:
        raise mistakes[0]


def _check_folders(store: ObjectStore, spool: Path) -> None:
    """Raise ValueError if the journal's folder or its spool cannot be used."""
    blamed_option = f"--journal-spool {spool}"
    if isinstance(store, FolderStore):
        journal = Path(store.uri)
        _check_writable(f"--journal {journal}", journal)
        _check_hard_links(store)
        if spool == journal / HIDDEN_SPOOL:  # not chosen by an option of its own
            blamed_option = f"--journal {journal}"
    _check_writable(blamed_option, spool)
    _check_locks(blamed_option, spool)


def _check_owned_by_user(folder: Path) -> None:
    """Raise ValueError if another user could change a folder in /tmp, where everyone may create folders."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_own = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    except OSError as error:
        raise ValueError(f"{folder} cannot be created: {error.strerror}; choose a folder by --journal-spool") from error
    if not is_own:
        raise ValueError(f"{folder} belongs to another user; choose a folder by --journal-spool")


def _check_locks(option: str, folder: Path) -> None:
    """Raise ValueError if files cannot be locked in a folder: unlocked segments could be shipped by two processes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in TRANSIENT_ERRNOS:
            reason = f"files cannot be locked on its file system ({error.strerror})"
            raise ValueError(f"{option}: {reason}; choose a local folder by --journal-spool") from error


def _check_writable(option: str, folder: Path) -> None:
    """Raise ValueError if a folder is not writable, unless the cause may pass."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno not in TRANSIENT_ERRNOS:
            raise ValueError(f"{option} is not writable: {error.strerror}; choose another folder") from None


def _check_hard_links(store: FolderStore) -> None:
    """Raise ValueError if the folder's file system has no hard links, which `FolderStore.create` needs."""
    probe = f"{HIDDEN_SPOOL}/.probe"  # a killed process may leave it, and the next one deletes it
    try:
        store.create(probe, b"")
        store.delete(probe)
    except StoreError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in TRANSIENT_ERRNOS:
            raise ValueError(f"--journal: {error}") from error


def _utc_now() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
