"""A store of objects below a prefix of a bucket, by the package obstore.

Environment variables such as AWS_REGION configure obstore.

Only this module imports the package, and only `open_store` imports this module, so folders do not need it.
"""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from rota.object_store.bucket_errors import explain_error, hide_credentials, is_missing_bucket
from rota.object_store.interface import ObjectInfo, StoreError
from rota.object_store.location import Location

REQUEST_SECONDS = 30.0  # for a whole request with its answer
CONNECT_SECONDS = 5.0
RETRIES = 3  # of a request that failed, where repeating it is safe
RETRY_SECONDS = 60.0  # no retry starts later than this after the first attempt
PART_BYTES = 8 * 2**20  # of a large object; a smaller one is stored by a single request
CONCURRENT_PARTS = 4
_AZURE_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": _AZURE_ENDPOINTS,
    "abfs": _AZURE_ENDPOINTS,
}
_ADDRESS = re.compile(r"https?://[!-~]+", re.ASCII | re.IGNORECASE)


class BucketStore:
    """Objects below a prefix of a bucket in S3, Google Cloud Storage or Azure."""

    def __init__(self, location: Location, *, request_seconds: float = REQUEST_SECONDS, retries: int = RETRIES) -> None:
        """Prepare the store without a request. Raise ValueError if the environment's variables cannot be used."""
        self.uri = location.uri
        self._scheme = location.scheme
        self._check_endpoint()
        try:
            self._store = from_url(
                f"{location.uri}/",
                client_options={
                    "allow_http": _is_http_allowed(),
                    "timeout": timedelta(seconds=request_seconds),
                    "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, request_seconds)),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=RETRY_SECONDS),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=5),
                        "base": 2,
                    },
                },
            )
        except (BaseError, ValueError) as error:
            raise ValueError(f"{self.uri} cannot be used: {explain_error(error, self._scheme)}") from error

    def _check_endpoint(self) -> None:
        endpoints: list[str] = []
        for name in _ENDPOINT_VARIABLES[self._scheme]:
            endpoint = os.environ.get(name)
            if endpoint is None:
                continue
            if not _is_address(endpoint):  # obstore would panic, with an exception that no caller expects
                raise ValueError(
                    f"{self.uri} cannot be used: {name} is not a valid address; write it as https://HOST:PORT, or "
                    "unset it"
                )
            endpoints.append(endpoint)
        # The first variable that is set counts.
        if self._scheme == "s3" and endpoints and endpoints[0].startswith("http://") and not _is_http_allowed():
            shown = hide_credentials(endpoints[0])
            raise ValueError(
                f"{self.uri} cannot be used: {shown} is not encrypted; set AWS_ALLOW_HTTP=true to allow that"
            )

    def list_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below the folder `prefix`."""
        with self._store_errors(f"{prefix or 'the bucket'} cannot be listed"):
            for chunk in obstore.list(self._store, prefix.strip("/") or None):
                for entry in chunk:
                    modified = entry["last_modified"]
                    etag = entry["e_tag"] or modified.isoformat()
                    yield ObjectInfo(entry["path"], entry["size"], etag, modified)

    def read(self, key: str) -> bytes:
        """Return an object's content; raise FileNotFoundError if there is none."""
        with self._store_errors(f"{key} cannot be read"):
            return bytes(obstore.get(self._store, key).bytes())

    def create(self, key: str, data: bytes) -> bool:
        """Store an object as a whole, by one conditional request; return False if the key exists."""
        with self._store_errors(f"{key} cannot be written"):
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def open_writer(self, key: str) -> BinaryIO:
        """Open an object that is uploaded in parts and stored when the writer is closed."""
        store_errors = partial(self._store_errors, f"{key} cannot be written")
        with store_errors():
            upload = obstore.open_writer(self._store, key, buffer_size=PART_BYTES, max_concurrency=CONCURRENT_PARTS)
        return cast("BinaryIO", BucketWriter(upload, store_errors))

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        with self._store_errors(f"{key} cannot be deleted"):
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise

    @contextmanager
    def _store_errors(self, failure: str) -> Iterator[None]:
        """Raise StoreError for errors of obstore, but FileNotFoundError for a missing object."""
        try:
            yield
        except FileNotFoundError as error:
            if not is_missing_bucket(error):
                raise FileNotFoundError(f"{self.uri}: {failure}: there is no such object") from None
            raise StoreError(f"{self.uri}: {failure}: {explain_error(error, self._scheme)}") from error
        except (BaseError, ValueError, OSError, NotImplementedError) as error:
            raise StoreError(f"{self.uri}: {failure}: {explain_error(error, self._scheme)}") from error


class BucketWriter(io.RawIOBase):
    """Uploads an object, which is stored only if the writer is closed."""

    def __init__(self, upload: Any, store_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._upload = upload
        self._store_errors = store_errors
        self._size_bytes = 0

    def __del__(self) -> None:
        """Abort the upload after an error of the caller: `RawIOBase.__del__` would close it, and so store a part.

        obstore aborts an upload whose context ends with an exception.
        """
        if not self.closed:
            with suppress(BaseError, OSError):
                self._upload.__exit__(StoreError, None, None)

    def writable(self) -> bool:
        """Return True: the writer accepts content."""
        return True

    def write(self, content: Any) -> int:
        """Upload content as soon as it fills a part."""
        with self._store_errors():
            self._upload.write(content)
        size_bytes = memoryview(content).nbytes
        self._size_bytes += size_bytes
        return size_bytes

    def tell(self) -> int:
        """Return the number of written bytes."""
        return self._size_bytes

    def close(self) -> None:
        """Store the object."""
        if not self.closed:
            super().close()
            with self._store_errors():
                self._upload.close()


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(_ADDRESS.fullmatch(text) and parts.hostname and parts.port != 0)
    except ValueError:  # such as port 99999
        return False


def _is_http_allowed() -> bool:
    variables = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
    return any(os.environ.get(name, "").lower() in {"1", "true", "yes"} for name in variables)
