"""Parses the place of a store: a folder's path, or a URI such as s3://bucket/prefix."""

import re
from typing import NamedTuple

from rota.model import single_line

FOLDER_SCHEME = "file"
_SCHEMES = {  # schemes that users, obstore and deltalake write, and our name of each
    "file": "file",
    "s3": "s3",
    "s3a": "s3",  # as Spark names it
    "gs": "gs",
    "az": "az",
    "abfs": "abfs",
    "abfss": "abfs",
}
_FORMS = "use s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX, or a folder"
# The scheme, the slashes if there are any, and the rest.
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?(.*)", re.DOTALL)
# The address of a bucket in a cloud, written without a scheme.
_BUCKET_HOST = re.compile(
    r"[^/]*\b(amazonaws\.com|storage\.googleapis\.com|(blob|dfs)\.core\.windows\.net)(:\d+)?(/.*)?", re.DOTALL
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # in Python's text for a byte that is not UTF-8
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=/-]*", re.ASCII)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_CONTAINER = re.compile(r"[a-z0-9$-]+(@[A-Za-z0-9.-]+)?", re.ASCII)


class Location(NamedTuple):
    """The root of a store."""

    scheme: str  # file, s3, gs, az or abfs
    container: str  # the bucket or container, for abfs with its account; empty for a folder
    path: str  # the folder, or the prefix in the bucket without slashes at its ends

    @property
    def uri(self) -> str:
        """The root as a URI, or the path of a folder."""
        if self.scheme == FOLDER_SCHEME:
            return self.path
        return f"{self.scheme}://{self.container}/{self.path}".rstrip("/")


def parse_location(text: str) -> Location:
    """Parse a path or URI; raise ValueError with a sentence for users if it is neither."""
    shown = repr(single_line(text, 200))
    if not text or "\0" in text:
        raise ValueError(f"{shown} is neither a folder nor a URI; {_FORMS}")
    if _SURROGATE.search(text):
        raise ValueError(f"{shown} is not UTF-8 text; rename the folder, or use another one")
    if text.startswith((":", "//")) or _BUCKET_HOST.fullmatch(text):
        raise ValueError(f"{shown} has no scheme; {_FORMS}, which may begin with ./")
    match = _URI.fullmatch(text)
    if not match or (match[2] is None and match[1].lower() not in _SCHEMES):
        return Location(FOLDER_SCHEME, "", text)  # a path may contain a colon
    scheme = _SCHEMES.get(match[1].lower())
    if scheme is None:
        raise ValueError(f"{shown} has the unknown scheme {match[1]}; {_FORMS}")
    if match[2] is None:
        raise ValueError(f"{shown} lacks // after its scheme; {_FORMS}")
    return _parse_folder(shown, match[3]) if scheme == FOLDER_SCHEME else _parse_bucket(shown, scheme, match[3])


def _parse_folder(shown: str, host_and_path: str) -> Location:
    path = host_and_path.removeprefix("localhost")
    if not path.startswith("/"):
        raise ValueError(f"{shown} names no absolute folder; write file:///FOLDER with three slashes, or its path")
    return Location(FOLDER_SCHEME, "", path)


def _parse_bucket(shown: str, scheme: str, path: str) -> Location:
    container, _, prefix = path.partition("/")
    if "@" in container and scheme != "abfs":
        raise ValueError(f"{shown} contains @; credentials do not belong into a URI, but into environment variables")
    if not container:
        raise ValueError(f"{shown} names no bucket; {_FORMS}")
    if not (_CONTAINER if scheme in {"az", "abfs"} else _BUCKET).fullmatch(container):
        raise ValueError(f"{shown} has no valid bucket name; {_FORMS}")
    parts = list(filter(None, prefix.split("/")))
    if not _PREFIX.fullmatch(prefix) or "." in parts or ".." in parts:
        raise ValueError(f"{shown} has no usable prefix; use letters, digits and the characters - _ . = ! * ' ( )")
    return Location(scheme, container, "/".join(parts))
