"""Traces of rebalances: well nested spans with stable ids, encoded by OpenTelemetry's SDK."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kube.traces import AT, BEGUN, RESOURCE, A, B, attributes, completed_change, encoded, handover
from rota.documents import Assignment, Release, Share
from rota.kube.telemetry.rebalances import MAX_HANDOVERS, RebalanceChange, RebalanceTracker
from rota.model import Queue
from rota.planner import Plan


def trace_spans(*changes: RebalanceChange) -> list[Span]:
    """Return the spans of rebalances, outer ones first."""
    spans = [span for resource in encoded(*changes) for scope in resource.scope_spans for span in scope.spans]
    parents = {span.span_id: span.parent_span_id for span in spans}

    def depth(span: Span) -> int:
        parent = span.parent_span_id
        return 0 if not parent else 1 if not parents[parent] else 2

    return sorted(spans, key=depth)


def span_tree(spans: list[Span]) -> Iterator[tuple[str, float, float]]:
    """Yield the path, start and end of each span; times are seconds since the rebalance began."""
    names = {b"": ""}
    for span in spans:
        names[span.span_id] = f"{names[span.parent_span_id]}/{span.name}"
        times = (span.start_time_unix_nano, span.end_time_unix_nano)
        yield names[span.span_id], *((at - BEGUN * 10**9) / 10**9 for at in times)  # type: ignore[misc] # two of them


def test_trace_of_a_rebalance_contains_its_handovers() -> None:
    assert [*span_tree(trace_spans(completed_change(handover())))] == [
        ("/rebalance", 0.0, 1.0),
        ("/rebalance/handover", 0.1, 0.9),
        ("/rebalance/handover/release", 0.1, 0.4),
        ("/rebalance/handover/obey", 0.4, 0.9),
    ]


def test_trace_span_attributes_describe_rebalance_and_handover() -> None:
    root, handover_span, release, obey = trace_spans(completed_change(handover(7), handed=3))
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
    assert attributes(handover_span) == {**queue, "rota.from": "a", "rota.to": "b", "rota.forced": False}
    assert attributes(release) == {"rota.member": "a", "rota.forced": False}
    assert attributes(obey) == {"rota.member": "b"}
    assert {span.kind for span in (root, handover_span, release, obey)} == {Span.SPAN_KIND_INTERNAL}
    assert {span.status.code for span in (root, handover_span, release, obey)} == {Status.STATUS_CODE_UNSET}


def test_trace_resource_identifies_the_operator() -> None:
    (resource_spans,) = encoded(completed_change())
    resource = attributes(resource_spans.resource)
    assert {name: resource[name] for name in RESOURCE} == RESOURCE
    assert {*resource} - {*RESOURCE} == {"telemetry.sdk.language", "telemetry.sdk.name", "telemetry.sdk.version"}
    assert (resource_spans.scope_spans[0].scope.name, resource_spans.scope_spans[0].scope.version) == ("rota", "1.2.3")


def test_trace_of_a_forced_grant_has_error_status() -> None:
    spans = trace_spans(completed_change(handover(1, forced=True), handover(2), forced=1))
    failed = [span for span in spans if span.status.code == Status.STATUS_CODE_ERROR]
    assert [span.name for span in failed] == ["rebalance", "handover", "release"]
    assert {span.status.message for span in failed} == {"forced: the previous owner did not respond"}
    assert failed[1] == spans[1]


def test_trace_of_a_queue_without_previous_owner_has_no_release_span() -> None:
    spans = trace_spans(completed_change(handover(previous_owner=None, revoked_at=100.4)))
    assert [name for name, _, _ in span_tree(spans)] == [
        "/rebalance",
        "/rebalance/handover",
        "/rebalance/handover/obey",
    ]
    assert "rota.from" not in attributes(spans[1])


@pytest.mark.parametrize(
    ("times", "root", "inside"),
    [
        ({"revoked_at": 90.0}, (0.0, 1.0), (0.0, 0.9)),  # revoked before the rebalance: its last owner never obeyed
        ({"obeyed_at": 103.0}, (0.0, 3.0), (0.1, 3.0)),  # obeyed after the plan that reported the duration
        # all of it before the rebalance: the clock was wrong
        ({"revoked_at": 90.0, "granted_at": 91.0, "obeyed_at": 92.0}, (0.0, 1.0), (0.0, 0.0)),
    ],
)
def test_trace_spans_lie_within_their_parent(
    times: Any, root: tuple[float, float], inside: tuple[float, float]
) -> None:
    spans = trace_spans(completed_change(handover(**times)))
    intervals = {name: (start, end) for name, start, end in span_tree(spans)}
    assert (intervals["/rebalance"], intervals["/rebalance/handover"]) == (root, inside)
    for name, (start, end) in intervals.items():
        outer = intervals.get(name.rpartition("/")[0], (start, end))
        assert outer[0] <= start <= end <= outer[1]


def test_trace_ids_are_unique_and_stable_when_sent_again() -> None:
    variants: list[dict[str, Any]] = [{}, {"at": "2026-11-21T08:00:00.001Z", "message": ""}]
    changes = [completed_change(*(handover(number) for number in range(5)), **variant) for variant in variants]
    spans = trace_spans(*changes)
    assert {len(span.trace_id) for span in spans} == {16}
    assert {len(span.span_id) for span in spans} == {8}
    assert len({span.trace_id for span in spans}) == 2
    assert len({span.span_id for span in spans}) == len(spans) == 2 * (1 + 3 * 5)
    assert trace_spans(*changes) == spans
    assert ["rota.message" in attributes(span) for span in spans[:2]] == [True, False]


@pytest.mark.parametrize("at", ["yesterday", "", 7])
def test_trace_of_a_rebalance_without_start_time_is_omitted(at: Any) -> None:
    assert trace_spans(completed_change(at=at), completed_change()) == trace_spans(completed_change())


# Handovers that the tracker collects for a trace.


def a_group(generation: int, owned: Sequence[Queue] = (), free: Sequence[Queue] = ()) -> Assignment:
    """Return a document in which b owns some queues, and a has to release the free ones to b."""
    return Assignment(
        group="shop/orders",
        generation=generation,
        issued_at=AT,
        members={"a": Share("uid-a", () if generation > 1 else QUEUES), "b": Share("uid-b", (*owned,))},
        releasing={queue: Release(A, "b", 2, AT) for queue in free},
    )


def a_plan(**rebalance: Any) -> Plan:
    record = {"kind": "plan", "at": AT, "generation": 2, "message": "b joined"}
    return Plan(
        status={"lastRebalance": {"reason": "MemberJoined", "at": AT, "moved": 0, **rebalance}},
        journal_records=(record,),
    )


QUEUES = tuple(Queue("orders", "broker-a", number) for number in range(MAX_HANDOVERS + 30))


def test_trace_of_many_handovers_has_only_the_slowest() -> None:
    tracker = RebalanceTracker()
    quick, slow = QUEUES[:30], QUEUES[30:]
    tracker.record_plan(Plan(), a_group(1), {}, 99.0)
    assert tracker.record_plan(a_plan(), a_group(2, free=QUEUES), {}, 100.0).completed is None
    assert tracker.record_plan(a_plan(moved=30), a_group(3, quick, slow), {B: 3}, 101.0).completed is None
    completed = tracker.record_plan(a_plan(moved=len(QUEUES), seconds=5.0), a_group(4, QUEUES), {B: 4}, 105.0).completed
    assert completed
    assert {past_handover.queue for past_handover in completed.slowest_handovers} == {*slow}
    assert {past_handover.seconds for past_handover in completed.slowest_handovers} == {5.0}
    root, *children = trace_spans(RebalanceChange(completed=completed))
    root_attributes = attributes(root)
    assert (root_attributes["rota.handovers"], root_attributes["rota.handovers_omitted"]) == (MAX_HANDOVERS + 30, 30)
    assert len(children) == 3 * MAX_HANDOVERS


def test_trace_of_many_handovers_has_also_a_quick_forced_one() -> None:
    tracker = RebalanceTracker()
    forced, *others = QUEUES
    tracker.record_plan(Plan(), a_group(1), {}, 99.0)
    tracker.record_plan(a_plan(), a_group(2, free=QUEUES), {}, 100.0)
    forced_group = replace(a_group(3, [forced], others), forced={forced: 3})
    tracker.record_plan(a_plan(moved=1), forced_group, {B: 3}, 101.0)
    completed = tracker.record_plan(a_plan(moved=len(QUEUES), seconds=5.0), a_group(4, QUEUES), {B: 4}, 105.0).completed
    assert completed
    assert [handover.queue for handover in completed.slowest_handovers if handover.is_forced] == [forced]
    assert len(completed.slowest_handovers) == MAX_HANDOVERS


def test_trace_by_a_new_leader_omits_handovers_it_did_not_see_start() -> None:
    tracker = RebalanceTracker()
    queues = QUEUES[:3]
    plan_in_progress = Plan(status=a_plan().status)
    tracker.record_plan(plan_in_progress, a_group(3, free=queues), {}, 100.0)
    assert tracker.record_plan(plan_in_progress, a_group(4, queues), {}, 101.0).completed is None
    change = tracker.record_plan(Plan(status=a_plan(moved=3, seconds=9.0).status), a_group(4, queues), {B: 4}, 102.0)
    assert change.completed
    assert [span.name for span in trace_spans(change)] == ["rebalance"], "their start is unknown to this leader"


def test_trace_by_a_new_leader_omits_rebalances_that_ended_before() -> None:
    record = {"kind": "plan", "at": "2026-11-21T08:01:00.000Z", "generation": 5, "message": "c joined"}
    # c is in the document, without queues
    ended_plan = Plan(status=a_plan(moved=3, seconds=9.0).status, journal_records=(record,))
    change = RebalanceTracker().record_plan(ended_plan, a_group(5, QUEUES), {B: 4}, 160.0)
    assert (change.ended_rebalance, change.completed) == (None, None)
