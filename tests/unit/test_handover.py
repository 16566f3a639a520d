"""The handover table and its proofs, edge by edge."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rota.handover import (
    LOST_READY_SECONDS,
    NEXT,
    TABLE,
    Act,
    DesiredOwner,
    HolderEvidence,
    Proof,
    Revocation,
    State,
    act,
    mermaid_diagram,
    proof,
)
from rota.model import Holder, Queue
from rota.reports import Report, read_report
from rota.spec import Handover, Seconds

Q = Queue("orders", "broker-a", 3)
M1 = Holder("m1", "uid-1")
RULES, HASTY = Handover(), Handover(lost_after=Seconds(0.5))
SINCE = 42


def a_report(**changed: object) -> Report:
    fields = {"member": "m1", "uid": "uid-1", "generation": SINCE} | changed
    return Report(**fields)  # type: ignore[arg-type]


def known(since: int | None = SINCE, report: Report | None = None, ago: float = 1.0, **seen: Any) -> Proof:
    working = report.working if report else frozenset()
    taken = None if since is None else Revocation(since, ago)
    return proof(Q, M1, taken, HolderEvidence(report=report, working=working, **seen), RULES)


def test_queue_release_is_proven_by_a_current_report_without_the_queue() -> None:
    assert known(report=a_report()) is Proof.RELEASED
    assert known(report=a_report(generation=SINCE + 1, held={"orders": {"broker-a": "0-2"}})) is Proof.RELEASED


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
    ids=["none", "behind", "held", "draining", "namesake", "stranger", "drained, not for good"],
)
def test_queue_release_is_not_proven_by_any_lesser_report(report: Report | None) -> None:
    assert known(report=report) is Proof.NONE


def test_queue_release_is_not_proven_without_a_revocation_unless_the_pod_ended() -> None:
    assert known(since=None, report=a_report(generation=SINCE)) is Proof.NONE
    assert known(since=None, ended=True) is Proof.ENDED


def test_drain_completed_by_a_terminating_member_proves_release() -> None:
    drained = a_report(generation=7, state="drained", final=True)
    assert known(terminating=True, report=drained) is Proof.RELEASED
    assert known(terminating=False, report=drained) is Proof.NONE
    assert known(terminating=True, report=a_report(generation=7, state="draining", final=True)) is Proof.NONE


def test_handover_from_an_ended_pod_needs_no_report() -> None:
    assert known(ended=True) is Proof.ENDED


def test_member_is_lost_when_unreachable_and_unready_or_unreachable_for_long() -> None:
    assert known(ready=False, unheard=10) is Proof.LOST
    assert known(ready=False, unheard=9.9) is Proof.NONE
    assert known(ready=True, unheard=10) is Proof.NONE
    assert known(ready=True, unheard=LOST_READY_SECONDS, ago=LOST_READY_SECONDS) is Proof.LOST


def test_member_that_is_ready_is_not_lost_before_it_had_time_to_see_its_revocation() -> None:
    assert known(ready=True, unheard=10 * LOST_READY_SECONDS, ago=LOST_READY_SECONDS - 1) is Proof.NONE
    assert known(since=None, ready=True, unheard=10 * LOST_READY_SECONDS) is Proof.NONE
    assert known(since=None, ready=False, unheard=10) is Proof.LOST


def test_member_that_is_ready_is_lost_after_two_minutes_unreachable() -> None:
    assert known(ready=True, unheard=120.0, ago=120.0) is Proof.LOST
    assert known(ready=True, unheard=119.9, ago=120.0) is Proof.NONE
    assert known(ready=True, unheard=120.0, ago=119.9) is Proof.NONE


def test_drain_timeout_extends_the_time_until_a_member_is_lost() -> None:
    patient = Handover(drain_timeout=Seconds(600))
    assert not HolderEvidence(unheard=689.0).lost(patient, 689.0)
    assert HolderEvidence(unheard=690.0).lost(patient, 690.0)


def test_handover_with_missing_evidence_about_the_holder_proves_nothing() -> None:
    assert proof(Q, M1, Revocation(SINCE, 0.0), HolderEvidence(), HASTY) is Proof.NONE
    assert proof(Q, M1, None, HolderEvidence(ready=False), HASTY) is Proof.NONE
    assert proof(Q, M1, None, HolderEvidence(unheard=60.0), HASTY) is Proof.NONE


def test_drain_final_report_proves_release_at_any_generation_from_its_own_uid() -> None:
    fields = {"generation": 0, "state": "drained", "final": True}
    assert known(terminating=True, report=a_report(**fields)) is Proof.RELEASED
    assert known(terminating=True, report=a_report(**fields | {"uid": "uid-2"})) is Proof.NONE
    assert known(terminating=True, report=None) is Proof.NONE


def test_handover_grants_to_another_member_only_with_proof() -> None:
    granted = [
        (state, word)
        for (state, word, want), chosen in TABLE.items()
        if want is DesiredOwner.MOVE and chosen is Act.GRANT
    ]
    assert all(word in {Proof.RELEASED, Proof.ENDED} for _, word in granted)
    forced = [word for (_, word, _), chosen in TABLE.items() if chosen is Act.FORCE]
    assert set(forced) == {Proof.LOST}


def test_gate_holds_back_revocations_and_nothing_else() -> None:
    for state, word, want in TABLE:
        free, held = act(state, word, want), act(state, word, want, held_back=True)
        assert held is (Act.KEEP if free is Act.REVOKE else free)


def test_handover_immediate_mode_grants_or_drops_without_revoking() -> None:
    for state, word, want in TABLE:
        assert act(state, word, want, immediate=True) is not Act.REVOKE
    assert act(State.OWNED, Proof.NONE, DesiredOwner.MOVE, immediate=True) is Act.GRANT
    assert act(State.OWNED, Proof.NONE, DesiredOwner.LEAVE, immediate=True) is Act.DROP


def test_handover_immediate_mode_changes_only_revocations() -> None:
    for state, word, want in TABLE:
        two_steps = act(state, word, want)
        assert two_steps is Act.REVOKE or act(state, word, want, immediate=True) is two_steps


def test_handover_progresses_from_every_state_once_there_is_proof() -> None:
    for state, want in product((State.OWNED, State.RELEASING), (DesiredOwner.MOVE, DesiredOwner.LEAVE)):
        for word in (Proof.RELEASED, Proof.ENDED):
            assert NEXT[TABLE[state, word, want]] in {State.OWNED, State.FREE}
    assert {TABLE[state, Proof.LOST, DesiredOwner.MOVE] for state in (State.OWNED, State.RELEASING)} == {Act.FORCE}


def test_handover_never_forgets_a_holder_that_is_only_lost() -> None:
    kept = {NEXT[TABLE[state, Proof.LOST, DesiredOwner.LEAVE]] or state for state in (State.OWNED, State.RELEASING)}
    assert kept == {State.RELEASING}


def test_handover_table_has_no_row_for_impossible_cases() -> None:
    gone = (Proof.RELEASED, Proof.LOST)  # an ended process has a successor in its pod
    assert set(product(State, Proof, DesiredOwner)) - set(TABLE) == {
        *product(
            [State.FREE], Proof, [DesiredOwner.STAY, DesiredOwner.LEAVE]
        ),  # nobody holds it, nothing is wanted of it
        *product([State.FREE], [Proof.ENDED], DesiredOwner),
        *product([State.OWNED], gone, [DesiredOwner.STAY]),  # it gave the queue up, or is lost
    }


def test_docs_handover_page_has_the_diagram_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "handover.md").read_text()
    assert f"```mermaid\n{mermaid_diagram()}```" in page


def test_report_is_parsed_and_unknown_fields_are_ignored() -> None:
    text = '{"member": "m1", "uid": "u", "generation": 3, "held": {"t": {"b": "0-1"}}, "inflight": 4, "mood": "good"}'
    assert read_report(text).working == {Queue("t", "b", 0), Queue("t", "b", 1)}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"member": "m1"}', '{"member": "m", "uid": "u", "generation": 1, "held": {"t": {"b": "x"}}}'],
)
def test_report_that_is_invalid_is_rejected_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^The report cannot be read: "):
        read_report(text)


@pytest.mark.parametrize(
    ("asked", "leaving", "unheard", "lost"),
    [(0.0, 0.0, 500.0, False), (120.0, 0.0, 119.0, False), (120.0, 0.0, 120.0, True), (5.0, 120.0, 120.0, True)],
    ids=["nobody asked it", "heard meanwhile", "two minutes of both", "asked for all when it was told to leave"],
)
def test_member_ready_but_silent_is_lost_two_minutes_after_revocation_or_termination(
    asked: float, leaving: float, unheard: float, *, lost: bool
) -> None:
    seen = HolderEvidence(ready=True, unheard=unheard, leaving=leaving, terminating=leaving > 0)
    assert seen.lost(RULES, asked) is lost
