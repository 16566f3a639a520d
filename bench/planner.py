"""The planner on large groups: the cost of one plan when nothing changes, and when a member joins."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from bench.measure import Row, Sample, timed
from rota.documents import Assignment, decode_assignment, encode_assignment
from rota.kube.operator import GC_THRESHOLDS
from rota.model import Queue
from rota.planner import DecodedReport, PodSnapshot, QueueView, Snapshot, plan
from rota.ranges import to_ranges
from rota.reports import Report
from rota.spec import parse_group, parse_policy

NOW = 1_763_712_000.0
LATER = NOW + 60
SPEC = parse_group(
    {"spec": {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": "orders"}]}}
)
POLICY = parse_policy({"spec": {"strategy": "Sticky"}})
SIZES = (100, 300, 1_000, 3_000, 10_000)
TARGETS = {("plan, settled", 1_000): "≤ 50 ms"}


def rows() -> Iterator[Row]:
    """Time the planner and the document from 1,000 to 100,000 queues, ten to a member, and show how each grows."""
    curves: dict[str, dict[int, Sample]] = {}
    for members in SIZES:
        with _operator_gc():
            for what, sample in _samples(members):
                curves.setdefault(what, {})[members] = sample
    for what, curve in curves.items():
        for members, sample in curve.items():
            size = f"{members:,} members, {10 * members:,} queues"
            allowed = 1000 * curve[SIZES[0]].median * _n_log_n(members) / _n_log_n(SIZES[0])
            grown = "" if members == SIZES[0] else f"n log n: ≤ {allowed:,.0f} ms"
            target = ", ".join(filter(None, [TARGETS.get((what, members)), grown]))
            yield Row(f"{what}: {size}", sample, target=target)


@contextmanager
def _operator_gc() -> Iterator[None]:
    """Set the thresholds of garbage collection that `rota operator` sets."""
    defaults = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    yield
    gc.set_threshold(*defaults)


def _samples(members: int) -> Iterator[tuple[str, Sample]]:
    settled, document = _settled(members)
    joined = replace(settled, pods=(*settled.pods, _pod("orders-7d9f-new", 0)))
    (data,) = encode_assignment(document).values()
    for what, work in (
        ("plan, settled", partial(plan, settled, LATER)),
        ("plan, one joins, including its document", partial(plan, joined, LATER)),
        ("on top: the document written", partial(encode_assignment, document)),
        ("on top: the document read", partial(decode_assignment, data)),
    ):
        yield what, timed(work, seconds=1.0)


def _n_log_n(members: int) -> float:
    return 10 * members * math.log(10 * members)


def _settled(members: int) -> tuple[Snapshot, Assignment]:
    """Return a group at rest: every member has obeyed the document and consumes its queues."""
    queues = tuple(Queue("orders", f"broker-{broker}", number) for broker in range(10) for number in range(members))
    pods = tuple(_pod(f"orders-7d9f-{number:05d}", 0) for number in range(members))
    start = Snapshot(
        group="shop/orders",
        spec=SPEC,
        policy=POLICY,
        refetched=True,
        pods=pods,
        views={"orders": QueueView(queues, 1000.0)},
    )
    document = plan(start, NOW).document
    if document is None:
        raise RuntimeError("the first plan writes a document")
    obeying = tuple(_pod(name, document.generation, share.queues) for name, share in document.members.items())
    return replace(start, pods=obeying, document=document), document


def _pod(name: str, generation: int, held: tuple[Queue, ...] = ()) -> PodSnapshot:
    uid = f"uid-{name}"
    report = Report(member=name, uid=uid, generation=generation, held=to_ranges(held), reads=2, incarnation="1")
    return PodSnapshot(
        name=name, uid=uid, ready=True, stable_for=1000.0, age=1000.0, decoded_report=DecodedReport(report)
    )
