"""The jars by which Spark reads and writes S3: named with their digests in s3_jars.txt, fetched from Maven Central.

This module imports nothing of Rota, and is also a program: `s3_jars.py FOLDER`. With it, the image of the pipeline
gets a layer of jars below that of Rota, which changes more often.
"""

import hashlib
import os
import secrets
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple
from urllib.request import urlopen

LIST = Path(__file__).with_name("s3_jars.txt")
MAVEN_CENTRAL = "https://repo1.maven.org/maven2"
MIRROR_VARIABLE = "ROTA_MAVEN_URL"
FOLDER_VARIABLE = "ROTA_SPARK_JARS"
MODULE = "hadoop-aws"  # Hadoop's module for S3; the other jars are its dependencies
_REQUEST_SECONDS = 60.0
_CONNECTIONS = 4


class Jar(NamedTuple):
    """A jar by its coordinates in a Maven repository."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.artifact}-{self.version}.jar"

    @property
    def path(self) -> str:
        """Path in a Maven repository."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.name}"


def read_list(text: str | None = None) -> list[Jar]:
    """Return the jars of a list, by default of s3_jars.txt."""
    jars: list[Jar] = []
    for line in (LIST.read_text() if text is None else text).splitlines():
        if line and not line.startswith("#"):
            coordinates, digest = line.split()
            group, artifact, version = coordinates.split(":")
            jars.append(Jar(group, artifact, version, digest))
    return jars


def hadoop_version() -> str:
    """Return the version of Hadoop that the jars belong to."""
    return next(jar.version for jar in read_list() if jar.artifact == MODULE)


def default_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder in which a session looks for the jars, and into which it fetches them."""
    if configured := environ.get(FOLDER_VARIABLE):
        return Path(configured)
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "rota", f"s3-jars-{hadoop_version()}")


def find_missing(folder: Path) -> list[Jar]:
    """Return the jars that a folder lacks; raise ValueError if one of its jars has another digest."""
    missing: list[Jar] = []
    for jar in read_list():
        path = folder / jar.name
        try:
            problem = find_difference(jar, path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            missing.append(jar)
            continue
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        if problem:
            raise ValueError(f"{path} {problem}; delete it, and it is fetched again")
    return missing


def find_difference(jar: Jar, content: bytes) -> str | None:
    """Return how the digest of a jar's content differs from that of the list; None if it is the same."""
    digest = hashlib.sha256(content).hexdigest()
    if digest == jar.sha256:
        return None
    return f"is not the jar that Rota names: its SHA-256 is {digest} instead of {jar.sha256}"


def fetch_jars(folder: Path, repository: str = "") -> int:
    """Fetch the jars that a folder lacks, and return their number. Only jars with the right digest get into the folder.

    The repository is by default that of the variable ROTA_MAVEN_URL, else Maven Central. Raise ValueError if it does
    not answer, lacks a jar, or has a jar with another digest.
    """
    missing = find_missing(folder)
    source = (repository or os.environ.get(MIRROR_VARIABLE) or MAVEN_CENTRAL).rstrip("/")
    if not source.startswith(("https://", "http://", "file://")):
        raise ValueError(f"{source} is no address of a Maven repository; it begins with https://")
    if missing:
        _create_folder(folder)
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for _ in pool.map(lambda jar: _fetch(jar, source, folder), missing):
                pass
    return len(missing)


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # fails if the folder is read-only
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}; name another folder") from error


def _fetch(jar: Jar, source: str, folder: Path) -> None:
    url = f"{source}/{jar.path}"
    try:
        with urlopen(url, timeout=_REQUEST_SECONDS) as answer:  # noqa: S310 - https:// by default, or the user's choice
            content: bytes = answer.read()
    except OSError as error:  # also HTTPError
        remedy = f"set {MIRROR_VARIABLE} to a mirror, or {FOLDER_VARIABLE} to a folder that has the jars"
        raise ValueError(f"{url} cannot be fetched: {getattr(error, 'reason', error)}; {remedy}") from error
    if problem := find_difference(jar, content):
        raise ValueError(f"{url} {problem}; set {MIRROR_VARIABLE} to another repository")
    draft = folder / f".{jar.name}.{secrets.token_hex(4)}"
    try:
        draft.write_bytes(content)
        draft.rename(folder / jar.name)  # atomic: the jar is never partial, even if two processes fetch it
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise ValueError(f"{folder / jar.name} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    try:
        fetch_jars(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
