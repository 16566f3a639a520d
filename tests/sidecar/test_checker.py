"""The checker itself: small histories that break one guarantee each, and histories that break none."""

from dataclasses import replace
from typing import Any

import pytest

from rota.model import Queue
from sidecar.checker import Commit, Delivery, Fact, FleetHistory, Sent, violations

Q, OTHER = Queue("orders", "b", 0), Queue("orders", "b", 1)


def d(begin: float, end: float | None, number: int = 0, member: str = "a", **changed: Any) -> Delivery:
    fields: dict[str, Any] = {"queue": Q, "offset": number} | changed
    return Delivery(begin, end, member, number=number, **fields)


def fact(at: float, kind: str, member: str = "a", generation: int = 0) -> Fact:
    queues = frozenset({Q}) if kind in {"granted", "released", "forced", "reset"} else frozenset[Queue]()
    return Fact(at, kind, member, queues, generation)


GRANTED = fact(0, "granted")
HANDED_OVER = (GRANTED, fact(5, "released"), fact(5, "granted", "b"))
RETURNED = (fact(7, "released", "b"), fact(7, "granted"))
FORCED = (GRANTED, fact(5, "forced"), fact(5, "granted", "b"), fact(9, "settled"))


def a_history(*delivered: Delivery, facts: tuple[Fact, ...] = (GRANTED,), **changed: Any) -> FleetHistory:
    sent = [Sent(number, Q, 0) for number in sorted({delivery.number for delivery in delivered})]
    return FleetHistory(**{"sent": sent, "delivered": delivered, "facts": facts} | changed)


BOTH = (GRANTED, Fact(0, "granted", "a", frozenset({OTHER})))
NOT_FOUND = (d(1, 2, status=404), d(6, 7, queue=OTHER, attempt=2))

CLEAN = {
    "nothing": FleetHistory(),
    "one after another": a_history(d(1, 2), d(2, 3, 1)),
    "concurrent": a_history(d(1, 3), d(1, 2, 1), d(1, 4, 2), commits=[Commit(2.5, Q, 0), Commit(5, Q, 3)]),
    "handed over": a_history(d(1, 2), d(6, 7, 1, "b"), facts=HANDED_OVER),
    "a message that was not acknowledged": FleetHistory(sent=[Sent(0, Q, 0, acked=False)], facts=[GRANTED]),
    "retried": a_history(
        d(1, 2, status=500),
        d(3, 4, queue=OTHER, attempt=2),
        facts=(GRANTED, Fact(0, "granted", "a", frozenset({OTHER}))),
    ),
    "unanswered, and retried": a_history(d(1, None), d(40, 41)),
    "unanswered, and delivered by another member after the timeout": a_history(
        d(1, None), d(32, 33, 0, "b"), facts=(GRANTED, fact(31.5, "released"), fact(31.5, "granted", "b"))
    ),
    "answered after the timeout": a_history(d(1, 32), d(31, 33, attempt=2)),
    "answered after the timeout, and committed before": a_history(
        d(1, 40), d(33, 34, queue=OTHER, offset=0, attempt=2), facts=BOTH, commits=[Commit(32, Q, 1)]
    ),
    "the app ended some time before its pod": a_history(
        d(1, None, status=None),
        d(6, 7, 0, "b", queue=OTHER, attempt=2),
        facts=(GRANTED, fact(5, "ended"), Fact(5, "granted", "b", frozenset({OTHER}))),
        commits=[Commit(4, Q, 1)],
    ),
    "the sidecar was killed before it had committed": a_history(
        d(1, 2), d(4, 5), facts=(GRANTED, fact(3, "sidecar")), commits=[Commit(2.5, Q, 0)]
    ),
    "the sidecar was killed before the app had read the request": a_history(
        d(1, 2), d(4, 5), facts=(GRANTED, fact(0.8, "sidecar")), commits=[Commit(0.7, Q, 0)]
    ),
    "the app stopped with a message in flight, some time before its pod ended": a_history(
        d(1, None, status=None),
        d(6, 7, 0, "b"),
        facts=(GRANTED, fact(3, "stopped"), fact(5, "released"), fact(5, "granted", "b"), fact(9, "ended")),
    ),
    "the app was killed with a message in flight": a_history(
        d(1, 2), d(4, 5), facts=(GRANTED, fact(3, "app")), max_in_flight=1
    ),
    "the app died at a message, and a copy came from the retry topic": a_history(
        d(1, None, status=None),
        d(6, 7, queue=OTHER, attempt=2),
        facts=(GRANTED, Fact(0, "granted", "a", frozenset({OTHER})), fact(3, "app")),
        commits=[Commit(4, Q, 1)],
    ),
    "not found, then at an app that died before it logged the message": a_history(
        *NOT_FOUND, facts=(*BOTH, fact(3, "app")), commits=[Commit(4, Q, 1)]
    ),
    "the pod ended": a_history(
        d(1, None, status=None), d(6, 7, 0, "b"), facts=(GRANTED, fact(5, "ended"), fact(5, "granted", "b"))
    ),
    "forced grant, and the previous owner goes on": a_history(d(4, 7), d(6, 7, 0, "b"), facts=FORCED),
    "forced grant before the commit, and settled before the repetition": a_history(
        d(3, 4), d(10, 11, 0, "b"), facts=FORCED, commits=[Commit(2, Q, 0)]
    ),
    "dead letters": a_history(d(1, 2, status=422), commits=[Commit(3, Q, 1)]),
    "a message of a batch is rejected for good": a_history(
        d(1, 2, 0, status=422, batch_size=2),
        d(1, 2, 1, status=422, batch_size=2),
        d(3, 4, 0),
        d(3, 4, 1, status=422),
        commits=[Commit(2.5, Q, 0), Commit(5, Q, 2)],
    ),
    "all attempts failed": a_history(d(1, 2, status=500), dead_letters=frozenset({0}), commits=[Commit(3, Q, 1)]),
    "reset": a_history(
        d(1, 2), d(4, 5), facts=(GRANTED, fact(3, "reset")), commits=[Commit(2.5, Q, 1), Commit(3.5, Q, 0)]
    ),
    "the broker was killed and lost the commit": a_history(
        d(1, 2), d(6, 7, 0, "b"), facts=(*HANDED_OVER, Fact(4, "broker")), commits=[Commit(3, Q, 1)]
    ),
    "the broker lost the commit, and the member was terminated": a_history(
        d(1, 2), d(6, 7), facts=(GRANTED, fact(3, "terminated"), Fact(4, "broker")), commits=[Commit(2.5, Q, 1)]
    ),
    "the broker lost the commit, and the member released the queue and owns it again": a_history(
        d(1, 2), d(8, 9), facts=(*HANDED_OVER, Fact(6, "broker"), *RETURNED), commits=[Commit(3, Q, 1)]
    ),
    "done by a member that was disconnected from the broker, then by another member": a_history(
        d(1, 2),
        d(6, 7, 0, "b"),
        facts=(*HANDED_OVER, fact(0.5, "disconnected"), fact(8, "reconnected")),
        commits=[Commit(0, Q, 0)],
    ),
    "sent to the retry topic by a sidecar that died then": a_history(
        d(1, 2, status=500),
        d(4, 5),
        d(6, 7, queue=OTHER, attempt=2),
        facts=(GRANTED, Fact(0, "granted", "a", frozenset({OTHER})), fact(3, "sidecar")),
    ),
    "the sidecar was killed before the commit, though a copy was done": a_history(
        d(1, 3, 1, status=None),
        d(4, 5, 1, "b", queue=OTHER, offset=0, attempt=2),
        d(7, 8, 1),
        facts=(GRANTED, Fact(0, "granted", "b", frozenset({OTHER})), fact(6, "sidecar")),
        commits=[Commit(3.5, Q, 1)],
    ),
    "the app died before the commit, though a copy was done": a_history(
        d(1, 3, 1, status=None),
        d(4, 5, 1, "b", queue=OTHER, offset=0, attempt=2),
        d(7, 8, 1),
        facts=(GRANTED, Fact(0, "granted", "b", frozenset({OTHER})), fact(2, "app")),
    ),
    "in order": a_history(d(1, 2), d(2, 3, 1, status=500), d(4, 5, 1), d(5, 6, 2), orderly=True),
    "in order, in batches": a_history(
        d(1, 2, batch_size=2),
        d(1, 2, 1, batch_size=2),
        d(2, 3, 2, batch_size=2),
        d(2, 3, 3, batch_size=2),
        orderly=True,
    ),
    "in order over a crash": a_history(
        d(1, 2), d(2, 3, 1), d(6, 7, 1), d(8, 9, 2), facts=(GRANTED, fact(5, "sidecar")), orderly=True
    ),
    "generations": a_history(
        d(1, 2),
        d(2, 3, 1, generation=2),
        facts=(GRANTED, fact(1, "reported", generation=1), fact(2, "reported", generation=2)),
    ),
}

BROKEN = {
    "never delivered": (FleetHistory(sent=[Sent(0, Q, 0)]), "never delivered"),
    "never done": (a_history(d(1, 2, status=500)), "never done"),
    "died at the app": (a_history(d(1, None, status=None)), "never done"),
    "a duplicate": (a_history(d(1, 2), d(3, 4)), "delivered twice"),
    "a duplicate after a handover": (a_history(d(1, 2), d(6, 7, 0, "b"), facts=HANDED_OVER), "delivered twice"),
    "a duplicate of a committed message": (
        a_history(d(1, 2), d(4, 5), facts=(GRANTED, fact(3, "sidecar")), commits=[Commit(2.5, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate of a message that was committed before a forced grant": (
        a_history(d(1, 2), d(10, 11, 0, "b"), facts=FORCED, commits=[Commit(4, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate of a queue that was not forced": (
        a_history(
            d(1, 2, queue=OTHER),
            d(10, 11, 0, "a", queue=OTHER),
            facts=(*FORCED, Fact(0, "granted", "a", frozenset({OTHER}))),
        ),
        "delivered twice",
    ),
    "a duplicate after the app stopped": (
        a_history(d(1, 2), d(4, 5), facts=(GRANTED, fact(3, "stopped"))),
        "delivered twice",
    ),
    "a duplicate after another member was killed": (
        a_history(d(1, 2), d(4, 5), facts=(GRANTED, fact(3, "sidecar", "b"))),
        "delivered twice",
    ),
    "a duplicate at a member that released another queue": (
        a_history(d(1, 2), d(8, 9), facts=(GRANTED, Fact(6, "broker"), Fact(3, "released", "a", frozenset({OTHER})))),
        "delivered twice",
    ),
    "a duplicate after a queue was returned, though no broker died": (
        a_history(d(1, 2), d(8, 9), facts=(*HANDED_OVER, *RETURNED), commits=[Commit(3, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate at the same member after the broker died": (
        a_history(d(1, 2), d(4, 5), facts=(GRANTED, Fact(3, "broker"))),
        "delivered twice",
    ),
    "a duplicate of a committed message after the sidecar was terminated": (
        a_history(d(1, 2), d(6, 7), facts=(GRANTED, fact(3, "terminated")), commits=[Commit(2.5, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate of a message that was committed before its member was disconnected": (
        a_history(d(1, 2), d(6, 7, 0, "b"), facts=(*HANDED_OVER, fact(4, "disconnected")), commits=[Commit(3, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate of a message that was done after the member was reconnected": (
        a_history(d(1, 2), d(6, 7, 0, "b"), facts=(*HANDED_OVER, fact(0.5, "disconnected"), fact(0.9, "reconnected"))),
        "delivered twice",
    ),
    "a duplicate of a message that was committed after its member was reconnected": (
        a_history(
            *(d(1, 2), d(60, 61, 0, "b")),
            facts=(*HANDED_OVER, fact(0.5, "disconnected"), fact(2.5, "reconnected")),
            commits=[Commit(3, Q, 1)],
        ),
        "delivered twice",
    ),
    "a duplicate while another member was disconnected": (
        a_history(d(1, 2), d(6, 7, 0, "b"), facts=(*HANDED_OVER, fact(0.5, "disconnected", "b"))),
        "delivered twice",
    ),
    "a duplicate of a commit that the broker had flushed": (
        a_history(d(1, 2), d(46, 47, 0, "b"), facts=(*HANDED_OVER, Fact(44, "broker"))),
        "delivered twice",
    ),
    "retried twice": (
        a_history(
            d(1, 2, status=500),
            *(d(at, at + 1, queue=OTHER, offset=at, attempt=2) for at in (4, 6)),
            facts=(GRANTED, Fact(0, "granted", "a", frozenset({OTHER})), fact(0.2, "sidecar")),
        ),
        "delivered twice",
    ),
    "the original repeated though a copy was done and no process was killed": (
        a_history(
            d(1, 3, 1, status=None),
            d(4, 5, 1, "b", queue=OTHER, offset=0, attempt=2),
            d(7, 8, 1),
            facts=(GRANTED, Fact(0, "granted", "b", frozenset({OTHER}))),
        ),
        "delivered twice",
    ),
    "a dead letter again": (a_history(d(1, 2, status=422), d(3, 4)), "delivered twice"),
    "an app's death repeats too many messages": (
        a_history(d(1, 2), d(1, 2, 1), d(4, 5), d(4, 5, 1), facts=(GRANTED, fact(3, "app")), max_in_flight=1),
        "repeated 2 messages; 1 were in flight",
    ),
    "a queue without an owner": (a_history(d(1, 2), facts=()), "without owning it"),
    "before the grant": (a_history(d(1, 2), facts=(fact(1.5, "granted"),)), "without owning it"),
    "after the release": (a_history(d(4, 6), facts=HANDED_OVER), "without owning it"),
    "after the forced grant was settled": (a_history(d(10, 11), facts=FORCED), "without owning it"),
    "two members at a time": (a_history(d(4, 7), d(6, 7, 1, "b"), facts=HANDED_OVER), "two members at a time"),
    "an app that outlives its sidecar": (
        a_history(d(4, None), d(6, 7, 0, "b"), facts=HANDED_OVER),
        "two members at a time",
    ),
    "two members at a time in an Orderly group": (
        a_history(d(4, 7), d(6, 7, 1, "b"), facts=FORCED, orderly=True),
        "two members at a time",
    ),
    "a duplicate long after the sidecar was killed": (
        a_history(d(2, 3), d(4, 5), facts=(GRANTED, fact(1, "sidecar"))),
        "delivered twice",
    ),
    "past a message that a living app has": (
        a_history(d(1, None, status=None), d(40, 41), commits=[Commit(4, Q, 1)]),
        "but 0 was not finished",
    ),
    "past an open message": (a_history(d(1, 3), d(1, 2, 1), commits=[Commit(2.5, Q, 2)]), "but 0 was not finished"),
    "past a message of an app that finishes another, in a pod that ends later": (
        a_history(
            d(1, None, status=None),
            d(2, 4.5, 1),
            d(6, 7, queue=OTHER, attempt=2),
            facts=(*BOTH, fact(5, "ended")),
            commits=[Commit(4, Q, 1)],
        ),
        "but 0 was not finished",
    ),
    "past a message that was not found": (
        a_history(d(1, 2, status=404), d(3, 4), commits=[Commit(2.5, Q, 1)]),
        "but 0 was not finished",
    ),
    "past a message that was not found, before the death of an app that may have received it": (
        a_history(*NOT_FOUND, facts=(*BOTH, fact(5, "app")), commits=[Commit(4, Q, 1)]),
        "but 0 was not finished",
    ),
    "past a message that was not found, though the app that died never owned the queue": (
        a_history(*NOT_FOUND, facts=(*BOTH, fact(3, "app", "b")), commits=[Commit(4, Q, 1)]),
        "but 0 was not finished",
    ),
    "past a message that was not found, without a copy": (
        a_history(d(1, 2, status=404), d(6, 7), facts=(GRANTED, fact(3, "app")), commits=[Commit(4, Q, 1)]),
        "but 0 was not finished",
    ),
    "past a message that begins later": (a_history(d(5, 6), commits=[Commit(2, Q, 1)]), "but 0 was not finished"),
    "past a message that is retried in place": (
        a_history(d(1, 2, status=500), d(3, 4), commits=[Commit(2.5, Q, 1)], orderly=True),
        "but 0 was not finished",
    ),
    "an offset that goes back": (
        a_history(d(1, 2), commits=[Commit(3, Q, 1), Commit(4, Q, 0)]),
        "went back from 1 to 0",
    ),
    "out of order": (a_history(d(1, 2, 1), d(2, 3), orderly=True), "out of order"),
    "out of order in one request": (
        a_history(d(1, 2, 1, batch_size=2), d(1, 2, batch_size=2), orderly=True),
        "out of order within one request",
    ),
    "a batch before the previous one ended": (
        a_history(d(1, 3, batch_size=2), d(1, 3, 1, batch_size=2), d(2, 4, 2, batch_size=2), orderly=True),
        "out of order: a message before",
    ),
    "a message was skipped": (a_history(d(1, 2, status=500), d(2, 3, 1), d(4, 5), orderly=True), "out of order"),
    "concurrent": (a_history(d(1, 3), d(2, 4, 1), orderly=True), "two messages at a time"),
    "a delivery of an earlier generation": (
        a_history(d(1, 2, generation=2), d(3, 4, 1, generation=1)),
        "went back from generation 2",
    ),
    "a report of an earlier generation": (
        a_history(facts=(fact(1, "reported", generation=2), fact(2, "reported", generation=1))),
        "reported generation 1 after 2",
    ),
}


@pytest.mark.parametrize("history", CLEAN.values(), ids=CLEAN)
def test_checker_finds_no_violation_in_a_clean_history(history: FleetHistory) -> None:
    assert violations(history) == []


@pytest.mark.parametrize(("history", "expected"), BROKEN.values(), ids=BROKEN)
def test_checker_names_each_broken_guarantee(history: FleetHistory, expected: str) -> None:
    assert [sentence for sentence in violations(history) if expected in sentence], violations(history)


def test_checker_forced_grant_excuses_neither_lost_messages_nor_unforced_queues() -> None:
    history = a_history(d(6, 7, 0, queue=OTHER), d(6, 7, 0, "b", queue=OTHER), facts=FORCED)
    sentences = violations(replace(history, sent=[Sent(9, Q, 0)]))
    assert len([sentence for sentence in sentences if "without owning" in sentence]) == 2
    assert any("9 was sent" in sentence for sentence in sentences)
    assert any("two members at a time" in sentence for sentence in sentences)
