"""What the ground says to people: a line of progress, or one sentence about what is missing."""

import errno
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, current_thread, main_thread
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Missing(Exception):  # noqa: N818 - it names what happened, and is no bug of ours
    """Something that the ground needs is not there; the text is one sentence that names it and what to do."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"ground: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, every: float = 15) -> Iterator[None]:
    """Say what begins, that it is still going on, and how long it took."""
    began = time.monotonic()
    over = Event()

    def tick() -> None:
        while not over.wait(every):
            say(f"{what}: {time.monotonic() - began:.0f} s")

    say(what)
    ticker = Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
        say(f"{what}: done in {time.monotonic() - began:.1f} s")
    finally:
        over.set()
        ticker.join()


def interrupt(_: int, __: FrameType | None) -> NoReturn:
    """End on a signal as on Ctrl-C: what was begun is taken down, and people who press again do not stop that."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let nobody interrupt what follows: taking down must not stop half way."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def plainly(name: str, work: Callable[[], object]) -> int:
    """Run a command to its exit code; what goes wrong outside of it is one sentence."""
    for number in ENDING:
        signal.signal(number, interrupt)
    try:
        work()
    except Missing as missing:
        print(f"{name}: {missing}.", file=sys.stderr)
    except TimeoutError as late:  # an OSError, too, but no file's
        print(f"{name}: Something was not as it should be in time: {late}.", file=sys.stderr)
    except OSError as error:
        what = f"{error.filename or 'A file'} cannot be used: {error.strerror}"
        hint = "No room left on a disk" if error.errno == errno.ENOSPC else what
        print(f"{name}: {hint}; ROTA_GROUND_HOME and ROTA_GROUND_CACHE name other folders.", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; what had begun is taken down.", file=sys.stderr)
        return 130
    else:
        return 0
    return 1
