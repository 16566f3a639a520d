"""Stores of immutable objects: a folder, or a bucket of S3, Google Cloud Storage or Azure.

The journal's segments, the plans of ingest runs and the snapshots of a lake are such objects: nothing ever changes one.

`create_same` creates an object, or checks that it exists with the same content. `LOST_FOUND` is the name of a folder
that a file system has at its root.
"""

from pathlib import Path

from rota.object_store.create_only import check_create_only
from rota.object_store.folder import LOST_FOUND, FolderStore
from rota.object_store.interface import NotAnObjectError, ObjectInfo, ObjectStore, StoreError, create_same
from rota.object_store.location import FOLDER_SCHEME, Location, parse_location

__all__ = [
    "FOLDER_SCHEME",
    "LOST_FOUND",
    "FolderStore",
    "Location",
    "NotAnObjectError",
    "ObjectInfo",
    "ObjectStore",
    "StoreError",
    "check_create_only",
    "create_same",
    "is_missing_folder",
    "open_store",
    "parse_location",
]


def is_missing_folder(uri: str) -> bool:
    """Return whether a path or URI is that of a folder which does not exist."""
    location = parse_location(uri)
    return location.scheme == FOLDER_SCHEME and not Path(location.path).is_dir()


def open_store(uri: str) -> ObjectStore:
    """Return the store at a path or URI, without a request to it; raise ValueError if it cannot be used."""
    location = parse_location(uri)
    if location.scheme == FOLDER_SCHEME:
        return FolderStore(Path(location.path))
    try:
        from rota.object_store.bucket import BucketStore  # noqa: PLC0415 - optional: only buckets need its package
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        hint = "pip install 'rota-operator[bucket]'"
        raise ValueError(f"{location.uri} needs the package obstore, which is not installed: {hint}") from None
    return BucketStore(location)
