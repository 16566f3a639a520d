"""Interface of a store of objects: list, read, create once, delete. Keys are relative to the store's root."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol


class StoreError(Exception):
    """A request to a store has failed; the message is a sentence for users."""


class NotAnObjectError(StoreError):
    """The key belongs to something that no store has created, such as a folder or a link."""


class ObjectInfo(NamedTuple):
    """A stored object, as a listing describes it."""

    key: str
    size_bytes: int
    etag: str  # changes when the content of the key changes
    modified: datetime


class ObjectStore(Protocol):
    """A folder or the prefix of a bucket. All methods raise StoreError if the store fails."""

    uri: str  # URI of the root; the path of a folder

    def list_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below the folder `prefix`, in no particular order; none if it does not exist."""

    def read(self, key: str) -> bytes:
        """Return an object's content; raise FileNotFoundError if the object does not exist."""

    def create(self, key: str, data: bytes) -> bool:
        """Store a new object as a whole; return False, and change nothing, if the key exists.

        False may also mean that this call created the object, lost the server's answer, and was repeated. `create_same`
        distinguishes both cases.
        """

    def open_writer(self, key: str) -> BinaryIO:
        """Open an object that is stored when the writer is closed, for content that is too large for `create`.

        Unlike `create`, this does not detect an existing key, so no other writer may use the key.
        """

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""


@contextmanager
def file_write_errors(file: Path | str) -> Iterator[None]:
    """Turn errors of the operating system, such as a full disk, into StoreErrors that name the file."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {error.strerror or error}") from error


def create_same(store: ObjectStore, key: str, data: bytes) -> bool:
    """Store a new object; return False if the key exists with another content.

    Raise StoreError if the store fails, or if the object cannot be read back.
    """
    if store.create(key, data):
        return True
    try:
        return store.read(key) == data
    except FileNotFoundError:
        raise StoreError(
            f"{store.uri}: {key} could not be read back: another writer is creating or deleting it; try again"
        ) from None
