"""A spool and a store of the journal in tests, which fail as a test wants."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from journal_segments import lines_by_hour
from rota.kube.telemetry.journal.folder_retention import FolderRetention
from rota.kube.telemetry.journal.segment_rules import LostRecords
from rota.kube.telemetry.journal.shipper import SegmentShipper
from rota.kube.telemetry.journal.spool import Spool
from rota.object_store import FolderStore, StoreError
from rota.object_store.segments import SegmentName

HOUR = "2026-11-21T09"
PROCESS = SegmentName("", "rota-a", "0f8e1c5a", "20261121T075812Z", 0)
LATER = PROCESS._replace(start="20261121T080000Z")
OTHER_POD = PROCESS._replace(pod="rota-b", uid="93b7d2f4")
AT = f"{HOUR}:00:00.000Z"


def a_line(number: int, size_bytes: int = 0) -> bytes:
    return msgspec.json.encode({"kind": "plan", "at": AT, "number": number, "text": size_bytes * "x"}) + b"\n"


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Limit the size of files: the system cuts off a write at the limit, even within a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class UnreliableStore(FolderStore):
    """A folder that fails as often as a test wants, after it has stored the object or before."""

    failures = 0
    refused = ""  # a key that is never stored
    is_stored = False
    may_read = True

    def create(self, key: str, data: bytes) -> bool:
        if key == self.refused:
            raise StoreError(f"{self.uri}: {key} cannot be written: the server answered 403 Forbidden")
        if self.failures:
            self.failures -= 1
            if self.is_stored:
                super().create(key, data)
            raise StoreError(f"{self.uri}: {key} cannot be written: the server answered 503 Service Unavailable")
        return super().create(key, data)

    def read(self, key: str) -> bytes:
        if not self.may_read:
            raise StoreError(f"{self.uri}: {key} cannot be read: the server answered 403 Forbidden")
        return super().read(key)


class Shipping:
    """A spool and a store, with what was lost."""

    def __init__(self, folder: Path, max_bytes: int = 2**20, store_bytes: int | None = None) -> None:
        self.folder = folder
        self.store = UnreliableStore(folder / "store")
        self.lost: list[LostRecords] = []
        self._max_bytes = max_bytes
        self._retention = store_bytes and FolderRetention(self.store, store_bytes)

    def spool(self, process: SegmentName = PROCESS) -> Spool:
        return Spool(self.folder / "spool", process, self._max_bytes, self.lost.append)

    def ship(self, spool: Spool, seconds: float = 30.0) -> SegmentShipper:
        """Ship what is in the spool, as a process does that ends."""
        spool.close_all()
        thread = self.shipper(spool)
        thread.start()
        thread.close(seconds)
        return thread

    def shipper(self, spool: Spool) -> SegmentShipper:
        return SegmentShipper(self.store, spool, self._retention or None)

    @property
    def lines(self) -> list[bytes]:
        """The stored lines, in the order of the segments' names."""
        return [line + b"\n" for lines in lines_by_hour(self.folder / "store").values() for line in lines]

    @property
    def left(self) -> list[str]:
        """The files in the spool."""
        return sorted(path.name for path in self.folder.glob("spool/*/*"))
