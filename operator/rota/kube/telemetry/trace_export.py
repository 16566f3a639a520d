"""Traces on their way to an OTLP receiver: gathered, posted as JSON, tried again; nobody waits for it.

What cannot be sent is left out and counted. Variables and retries are as OpenTelemetry's specification has them.
"""

import asyncio
import logging
import random
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from rota.http_client import TooLongError, read_body
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry import traces
from rota.kube.telemetry.rebalances import News
from rota.kube.telemetry.traces import Trace
from rota.model import plain

WAITING = 50_000  # handovers in traces that wait: some 20 MB
AT_ONCE = 2_000  # handovers in one request: some 3 MB, and receivers refuse what is too large
GATHER_SECONDS = 1.0  # what ends within so long goes together
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after failures in a row; then the next are tried
LONGEST_WAIT = 60.0  # seconds, whatever a busy receiver asks for
CLOSE_SECONDS = 3.0
LONGEST_ANSWER_BYTES = 2**20  # of a receiver, unpacked
AGAIN = frozenset({429, 502, 503, 504})  # the specification's

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SIGNAL = "OTEL_EXPORTER_OTLP_TRACES_"  # goes before what is said for all signals
_ALL = "OTEL_EXPORTER_OTLP_"

_log = logging.getLogger(__name__)


class Settings(NamedTuple):
    """Where traces go, and what they say of us."""

    url: str
    headers: Mapping[str, str]
    resource: Mapping[str, str]


def settings(environment: Mapping[str, str], identity: str, version: str) -> Settings | None:
    """Read OpenTelemetry's variables; without an endpoint there are no traces."""
    given = {name: text for name, it in environment.items() if (text := it.strip())}  # empty is as good as unset
    name, url = _first(given, "ENDPOINT")
    if not url:
        return None
    _check(name, url)
    if name.startswith(_SIGNAL):
        whole = url
    else:
        parts = urlsplit(url)
        whole = parts._replace(path=f"{parts.path.rstrip('/')}/v1/traces").geturl()
    headers = {key.lower(): it for key, it in _pairs(*_first(given, "HEADERS"))}
    ours = {"service.name": "rota-operator", "service.version": version, "service.instance.id": identity}
    return Settings(whole, headers, ours | _resource(given))


def _first(given: Mapping[str, str], what: str) -> tuple[str, str]:
    name = next((it + what for it in (_SIGNAL, _ALL) if it + what in given), _ALL + what)
    return name, given.get(name, "")


def _check(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half of an address
        right = False
    if not right or not url.isprintable() or " " in url:
        shown = re.sub("//[^/]*@", "//…@", url)
        raise ValueError(f"{name} {shown!r} is no address of a receiver; give one such as http://collector:4318")


def _pairs(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Read key=value,key=value; values are not repeated in what is said of them: they may be secret."""
    for number, pair in enumerate(text.split(","), 1):
        key, equals, value = (it.strip() for it in pair.partition("="))
        value = unquote(value)
        if pair.strip():
            if not equals or not _TOKEN.fullmatch(key) or not value.isprintable():
                raise ValueError(f"{name} has an entry that is none, number {number}; give key=value,key=value")
            yield key, value


def _resource(given: Mapping[str, str]) -> dict[str, str]:
    """Read what people say of us; where some of it is wrong, the specification says, all of it is left out."""
    try:
        told = dict(_pairs("OTEL_RESOURCE_ATTRIBUTES", given.get("OTEL_RESOURCE_ATTRIBUTES", "")))
    except ValueError as error:
        _log.warning("%s; traces go without all of them", error)
        told = {}
    return told | ({"service.name": given["OTEL_SERVICE_NAME"]} if "OTEL_SERVICE_NAME" in given else {})


class _Answer(NamedTuple):
    """What became of a request."""

    trouble: str = ""  # none: it was taken
    again: bool = False  # whether to try it again
    after: float = 0.0  # seconds that the receiver asks for


class Exporter:
    """Sends traces, if there is somebody to send them to."""

    def __init__(self, told: Settings | None) -> None:
        """Send nothing before it runs."""
        self.lost = 0  # traces, since the start
        self._told = told
        self._waiting: deque[Trace] = deque()
        self._behind = 0  # handovers in them
        self._news = asyncio.Event()
        self._missing = 0  # traces that were lost since they cannot be sent
        self._troubled = self._partial = False  # whether that was told
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=True)

    def trace_of(self, key: tuple[str, str], rebalance: Rebalance) -> str:
        """Return the id of the trace of a rebalance; empty if traces are sent to nobody."""
        instance = self._told.resource.get("service.instance.id", "") if self._told else ""
        return traces.trace_id(key, rebalance.at, instance) if self._told else ""

    def take(self, key: tuple[str, str], news: News) -> None:
        """Take what is new of a group, to be sent when there is time for it."""
        if not self._told or not news.past:
            return
        trace = traces.trace(key, news.past, time.time() - asyncio.get_running_loop().time())
        if trace and self._behind + _weight(trace) > WAITING:
            self._lose(1, "there are too many")
        elif trace:
            self._waiting.append(trace)
            self._behind += _weight(trace)
            self._news.set()

    async def run(self) -> None:
        """Send what comes, for ever."""
        while self._told:
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
                await asyncio.sleep(GATHER_SECONDS)
            await self._next(self._told, PAUSES)

    async def close(self) -> None:
        """Send what waits still, but not for long."""
        async with self._session:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    while self._told and self._waiting:
                        await self._next(self._told, ())
        if missing := self._missing + len(self._waiting):
            _log.warning("The operator ends, and %d traces were not sent", missing)

    async def _next(self, to: Settings, pauses: Iterable[float]) -> None:
        """Send those that have waited longest; they wait until that is done, or given up."""
        room, some = AT_ONCE, list[Trace]()
        for trace in self._waiting:
            room -= _weight(trace)
            if room < 0 and some:
                break
            some.append(trace)
        trouble = await self._send(to, some, pauses)
        for _ in some:
            self._behind -= _weight(self._waiting.popleft())
        if trouble:
            self._lose(len(some), trouble)
        elif self._troubled:
            _log.warning("Traces are sent again; %d were left out", self._missing)
            self._troubled, self._missing = False, 0

    async def _send(self, to: Settings, some: list[Trace], pauses: Iterable[float]) -> str:
        """Post traces until they are taken or refused, or pauses are over; return what kept them from it."""
        try:
            body = await asyncio.to_thread(lambda: msgspec.json.encode(traces.request(some, to.resource)))
        except Exception as error:  # noqa: BLE001 - what cannot be told costs no rebalance
            return f"{type(error).__name__}: {error}"
        answer = await self._post(to, body)
        for pause in pauses:
            if not answer.again:
                break
            self._tell(answer.trouble)
            await asyncio.sleep(max(pause * random.uniform(0.5, 1.0), answer.after))  # noqa: S311 - not all at once
            answer = await self._post(to, body)
        return answer.trouble

    async def _post(self, to: Settings, body: bytes) -> _Answer:
        headers = {**to.headers, "content-type": "application/json"}
        try:
            async with self._session.post(to.url, data=body, headers=headers, allow_redirects=False) as answer:
                text = await _read_answer(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return _Answer(str(error) or type(error).__name__, again=True)
        if answer.status < HTTPStatus.MULTIPLE_CHOICES:
            self._look(text)
            return _Answer()
        said = _said(text).get("message") or text[:200].decode(errors="replace")
        after = answer.headers.get("Retry-After", "")
        wait = min(float(after), LONGEST_WAIT) if after.isdecimal() else 0.0
        return _Answer(f"{answer.status} {plain(str(said))}".strip(), answer.status in AGAIN, wait)

    def _look(self, text: bytes) -> None:
        """See whether the receiver took only some of it; that is nothing to try again."""
        part = _said(text).get("partialSuccess")
        if isinstance(part, dict) and part and not self._partial:
            self._partial = True
            told = plain(str(part.get("errorMessage", "")))
            _log.warning("The receiver of traces refused %s spans: %s", part.get("rejectedSpans", 0), told)

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        self._missing += count
        self._tell(why)

    def _tell(self, why: str) -> None:
        if not self._troubled:
            self._troubled = True
            _log.error("Traces cannot be sent: %s; they are left out until they can", why)


async def _read_answer(response: aiohttp.ClientResponse) -> bytes:
    """Return the body, or nothing of one that is too long: its status alone says whether the traces were taken."""
    try:
        return await read_body(response, LONGEST_ANSWER_BYTES)
    except TooLongError:
        return b""


def _weight(trace: Trace) -> int:
    return 1 + len(trace.past.slowest)


def _said(text: bytes) -> dict[str, Any]:
    """Read an answer, which may be anything."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=dict[str, Any])
    return {}
