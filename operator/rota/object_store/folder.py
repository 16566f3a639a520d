"""A folder as a store of objects: each object is a file. `create` names the file only when its content is complete."""

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from rota.object_store.interface import NotAnObjectError, ObjectInfo, StoreError, file_write_errors

LOST_FOUND = "lost+found"  # at the root of ext4, where only root may read it
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_WRITER_ATTEMPTS = 10  # attempts to create a folder and a file in it


class FolderStore:
    """Objects in a folder. Files and folders with a name that begins with a dot are not listed, nor is lost+found."""

    def __init__(self, folder: Path) -> None:
        self._root = folder.absolute()
        self.uri = str(self._root)

    def list_objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the regular files below the folder `prefix`."""
        top = self._path(prefix) if prefix.strip("/") else self._root
        for folder, folders, names in os.walk(top, onerror=self._raise_unreadable):
            is_root = folder == self.uri
            folders[:] = [name for name in folders if not name.startswith(".") and not (is_root and name == LOST_FOUND)]
            for name in names:
                if not name.startswith("."):
                    yield from self._describe(Path(folder, name))

    def _describe(self, path: Path) -> Iterator[ObjectInfo]:
        with suppress(FileNotFoundError):  # deleted since the folder was read
            attributes = path.lstat()
            if stat.S_ISREG(attributes.st_mode):
                etag = f"{attributes.st_mtime_ns:x}-{attributes.st_size:x}"
                modified = datetime.fromtimestamp(attributes.st_mtime, UTC)
                yield ObjectInfo(path.relative_to(self._root).as_posix(), attributes.st_size, etag, modified)

    def _raise_unreadable(self, error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise StoreError(f"{error.filename or self.uri} cannot be listed: {error.strerror}") from error

    def read(self, key: str) -> bytes:
        """Return a file's content. Refuse links, which may lead out of the folder, and pipes, which may block."""
        path = self._path(key)
        try:
            return _read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotAnObjectError(f"{path} cannot be read: it is a symbolic link") from error
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error

    def create(self, key: str, data: bytes) -> bool:
        """Store a file as a whole; return False if it exists."""
        path = self._path(key)
        draft = path.with_name(f".{secrets.token_hex(8)}.draft")  # a crash leaves the draft; listings ignore it
        try:
            _make_folder(path.parent)
            _write_durably(draft, data)
            try:
                os.link(draft, path)  # unlike a rename, this fails if the name exists
            except FileExistsError:
                return False
            finally:
                draft.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise StoreError(f"{path} cannot be written: {_write_reason(error)}") from error
        return True

    def open_writer(self, key: str) -> BinaryIO:
        """Open a new file under its final name: readers open only files that a commit names."""
        path = self._path(key)
        for _ in range(_WRITER_ATTEMPTS):
            try:
                _make_folder(path.parent)
                return _FolderWriter(path)
            except FileNotFoundError:  # a maintenance has just removed the empty folder
                continue
            except OSError as error:
                raise StoreError(f"{path} cannot be written: {error.strerror}") from error
        raise StoreError(f"{path} cannot be written: its folder cannot be created, or is removed again and again")

    def delete(self, key: str) -> None:
        """Remove a file; its folder stays."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:  # a folder in the key is a file: the key does not exist
            pass
        except OSError as error:
            raise StoreError(f"{path} cannot be deleted: {error.strerror}") from error

    def _path(self, key: str) -> Path:
        parts = key.strip("/").split("/")
        if "\0" in key or not all(part not in {"", ".", ".."} for part in parts):
            raise StoreError(f"{self.uri}: {key!r} is not a valid key")
        return self._root.joinpath(*parts)


class _FolderWriter(io.BufferedWriter):
    """A new file, which survives a power failure once it is closed. Errors are StoreErrors that name the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self._path = path

    def write(self, content: Any) -> int:
        """Write content, at the latest when the file is closed."""
        with file_write_errors(self._path):
            return super().write(content)

    def close(self) -> None:
        """Complete the file."""
        if self.closed:
            return
        with file_write_errors(self._path):
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()
            _sync_folder(self._path.parent)


def _read_regular(path: Path) -> bytes:
    descriptor = os.open(path, _READ_FLAGS)
    is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if not is_regular:
        os.close(descriptor)  # `os.fdopen` refuses a folder, and would not close the descriptor
        raise NotAnObjectError(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, unless they exist; their names survive a power failure."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a new name survive a power failure, if the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_reason(error: OSError) -> str:
    if error.errno in _NO_HARD_LINKS and error.filename2:  # only errors of `os.link` have a second file name
        return "its file system has no hard links, without which two writers could overwrite each other; use a bucket"
    return error.strerror or str(error)
