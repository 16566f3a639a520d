"""Traces of rebalances for an OTLP receiver. `span_export` has what needs OpenTelemetry's SDK, which is an extra."""

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import unquote, urlsplit

from rota.aio import call_for_at_most
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry.rebalances import News
from rota.kube.telemetry.traces import Trace, trace, trace_id

CLOSE_SECONDS = 3.0  # for what waits to be sent when the operator ends

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TRACES = "OTEL_EXPORTER_OTLP_TRACES_"  # goes before what is said for all signals
_ALL = "OTEL_EXPORTER_OTLP_"
_MISSING = "pip install 'rota-operator[traces]'"


class Recorder(Protocol):
    """Makes spans of traces; the SDK's thread sends them."""

    instance: str  # service.instance.id

    def record(self, trace: Trace) -> None:
        """Make the spans of a trace."""

    def close(self) -> None:
        """Send what waits; blocks."""


def open_recorder(environment: Mapping[str, str], identity: str, version: str) -> Recorder | None:
    """Return what sends traces to the receiver that OpenTelemetry's variables name; None if they name none.

    Raise ValueError for variables that cannot be meant. The SDK reads them from the process's environment.
    """
    given = {name: text for name, it in environment.items() if (text := it.strip())}  # empty is as good as unset
    name, url = _find(given, "ENDPOINT")
    disabled = given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER") == "none"
    if not url or disabled:
        return None
    _check_url(name, url)
    _check_headers(*_find(given, "HEADERS"))
    protocol_name, protocol = _find(given, "PROTOCOL")
    if protocol not in {"", "grpc", "http/protobuf"}:
        raise ValueError(f"{protocol_name} {protocol!r} is not supported; give http/protobuf or grpc")
    attributes = {"service.name": "rota-operator", "service.version": version, "service.instance.id": identity}
    try:
        from rota import otlp  # noqa: PLC0415 - 15 MB, and an extra
        from rota.kube.telemetry import span_export  # noqa: PLC0415 - the same
    except ImportError:
        raise ValueError(f"{name} is set, and the package that sends traces is not installed: {_MISSING}") from None
    if protocol == "grpc":
        exporter = span_export.grpc_exporter(protocol_name, url)
    else:
        exporter = otlp.http_exporter(url if name.startswith(_TRACES) else _with_path(url))
    return span_export.SpanRecorder(otlp.batches(exporter, span_export.MAX_QUEUE), attributes)


class Exporter:
    """Sends traces, if there is somebody to send them to."""

    def __init__(self, recorder: Recorder | None) -> None:
        """Send nothing without a recorder."""
        self._recorder = recorder

    def trace_of(self, key: tuple[str, str], rebalance: Rebalance) -> str:
        """Return the id of the trace of a rebalance; empty if traces are sent to nobody."""
        return trace_id(key, rebalance.at, self._recorder.instance) if self._recorder else ""

    def take(self, key: tuple[str, str], news: News) -> None:
        """Take what is new of a group; a rebalance that is over is sent."""
        if not self._recorder or not news.past:
            return
        if ended := trace(key, news.past, time.time() - asyncio.get_running_loop().time()):
            self._recorder.record(ended)

    async def close(self) -> None:
        """Send what waits, but not for long: a receiver that does not answer must not keep the process from its end."""
        if self._recorder:
            await call_for_at_most(CLOSE_SECONDS, self._recorder.close)


def _find(given: Mapping[str, str], what: str) -> tuple[str, str]:
    """Return the name and the value of the variable for traces, else of the one for all signals."""
    name = next((it + what for it in (_TRACES, _ALL) if it + what in given), _ALL + what)
    return name, given.get(name, "")


def _with_path(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(path=f"{parts.path.rstrip('/')}/v1/traces").geturl()


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half of an address
        right = False
    if not right or not url.isprintable() or " " in url:
        shown = re.sub("//[^/]*@", "//…@", url)
        raise ValueError(f"{name} {shown!r} is no address of a receiver; give one such as http://collector:4318")


def _check_headers(name: str, text: str) -> None:
    """Raise ValueError for headers that are none. The SDK would log them, and they may be secret."""
    for number, pair in enumerate(text.split(","), 1):
        key, equals, value = (it.strip() for it in pair.partition("="))
        if pair.strip() and not (equals and _TOKEN.fullmatch(key) and unquote(value).isprintable()):
            raise ValueError(f"{name} has an entry that is none, number {number}; give key=value,key=value")
