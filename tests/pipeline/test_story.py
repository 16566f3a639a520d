"""The order in which a group's records are played again, whatever the clocks of those who wrote them said."""

from datetime import UTC, datetime, timedelta

from rota.pipeline.replay.group_history import sort_facts
from rota.records import RECORD_SCHEMA, MembershipRecord, OffsetsRecord

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def document(generation: int, seconds: float) -> MembershipRecord:
    at = NOON + timedelta(seconds=seconds)
    return MembershipRecord(schema=RECORD_SCHEMA, at=at, group="shop/orders", generation=generation, members={})


def look(seconds: float) -> OffsetsRecord:
    at = NOON + timedelta(seconds=seconds)
    return OffsetsRecord(schema=RECORD_SCHEMA, at=at, group="shop/orders", topics={}, verdicts={})


def order(*facts: MembershipRecord | OffsetsRecord) -> list[tuple[float, int]]:
    return [((it.at - NOON).total_seconds(), getattr(it, "generation", 0)) for it in sort_facts(facts)]


def test_replay_order_follows_generations_when_a_leaders_clock_is_behind() -> None:
    found = order(document(41, 0), document(42, 10), document(43, 7), document(44, 8), document(45, 20))
    assert found == [(0, 41), (10, 42), (10, 43), (10, 44), (20, 45)]


def test_replay_order_keeps_samples_at_their_own_time() -> None:
    assert order(document(42, 10), look(9), document(43, 7), look(11)) == [(9, 0), (10, 42), (10, 43), (11, 0)]


def test_replay_order_of_a_recreated_group_comes_after_the_previous_group() -> None:
    assert order(document(41, 0), document(1, 2), document(2, 3)) == [(0, 41), (2, 1), (3, 2)]


def test_replay_order_of_a_group_recreated_unobserved_comes_after_the_previous_group() -> None:
    assert order(document(41, 0), document(5, 600), document(6, 700)) == [(0, 41), (600, 5), (700, 6)]
