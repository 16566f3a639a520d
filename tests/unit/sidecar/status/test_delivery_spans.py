"""Which messages have a span, its content, and the change of the spans' receiver while a sidecar runs."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Event

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kube.traces import attributes
from rota.brokers.message import Message
from rota.model import Queue
from rota.sidecar.status import delivery_spans
from rota.sidecar.status.delivery_spans import (
    DeliverySpan,
    DeliverySpans,
    SpanSender,
    TraceParent,
    delivery_span,
    open_otlp_sender,
    trace_parent,
)
from rota.sidecar.status.otlp_sender import OtlpSender

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "UNIQ_KEY": "7F01"}
RESOURCE = {"service.name": "rota-sidecar", "service.version": "1.2.3"}


def a_message(**properties: str) -> Message:
    return Message(Queue("orders", "broker-a", 3), 7, b"x", properties)


def a_span(outcome: str = "done", **properties: str) -> DeliverySpan | None:
    message = a_message(**TRACED | properties)
    return delivery_span(message, topic="orders", group="shop", outcome=outcome, start=10.0, end=10.5)


@pytest.mark.parametrize(
    ("text", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceParent(TRACE, SPAN, 0x01)),
        (f"00-{TRACE}-{SPAN}-00", TraceParent(TRACE, SPAN, 0x00)),
        (f"00-{TRACE}-{SPAN}-03", TraceParent(TRACE, SPAN, 0x03)),
        (f"cc-{TRACE}-{SPAN}-01", TraceParent(TRACE, SPAN, 0x01)),
        (f"cc-{TRACE}-{SPAN}-01-later-fields", TraceParent(TRACE, SPAN, 0x01)),
        (f"cc-{TRACE}-{SPAN}-01.what", None),
        (f"00-{TRACE}-{SPAN}-01-what", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{32 * '0'}-{SPAN}-01", None),
        (f"00-{TRACE}-{16 * '0'}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        ("", None),
    ],
)
def test_trace_parent_of_a_message_is_read_as_w3c_defines_it(text: str, parent: TraceParent | None) -> None:
    assert trace_parent(a_message(traceparent=text)) == parent
    assert trace_parent(a_message()) is None


def test_delivery_span_is_made_of_sampled_traces_only() -> None:
    assert a_span(traceparent=f"00-{TRACE}-{SPAN}-00") is None
    assert a_span(traceparent="") is None
    assert a_span()


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("a=1", True),
        ("a=1,b@c=x y", True),
        ("", False),
        ("a=1, b=2", False),
        ("nonsense", False),
        ("a=1,", False),
        (f"a={600 * 'x'}", False),
        ("a=\n", False),
    ],
)
def test_trace_state_is_kept_if_it_is_valid_by_w3c(text: str, *, is_kept: bool) -> None:
    span = a_span(tracestate=text)
    assert span
    assert span.trace_state == (text if is_kept else "")


def test_delivery_span_of_a_retried_message_names_no_queue_and_cuts_long_ids() -> None:
    retried = Message(
        Queue("%RETRY%shop", "broker-a", 0), 7, b"x", {**TRACED, "UNIQ_KEY": 30_000 * "x"}, reconsume_times=1
    )
    span = delivery_span(retried, topic="orders", group="shop", outcome="done", start=10.0, end=10.5)
    assert span
    assert "messaging.destination.partition.id" not in span.attributes
    assert len(span.attributes["messaging.message.id"]) <= 110


def test_delivery_span_names_queue_group_message_and_outcome() -> None:
    span = a_span("later", tracestate="a=1")
    assert span
    assert (span.name, span.trace_state, span.start, span.end, span.error) == (
        "deliver orders",
        "a=1",
        10.0,
        10.5,
        "later",
    )
    assert span.attributes == {
        "messaging.system": "rocketmq",
        "messaging.operation.type": "process",
        "messaging.operation.name": "deliver",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "broker-a/3",
        "messaging.consumer.group.name": "shop",
        "messaging.message.id": "7F01",
        "rota.outcome": "later",
        "error.type": "later",
    }


@pytest.mark.parametrize(("outcome", "code"), [("done", Status.STATUS_CODE_UNSET), ("dead", Status.STATUS_CODE_ERROR)])
def test_delivery_span_is_a_child_of_the_producers_span(outcome: str, code: int) -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans  # noqa: PLC0415

    exporter = InMemorySpanExporter()
    sender = OtlpSender(SimpleSpanProcessor(exporter), RESOURCE)
    span = a_span(outcome, tracestate="a=1,b=2")
    assert span
    sender.send(span)
    sender.close()
    (resource_spans,) = encode_spans(exporter.get_finished_spans()).resource_spans
    (sent,) = resource_spans.scope_spans[0].spans
    assert (sent.trace_id.hex(), sent.parent_span_id.hex(), sent.trace_state) == (TRACE, SPAN, "a=1,b=2")
    assert (sent.kind, sent.status.code) == (Span.SPAN_KIND_CONSUMER, code)
    assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (10_000_000_000, 10_500_000_000)
    assert attributes(sent)["rota.outcome"] == outcome
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in sent.links] == [(TRACE, SPAN)]
    assert attributes(resource_spans.resource)["service.name"] == "rota-sidecar"


class RecordingSender:
    """A sender that records its spans, and closes once it may."""

    def __init__(self) -> None:
        self.spans: list[DeliverySpan] = []
        self.may_close = Event()
        self.closed = Event()
        self.on_result: Callable[[str], None] = lambda _: None
        self.may_close.set()

    def send(self, span: DeliverySpan) -> None:
        self.spans.append(span)

    def close(self) -> None:
        self.may_close.wait(60)
        self.closed.set()


@pytest.fixture
def senders() -> dict[str, RecordingSender]:
    return {}


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def spans(senders: dict[str, RecordingSender], problems: list[str]) -> DeliverySpans:
    def open_sender(endpoint: str, on_result: Callable[[str], None]) -> SpanSender:
        sender = senders.setdefault(endpoint, RecordingSender())
        sender.on_result = on_result
        return sender

    return DeliverySpans(open_sender, problems.append)


def record(spans: DeliverySpans, outcome: str = "done", **properties: str) -> None:
    messages = [a_message(**TRACED | properties)]
    spans.record(messages, topic="orders", group="shop", outcome=outcome, seconds=0.25)


async def test_delivery_spans_go_to_the_receiver_of_the_settings(
    senders: dict[str, RecordingSender], spans: DeliverySpans
) -> None:
    record(spans)
    assert not spans.set_endpoint("")
    for endpoint in ("http://a:1", "http://b:1"):
        assert spans.set_endpoint(endpoint)
        assert not spans.set_endpoint(endpoint)
        await spans.switch()
        record(spans)
    assert senders["http://a:1"].closed.is_set()
    (span,) = senders["http://b:1"].spans
    assert span.end - span.start == pytest.approx(0.25)
    assert abs(span.end - time.time()) < 3600
    await spans.close()
    record(spans)
    assert senders["http://b:1"].closed.is_set()
    assert [len(sender.spans) for sender in senders.values()] == [1, 1]


async def test_delivery_spans_are_not_made_while_the_app_is_away(
    senders: dict[str, RecordingSender], spans: DeliverySpans
) -> None:
    assert spans.set_endpoint("http://a:1")
    await spans.switch()
    record(spans, "away")
    record(spans, "cut")
    assert [span.error for span in senders["http://a:1"].spans] == ["cut"]
    await spans.close()


async def test_delivery_spans_do_not_wait_for_a_receiver_that_hangs(
    senders: dict[str, RecordingSender], spans: DeliverySpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_spans, "CLOSE_SECONDS", 0.01)
    assert spans.set_endpoint("http://a:1")
    await spans.switch()
    senders["http://a:1"].may_close.clear()
    await spans.close()
    assert not senders["http://a:1"].closed.is_set()
    senders["http://a:1"].may_close.set()
    await asyncio.to_thread(senders["http://a:1"].closed.wait, 60)


async def test_delivery_spans_close_a_sender_that_opens_after_its_switch_was_cancelled() -> None:
    opening, may_open = Event(), Event()
    sender = RecordingSender()

    def open_sender(_endpoint: str, _on_result: Callable[[str], None]) -> SpanSender:
        opening.set()
        may_open.wait(60)
        return sender

    spans = DeliverySpans(open_sender, lambda _: None)
    spans.set_endpoint("http://a:1")
    switch = asyncio.create_task(spans.switch())
    await asyncio.to_thread(opening.wait, 60)
    switch.cancel()
    await asyncio.gather(switch, return_exceptions=True)
    may_open.set()
    await spans.close()
    assert sender.closed.is_set()


async def report(sender: RecordingSender, failure: str) -> None:
    """Report a result in a thread; the event loop handles it before it continues here."""
    await asyncio.to_thread(sender.on_result, failure)


async def test_delivery_spans_report_a_receiver_that_fails_until_it_gets_spans_or_there_is_another(
    senders: dict[str, RecordingSender], spans: DeliverySpans, problems: list[str]
) -> None:
    assert spans.set_endpoint("http://a:1")
    await spans.switch()
    await report(senders["http://a:1"], "Connection refused")
    await report(senders["http://a:1"], "")
    hint = "correct spec.delivery.traces.endpoint, or start the receiver"
    assert problems == ["", f"Spans cannot be sent to http://a:1: Connection refused; {hint}", ""]
    assert spans.set_endpoint("http://b:1")
    await spans.switch()
    await report(senders["http://a:1"], "Connection refused")
    assert problems[3:] == [""], "the failure of an earlier receiver is ignored"


def open_real_sender(endpoint: str, on_result: Callable[[str], None]) -> SpanSender:
    return open_otlp_sender(endpoint, on_result, resource=RESOURCE)


async def test_delivery_spans_without_the_sdk_are_reported(
    monkeypatch: pytest.MonkeyPatch, problems: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rota.sidecar.status.otlp_sender", None)
    monkeypatch.delattr("rota.sidecar.status.otlp_sender", raising=False)
    spans = DeliverySpans(open_real_sender, problems.append)
    assert spans.set_endpoint("http://a:1")
    await spans.switch()
    install = "the package that sends them is missing; install it: pip install 'rota-operator[sidecar,traces]'"
    assert problems == ["", f"No spans are sent to http://a:1: {install}"]


async def test_delivery_spans_with_invalid_variables_are_reported(
    monkeypatch: pytest.MonkeyPatch, problems: list[str]
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000")
    spans = DeliverySpans(open_real_sender, problems.append)
    assert spans.set_endpoint("http://a:1")
    await spans.switch()
    assert problems[1].startswith("No spans are sent to http://a:1: ")
    assert problems[1].endswith("; correct OpenTelemetry's variables of the container")


@asynccontextmanager
async def run_server(status: int) -> AsyncIterator[str]:
    """Run a server that answers each request with a status; yield its URL."""

    async def respond(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": "http://elsewhere:1/"} if status == 302 else None)

    async with RawTestServer(respond) as server:
        yield f"http://127.0.0.1:{server.port}"


async def send_batch(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the reported result of one batch."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.5")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    results: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_result(failure: str) -> None:
        loop.call_soon_threadsafe(results.put_nowait, failure)

    sender = open_real_sender(endpoint, on_result)
    span = a_span()
    assert span
    sender.send(span)
    result = await results.get()
    await asyncio.to_thread(sender.close)
    return result


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (200, ""),
        (404, "it answers 404 Not Found"),
        (503, "it answers 503 Service Unavailable"),
        (302, "a redirect (302) is not followed; configure its target as the endpoint"),
    ],
)
async def test_delivery_spans_that_a_receiver_refuses_are_reported_with_its_answer(
    status: int, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(status) as endpoint:
        assert await send_batch(endpoint, monkeypatch) == failure


async def test_delivery_spans_to_a_receiver_that_cannot_be_reached_are_reported_with_the_systems_reason(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await send_batch(f"http://127.0.0.1:{unused_tcp_port}", monkeypatch) == "Connection refused"
    unknown = await send_batch("http://no-such-host.invalid:4318", monkeypatch)
    assert unknown in {"Name or service not known", "Temporary failure in name resolution"}
    async with run_server(200) as endpoint:
        failure = await send_batch(endpoint.replace("http", "https"), monkeypatch)
        assert failure.startswith("it does not support TLS, or its certificate is not trusted (")
