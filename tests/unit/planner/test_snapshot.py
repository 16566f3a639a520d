"""Tests what a snapshot says about a pod."""

from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from builders import a_pod, a_policy, a_report, a_snapshot
from rota.handover import HolderEvidence
from rota.model import Queue
from rota.planner import DecodedReport, PodSnapshot

Q = [Queue("orders", "a", number) for number in range(6)]


def test_restart_facts_of_a_pod_that_is_seen_for_the_first_time_are_empty() -> None:
    pod = PodSnapshot(name="m1", uid="uid-m1")
    assert (pod.restarts, pod.rejected_for, pod.obstacle, pod.stopped_for) == (0, 0.0, "", None)
    assert (pod.report, pod.incarnation, pod.generation) == (None, 0, 0)
    assert pod.evidence == HolderEvidence(ready=False)
    assert a_snapshot().settings_age == 0.0


def test_report_names_active_queues_that_are_consumed_or_drained() -> None:
    draining = DecodedReport(a_report("m1", 5, Q[:2], draining=[Q[4]]))
    assert (set(draining.held_queues), set(draining.active_queues)) == ({*Q[:2]}, {Q[0], Q[1], Q[4]})
    consuming = DecodedReport(a_report("m1", 5, Q[:2]))
    assert consuming.active_queues is consuming.held_queues, "parsed once"


IDS = st.sets(st.integers(0, 5))


@given(held=IDS, assigned=IDS, is_shuffled=st.booleans())
def test_report_consumes_exactly_the_queues_that_it_names_however_it_spells_them(
    held: set[int], assigned: set[int], *, is_shuffled: bool
) -> None:
    report = a_report("m1", 5, [Q[number] for number in held])
    if is_shuffled:  # as no sidecar writes it
        ids = ",".join(map(str, sorted(held, reverse=True)))
        report = msgspec.structs.replace(report, held={"orders": {"a": ids} if ids else {}, "empty": {}})
    queues = tuple(Q[number] for number in sorted(assigned))
    assert a_pod("m1", report).consumes_exactly(queues) is (held == assigned)


def test_report_that_is_missing_consumes_exactly_no_queue() -> None:
    assert a_pod("m1").consumes_exactly(())
    assert not a_pod("m1").consumes_exactly(Q[:1])


def test_membership_of_a_pod_that_has_not_started_counts_no_silence() -> None:
    assert a_pod("m1", unreachable_for=500.0).evidence.unreachable_for == 500.0
    assert a_pod("m1", unreachable_for=500.0, started=False).evidence.unreachable_for == 0.0


NOT_READY = {"ready": False, "started": True}
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 9.0, 130.0, 1000.0])


@given(
    silence=st.fixed_dictionaries({"unreachable_for": SECONDS, "terminating_for": SECONDS}),
    health=st.fixed_dictionaries({"ready": st.booleans(), "started": st.booleans()}),
    lost_after=st.sampled_from(["1s", "10s", "300s"]),
    revoked_for=SECONDS,
)
@example(silence={"unreachable_for": 1.0, "terminating_for": 0.0}, health=NOT_READY, lost_after="1s", revoked_for=0.0)
def test_membership_is_lost_just_if_the_evidence_about_the_pod_is_of_a_lost_one(
    silence: dict[str, Any], health: dict[str, Any], lost_after: str, revoked_for: float
) -> None:
    pod = a_pod("m1", **silence, **health)
    rules = a_policy(handover={"lostAfter": lost_after}).handover
    assert pod.is_lost(rules, revoked_for) is pod.evidence.is_lost(rules, revoked_for)


def test_broker_reached_by_a_silent_pod_is_not_known() -> None:
    pod = a_pod("m1", a_report("m1", brokers={"a": True, "b": False}))
    assert pod.reachable_brokers == {"a"}
    assert replace(pod, unreachable_for=1.0).reachable_brokers == frozenset()


def test_spec_that_is_invalid_subscribes_to_no_topic() -> None:
    assert a_snapshot(spec=None).subscribed_topics == []
