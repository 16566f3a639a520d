"""Shared by all checks of a release: two copies of the sources, running programs, reproducible archives."""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


class CheckFailedError(Exception):
    """A check has failed; the text describes the failure."""


class SkippedError(Exception):
    """A check cannot run on this machine; the text gives the reason."""


class UsageError(Exception):
    """The user's request cannot be fulfilled, because of an option or the state of the machine."""


@dataclass(frozen=True)
class Work:
    """A release in the making."""

    copies: tuple[Path, Path]  # of the sources; with different paths, times and modes, which must not affect the result
    into: Path
    version: str
    epoch: int  # of the commit: the time of all files of the release
    last: str  # the tag of the previous release, or empty

    @property
    def source(self) -> Path:
        """The first copy, which the checks read."""
        return self.copies[0]

    def run(self, *argv: str | Path, cwd: Path | None = None, **env: str) -> str:
        """Run a program and return its output."""
        return run(*argv, cwd=cwd or self.source, SOURCE_DATE_EPOCH=str(self.epoch), **env)

    def uv(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        """Run uv with the Python of this process only."""
        return self.run(uv(), *arguments, cwd=cwd, UV_PYTHON_DOWNLOADS="never", UV_PYTHON=sys.executable)

    def read_previous(self, path: str) -> str:
        """Return a file of the previous release, or an empty text if it did not exist."""
        return git("show", f"{self.last}:{path}") if path in self.previous_files(path) else ""

    def previous_files(self, path: str) -> list[str]:
        """Return the files of the previous release in a folder, or the file of that name."""
        return git("ls-tree", "-r", "--name-only", self.last, "--", path).split()


def run(*argv: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run a program and return its output; raise CheckFailedError if its exit code is not 0."""
    inherited = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    process = subprocess.run(argv, cwd=cwd, env={**inherited, **env}, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        last_lines = (process.stderr.strip() or process.stdout.strip()).splitlines()[-3:]
        command = " ".join([Path(argv[0]).name, *map(str, argv[1:3])])
        raise CheckFailedError(
            f"`{command}` ended with {process.returncode}: {' / '.join(last_lines) or 'it said nothing'}"
        )
    return process.stdout


def git(*arguments: str) -> str:
    """Run git in the checkout."""
    return run("git", *arguments)


def uv() -> str:
    """Return the uv of this environment, or the one on PATH."""
    path = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if not path:
        raise UsageError("uv is not there; `make release-check` brings it")
    return path


def prepare(scratch: Path) -> tuple[Work, str]:
    """Copy the sources twice; return the work, and a description of the sources."""
    try:
        changed = git("status", "--porcelain", "--untracked-files=all").strip().splitlines()
        epoch, commit = git("log", "-1", "--format=%ct %h").split()
    except (CheckFailedError, FileNotFoundError):
        raise UsageError(f"{ROOT} is no checkout of Git with a commit; a release is made from one") from None
    copies = scratch / "one", scratch / "another" / "place"
    copies[0].mkdir()
    if changed:
        _copy_changed(copies[0])
    else:
        _copy_commit(copies[0])
    shutil.copytree(*copies, symlinks=True)
    for path in (copies[1], *copies[1].rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o020)
            os.utime(path, (0x20000000, 0x20000000))
    into = scratch / "made"
    into.mkdir()
    version = str(tomllib.loads((copies[0] / "pyproject.toml").read_text())["project"]["version"])
    origin = f"commit {commit}"
    if changed:
        origin = f"the working tree, which differs from {origin} in {len(changed)} files: this is no release"
    return Work(copies, into, version, int(epoch), newest(git("tag", "--merged", "HEAD"), version)), origin


def newest(tags: str, version: str) -> str:
    """Return the newest tag of a release that is older than a version, or an empty text."""
    tags_by_number = {_number(tag): tag for tag in tags.split() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)}
    older = [number for number in tags_by_number if number < _number(version)]
    return tags_by_number[max(older)] if older else ""


def repack(archive: Path, into: Path, epoch: int) -> None:
    """Rewrite a tar archive, compressed or not, reproducibly: files sorted by name, with one owner and one time."""
    with (
        tarfile.open(archive) as source,
        into.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda entry: entry.name):
            plain = tarfile.TarInfo(member.name)
            plain.size = member.size
            plain.mtime = epoch
            plain.type = member.type
            plain.linkname = member.linkname
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            target.addfile(plain, source.extractfile(member) if member.isfile() else None)


def sha256(path: Path) -> str:
    """Return a file's SHA-256 digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _copy_commit(copy: Path) -> None:
    archive = copy.with_suffix(".tar")
    git("archive", "--format=tar", f"--output={archive}", "HEAD")
    shutil.unpack_archive(archive, copy, "tar", filter="tar")
    archive.unlink()


def _copy_changed(copy: Path) -> None:
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").strip("\0").split("\0"):
        if os.path.lexists(ROOT / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
