"""Spans of deliveries, from a sidecar in this process to a receiver of traces."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ground.instance import Instance
from ground.poll import soon
from kube.traces import attributes
from otlp_receiver import Receiver, a_receiver, resource_spans
from sidecar.in_process import LONG_VISIBILITY, a_member

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
OK, FAILS = "ok", "fails"


@pytest.fixture(autouse=True)
def short_export_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


async def first_span(receiver: Receiver) -> tuple[str, Span]:
    """Return the first span of the next request, with the name of its pod."""
    spans = resource_spans((await receiver.got.get())[1])[0]
    return attributes(spans.resource)["k8s.pod.name"], spans.scope_spans[0].spans[0]


async def test_trace_of_a_pushed_message_shows_the_outcome_at_the_app(
    instance: Instance, tmp_path: Path, unused_tcp_port: int
) -> None:
    async def take(request: web.Request) -> web.Response:
        return web.Response(status=500 if (await request.text()) == FAILS else 200)

    app = web.Application()
    app.router.add_post("/", take)
    async with a_receiver() as receiver:
        push = {"port": unused_tcp_port, "timeout": "60s"}
        delivery = {"mode": "Push", "push": push, "traces": {"endpoint": receiver.url}}
        async with (
            a_member(instance, tmp_path, delivery=delivery) as member,
            TestServer(app, host=member.address, port=unused_tcp_port),
        ):
            while receiver.got.empty():  # the exporter opens concurrently with the first deliveries
                await member.send(OK, traceparent=PARENT)
                await asyncio.sleep(0.05)
            pod, done = await first_span(receiver)
            await member.send(FAILS, traceparent=PARENT)
            failed: list[Span] = []
            while not failed:
                failed = [span for span in await receiver.spans() if attributes(span)["rota.outcome"] != "done"]
    assert pod == "a"
    assert [attributes(span)["rota.outcome"] for span in (done, *failed)] == ["done", "later"]
    for span in (done, *failed):
        assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (TRACE, SPAN, "deliver orders")
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    assert failed[0].status.code == Status.STATUS_CODE_ERROR


async def test_trace_of_a_pulled_message_ends_with_its_ack_also_after_a_change_of_receiver(
    instance: Instance, tmp_path: Path
) -> None:
    async with a_receiver() as first, a_receiver() as second, a_member(instance, tmp_path) as member:
        for receiver in (first, second):
            member.settings["delivery"] = {**LONG_VISIBILITY, "traces": {"endpoint": receiver.url}}
            await member.assign(member.all_queues)
            while receiver.got.empty():
                await member.send("a", traceparent=PARENT)
                await member.ack(*await member.get())
            _, span = await first_span(receiver)
            assert (span.trace_id.hex(), attributes(span)["messaging.consumer.group.name"]) == (TRACE, "shop")
            assert attributes(span)["rota.outcome"] == "done"


async def test_report_names_a_receiver_of_traces_that_cannot_be_reached_until_it_gets_spans(
    instance: Instance, tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.5")
    endpoint = f"http://127.0.0.1:{unused_tcp_port}"
    async with a_receiver() as receiver, a_member(instance, tmp_path) as member:
        member.settings["delivery"] = {**LONG_VISIBILITY, "traces": {"endpoint": endpoint}}
        await member.assign(member.all_queues)
        report = await member.report()
        while "TraceExportFailed" not in report.troubles:  # the exporter opens concurrently with the first deliveries
            await member.send("a", traceparent=PARENT)
            await member.ack(*await member.get())
            report = await member.report()
        sentence = f"Spans cannot be sent to {endpoint}: Connection refused; "
        assert report.troubles["TraceExportFailed"].startswith(sentence)
        member.settings["delivery"] = {**LONG_VISIBILITY, "traces": {"endpoint": receiver.url}}
        await member.assign(member.all_queues)

        async def is_over() -> bool:
            return "TraceExportFailed" not in (await member.report()).troubles

        await soon(is_over)
