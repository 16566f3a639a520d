"""The ground's messages to users: a line of progress, or one sentence about a missing requirement."""

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


class Missing(Exception):  # noqa: N818 - an expected condition, and no bug of ours
    """A requirement of the ground is missing; the text is one sentence that names it and the remedy."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"ground: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, every: float = 15) -> Iterator[None]:
    """Print the begin of an activity, its duration from time to time, and its end."""
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
    """End on a signal as on Ctrl-C; further signals are ignored, so that they do not stop the clean-up."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore signals while the block runs: a clean-up must not stop half way."""
    if current_thread() is not main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def plainly(name: str, work: Callable[[], object]) -> int:
    """Run a command and return its exit code; a failure of its environment is printed as one sentence."""
    for number in ENDING:
        signal.signal(number, interrupt)
    try:
        work()
    except Missing as missing:
        print(f"{name}: {missing}.", file=sys.stderr)
    except TimeoutError as late:  # a subclass of OSError that names no file
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
