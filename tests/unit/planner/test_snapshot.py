"""Tests what a snapshot says about a pod."""

from dataclasses import replace

from builders import a_pod, a_report, a_snapshot
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


def test_membership_of_a_pod_that_has_not_started_counts_no_silence() -> None:
    assert a_pod("m1", unreachable_for=500.0).evidence.unreachable_for == 500.0
    assert a_pod("m1", unreachable_for=500.0, started=False).evidence.unreachable_for == 0.0


def test_broker_reached_by_a_silent_pod_is_not_known() -> None:
    pod = a_pod("m1", a_report("m1", brokers={"a": True, "b": False}))
    assert pod.reachable_brokers == {"a"}
    assert replace(pod, unreachable_for=1.0).reachable_brokers == frozenset()
