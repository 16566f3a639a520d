"""Files that outlive a run: programs built from source, jars, images.

An entry is a folder named after its content and a hash of its recipe. It is built in a folder of another name, under a
lock, and renamed when complete: a half-built entry is never seen, and two grounds build it once.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ground.report import Missing, say

_PR_SET_PDEATHSIG = 1


def folder() -> Path:
    """Return the folder whose files outlive a run."""
    configured = os.environ.get("ROTA_GROUND_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(configured) if configured else Path(home) / "rota-ground"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Missing(
            f"The cache folder {path} cannot be made ({error.strerror}); set ROTA_GROUND_CACHE to one that can"
        ) from None
    return path


@contextmanager
def locked(path: Path, *, waiting_for: str = "") -> Iterator[None]:
    """Hold a file lock; the kernel releases it with the process, so a crash needs no clean-up."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting_for:
                say(f"waiting for another ground that makes {waiting_for}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digests(root: Path, names: Iterable[str]) -> list[str]:
    """Return name and SHA-256 of each of these files, and of each file in these folders, for a recipe."""
    lines = []
    for path in (root / name for name in names):
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        inputs = [file for file in files if "__pycache__" not in file.parts]
        lines += [f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in inputs]
    return lines


def entry_path(name: str, recipe: str) -> Path:
    """Return the path of the entry of that recipe, existing or not."""
    return folder() / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def entry(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """Return the folder that `build` fills from `recipe` (a text that changes whenever the result must)."""
    target = entry_path(name, recipe)
    if target.exists():
        return target
    with locked(folder() / f"{name}.lock", waiting_for=name):
        if not target.exists():
            _make(name, target, build)
    return target


def remove_least_recent(used_entry: Path, max_entries: int) -> None:
    """Mark an entry as used now; of all entries of its name remove the least recently used above a number."""
    os.utime(used_entry)
    name = used_entry.name.rpartition("-")[0]
    with locked(folder() / f"{name}.lock"):
        entries = [path for path in folder().glob(f"{name}-{'[0-9a-f]' * 12}") if path.is_dir()]
        for entry_folder in sorted(entries, key=lambda path: path.stat().st_mtime)[:-max_entries]:
            remove(entry_folder)


def _make(name: str, target: Path, build: Callable[[Path], None]) -> None:
    for leftover in folder().glob(f"{name}-{'[0-9a-f]' * 12}.making"):  # of a build that was killed: we hold its lock
        remove(leftover)
    making = target.with_name(f"{target.name}.making")
    try:
        making.mkdir()
        build(making)
        making.rename(target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Missing(_full()) from None
        raise
    finally:
        remove(making)


def need_room(gibibytes: float, place: Path | None = None) -> None:
    """Raise before a build that would fill a disk: the disk of the cache, or of `place`, which may not exist yet."""
    place = place or folder()
    existing = next(path for path in (place, *place.parents) if path.exists())
    if shutil.disk_usage(existing).free < gibibytes * 2**30:
        raise Missing(
            f"Building needs {gibibytes:g} GiB on the disk of {place}; free some, or set its variable elsewhere"
        )


def _full() -> str:
    places = f"{folder()} (ROTA_GROUND_CACHE), Go's own caches or {tempfile.gettempdir()}"
    return f"No room left on a disk; free some where one of these lies: {places}"


def remove(path: Path) -> None:
    """Remove a folder, its read-only parts included (Go makes its module cache read-only)."""

    def retry(function: Callable[[str], object], broken: str, _: object) -> None:
        Path(broken).parent.chmod(0o755)
        function(broken)

    if path.exists():
        shutil.rmtree(path, onerror=retry)


def run(
    argv: Sequence[str | Path],
    what: str,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 1800,
) -> str:
    """Run one step of a build and return its output; its first process never outlives us."""
    logs = folder() / "log"
    logs.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{Path(argv[0]).name}-", suffix=".log", dir=logs)
    log = Path(name)
    with (
        os.fdopen(handle, "w") as errors,
        subprocess.Popen(
            argv,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no locks
        ) as step,
    ):
        try:
            printed, _ = step.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise Missing(f"{what} did not end within {timeout:.0f} s; see {log}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(step.pid, signal.SIGKILL)
    if step.returncode != 0:
        raise Missing(_failure(what, log, printed))
    log.unlink()
    return printed


def _failure(what: str, log: Path, printed: str) -> str:
    errors = log.read_text(errors="replace")
    with log.open("a") as file:
        file.write(printed)
    if "no space left on device" in errors.lower():
        return _full()
    last = next(
        (line.strip() for line in reversed((errors or printed).splitlines()) if line.strip()), "it printed nothing"
    )
    return f"{what} failed: {last[:300]} (all of it: {log})"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
