"""Tests conditions under which a plan writes a document, pokes or polls members, or reports a problem."""

from dataclasses import replace
from typing import Any

from builders import LONG, NOW, a_document, a_pod, a_policy, a_report, a_snapshot, a_spec, a_view, obeying
from rota.documents import Share
from rota.model import Finding, Poke, Queue, Reason
from rota.planner import Plan, PodSnapshot, Snapshot, plan
from rota.spec.resolved import settings_digest

Q = [Queue("orders", "a", number) for number in range(6)]
DOCUMENT = a_document(members={"m1": Q[:3], "m2": Q[3:]})
NUMBERED = replace(
    DOCUMENT,
    members={"m1": Share("uid-m1", tuple(Q[:3]), 1), "m2": Share("uid-m2", tuple(Q[3:]), 1)},
    incarnations_since=3,
)
BROADCASTING = a_spec(messageModel="Broadcasting")


def settled(**changed: Any) -> Snapshot:
    return a_snapshot(**({"document": DOCUMENT, "pods": obeying(DOCUMENT)} | changed))


def process(name: str, incarnation: int, *held: Queue, **changed: Any) -> PodSnapshot:
    """Return a pod whose process has this number and consumes these queues."""
    return a_pod(name, a_report(name, 5, held, reads=2, incarnation=str(incarnation)), **changed)


def reasons(new_plan: Plan) -> set[Reason]:
    return {finding.reason for finding in new_plan.problems}


# Documents


def test_status_of_a_group_with_an_invalid_spec_shows_the_present_lag() -> None:
    status = {"observedGeneration": 1, "lag": 3, "members": 7}
    new_plan = plan(settled(spec=None, status=status, lag=8, observed_generation=2), NOW)
    assert new_plan.document is None
    assert {name: new_plan.status[name] for name in status} == {"observedGeneration": 2, "lag": 8, "members": 7}


def test_duplicate_consumer_group_with_a_lost_assignment_rebuilds_it_so_that_members_release_it() -> None:
    duplicate = (Finding(Reason.DUPLICATE_CONSUMER_GROUP, "shop/older has it"),)
    lost = plan(settled(document=None, problems=duplicate), NOW)
    assert lost.document
    assert {name: share.queues for name, share in lost.document.members.items()} == {
        "m1": tuple(Q[:3]),
        "m2": tuple(Q[3:]),
    }
    assert plan(settled(document=None, problems=duplicate, pods=()), NOW).document is None, "it never had one"


def test_broadcasting_document_names_no_incarnations() -> None:
    pods = (process("m1", 1, *Q[:3]), process("m2", 1, *Q[3:]))
    rebuilt = plan(settled(document=None, spec=BROADCASTING, pods=pods), NOW).document
    assert rebuilt
    assert (rebuilt.schema, rebuilt.everyone) == (1, tuple(Q))
    switched = plan(settled(document=NUMBERED, spec=BROADCASTING, pods=pods), NOW).document
    assert switched
    assert (switched.schema, switched.everyone) == (1, tuple(Q))
    everyone = replace(switched, generation=5, issued_at=DOCUMENT.issued_at)
    pods = (process("m1", 1, *Q), process("m2", 1, *Q))
    assert plan(settled(document=everyone, spec=BROADCASTING, pods=pods), NOW).document is None, "nothing to change"


def test_forced_grant_that_is_resolved_is_removed_from_the_document() -> None:
    forced = replace(DOCUMENT, forced={Q[0]: 5})
    new_document = plan(settled(document=forced), NOW).document
    assert new_document
    assert new_document.forced == {}
    behind = (*obeying(DOCUMENT, m1={"report": a_report("m1", 4, Q[:3])}),)
    assert plan(settled(document=forced, pods=behind), NOW).document is None


# Settings


def test_settings_are_poked_only_once_they_are_stored() -> None:
    """Until then the members cannot read them; only the stored ones count."""
    old = {"report": a_report("m1", 4, Q[:3], settings=settings_digest("old"))}
    snapshot = settled(settings="old", desired_settings="new", pods=obeying(DOCUMENT, m1=old))
    debounced = plan(replace(snapshot, document=replace(DOCUMENT, issued_at=a_document(age=0.25).issued_at)), NOW)
    assert (debounced.document, debounced.pokes) == (None, {})
    written = plan(snapshot, NOW)
    assert written.document
    assert written.pokes == {"m1": Poke(6, 1)}
    assert written.settings_only_pokes == {"m1"}


def test_settings_that_are_not_stored_make_no_member_outdated() -> None:
    some = {"report": a_report("m1", 4, Q[:3], settings="89ab")}
    new_plan = plan(settled(pods=obeying(DOCUMENT, m1=some)), NOW)
    assert (new_plan.document, new_plan.pokes) == (None, {})
    assert [condition["reason"] for condition in new_plan.status["conditions"]][1] == Reason.SETTLED


def test_settings_are_overdue_only_if_a_member_uses_others_long_after_they_were_stored() -> None:
    old = obeying(DOCUMENT, m1={"report": a_report("m1", 5, Q[:3], settings=settings_digest("old"))})
    snapshot = settled(settings="new", desired_settings="new", settings_age=LONG)
    assert Reason.SETTINGS_NOT_OBEYED not in reasons(plan(snapshot, NOW)), "no member does"
    assert Reason.SETTINGS_NOT_OBEYED in reasons(plan(replace(snapshot, pods=old), NOW))
    replaced = replace(snapshot, pods=old, desired_settings="newer")
    written = plan(replaced, NOW)
    assert written.document
    assert Reason.SETTINGS_NOT_OBEYED not in reasons(written), "they are stored now"
    debounced = plan(replace(replaced, document=replace(DOCUMENT, issued_at=a_document(age=0.25).issued_at)), NOW)
    assert debounced.document is None
    assert Reason.SETTINGS_NOT_OBEYED in reasons(debounced), "the stored ones are still the earlier ones"


# Members


def test_report_is_awaited_after_a_poke_only_of_a_member_with_other_settings() -> None:
    poked = obeying(DOCUMENT, m1={"poke": Poke(5, 1)})
    assert plan(settled(pods=poked), NOW).members_to_poll == frozenset()
    old = {"report": a_report("m1", 5, Q[:3], settings=settings_digest("old")), "poke": Poke(5, 1)}
    changed = settled(pods=obeying(DOCUMENT, m1=old), settings="new", desired_settings="new")
    assert plan(changed, NOW).members_to_poll == {"m1"}


def test_restart_of_a_process_that_inherited_queues_is_polled_until_the_document_names_it() -> None:
    recent = replace(NUMBERED, issued_at=a_document(age=0.25).issued_at)
    pods = (process("m1", 2, *Q[:3]), process("m2", 1, *Q[3:]))
    debounced = plan(settled(document=recent, pods=pods), NOW)
    assert (debounced.document, debounced.member_states["m1"]) == (None, "Ready")
    assert debounced.members_to_poll == {"m1"}
    written = plan(settled(document=NUMBERED, pods=pods), NOW)
    assert written.document
    assert written.document.members["m1"] == Share("uid-m1", tuple(Q[:3]), 2)


def test_broker_that_only_some_members_reach_is_asked_of_members_with_a_report() -> None:
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4], "m3": Q[4:]})
    _, _, m3 = obeying(document)
    pods = (
        a_pod("m1", a_report("m1", 5, Q[:2], brokers={"a": True})),
        a_pod("m2", a_report("m2", 5, Q[2:4], brokers={"a": False}), cut_off_brokers={"a": 1.0}),
        replace(m3, decoded_report=None),
    )
    new_plan = plan(settled(document=document, pods=pods), NOW)
    assert set(new_plan.member_states.values()) == {"Ready"}
    assert new_plan.members_to_poll >= {"m1", "m2"}


def test_member_without_queues_is_idle_only_in_a_group_at_rest() -> None:
    document = a_document(members={"m1": Q[:1], "m2": ()})
    snapshot = settled(document=document, pods=obeying(document), views={"orders": a_view(1)})
    assert Reason.IDLE_MEMBERS in reasons(plan(snapshot, NOW))
    joiner = a_pod("m3", ready=False, age=0.0)
    joined = plan(replace(snapshot, pods=(*snapshot.pods, joiner)), NOW)
    assert joined.member_states["m3"] == "Joining"
    assert Reason.IDLE_MEMBERS not in reasons(joined), "the membership changes"
    members = [{"index": 0, "queues": [{"topic": "orders", "broker": "a", "ids": "0"}]}]
    by_config = a_policy(strategy="ByConfig", options={"byConfig": {"members": members}})
    configured = replace(document, strategy="ByConfig")
    snapshot = settled(document=configured, pods=obeying(configured), policy=by_config, views={"orders": a_view(2)})
    partial = plan(snapshot, NOW)
    assert (partial.document, partial.status["unownedQueues"], partial.status["idleMembers"]) == (None, 1, 1)
    assert Reason.IDLE_MEMBERS not in reasons(partial), "a queue has no owner"
