"""Tests restarts: the queues of an ended process move at once, and no process counts as ended without proof."""

from dataclasses import replace
from typing import Any

import pytest

from builders import BEGUN, GROUP, NOW, a_document, a_pod, a_policy, a_report, a_snapshot, a_spec
from rota.documents import Assignment, Release, Share
from rota.handover import MAX_KUBELET_SYNC_SECONDS, Proof
from rota.kube.members.report_watchers import STANDING_POLL_SECONDS
from rota.model import Holder, Queue, Reason
from rota.planner import Plan, PodSnapshot, Snapshot, plan
from rota.planner.members.incarnations import MAX_SILENCE_SECONDS
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


def running_pod(name: str, incarnation: int = 1, **changed: Any) -> PodSnapshot:
    """Return a pod with a process that consumes its queues of the document."""
    own_report = report(name, incarnation, held=SHARES[name].queues)
    return a_pod(name, **({"report": own_report} | changed))


def waiting_pod(name: str, incarnation: int = 2, *, generation: int = 5, **changed: Any) -> PodSnapshot:
    """Return a pod with a restarted process that reports and consumes nothing yet."""
    return a_pod(name, **({"report": report(name, incarnation, generation=generation), "restarts": 1} | changed))


def settled(*pods: PodSnapshot, document: Assignment | None = DOCUMENT, **changed: Any) -> Snapshot:
    return a_snapshot(document=document, pods=pods, **changed)


def planned_shares(new_plan: Plan) -> dict[str, tuple[int, list[int]]]:
    """Return the incarnation and the queue ids of each member in the planned document."""
    assert new_plan.document
    return {
        name: (share.incarnation, [q.id for q in share.queues]) for name, share in new_plan.document.members.items()
    }


def plan_reason(new_plan: Plan) -> Reason:
    [line] = [line for line in new_plan.journal_records if line["kind"] == "plan"]
    return Reason(line["reason"])


def test_restart_document_names_incarnations_once_every_member_reads_them() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:]})
    new_plan = plan(settled(running_pod("m1", 4), running_pod("m2"), document=document), NOW)
    assert new_plan.document
    assert (new_plan.document.schema, new_plan.document.incarnations_since) == (2, 6)
    assert planned_shares(new_plan) == {"m1": (4, [0, 1, 2]), "m2": (1, [3, 4, 5])}
    unheard = a_pod("m2")
    earlier = a_pod("m2", a_report("m2", 5, Q[3:], incarnation="d1f0"))
    for other_pod in (unheard, earlier, replace(running_pod("m2"), decoded_report=None)):
        assert plan(settled(running_pod("m1"), other_pod, document=document), NOW).document is None
    for other_pod in (running_pod("m2"), a_pod("m3", report("m3", 0))):  # the process of m3 could not store its start
        new_plan = plan(settled(running_pod("m1"), other_pod, document=a_document(members={"m1": Q})), NOW)
        assert (new_plan.document and new_plan.document.schema) == (2 if other_pod.incarnation else 1)


def test_restart_document_waits_for_missing_holders() -> None:
    document = a_document(members={"m1": Q[:3], "m2": Q[3:]})
    new_plan = plan(settled(running_pod("m1"), document=document), NOW)
    assert new_plan.document
    assert new_plan.document.schema == 1
    new_plan = plan(settled(running_pod("m1"), document=document, deleted_uids=frozenset({"uid-m2"})), NOW)
    assert new_plan.document
    assert new_plan.document.schema == 2


def test_restart_document_goes_back_to_schema_1_for_a_member_of_an_earlier_version() -> None:
    earlier = a_pod("m3", a_report("m3", 0))
    new_plan = plan(settled(running_pod("m1"), running_pod("m2"), earlier), NOW)
    assert new_plan.document
    assert (new_plan.document.schema, {share.incarnation for share in new_plan.document.members.values()}) == (1, {0})
    taken = {Q[0]: Release(Holder("m1", "uid-m1"), "m2", 5, format_time(NOW), 1)}
    moving = replace(DOCUMENT, members=SHARES | {"m1": Share("uid-m1", (Q[1], Q[2]), 1)}, releasing=taken)
    new_plan = plan(settled(running_pod("m1"), running_pod("m2"), earlier, document=moving), NOW)
    assert new_plan.document
    assert [release.incarnation for release in new_plan.document.releasing.values()] == [0]


def test_restart_document_of_schema_1_is_written_if_the_operator_is_configured_so() -> None:
    new_plan = plan(settled(running_pod("m1"), running_pod("m2"), max_schema=1), NOW)
    assert new_plan.document
    assert new_plan.document.schema == 1


def test_restart_gives_queues_of_an_ended_process_to_others_at_once() -> None:
    new_plan = plan(settled(running_pod("m1", stopped_for=0.0), running_pod("m2")), NOW)
    assert planned_shares(new_plan) == {"m1": (1, []), "m2": (1, [0, 1, 2, 3, 4, 5])}
    assert plan_reason(new_plan) is Reason.MEMBER_RESTARTED
    [line] = [line for line in new_plan.journal_records if line["kind"] == "handover"]
    assert (line["act"], line["proof"]) == ("Grant", Proof.ENDED)


@pytest.mark.parametrize(
    "pod",
    [
        running_pod("m1", stopped_for=MAX_SILENCE_SECONDS),
        running_pod("m1", stopped_for=0.0, report=report("m1", held=SHARES["m1"].queues, generation=SINCE - 1)),
        running_pod("m1", stopped_for=0.0, report=a_report("m1", 5, Q[:3], reads=2)),
        running_pod("m1"),
    ],
    ids=["outdated report", "before incarnations", "without a number", "running"],
)
def test_restart_grants_nothing_without_proof_that_the_process_ended(pod: PodSnapshot) -> None:
    new_plan = plan(settled(pod, running_pod("m2")), NOW)
    assert new_plan.document is None or not {*Q[:3]} & {*new_plan.document.members["m2"].queues}


def test_restart_writes_no_document_again_and_again() -> None:
    unproven = waiting_pod("m1", unreachable_for=MAX_SILENCE_SECONDS)
    assert plan(settled(unproven, running_pod("m2"), policy=a_policy(paused=True)), NOW).document is None
    first_since = replace(DOCUMENT, incarnations_since=1)  # a group whose first document names incarnations
    assert plan(settled(running_pod("m1"), running_pod("m2"), document=first_since), NOW).document is None


def test_restart_proved_by_a_later_process_gives_its_queues_back_to_the_pod() -> None:
    new_plan = plan(settled(waiting_pod("m1"), running_pod("m2")), NOW)
    assert planned_shares(new_plan) == {"m1": (2, [0, 1, 2]), "m2": (1, [3, 4, 5])}
    assert plan_reason(new_plan) is Reason.MEMBER_RESTARTED


@pytest.mark.parametrize(
    "changed",
    [{"generation": SINCE - 1}, {"unreachable_for": MAX_SILENCE_SECONDS}, {"rejected_for": MAX_SILENCE_SECONDS}],
    ids=str,
)
def test_restart_keeps_queues_of_a_process_that_may_obey_an_earlier_document(changed: dict[str, Any]) -> None:
    pod = waiting_pod("m1", **changed)
    new_plan = plan(settled(pod, running_pod("m2")), NOW)
    assert new_plan.member_states["m1"] == "Joining"
    assert not new_plan.document or not new_plan.document.members["m2"].queues[3:]
    assert "m1" in new_plan.members_to_poll


def test_restart_incarnation_stays_in_the_document_while_a_new_leader_has_no_report_of_the_member() -> None:
    """The next process, too, would consume the queues of a document without incarnations."""
    unheard = a_pod("m1")
    joiner = a_pod("m3", report("m3"))
    new_plan = plan(settled(unheard, running_pod("m2"), joiner), NOW)
    assert new_plan.document
    assert new_plan.document.schema == 2
    assert all(share.incarnation for share in new_plan.document.members.values() if share.queues)
    assert new_plan.document.members["m1"].queues


def test_restart_of_members_that_resumed_their_queues_moves_no_queue() -> None:
    """Otherwise the first member after its pause would get the queues of all other members."""
    pods = [running_pod(name, restarts=2, serving_for=serving) for name, serving in (("m1", 10.0), ("m2", 9.0))]
    new_plan = plan(settled(*pods), NOW)
    assert (new_plan.document, set(new_plan.member_states.values())) == (None, {"Ready"})


def test_restart_process_that_resumed_by_itself_keeps_its_queues() -> None:
    resumed = a_pod("m1", report("m1", 2, held=Q[:3]))
    new_plan = plan(settled(resumed, running_pod("m2")), NOW)
    assert planned_shares(new_plan) == {"m1": (2, [0, 1, 2]), "m2": (1, [3, 4, 5])}
    moving = replace(
        DOCUMENT,
        members=SHARES | {"m1": Share("uid-m1", (), 1)},
        releasing={queue: Release(Holder("m1", "uid-m1"), "m2", 5, format_time(NOW), 1) for queue in Q[:3]},
    )
    draining = a_pod("m1", report("m1", 2, draining=Q[:3]))
    assert plan(settled(draining, running_pod("m2"), document=moving), NOW).document is None
    released = a_pod("m1", report("m1", 2))
    assert planned_shares(plan(settled(released, running_pod("m2"), document=moving), NOW))["m2"] == (1, [0, 1, 2])


@pytest.mark.parametrize(
    ("restarts", "serving", "is_ready"),
    [
        (restarts, pause + error, error >= 0)
        for restarts, pause in ((1, 1.0), (2, 10.0), (3, 60.0), (4, 300.0), (40, 300.0))
        for error in (-0.1, 0.0)
    ],
)
def test_restart_returns_queues_after_a_pause_that_grows(
    restarts: int,
    serving: float,
    is_ready: bool,  # noqa: FBT001 - a row
) -> None:
    document = replace(DOCUMENT, members={"m1": Share("uid-m1", (), 1), "m2": Share("uid-m2", tuple(Q), 1)})
    pod = waiting_pod("m1", restarts=restarts, serving_for=serving)
    busy = a_pod("m2", report("m2", held=Q))
    new_plan = plan(settled(pod, busy, document=document), NOW)
    assert new_plan.member_states["m1"] == ("Ready" if is_ready else "Restarting")
    if not is_ready:
        assert new_plan.requeue_after <= 20.0
    alone = plan(settled(pod, document=replace(document, members={"m1": Share("uid-m1", tuple(Q), 1)})), NOW)
    assert planned_shares(alone) == {"m1": (2, [0, 1, 2, 3, 4, 5])}, "the group has no other member"


def test_restart_in_a_loop_returns_no_queues_although_they_are_still_recorded() -> None:
    new_plan = plan(settled(waiting_pod("m1", restarts=2, serving_for=0.0), running_pod("m2")), NOW)
    assert planned_shares(new_plan)["m2"] == (1, [0, 1, 2, 3, 4, 5])


def test_restart_of_the_only_member_moves_nothing_and_raises_no_condition() -> None:
    alone = replace(DOCUMENT, members={"m1": Share("uid-m1", tuple(Q), 1)})
    pod = a_pod("m1", report("m1", held=Q), stopped_for=0.0, ready=False, stable_for=1.0)
    new_plan = plan(settled(pod, document=alone), NOW)
    assert new_plan.document is None
    assert new_plan.member_states["m1"] == "Unready"
    assert Reason.QUEUES_UNOWNED not in {verdict.reason for verdict in new_plan.problems}


def test_restart_of_the_whole_fleet_leaves_queues_with_their_pods() -> None:
    """The first restarted process does not get the queues of all other members."""
    shares_of_three = {f"m{n}": Share(f"uid-m{n}", tuple(Q[2 * n - 2 : 2 * n]), 1) for n in (1, 2, 3)}
    document = replace(DOCUMENT, members=shares_of_three)
    restarted = waiting_pod("m1", serving_for=0.0)
    ended = [a_pod(f"m{n}", report(f"m{n}", held=shares_of_three[f"m{n}"].queues), stopped_for=1.0) for n in (2, 3)]
    new_plan = plan(settled(restarted, *ended, document=document), NOW)
    assert planned_shares(new_plan) == {"m1": (2, [0, 1]), "m2": (1, [2, 3]), "m3": (1, [4, 5])}
    new_plan = plan(settled(restarted, running_pod("m2", stopped_for=1.0)), NOW)
    assert planned_shares(new_plan) == {"m1": (2, [0, 1, 2, 3, 4, 5]), "m2": (1, [])}, "one of two"


def test_restart_gives_queues_of_an_ended_process_to_a_member_in_its_pause_if_the_group_has_no_other() -> None:
    document = replace(DOCUMENT, members={"m1": Share("uid-m1", (), 1), "m2": Share("uid-m2", tuple(Q), 1)})
    ended = a_pod("m2", report("m2", held=Q), stopped_for=0.0)
    new_plan = plan(settled(waiting_pod("m1", restarts=3, serving_for=5.0), ended, document=document), NOW)
    assert planned_shares(new_plan) == {"m1": (2, [0, 1, 2, 3, 4, 5]), "m2": (1, [])}
    assert new_plan.member_states["m2"] == "Restarting"


def test_restart_in_an_orderly_group_leaves_queues_with_the_pod() -> None:
    orderly = a_spec(ordering="Orderly")
    pod = running_pod("m1", stopped_for=0.0, ready=False, stable_for=1.0)
    new_plan = plan(settled(pod, running_pod("m2"), spec=orderly), NOW)
    assert new_plan.document is None
    assert planned_shares(plan(settled(waiting_pod("m1"), running_pod("m2"), spec=orderly), NOW))["m1"] == (
        2,
        [0, 1, 2],
    )


def test_restart_pokes_the_pod_until_its_process_proves_the_end_of_the_previous_one() -> None:
    late = waiting_pod("m1", generation=SINCE - 1)
    new_plan = plan(settled(late, running_pod("m2")), NOW)
    assert "m1" in new_plan.pokes
    done = plan(
        settled(waiting_pod("m1", generation=SINCE), running_pod("m2"), document=replace(DOCUMENT, generation=9)), NOW
    )
    assert done.document


def test_assignment_lost_is_rebuilt_with_incarnations_if_every_member_reads_them() -> None:
    snapshot = settled(running_pod("m1", 4), running_pod("m2", stopped_for=0.0), document=None)
    rebuilt = plan(snapshot, NOW).document
    assert rebuilt
    assert (rebuilt.schema, rebuilt.incarnations_since) == (2, rebuilt.generation)
    assert {name: share.incarnation for name, share in rebuilt.members.items()} == {"m1": 4, "m2": 1}
    of_earlier_version = a_pod("m3", a_report("m3", 5))
    rebuilt = plan(settled(running_pod("m1", 4), of_earlier_version, document=None), NOW).document
    assert rebuilt
    assert (rebuilt.schema, {share.incarnation for share in rebuilt.members.values()}) == (1, {0})


@pytest.mark.parametrize("group", [GROUP, "shop/other"])
def test_assignment_rebuilt_keeps_start_times_of_topics_only_of_the_same_group(group: str) -> None:
    topics = ("a", "b", "c", "d", "orders")
    spec = a_spec(subscriptions=[{"topic": topic} for topic in topics])
    torn = replace(DOCUMENT, group=group)
    rebuilt = plan(settled(running_pod("m1"), running_pod("m2"), document=torn, damage="torn", spec=spec), NOW).document
    assert rebuilt
    assert list(rebuilt.begun) == list(topics)
    assert (rebuilt.begun["orders"] == BEGUN["orders"]) is (group == GROUP)


def test_assignment_names_the_holder_of_each_queue() -> None:
    taken = {Q[0]: Release(Holder("m0", "uid-m0"), "m1", 5, format_time(NOW))}
    holders = holders_of(replace(DOCUMENT, members={"m1": Share("uid-m1", (Q[1],), 1)}, releasing=taken))
    assert holders == {Q[0]: Holder("m0", "uid-m0"), Q[1]: Holder("m1", "uid-m1")}


def test_poke_is_needed_until_a_restarted_process_obeys_the_first_document_with_incarnations() -> None:
    def behind(pod: PodSnapshot, document: Assignment = DOCUMENT) -> list[str]:
        return [behind_pod.name for behind_pod in pods_behind([pod], document, frozenset())]

    assert behind(waiting_pod("m1", generation=SINCE - 1)) == ["m1"]
    assert behind(waiting_pod("m1", generation=SINCE)) == []
    assert behind(running_pod("m1", report=report("m1", generation=SINCE - 1, held=Q[:3]))) == []
    unnumbered = replace(DOCUMENT, incarnations_since=0)
    assert behind(running_pod("m1", report=report("m1", generation=0, held=Q[:3])), unnumbered) == []


def test_restart_is_resumed_only_after_every_possible_grant_is_mounted() -> None:
    assert STANDING_POLL_SECONDS + MAX_SILENCE_SECONDS + MAX_KUBELET_SYNC_SECONDS < RESUME_SECONDS


@pytest.mark.parametrize("state", ["draining", "drained"])
def test_restart_whose_next_process_drains_for_changed_settings_frees_no_queue(state: str) -> None:
    """That process may have inherited the queues before it drained, and may resume them after the drain."""
    drained = waiting_pod("m1", report=report("m1", 2, state=state))
    new_plan = plan(settled(drained, running_pod("m2"), a_pod("m3", report("m3"))), NOW)
    assert new_plan.document is None or not new_plan.document.members["m3"].queues
    final = waiting_pod("m1", report=report("m1", 2, state=state, final=True))
    new_plan = plan(settled(final, running_pod("m2"), a_pod("m3", report("m3"))), NOW)
    assert new_plan.document
    assert new_plan.document.members["m3"].queues
