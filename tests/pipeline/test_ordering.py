"""The order in which a group's records are replayed, independent of their writers' clocks."""

from datetime import UTC, datetime, timedelta

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
