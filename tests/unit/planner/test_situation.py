"""Tests the facts that decisions rest on, one by one."""

from dataclasses import replace
from typing import Any

import pytest

from builders import NOW, a_document, a_pod, a_report, a_situation
from rota.documents import Assignment, Release, Share
from rota.model import Holder, Queue
from rota.planner import PodSnapshot, Snapshot
from rota.planner.members.member_states import MemberState
from rota.planner.situation import Situation

Q = [Queue("orders", "a", number) for number in range(6)]
M1, M2, M3 = (Holder(name, f"uid-{name}") for name in ("m1", "m2", "m3"))
SINCE = 3


def process(incarnation: int, name: str = "m1", **changed: Any) -> PodSnapshot:
    """Return a pod whose process has this number."""
    held = changed.pop("held", ())
    return a_pod(name, a_report(name, 5, held, reads=2, incarnation=str(incarnation or "")), **changed)


def document_of(share: Share | None, **changed: Any) -> Assignment:
    """Return a document with incarnations, and with this share of m1."""
    fields: dict[str, Any] = {"members": {"m1": share} if share else {}, "incarnations_since": SINCE} | changed
    return replace(a_document(), **fields)


@pytest.mark.parametrize(
    ("pod", "state", "share", "expected"),
    [
        # A member that counts: the process that reports, whatever the document names.
        (process(4), "Ready", Share("uid-m1", (), 2), 4),
        (process(4), "Ready", None, 4),
        # A member that does not count keeps its process in the document, unless a later one has inherited its queues.
        (process(4), "Out", Share("uid-m1", (Q[0],), 2), 2),
        (process(4, held=[Q[0]]), "Out", Share("uid-m1", (Q[0],), 2), 4),
        (process(4), "Out", Share("uid-m1", (), 0), 4),
        (process(4), "Out", None, 4),
        (process(4), "Out", Share("uid-earlier", (), 2), 4),
        # A pod without a number, or without a report.
        (process(0), "Ready", Share("uid-m1", (), 2), 2),
        (process(0), "Ready", Share("uid-m1", (), 0), 0),
        (a_pod("m1"), "Ready", Share("uid-m1", (), 2), 2),
        (a_pod("m1"), "Ready", None, 0),
        # No pod, or only one of the same name.
        (None, "Ended", Share("uid-m1", (), 2), 2),
        (None, "Ended", Share("uid-m1", (), 0), 0),
        (None, "Ended", Share("uid-earlier", (), 2), 0),
        (None, "Ended", None, 0),
        (process(4, uid="uid-later"), "Ready", Share("uid-m1", (), 2), 2),
        (process(4, uid="uid-later"), "Ready", Share("uid-m1", (), 0), 0),
        (process(4, uid="uid-later"), "Ready", Share("uid-later", (), 2), 0),
        (process(4, uid="uid-later"), "Ready", None, 0),
    ],
)
def test_assignment_names_the_process_that_may_consume_the_queues_of_a_pod(
    pod: PodSnapshot | None, state: str, share: Share | None, expected: int
) -> None:
    document = document_of(share)
    pods = [pod] if pod else []
    situation = a_situation(*pods, document=document, states={"m1": MemberState(state)})
    assert situation.incarnation_of(M1) == expected
    earlier_version = a_pod("m9", a_report("m9", 5))  # it cannot read incarnations
    situation = a_situation(*pods, earlier_version, document=document, states={"m1": MemberState(state)})
    assert situation.incarnation_of(M1) == 0


def test_member_counts_if_its_state_does() -> None:
    situation = a_situation(a_pod("m1"), a_pod("m2"), a_pod("m3"), states={"m2": MemberState.OUT})
    assert [situation.is_counted(name) for name in ("m1", "m2", "m3", "m4")] == [True, False, True, False]
    assert situation.counted_members == ["m1", "m3"]


# Queues without a consumer


def unowned(document: Assignment, *pods: PodSnapshot, **changed: Any) -> list[int]:
    return [queue.id for queue in a_situation(*pods, document=document, **changed).unowned_queues(document)]


OWNED = document_of(Share("uid-m1", tuple(Q)), incarnations_since=0)


def test_queue_of_an_ended_pod_is_unowned_until_a_pod_with_this_uid_counts() -> None:
    deleted = {"deleted_uids": frozenset({"uid-m1"})}
    assert unowned(OWNED, a_pod("m1", a_report("m1", 5, Q))) == []
    assert unowned(OWNED, **deleted) == [0, 1, 2, 3, 4, 5]
    assert unowned(OWNED, a_pod("m1", uid="uid-later"), **deleted) == [0, 1, 2, 3, 4, 5], "a pod of the same name"
    ended = {"m1": MemberState.ENDED}
    assert unowned(OWNED, a_pod("m1", a_report("m1", 5, Q)), states=ended, **deleted) == [0, 1, 2, 3, 4, 5], (
        "still seen"
    )
    assert unowned(OWNED, a_pod("m1", a_report("m1", 5, Q), ended=True), states=ended) == [0, 1, 2, 3, 4, 5]
    restarted = document_of(Share("uid-m1", tuple(Q), 1))
    assert unowned(restarted, process(2)) == [], "its next process takes the queues up"
    assert unowned(restarted, process(2), states={"m1": MemberState.RESTARTING}) == [0, 1, 2, 3, 4, 5]
    stopped = process(1, stopped_for=1.0)
    assert unowned(restarted, stopped, states={"m1": MemberState.RESTARTING}) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("generation", [0, 1, 5])
def test_queue_is_unowned_if_its_member_was_asked_to_drain_and_does_not_end(generation: int) -> None:
    draining = a_report("m1", generation, Q[:2], draining=[Q[2]], state="draining")
    assert unowned(OWNED, a_pod("m1", draining)) == [3, 4, 5]
    assert unowned(OWNED, a_pod("m1", draining, terminating=True)) == []
    assert unowned(OWNED, a_pod("m1", a_report("m1", generation, state="drained", final=True))) == []
    assert unowned(OWNED, a_pod("m1", a_report("m1", generation, Q[:2]))) == [], "it begins with the others soon"
    assert unowned(OWNED, a_pod("m1", a_report("m8", generation, state="drained"))) == [], "not its report"


def test_queue_is_unowned_by_a_new_document_if_no_share_has_it() -> None:
    pod = a_pod("m1", a_report("m1", 5, Q))
    situation: Situation = a_situation(pod, document=OWNED)
    taken = {Q[5]: Release(M1, "m2", 6, "")}
    successor = replace(OWNED, members={"m1": Share("uid-m1", tuple(Q[:3]))}, releasing=taken)
    assert situation.unowned_queues(OWNED) == []
    assert situation.unowned_queues(successor) == Q[3:5]
    snapshot: Snapshot = situation.snapshot
    assert Situation(snapshot, {"m1": MemberState.READY}, successor, NOW).unowned_queues(successor) == Q[3:5]


def test_membership_of_a_holder_that_a_pod_of_the_same_name_replaced_has_no_state() -> None:
    document = document_of(Share("uid-m1", tuple(Q)), incarnations_since=0)
    assert a_situation(a_pod("m1"), document=document).holder_names_by_state == {MemberState.READY: ["m1"]}
    assert a_situation(a_pod("m1", uid="uid-later"), document=document).holder_names_by_state == {None: ["m1"]}
