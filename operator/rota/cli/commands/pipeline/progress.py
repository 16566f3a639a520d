"""What a long command is at, on standard error: at once where a person looks on, else only if it takes long."""

import sys
import time
from contextlib import suppress
from threading import Timer
from types import TracebackType
from typing import Self

from rota.cli.console.output import clean

QUIET = 10.0  # seconds without a word where nobody looks on: a log has no use for more


class Progress:
    """Says each step when it begins; call it with what comes next."""

    def __init__(self) -> None:
        """Begin to count the time."""
        self._speaks = time.monotonic() + QUIET
        self.waits: Timer | None = None  # until the present step is told, if that is not yet

    def __call__(self, step: str) -> None:
        """Say what begins now."""
        self._stop()
        looks_on = sys.stderr is not None and sys.stderr.isatty()
        wait = 0.0 if looks_on else self._speaks - time.monotonic()
        if wait <= 0:
            _say(step)
            return
        self.waits = Timer(wait, _say, (step,))
        self.waits.daemon = True  # whoever ends does not wait for it
        self.waits.start()

    def __enter__(self) -> Self:
        """Say nothing yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Say nothing any more."""
        self._stop()

    def _stop(self) -> None:
        if self.waits:
            self.waits.cancel()


def _say(step: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # nobody reads it, or it was closed
            print(f"rota: {clean(step)}", file=sys.stderr, flush=True)  # noqa: T201 - this is where we speak
