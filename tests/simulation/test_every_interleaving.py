"""Small configurations around a handover, in every order of transitions; planted bugs test the exploration itself."""

import os
from functools import cache

import pytest

from simulation import bugs
from simulation.bugs import Plant, planted
from simulation.exploration import bugs as small_bugs
from simulation.exploration.configurations import CONFIGURATIONS, DEEP
from simulation.exploration.search import FAIR, HEALING, Coverage, Exploration
from simulation.judge import InvariantError

IS_DEEP = os.environ.get("ROTA_EXPLORE") == "deep"
EXPLORED = CONFIGURATIONS | (DEEP if IS_DEEP else {})

# Transitions that need not happen. The faults among them happen as often as a configuration allows.
UNFAIR = {
    *("restart", "restart amid a write", "failover", "failover amid a write", "blind"),
    *("crash", "die", "phase", "make old", "hang", "lose", "terminate", "app", "fail", "late", "stale"),
    *("route", "pause", "delete", "reader", "schema", "absence", "send"),
}

LARGE_STATES = 30_000  # a larger configuration takes up to two minutes

# The configuration that finds each bug within seconds. The others need budgets, routes or brokers' locks.
FINDERS: dict[Plant, str] = {
    bugs.grant_without_acknowledgement: "record-midway",
    bugs.revoke_skipped: "record-midway",
    bugs.draining_counts_as_released: "record-midway",
    bugs.idle_counts_as_released: "record-midway",
    bugs.any_generation_acknowledges: "record-midway",
    bugs.unfinished_drain_is_enough: "leaving",
    bugs.absence_is_an_end: "blind",
    bugs.a_crash_is_an_end: "stale",
    bugs.lost_at_once: "stale",
    bugs.barrier_ignored: "record-midway",
    bugs.recovery_below_what_was_seen: "record-midway",
    bugs.lower_generations_obeyed: "stale",
    bugs.sent_documents_always_obeyed: "stale",
    bugs.final_drain_forgotten: "leaving-midway",
    bugs.released_before_empty: "record-midway",
    bugs.namesakes_are_one: "leaving-midway",
    bugs.orphans_wait_for_gates: "late",
    bugs.written_at_every_reconcile: "stale",
    small_bugs.responses_of_an_earlier_lease_accepted: "pause",
    small_bugs.conflicts_ignored: "dying",
    small_bugs.failed_reader_counts_as_released: "reader",
    small_bugs.member_forgets: "three",
    small_bugs.write_in_flight_sent: "hanging",
    small_bugs.sent_generation_not_stored: "three",
    small_bugs.start_not_counted: "crash",
    small_bugs.incarnation_not_compared: "crash",
    small_bugs.share_without_incarnation: "crash",
    small_bugs.incarnations_proved_by_any_generation: "schemas",
}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if EXPLORED[name].min_states < LARGE_STATES:
        return []
    return [pytest.mark.slow("every interleaving of the larger configurations")]


@cache
def explore(name: str) -> Coverage:
    return Exploration(EXPLORED[name]).run()


@pytest.mark.timeout(3600)  # no performance limit: it must end on the slowest machine
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in EXPLORED])
def test_interleaving_in_every_order_keeps_all_invariants(name: str) -> None:
    assert explore(name).states >= EXPLORED[name].min_states


@pytest.mark.timeout(3600)
@pytest.mark.slow("the exploration covers every kind of event")
def test_interleaving_exploration_includes_every_kind_of_event() -> None:
    happened = {kind for name in EXPLORED for kind in explore(name).kinds}
    assert {*HEALING, *FAIR, *UNFAIR} - happened == set()


@pytest.mark.parametrize(("bug", "name"), FINDERS.items(), ids=lambda argument: getattr(argument, "__name__", argument))
def test_interleaving_exploration_finds_each_planted_bug(bug: Plant, name: str) -> None:
    with planted(bug), pytest.raises(InvariantError):
        Exploration(CONFIGURATIONS[name]).run()
