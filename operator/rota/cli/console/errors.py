"""Error handling of commands: a user's mistake prints one sentence and exits with code 2, without a traceback."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn

import click

from rota.cli.console.output import sanitize_line

MAX_MESSAGE_CHARACTERS = 2000  # characters of a sentence, which may quote the user's input


class CommandGroup(click.Group):
    """A command group that reports mistakes in one sentence, including those that click detects."""

    def main(self, *arguments: Any, **settings: Any) -> NoReturn:
        """Run a command, and exit with its exit code."""
        try:
            code = super().main(*arguments, **{**settings, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.Abort:  # Ctrl-C before the command started
            code = 130
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            message = error.format_message().rstrip(".")
            see = " See" if message.endswith("?") else "; see"  # "Did you mean …?" ends a sentence
            _exit_with_error(f"{message}{see} {context.command_path} --help" if context else message)
        sys.exit(code)


def report_user_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that a user's mistake prints one sentence and exits with code 2."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        try:
            _run_and_flush(command, arguments)
        except KeyboardInterrupt:  # no message: the user pressed Ctrl-C
            sys.exit(130)
        except BrokenPipeError:  # as with `| head`: the reader has all that it wants, so the exit code is 0
            _discard_output()
        # Commands turn errors of inputs and requests into ValueErrors, so this one is of a write to standard output.
        except OSError as error:
            _discard_output()
            _exit_with_error(f"The output cannot be written: {error.strerror or error}")
        except RecursionError:
            _exit_with_error("The input is nested too deeply")
        except ValueError as error:
            _exit_with_error(str(error))
        except ModuleNotFoundError as error:
            extra = "sidecar" if error.name in {"aiohttp", "lz4", "zstandard"} else "operator"
            install_hint = f"pip install 'rota-operator[{extra}]'"
            _exit_with_error(f"This command needs {error.name}, which is not installed: {install_hint}")

    return run


def _run_and_flush(command: Callable[..., None], arguments: dict[str, Any]) -> None:
    if sys.stdout is None:  # None: it was closed before Python started
        raise ValueError("The output cannot be written: standard output is closed")
    command(**arguments)
    sys.stdout.flush()  # raise write errors here, not when the interpreter exits


def _discard_output() -> None:
    """Redirect standard output to /dev/null, or Python would print an error when it flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_with_error(sentence: str) -> NoReturn:
    line = sanitize_line(sentence)
    if len(line) > MAX_MESSAGE_CHARACTERS:
        line = f"{line[:MAX_MESSAGE_CHARACTERS]}…"
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"rota: {line}", file=sys.stderr)  # noqa: T201 - the one place for errors
    sys.exit(2)
