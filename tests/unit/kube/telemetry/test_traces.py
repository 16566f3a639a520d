"""Traces of rebalances: in the official shape, well nested, and sent without anybody waiting for it."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ground.poll import soon
from rota.documents import Assignment, Release, Share
from rota.kube.state.rebalance import Rebalance
from rota.kube.telemetry import otlp
from rota.kube.telemetry.otlp import Exporter, Settings, settings
from rota.kube.telemetry.rebalances import SLOWEST, Handover, News, Past, Tally
from rota.kube.telemetry.traces import request, trace
from rota.model import Holder, Queue
from rota.planner import Plan

AT, BEGUN = "2026-11-21T08:00:00.000Z", 1_795_248_000
KEY = ("shop", "orders")
CLOCK = BEGUN - 100.0  # so that on the loop's clock it began at 100
ONE = {"moved": 1, "seconds": 1.0}
A, B = Holder("a", "uid-a"), Holder("b", "uid-b")
RESOURCE = {"service.name": "rota-operator", "service.version": "1.2.3", "service.instance.id": "rota-0"}


def handover(number: int = 0, before: Holder | None = A, *, forced: bool = False, **at: float) -> Handover:
    times: dict[str, Any] = {"revoked": 100.1, "granted": 100.4, "obeyed": 100.9, **at}
    return Handover(Queue("orders", "broker-a", number), before, B, **times, forced=forced)


def news(*handovers: Handover, handed: int | None = None, **told: Any) -> News:
    last = Rebalance(**{"reason": "MemberJoined", "message": "b joined", "at": AT, "generation": 42, **ONE, **told})
    return News(past=Past(last, handovers, len(handovers) if handed is None else handed))


def spans(*told: News) -> list[Span]:
    """Read what is sent as the official reader does; only ids are hex in OTLP, where the mapping has base64."""
    return read(sent(*told))


def sent(*told: News) -> bytes:
    traces = [one for it in told if it.past and (one := trace(KEY, it.past, CLOCK))]
    return msgspec.json.encode(request(traces, RESOURCE))


def read(body: bytes) -> list[Span]:
    return [span for one in official(body).resource_spans for scope in one.scope_spans for span in scope.spans]


def official(body: bytes) -> ExportTraceServiceRequest:
    told = msgspec.json.decode(body)
    for resource in told["resourceSpans"]:
        for span in resource["scopeSpans"][0]["spans"]:
            for name in {"traceId", "spanId", "parentSpanId"} & span.keys():
                span[name] = b64encode(bytes.fromhex(span[name])).decode()
    return json_format.ParseDict(told, ExportTraceServiceRequest(), ignore_unknown_fields=False)


def attributes(of: Any) -> dict[str, Any]:
    return {it.key: getattr(it.value, it.value.WhichOneof("value")) for it in of.attributes}


def tree(found: list[Span]) -> Iterator[tuple[str, float, float]]:
    """Yield each span with its ancestors, and when it was, in seconds since the rebalance began."""
    names = {b"": ""}
    for span in found:
        names[span.span_id] = f"{names[span.parent_span_id]}/{span.name}"
        times = (span.start_time_unix_nano, span.end_time_unix_nano)
        yield names[span.span_id], *((at - BEGUN * 10**9) / 10**9 for at in times)  # type: ignore[misc] # two of them


# The shape.


def test_trace_of_a_rebalance_contains_its_handovers() -> None:
    assert [*tree(spans(news(handover())))] == [
        ("/rebalance", 0.0, 1.0),
        ("/rebalance/handover", 0.1, 0.9),
        ("/rebalance/handover/release", 0.1, 0.4),
        ("/rebalance/handover/obey", 0.4, 0.9),
    ]


def test_trace_span_attributes_describe_rebalance_and_handover() -> None:
    root, one, release, obey = spans(news(handover(7), handed=3))
    assert attributes(root) == {
        "k8s.namespace.name": "shop",
        "rota.group": "orders",
        "rota.reason": "MemberJoined",
        "rota.message": "b joined",
        "rota.generation": 42,
        "rota.moved": 1,
        "rota.forced": 0,
        "rota.seconds": 1.0,
        "rota.handovers": 3,
        "rota.handovers_untold": 2,
    }
    queue = {"rota.queue.topic": "orders", "rota.queue.broker": "broker-a", "rota.queue.id": 7}
    assert attributes(one) == {**queue, "rota.from": "a", "rota.to": "b", "rota.forced": False}
    assert attributes(release) == {"rota.member": "a", "rota.forced": False}
    assert attributes(obey) == {"rota.member": "b"}
    assert {it.kind for it in (root, one, release, obey)} == {Span.SPAN_KIND_INTERNAL}
    assert not any(it.HasField("status") for it in (root, one, release, obey))


def test_trace_resource_identifies_the_operator() -> None:
    (told,) = official(sent(news())).resource_spans
    assert attributes(told.resource) == RESOURCE
    assert (told.scope_spans[0].scope.name, told.scope_spans[0].scope.version) == ("rota", "1.2.3")


def test_trace_of_a_forced_grant_has_error_status() -> None:
    found = spans(news(handover(1, forced=True), handover(2), forced=1))
    wrong = [it for it in found if it.status.code == Status.STATUS_CODE_ERROR]
    assert [it.name for it in wrong] == ["rebalance", "handover", "release"]
    assert {it.status.message for it in wrong} == {"taken from a member that was not heard"}
    assert wrong[1] == found[1]


def test_trace_of_a_queue_without_previous_owner_has_no_release_span() -> None:
    found = spans(news(handover(before=None, revoked=100.4)))
    assert [name for name, _, _ in tree(found)] == ["/rebalance", "/rebalance/handover", "/rebalance/handover/obey"]
    assert "rota.from" not in attributes(found[1])


@pytest.mark.parametrize(
    ("at", "root", "inside"),
    [
        ({"revoked": 90.0}, (0.0, 1.0), (0.0, 0.9)),  # under way since before: its last owner has never obeyed
        ({"obeyed": 103.0}, (0.0, 3.0), (0.1, 3.0)),  # seen to be over after the plan that told how long all took
        ({"revoked": 90.0, "granted": 91.0, "obeyed": 92.0}, (0.0, 1.0), (0.0, 0.0)),  # by a clock that was wrong
    ],
)
def test_trace_spans_lie_within_their_parent(at: Any, root: tuple[float, float], inside: tuple[float, float]) -> None:
    found = spans(news(handover(**at)))
    times = {name: (start, end) for name, start, end in tree(found)}
    assert (times["/rebalance"], times["/rebalance/handover"]) == (root, inside)
    for name, (start, end) in times.items():
        outer = times.get(name.rpartition("/")[0], (start, end))
        assert outer[0] <= start <= end <= outer[1]


def test_trace_ids_are_unique_and_stable_when_sent_again() -> None:
    both: list[dict[str, Any]] = [{}, {"at": "2026-11-21T08:00:00.001Z", "message": ""}]
    told = [news(*(handover(number) for number in range(5)), **it) for it in both]
    found = spans(*told)
    assert {len(it.trace_id) for it in found} == {16}
    assert {len(it.span_id) for it in found} == {8}
    assert len({it.trace_id for it in found}) == 2
    assert len({it.span_id for it in found}) == len(found) == 2 * (1 + 3 * 5)
    assert spans(*told) == found
    assert "rota.message" not in attributes(found[16])


@pytest.mark.parametrize("at", ["yesterday", "", 7])
def test_trace_of_a_rebalance_without_start_time_is_omitted(at: Any) -> None:
    assert spans(news(at=at), news()) == spans(news())


# What a tally gathers for it.


def a_group(generation: int, owned: Sequence[Queue] = (), free: Sequence[Queue] = ()) -> Assignment:
    """Return a document: what b owns, and what a has to release to it."""
    return Assignment(
        group="shop/orders",
        generation=generation,
        issued_at=AT,
        members={"a": Share("uid-a", () if generation > 1 else QUEUES), "b": Share("uid-b", (*owned,))},
        releasing={queue: Release(A, "b", 2, AT) for queue in free},
    )


def a_plan(**told: Any) -> Plan:
    why = {"kind": "plan", "at": AT, "generation": 2, "message": "b joined"}
    return Plan(status={"lastRebalance": {"reason": "MemberJoined", "at": AT, "moved": 0, **told}}, records=(why,))


QUEUES = tuple(Queue("orders", "broker-a", number) for number in range(SLOWEST + 30))


def test_trace_of_many_handovers_has_only_the_slowest() -> None:
    tally, quick, slow = Tally(), QUEUES[:30], QUEUES[30:]
    tally.take(Plan(), a_group(1), {}, 99.0)
    assert tally.take(a_plan(), a_group(2, free=QUEUES), {}, 100.0).past is None
    assert tally.take(a_plan(moved=30), a_group(3, quick, slow), {B: 3}, 101.0).past is None
    past = tally.take(a_plan(moved=len(QUEUES), seconds=5.0), a_group(4, QUEUES), {B: 4}, 105.0).past
    assert past
    assert {it.queue for it in past.slowest} == {*slow}
    assert {it.seconds for it in past.slowest} == {5.0}
    root, *others = spans(News(past=past))
    told = attributes(root)
    assert (told["rota.handovers"], told["rota.handovers_untold"]) == (SLOWEST + 30, 30)
    assert len(others) == 3 * SLOWEST


def test_trace_by_a_new_leader_omits_handovers_it_did_not_see_start() -> None:
    tally, began, before = Tally(), QUEUES[:3], Plan(status=a_plan().status)
    tally.take(before, a_group(3, free=began), {}, 100.0)
    assert tally.take(before, a_group(4, began), {}, 101.0).past is None
    news = tally.take(Plan(status=a_plan(moved=3, seconds=9.0).status), a_group(4, began), {B: 4}, 102.0)
    assert news.past
    assert [it.name for it in spans(news)] == ["rebalance"], "nobody here knows since when they were under way"


def test_trace_by_a_new_leader_omits_rebalances_that_ended_before() -> None:
    later = {"kind": "plan", "at": "2026-11-21T08:01:00.000Z", "generation": 5, "message": "c joined"}
    over = Plan(status=a_plan(moved=3, seconds=9.0).status, records=(later,))  # c is in the document, and gets nothing
    news = Tally().take(over, a_group(5, QUEUES), {B: 4}, 160.0)
    assert (news.ended, news.past) == (None, None)


# Where it goes.

WHERE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def given_settings(**environment: str) -> Settings:
    found = settings({WHERE: "http://collector:4318", **environment}, "rota-0", "1.2.3")
    assert found
    return found


def test_trace_export_is_off_without_an_endpoint() -> None:
    assert settings({}, "rota-0", "1.2.3") is None
    assert settings({WHERE: " ", TRACES: "", "OTEL_SERVICE_NAME": "x"}, "rota-0", "1.2.3") is None


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({WHERE: "http://collector:4318"}, "http://collector:4318/v1/traces"),
        ({WHERE: "http://collector:4318/"}, "http://collector:4318/v1/traces"),
        ({WHERE: "https://example.com/otlp"}, "https://example.com/otlp/v1/traces"),
        ({WHERE: "https://example.com/otlp/?of=us"}, "https://example.com/otlp/v1/traces?of=us"),
        ({WHERE: "http://[::1]:4318"}, "http://[::1]:4318/v1/traces"),
        ({WHERE: "http://all:4318", TRACES: "http://traces:4318/here"}, "http://traces:4318/here"),
        ({WHERE: "", TRACES: " http://traces:4318 "}, "http://traces:4318"),
    ],
)
def test_trace_endpoint_gets_the_path_unless_it_is_for_traces_only(environment: dict[str, str], url: str) -> None:
    assert given_settings(**environment).url == url


@pytest.mark.parametrize("name", [WHERE, TRACES])
@pytest.mark.parametrize("url", ["collector:4318", "collector", "http://", "http://a:b", "http://a b", "grpc://a:1"])
def test_trace_endpoint_that_is_invalid_is_rejected_with_a_sentence(name: str, url: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} '.*' is no address of a receiver; give one such as http"):
        given_settings(**{name: url})


def test_trace_endpoint_error_shows_no_password() -> None:
    with pytest.raises(ValueError, match=r"^((?!secret).)*$"):
        given_settings(**{WHERE: "ftp://me:secret@collector"})


def test_trace_headers_are_parsed_and_those_for_traces_take_precedence() -> None:
    everywhere = "OTEL_EXPORTER_OTLP_HEADERS"
    assert given_settings().headers == {}
    found = given_settings(**{everywhere: " Api-Key = a%2Cb ,,authorization=Basic dTpw== "}).headers
    assert found == {"api-key": "a,b", "authorization": "Basic dTpw=="}
    only = {everywhere: "a=1", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "b=2"}
    assert given_settings(**only).headers == {"b": "2"}


@pytest.mark.parametrize("text", ["a=1,secret", "a=1,=secret", "a=1,b b=secret", "a=1,b=secret%0A"])
def test_trace_headers_error_does_not_repeat_the_entry(text: str) -> None:
    with pytest.raises(ValueError, match=r"^OTEL_EXPORTER_OTLP_HEADERS has an entry that is none, number 2; give key="):
        given_settings(OTEL_EXPORTER_OTLP_HEADERS=text)


def test_trace_resource_attributes_are_extended_or_overridden_by_environment() -> None:
    assert given_settings().resource == RESOURCE
    more = given_settings(OTEL_RESOURCE_ATTRIBUTES="service.name=mine,deployment.environment.name=a%20b").resource
    assert more == {**RESOURCE, "service.name": "mine", "deployment.environment.name": "a b"}
    both = {"OTEL_SERVICE_NAME": "ours", "OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}
    assert given_settings(**both).resource == {**RESOURCE, "service.name": "ours"}


def test_trace_resource_attributes_that_are_invalid_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    assert given_settings(OTEL_RESOURCE_ATTRIBUTES="team=a,b").resource == RESOURCE
    assert "OTEL_RESOURCE_ATTRIBUTES has an entry that is none, number 2" in caplog.text


# How it is sent.


@dataclass
class Receiver:
    """Answers as it is told to, then that all is well, and keeps what it got."""

    answers: list[web.Response] = field(default_factory=list)
    got: "asyncio.Queue[tuple[web.Request, bytes]]" = field(default_factory=asyncio.Queue)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0

    async def take(self, asked: web.Request) -> web.Response:
        self.asked += 1
        await self.opened.wait()
        self.got.put_nowait((asked, await asked.read()))
        return self.answers.pop(0) if self.answers else web.json_response({})

    async def groups(self) -> list[str]:
        """Return whose rebalances came with the next request."""
        return [attributes(it)["rota.group"] for it in read((await self.got.get())[1]) if it.name == "rebalance"]


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[Receiver, str]]:
    told = Receiver()
    told.opened.set()
    app = web.Application()
    app.router.add_post("/otlp/v1/traces", told.take)
    async with TestServer(app) as server:
        yield told, f"http://127.0.0.1:{server.port}/otlp"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(otlp, "PAUSES", (0.0, 0.0, 0.0))


@asynccontextmanager
async def exporter(url: str, **environment: str) -> AsyncIterator[Exporter]:
    """Have one that runs, as an operator has it."""
    told = Exporter(given_settings(**{WHERE: url, **environment}))
    running = asyncio.create_task(told.run())
    try:
        yield told
    finally:
        running.cancel()
        await asyncio.wait([running])
        await told.close()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{it.levelname} {it.getMessage()}" for it in caplog.records if it.name == "rota.kube.telemetry.otlp"]


async def until(ask: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return ask()

    await soon(asked)


async def lost(it: Exporter, count: int) -> None:
    await until(lambda: it.lost >= count)


async def idle(it: Exporter) -> None:
    await until(lambda: not it._behind)


async def test_trace_export_sends_rebalances_together_in_one_request_with_headers(
    receiver: tuple[Receiver, str],
) -> None:
    there, url = receiver
    async with exporter(url, OTEL_EXPORTER_OTLP_HEADERS="api-key=k,content-type=text/plain") as it:
        for name in ("orders", "bills"):
            it.take(("shop", name), news(handover()))
        it.take(("shop", "quiet"), News(moved=3))
        asked, body = await there.got.get()
        await idle(it)
    assert (asked.path, asked.headers["api-key"]) == ("/otlp/v1/traces", "k")
    assert asked.headers.getall("content-type") == ["application/json"]
    assert [attributes(span)["rota.group"] for span in read(body) if span.name == "rebalance"] == ["orders", "bills"]
    assert there.got.empty()
    assert it.lost == 0


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_trace_export_retries_a_busy_receiver(
    receiver: tuple[Receiver, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    there, url = receiver
    there.answers = [web.json_response({"message": "later"}, status=status), web.Response(status=503)]
    async with exporter(url) as it:
        it.take(KEY, news())
        bodies = [(await there.got.get())[1] for _ in range(3)]
    assert bodies == [bodies[0]] * 3
    assert it.lost == 0
    assert logged(caplog) == [
        f"ERROR Traces cannot be sent: {status} later; they are left out until they can",
        "WARNING Traces are sent again; 0 were left out",
    ]


async def test_trace_export_honours_retry_after(
    receiver: tuple[Receiver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, url = receiver
    there.answers = [web.Response(status=503, headers={"Retry-After": it}) for it in ("7", "99999", "Sat, 1 Jan 2028")]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    # The exporter alone gets another asyncio: other tasks of this process sleep as they always do.
    monkeypatch.setattr(otlp, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    async with exporter(url) as it:
        it.take(KEY, news())
        for _ in range(4):
            await there.got.get()
    assert slept == [7.0, otlp.LONGEST_WAIT, 0.0]


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 500])
async def test_trace_export_does_not_retry_rejected_traces_and_logs_once(
    receiver: tuple[Receiver, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    there, url = receiver
    there.answers = [web.Response(status=status, text="no\nway", headers={"location": "/v1/x"}) for _ in range(2)]
    async with exporter(url) as it:
        for number, name in enumerate(("a", "b"), 1):
            it.take(("shop", name), news())
            assert await there.groups() == [name]
            await lost(it, number)
        it.take(("shop", "c"), news())
        assert await there.groups() == ["c"]
    assert it.lost == 2
    assert logged(caplog) == [
        f"ERROR Traces cannot be sent: {status} no way; they are left out until they can",
        "WARNING Traces are sent again; 2 were left out",
    ]


async def test_trace_export_gives_up_on_an_unreachable_receiver(caplog: pytest.LogCaptureFixture) -> None:
    async with exporter(f"http://127.0.0.1:{unused_port()}") as it:
        it.take(KEY, news())
        await lost(it, 1)
        it.take(KEY, news())
        await lost(it, 2)
    (told, ending) = logged(caplog)
    assert told.startswith("ERROR Traces cannot be sent: Cannot connect to host 127.0.0.1:")
    assert ending == "WARNING The operator ends, and 2 traces were not sent"


async def test_trace_export_retries_a_broken_connection(receiver: tuple[Receiver, str]) -> None:
    there, url = receiver
    asked = 0

    async def broken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    server = await asyncio.start_server(broken, "127.0.0.1", 0)
    async with server, exporter(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as it:
        it.take(KEY, news())
        await lost(it, 1)
    assert asked >= 1 + len(otlp.PAUSES)
    assert there.got.empty(), url


async def test_trace_export_queue_is_bounded_and_dropped_traces_are_counted(
    receiver: tuple[Receiver, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there, url = receiver
    there.opened.clear()
    monkeypatch.setattr(otlp, "WAITING", 6)
    monkeypatch.setattr(otlp, "AT_ONCE", 4)
    async with exporter(url) as it:
        for name in "abcde":
            it.take(("shop", name), news(handover()))
        assert (it.lost, it._behind) == (2, 6)
        there.opened.set()
        assert await there.groups() == ["a", "b"]
        assert await there.groups() == ["c"]
    assert (it.lost, it._behind) == (2, 0)
    assert logged(caplog)[0] == "ERROR Traces cannot be sent: there are too many; they are left out until they can"


async def test_trace_export_sends_an_oversized_trace_alone(
    receiver: tuple[Receiver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, url = receiver
    monkeypatch.setattr(otlp, "AT_ONCE", 2)
    async with exporter(url) as it:
        it.take(("shop", "a"), news(handover(1), handover(2), handover(3)))
        it.take(("shop", "b"), news())
        assert [await there.groups(), await there.groups()] == [["a"], ["b"]]


async def test_trace_export_does_not_retry_partial_success_and_logs_once(
    receiver: tuple[Receiver, str], caplog: pytest.LogCaptureFixture
) -> None:
    there, url = receiver
    some: Any = {"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}
    nothing: Any = {"partialSuccess": {}}
    there.answers = [web.json_response(body) for body in (nothing, some, some)]
    async with exporter(url) as it:
        for _ in range(3):
            it.take(KEY, news())
            await there.got.get()
            await idle(it)
    assert there.got.empty()
    assert it.lost == 0
    assert logged(caplog) == ["WARNING The receiver of traces refused 2 spans: too old"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1]", "<html>", '{"partialSuccess": 1}', "\x0a\x00"),
        pytest.param("x" * (otlp.LONGEST_ANSWER_BYTES + 1), id="too long"),
    ],
)
async def test_trace_export_accepts_any_response_body(
    receiver: tuple[Receiver, str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    there, url = receiver
    there.answers = [web.Response(text=text)]
    async with exporter(url) as it:
        it.take(KEY, news())
        await there.got.get()
        await idle(it)
    assert there.got.empty()
    assert (it.lost, logged(caplog)) == (0, [])


async def test_trace_export_drops_only_the_trace_that_cannot_be_encoded(
    receiver: tuple[Receiver, str], caplog: pytest.LogCaptureFixture
) -> None:
    there, url = receiver
    async with exporter(url) as it:
        it.take(("shop", "\udc80"), news())
        await lost(it, 1)
        it.take(KEY, news())
        assert await there.groups() == ["orders"]
    assert logged(caplog)[0].startswith("ERROR Traces cannot be sent: UnicodeEncodeError: ")


async def test_trace_export_flushes_on_close_for_a_limited_time(
    receiver: tuple[Receiver, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there, url = receiver
    told = Exporter(given_settings(**{WHERE: url}))
    told.take(KEY, news())
    await told.close()
    assert await there.groups() == ["orders"]

    there.opened.clear()
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.01)
    told = Exporter(given_settings(**{WHERE: url}))
    told.take(KEY, news())
    await told.close()
    assert logged(caplog) == ["WARNING The operator ends, and 1 traces were not sent"]
    there.opened.set()


async def test_trace_export_completes_a_request_in_flight_on_close(receiver: tuple[Receiver, str]) -> None:
    there, url = receiver
    there.opened.clear()
    async with exporter(url) as it:
        it.take(KEY, news())
        await until(lambda: there.asked > 0)
        there.opened.set()
    assert it.lost == 0
    assert await there.groups() == ["orders"]


async def test_trace_export_without_settings_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told = Exporter(None)
    told.take(KEY, news())
    await told.run()
    await told.close()
    assert (told.lost, told._behind) == (0, 0)
    assert caplog.records == []
    assert isinstance(told._session, aiohttp.ClientSession)
    assert told._session.closed
