"""Export of traces: the environment variables that configure it, and requests that a receiver rejects."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ground.poll import soon
from kube.traces import KEY, RESOURCE, attributes, completed_change, handover
from otlp_receiver import Receiver, a_receiver, decoded, resource_spans
from rota.kube.telemetry import trace_export
from rota.kube.telemetry.rebalances import RebalanceChange
from rota.kube.telemetry.trace_export import TraceExporter, TraceRecorder, open_recorder

ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
HEADERS, PROTOCOL = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_PROTOCOL"


async def received_groups(receiver: Receiver) -> list[str]:
    """Return the groups of the rebalances in the next request."""
    return [attributes(span)["rota.group"] for span in await receiver.spans() if span.name == "rebalance"]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with a_receiver() as server:
        yield server


@pytest.fixture(autouse=True)
def export_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TraceRecorder | None]:
    """Return a function that opens a recorder with the given environment variables."""

    def open_with(**environment: str) -> TraceRecorder | None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return open_recorder(environment, "rota-0", "1.2.3")

    return open_with


@asynccontextmanager
async def an_exporter(recorder: TraceRecorder | None) -> AsyncIterator[TraceExporter]:
    exporter = TraceExporter(recorder)
    try:
        yield exporter
    finally:
        await exporter.close()


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors that the SDK logged."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("opentelemetry") and record.levelname == "ERROR"
    ]


async def wait_for_logged_errors(caplog: pytest.LogCaptureFixture, count: int) -> None:
    async def are_logged() -> bool:
        return len(logged_errors(caplog)) >= count

    await soon(are_logged)


# Environment variables.


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {ENDPOINT: " ", TRACES_ENDPOINT: "", "OTEL_SERVICE_NAME": "x"},
        {ENDPOINT: "http://a:1", "OTEL_SDK_DISABLED": "True"},
        {ENDPOINT: "http://a:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_trace_export_is_off_without_an_endpoint_or_when_disabled(
    recorder: Callable[..., TraceRecorder | None], environment: dict[str, str]
) -> None:
    assert recorder(**environment) is None


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({ENDPOINT: "http://collector:4318"}, "http://collector:4318/v1/traces"),
        ({ENDPOINT: "http://collector:4318/"}, "http://collector:4318/v1/traces"),
        ({ENDPOINT: "https://example.com/otlp"}, "https://example.com/otlp/v1/traces"),
        ({ENDPOINT: "https://example.com/otlp/?of=us"}, "https://example.com/otlp/v1/traces?of=us"),
        ({ENDPOINT: "http://[::1]:4318"}, "http://[::1]:4318/v1/traces"),
        ({ENDPOINT: "http://all:4318", TRACES_ENDPOINT: "http://traces:4318/here"}, "http://traces:4318/here"),
        ({ENDPOINT: "", TRACES_ENDPOINT: " http://traces:4318 "}, "http://traces:4318"),
        ({ENDPOINT: "http://collector:4318", PROTOCOL: "http/protobuf"}, "http://collector:4318/v1/traces"),
    ],
)
def test_trace_endpoint_gets_the_path_unless_it_is_for_traces_only(
    recorder: Callable[..., TraceRecorder | None],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    url: str,
) -> None:
    endpoints: list[str] = []
    otlp = import_module("rota.otlp")

    def build_exporter(endpoint: str, **_: object) -> SpanExporter:
        endpoints.append(endpoint)
        return InMemorySpanExporter()

    monkeypatch.setattr(otlp, "OTLPSpanExporter", build_exporter)
    trace_recorder = recorder(**environment)
    assert trace_recorder
    trace_recorder.close()
    assert endpoints == [url]


@pytest.mark.parametrize("name", [ENDPOINT, TRACES_ENDPOINT])
@pytest.mark.parametrize("url", ["collector:4318", "collector", "http://", "http://a:b", "http://a b", "grpc://a:1"])
def test_trace_endpoint_that_is_invalid_is_rejected_with_a_sentence(
    recorder: Callable[..., TraceRecorder | None], name: str, url: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} '.*' is not the URL of an OTLP receiver; use one such as http"):
        recorder(**{name: url})


def test_trace_endpoint_error_shows_no_password(recorder: Callable[..., TraceRecorder | None]) -> None:
    with pytest.raises(ValueError, match=r"^((?!secret).)*$"):
        recorder(**{ENDPOINT: "ftp://me:secret@collector"})


@pytest.mark.parametrize("text", ["a=1,secret", "a=1,=secret", "a=1,b b=secret", "a=1,b=secret%0A"])
def test_trace_headers_error_does_not_repeat_the_entry(
    recorder: Callable[..., TraceRecorder | None], text: str
) -> None:
    with pytest.raises(ValueError, match=r"^OTEL_EXPORTER_OTLP_HEADERS: entry 2 is malformed; write key="):
        recorder(**{ENDPOINT: "http://collector:4318", HEADERS: text})


@pytest.mark.parametrize(
    ("name", "protocol", "sentence"),
    [
        (PROTOCOL, "http/json", "'http/json' is not supported; give http/protobuf or grpc"),
        (PROTOCOL, "grpc", "is grpc, but its package is not installed: use http/protobuf, or install opentelemetry-"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc", "is grpc, but its package is not installed: "),
    ],
)
def test_trace_protocol_that_cannot_be_used_is_rejected_with_a_sentence(
    recorder: Callable[..., TraceRecorder | None], name: str, protocol: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} {sentence}"):
        recorder(**{ENDPOINT: "http://collector:4317", name: protocol})


def test_trace_export_without_its_package_is_rejected_with_a_sentence(
    recorder: Callable[..., TraceRecorder | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rota.kube.telemetry.span_export", None)
    monkeypatch.delattr("rota.kube.telemetry.span_export", raising=False)
    sentence = r"is set, but the package that sends traces is not installed: pip install 'rota-operator\[traces\]'$"
    with pytest.raises(ValueError, match=f"^{ENDPOINT} {sentence}"):
        recorder(**{ENDPOINT: "http://collector:4318"})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, RESOURCE),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,deployment.environment.name=a%20b"},
            {**RESOURCE, "service.name": "mine", "deployment.environment.name": "a b"},
        ),
        (
            {"OTEL_SERVICE_NAME": "ours", "OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"},
            {**RESOURCE, "service.name": "ours"},
        ),
    ],
)
async def test_trace_resource_is_extended_or_overridden_by_environment(
    receiver: Receiver,
    recorder: Callable[..., TraceRecorder | None],
    environment: dict[str, str],
    expected: dict[str, str],
) -> None:
    async with an_exporter(recorder(**{ENDPOINT: receiver.url, **environment})) as exporter:
        exporter.export(KEY, completed_change())
        (resource,) = resource_spans((await receiver.got.get())[1])
    assert {name: text for name, text in attributes(resource.resource).items() if "sdk" not in name} == expected


# Requests to the receiver.


async def test_trace_export_sends_rebalances_together_in_one_request_with_headers(
    receiver: Receiver, recorder: Callable[..., TraceRecorder | None]
) -> None:
    headers = " Api-Key = a%2Cb ,,authorization=Basic dTpw== "
    only_at_close = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}  # otherwise a batch could end between two rebalances
    async with an_exporter(recorder(**{ENDPOINT: receiver.url, HEADERS: headers, **only_at_close})) as exporter:
        for name in ("orders", "bills"):
            exporter.export(("shop", name), completed_change(handover()))
        exporter.export(("shop", "quiet"), RebalanceChange(moved_queues=3))
    request, body = await receiver.got.get()
    assert request.path == "/otlp/v1/traces"
    assert (request.headers["api-key"], request.headers["authorization"]) == ("a,b", "Basic dTpw==")
    assert request.content_type == "application/x-protobuf"
    assert [attributes(span)["rota.group"] for span in decoded(body) if span.name == "rebalance"] == ["orders", "bills"]
    assert receiver.got.empty()


async def test_trace_export_compresses_if_the_environment_requests_it(
    receiver: Receiver, recorder: Callable[..., TraceRecorder | None]
) -> None:
    async with an_exporter(recorder(**{ENDPOINT: receiver.url, "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"})) as exporter:
        exporter.export(KEY, completed_change())
        request, body = await receiver.got.get()
    assert request.headers["content-encoding"] == "gzip"
    assert decoded(body)  # the server has decompressed it


async def test_trace_export_follows_the_sampler_of_the_environment(
    receiver: Receiver, recorder: Callable[..., TraceRecorder | None]
) -> None:
    async with an_exporter(recorder(**{ENDPOINT: receiver.url, "OTEL_TRACES_SAMPLER": "always_off"})) as exporter:
        exporter.export(KEY, completed_change())
    assert receiver.got.empty()


async def test_trace_export_repeats_a_request_of_a_busy_receiver_with_the_same_ids(
    receiver: Receiver, recorder: Callable[..., TraceRecorder | None]
) -> None:
    receiver.answers = [web.Response(status=503, headers={"Retry-After": "0"}), web.Response(status=429)]
    async with an_exporter(recorder(**{ENDPOINT: receiver.url})) as exporter:
        exporter.export(KEY, completed_change(handover()))
        bodies = [(await receiver.got.get())[1] for _ in range(3)]
    assert bodies == [bodies[0]] * 3


@pytest.mark.parametrize("status", [301, 308, 400, 401, 404, 413, 500])
async def test_trace_export_logs_each_rejected_request_and_continues(
    receiver: Receiver,
    recorder: Callable[..., TraceRecorder | None],
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver.answers = [web.Response(status=status, headers={"location": "/v1/x"}) for _ in range(2)]
    async with an_exporter(recorder(**{ENDPOINT: receiver.url})) as exporter:
        for number, name in enumerate(("a", "b"), 1):
            exporter.export(("shop", name), completed_change())
            assert await received_groups(receiver) == [name]
            await wait_for_logged_errors(caplog, number)
        exporter.export(("shop", "c"), completed_change())
        assert await received_groups(receiver) == ["c"]
    assert len(logged_errors(caplog)) == 2
    assert all(str(status) in message for message in logged_errors(caplog))


async def test_trace_export_gives_up_on_an_unreachable_receiver(
    recorder: Callable[..., TraceRecorder | None], caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    async with an_exporter(recorder(**{ENDPOINT: url, "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2"})) as exporter:
        for number in (1, 2):
            exporter.export(KEY, completed_change())
            await wait_for_logged_errors(caplog, number)


async def test_trace_export_queue_is_bounded(
    receiver: Receiver, recorder: Callable[..., TraceRecorder | None], caplog: pytest.LogCaptureFixture
) -> None:
    receiver.opened.clear()
    sizes = {"OTEL_BSP_MAX_QUEUE_SIZE": "2", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1"}
    async with an_exporter(recorder(**{ENDPOINT: receiver.url, **sizes})) as exporter:
        for name in "abcdef":
            exporter.export(("shop", name), completed_change())
        receiver.opened.set()
        assert await received_groups(receiver)
    assert "Queue full, dropping Span." in caplog.messages
    assert receiver.got.qsize() < 5


async def test_trace_export_flushes_on_close_for_a_limited_time(
    receiver: Receiver,
    recorder: Callable[..., TraceRecorder | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with an_exporter(recorder(**{ENDPOINT: receiver.url})) as exporter:
        exporter.export(KEY, completed_change())
    assert await received_groups(receiver) == ["orders"]

    receiver.opened.clear()
    monkeypatch.setattr(trace_export, "CLOSE_SECONDS", 0.2)
    async with an_exporter(recorder(**{ENDPOINT: receiver.url})) as exporter:
        exporter.export(KEY, completed_change())
    receiver.opened.set()
    await soon(has_no_export_thread)


async def has_no_export_thread() -> bool:
    return not {thread.name for thread in threading.enumerate()} & {"traces", "OtelBatchSpanRecordProcessor"}


async def test_trace_export_without_a_recorder_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with an_exporter(None) as exporter:
        exporter.export(KEY, completed_change())
    assert exporter.trace_id_of(KEY, Any) == ""  # type: ignore[arg-type]
    assert caplog.records == []
    assert await has_no_export_thread()
