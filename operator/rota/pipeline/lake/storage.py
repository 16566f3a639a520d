"""Adapts a lake's location to deltalake, pyarrow and Spark (URIs, options, file systems), and explains their errors."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pa_fs
from deltalake.fs import DeltaStorageHandler

from rota.object_store import FOLDER_SCHEME, StoreError, parse_location
from rota.object_store.bucket_errors import explain_error

_OPTION_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
REQUEST_OPTIONS = {  # options of deltalake
    "timeout": "60s",  # limit of a whole request; longer than for segments, because Parquet files are larger
    "connect_timeout": "5s",
    "max_retries": "3",
    "retry_timeout": "120s",
}
_FRAME = re.compile(r"\x1b\[\d+m|↳")  # deltalake prints each cause in a line of its own, below an arrow
# deltalake's words for a cause → obstore's words, which `explain_error` expects
_CAUSES = {"operation timed out": "kind: Timeout", "client error (Connect)": "kind: Connect"}
_STORE_ERROR = re.compile(r"Generic \w+ error|Error performing|Object at location|HTTP error|client error")
_GLOB_CHARACTERS = re.compile(r"[*?\[\]{}\\]")


def check_root(uri: str) -> None:
    """Raise ValueError if a folder's path contains an escape such as %20, which deltalake would decode."""
    if unquote(uri) != uri:
        raise ValueError(f"{uri} cannot be a lake: its path contains %, followed by two digits; use another folder")


def storage_options(uri: str) -> dict[str, str]:
    """Return deltalake's options for a URI: none for a folder, else the environment's variables of the clouds."""
    if parse_location(uri).scheme == FOLDER_SCHEME:
        return {}
    variables = {name: value for name, value in os.environ.items() if name.startswith(_OPTION_PREFIXES)}
    return REQUEST_OPTIONS | variables


def spark_uri(uri: str) -> str:
    """Return a URI as Spark needs it: Spark's scheme of S3 is s3a."""
    return uri.replace("s3://", "s3a://", 1) if uri.startswith("s3://") else uri


def spark_pattern(uri: str) -> str:
    """Return a URI with escaped special characters, since Spark's reader takes the URI for a pattern."""
    return _GLOB_CHARACTERS.sub(r"\\\g<0>", spark_uri(uri))


def native_filesystem(uri: str) -> pa_fs.FileSystem | None:
    """Return a folder as a file system of pyarrow's own; None for a bucket, which deltalake opens.

    deltalake's file system is avoided, because pyarrow's threads may still close its files while Python ends, and this
    aborts the process.
    """
    location = parse_location(uri)
    is_folder = location.scheme == FOLDER_SCHEME
    return pa_fs.SubTreeFileSystem(location.path, pa_fs.LocalFileSystem()) if is_folder else None


def open_filesystem(uri: str, sizes: dict[str, int]) -> pa_fs.FileSystem:
    """Return deltalake's file system for a prefix in a bucket (for folders, see `native_filesystem`).

    `sizes`: of files, by path. A file with a known size is opened without a request; a request would block all threads.
    """
    return pa_fs.PyFileSystem(DeltaStorageHandler(uri, storage_options(uri), sizes))


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turn errors of a folder or bucket, as deltalake words them, into StoreError, but re-raise FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        causes = str(error)
        for cause, obstore_cause in _CAUSES.items():
            causes = causes.replace(cause, obstore_cause)
        lines: list[str] = []
        for framed_line in causes.splitlines():
            line = _FRAME.sub("", framed_line).strip()
            if line:
                lines.append(line)
        reason = explain_error(OSError(": ".join(lines)), parse_location(uri).scheme)
        raise StoreError(f"{uri} cannot be read or written: {reason}") from error


def is_damage(error: Exception) -> bool:
    """Return whether an error of pyarrow is about the content of a Parquet file rather than about its store.

    For most damage pyarrow raises an OSError without a number; errors of buckets have none either.
    """
    if isinstance(error, OSError):
        is_of_store = isinstance(error, FileNotFoundError) or _STORE_ERROR.search(str(error))
        return error.errno is None and not is_of_store
    return isinstance(error, pa.ArrowInvalid | pa.ArrowTypeError | pa.ArrowNotImplementedError)
