"""Progress messages on standard error: immediate on a terminal, otherwise only for long commands."""

import sys
import time
from contextlib import suppress
from threading import Timer
from types import TracebackType
from typing import Self

from rota.cli.console.output import sanitize_line

QUIET_SECONDS = 10.0  # if standard error is not a terminal, a shorter run prints no messages


class Progress:
    """Prints each step when it starts; call it with the name of the next step."""

    def __init__(self) -> None:
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        # Prints the present step when QUIET_SECONDS are over; None: no step was postponed yet. Tests wait for it.
        self.pending_timer: Timer | None = None

    def __call__(self, step: str) -> None:
        """Announce the step that starts now."""
        self._cancel_pending()
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        wait = 0.0 if is_terminal else self._quiet_until - time.monotonic()
        if wait <= 0:
            print_note(step)
            return
        self.pending_timer = Timer(wait, print_note, (step,))
        self.pending_timer.daemon = True  # the process does not wait for it at its end
        self.pending_timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cancel_pending()

    def _cancel_pending(self) -> None:
        if self.pending_timer:
            self.pending_timer.cancel()


def print_note(text: str) -> None:
    """Print a line on standard error."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            print(f"rota: {sanitize_line(text)}", file=sys.stderr, flush=True)  # noqa: T201 - this module prints
