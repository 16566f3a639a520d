"""Rebalances as OpenTelemetry's traces: one for each that is over, as the JSON that OTLP receivers take.

    rebalance                from its first document until everybody obeyed
      handover               a queue: from its revoke until its next owner obeyed what grants it
        release              from its revoke until its grant, which follows at once when the owner has released it
        obey                 from its grant until the next owner obeyed it

Ids are made of what a rebalance is, not by chance: what is sent twice, because an answer was lost, is one trace.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from rota.kube.telemetry.rebalances import Handover, Past
from rota.timestamps import parse_time

INTERNAL = 1  # a span's kind: nobody was asked anything
ERROR = 2  # a span's status
UNHEARD = "taken from a member that was not heard"

Value = str | int | float | bool | None
Values = Mapping[str, Value]


class Trace(NamedTuple):
    """A rebalance that is over."""

    namespace: str
    group: str
    begun: float  # the time of day
    past: Past
    clock: float  # the time of day at which the clock that handovers are measured by was 0


def trace(key: tuple[str, str], past: Past, clock: float) -> Trace | None:
    """Return what there is to tell of a group; nothing, if nobody knows when it was."""
    begun = parse_time(past.rebalance.at)
    return None if begun is None else Trace(*key, begun, past, clock)  # None in a status that a user edited


def trace_id(key: tuple[str, str], at: str, instance: str) -> str:
    """Return the id of the trace of the rebalance that began at a time, by the operator that is called `instance`."""
    namespace, group = key
    return blake2b(f"{namespace}/{group}/{at}/{instance}".encode(), digest_size=16).hexdigest()


def request(traces: Sequence[Trace], resource: Mapping[str, str]) -> dict[str, Any]:
    """Return an ExportTraceServiceRequest; `resource` says who we are."""
    scope = {"name": "rota", "version": resource.get("service.version", "")}
    spans = [span for it in traces for span in _spans(it, resource.get("service.instance.id", ""))]
    told = {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
    return {"resourceSpans": [told]}


class _Spans(NamedTuple):
    """Makes spans of one trace, numbered."""

    trace: str
    begin: float  # no span begins before the first one

    def span(self, number: int, parent: int | None, name: str, times: tuple[float, float], values: Values) -> Any:
        """Make one."""
        start = max(times[0], self.begin)
        told = {
            "traceId": self.trace,
            "spanId": self._id(number),
            "name": name,
            "kind": INTERNAL,
            "startTimeUnixNano": _nanos(start),
            "endTimeUnixNano": _nanos(max(times[1], start)),
            "attributes": _attributes(values),
        }
        told |= {} if parent is None else {"parentSpanId": self._id(parent)}
        return told | ({"status": {"code": ERROR, "message": UNHEARD}} if values.get("rota.forced") else {})

    def _id(self, number: int) -> str:
        return blake2b(f"{self.trace} {number}".encode(), digest_size=8).hexdigest()


def _spans(it: Trace, instance: str) -> Iterator[dict[str, Any]]:
    last = it.past.rebalance
    # What it took is measured as it is planned, and handovers when they are seen to be over, which is a bit later.
    end = max([it.begun + (last.seconds or 0.0), *(it.clock + one.obeyed for one in it.past.slowest)])
    spans = _Spans(trace_id((it.namespace, it.group), last.at, instance), it.begun)
    yield spans.span(0, None, "rebalance", (it.begun, end), _of_rebalance(it))
    for number, one in enumerate(it.past.slowest):
        yield from _of_handover(spans, 1 + 3 * number, one, it.clock)


def _of_handover(spans: _Spans, number: int, it: Handover, clock: float) -> Iterator[dict[str, Any]]:
    revoked, granted, obeyed = (clock + at for at in (it.revoked, it.granted, it.obeyed))
    values: dict[str, Value] = {
        "rota.queue.topic": it.queue.topic,
        "rota.queue.broker": it.queue.broker,
        "rota.queue.id": it.queue.id,
        "rota.from": it.before.name if it.before else None,
        "rota.to": it.after.name,
        "rota.forced": it.forced,
    }
    yield spans.span(number, 0, "handover", (revoked, obeyed), values)
    if it.before:
        values = {"rota.member": it.before.name, "rota.forced": it.forced}
        yield spans.span(number + 1, number, "release", (revoked, granted), values)
    yield spans.span(number + 2, number, "obey", (granted, obeyed), {"rota.member": it.after.name})


def _of_rebalance(it: Trace) -> Values:
    last = it.past.rebalance
    return {
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


def _nanos(at: float) -> str:
    """Write a time as the mapping wants numbers of 64 bits; a double holds some 200 ns of it."""
    return str(max(round(at * 1e6), 0) * 1000)


def _attributes(values: Values) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: str | float | bool) -> dict[str, Any]:  # noqa: FBT001 - a value
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}
