"""An instance of the ground: its folder, its block of loopback addresses, its processes.

Every process is started with the instance's id in its environment. Children inherit it, so `/proc/*/environ` always
identifies the instance's processes: no list is stored that could be wrong.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ground import cache
from ground.report import Missing, say, undisturbed

TAG = "ROTA_GROUND"
FIRST_BLOCK, LAST_BLOCK = 16, 250
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


def home() -> Path:
    """Return the folder of all instances: a short path, because unix sockets are limited to 107 characters."""
    configured = os.environ.get("ROTA_GROUND_HOME")
    path = Path(configured) if configured else Path(tempfile.gettempdir()) / f"rota-ground-{os.getuid()}"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_uid != os.getuid():  # admins' keys are stored in it
        raise Missing(f"The folder {path} belongs to somebody else; set ROTA_GROUND_HOME to one of your own")
    return path


@dataclass(frozen=True)
class Process:
    """A running process of an instance."""

    pid: int
    program: str
    log: Path
    began: int = 0  # by the kernel's clock: a pid may be reused

    @property
    def alive(self) -> bool:
        """Whether the process still runs, or still holds files and addresses."""
        return _runs(self.pid) and self.began in {0, _age(self.pid)}

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)


class Instance:
    """An instance of the ground; create one with `Instance.open`."""

    def __init__(self, folder: Path) -> None:
        """Load an instance that exists; `open` creates one."""
        stored = json.loads((folder / "instance.json").read_text())
        self.folder = folder
        self.name = folder.name
        self.id: str = stored["id"]
        self.block: str = stored["block"]
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}  # the newest of each name

    @classmethod
    def open(cls, name: str) -> "Instance":
        """Create the instance of that name, or return the existing one."""
        with cache.locked(home() / "blocks.lock"):
            return cls.find(checked(name)) or cls._make(home() / name)

    @classmethod
    def _make(cls, folder: Path) -> "Instance":
        cache.need_room(0.5, home())
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / ".instance.json"  # renamed when complete: a partly written instance is never seen
        fresh.write_text(json.dumps({"id": secrets.token_hex(8), "block": _free_block()}))
        fresh.rename(folder / "instance.json")
        return cls(folder)

    @classmethod
    def find(cls, name: str) -> "Instance | None":
        """Return the instance of that name, or None."""
        return next((instance for instance in standing() if instance.name == name), None)

    def address(self, last: int = 1) -> str:
        """Return one of the instance's addresses for servers; local pods have those with higher third numbers."""
        return f"{self.block}.0.{last}"

    def port(self, what: str, preferred: int, address: str | None = None) -> int:
        """Return a port for `what`, the same one in each call: the preferred one where it is free, else any."""
        book = self.folder / "ports.json"
        host = address or self.address()
        with cache.locked(self.folder / "ports.lock"):
            assigned: dict[str, tuple[str, int]] = json.loads(book.read_text()) if book.exists() else {}
            if what not in assigned:
                promised = {port for address_of_port, port in assigned.values() if address_of_port == host}
                assigned[what] = (host, _free_port(host, preferred, promised))
                self.write("ports.json", json.dumps(assigned))
        return assigned[what][1]

    def note(self, what: str, default: str) -> str:
        """Return the text noted under this name; the first call notes its default."""
        path = self.folder / "notes" / what
        if not path.exists() and default:
            self.write(f"notes/{what}", default)
        return path.read_text() if path.exists() else default

    def write(self, relative: str, text: str) -> Path:
        """Write a file of the instance whole, and only if it changes: kube-proxy exits when its file is rewritten."""
        path = self.folder / relative
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f".{path.name}.fresh")
            fresh.write_text(text)
            fresh.rename(path)
        return path

    def start(
        self,
        program: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start a process that outlives us, or return the running one of this name."""
        running = self.process(program)
        if running:
            return running
        log = self.log(program)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            child = subprocess.Popen(
                argv,
                cwd=cwd or self.folder,
                env={**os.environ, **(env or {}), TAG: f"{self.id}/{program}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._children[child.pid] = self._started[program] = child
        # Popen returns before the program is loaded, and until then the process has no environment to identify it.
        while child.poll() is None and not _environment(child.pid):
            time.sleep(0.001)
        return Process(child.pid, program, log, _age(child.pid))

    def log(self, program: str) -> Path:
        """Return the path of a program's log."""
        return self.folder / "log" / f"{program}.log"

    def processes(self) -> list[Process]:
        """Return every process of this instance, the oldest first, children of children included."""
        self._reap()
        prefix = f"{self.id}/"
        tagged = [(began, pid, tag.removeprefix(prefix)) for began, pid, tag in _tagged() if tag.startswith(prefix)]
        return [Process(pid, program, self.log(program), began) for began, pid, program in tagged]

    def process(self, program: str) -> Process | None:
        """Return the process started under this name, if it runs."""
        return next((process for process in self.processes() if process.program == program), None)

    def wait(self, program: str, ready: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until `ready`; raise with the program's last line of output if it ends or the time is over."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self._ended_by_itself(program):
                raise Missing(f"{what} ended at start: {_last_line(self.log(program))}")
            if time.monotonic() > deadline:
                raise Missing(f"{what} is not ready after {seconds:.0f} s: {_last_line(self.log(program))}")
            time.sleep(0.05)

    def _ended_by_itself(self, program: str) -> bool:
        """Whether the program has ended. Java's launcher executes itself again, and has no environment meanwhile."""
        child = self._started.get(program)
        return (child is None or child.poll() is not None) and self.process(program) is None

    def stop(self, program: str, *, grace: float = 10) -> None:
        """End a program and all its children: SIGTERM, and SIGKILL after `grace` seconds."""
        self._end(lambda: [process for process in self.processes() if process.program == program], grace)

    def kill(self, program: str) -> None:
        """End a program and all its children at once, as a crash would."""
        self._end(lambda: [process for process in self.processes() if process.program == program], None)

    def at_down(self, *argv: str) -> None:
        """Note a clean-up command before its object is created, which is no process and no file of the instance."""
        with (self.folder / "at-down").open("a+") as notes:
            notes.seek(0)
            line = json.dumps(argv) + "\n"
            if line not in notes.readlines():
                notes.write(line)

    def down(self, *, grace: float = 3) -> None:
        """End every process of this instance and remove all its files; its address block is free again."""
        with undisturbed():
            self._end(self.processes, grace)
            notes = self.folder / "at-down"
            for line in reversed(notes.read_text().splitlines() if notes.exists() else []):
                # The object may never have been created, and its server may have ended already.
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run(json.loads(line), capture_output=True, check=False, timeout=120)
            cache.remove(self.folder)

    def keep_logs(self) -> Path:
        """Copy the logs to a folder that outlives the instance, and return that folder."""
        copy = home() / f"{self.name}-failed"
        cache.remove(copy)
        with contextlib.suppress(OSError):
            shutil.copytree(self.folder / "log", copy)
        return copy

    def _end(self, remaining: Callable[[], list[Process]], grace: float | None) -> None:
        deadline = time.monotonic() + (grace or 0)
        ending = set(remaining())
        for process in ending if grace is not None else ():
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)  # a stopped process does not handle SIGTERM
        # An ending process has no environment any more, but may still hold files, cgroups and addresses.
        while ending := {*remaining(), *(process for process in ending if process.alive)}:
            if time.monotonic() >= deadline:
                for process in ending:
                    process.signal(signal.SIGKILL)
            time.sleep(0.02)
        self._reap()

    def _reap(self) -> None:
        for pid in [
            pid for pid, child in [*self._children.items()] if child.poll() is not None
        ]:  # threads start others
            del self._children[pid]


def checked(name: str) -> str:
    """Return a ground's name; reject one that makes no folder of its own."""
    if not _NAME.fullmatch(name):
        raise Missing(f"A ground cannot be named {name!r}; use lower-case letters, digits and dashes")
    return name


def standing() -> list[Instance]:
    """Return every instance; one may be removed during the search."""
    instances = []
    for path in sorted(home().glob("*/instance.json")):
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):  # removed, or damaged by a power cut
            instances.append(Instance(path.parent))
    return instances


@contextlib.contextmanager
def temporary(name: str) -> Iterator[Instance]:
    """Open an instance that ends with us; if we are killed, the next process removes it."""
    sweep()
    folder = home() / f"{name}-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    with (folder / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)  # before the instance exists: a sweep must not find it without an owner
        instance = Instance.open(folder.name)
        try:
            yield instance
        finally:
            instance.down()


def sweep() -> None:
    """Take down temporary instances whose owner has ended."""
    for instance in standing():
        with contextlib.suppress(FileNotFoundError), (instance.folder / "owner").open() as owner:
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            say(f"taking down {instance.name}, which was left behind")
            instance.down()


def _free_block() -> str:
    """Return a block of no other instance; other users' searches start at other blocks."""
    taken = {instance.block for instance in standing()}
    blocks = [f"127.{number}" for number in range(FIRST_BLOCK, LAST_BLOCK)]
    first = int(hashlib.sha256(str(home()).encode()).hexdigest(), 16) % len(blocks)
    for block in blocks[first:] + blocks[:first]:
        if block not in taken:
            return block
    raise Missing(f"All address blocks are taken; end grounds you no longer need (folders in {home()})")


def _free_port(address: str, preferred: int, promised: set[int]) -> int:
    for port in (preferred, *[0] * 20):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            number: int = probe.getsockname()[1]
            if number not in promised:
                return number
    raise Missing(f"No port is free on {address}; end what listens there")


def _tagged() -> list[tuple[int, int, str]]:
    """Return (start, pid, tag) of every live process that carries our tag, the oldest first."""
    mark = f"{TAG}=".encode()
    tagged = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        variables = _environment(int(entry.name)).split(b"\0")
        tag = next((variable for variable in variables if variable.startswith(mark)), None)
        if tag and _runs(int(entry.name)):
            tagged.append((_age(int(entry.name)), int(entry.name), tag[len(mark) :].decode()))
    return sorted(tagged)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # the process is ending, or belongs to another user
        return b""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _runs(pid: int) -> bool:
    """Whether a process is no zombie; its first thread may have ended while others still hold ports and files."""
    fields = _stat(pid)
    return bool(fields) and (fields[0] not in {"Z", "X"} or int(fields[17]) > 1)


def _age(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return f"{next((line for line in reversed(lines) if line.strip()), 'it said nothing')[:300]} (all of it: {log})"
