"""What every part of a release check stands on: sources at two places, programs run, archives that repeat."""

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


class Failed(Exception):  # noqa: N818 - it is what happened
    """A check has failed; the text says what is wrong."""


class LeftOut(Exception):  # noqa: N818 - it is what happened
    """A check cannot be made on this machine; the text says why."""


class InvalidSpecError(Exception):
    """The user asked for what cannot be."""


@dataclass(frozen=True)
class Work:
    """A release in the making."""

    copies: tuple[Path, Path]  # of the sources; other places, times and modes, none of which may show
    into: Path
    version: str
    epoch: int  # of the commit: the time of all that is made
    last: str  # the tag of the release before, or nothing

    @property
    def source(self) -> Path:
        """The sources that are looked at."""
        return self.copies[0]

    def run(self, *argv: str | Path, cwd: Path | None = None, **env: str) -> str:
        """Run a program to its end and return what it printed."""
        return run(*argv, cwd=cwd or self.source, SOURCE_DATE_EPOCH=str(self.epoch), **env)

    def uv(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        """Run uv with the Python that runs this, and no other."""
        return self.run(uv(), *arguments, cwd=cwd, UV_PYTHON_DOWNLOADS="never", UV_PYTHON=sys.executable)

    def before(self, path: str) -> str:
        """Return a file of the release before; nothing if it was not there."""
        return git("show", f"{self.last}:{path}") if path in self.files_before(path) else ""

    def files_before(self, path: str) -> list[str]:
        """Return the files of the release before, in a folder or of that name."""
        return git("ls-tree", "-r", "--name-only", self.last, "--", path).split()


def run(*argv: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run a program to its end and return what it printed."""
    kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    ended = subprocess.run(argv, cwd=cwd, env={**kept, **env}, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        told = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-3:]
        command = " ".join([Path(argv[0]).name, *map(str, argv[1:3])])
        raise Failed(f"`{command}` ended with {ended.returncode}: {' / '.join(told) or 'it said nothing'}")
    return ended.stdout


def git(*arguments: str) -> str:
    """Ask the checkout."""
    return run("git", *arguments)


def uv() -> str:
    """Return the uv of this environment, or that on PATH."""
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if not found:
        raise InvalidSpecError("uv is not there; `make release-check` brings it")
    return found


def begun(scratch: Path) -> tuple[Work, str]:
    """Copy the sources twice; return the work, and a sentence on what it is made of."""
    try:
        changed = git("status", "--porcelain", "--untracked-files=all").strip().splitlines()
        epoch, commit = git("log", "-1", "--format=%ct %h").split()
    except (Failed, FileNotFoundError):
        raise InvalidSpecError(f"{ROOT} is no checkout of Git with a commit; a release is made from one") from None
    copies = scratch / "one", scratch / "another" / "place"
    copies[0].mkdir()
    _copy_changed(copies[0]) if changed else _copy_commit(copies[0])
    shutil.copytree(*copies, symlinks=True)
    for path in (copies[1], *copies[1].rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o020)
            os.utime(path, (0x20000000, 0x20000000))
    into = scratch / "made"
    into.mkdir()
    version = str(tomllib.loads((copies[0] / "pyproject.toml").read_text())["project"]["version"])
    told = f"commit {commit}"
    if changed:
        told = f"the working tree, which differs from {told} in {len(changed)} files: this is no release"
    return Work(copies, into, version, int(epoch), newest(git("tag", "--merged", "HEAD"), version)), told


def newest(tags: str, version: str) -> str:
    """Return the newest tag of a release that is older than a version, or nothing."""
    found = {_number(tag): tag for tag in tags.split() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)}
    older = [number for number in found if number < _number(version)]
    return found[max(older)] if older else ""


def repack(archive: Path, into: Path, epoch: int) -> None:
    """Write a tar archive, packed or not, as one that is always the same: files by name, one owner, one time."""
    with (
        tarfile.open(archive) as theirs,
        into.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as ours,
    ):
        for member in sorted(theirs.getmembers(), key=lambda it: it.name):
            plain = tarfile.TarInfo(member.name)
            plain.size, plain.mtime, plain.type, plain.linkname = member.size, epoch, member.type, member.linkname
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            ours.addfile(plain, theirs.extractfile(member) if member.isfile() else None)


def sha256(path: Path) -> str:
    """Return a file's digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(it) for it in re.findall(r"\d+", version)[:3])


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
