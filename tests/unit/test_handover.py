"""The handover table and its proofs, edge by edge."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rota import handover
from rota.documents import Report, read_report
from rota.handover import GIVEN_UP, NEXT, TABLE, Act, Proof, Seen, State, Taken, Want, act, picture, proof
from rota.model import Holder, Queue
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
    taken = None if since is None else Taken(since, ago)
    return proof(Q, M1, taken, Seen(report=report, working=working, **seen), RULES)


def test_an_owner_that_obeys_and_works_the_queue_no_more_has_released_it() -> None:
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
def test_nothing_less_is_a_release(report: Report | None) -> None:
    assert known(report=report) is Proof.NONE


def test_an_owner_that_has_not_taken_up_its_queue_yet_has_not_released_it() -> None:
    assert known(since=None, report=a_report(generation=SINCE)) is Proof.NONE
    assert known(since=None, ended=True) is Proof.ENDED


def test_a_terminating_member_has_released_everything_once_its_final_drain_is_done() -> None:
    drained = a_report(generation=7, state="drained", final=True)
    assert known(terminating=True, report=drained) is Proof.RELEASED
    assert known(terminating=False, report=drained) is Proof.NONE
    assert known(terminating=True, report=a_report(generation=7, state="draining", final=True)) is Proof.NONE


def test_a_pod_that_ended_needs_no_report() -> None:
    assert known(ended=True) is Proof.ENDED


def test_a_member_is_lost_when_unheard_and_unready_or_unheard_for_very_long() -> None:
    assert known(ready=False, unheard=10) is Proof.LOST
    assert known(ready=False, unheard=9.9) is Proof.NONE
    assert known(ready=True, unheard=10) is Proof.NONE
    assert known(ready=True, unheard=GIVEN_UP, ago=GIVEN_UP) is Proof.LOST


def test_a_ready_member_is_never_given_up_before_it_had_time_to_see_that_it_must_release() -> None:
    assert known(ready=True, unheard=10 * GIVEN_UP, ago=GIVEN_UP - 1) is Proof.NONE
    assert known(since=None, ready=True, unheard=10 * GIVEN_UP) is Proof.NONE
    assert known(since=None, ready=False, unheard=10) is Proof.LOST


def test_a_ready_member_gets_two_minutes() -> None:
    assert known(ready=True, unheard=120.0, ago=120.0) is Proof.LOST
    assert known(ready=True, unheard=119.9, ago=120.0) is Proof.NONE
    assert known(ready=True, unheard=120.0, ago=119.9) is Proof.NONE


def test_who_may_drain_for_longer_gets_longer() -> None:
    patient = Handover(drain_timeout=Seconds(600))
    assert not Seen(unheard=689.0).lost(patient, 689.0)
    assert Seen(unheard=690.0).lost(patient, 690.0)


def test_nothing_known_of_a_holder_speaks_for_it() -> None:
    assert proof(Q, M1, Taken(SINCE, 0.0), Seen(), HASTY) is Proof.NONE
    assert proof(Q, M1, None, Seen(ready=False), HASTY) is Proof.NONE
    assert proof(Q, M1, None, Seen(unheard=60.0), HASTY) is Proof.NONE


def test_a_final_drain_is_a_release_whatever_the_member_ever_obeyed_if_it_is_its_own() -> None:
    fields = {"generation": 0, "state": "drained", "final": True}
    assert known(terminating=True, report=a_report(**fields)) is Proof.RELEASED
    assert known(terminating=True, report=a_report(**fields | {"uid": "uid-2"})) is Proof.NONE
    assert known(terminating=True, report=None) is Proof.NONE


def test_a_queue_goes_to_another_member_only_with_proof() -> None:
    granted = [
        (state, word) for (state, word, want), chosen in TABLE.items() if want is Want.MOVE and chosen is Act.GRANT
    ]
    assert all(word in {Proof.RELEASED, Proof.ENDED} for _, word in granted)
    forced = [word for (_, word, _), chosen in TABLE.items() if chosen is Act.FORCE]
    assert set(forced) == {Proof.LOST}


def test_gates_hold_back_revokes_and_nothing_else() -> None:
    for state, word, want in TABLE:
        free, held = act(state, word, want), act(state, word, want, held_back=True)
        assert held is (Act.KEEP if free is Act.REVOKE else free)


def test_immediate_takes_both_steps_in_one() -> None:
    for state, word, want in TABLE:
        assert act(state, word, want, immediate=True) is not Act.REVOKE
    assert act(State.OWNED, Proof.NONE, Want.MOVE, immediate=True) is Act.GRANT
    assert act(State.OWNED, Proof.NONE, Want.LEAVE, immediate=True) is Act.DROP


def test_immediate_changes_nothing_but_revokes() -> None:
    for state, word, want in TABLE:
        two_steps = act(state, word, want)
        assert two_steps is Act.REVOKE or act(state, word, want, immediate=True) is two_steps


def test_from_every_state_a_proof_leads_on() -> None:
    for state, want in product((State.OWNED, State.RELEASING), (Want.MOVE, Want.LEAVE)):
        for word in (Proof.RELEASED, Proof.ENDED):
            assert NEXT[TABLE[state, word, want]] in {State.OWNED, State.FREE}
    assert {TABLE[state, Proof.LOST, Want.MOVE] for state in (State.OWNED, State.RELEASING)} == {Act.FORCE}


def test_a_holder_that_is_only_lost_is_never_forgotten() -> None:
    kept = {NEXT[TABLE[state, Proof.LOST, Want.LEAVE]] or state for state in (State.OWNED, State.RELEASING)}
    assert kept == {State.RELEASING}


def test_what_cannot_come_about_has_no_row() -> None:
    gone = (Proof.RELEASED, Proof.ENDED, Proof.LOST)
    assert set(product(State, Proof, Want)) - set(TABLE) == {
        *product([State.FREE], Proof, [Want.STAY, Want.LEAVE]),  # nobody holds it, nothing is wanted of it
        *product([State.FREE], [Proof.ENDED], Want),
        *product([State.OWNED], gone, [Want.STAY]),  # he gave it up, or is gone
        *product([State.RELEASING], [Proof.ENDED], [Want.STAY]),
    }


def test_the_page_in_the_docs_has_the_theory_and_the_picture_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "handover.md").read_text()
    assert str(handover.__doc__).partition("\n\n")[2] in page
    assert f"```mermaid\n{picture()}```" in page


def test_a_report_is_read_and_later_fields_are_passed_over() -> None:
    text = '{"member": "m1", "uid": "u", "generation": 3, "held": {"t": {"b": "0-1"}}, "inflight": 4, "mood": "good"}'
    assert read_report(text).working == {Queue("t", "b", 0), Queue("t", "b", 1)}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"member": "m1"}', '{"member": "m", "uid": "u", "generation": 1, "held": {"t": {"b": "x"}}}'],
)
def test_what_is_no_report_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^The report cannot be read: "):
        read_report(text)


@pytest.mark.parametrize(
    ("asked", "leaving", "unheard", "lost"),
    [(0.0, 0.0, 500.0, False), (120.0, 0.0, 119.0, False), (120.0, 0.0, 120.0, True), (5.0, 120.0, 120.0, True)],
    ids=["nobody asked it", "heard meanwhile", "two minutes of both", "asked for all when it was told to leave"],
)
def test_who_is_ready_is_lost_two_minutes_after_it_was_asked_and_heard(
    asked: float, leaving: float, unheard: float, *, lost: bool
) -> None:
    seen = Seen(ready=True, unheard=unheard, leaving=leaving, terminating=leaving > 0)
    assert seen.lost(RULES, asked) is lost
