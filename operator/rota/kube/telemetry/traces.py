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

UNHEARD = "taken from a member that was not heard"

Values = Mapping[str, str | int | float | bool]


class Trace(NamedTuple):
    """A completed rebalance of a group."""

    namespace: str
    group: str
    begun: float  # the time of day
    past: CompletedRebalance
    clock: float  # the time of day at which the event loop's clock, which handovers use, was 0


class SpanNode(NamedTuple):
    """A span with its child spans."""

    name: str
    start: float  # the time of day
    end: float
    values: Values
    problem: str = ""  # the description of status Error; empty: no error
    children: tuple["SpanNode", ...] = ()


def trace(key: tuple[str, str], past: CompletedRebalance, clock: float) -> Trace | None:
    """Return the trace of a group's rebalance; None if the status does not say when it began."""
    begun = parse_time(past.rebalance.at)
    return None if begun is None else Trace(*key, begun, past, clock)  # a user may have edited the status


def trace_id(key: tuple[str, str], at: str, instance: str) -> str:
    """Return the trace id of the rebalance that began at `at`, as exported by an instance of the operator.

    The id is derived from the rebalance: a trace that is sent twice, because a response was lost, has the same id.
    """
    namespace, group = key
    return blake2b(f"{namespace}/{group}/{at}/{instance}".encode(), digest_size=16).hexdigest()


def spans(trace: Trace) -> SpanNode:
    """Return the root span of a rebalance. No child starts before the root, and no span ends before its start."""
    last, slowest = trace.past.rebalance, trace.past.slowest
    # The planner measures the rebalance's duration; its last handovers are seen to complete a bit later.
    end = max([trace.begun + (last.seconds or 0.0), *(trace.clock + handover.obeyed for handover in slowest)])
    children = tuple(_handover(handover, trace.clock, trace.begun) for handover in slowest)
    return SpanNode("rebalance", trace.begun, end, _of_rebalance(trace), UNHEARD if last.forced else "", children)


def _handover(handover: QueueHandover, clock: float, begin: float) -> SpanNode:
    revoked, granted, obeyed = (max(clock + at, begin) for at in (handover.revoked, handover.granted, handover.obeyed))
    problem = UNHEARD if handover.forced else ""
    values: dict[str, str | int | float | bool] = {
        "rota.queue.topic": handover.queue.topic,
        "rota.queue.broker": handover.queue.broker,
        "rota.queue.id": handover.queue.id,
        "rota.to": handover.after.name,
        "rota.forced": handover.forced,
    }
    children = [SpanNode("obey", granted, max(granted, obeyed), {"rota.member": handover.after.name})]
    if handover.before:
        values["rota.from"] = handover.before.name
        release: Values = {"rota.member": handover.before.name, "rota.forced": handover.forced}
        children.insert(0, SpanNode("release", revoked, max(revoked, granted), release, problem))
    return SpanNode("handover", revoked, max(revoked, obeyed), values, problem, tuple(children))


def _of_rebalance(trace: Trace) -> Values:
    last = trace.past.rebalance
    values: dict[str, str | int | float | None] = {
        "k8s.namespace.name": trace.namespace,
        "rota.group": trace.group,
        "rota.reason": last.reason,
        "rota.message": last.message or None,
        "rota.generation": last.generation,
        "rota.moved": last.moved,
        "rota.forced": last.forced,
        "rota.seconds": last.seconds,
        "rota.handovers": trace.past.handed,
        "rota.handovers_untold": trace.past.handed - len(trace.past.slowest),
    }
    return {name: value for name, value in values.items() if value is not None}
