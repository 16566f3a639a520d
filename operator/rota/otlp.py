"""Export of spans by OpenTelemetry's SDK, which is an extra: import this module only if traces are configured."""

import os
from http import HTTPStatus
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter


def batches(exporter: SpanExporter, max_queue: int) -> SpanProcessor:
    """Return a processor that sends spans in a thread.

    When its queue is full, it drops the oldest span, and logs that. OTEL_BSP_MAX_QUEUE_SIZE overrides `max_queue`.
    """
    size = None if os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "").strip() else max_queue
    return BatchSpanProcessor(exporter, max_queue_size=size)


def http_exporter(url: str) -> SpanExporter:
    """Return an exporter that posts protobuf to a URL."""
    session = requests.Session()
    session.hooks["response"].append(_refuse_redirect)
    session.stream = True  # only the status of a response is read, however long its body is
    return OTLPSpanExporter(url, session=session)


def nanoseconds(at: float) -> int:
    """Convert seconds since 1970 to nanoseconds, rounded to microseconds: a double resolves no more."""
    return max(round(at * 1e6), 0) * 1000


def _refuse_redirect(response: requests.Response, **_: Any) -> None:
    """Raise for a redirect, which the exporter would take for success."""
    response.close()
    if HTTPStatus.MULTIPLE_CHOICES <= response.status_code < HTTPStatus.BAD_REQUEST:
        raise requests.RequestException(f"a redirect ({response.status_code}) is not followed; name its target instead")
