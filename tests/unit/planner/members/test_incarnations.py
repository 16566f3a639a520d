"""Restarts: an ended process gives its queues to others at once, and none is believed to have ended too early."""

from dataclasses import replace
from typing import Any

import pytest

from builders import BEGUN, GROUP, NOW, a_document, a_pod, a_report, a_snapshot, a_spec
from rota.documents import Assignment, Release, Share
from rota.handover import MAX_KUBELET_SYNC_SECONDS, Proof
from rota.kube.members.report_client import STANDING_POLL_SECONDS
from rota.model import Holder, Queue, Reason
from rota.planner import Plan, PodSnapshot, Snapshot, plan
from rota.planner.members.incarnations import MAX_REPORT_AGE_SECONDS
from rota.planner.pokes import pods_behind
from rota.planner.record import holders_of
from rota.sidecar.member.member import RESUME_SECONDS
from rota.timestamps import format_time

Q = [Queue("orders", "a", number) for number in range(6)]
SINCE = 3
SHARES = {"m1": Share("uid-m1", tuple(Q[:3]), 1), "m2": Share("uid-m2", tuple(Q[3:]), 1)}
DOCUMENT = replace(a_document(), members=SHARES, incarnations_since=SINCE)


def report(name: str, incarnation: int = 1, **changed: Any) -> Any:
    fields: dict[str, Any] = {"generation": 5, "reads": 2, "incarnation": str(incarnation or ""), "held": ()} | changed
    return a_report(name, fields.pop("generation"), **fields)


def running(name: str, incarnation: int = 1, **changed: Any) -> PodSnapshot:
    """Return a pod whose process works what the document gives it."""
    said = report(name, incarnation, held=SHARES[name].queues)
    return a_pod(name, **({"report": said} | changed))


def waiting(name: str, incarnation: int = 2, *, generation: int = 5, **changed: Any) -> PodSnapshot:
    """Return a pod whose next process is heard, and consumes nothing yet."""
    return a_pod(name, **({"report": report(name, incarnation, generation=generation), "restarts": 1} | changed))


def settled(*pods: PodSnapshot, document: Assignment | None = DOCUMENT, **changed: Any) -> Snapshot:
    return a_snapshot(document=document, pods=pods, **changed)


def shares(found: Plan) -> dict[str, tuple[int, list[int]]]:
    """Return the incarnation and the queues of each member in the document that was planned."""
    assert found.document
    return {name: (it.incarnation, [q.id for q in it.queues]) for name, it in found.document.members.items()}


def restarted_reason(found: Plan) -> Reason:
    [line] = [line for line in found.journal_records if line["kind"] == "plan"]
    return Reason(line["reason"])


def test_restart_document_names_incarnations_once_every_member_reads_them() -> None:
    old = a_document(members={"m1": Q[:3], "m2": Q[3:]})
    found = plan(settled(running("m1", 4), running("m2"), document=old), NOW)
    assert found.document
    assert (found.document.schema, found.document.incarnations_since) == (2, 6)
    assert shares(found) == {"m1": (4, [0, 1, 2]), "m2": (1, [3, 4, 5])}
    unheard = a_pod("m2")
    earlier = a_pod("m2", a_report("m2", 5, Q[3:], incarnation="d1f0"))
    for other in (unheard, earlier, replace(running("m2"), decoded_report=None)):
        assert plan(settled(running("m1"), other, document=old), NOW).document is None
    for other in (running("m2"), a_pod("m3", report("m3", 0))):  # the process of m3 could not note its start
        found = plan(settled(running("m1"), other, document=a_document(members={"m1": Q})), NOW)
        assert (found.document and found.document.schema) == (2 if other.incarnation else 1)


def test_restart_document_waits_for_holders_that_are_not_there() -> None:
    old = a_document(members={"m1": Q[:3], "m2": Q[3:]})
    found = plan(settled(running("m1"), document=old), NOW)
    assert found.document
    assert found.document.schema == 1
    found = plan(settled(running("m1"), document=old, deleted_uids=frozenset({"uid-m2"})), NOW)
    assert found.document
    assert found.document.schema == 2


def test_restart_document_goes_back_to_schema_1_for_a_member_of_an_earlier_version() -> None:
    earlier = a_pod("m3", a_report("m3", 0))
    found = plan(settled(running("m1"), running("m2"), earlier), NOW)
    assert found.document
    assert (found.document.schema, {it.incarnation for it in found.document.members.values()}) == (1, {0})
    taken = {Q[0]: Release(Holder("m1", "uid-m1"), "m2", 5, format_time(NOW), 1)}
    moving = replace(DOCUMENT, members=SHARES | {"m1": Share("uid-m1", (Q[1], Q[2]), 1)}, releasing=taken)
    found = plan(settled(running("m1"), running("m2"), earlier, document=moving), NOW)
    assert found.document
    assert [release.incarnation for release in found.document.releasing.values()] == [0]


def test_restart_document_of_schema_1_is_written_where_the_operator_is_told_so() -> None:
    found = plan(settled(running("m1"), running("m2"), max_schema=1), NOW)
    assert found.document
    assert found.document.schema == 1


def test_restart_gives_queues_of_an_ended_process_to_others_at_once() -> None:
    found = plan(settled(running("m1", stopped_for=0.0), running("m2")), NOW)
    assert shares(found) == {"m1": (1, []), "m2": (1, [0, 1, 2, 3, 4, 5])}
    assert restarted_reason(found) is Reason.MEMBER_RESTARTED
    [line] = [line for line in found.journal_records if line["kind"] == "handover"]
    assert (line["act"], line["proof"]) == ("Grant", Proof.ENDED)


@pytest.mark.parametrize(
    "pod",
    [
        running("m1", stopped_for=MAX_REPORT_AGE_SECONDS),
        running("m1", stopped_for=0.0, report=report("m1", held=SHARES["m1"].queues, generation=SINCE - 1)),
        running("m1", stopped_for=0.0, report=a_report("m1", 5, Q[:3], reads=2)),
        running("m1"),
    ],
    ids=["old news", "before incarnations", "without a number", "running"],
)
def test_restart_grants_nothing_without_proof_that_the_process_ended(pod: PodSnapshot) -> None:
    found = plan(settled(pod, running("m2")), NOW)
    assert found.document is None or not {*Q[:3]} & {*found.document.members["m2"].queues}


def test_restart_proved_by_a_later_process_gives_its_queues_back_to_the_pod() -> None:
    found = plan(settled(waiting("m1"), running("m2")), NOW)
    assert shares(found) == {"m1": (2, [0, 1, 2]), "m2": (1, [3, 4, 5])}
    assert restarted_reason(found) is Reason.MEMBER_RESTARTED


@pytest.mark.parametrize(
    "changed",
    [{"generation": SINCE - 1}, {"unreachable_for": MAX_REPORT_AGE_SECONDS}, {"rejected_for": MAX_REPORT_AGE_SECONDS}],
    ids=str,
)
def test_restart_of_a_process_that_may_obey_an_earlier_document_is_waited_for(changed: dict[str, Any]) -> None:
    pod = waiting("m1", **changed)
    found = plan(settled(pod, running("m2")), NOW)
    assert found.member_states["m1"] == "Joining"
    assert not found.document or not found.document.members["m2"].queues[3:]
    assert "m1" in found.members_to_poll


def test_restart_incarnation_stays_in_the_document_while_a_new_leader_has_not_heard_the_member() -> None:
    """A document that named none could be consumed by the next process, too."""
    unheard = a_pod("m1")
    joiner = a_pod("m3", report("m3"))
    found = plan(settled(unheard, running("m2"), joiner), NOW)
    assert found.document
    assert found.document.schema == 2
    assert all(it.incarnation for it in found.document.members.values() if it.queues)
    assert found.document.members["m1"].queues


def test_restart_of_members_that_took_up_queues_again_moves_none_of_them() -> None:
    """Otherwise the first of a fleet that is past its pause would get all queues of the others."""
    pods = [running(name, restarts=2, serving_for=serving) for name, serving in (("m1", 10.0), ("m2", 9.0))]
    found = plan(settled(*pods), NOW)
    assert (found.document, set(found.member_states.values())) == (None, {"Ready"})


def test_restart_process_that_resumed_by_itself_keeps_its_queues() -> None:
    resumed = a_pod("m1", report("m1", 2, held=Q[:3]))
    found = plan(settled(resumed, running("m2")), NOW)
    assert shares(found) == {"m1": (2, [0, 1, 2]), "m2": (1, [3, 4, 5])}
    moving = replace(
        DOCUMENT,
        members=SHARES | {"m1": Share("uid-m1", (), 1)},
        releasing={queue: Release(Holder("m1", "uid-m1"), "m2", 5, format_time(NOW), 1) for queue in Q[:3]},
    )
    draining = a_pod("m1", report("m1", 2, draining=Q[:3]))
    assert plan(settled(draining, running("m2"), document=moving), NOW).document is None
    released = a_pod("m1", report("m1", 2))
    assert shares(plan(settled(released, running("m2"), document=moving), NOW))["m2"] == (1, [0, 1, 2])


@pytest.mark.parametrize(
    ("restarts", "serving", "counts"),
    [
        (restarts, pause + late, late >= 0)
        for restarts, pause in ((1, 1.0), (2, 10.0), (3, 60.0), (4, 300.0), (40, 300.0))
        for late in (-0.1, 0.0)
    ],
)
def test_restart_brings_queues_back_after_a_pause_that_grows(
    restarts: int,
    serving: float,
    counts: bool,  # noqa: FBT001 - a row
) -> None:
    away = replace(DOCUMENT, members={"m1": Share("uid-m1", (), 1), "m2": Share("uid-m2", tuple(Q), 1)})
    pod = waiting("m1", restarts=restarts, serving_for=serving)
    busy = a_pod("m2", report("m2", held=Q))
    found = plan(settled(pod, busy, document=away), NOW)
    assert found.member_states["m1"] == ("Ready" if counts else "Restarting")
    if not counts:
        assert found.requeue_after <= 20.0
    alone = plan(settled(pod, document=replace(away, members={"m1": Share("uid-m1", tuple(Q), 1)})), NOW)
    assert shares(alone) == {"m1": (2, [0, 1, 2, 3, 4, 5])}, "nobody else is there"


def test_restart_in_a_loop_does_not_bring_queues_back_although_they_are_still_on_record() -> None:
    found = plan(settled(waiting("m1", restarts=2, serving_for=0.0), running("m2")), NOW)
    assert shares(found)["m2"] == (1, [0, 1, 2, 3, 4, 5])


def test_restart_of_the_only_member_moves_nothing_and_raises_no_condition() -> None:
    alone = replace(DOCUMENT, members={"m1": Share("uid-m1", tuple(Q), 1)})
    pod = a_pod("m1", report("m1", held=Q), stopped_for=0.0, ready=False, stable_for=1.0)
    found = plan(settled(pod, document=alone), NOW)
    assert found.document is None
    assert found.member_states["m1"] == "Unready"
    assert Reason.QUEUES_UNOWNED not in {verdict.reason for verdict in found.problems}


def test_restart_of_the_whole_fleet_leaves_queues_with_their_pods() -> None:
    """The first process that is back does not take over the queues of all others."""
    shares_of_three = {f"m{n}": Share(f"uid-m{n}", tuple(Q[2 * n - 2 : 2 * n]), 1) for n in (1, 2, 3)}
    document = replace(DOCUMENT, members=shares_of_three)
    back = waiting("m1", serving_for=0.0)
    ended = [a_pod(f"m{n}", report(f"m{n}", held=shares_of_three[f"m{n}"].queues), stopped_for=1.0) for n in (2, 3)]
    found = plan(settled(back, *ended, document=document), NOW)
    assert shares(found) == {"m1": (2, [0, 1]), "m2": (1, [2, 3]), "m3": (1, [4, 5])}
    found = plan(settled(back, running("m2", stopped_for=1.0)), NOW)
    assert shares(found) == {"m1": (2, [0, 1, 2, 3, 4, 5]), "m2": (1, [])}, "one of two"


def test_restart_gives_queues_of_an_ended_process_to_a_member_in_its_pause_if_no_other_is_there() -> None:
    away = replace(DOCUMENT, members={"m1": Share("uid-m1", (), 1), "m2": Share("uid-m2", tuple(Q), 1)})
    ended = a_pod("m2", report("m2", held=Q), stopped_for=0.0)
    found = plan(settled(waiting("m1", restarts=3, serving_for=5.0), ended, document=away), NOW)
    assert shares(found) == {"m1": (2, [0, 1, 2, 3, 4, 5]), "m2": (1, [])}
    assert found.member_states["m2"] == "Restarting"


def test_restart_in_an_orderly_group_leaves_queues_with_the_pod() -> None:
    orderly = a_spec(ordering="Orderly")
    pod = running("m1", stopped_for=0.0, ready=False, stable_for=1.0)
    found = plan(settled(pod, running("m2"), spec=orderly), NOW)
    assert found.document is None
    assert shares(plan(settled(waiting("m1"), running("m2"), spec=orderly), NOW))["m1"] == (2, [0, 1, 2])


def test_restart_pokes_the_pod_until_its_process_can_prove_the_end_of_the_one_before() -> None:
    late = waiting("m1", generation=SINCE - 1)
    found = plan(settled(late, running("m2")), NOW)
    assert "m1" in found.pokes
    done = plan(settled(waiting("m1", generation=SINCE), running("m2"), document=replace(DOCUMENT, generation=9)), NOW)
    assert done.document


def test_assignment_lost_is_rebuilt_with_incarnations_if_every_member_reads_them() -> None:
    lost = settled(running("m1", 4), running("m2", stopped_for=0.0), document=None)
    found = plan(lost, NOW).document
    assert found
    assert (found.schema, found.incarnations_since) == (2, found.generation)
    assert {name: share.incarnation for name, share in found.members.items()} == {"m1": 4, "m2": 1}
    of_earlier_version = a_pod("m3", a_report("m3", 5))
    found = plan(settled(running("m1", 4), of_earlier_version, document=None), NOW).document
    assert found
    assert (found.schema, {share.incarnation for share in found.members.values()}) == (1, {0})


@pytest.mark.parametrize("group", [GROUP, "shop/other"])
def test_assignment_rebuilt_keeps_since_when_topics_are_consumed_only_of_the_same_group(group: str) -> None:
    topics = ("a", "b", "c", "d", "orders")
    spec = a_spec(subscriptions=[{"topic": topic} for topic in topics])
    torn = replace(DOCUMENT, group=group)
    found = plan(settled(running("m1"), running("m2"), document=torn, damage="torn", spec=spec), NOW).document
    assert found
    assert list(found.begun) == list(topics)
    assert (found.begun["orders"] == BEGUN["orders"]) is (group == GROUP)


def test_assignment_names_who_may_consume_each_queue() -> None:
    taken = {Q[0]: Release(Holder("m0", "uid-m0"), "m1", 5, format_time(NOW))}
    found = holders_of(replace(DOCUMENT, members={"m1": Share("uid-m1", (Q[1],), 1)}, releasing=taken))
    assert found == {Q[0]: Holder("m0", "uid-m0"), Q[1]: Holder("m1", "uid-m1")}


def test_poke_is_needed_until_a_restarted_process_obeys_the_first_document_with_incarnations() -> None:
    def behind(pod: PodSnapshot, document: Assignment = DOCUMENT) -> list[str]:
        return [found.name for found in pods_behind([pod], document, frozenset())]

    assert behind(waiting("m1", generation=SINCE - 1)) == ["m1"]
    assert behind(waiting("m1", generation=SINCE)) == []
    assert behind(running("m1", report=report("m1", generation=SINCE - 1, held=Q[:3]))) == []
    unnumbered = replace(DOCUMENT, incarnations_since=0)
    assert behind(running("m1", report=report("m1", generation=0, held=Q[:3])), unnumbered) == []


def test_restart_is_resumed_only_after_every_grant_that_the_operator_may_have_written_is_shown() -> None:
    assert STANDING_POLL_SECONDS + MAX_REPORT_AGE_SECONDS + MAX_KUBELET_SYNC_SECONDS < RESUME_SECONDS
