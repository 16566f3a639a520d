"""Checks of the folders that the pipeline's commands write: files of other programs are never replaced.

All checks run before Spark starts, so that a mistyped path is reported at once.
"""

import os
from pathlib import Path
from tempfile import TemporaryFile

from rota.object_store import FOLDER_SCHEME, LOST_FOUND, parse_location
from rota.pipeline.common.names import MANIFEST_PREFIX

# The files that `recommend` replaces, and the text with which such files start.
REPLACED_FILES = {"policies/*.yaml": MANIFEST_PREFIX, "report.html": "<!doctype html>"}
LAKE_NAMES = {"journal", "lake", "marts", "_rota", LOST_FOUND}  # entries of a lake's root


def check_report_folder(to: str, lake: str) -> None:
    """Raise ValueError if a folder for reports cannot be written, or would mix up or overwrite files."""
    if not to.strip():
        raise ValueError("--to is empty; name a folder")
    if "://" in to:
        raise ValueError(f"--to {to} is a URI, but the report and the manifests are files; name a folder")
    folder = Path(to).absolute()
    for place in (folder, folder / "policies"):
        check_writable("--to", place, to)
    location = parse_location(lake)
    if location.scheme == FOLDER_SCHEME and folder.resolve().is_relative_to(Path(location.path).resolve()):
        raise ValueError(f"--to {to} is inside the lake {Path(location.path).absolute()}; name a folder elsewhere")
    for pattern, prefix in REPLACED_FILES.items():
        for path in folder.glob(pattern):
            with path.open("r+b") as file:  # fails also if the file cannot be written
                if file.read(len(prefix)) != prefix.encode():
                    raise ValueError(f"{path} would be replaced, but is not a file of this command; name another --to")


def check_own_folder(folder: Path) -> None:
    """Raise ValueError if a folder has other files and no snapshots, since a lake needs a folder of its own."""
    if (folder / "_rota").is_dir() or not folder.is_dir():
        return
    for name in sorted(path.name for path in folder.iterdir()):
        if name not in LAKE_NAMES and not name.startswith("."):
            raise ValueError(f"{folder} is not a lake, and contains other files: {name}; name a folder of its own")


def check_writable(option: str, folder: Path, shown: str) -> None:
    """Raise ValueError if a folder cannot be created, or nothing can be written to it."""
    absolute = folder.absolute()
    parent = next(filter(os.path.lexists, (absolute, *absolute.parents)))
    if not parent.is_dir():
        raise ValueError(f"{option} {shown} cannot be a folder, because {parent} is a file; name another")
    try:
        # Try it, because permissions do not show everything: root has all permissions, but cannot write in /proc.
        with TemporaryFile(dir=parent, prefix=".rota-"):
            pass
    except OSError as error:
        problem = f"nothing can be created in {parent} ({error.strerror})"
        raise ValueError(f"{option} {shown} cannot be written: {problem}; name another folder") from None
