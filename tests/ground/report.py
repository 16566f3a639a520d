"""What the ground says to people: a line of progress, or one sentence about what is missing."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread


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
