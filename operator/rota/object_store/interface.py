"""What a store of objects does: list, read, create once, delete. Keys are relative to the store's root."""

from collections.abc import Iterator
from datetime import datetime
from typing import BinaryIO, NamedTuple, Protocol


class StoreError(Exception):
    """A request to a store has failed; the message is a sentence for users."""


class NotAnObjectError(StoreError):
    """The key belongs to something that no store has created, such as a folder or a link."""


class ObjectInfo(NamedTuple):
    """A stored object, as a listing describes it."""

    key: str
    size_bytes: int
    etag: str  # another content of the same key has another etag
    modified: datetime


class ObjectStore(Protocol):
    """A folder or the prefix of a bucket. All methods raise StoreError if the store fails."""

    uri: str  # of the root

    def list_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below the folder `prefix`, in no particular order; none if it does not exist."""

    def read(self, key: str) -> bytes:
        """Return an object's content; raise FileNotFoundError if the object does not exist."""

    def create(self, key: str, data: bytes) -> bool:
        """Store a new object as a whole; return False, and change nothing, if the key exists.

        False may mean that this very call created the object and its answer was lost: `create_same` distinguishes that.
        """

    def open_writer(self, key: str) -> BinaryIO:
        """Open an object that is stored when the writer is closed, for content that is too large for `create`.

        No other writer may use the key: `create` alone detects that it exists.
        """

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""


def create_same(store: ObjectStore, key: str, data: bytes) -> bool:
    """Store a new object; return False only if the key exists with another content. Raise StoreError otherwise."""
    if store.create(key, data):
        return True
    try:
        return store.read(key) == data
    except FileNotFoundError:  # another writer is creating it, or it was deleted meanwhile
        raise StoreError(f"{store.uri}: {key} was created and deleted by another writer at the same time") from None
