"""Traces of rebalances: one trace for each completed rebalance, as plain values.

    rebalance                from its first document until every member obeyed the last one
      handover               of one queue: from its revoke until its next owner obeyed the document that grants it
        release              from the revoke until the grant, which follows at once when the holder has released it
        obey                 from the grant until the next owner obeyed it

`span_export` converts these values to OpenTelemetry's spans.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from rota.kube.telemetry.rebalances import CompletedRebalance, QueueHandover
from rota.timestamps import parse_time

FORCED_MESSAGE = "forced: the previous owner did not respond"

SpanAttributes = Mapping[str, str | int | float | bool]


class Trace(NamedTuple):
    """A completed rebalance of a group."""

    namespace: str
    group: str
    started_at: float  # the time of day
    completed: CompletedRebalance
    clock_origin: float  # the time of day at which the event loop's clock, which handovers use, was 0


class SpanNode(NamedTuple):
    """A span with its child spans."""

    name: str
    start: float  # the time of day
    end: float
    attributes: SpanAttributes
    error: str = ""  # the description of status Error; empty: no error
    children: tuple["SpanNode", ...] = ()


def build_trace(key: tuple[str, str], completed: CompletedRebalance, clock_origin: float) -> Trace | None:
    """Return the trace of a group's rebalance; None if the status does not say when it began."""
    begun = parse_time(completed.rebalance.at)
    return None if begun is None else Trace(*key, begun, completed, clock_origin)  # a user may have edited the status


def trace_id(key: tuple[str, str], at: str, instance: str) -> str:
    """Return the trace id of the rebalance that began at `at`, as exported by an instance of the operator.

    The id is derived from the rebalance: a trace that is sent twice, because a response was lost, has the same id.
    """
    namespace, group = key
    return blake2b(f"{namespace}/{group}/{at}/{instance}".encode(), digest_size=16).hexdigest()


def build_spans(trace: Trace) -> SpanNode:
    """Return the root span of a rebalance. No child starts before the root, and no span ends before its start."""
    last = trace.completed.rebalance
    slowest = trace.completed.slowest_handovers
    # The planner measures the rebalance's duration; its last handovers are seen to complete a bit later.
    end = max(
        [trace.started_at + (last.seconds or 0.0), *(trace.clock_origin + handover.obeyed_at for handover in slowest)]
    )
    children = tuple(_handover_span(handover, trace.clock_origin, trace.started_at) for handover in slowest)
    return SpanNode(
        "rebalance",
        trace.started_at,
        end,
        _rebalance_attributes(trace),
        FORCED_MESSAGE if last.forced else "",
        children,
    )


def _handover_span(handover: QueueHandover, clock_origin: float, trace_start: float) -> SpanNode:
    revoked, granted, obeyed = (
        max(clock_origin + at, trace_start) for at in (handover.revoked_at, handover.granted_at, handover.obeyed_at)
    )
    problem = FORCED_MESSAGE if handover.is_forced else ""
    values: dict[str, str | int | float | bool] = {
        "rota.queue.topic": handover.queue.topic,
        "rota.queue.broker": handover.queue.broker,
        "rota.queue.id": handover.queue.id,
        "rota.to": handover.next_owner.name,
        "rota.forced": handover.is_forced,
    }
    children = [SpanNode("obey", granted, max(granted, obeyed), {"rota.member": handover.next_owner.name})]
    if handover.previous_owner:
        values["rota.from"] = handover.previous_owner.name
        release: SpanAttributes = {"rota.member": handover.previous_owner.name, "rota.forced": handover.is_forced}
        children.insert(0, SpanNode("release", revoked, max(revoked, granted), release, problem))
    return SpanNode("handover", revoked, max(revoked, obeyed), values, problem, tuple(children))


def _rebalance_attributes(trace: Trace) -> SpanAttributes:
    last = trace.completed.rebalance
    values: dict[str, str | int | float | None] = {
        "k8s.namespace.name": trace.namespace,
        "rota.group": trace.group,
        "rota.reason": last.reason,
        "rota.message": last.message or None,
        "rota.generation": last.generation,
        "rota.moved": last.moved,
        "rota.forced": last.forced,
        "rota.seconds": last.seconds,
        "rota.handovers": trace.completed.handover_count,
        "rota.handovers_omitted": trace.completed.handover_count - len(trace.completed.slowest_handovers),
    }
    return {name: value for name, value in values.items() if value is not None}
