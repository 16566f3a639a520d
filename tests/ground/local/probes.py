"""The kubelet's actions on a container from outside: commands, HTTP requests and connections, for hooks and probes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import aiohttp
from yarl import URL

Object = dict[str, Any]


class Failure(Exception):  # noqa: N818 - a probe that fails is no error of ours
    """A hook or probe did not succeed; the text says why."""


class Target(Protocol):
    """The container that a hook or probe is about."""

    address: str
    web: aiohttp.ClientSession

    def port(self, name_or_number: int | str) -> int:
        """Return a port by number or name."""

    async def execute(self, argv: Sequence[str]) -> int:
        """Run a command in the container and return its exit code."""


async def act(handler: Object, target: Target, seconds: float | None = None) -> None:
    """Do what a hook or probe asks for; raise `Failure` if it does not succeed in time."""
    try:
        async with asyncio.timeout(seconds):
            await _act(handler, target)
    except TimeoutError:
        raise Failure(f"no answer within {seconds:g} s") from None
    except (OSError, aiohttp.ClientError) as error:
        raise Failure(str(error) or type(error).__name__) from None


async def _act(handler: Object, target: Target) -> None:
    if "exec" in handler:
        code = await target.execute(handler["exec"]["command"])
        if code != 0:
            raise Failure(f"the command ended with {code}")
    elif "httpGet" in handler:
        await _http_get(handler["httpGet"], target)
    elif "tcpSocket" in handler:
        ask = handler["tcpSocket"]
        _, writer = await asyncio.open_connection(ask.get("host") or target.address, target.port(ask["port"]))
        writer.close()
    elif "sleep" in handler:
        await asyncio.sleep(handler["sleep"]["seconds"])
    else:
        raise Failure(f"local pods cannot do {', '.join(handler)}")


async def _http_get(ask: Object, target: Target) -> None:
    host, path = ask.get("host") or target.address, ask.get("path") or "/"
    url = f"{ask.get('scheme', 'HTTP').lower()}://{host}:{target.port(ask['port'])}/{path.removeprefix('/')}"
    headers = {header["name"]: header["value"] for header in ask.get("httpHeaders") or []}
    async with target.web.get(URL(url, encoded=True), headers=headers, allow_redirects=False) as answer:
        if not 200 <= answer.status < 400:
            raise Failure(f"{url} answered {answer.status}")


async def verdicts(probe: Object, attempt: Callable[[], Awaitable[None]], ran: float) -> AsyncIterator[Failure | None]:
    """Yield what a probe says each time its thresholds decide: None for success; `ran` seconds are over already."""
    await asyncio.sleep(max(0.0, probe.get("initialDelaySeconds", 0) - ran))
    passed = failed = 0
    while True:
        try:
            await attempt()
            passed, failed = passed + 1, 0
            if passed >= probe.get("successThreshold", 1):
                yield None
        except Failure as failure:
            passed, failed = 0, failed + 1
            if failed >= probe.get("failureThreshold", 3):
                yield failure
        await asyncio.sleep(probe.get("periodSeconds", 10))
