"""Rebalances as traces: one for each rebalance that is over, with spans for what it took.

    rebalance                from its first document until everybody obeyed
      handover               a queue: from its revoke until its next owner obeyed what grants it
        release              from its revoke until its grant, which follows at once when the owner has released it
        obey                 from its grant until the next owner obeyed it

This needs no library: `span_export` makes OpenTelemetry's spans of it.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from rota.kube.telemetry.rebalances import Handover, Past
from rota.timestamps import parse_time

UNHEARD = "taken from a member that was not heard"

Values = Mapping[str, str | int | float | bool]


class Trace(NamedTuple):
    """A rebalance that is over."""

    namespace: str
    group: str
    begun: float  # the time of day
    past: Past
    clock: float  # the time of day at which the clock that handovers are measured by was 0


class SpanNode(NamedTuple):
    """A span and what lies within it."""

    name: str
    start: float  # the time of day
    end: float
    values: Values
    problem: str = ""  # why its status is Error
    children: tuple["SpanNode", ...] = ()


def trace(key: tuple[str, str], past: Past, clock: float) -> Trace | None:
    """Return the trace of a group's rebalance; None if the status does not say when it began."""
    begun = parse_time(past.rebalance.at)
    return None if begun is None else Trace(*key, begun, past, clock)  # None in a status that a user edited


def trace_id(key: tuple[str, str], at: str, instance: str) -> str:
    """Return the id of the trace of the rebalance that began at a time, exported by an operator's instance.

    It follows from what the rebalance is: a trace that is sent twice, because an answer was lost, has the same id.
    """
    namespace, group = key
    return blake2b(f"{namespace}/{group}/{at}/{instance}".encode(), digest_size=16).hexdigest()


def spans(it: Trace) -> SpanNode:
    """Return the span of a rebalance. No span in it begins before it, or ends before its own start."""
    last, slowest = it.past.rebalance, it.past.slowest
    # What it took is measured as it is planned, and handovers when they are seen to be over, which is a bit later.
    end = max([it.begun + (last.seconds or 0.0), *(it.clock + one.obeyed for one in slowest)])
    children = tuple(_handover(one, it.clock, it.begun) for one in slowest)
    return SpanNode("rebalance", it.begun, end, _of_rebalance(it), UNHEARD if last.forced else "", children)


def _handover(it: Handover, clock: float, begin: float) -> SpanNode:
    revoked, granted, obeyed = (max(clock + at, begin) for at in (it.revoked, it.granted, it.obeyed))
    problem = UNHEARD if it.forced else ""
    values: dict[str, str | int | float | bool] = {
        "rota.queue.topic": it.queue.topic,
        "rota.queue.broker": it.queue.broker,
        "rota.queue.id": it.queue.id,
        "rota.to": it.after.name,
        "rota.forced": it.forced,
    }
    children = [SpanNode("obey", granted, max(granted, obeyed), {"rota.member": it.after.name})]
    if it.before:
        values["rota.from"] = it.before.name
        release: Values = {"rota.member": it.before.name, "rota.forced": it.forced}
        children.insert(0, SpanNode("release", revoked, max(revoked, granted), release, problem))
    return SpanNode("handover", revoked, max(revoked, obeyed), values, problem, tuple(children))


def _of_rebalance(it: Trace) -> Values:
    last = it.past.rebalance
    values: dict[str, str | int | float | None] = {
        "k8s.namespace.name": it.namespace,
        "rota.group": it.group,
        "rota.reason": last.reason,
        "rota.message": last.message or None,
        "rota.generation": last.generation,
        "rota.moved": last.moved,
        "rota.forced": last.forced,
        "rota.seconds": last.seconds,
        "rota.handovers": it.past.handed,
        "rota.handovers_untold": it.past.handed - len(it.past.slowest),
    }
    return {name: value for name, value in values.items() if value is not None}
