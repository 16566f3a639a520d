"""Tests the handover table and the proofs of release, transition by transition."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rota.handover import (
    MIN_READY_LOST_SECONDS,
    TRANSITIONS,
    Act,
    DesiredChange,
    HolderEvidence,
    OwnershipState,
    Proof,
    Revocation,
    choose_act,
    find_proof,
)
from rota.model import Holder, Queue
from rota.reports import Report, decode_report
from rota.spec import Handover, Seconds

Q = Queue("orders", "broker-a", 3)
M1 = Holder("m1", "uid-1")
RULES = Handover()
HASTY_RULES = Handover(lost_after=Seconds(0.5))
SINCE = 42
NEXT_STATE: dict[Act, OwnershipState | None] = {
    Act.KEEP: OwnershipState.OWNED,
    Act.REVOKE: OwnershipState.RELEASING,
    Act.WAIT: None,  # the state stays as it was
    Act.RETURN: OwnershipState.OWNED,
    Act.GRANT: OwnershipState.OWNED,
    Act.FORCE: OwnershipState.OWNED,
    Act.DROP: OwnershipState.FREE,
}


def a_report(**changed: object) -> Report:
    fields = {"member": "m1", "uid": "uid-1", "generation": SINCE} | changed
    return Report(**fields)  # type: ignore[arg-type]


def proof_from(since: int | None = SINCE, report: Report | None = None, ago: float = 1.0, **evidence: Any) -> Proof:
    active_queues = report.active_queues if report else frozenset()
    revocation = None if since is None else Revocation(since, ago)
    return find_proof(Q, M1, revocation, HolderEvidence(report=report, active_queues=active_queues, **evidence), RULES)


def test_queue_release_is_proven_by_a_current_report_without_the_queue() -> None:
    assert proof_from(report=a_report()) is Proof.RELEASED
    assert proof_from(report=a_report(generation=SINCE + 1, held={"orders": {"broker-a": "0-2"}})) is Proof.RELEASED


@pytest.mark.parametrize(
    "report",
    [
        None,
        a_report(generation=SINCE - 1),
        a_report(held={"orders": {"broker-a": "0-3"}}),
        a_report(releasing={"orders": {"broker-a": "3"}}),
        a_report(uid="uid-2"),
        a_report(member="m2"),
        a_report(generation=SINCE - 1, state="drained"),
    ],
    ids=["none", "behind", "held", "draining", "another pod of that name", "another member", "drained, but not final"],
)
def test_queue_release_is_not_proven_by_an_insufficient_report(report: Report | None) -> None:
    assert proof_from(report=report) is Proof.NONE


def test_queue_release_is_not_proven_without_a_revocation_unless_the_pod_ended() -> None:
    assert proof_from(since=None, report=a_report(generation=SINCE)) is Proof.NONE
    assert proof_from(since=None, ended=True) is Proof.ENDED


def test_drain_completed_by_a_terminating_member_proves_release() -> None:
    drained = a_report(generation=7, state="drained", final=True)
    assert proof_from(terminating=True, report=drained) is Proof.RELEASED
    assert proof_from(terminating=False, report=drained) is Proof.NONE
    assert proof_from(terminating=True, report=a_report(generation=7, state="draining", final=True)) is Proof.NONE


def test_handover_from_an_ended_pod_needs_no_report() -> None:
    assert proof_from(ended=True) is Proof.ENDED


def test_member_is_lost_when_unreachable_and_unready_or_unreachable_for_long() -> None:
    assert proof_from(ready=False, unreachable_for=10) is Proof.LOST
    assert proof_from(ready=False, unreachable_for=9.9) is Proof.NONE
    assert proof_from(ready=True, unreachable_for=10) is Proof.NONE
    assert proof_from(ready=True, unreachable_for=MIN_READY_LOST_SECONDS, ago=MIN_READY_LOST_SECONDS) is Proof.LOST


def test_member_that_is_ready_is_not_lost_before_it_had_time_to_see_its_revocation() -> None:
    long_silence = 10 * MIN_READY_LOST_SECONDS
    assert proof_from(ready=True, unreachable_for=long_silence, ago=MIN_READY_LOST_SECONDS - 1) is Proof.NONE
    assert proof_from(since=None, ready=True, unreachable_for=10 * MIN_READY_LOST_SECONDS) is Proof.NONE
    assert proof_from(since=None, ready=False, unreachable_for=10) is Proof.LOST


def test_member_that_is_ready_is_lost_after_two_minutes_unreachable() -> None:
    assert proof_from(ready=True, unreachable_for=120.0, ago=120.0) is Proof.LOST
    assert proof_from(ready=True, unreachable_for=119.9, ago=120.0) is Proof.NONE
    assert proof_from(ready=True, unreachable_for=120.0, ago=119.9) is Proof.NONE


def test_drain_timeout_extends_the_time_until_a_member_is_lost() -> None:
    patient = Handover(drain_timeout=Seconds(600))
    assert not HolderEvidence(unreachable_for=689.0).is_lost(patient, 689.0)
    assert HolderEvidence(unreachable_for=690.0).is_lost(patient, 690.0)


def test_handover_with_missing_evidence_about_the_holder_proves_nothing() -> None:
    assert find_proof(Q, M1, Revocation(SINCE, 0.0), HolderEvidence(), HASTY_RULES) is Proof.NONE
    assert find_proof(Q, M1, None, HolderEvidence(ready=False), HASTY_RULES) is Proof.NONE
    assert find_proof(Q, M1, None, HolderEvidence(unreachable_for=60.0), HASTY_RULES) is Proof.NONE


def test_drain_final_report_proves_release_at_any_generation_from_its_own_uid() -> None:
    fields = {"generation": 0, "state": "drained", "final": True}
    assert proof_from(terminating=True, report=a_report(**fields)) is Proof.RELEASED
    assert proof_from(terminating=True, report=a_report(**fields | {"uid": "uid-2"})) is Proof.NONE
    assert proof_from(terminating=True, report=None) is Proof.NONE


def test_handover_grants_to_another_member_only_with_proof() -> None:
    granted = [
        (state, proof)
        for (state, proof, change), act in TRANSITIONS.items()
        if change is DesiredChange.MOVE and act is Act.GRANT
    ]
    assert all(proof in {Proof.RELEASED, Proof.ENDED} for _, proof in granted)
    forced = [proof for (_, proof, _), act in TRANSITIONS.items() if act is Act.FORCE]
    assert set(forced) == {Proof.LOST}


def test_gate_holds_back_revocations_and_nothing_else() -> None:
    for state, proof, change in TRANSITIONS:
        act = choose_act(state, proof, change)
        act_if_held = choose_act(state, proof, change, held_back=True)
        assert act_if_held is (Act.KEEP if act is Act.REVOKE else act)


def test_handover_immediate_mode_grants_or_drops_without_revoking() -> None:
    for state, proof, change in TRANSITIONS:
        assert choose_act(state, proof, change, immediate=True) is not Act.REVOKE
    assert choose_act(OwnershipState.OWNED, Proof.NONE, DesiredChange.MOVE, immediate=True) is Act.GRANT
    assert choose_act(OwnershipState.OWNED, Proof.NONE, DesiredChange.LEAVE, immediate=True) is Act.DROP


def test_handover_immediate_mode_changes_only_revocations() -> None:
    for state, proof, change in TRANSITIONS:
        cooperative_act = choose_act(state, proof, change)
        assert cooperative_act is Act.REVOKE or choose_act(state, proof, change, immediate=True) is cooperative_act


def test_handover_progresses_from_every_state_once_there_is_proof() -> None:
    for state, change in product(
        (OwnershipState.OWNED, OwnershipState.RELEASING), (DesiredChange.MOVE, DesiredChange.LEAVE)
    ):
        for proof in (Proof.RELEASED, Proof.ENDED):
            assert NEXT_STATE[TRANSITIONS[state, proof, change]] in {OwnershipState.OWNED, OwnershipState.FREE}
    assert {
        TRANSITIONS[state, Proof.LOST, DesiredChange.MOVE] for state in (OwnershipState.OWNED, OwnershipState.RELEASING)
    } == {Act.FORCE}


def test_handover_never_forgets_a_holder_that_is_only_lost() -> None:
    next_states = {
        NEXT_STATE[TRANSITIONS[state, Proof.LOST, DesiredChange.LEAVE]] or state
        for state in (OwnershipState.OWNED, OwnershipState.RELEASING)
    }
    assert next_states == {OwnershipState.RELEASING}


def test_handover_table_has_no_row_for_impossible_cases() -> None:
    no_longer_consuming = (Proof.RELEASED, Proof.LOST)  # an ended process has a successor in its pod
    assert set(product(OwnershipState, Proof, DesiredChange)) - set(TRANSITIONS) == {
        *product(
            [OwnershipState.FREE], Proof, [DesiredChange.STAY, DesiredChange.LEAVE]
        ),  # a free queue has no holder, so it can neither stay nor leave
        *product([OwnershipState.FREE], [Proof.ENDED], DesiredChange),
        *product(
            [OwnershipState.OWNED], no_longer_consuming, [DesiredChange.STAY]
        ),  # the holder released the queue, or is lost
    }


def mermaid_diagram() -> str:
    """Return the table as a Mermaid state diagram."""
    arrows: dict[tuple[OwnershipState, OwnershipState, Act], list[str]] = {}
    for (state, proof, change), act in TRANSITIONS.items():
        end = NEXT_STATE[act] or state
        cause = change.value if proof is Proof.NONE else f"{change.value}, {proof.value}"
        arrows.setdefault((state, end, act), []).append(cause)
    lines = [f"    {state} --> {end}: {act} ({'; '.join(causes)})" for (state, end, act), causes in arrows.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> Free", *lines]) + "\n"


def test_docs_handover_page_has_the_diagram_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "handover.md").read_text()
    assert f"```mermaid\n{mermaid_diagram()}```" in page


def test_report_is_parsed_and_unknown_fields_are_ignored() -> None:
    text = '{"member": "m1", "uid": "u", "generation": 3, "held": {"t": {"b": "0-1"}}, "inflight": 4, "mood": "good"}'
    assert decode_report(text).active_queues == {Queue("t", "b", 0), Queue("t", "b", 1)}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"member": "m1"}', '{"member": "m", "uid": "u", "generation": 1, "held": {"t": {"b": "x"}}}'],
)
def test_report_that_is_invalid_is_rejected_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^The report cannot be read: "):
        decode_report(text)


@pytest.mark.parametrize(
    ("revoked_for", "terminating_for", "unreachable_for", "lost"),
    [(0.0, 0.0, 500.0, False), (120.0, 0.0, 119.0, False), (120.0, 0.0, 120.0, True), (5.0, 120.0, 120.0, True)],
    ids=["never revoked", "it responded meanwhile", "two minutes of both", "terminating revokes all queues"],
)
def test_member_ready_but_silent_is_lost_two_minutes_after_revocation_or_termination(
    revoked_for: float, terminating_for: float, unreachable_for: float, *, lost: bool
) -> None:
    evidence = HolderEvidence(
        ready=True, unreachable_for=unreachable_for, terminating_for=terminating_for, terminating=terminating_for > 0
    )
    assert evidence.is_lost(RULES, revoked_for) is lost
