"""Exports traces of rebalances by OTLP. `span_export` needs OpenTelemetry's SDK, which is an optional extra."""

import re
import time
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import unquote, urlsplit

from rota.aio import call_in_thread, loop_time
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry.rebalances import RebalanceChange
from rota.kube.telemetry.traces import Trace, build_trace, trace_id

CLOSE_SECONDS = 3.0  # for sending the last spans when the operator ends

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TRACES_PREFIX = "OTEL_EXPORTER_OTLP_TRACES_"  # takes precedence over the variables for all signals
_OTLP_PREFIX = "OTEL_EXPORTER_OTLP_"
_INSTALL_HINT = "pip install 'rota-operator[traces]'"


class TraceRecorder(Protocol):
    """Converts traces to spans; a thread of the SDK sends them."""

    instance_id: str  # service.instance.id

    def record(self, trace: Trace) -> None:
        """Queue the spans of a trace for sending."""

    def close(self) -> None:
        """Send the queued spans; blocks."""


def open_recorder(environment: Mapping[str, str], identity: str, version: str) -> TraceRecorder | None:
    """Return a recorder for the receiver that OpenTelemetry's environment variables name; None if they name none.

    Raise ValueError for invalid variables. The SDK itself reads them from the process's environment.
    """
    settings = {name: value.strip() for name, value in environment.items()}
    name, url = _find_variable(settings, "ENDPOINT")
    is_sdk_disabled = settings.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not url or is_sdk_disabled or settings.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    _check_url(name, url)
    _check_headers(*_find_variable(settings, "HEADERS"))
    protocol_name, protocol = _find_variable(settings, "PROTOCOL")
    if protocol not in {"", "grpc", "http/protobuf"}:
        raise ValueError(f"{protocol_name} {protocol!r} is not supported; give http/protobuf or grpc")
    attributes = {"service.name": "rota-operator", "service.version": version, "service.instance.id": identity}
    try:
        from rota import otlp  # noqa: PLC0415 - 15 MB, and an extra
        from rota.kube.telemetry import span_export  # noqa: PLC0415 - needs the same extra
    except ImportError:
        raise ValueError(
            f"{name} is set, but the package that sends traces is not installed: {_INSTALL_HINT}"
        ) from None
    if protocol == "grpc":
        exporter = span_export.grpc_exporter(protocol_name, url)
    else:
        exporter = otlp.http_exporter(url if name.startswith(_TRACES_PREFIX) else _with_path(url))
    return span_export.SpanRecorder(otlp.batch_processor(exporter, span_export.MAX_QUEUED_SPANS), attributes)


class TraceExporter:
    """Exports the traces of completed rebalances; without a recorder it exports nothing."""

    def __init__(self, recorder: TraceRecorder | None) -> None:
        self._recorder = recorder

    def trace_id_of(self, key: tuple[str, str], rebalance: Rebalance) -> str:
        """Return the trace id of a rebalance; empty if traces are not exported."""
        return trace_id(key, rebalance.at, self._recorder.instance_id) if self._recorder else ""

    def export(self, key: tuple[str, str], change: RebalanceChange) -> None:
        """Export the rebalance of a group that a plan has completed, if any."""
        if not self._recorder or not change.completed:
            return
        clock_origin = time.time() - loop_time()
        if trace := build_trace(key, change.completed, clock_origin):
            self._recorder.record(trace)

    async def close(self) -> None:
        """Send the queued spans within CLOSE_SECONDS: an unresponsive receiver must not delay the process's end."""
        if self._recorder:
            await call_in_thread(CLOSE_SECONDS, self._recorder.close)


def _find_variable(settings: Mapping[str, str], suffix: str) -> tuple[str, str]:
    """Return name and value of a setting's variable: the one for traces, or if that is empty, for all signals."""
    name = _TRACES_PREFIX + suffix
    if not settings.get(name):
        name = _OTLP_PREFIX + suffix
    return name, settings.get(name, "")


def _with_path(url: str) -> str:
    """Return the URL for traces, as OpenTelemetry derives it from the one for all signals."""
    parts = urlsplit(url)
    return parts._replace(path=f"{parts.path.rstrip('/')}/v1/traces").geturl()


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port, or an incomplete IPv6 address
        is_valid = False
    if not is_valid or not url.isprintable() or " " in url:
        shown = re.sub("//[^/]*@", "//…@", url)
        raise ValueError(f"{name} {shown!r} is not the URL of an OTLP receiver; use one such as http://collector:4318")


def _check_headers(name: str, text: str) -> None:
    """Raise ValueError for malformed headers, without their text: the SDK would log it, and it may be secret."""
    for number, pair in enumerate(text.split(","), 1):
        key, equals, value = map(str.strip, pair.partition("="))
        if pair.strip() and not (equals and _TOKEN.fullmatch(key) and unquote(value).isprintable()):
            raise ValueError(f"{name}: entry {number} is malformed; write key=value,key=value")
