"""Prints the operator's response to a question, once or on every change."""

# ruff: noqa: T201 - this module prints

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, redirect_stdout
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from rota.cli.client.http import direct
from rota.cli.client.requests import Ask, InvalidResponseError, answer
from rota.cli.console.formatting import say
from rota.cli.console.output import clean, show
from rota.kube.client.login.kubeconfig import LoginOptions

T = TypeVar("T", bound=msgspec.Struct)

EVERY = 2.0  # seconds between two requests


class WatchRequest(NamedTuple, Generic[T]):
    """A request to the operator, and how its response is printed."""

    path: str
    kind: type[T]
    people: Callable[[T], None]  # prints the response as text for people
    params: Mapping[str, str] = MappingProxyType({})
    of_it: Callable[[T], T] = lambda value: value  # selects the requested part of the response
    names: Callable[[T], Iterable[str]] = lambda _: ()  # names of the objects, as kubectl accepts them


class _TerminalBuffer(io.StringIO):
    """A text buffer that pretends to be a terminal, so that tables fit its width."""

    def isatty(self) -> bool:
        return True


class Target(NamedTuple):
    """The operator that receives requests: an address, or the pod that holds the Lease in the login's cluster."""

    operator: str | None
    operator_namespace: str
    lease: str
    login: LoginOptions


def print_response(question: WatchRequest[T], target: Target, *, output: str, watch: bool) -> None:
    """Print the response; with `watch`, print each change of it until Ctrl-C."""
    output = "table" if output == "wide" else output  # the question already selects the columns

    async def run() -> None:
        async with _connect(target) as ask:

            async def look() -> T:
                return question.of_it(await answer(ask, question.path, question.params, question.kind))

            if not watch:
                _show(question, await look(), output)
            elif output == "table" and _in_place():
                await _update_in_place(question, look)
            else:
                await _print_changes(question, look, output)

    asyncio.run(run())


def _connect(target: Target) -> AbstractAsyncContextManager[Ask]:
    """Return a context manager for the connection to the operator."""
    if target.operator is not None:
        if target.login.impersonate or target.login.impersonate_groups:
            raise ValueError("--as needs the API server, and --operator does not ask it; leave one of them out")
        return direct(target.operator)
    from rota.cli.client import proxy  # noqa: PLC0415 - Kubernetes is imported only if it is needed

    return proxy.connect_through_cluster(target.operator_namespace, target.lease, target.login)


def _show(question: WatchRequest[T], value: T, output: str) -> None:
    if output == "name":
        for name in question.names(value):
            say(name)
    else:
        show(msgspec.to_builtins(value), output, lambda: question.people(value))


async def _print_changes(question: WatchRequest[T], look: Callable[[], Awaitable[T]], output: str) -> None:
    """Print the response again after each change; errors meanwhile go to standard error."""
    shown, problem = await look(), ""
    while True:
        _show(question, shown, output)
        sys.stdout.flush()
        previous = _still(shown)
        while _still(shown) == previous:
            await asyncio.sleep(EVERY)
            try:
                shown, problem = await look(), ""
            except InvalidResponseError as error:
                if problem != str(error):
                    problem = str(error)
                    print(f"rota: {clean(problem)}", file=sys.stderr)
        if output == "yaml":
            print("---")


def _still(value: msgspec.Struct) -> msgspec.Struct:
    """Return the value without fields whose change does not count: when brokers were last asked."""
    return msgspec.structs.replace(value, looked_at=None) if hasattr(value, "looked_at") else value


async def _update_in_place(question: WatchRequest[T], look: Callable[[], Awaitable[T]]) -> None:
    """Update a terminal in place; an error is shown below the last successful response."""
    from rich.live import Live  # noqa: PLC0415 - rich is for tables only
    from rich.text import Text  # noqa: PLC0415

    value, problem = await look(), ""
    with Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            paper = _TerminalBuffer()
            with redirect_stdout(paper):
                question.people(value)
            live.update(Text.from_ansi(paper.getvalue() + problem), refresh=True)
            await asyncio.sleep(EVERY)
            try:
                value, problem = await look(), ""
            except InvalidResponseError as error:
                problem = f"rota: {clean(str(error))}"


def _in_place() -> bool:
    from rich.console import Console  # noqa: PLC0415 - rich is for tables only

    return sys.stdout.isatty() and not Console().is_dumb_terminal
