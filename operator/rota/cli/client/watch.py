"""One look at what the operator knows, or a look again and again."""

# ruff: noqa: T201 - this is where we speak

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, redirect_stdout
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from rota.cli.client.http import direct
from rota.cli.client.requests import Ask, NoAnswer, answer
from rota.cli.console.formatting import say
from rota.cli.console.output import clean, show
from rota.kube.client.login.kubeconfig import LoginOptions

T = TypeVar("T", bound=msgspec.Struct)

EVERY = 2.0  # seconds between two looks


class Question(NamedTuple, Generic[T]):
    """What is asked, and how its answer is told."""

    path: str
    kind: type[T]
    people: Callable[[T], None]  # prints it for those
    params: Mapping[str, str] = MappingProxyType({})
    of_it: Callable[[T], T] = lambda value: value  # what was asked for of all that is answered
    names: Callable[[T], Iterable[str]] = lambda _: ()  # of the objects, as kubectl takes them


class _Paper(io.StringIO):
    """Text for a terminal, written beforehand."""

    def isatty(self) -> bool:
        return True


class Target(NamedTuple):
    """Which operator to ask: at its address, or the pod that holds its Lease in the cluster of a login."""

    operator: str | None
    operator_namespace: str
    lease: str
    login: LoginOptions


def tell(question: Question[T], target: Target, *, output: str, watch: bool) -> None:
    """Print the answer; with `watch`, each change of it until Ctrl-C."""
    output = "table" if output == "wide" else output  # the question has the columns

    async def run() -> None:
        async with _connect(target) as ask:

            async def look() -> T:
                return question.of_it(await answer(ask, question.path, question.params, question.kind))

            if not watch:
                _show(question, await look(), output)
            elif output == "table" and _in_place():
                await _renew(question, look)
            else:
                await _go_on(question, look, output)

    asyncio.run(run())


def _connect(target: Target) -> AbstractAsyncContextManager[Ask]:
    """Return the way to the operator."""
    if target.operator is not None:
        if target.login.impersonate or target.login.impersonate_groups:
            raise ValueError("--as needs the API server, and --operator does not ask it; leave one of them out")
        return direct(target.operator)
    from rota.cli.client import proxy  # noqa: PLC0415 - Kubernetes only for those who need it

    return proxy.through(target.operator_namespace, target.lease, target.login)


def _show(question: Question[T], value: T, output: str) -> None:
    if output == "name":
        for name in question.names(value):
            say(name)
    else:
        show(msgspec.to_builtins(value), output, lambda: question.people(value))


async def _go_on(question: Question[T], look: Callable[[], Awaitable[T]], output: str) -> None:
    """Print anew what has changed; what is wrong meanwhile goes to standard error."""
    shown, wrong = await look(), ""
    while True:
        _show(question, shown, output)
        sys.stdout.flush()
        before = _still(shown)
        while _still(shown) == before:
            await asyncio.sleep(EVERY)
            try:
                shown, wrong = await look(), ""
            except NoAnswer as error:
                if wrong != str(error):
                    wrong = str(error)
                    print(f"rota: {clean(wrong)}", file=sys.stderr)
        if output == "yaml":
            print("---")


def _still(value: msgspec.Struct) -> msgspec.Struct:
    """Return what counts as a change; that brokers were asked again is none."""
    return msgspec.structs.replace(value, looked_at=None) if hasattr(value, "looked_at") else value


async def _renew(question: Question[T], look: Callable[[], Awaitable[T]]) -> None:
    """Keep a terminal up to date; what is wrong meanwhile stands below what was known last."""
    from rich.live import Live  # noqa: PLC0415 - rich is for tables only
    from rich.text import Text  # noqa: PLC0415

    value, wrong = await look(), ""
    with Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            paper = _Paper()
            with redirect_stdout(paper):
                question.people(value)
            live.update(Text.from_ansi(paper.getvalue() + wrong), refresh=True)
            await asyncio.sleep(EVERY)
            try:
                value, wrong = await look(), ""
            except NoAnswer as error:
                wrong = f"rota: {clean(str(error))}"


def _in_place() -> bool:
    from rich.console import Console  # noqa: PLC0415 - rich is for tables only

    return sys.stdout.isatty() and not Console().is_dumb_terminal
