"""Prints the operator's response to a request: once or, with `--watch`, on every change."""

# ruff: noqa: T201 - this module prints

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, redirect_stdout
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from rota.cli.client.http import connect_directly
from rota.cli.client.requests import OperatorRequestError, SendRequest, fetch_response
from rota.cli.console.formatting import print_line
from rota.cli.console.output import print_value, sanitize_line
from rota.kube.client.login.kubeconfig import LoginOptions

T = TypeVar("T", bound=msgspec.Struct)

POLL_SECONDS = 2.0  # seconds between two requests


class PrintableRequest(NamedTuple, Generic[T]):
    """A request to the operator, and how its response is printed."""

    path: str
    response_type: type[T]
    print_text: Callable[[T], None]  # prints the response as text
    params: Mapping[str, str] = MappingProxyType({})
    select: Callable[[T], T] = lambda value: value  # selects the requested part of the response
    object_names: Callable[[T], Iterable[str]] = lambda _: ()  # for `-o name`: names of objects as kubectl accepts them


class _TerminalBuffer(io.StringIO):
    """A text buffer that claims to be a terminal, so that tables are laid out for the real terminal's width."""

    def isatty(self) -> bool:
        return True


class Target(NamedTuple):
    """The operator that receives requests: an address, or the pod that holds the Lease in the login's cluster."""

    operator: str | None
    operator_namespace: str
    lease: str
    login: LoginOptions


def print_response(request: PrintableRequest[T], target: Target, *, output: str, watch: bool) -> None:
    """Print the response; with `watch`, print each change of it until Ctrl-C."""
    output = "table" if output == "wide" else output  # `request.print_text` prints the wide columns

    async def run() -> None:
        async with _connect(target) as send:

            async def fetch() -> T:
                return request.select(await fetch_response(send, request.path, request.params, request.response_type))

            if not watch:
                _print_formatted(request, await fetch(), output)
            elif output == "table" and _can_update_in_place():
                await _update_in_place(request, fetch)
            else:
                await _print_changes(request, fetch, output)

    asyncio.run(run())


def _connect(target: Target) -> AbstractAsyncContextManager[SendRequest]:
    if target.operator is not None:
        if target.login.impersonate or target.login.impersonate_groups:
            raise ValueError("--as works only through the API server, not with --operator; remove one of them")
        return connect_directly(target.operator)
    from rota.cli.client import leader_connection  # noqa: PLC0415 - Kubernetes is imported only if it is needed

    return leader_connection.connect_through_cluster(target.operator_namespace, target.lease, target.login)


def _print_formatted(request: PrintableRequest[T], value: T, output: str) -> None:
    if output == "name":
        for name in request.object_names(value):
            print_line(name)
    else:
        print_value(msgspec.to_builtins(value), output, lambda: request.print_text(value))


async def _print_changes(request: PrintableRequest[T], fetch: Callable[[], Awaitable[T]], output: str) -> None:
    """Print the response again after each change; errors of requests in between go to standard error."""
    shown = await fetch()
    problem = ""
    while True:
        _print_formatted(request, shown, output)
        sys.stdout.flush()
        previous = _without_sample_time(shown)
        while _without_sample_time(shown) == previous:
            await asyncio.sleep(POLL_SECONDS)
            try:
                shown = await fetch()
                problem = ""
            except OperatorRequestError as error:
                if problem != str(error):
                    problem = str(error)
                    print(f"rota: {sanitize_line(problem)}", file=sys.stderr)
        if output == "yaml":
            print("---")


def _without_sample_time(value: msgspec.Struct) -> msgspec.Struct:
    """Return the response without `looked_at`, the time of the last sample: a new time alone is no change."""
    return msgspec.structs.replace(value, looked_at=None) if hasattr(value, "looked_at") else value


async def _update_in_place(request: PrintableRequest[T], fetch: Callable[[], Awaitable[T]]) -> None:
    """Update a terminal in place; an error is shown below the last successful response."""
    from rich.live import Live  # noqa: PLC0415 - rich is for tables only
    from rich.text import Text  # noqa: PLC0415

    value = await fetch()
    problem = ""
    with Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            buffer = _TerminalBuffer()
            with redirect_stdout(buffer):
                request.print_text(value)
            live.update(Text.from_ansi(buffer.getvalue() + problem), refresh=True)
            await asyncio.sleep(POLL_SECONDS)
            try:
                value = await fetch()
                problem = ""
            except OperatorRequestError as error:
                problem = f"rota: {sanitize_line(str(error))}"


def _can_update_in_place() -> bool:
    from rich.console import Console  # noqa: PLC0415 - rich is for tables only

    return sys.stdout.isatty() and not Console().is_dumb_terminal
