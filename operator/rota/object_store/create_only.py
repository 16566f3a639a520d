"""Checks that a store never overwrites an object: some servers with S3's interface ignore If-None-Match."""

from rota.object_store.interface import ObjectStore, StoreError
from rota.object_store.location import FOLDER_SCHEME, parse_location


def check_create_only(store: ObjectStore, key: str) -> None:
    """Create the same empty object twice; raise StoreError if a bucket accepts the second one, too.

    The object is kept: a later check then needs only one request, since the first create is refused. A folder needs no
    check: its store creates files by hard links, which never replace a file.
    """
    if parse_location(store.uri).scheme == FOLDER_SCHEME:
        return
    # True: the object was created; False: the key exists.
    if store.create(key, b"") and store.create(key, b""):
        raise StoreError(
            f"{store.uri} overwrites existing objects: its server ignores the header If-None-Match, so commands could "
            "overwrite each other's results; use a server that supports conditional writes"
        )
