"""The judge itself: small logs that break each promise, and ones that break none."""

from dataclasses import replace
from typing import Any

import pytest

from rota.model import Queue
from sidecar.checker import Commit, Delivery, Fact, Sent, Story, violations

Q, OTHER = Queue("orders", "b", 0), Queue("orders", "b", 1)


def d(begin: float, end: float | None, number: int = 0, member: str = "a", **changed: Any) -> Delivery:
    told: dict[str, Any] = {"queue": Q, "offset": number} | changed
    return Delivery(begin, end, member, number=number, **told)


def fact(at: float, kind: str, member: str = "a", generation: int = 0) -> Fact:
    queues = frozenset({Q}) if kind in {"given", "released", "forced", "reset"} else frozenset[Queue]()
    return Fact(at, kind, member, queues, generation)


GIVEN = fact(0, "given")
HANDED_OVER = (GIVEN, fact(5, "released"), fact(5, "given", "b"))
BACK = (fact(7, "released", "b"), fact(7, "given"))
FORCED = (GIVEN, fact(5, "forced"), fact(5, "given", "b"), fact(9, "settled"))


def a_story(*delivered: Delivery, facts: tuple[Fact, ...] = (GIVEN,), **changed: Any) -> Story:
    sent = [Sent(number, Q, 0) for number in sorted({it.number for it in delivered})]
    return Story(**{"sent": sent, "delivered": delivered, "facts": facts} | changed)


BOTH = (GIVEN, Fact(0, "given", "a", frozenset({OTHER})))
NOT_FOUND = (d(1, 2, status=404), d(6, 7, queue=OTHER, attempt=2))

CLEAN = {
    "nothing": Story(),
    "one after another": a_story(d(1, 2), d(2, 3, 1)),
    "side by side": a_story(d(1, 3), d(1, 2, 1), d(1, 4, 2), commits=[Commit(2.5, Q, 0), Commit(5, Q, 3)]),
    "handed over": a_story(d(1, 2), d(6, 7, 1, "b"), facts=HANDED_OVER),
    "one that was not acknowledged": Story(sent=[Sent(0, Q, 0, acked=False)], facts=[GIVEN]),
    "tried again": a_story(
        d(1, 2, status=500), d(3, 4, queue=OTHER, attempt=2), facts=(GIVEN, Fact(0, "given", "a", frozenset({OTHER})))
    ),
    "unanswered, and tried again": a_story(d(1, None), d(40, 41)),
    "unanswered, and given to another one when nobody waits for it any more": a_story(
        d(1, None), d(32, 33, 0, "b"), facts=(GIVEN, fact(31.5, "released"), fact(31.5, "given", "b"))
    ),
    "answered too late": a_story(d(1, 32), d(31, 33, attempt=2)),
    "answered too late, and committed before": a_story(
        d(1, 40), d(33, 34, queue=OTHER, offset=0, attempt=2), facts=BOTH, commits=[Commit(32, Q, 1)]
    ),
    "the app ended some time before its pod": a_story(
        d(1, None, status=None),
        d(6, 7, 0, "b", queue=OTHER, attempt=2),
        facts=(GIVEN, fact(5, "ended"), Fact(5, "given", "b", frozenset({OTHER}))),
        commits=[Commit(4, Q, 1)],
    ),
    "the sidecar was killed before it had committed": a_story(
        d(1, 2), d(4, 5), facts=(GIVEN, fact(3, "sidecar")), commits=[Commit(2.5, Q, 0)]
    ),
    "the sidecar was killed before the app had read the request": a_story(
        d(1, 2), d(4, 5), facts=(GIVEN, fact(0.8, "sidecar")), commits=[Commit(0.7, Q, 0)]
    ),
    "the app stopped with one at it, some time before its pod ended": a_story(
        d(1, None, status=None),
        d(6, 7, 0, "b"),
        facts=(GIVEN, fact(3, "stopped"), fact(5, "released"), fact(5, "given", "b"), fact(9, "ended")),
    ),
    "the app was killed with one at it": a_story(d(1, 2), d(4, 5), facts=(GIVEN, fact(3, "app")), at_once=1),
    "the app died of it, and it came back by the retry topic": a_story(
        d(1, None, status=None),
        d(6, 7, queue=OTHER, attempt=2),
        facts=(GIVEN, Fact(0, "given", "a", frozenset({OTHER})), fact(3, "app")),
        commits=[Commit(4, Q, 1)],
    ),
    "not found, then at an app that died without a note of it": a_story(
        *NOT_FOUND, facts=(*BOTH, fact(3, "app")), commits=[Commit(4, Q, 1)]
    ),
    "the pod ended": a_story(
        d(1, None, status=None), d(6, 7, 0, "b"), facts=(GIVEN, fact(5, "ended"), fact(5, "given", "b"))
    ),
    "forced from one that goes on": a_story(d(4, 7), d(6, 7, 0, "b"), facts=FORCED),
    "overruled before it was committed, and settled before it came again": a_story(
        d(3, 4), d(10, 11, 0, "b"), facts=FORCED, commits=[Commit(2, Q, 0)]
    ),
    "dead letters": a_story(d(1, 2, status=422), commits=[Commit(3, Q, 1)]),
    "one of a batch is dead": a_story(
        d(1, 2, 0, status=422, together=2),
        d(1, 2, 1, status=422, together=2),
        d(3, 4, 0),
        d(3, 4, 1, status=422),
        commits=[Commit(2.5, Q, 0), Commit(5, Q, 2)],
    ),
    "spent attempts": a_story(d(1, 2, status=500), dead=frozenset({0}), commits=[Commit(3, Q, 1)]),
    "reset": a_story(d(1, 2), d(4, 5), facts=(GIVEN, fact(3, "reset")), commits=[Commit(2.5, Q, 1), Commit(3.5, Q, 0)]),
    "the broker was killed and forgot it": a_story(
        d(1, 2), d(6, 7, 0, "b"), facts=(*HANDED_OVER, Fact(4, "broker")), commits=[Commit(3, Q, 1)]
    ),
    "the broker forgot it, and so did who had been asked to end": a_story(
        d(1, 2), d(6, 7), facts=(GIVEN, fact(3, "left"), Fact(4, "broker")), commits=[Commit(2.5, Q, 1)]
    ),
    "the broker forgot it, and so did who had given the queue back, and has it again": a_story(
        d(1, 2), d(8, 9), facts=(*HANDED_OVER, Fact(6, "broker"), *BACK), commits=[Commit(3, Q, 1)]
    ),
    "done by one who was cut off from the broker, and then by another one": a_story(
        d(1, 2),
        d(6, 7, 0, "b"),
        facts=(*HANDED_OVER, fact(0.5, "apart"), fact(8, "together")),
        commits=[Commit(0, Q, 0)],
    ),
    "sent to be tried again by one who died of it": a_story(
        d(1, 2, status=500),
        d(4, 5),
        d(6, 7, queue=OTHER, attempt=2),
        facts=(GIVEN, Fact(0, "given", "a", frozenset({OTHER})), fact(3, "sidecar")),
    ),
    "killed while it was not committed, though its copy was done": a_story(
        d(1, 3, 1, status=None),
        d(4, 5, 1, "b", queue=OTHER, offset=0, attempt=2),
        d(7, 8, 1),
        facts=(GIVEN, Fact(0, "given", "b", frozenset({OTHER})), fact(6, "sidecar")),
        commits=[Commit(3.5, Q, 1)],
    ),
    "its app died of it while it was not committed, though its copy was done": a_story(
        d(1, 3, 1, status=None),
        d(4, 5, 1, "b", queue=OTHER, offset=0, attempt=2),
        d(7, 8, 1),
        facts=(GIVEN, Fact(0, "given", "b", frozenset({OTHER})), fact(2, "app")),
    ),
    "in order": a_story(d(1, 2), d(2, 3, 1, status=500), d(4, 5, 1), d(5, 6, 2), orderly=True),
    "in order, some at a time": a_story(
        d(1, 2, together=2), d(1, 2, 1, together=2), d(2, 3, 2, together=2), d(2, 3, 3, together=2), orderly=True
    ),
    "in order over a crash": a_story(
        d(1, 2), d(2, 3, 1), d(6, 7, 1), d(8, 9, 2), facts=(GIVEN, fact(5, "sidecar")), orderly=True
    ),
    "generations": a_story(
        d(1, 2), d(2, 3, 1, generation=2), facts=(GIVEN, fact(1, "heard", generation=1), fact(2, "heard", generation=2))
    ),
}

BROKEN = {
    "never delivered": (Story(sent=[Sent(0, Q, 0)]), "never delivered"),
    "never done": (a_story(d(1, 2, status=500)), "never done"),
    "died at the app": (a_story(d(1, None, status=None)), "never done"),
    "a duplicate": (a_story(d(1, 2), d(3, 4)), "delivered twice"),
    "a duplicate after a handover": (a_story(d(1, 2), d(6, 7, 0, "b"), facts=HANDED_OVER), "delivered twice"),
    "a duplicate of what was committed": (
        a_story(d(1, 2), d(4, 5), facts=(GIVEN, fact(3, "sidecar")), commits=[Commit(2.5, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate of what one who was overruled had committed": (
        a_story(d(1, 2), d(10, 11, 0, "b"), facts=FORCED, commits=[Commit(4, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate of a queue that was not forced": (
        a_story(
            d(1, 2, queue=OTHER),
            d(10, 11, 0, "a", queue=OTHER),
            facts=(*FORCED, Fact(0, "given", "a", frozenset({OTHER}))),
        ),
        "delivered twice",
    ),
    "a duplicate after the app stopped": (
        a_story(d(1, 2), d(4, 5), facts=(GIVEN, fact(3, "stopped"))),
        "delivered twice",
    ),
    "a duplicate after somebody else was killed": (
        a_story(d(1, 2), d(4, 5), facts=(GIVEN, fact(3, "sidecar", "b"))),
        "delivered twice",
    ),
    "a duplicate at one who had another queue meanwhile": (
        a_story(d(1, 2), d(8, 9), facts=(GIVEN, Fact(6, "broker"), Fact(3, "released", "a", frozenset({OTHER})))),
        "delivered twice",
    ),
    "a duplicate after a queue came back, though no broker died": (
        a_story(d(1, 2), d(8, 9), facts=(*HANDED_OVER, *BACK), commits=[Commit(3, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate at one who saw the broker die": (
        a_story(d(1, 2), d(4, 5), facts=(GIVEN, Fact(3, "broker"))),
        "delivered twice",
    ),
    "a duplicate of one who was asked to end": (
        a_story(d(1, 2), d(6, 7), facts=(GIVEN, fact(3, "left")), commits=[Commit(2.5, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate of what was committed before its member was cut off": (
        a_story(d(1, 2), d(6, 7, 0, "b"), facts=(*HANDED_OVER, fact(4, "apart")), commits=[Commit(3, Q, 1)]),
        "delivered twice",
    ),
    "a duplicate of what was done by one who was cut off no more": (
        a_story(d(1, 2), d(6, 7, 0, "b"), facts=(*HANDED_OVER, fact(0.5, "apart"), fact(0.9, "together"))),
        "delivered twice",
    ),
    "a duplicate of what was committed when its member was cut off no more": (
        a_story(
            *(d(1, 2), d(60, 61, 0, "b")),
            facts=(*HANDED_OVER, fact(0.5, "apart"), fact(2.5, "together")),
            commits=[Commit(3, Q, 1)],
        ),
        "delivered twice",
    ),
    "a duplicate while somebody else was cut off": (
        a_story(d(1, 2), d(6, 7, 0, "b"), facts=(*HANDED_OVER, fact(0.5, "apart", "b"))),
        "delivered twice",
    ),
    "a duplicate of what the broker had kept": (
        a_story(d(1, 2), d(46, 47, 0, "b"), facts=(*HANDED_OVER, Fact(44, "broker"))),
        "delivered twice",
    ),
    "tried again twice": (
        a_story(
            d(1, 2, status=500),
            *(d(at, at + 1, queue=OTHER, offset=at, attempt=2) for at in (4, 6)),
            facts=(GIVEN, Fact(0, "given", "a", frozenset({OTHER})), fact(0.2, "sidecar")),
        ),
        "delivered twice",
    ),
    "again where it lay, though its copy was done and nobody was killed": (
        a_story(
            d(1, 3, 1, status=None),
            d(4, 5, 1, "b", queue=OTHER, offset=0, attempt=2),
            d(7, 8, 1),
            facts=(GIVEN, Fact(0, "given", "b", frozenset({OTHER}))),
        ),
        "delivered twice",
    ),
    "a dead letter again": (a_story(d(1, 2, status=422), d(3, 4)), "delivered twice"),
    "an app's death repeats too much": (
        a_story(d(1, 2), d(1, 2, 1), d(4, 5), d(4, 5, 1), facts=(GIVEN, fact(3, "app")), at_once=1),
        "repeated 2 messages; 1 were in flight",
    ),
    "nobody's queue": (a_story(d(1, 2), facts=()), "without owning it"),
    "before the grant": (a_story(d(1, 2), facts=(fact(1.5, "given"),)), "without owning it"),
    "after the release": (a_story(d(4, 6), facts=HANDED_OVER), "without owning it"),
    "after the dispute": (a_story(d(10, 11), facts=FORCED), "without owning it"),
    "two at a time": (a_story(d(4, 7), d(6, 7, 1, "b"), facts=HANDED_OVER), "two members at a time"),
    "an app that outlives its sidecar": (
        a_story(d(4, None), d(6, 7, 0, "b"), facts=HANDED_OVER),
        "two members at a time",
    ),
    "two at a time in order": (a_story(d(4, 7), d(6, 7, 1, "b"), facts=FORCED, orderly=True), "two members at a time"),
    "again long after its sidecar was killed": (
        a_story(d(2, 3), d(4, 5), facts=(GIVEN, fact(1, "sidecar"))),
        "delivered twice",
    ),
    "past what is at an app that lives": (
        a_story(d(1, None, status=None), d(40, 41), commits=[Commit(4, Q, 1)]),
        "but 0 was not finished",
    ),
    "past what is open": (a_story(d(1, 3), d(1, 2, 1), commits=[Commit(2.5, Q, 2)]), "but 0 was not finished"),
    "past what is at an app that answers others, in a pod that ends later": (
        a_story(
            d(1, None, status=None),
            d(2, 4.5, 1),
            d(6, 7, queue=OTHER, attempt=2),
            facts=(*BOTH, fact(5, "ended")),
            commits=[Commit(4, Q, 1)],
        ),
        "but 0 was not finished",
    ),
    "past what was not found": (
        a_story(d(1, 2, status=404), d(3, 4), commits=[Commit(2.5, Q, 1)]),
        "but 0 was not finished",
    ),
    "past what was not found, before an app died that may have had it": (
        a_story(*NOT_FOUND, facts=(*BOTH, fact(5, "app")), commits=[Commit(4, Q, 1)]),
        "but 0 was not finished",
    ),
    "past what was not found, though the app that died had never had its queue": (
        a_story(*NOT_FOUND, facts=(*BOTH, fact(3, "app", "b")), commits=[Commit(4, Q, 1)]),
        "but 0 was not finished",
    ),
    "past what was not found, of which no copy came": (
        a_story(d(1, 2, status=404), d(6, 7), facts=(GIVEN, fact(3, "app")), commits=[Commit(4, Q, 1)]),
        "but 0 was not finished",
    ),
    "past what begins later": (a_story(d(5, 6), commits=[Commit(2, Q, 1)]), "but 0 was not finished"),
    "past what is tried in place": (
        a_story(d(1, 2, status=500), d(3, 4), commits=[Commit(2.5, Q, 1)], orderly=True),
        "but 0 was not finished",
    ),
    "an offset that goes back": (a_story(d(1, 2), commits=[Commit(3, Q, 1), Commit(4, Q, 0)]), "went back from 1 to 0"),
    "out of order": (a_story(d(1, 2, 1), d(2, 3), orderly=True), "out of order"),
    "out of order in one request": (
        a_story(d(1, 2, 1, together=2), d(1, 2, together=2), orderly=True),
        "out of order within one request",
    ),
    "some at a time, and some before": (
        a_story(d(1, 3, together=2), d(1, 3, 1, together=2), d(2, 4, 2, together=2), orderly=True),
        "out of order: one before was not finished",
    ),
    "one skipped": (a_story(d(1, 2, status=500), d(2, 3, 1), d(4, 5), orderly=True), "out of order"),
    "side by side": (a_story(d(1, 3), d(2, 4, 1), orderly=True), "two messages at a time"),
    "a delivery of before": (a_story(d(1, 2, generation=2), d(3, 4, 1, generation=1)), "went back from generation 2"),
    "a report of before": (
        a_story(facts=(fact(1, "heard", generation=2), fact(2, "heard", generation=1))),
        "reported generation 1 after 2",
    ),
}


@pytest.mark.parametrize("story", CLEAN.values(), ids=CLEAN)
def test_checker_finds_no_violation_in_a_clean_history(story: Story) -> None:
    assert violations(story) == []


@pytest.mark.parametrize(("story", "told"), BROKEN.values(), ids=BROKEN)
def test_checker_names_each_broken_guarantee(story: Story, told: str) -> None:
    assert [it for it in violations(story) if told in it], violations(story)


def test_checker_forced_grant_excuses_neither_lost_messages_nor_unforced_queues() -> None:
    story = a_story(d(6, 7, 0, queue=OTHER), d(6, 7, 0, "b", queue=OTHER), facts=FORCED)
    found = violations(replace(story, sent=[Sent(9, Q, 0)]))
    assert len([it for it in found if "without owning" in it]) == 2
    assert any("9 was sent" in it for it in found)
    assert any("two members at a time" in it for it in found)
