"""Tests each rule for the processes of a pod: which one owns queues, which have ended, how long a restart pauses."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from builders import NOW, a_document, a_pod, a_report, a_snapshot
from rota.documents import Assignment, Release, Share
from rota.handover import HolderEvidence
from rota.model import Holder, Queue
from rota.planner import PodSnapshot, plan
from rota.planner.members.incarnations import (
    assigned_queues,
    awaits_end_of_earlier_process,
    consumes_inherited_queues,
    evidence_of,
    has_restarted,
    incarnations_since,
    lacks_incarnation,
    pause_seconds_left,
    pausing_members,
    stopped_members,
)

Q = [Queue("orders", "a", number) for number in range(6)]
SINCE = 3


def document_of(*queues: Queue, incarnation: int = 1, uid: str = "uid-m1", **changed: Any) -> Assignment:
    """Return a document with one share, of m1."""
    fields: dict[str, Any] = {"members": {"m1": Share(uid, queues, incarnation)}, "incarnations_since": SINCE} | changed
    return replace(a_document(), **fields)


def releasing(incarnation: int, *queues: Queue) -> dict[Queue, Release]:
    """Return queues that were revoked from this process of m1."""
    return {queue: Release(Holder("m1", "uid-m1"), "m2", 5, "", incarnation) for queue in queues}


def process(
    incarnation: int | None, generation: int = 5, held: Iterable[Queue] = (), *, name: str = "m1", **changed: Any
) -> PodSnapshot:
    """Return a pod whose process has this number and these queues; None: its sidecar has an earlier version."""
    identity: dict[str, Any] = {} if incarnation is None else {"reads": 2, "incarnation": str(incarnation or "")}
    return a_pod(name, a_report(name, generation, held, **identity), **changed)


EARLIER = document_of(*Q[:3])  # gives queues to process 1


# From which generation on shares name incarnations


@pytest.mark.parametrize(
    ("other_pod", "deleted_uids", "is_named"),
    [
        (a_pod("m2"), (), False),
        (a_pod("m2", started=False), (), True),
        (a_pod("m2", ended=True), (), True),
        (a_pod("m2"), ("uid-m2",), True),
        (process(None, name="m2", started=False), (), True),
        (process(None, name="m2", ended=True), (), True),
        (process(None, name="m2"), ("uid-m2",), True),
        (process(None, name="m2"), (), False),
        (process(0, name="m2"), (), False),
        (process(7, name="m2"), (), True),
    ],
)
def test_restart_document_names_incarnations_if_every_pod_that_runs_has_a_number(
    other_pod: PodSnapshot, deleted_uids: tuple[str, ...], *, is_named: bool
) -> None:
    document = document_of(*Q, incarnation=0, incarnations_since=0)
    snapshot = a_snapshot(pods=(process(1), other_pod), deleted_uids=frozenset(deleted_uids))
    assert incarnations_since(snapshot, document) == (6 if is_named else 0)


def test_restart_document_names_incarnations_only_once_every_holder_is_known_or_ended() -> None:
    shares = {"m1": Share("uid-m1", (Q[0],)), "m2": Share("uid-m2")}
    document = replace(a_document(), members=shares)
    snapshot = a_snapshot(pods=(process(1),))
    assert incarnations_since(snapshot, document) == 6, "m2 owns no queue"
    absent = Release(Holder("m3", "uid-m3"), "m1", 5, "")
    released = replace(document, releasing={Q[1]: absent})
    assert incarnations_since(snapshot, released) == 0, "m3 may still consume a queue"
    assert incarnations_since(replace(snapshot, deleted_uids=frozenset({"uid-m3"})), released) == 6
    ended = a_pod("m3", ended=True)
    assert incarnations_since(replace(snapshot, pods=(process(1), ended)), released) == 6
    unstarted = a_pod("m3", started=False)
    assert incarnations_since(replace(snapshot, pods=(process(1), unstarted)), released) == 0
    assert incarnations_since(replace(snapshot, pods=(process(1), replace(ended, uid="new"))), released) == 0


def test_restart_document_keeps_its_first_generation_with_incarnations() -> None:
    silent = a_pod("m2")
    assert incarnations_since(a_snapshot(pods=(process(1), silent)), EARLIER) == SINCE
    assert incarnations_since(a_snapshot(pods=()), EARLIER) == SINCE
    assert incarnations_since(a_snapshot(pods=()), replace(a_document(), members={})) == 0
    earlier_version = process(None, name="m2")
    assert incarnations_since(a_snapshot(pods=(process(1), earlier_version)), EARLIER) == 0
    assert incarnations_since(a_snapshot(pods=(process(1),), max_schema=1), EARLIER) == 0


# Which process owns queues


@pytest.mark.parametrize(
    ("document", "pod", "expected"),
    [
        (EARLIER, process(2, held=Q[:3]), True),
        (EARLIER, process(2, held=Q[2:3]), True),  # one of three
        (EARLIER, process(2, held=Q[3:]), False),
        (EARLIER, process(2), False),
        (EARLIER, process(1, held=Q[:3]), False),
        (EARLIER, process(0, held=Q[:3]), False),
        (EARLIER, a_pod("m1"), False),
        (document_of(), process(2, held=Q[:3]), False),
        (document_of(*Q[:3], incarnation=0), process(2, held=Q[:3]), False),
        (document_of(*Q[:3], incarnation=2), process(2, held=Q[:3]), False),
        (document_of(*Q[:3], incarnation=2), process(3, held=Q[:3]), True),
        (document_of(*Q[:3], incarnation=3), process(2, held=Q[:3]), False),
        (document_of(*Q[:3], uid="uid-earlier"), process(2, held=Q[:3]), False),
    ],
)
def test_restart_queues_are_inherited_if_a_later_process_consumes_one_of_the_share(
    document: Assignment, pod: PodSnapshot, *, expected: bool
) -> None:
    assert consumes_inherited_queues(document, pod) is expected


@pytest.mark.parametrize(
    ("share_incarnation", "released_by", "incarnation", "active", "expected"),
    [
        (1, 1, 2, Q[3], True),
        (2, 1, 2, Q[3], True),
        (2, 1, 2, Q[0], False),  # its own
        (1, 2, 2, Q[3], False),
        (1, 3, 2, Q[3], False),
        (1, 0, 2, Q[3], False),
        (1, 1, 1, Q[3], False),
        (1, 2, 3, Q[3], True),
        (1, 2, 3, Q[0], True),
        (1, 2, 3, Q[4], False),  # in neither
    ],
)
def test_restart_queues_are_inherited_if_a_later_process_still_drains_a_revoked_one(
    share_incarnation: int, released_by: int, incarnation: int, active: Queue, *, expected: bool
) -> None:
    document = document_of(Q[0], incarnation=share_incarnation, releasing=releasing(released_by, Q[3]))
    pod = a_pod("m1", a_report("m1", 5, draining=[active], reads=2, incarnation=str(incarnation)))
    assert consumes_inherited_queues(document, pod) is expected


def test_restart_of_another_pod_that_released_queues_inherits_nothing() -> None:
    document = document_of(releasing=releasing(1, Q[3]))
    assert consumes_inherited_queues(document, process(2, held=[Q[3]]))
    assert not consumes_inherited_queues(document, process(2, held=[Q[3]], name="m2"))


@pytest.mark.parametrize(
    ("document", "incarnation", "expected"),
    [
        (EARLIER, 2, True),
        (EARLIER, 1, False),
        (EARLIER, 0, False),
        (document_of(*Q[:3], incarnation=2), 1, False),
        (document_of(*Q[:3], incarnation=0), 2, False),
        (document_of(), 2, False),
        (document_of(*Q[:3], uid="uid-earlier"), 2, False),
        (document_of(members={}), 2, False),
    ],
)
def test_restart_is_seen_if_the_share_of_the_same_pod_names_an_earlier_process(
    document: Assignment, incarnation: int, *, expected: bool
) -> None:
    assert has_restarted(document, process(incarnation)) is expected


@pytest.mark.parametrize(
    ("document", "pod", "queues"),
    [
        (EARLIER, process(1), Q[:3]),
        (EARLIER, process(2), []),
        (EARLIER, process(2, held=[Q[0]]), Q[:3]),  # it has inherited them
        (EARLIER, process(0), Q[:3]),
        (EARLIER, a_pod("m1"), Q[:3]),
        (document_of(*Q[:3], incarnation=0), process(2), Q[:3]),
        (document_of(*Q[:3], incarnation=2), process(1), []),
        (document_of(*Q[:3], uid="uid-earlier"), process(1), []),
        (document_of(members={}), process(1), []),
        (document_of(incarnation=0, everyone=tuple(Q)), process(2), Q),
        (document_of(uid="uid-earlier", everyone=tuple(Q)), process(2), []),
    ],
)
def test_assignment_gives_queues_only_to_the_process_that_it_names(
    document: Assignment, pod: PodSnapshot, queues: list[Queue]
) -> None:
    assert list(assigned_queues(document, pod)) == queues


# Which process has ended


def is_ended(pod: PodSnapshot, incarnation: int = 1, document: Assignment = EARLIER) -> bool:
    return evidence_of(document, pod, incarnation).ended


@pytest.mark.parametrize(
    ("generation", "since", "expected"),
    [(3, 3, True), (4, 3, True), (2, 3, False), (5, 0, False), (0, 0, False), (1, 1, True), (0, 1, False)],
)
def test_restart_proves_an_end_only_if_the_pod_has_obeyed_a_document_with_incarnations(
    generation: int, since: int, *, expected: bool
) -> None:
    document = replace(EARLIER, incarnations_since=since)
    assert is_ended(process(2, generation), document=document) is expected, "a later process"
    assert is_ended(process(1, generation, stopped_for=0.0), document=document) is expected, "the process stopped"


@pytest.mark.parametrize(
    ("changed", "is_fresh"),
    [
        ({}, True),
        ({"unreachable_for": 19.9}, True),
        ({"unreachable_for": 20.0}, False),
        ({"rejected_for": 19.9}, True),
        ({"rejected_for": 20.0}, False),
        ({"unreachable_for": 20.0, "rejected_for": 1.0}, False),
        ({"unreachable_for": 1.0, "rejected_for": 20.0}, False),
    ],
)
def test_restart_proves_an_end_only_by_a_report_of_the_last_20_seconds(
    changed: dict[str, Any], *, is_fresh: bool
) -> None:
    assert is_ended(process(2, **changed)) is is_fresh, "a later process"
    assert is_ended(process(1, stopped_for=0.0, **changed)) is is_fresh, "the process stopped"
    assert not is_ended(process(1, **changed)), "it runs"


@pytest.mark.parametrize(("stopped_for", "expected"), [(None, False), (0.0, True), (19.9, True), (20.0, False)])
def test_restart_proves_the_end_of_a_stopped_process_for_20_seconds(
    stopped_for: float | None, *, expected: bool
) -> None:
    assert is_ended(process(1, stopped_for=stopped_for)) is expected


def test_restart_evidence_of_an_ended_pod_needs_no_report() -> None:
    assert is_ended(process(1, generation=0, ended=True, unreachable_for=500.0))
    assert is_ended(process(2, generation=0, ended=True, unreachable_for=500.0))
    assert is_ended(a_pod("m1", ended=True))


def test_restart_evidence_of_the_process_that_reports_is_its_report() -> None:
    pod = process(2, held=Q[:3], ready=False)
    assert evidence_of(EARLIER, pod, 0) == pod.evidence, "the process that runs"
    assert evidence_of(document_of(*Q[:3], incarnation=2), pod, 2) == pod.evidence
    assert evidence_of(EARLIER, pod, 1) == pod.evidence, "it has inherited the queues"
    later = process(2)
    assert evidence_of(EARLIER, later, 1) == replace(later.evidence, ended=True)
    assert not evidence_of(EARLIER, later, 0).ended
    unnumbered = process(0, held=Q[:3])
    assert evidence_of(EARLIER, unnumbered, 1) == unnumbered.evidence
    assert unnumbered.evidence.report


@pytest.mark.parametrize(
    ("pod", "incarnation"),
    [
        (process(2, generation=SINCE - 1, held=Q[3:]), 1),  # the pod may obey a document without incarnations
        (process(2, held=Q[3:], unreachable_for=20.0), 1),
        (process(1, held=Q[3:]), 2),  # the report is of an earlier process, though it is fresh
        (process(2, held=Q[:3]), 3),  # and so it is of a process that has inherited queues of process 1
    ],
)
def test_restart_evidence_of_a_process_ignores_reports_of_other_processes(pod: PodSnapshot, incarnation: int) -> None:
    """Otherwise the queue that the other process does not consume would count as released."""
    evidence = evidence_of(EARLIER, pod, incarnation)
    assert evidence == HolderEvidence(ready=True, unreachable_for=pod.unreachable_for)


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (process(1), False),
        (process(2), False),  # its report proves the end
        (process(2, generation=SINCE - 1), True),
        (process(2, unreachable_for=20.0), True),
        (process(2, generation=SINCE - 1, held=[Q[0]]), False),  # it has inherited the queues
        (a_pod("m2"), False),
    ],
)
def test_restart_is_awaited_until_the_end_of_the_earlier_process_is_proved(pod: PodSnapshot, *, expected: bool) -> None:
    assert awaits_end_of_earlier_process(EARLIER, pod) is expected


@pytest.mark.parametrize(
    ("pod", "since", "expected"),
    [
        (process(0), SINCE, True),
        (process(0), 0, False),
        (process(1), SINCE, False),
        (process(None), SINCE, False),  # an earlier version: the document stops to name incarnations
        (a_pod("m1", a_report("m1", 5, incarnation="1")), SINCE, False),
        (a_pod("m1", a_report("m1", 5, reads=3)), SINCE, True),
        (a_pod("m1"), SINCE, False),
    ],
)
def test_restart_process_without_a_number_gets_no_queues_by_incarnation(
    pod: PodSnapshot, since: int, *, expected: bool
) -> None:
    assert lacks_incarnation(replace(EARLIER, incarnations_since=since), pod) is expected


def test_restart_process_without_a_number_stays_joining() -> None:
    joiner = process(0, name="m2")
    new_plan = plan(a_snapshot(document=document_of(*Q), pods=(process(1, held=Q), joiner)), NOW)
    assert (new_plan.document, new_plan.member_states) == (None, {"m1": "Ready", "m2": "Joining"})


# Which members have to pause


def test_restart_of_more_than_half_of_the_members_moves_no_queue() -> None:
    running = [process(1, name=name) for name in ("m3", "m4")]
    stopped = [process(1, name=name, stopped_for=0.0) for name in ("m1", "m2", "m5")]
    assert stopped_members([*running, *stopped[:2]], EARLIER) == {"m1", "m2"}, "half of them"
    assert not stopped_members([*running, *stopped], EARLIER)
    assert not stopped_members([*running, *stopped[:1]], replace(EARLIER, incarnations_since=0))


EMPTY = document_of(incarnation=2)
LATER = document_of(*Q[:3], incarnation=2)


@pytest.mark.parametrize(
    ("document", "restarts", "pause"),
    [
        (EMPTY, 0, 0.0),
        (EMPTY, 1, 1.0),
        (EMPTY, 2, 10.0),
        (EMPTY, 3, 60.0),
        (EMPTY, 4, 300.0),
        (EMPTY, 5, 300.0),
        (LATER, 4, 0.0),  # the process has queues already
        (EARLIER, 0, 0.0),
        (EARLIER, 1, 0.0),  # a first restart
        (EARLIER, 2, 10.0),
        (document_of(*Q[:3], uid="uid-earlier", incarnation=2), 1, 1.0),
    ],
)
def test_restart_pause_depends_on_the_number_of_restarts_and_on_the_share(
    document: Assignment, restarts: int, pause: float
) -> None:
    def pod_serving(seconds: float, **changed: Any) -> PodSnapshot:
        return process(2, restarts=restarts, serving_for=seconds, **changed)

    assert bool(pausing_members([pod_serving(0.0)], document)) is (pause > 0)
    assert not pausing_members([pod_serving(pause)], document)
    assert pause_seconds_left(pod_serving(0.0), document) == pause
    assert pause_seconds_left(pod_serving(pause + 1.0), document) == 0.0
    if pause:
        assert pausing_members([pod_serving(pause - 0.25)], document) == {"m1"}
        assert pause_seconds_left(pod_serving(pause - 0.25), document) == 0.25
        assert pause_seconds_left(pod_serving(0.0, ready=False), document) == 0.0
        assert pause_seconds_left(pod_serving(0.0, stopped_for=1.0), document) == 0.0
        assert pause_seconds_left(pod_serving(0.0, ready=False, stopped_for=1.0), document) == 0.0


def test_restart_pause_begins_with_the_next_process_and_needs_incarnations() -> None:
    pod = process(2, restarts=3, serving_for=0.0)
    assert pausing_members([pod], EMPTY) == {"m1"}
    assert not pausing_members([replace(pod, stopped_for=0.0)], EMPTY)
    unnumbered = replace(EMPTY, incarnations_since=0)
    assert not pausing_members([pod], unnumbered)
    assert pause_seconds_left(pod, unnumbered) == 0.0
    assert pause_seconds_left(replace(pod, ready=False), unnumbered) == 0.0


def test_restart_pause_of_a_member_is_when_the_next_plan_is_due() -> None:
    shares = {"m1": Share("uid-m1", (), 1), "m2": Share("uid-m2", tuple(Q), 1)}
    pods = (process(2, restarts=2, serving_for=7.5), process(1, held=Q, name="m2"))
    new_plan = plan(a_snapshot(document=document_of(members=shares), pods=pods), NOW)
    assert new_plan.member_states == {"m1": "Restarting", "m2": "Ready"}
    assert new_plan.requeue_after == 2.5
