"""What was seen of queues over time, kept in columns: it says what the looks themselves say."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.kube.brokers.lag.lag_history import (
    MAX_OLDER_SAMPLES,
    MAX_SAMPLES,
    OLDER_INTERVAL_SECONDS,
    VECTORIZE_FROM_QUEUES,
    LagHistory,
    QueueLag,
    QueueSample,
)
from rota.lag import LagState, OffsetSample, compute_delay, compute_lag_state
from rota.spec import StartFrom

LATEST, EARLIEST, AT_A_TIME = StartFrom(), StartFrom(position="Earliest"), StartFrom(position="Timestamp")
ALL = frozenset(range(10))


class One(NamedTuple):
    """A look at several queues."""

    at: float
    found: Mapping[int, QueueSample]
    worked: frozenset[int] = ALL


def seen(*looks: One) -> LagHistory:
    history = LagHistory()
    for look in looks:
        history.add_sample(*look)
    return history


def test_lag_history_without_samples_is_empty() -> None:
    assert seen().judge_queues(LATEST) == {}
    assert seen(One(0, {})).judge_queues(LATEST) == {}


def test_lag_history_of_one_sample_has_lag_but_no_verdict_or_rate() -> None:
    assert seen(One(0, {3: QueueSample(0, 10, 4)})).judge_queues(LATEST) == {3: QueueLag(0, 10, 4, 6)}


def test_lag_history_of_a_queue_at_its_end_is_keeping_up() -> None:
    found = seen(One(0, {0: QueueSample(0, 10, 10)}), One(10, {0: QueueSample(0, 30, 30)})).judge_queues(LATEST)
    assert found == {0: QueueLag(0, 30, 30, 0, 0.0, LagState.KEEPING_UP, 2.0, 2.0)}


def test_lag_history_of_an_unanswered_queue_has_no_lag() -> None:
    found = seen(
        One(0, {0: QueueSample(0, 10, 4)}), One(15, {0: QueueSample(0, 10, None, is_known=False)})
    ).judge_queues(LATEST)
    assert found == {0: QueueLag(0, 10, incoming_rate=0.0)}


def test_lag_history_with_an_offset_above_the_end_has_no_lag() -> None:
    found = seen(One(0, {0: QueueSample(0, 10, 10)}), One(15, {0: QueueSample(0, 3, 10)})).judge_queues(LATEST)
    assert (found[0].committed, found[0].lag, found[0].delay) == (10, None, None)


def test_lag_history_gives_no_verdict_from_an_offset_above_the_end() -> None:
    found = seen(One(0, {0: QueueSample(0, 0, 1)}), One(15, {0: QueueSample(0, 1, 1)})).judge_queues(LATEST)
    assert (found[0].lag, found[0].lag_state) == (0, None)


def test_lag_history_is_kept_while_other_queues_appear_and_disappear() -> None:
    behind = QueueSample(0, 10, 4)
    history = seen(One(0, {0: behind, 1: behind}), One(15, {0: behind, 1: behind}), One(30, {1: behind, 2: behind}))
    found = history.judge_queues(LATEST)
    assert [*found] == [1, 2]
    assert (found[1].lag_state, found[2].lag_state) == (LagState.STALLED, None)
    assert (found[1].incoming_rate, found[2].incoming_rate) == (0.0, None)


def test_lag_history_of_a_returning_queue_starts_over() -> None:
    history = seen(One(0, {0: QueueSample(0, 90, 90)}), One(15, {}), One(30, {0: QueueSample(0, 9, 9)}))
    assert history.judge_queues(LATEST)[0].lag_state is None


def test_lag_history_keeps_the_delay_of_an_old_message() -> None:
    looks = [One(15.0 * place, {0: QueueSample(0, 10 if place < 4 else 20, 10)}) for place in range(200)]
    waited = seen(*looks).judge_queues(LATEST)[0].delay
    assert waited == pytest.approx(15 * (199 - 4), abs=OLDER_INTERVAL_SECONDS)


def test_lag_history_is_bounded() -> None:
    history = seen(*(One(15.0 * place, {0: QueueSample(0, 1, 0)}) for place in range(2000)))
    oldest = 15.0 * (MAX_SAMPLES + 1) + OLDER_INTERVAL_SECONDS * (MAX_OLDER_SAMPLES + 1)
    waited = history.judge_queues(LATEST)[0].delay
    assert waited is not None
    assert OLDER_INTERVAL_SECONDS * (MAX_OLDER_SAMPLES - 1) <= waited <= oldest


offsets = st.integers(0, 6)
rows = st.builds(QueueSample, offsets, offsets, st.none() | offsets, st.booleans())
histories = st.lists(st.tuples(st.dictionaries(st.integers(0, 2), rows), st.frozensets(st.integers(0, 2))), max_size=9)


@given(histories, st.sampled_from([LATEST, EARLIEST, AT_A_TIME]), st.sampled_from([0, VECTORIZE_FROM_QUEUES]))
def test_lag_history_agrees_with_the_samples(
    told: Sequence[tuple[Mapping[int, QueueSample], frozenset[int]]], begins: StartFrom, few: int
) -> None:
    history = LagHistory(few)
    kept: dict[int, list[OffsetSample]] = {}
    for place, (found, worked) in enumerate(told):
        at = 15.0 * place
        history.add_sample(at, found, worked)
        kept = {number: kept.get(number, []) for number in found}
        for number, it in found.items():
            if it.is_known:
                kept[number].append(OffsetSample(at, it.min_offset, it.max_offset, it.committed, number in worked))
    judged = history.judge_queues(begins)
    assert {*judged} == {*kept}
    for number, looks in kept.items():
        if looks and looks[-1].sampled_at == 15.0 * (len(told) - 1):
            assert judged[number].lag_state == compute_lag_state(looks, begins)
            assert judged[number].lag == looks[-1].lag(begins)
            assert judged[number].delay == (
                None if (there := compute_delay(looks, begins)) is None else pytest.approx(there)
            )
        else:
            assert judged[number][2:6] == (None, None, None, None)


def test_lag_history_rates_restart_at_an_offset_reset_or_topic_recreation() -> None:
    history = seen(
        One(0, {0: QueueSample(0, 1000, 900)}),
        One(10, {0: QueueSample(0, 1010, 910)}),
        One(20, {0: QueueSample(0, 5, 0)}),
    )
    assert history.judge_queues(LATEST)[0][6:] == (None, None), "one look tells no rate"
    history.add_sample(30, {0: QueueSample(0, 25, 10)}, ALL)
    assert history.judge_queues(LATEST)[0][6:] == (2.0, 1.0)
    history.add_sample(40, {0: QueueSample(0, 45, 5)}, ALL)
    assert history.judge_queues(LATEST)[0][6:] == (2.0, None)
    history.add_sample(50, {0: QueueSample(0, 65, 35)}, ALL)
    assert history.judge_queues(LATEST)[0][6:] == (2.0, 3.0)
    history.add_sample(60, {0: QueueSample(0, 85, None, is_known=False)}, ALL)
    assert history.judge_queues(LATEST)[0][6:] == (2.0, None)
    history.add_sample(70, {0: QueueSample(0, 105, 75)}, ALL)
    assert history.judge_queues(LATEST)[0].consumed_rate == pytest.approx(7 / 3), "30 s ago it was at 5"


def test_lag_history_of_a_queue_that_ends_before_its_start_is_unknown() -> None:
    history = seen(
        One(0, {0: QueueSample(0, 5, 5)}), One(15, {0: QueueSample(0, 5, 5)}), One(30, {0: QueueSample(9, 5, 5)})
    )
    assert history.judge_queues(LATEST)[0][3:6] == (None, None, None)


def test_lag_history_flow_is_the_inflow_of_up_to_an_hour() -> None:
    history = seen(
        *(One(15.0 * place, {0: QueueSample(0, 30 * place, 0), 1: QueueSample(0, 7, 0)}) for place in range(8))
    )
    assert history.incoming_rates() == {0: None, 1: None}, "not two minutes yet"
    history.add_sample(120, {0: QueueSample(0, 240, 0), 1: QueueSample(0, 7, 0)}, ALL)
    assert history.incoming_rates() == {0: 2.0, 1: 0.0}
    for place in range(9, 240):
        history.add_sample(
            15.0 * place, {0: QueueSample(0, 240 + (place >= 200) * 3000, 0), 1: QueueSample(0, 7, 0)}, ALL
        )
    hour, burst = history.incoming_rates()[0], history.judge_queues(LATEST)[0].incoming_rate
    assert hour == pytest.approx(3240 / (15 * 239), rel=0.1)
    assert burst == 0.0, "the last looks alone say something else"


def test_lag_history_flow_starts_over_for_recreated_topics_and_new_queues() -> None:
    history = seen(*(One(15.0 * place, {0: QueueSample(0, 90000 + place, 0)}) for place in range(100)))
    for place in range(100, 109):
        history.add_sample(15.0 * place, {0: QueueSample(0, 15 * (place - 100), 0), 1: QueueSample(0, place, 0)}, ALL)
        assert history.incoming_rates() == ({0: None, 1: None} if place < 108 else {0: 1.0, 1: pytest.approx(1 / 15)})
    assert seen().incoming_rates() == {}
