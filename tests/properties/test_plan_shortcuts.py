"""Properties of the facts that a plan computes by shortcut: each is compared with its plain computation."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from builders import GROUP, NOW, a_policy, a_report, a_snapshot, owners_of
from rota.documents import Assignment, Release, Share
from rota.handover import Act
from rota.model import Holder, Queue
from rota.planner import DecodedReport, PodSnapshot, QueueView, Snapshot
from rota.planner.members.member_states import classify_members
from rota.planner.moves import decide, next_document
from rota.planner.situation import Situation
from rota.timestamps import format_time

QUEUES = tuple(Queue("orders", "a", number) for number in range(7))
NAMES = ("m1", "m2", "m3", "m4")
HOLDERS = [Holder(name, f"uid-{name}{suffix}") for name in NAMES for suffix in ("", "-later")]
AT = format_time(NOW - 1000.0)


@st.composite
def pods(draw: DrawFn, name: str) -> PodSnapshot:
    """Draw a pod in any state, most often one that serves."""
    uid = draw(st.sampled_from([f"uid-{name}", f"uid-{name}", f"uid-{name}-later"]))
    report = a_report(
        name,
        draw(st.sampled_from([5, 5, 5, 2])),
        draw(st.sets(st.sampled_from(QUEUES))),
        uid=uid,
        reads=2,
        incarnation=draw(st.sampled_from(["1", "1", "2", ""])),
        state=draw(st.sampled_from(["serving", "serving", "draining", "drained"])),
        final=draw(st.booleans()),
    )
    return PodSnapshot(
        name=name,
        uid=uid,
        ready=draw(st.booleans()),
        stable_for=1000.0,
        age=1000.0,
        terminating=draw(st.sampled_from([False, False, False, True])),
        ended=draw(st.sampled_from([False, False, False, True])),
        stopped_for=draw(st.sampled_from([None, None, 1.0, 100.0])),
        unreachable_for=draw(st.sampled_from([0.0, 0.0, 5.0, 1000.0])),
        cut_off_brokers=draw(st.sampled_from([{}, {"a": 1000.0}])),
        decoded_report=draw(st.sampled_from([None, DecodedReport(report), DecodedReport(report)])),
    )


@st.composite
def documents(draw: DrawFn) -> Assignment:
    """Draw an assignment in which some queues are owned and some are being released."""
    incarnation = draw(st.sampled_from([0, 1]))
    uids = {name: draw(st.sampled_from([f"uid-{name}", f"uid-{name}", f"uid-{name}-later"])) for name in NAMES}
    owned: dict[str, list[Queue]] = {name: [] for name in draw(st.sets(st.sampled_from(NAMES)))}
    releasing: dict[Queue, Release] = {}
    for queue in QUEUES:
        owner = draw(st.sampled_from([*owned, None, "released"]))
        if owner in owned:
            owned[owner].append(queue)
        elif owner:
            to = draw(st.sampled_from([*NAMES, None]))
            releasing[queue] = Release(draw(st.sampled_from(HOLDERS)), to, draw(st.integers(3, 5)), AT, incarnation)
    members = {name: Share(uids[name], tuple(queues), incarnation) for name, queues in owned.items()}
    return Assignment(
        group=GROUP,
        generation=5,
        issued_at=AT,
        strategy="Sticky",
        members=members,
        releasing=releasing,
        barrier=draw(st.sampled_from([0, 0, 5])),
        incarnations_since=3 * incarnation,
    )


@st.composite
def situations(draw: DrawFn) -> Situation:
    """Draw a situation: a document, the group's pods, and a route that may have lost queues."""
    document = draw(documents())
    routed = tuple(sorted(draw(st.sets(st.sampled_from(QUEUES)))))
    snapshot: Snapshot = a_snapshot(
        document=document,
        policy=a_policy(strategy=draw(st.sampled_from(["Sticky", "Averagely"]))),
        pods=tuple(draw(pods(name)) for name in draw(st.sets(st.sampled_from(NAMES)))),
        views={"orders": QueueView(routed, draw(st.sampled_from([1.0, 1000.0])))},
        deleted_uids=frozenset(holder.uid for holder in draw(st.sets(st.sampled_from(HOLDERS), max_size=3))),
        unmanaged_consumers=draw(st.sampled_from([(), (), ("10.0.0.9@app",)])),
    )
    assert snapshot.policy is not None
    states = classify_members(snapshot.pods, snapshot.deleted_uids, snapshot.policy, document)
    return Situation(snapshot, states, document, NOW)


def unconsumed(situation: Situation, name: str, share: Share) -> frozenset[Queue]:
    """Return the queues of a share that its owner does not consume, by the evidence about the owner."""
    holder = Holder(name, share.uid)
    evidence = situation.proofs.evidence_of(holder, share.incarnation)
    if evidence.ended and holder not in situation.counted_holders:
        return frozenset(share.queues)
    may_resume = evidence.has_reported(holder) and evidence.report and evidence.report.may_resume
    return frozenset(share.queues) - evidence.active_queues if may_resume and not evidence.terminating else frozenset()


def unowned(situation: Situation, document: Assignment) -> list[Queue]:
    """Return the queues that no member consumes, found by visiting every queue."""
    consumed: set[Queue] = set(document.releasing)
    for name, share in document.members.items():
        consumed |= frozenset(share.queues) - unconsumed(situation, name, share)
    return [queue for queue in situation.queues if queue not in consumed]


@given(situations(), documents())
def test_plan_finds_the_queues_without_an_owner_and_the_idle_members_of_any_document(
    situation: Situation, rebuilt: Assignment
) -> None:
    for document in (situation.document, next_document(situation, decide(situation)), rebuilt):
        assert situation.unowned_queues(document) == unowned(situation, document)
        owners = set(owners_of(document).values())
        assert situation.idle_members(document) == [
            holder for holder in situation.counted_holders if holder not in owners
        ]


@given(situations())
def test_plan_finds_the_queues_that_came_and_went(situation: Situation) -> None:
    assigned: dict[Queue, Any] = {**owners_of(situation.document), **situation.document.releasing}
    subscribed = situation.subscribed
    assert subscribed.unassigned == [queue for queue in subscribed.queues if queue not in assigned]
    assert subscribed.unsubscribed == [queue for queue in assigned if queue not in subscribed.queues]


@given(situations())
def test_plan_gives_each_queue_to_the_owner_that_was_decided_and_keeps_the_other_shares(situation: Situation) -> None:
    draft = decide(situation)
    owners = owners_of(situation.document)
    for decision in draft.decisions:
        if decision.act in {Act.REVOKE, Act.DROP}:
            owners.pop(decision.queue, None)
        elif decision.act in {Act.RETURN, Act.GRANT, Act.FORCE}:
            assert decision.next_owner is not None
            owners[decision.queue] = decision.next_owner
    document = next_document(situation, draft)
    assert owners_of(document) == owners
    for name, share in document.members.items():
        assert share.queues == tuple(sorted(share.queues))
        if share == situation.document.members.get(name):
            assert share is situation.document.members[name], "plans compare shares by identity"
