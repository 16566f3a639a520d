"""The order of a group's records, independent of their writers' clocks: in the history, and in a replay."""

from datetime import UTC, datetime, timedelta

import pytest

from pipeline.group_lines import gaps_in, group_records
from pipeline.journal_lines import Line, handover_line, owners_line, plan_line, time_at
from rota.pipeline.history.audit import audit_group
from rota.pipeline.history.ordering import Entry, Gap, Gaps, RecordStep, order_records
from rota.pipeline.replay.group_history import sort_facts
from rota.records import RECORD_SCHEMA, MembershipRecord, OffsetsRecord

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def membership(generation: int, seconds: float) -> MembershipRecord:
    at = NOON + timedelta(seconds=seconds)
    return MembershipRecord(schema=RECORD_SCHEMA, at=at, group="shop/orders", generation=generation, members={})


def offsets(seconds: float) -> OffsetsRecord:
    at = NOON + timedelta(seconds=seconds)
    return OffsetsRecord(schema=RECORD_SCHEMA, at=at, group="shop/orders", topics={}, verdicts={})


def order(*facts: MembershipRecord | OffsetsRecord) -> list[tuple[float, int]]:
    return [((fact.at - NOON).total_seconds(), getattr(fact, "generation", 0)) for fact in sort_facts(facts)]


def test_replay_order_follows_generations_when_a_leaders_clock_is_behind() -> None:
    ordered = order(membership(41, 0), membership(42, 10), membership(43, 7), membership(44, 8), membership(45, 20))
    assert ordered == [(0, 41), (10, 42), (10, 43), (10, 44), (20, 45)]


def test_replay_order_keeps_samples_at_their_own_time() -> None:
    assert order(membership(42, 10), offsets(9), membership(43, 7), offsets(11)) == [
        (9, 0),
        (10, 42),
        (10, 43),
        (11, 0),
    ]


def test_replay_order_of_a_recreated_group_comes_after_the_previous_group() -> None:
    assert order(membership(41, 0), membership(1, 2), membership(2, 3)) == [(0, 41), (2, 1), (3, 2)]


def test_replay_order_of_a_group_recreated_unobserved_comes_after_the_previous_group() -> None:
    assert order(membership(41, 0), membership(5, 600), membership(6, 700)) == [(0, 41), (600, 5), (700, 6)]


def entries_of(lines: list[Line], gaps: Gaps | None = None) -> list[Entry]:
    return order_records(group_records(lines).assignments(), gaps or Gaps())


def test_timeline_order_numbers_lives_chains_and_epochs() -> None:
    entries = entries_of(
        [
            plan_line("g", 1, 0),
            plan_line("g", 2, 10),
            owners_line("g", 2, 20),
            plan_line("g", 3, 30),
            plan_line("g", 5, 40),  # 4 is missing
            owners_line("g", 5, 50),
            plan_line("g", 6, 60),
            plan_line("g", 1, 70),  # deleted and recreated
        ]
    )
    assert [(entry.generation, entry.life, entry.chain, entry.epoch) for entry in entries] == [
        (1, 0, 1, 1),
        (2, 0, 1, 1),
        (2, 0, 1, 2),
        (3, 0, 1, 2),
        (5, 0, 2, 3),
        (5, 0, 2, 4),
        (6, 0, 2, 4),
        (1, 1, 3, 5),
    ]


def test_timeline_order_raises_the_time_of_a_record_whose_writers_clock_is_behind() -> None:
    entries = entries_of([plan_line("g", 1, 0), plan_line("g", 2, 20), plan_line("g", 3, 17)])
    assert [entry.at for entry in entries] == [time_at(0), time_at(20), time_at(20)]


def test_timeline_order_knows_the_next_records_and_the_modes_of_both_owners_records() -> None:
    immediate = owners_line("g", 3, 30) | {"rules": {"handover": {"mode": "Immediate"}}}
    _, plan, last = entries_of([owners_line("g", 2, 0), plan_line("g", 3, 10), immediate])
    assert (plan.next_owners_at, plan.next_plan_at) == (time_at(30), None)
    assert plan.modes == {"Cooperative", "Immediate"}
    assert last.next_owners_at is None
    assert last.modes == {"Immediate"}


@pytest.mark.parametrize(
    ("since", "until", "marked"),
    [
        (5, 15, [RecordStep.GAP_MARKER]),  # it covers plan 2
        (15, 5, [RecordStep.GAP_MARKER]),  # the clock was set back in between
        (11, 15, []),  # the next plan is the successor: nothing is missing
        (25, 35, [RecordStep.END_MARKER]),
        (5, 35, [RecordStep.GAP_MARKER, RecordStep.GAP_MARKER, RecordStep.END_MARKER]),
    ],
)
def test_timeline_order_marks_where_a_gap_may_hide_records(
    since: float, until: float, marked: list[RecordStep]
) -> None:
    gaps = Gaps([Gap(time_at(since), time_at(until))])
    entries = entries_of([plan_line("g", 1, 0), plan_line("g", 2, 10), plan_line("g", 3, 20)], gaps)
    assert [entry.step for entry in entries if entry.record is None] == marked
    assert all(entry.is_break for entry in entries if entry.record is None)


def test_timeline_order_finds_gaps_that_overlap() -> None:
    spans = [(50, 60), (0, 30), (10, 20), (40, 41)]
    gaps = Gaps(Gap(time_at(since), time_at(until)) for since, until in spans)
    covered = [second for second in range(-1, 70) if gaps.cover(time_at(second))]
    assert covered == [*range(31), 40, 41, *range(50, 61)]
    assert gaps.earliest_start(ending_since=time_at(41)) == time_at(40)
    assert gaps.earliest_start(ending_since=time_at(61)) is None


def test_timeline_intervals_end_after_they_start_where_only_the_handovers_of_an_assignment_are_recorded() -> None:
    """Both handovers have one time; the first of them is the break, in whatever order they are read."""
    handovers = [
        handover_line("g", 7, 60, "Grant", **{"from": "m1", "to": "m2", "queues": {"t": {"a": number}}})
        for number in ("0", "1")
    ]
    for order_of_lines in (handovers, handovers[::-1]):
        lines = [owners_line("g", 5, 0, m1="0-1"), *order_of_lines]
        found = audit_group(group_records(lines), gaps_in([]))
        assert [(row.member, row.since, row.until) for row in found.intervals] == [
            ("m1", time_at(0), time_at(0)),
            ("m2", time_at(60), None),
        ] * 2
