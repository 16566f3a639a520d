"""Traces of rebalances: well nested spans with stable ids, as OpenTelemetry's SDK makes them."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kube.traces import AT, BEGUN, RESOURCE, A, B, attributes, encoded, handover, news
from rota.documents import Assignment, Release, Share
from rota.kube.telemetry.rebalances import MAX_HANDOVERS, RebalanceChange, RebalanceTracker
from rota.model import Queue
from rota.planner import Plan


def spans(*told: RebalanceChange) -> list[Span]:
    """Return the spans of rebalances, outer ones first."""
    found = [span for one in encoded(*told) for scope in one.scope_spans for span in scope.spans]
    parents = {span.span_id: span.parent_span_id for span in found}

    def depth(span: Span) -> int:
        parent = span.parent_span_id
        return 0 if not parent else 1 if not parents[parent] else 2

    return sorted(found, key=depth)


def tree(found: list[Span]) -> Iterator[tuple[str, float, float]]:
    """Yield each span with its ancestors, and when it was, in seconds since the rebalance began."""
    names = {b"": ""}
    for span in found:
        names[span.span_id] = f"{names[span.parent_span_id]}/{span.name}"
        times = (span.start_time_unix_nano, span.end_time_unix_nano)
        yield names[span.span_id], *((at - BEGUN * 10**9) / 10**9 for at in times)  # type: ignore[misc] # two of them


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
        "rota.handovers_omitted": 2,
    }
    queue = {"rota.queue.topic": "orders", "rota.queue.broker": "broker-a", "rota.queue.id": 7}
    assert attributes(one) == {**queue, "rota.from": "a", "rota.to": "b", "rota.forced": False}
    assert attributes(release) == {"rota.member": "a", "rota.forced": False}
    assert attributes(obey) == {"rota.member": "b"}
    assert {it.kind for it in (root, one, release, obey)} == {Span.SPAN_KIND_INTERNAL}
    assert {it.status.code for it in (root, one, release, obey)} == {Status.STATUS_CODE_UNSET}


def test_trace_resource_identifies_the_operator() -> None:
    (told,) = encoded(news())
    found = attributes(told.resource)
    assert {name: found[name] for name in RESOURCE} == RESOURCE
    assert {*found} - {*RESOURCE} == {"telemetry.sdk.language", "telemetry.sdk.name", "telemetry.sdk.version"}
    assert (told.scope_spans[0].scope.name, told.scope_spans[0].scope.version) == ("rota", "1.2.3")


def test_trace_of_a_forced_grant_has_error_status() -> None:
    found = spans(news(handover(1, forced=True), handover(2), forced=1))
    wrong = [it for it in found if it.status.code == Status.STATUS_CODE_ERROR]
    assert [it.name for it in wrong] == ["rebalance", "handover", "release"]
    assert {it.status.message for it in wrong} == {"forced: the previous owner did not respond"}
    assert wrong[1] == found[1]


def test_trace_of_a_queue_without_previous_owner_has_no_release_span() -> None:
    found = spans(news(handover(before=None, revoked_at=100.4)))
    assert [name for name, _, _ in tree(found)] == ["/rebalance", "/rebalance/handover", "/rebalance/handover/obey"]
    assert "rota.from" not in attributes(found[1])


@pytest.mark.parametrize(
    ("at", "root", "inside"),
    [
        ({"revoked_at": 90.0}, (0.0, 1.0), (0.0, 0.9)),  # under way since before: its last owner has never obeyed
        ({"obeyed_at": 103.0}, (0.0, 3.0), (0.1, 3.0)),  # seen to be over after the plan that told how long all took
        (
            {"revoked_at": 90.0, "granted_at": 91.0, "obeyed_at": 92.0},
            (0.0, 1.0),
            (0.0, 0.0),
        ),  # by a clock that was wrong
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
    assert ["rota.message" in attributes(it) for it in found[:2]] == [True, False]


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
    return Plan(
        status={"lastRebalance": {"reason": "MemberJoined", "at": AT, "moved": 0, **told}}, journal_records=(why,)
    )


QUEUES = tuple(Queue("orders", "broker-a", number) for number in range(MAX_HANDOVERS + 30))


def test_trace_of_many_handovers_has_only_the_slowest() -> None:
    tally, quick, slow = RebalanceTracker(), QUEUES[:30], QUEUES[30:]
    tally.record_plan(Plan(), a_group(1), {}, 99.0)
    assert tally.record_plan(a_plan(), a_group(2, free=QUEUES), {}, 100.0).completed is None
    assert tally.record_plan(a_plan(moved=30), a_group(3, quick, slow), {B: 3}, 101.0).completed is None
    past = tally.record_plan(a_plan(moved=len(QUEUES), seconds=5.0), a_group(4, QUEUES), {B: 4}, 105.0).completed
    assert past
    assert {it.queue for it in past.slowest_handovers} == {*slow}
    assert {it.seconds for it in past.slowest_handovers} == {5.0}
    root, *others = spans(RebalanceChange(completed=past))
    told = attributes(root)
    assert (told["rota.handovers"], told["rota.handovers_omitted"]) == (MAX_HANDOVERS + 30, 30)
    assert len(others) == 3 * MAX_HANDOVERS


def test_trace_by_a_new_leader_omits_handovers_it_did_not_see_start() -> None:
    tally, began, before = RebalanceTracker(), QUEUES[:3], Plan(status=a_plan().status)
    tally.record_plan(before, a_group(3, free=began), {}, 100.0)
    assert tally.record_plan(before, a_group(4, began), {}, 101.0).completed is None
    news = tally.record_plan(Plan(status=a_plan(moved=3, seconds=9.0).status), a_group(4, began), {B: 4}, 102.0)
    assert news.completed
    assert [it.name for it in spans(news)] == ["rebalance"], "nobody here knows since when they were under way"


def test_trace_by_a_new_leader_omits_rebalances_that_ended_before() -> None:
    later = {"kind": "plan", "at": "2026-11-21T08:01:00.000Z", "generation": 5, "message": "c joined"}
    over = Plan(
        status=a_plan(moved=3, seconds=9.0).status, journal_records=(later,)
    )  # c is in the document, and gets nothing
    news = RebalanceTracker().record_plan(over, a_group(5, QUEUES), {B: 4}, 160.0)
    assert (news.ended_rebalance, news.completed) == (None, None)
