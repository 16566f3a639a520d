"""Tests member states of a group whose members restart."""

from dataclasses import replace
from typing import Any

from builders import a_document, a_pod, a_policy, a_report
from rota.documents import Share
from rota.model import Queue
from rota.planner import PodSnapshot
from rota.planner.members.member_states import classify_members

Q = [Queue("orders", "a", number) for number in range(4)]
SHARES = {f"m{number + 1}": Share(f"uid-m{number + 1}", (Q[number],), 1) for number in range(4)}
DOCUMENT = replace(a_document(), members=SHARES, incarnations_since=3)


def process(name: str, **changed: Any) -> PodSnapshot:
    """Return a pod with a process that consumes its queues."""
    return a_pod(name, a_report(name, 5, SHARES[name].queues, reads=2, incarnation="1"), **changed)


def states_of(*pods: PodSnapshot, **changed: Any) -> list[str]:
    return [str(state) for state in classify_members(pods, frozenset(), a_policy(), DOCUMENT, **changed).values()]


def test_restart_takes_queues_from_a_member_but_not_in_an_orderly_group() -> None:
    pods = (process("m1", stopped_for=0.0), process("m2"))
    assert states_of(*pods) == states_of(*pods, is_orderly=False) == ["Restarting", "Ready"]
    assert states_of(*pods, is_orderly=True) == ["Ready", "Ready"]


def test_restart_of_a_pod_that_leaves_or_ended_keeps_its_state() -> None:
    leaving = process("m1", stopped_for=0.0, terminating=True)
    ended = process("m2", stopped_for=0.0, ended=True)
    assert states_of(leaving, ended, process("m3")) == ["Leaving", "Ended", "Ready"]


def test_restart_of_the_fleet_is_recognized_among_the_members_that_count() -> None:
    stopped = [process(name, stopped_for=0.0) for name in ("m1", "m2")]
    assert states_of(*stopped, process("m3"), process("m4")) == ["Restarting", "Restarting", "Ready", "Ready"]
    leaving = process("m4", terminating=True)
    assert states_of(*stopped, process("m3"), leaving) == ["Ready", "Ready", "Ready", "Leaving"], "two of three"
