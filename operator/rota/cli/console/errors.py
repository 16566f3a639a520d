"""How a command ends: a mistake is one sentence and exit code 2, never a traceback."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn

import click

from rota.cli.console.output import clean

LONGEST = 2000  # characters of a sentence: what was given may be quoted in it


class Plain(click.Group):
    """Commands whose mistakes are told in one sentence, also those that click finds."""

    def main(self, *arguments: Any, **settings: Any) -> NoReturn:
        """Run a command, and end with its exit code."""
        try:
            code = super().main(*arguments, **{**settings, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.Abort:  # Ctrl-C before the command began
            code = 130
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            where = f"; see {context.command_path} --help" if context else ""
            _complain(f"{error.format_message().rstrip('.')}{where}")
        sys.exit(code)


def plainly(command: Callable[..., None]) -> Callable[..., None]:
    """Say a user's mistake in one sentence and end with exit code 2."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        try:
            _with_output(command, arguments)
        except KeyboardInterrupt:  # whoever pressed it knows
            sys.exit(130)
        except BrokenPipeError:  # whoever read us has seen enough
            _let_go()
        except OSError as error:
            _let_go()
            _complain(f"The output cannot be written: {error.strerror or error}")
        except RecursionError:
            _complain("What was given is nested too deep")
        except ValueError as error:
            _complain(str(error))
        except ModuleNotFoundError as error:
            extra = "sidecar" if error.name in {"aiohttp", "lz4", "zstandard"} else "operator"
            wanted = f"pip install 'rota-operator[{extra}]'"
            _complain(f"{error.name} is not installed, which this command needs: {wanted}")

    return run


def _with_output(command: Callable[..., None], arguments: dict[str, Any]) -> None:
    if sys.stdout is None:  # Python's way to say that it was closed before we began
        raise ValueError("The output cannot be written: standard output is closed")
    command(**arguments)
    sys.stdout.flush()  # what cannot be written is noticed here, not after our last word


def _let_go() -> None:
    """Write what is left to nowhere, or Python complains of it as it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(sentence: str) -> NoReturn:
    told = clean(sentence)
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"rota: {told if len(told) <= LONGEST else told[:LONGEST] + '…'}", file=sys.stderr)  # noqa: T201 - this is where we speak
    sys.exit(2)
