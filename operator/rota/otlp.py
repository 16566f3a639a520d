"""Export of spans by OpenTelemetry's SDK.

The SDK is an optional dependency (a Python extra): import this module only if traces are configured.
"""

import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from rota.model import single_line

MAX_REASON_CHARS = 200  # length of the text why a request failed


def batch_processor(exporter: SpanExporter, max_queued_spans: int) -> SpanProcessor:
    """Return a processor that sends spans in a thread.

    A full queue drops its oldest span, and logs that. OTEL_BSP_MAX_QUEUE_SIZE overrides `max_queued_spans`.
    """
    size = None if os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "").strip() else max_queued_spans
    return BatchSpanProcessor(exporter, max_queue_size=size)


class ReportingExporter(SpanExporter):
    """Posts spans as protobuf to a URL, and calls `on_result` after each batch, in the thread that sends it.

    The argument of `on_result` is why the batch was not sent, after all retries; empty if it was sent.
    """

    def __init__(self, url: str, on_result: Callable[[str], None]) -> None:
        self._session = _Session()
        self._exporter = _exporter(url, self._session)
        self._on_result = on_result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; blocks while it is retried."""
        result = self._exporter.export(spans)
        is_sent = result is SpanExportResult.SUCCESS
        self._on_result("" if is_sent else (self._session.failure or "the batch was dropped"))
        return result

    def shutdown(self) -> None:
        """Stop retries, and close the connections."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # its types are incomplete

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return true: the exporter queues no spans."""
        return self._exporter.force_flush(timeout_millis)


class _Session(requests.Session):
    """A session that keeps in `failure` why its last request failed; empty after a success."""

    def __init__(self) -> None:
        super().__init__()
        self.failure = ""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send a request."""
        try:
            response = super().send(request, **options)
        except requests.RequestException as error:
            self.failure = _describe(error)
            raise
        self.failure = ""
        if not response.ok:
            self.failure = f"it answers {response.status_code} {single_line(response.reason or '', 100)}"
        return response


def http_exporter(url: str) -> SpanExporter:
    """Return an exporter that posts protobuf to a URL."""
    return _exporter(url, requests.Session())


def _exporter(url: str, session: requests.Session) -> OTLPSpanExporter:
    session.hooks["response"].append(_refuse_redirect)
    session.stream = True  # only the status of a response is read, however long its body is
    return OTLPSpanExporter(url, session=session)


def _describe(error: requests.RequestException) -> str:
    """Return why a request failed, in the system's words if it has some: the error itself repeats the URL."""
    if isinstance(error, requests.Timeout):
        return "it does not respond in time"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLError):
            reason = getattr(cause, "verify_message", "") or cause.reason
            return f"it does not support TLS, or its certificate is not trusted ({reason})"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return single_line(str(error), MAX_REASON_CHARS)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def to_nanoseconds(seconds: float) -> int:
    """Convert seconds since 1970 to nanoseconds, rounded to microseconds: a float is not more exact."""
    return max(round(seconds * 1e6), 0) * 1000


def _refuse_redirect(response: requests.Response, **_: Any) -> None:
    """Raise for a redirect, which the exporter would take for success."""
    response.close()
    if HTTPStatus.MULTIPLE_CHOICES <= response.status_code < HTTPStatus.BAD_REQUEST:
        raise requests.RequestException(
            f"a redirect ({response.status_code}) is not followed; configure its target as the endpoint"
        )
