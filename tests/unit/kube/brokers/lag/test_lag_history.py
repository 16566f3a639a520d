"""Samples of queues over time, stored in columns; results agree with those of the samples themselves."""

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

LATEST = StartFrom()
EARLIEST = StartFrom(position="Earliest")
AT_A_TIME = StartFrom(position="Timestamp")
ALL = frozenset(range(10))


class Sample(NamedTuple):
    """One poll of several queues."""

    at: float
    queue_samples: Mapping[int, QueueSample]
    consumed_queues: frozenset[int] = ALL


def a_history(*samples: Sample) -> LagHistory:
    history = LagHistory()
    for sample in samples:
        history.add_sample(*sample)
    return history


def test_lag_history_without_samples_is_empty() -> None:
    assert a_history().compute_queue_lags(LATEST) == {}
    assert a_history(Sample(0, {})).compute_queue_lags(LATEST) == {}


def test_lag_history_of_one_sample_has_lag_but_no_verdict_or_rate() -> None:
    assert a_history(Sample(0, {3: QueueSample(0, 10, 4)})).compute_queue_lags(LATEST) == {3: QueueLag(0, 10, 4, 6)}


def test_lag_history_of_a_queue_at_its_end_is_keeping_up() -> None:
    queue_lags = a_history(
        Sample(0, {0: QueueSample(0, 10, 10)}), Sample(10, {0: QueueSample(0, 30, 30)})
    ).compute_queue_lags(LATEST)
    assert queue_lags == {0: QueueLag(0, 30, 30, 0, 0.0, LagState.KEEPING_UP, 2.0, 2.0)}


def test_lag_history_of_an_unanswered_queue_has_no_lag() -> None:
    queue_lags = a_history(
        Sample(0, {0: QueueSample(0, 10, 4)}), Sample(15, {0: QueueSample(0, 10, None, is_known=False)})
    ).compute_queue_lags(LATEST)
    assert queue_lags == {0: QueueLag(0, 10, incoming_rate=0.0)}


def test_lag_history_with_an_offset_above_the_end_has_no_lag() -> None:
    queue_lags = a_history(
        Sample(0, {0: QueueSample(0, 10, 10)}), Sample(15, {0: QueueSample(0, 3, 10)})
    ).compute_queue_lags(LATEST)
    assert (queue_lags[0].committed, queue_lags[0].lag, queue_lags[0].delay) == (10, None, None)


def test_lag_history_gives_no_verdict_from_an_offset_above_the_end() -> None:
    queue_lags = a_history(
        Sample(0, {0: QueueSample(0, 0, 1)}), Sample(15, {0: QueueSample(0, 1, 1)})
    ).compute_queue_lags(LATEST)
    assert (queue_lags[0].lag, queue_lags[0].lag_state) == (0, None)


def test_lag_history_is_kept_while_other_queues_appear_and_disappear() -> None:
    behind = QueueSample(0, 10, 4)
    history = a_history(
        Sample(0, {0: behind, 1: behind}), Sample(15, {0: behind, 1: behind}), Sample(30, {1: behind, 2: behind})
    )
    queue_lags = history.compute_queue_lags(LATEST)
    assert [*queue_lags] == [1, 2]
    assert (queue_lags[1].lag_state, queue_lags[2].lag_state) == (LagState.STALLED, None)
    assert (queue_lags[1].incoming_rate, queue_lags[2].incoming_rate) == (0.0, None)


def test_lag_history_of_a_returning_queue_starts_over() -> None:
    history = a_history(Sample(0, {0: QueueSample(0, 90, 90)}), Sample(15, {}), Sample(30, {0: QueueSample(0, 9, 9)}))
    assert history.compute_queue_lags(LATEST)[0].lag_state is None


def test_lag_history_keeps_the_delay_of_an_old_message() -> None:
    samples = [Sample(15.0 * number, {0: QueueSample(0, 10 if number < 4 else 20, 10)}) for number in range(200)]
    delay = a_history(*samples).compute_queue_lags(LATEST)[0].delay
    assert delay == pytest.approx(15 * (199 - 4), abs=OLDER_INTERVAL_SECONDS)


def test_lag_history_is_bounded() -> None:
    history = a_history(*(Sample(15.0 * number, {0: QueueSample(0, 1, 0)}) for number in range(2000)))
    oldest = 15.0 * (MAX_SAMPLES + 1) + OLDER_INTERVAL_SECONDS * (MAX_OLDER_SAMPLES + 1)
    delay = history.compute_queue_lags(LATEST)[0].delay
    assert delay is not None
    assert OLDER_INTERVAL_SECONDS * (MAX_OLDER_SAMPLES - 1) <= delay <= oldest


offsets = st.integers(0, 6)
rows = st.builds(QueueSample, offsets, offsets, st.none() | offsets, st.booleans())
histories = st.lists(st.tuples(st.dictionaries(st.integers(0, 2), rows), st.frozensets(st.integers(0, 2))), max_size=9)


@given(histories, st.sampled_from([LATEST, EARLIEST, AT_A_TIME]), st.sampled_from([0, VECTORIZE_FROM_QUEUES]))
def test_lag_history_agrees_with_the_samples(
    polls: Sequence[tuple[Mapping[int, QueueSample], frozenset[int]]], start_from: StartFrom, vectorize_from: int
) -> None:
    history = LagHistory(vectorize_from)
    samples_by_queue: dict[int, list[OffsetSample]] = {}
    for number, (queue_samples, consumed) in enumerate(polls):
        sampled_at = 15.0 * number
        history.add_sample(sampled_at, queue_samples, consumed)
        samples_by_queue = {queue_id: samples_by_queue.get(queue_id, []) for queue_id in queue_samples}
        for queue_id, sample in queue_samples.items():
            if sample.is_known:
                samples_by_queue[queue_id].append(
                    OffsetSample(
                        sampled_at, sample.min_offset, sample.max_offset, sample.committed, queue_id in consumed
                    )
                )
    queue_lags = history.compute_queue_lags(start_from)
    assert {*queue_lags} == {*samples_by_queue}
    for queue_id, samples in samples_by_queue.items():
        if samples and samples[-1].sampled_at == 15.0 * (len(polls) - 1):
            assert queue_lags[queue_id].lag_state == compute_lag_state(samples, start_from)
            assert queue_lags[queue_id].lag == samples[-1].lag(start_from)
            assert queue_lags[queue_id].delay == (
                None if (delay := compute_delay(samples, start_from)) is None else pytest.approx(delay)
            )
        else:
            assert queue_lags[queue_id][2:6] == (None, None, None, None)


def test_lag_history_rates_restart_at_an_offset_reset_or_topic_recreation() -> None:
    history = a_history(
        Sample(0, {0: QueueSample(0, 1000, 900)}),
        Sample(10, {0: QueueSample(0, 1010, 910)}),
        Sample(20, {0: QueueSample(0, 5, 0)}),
    )
    assert history.compute_queue_lags(LATEST)[0][6:] == (None, None), "one sample has no rate"
    history.add_sample(30, {0: QueueSample(0, 25, 10)}, ALL)
    assert history.compute_queue_lags(LATEST)[0][6:] == (2.0, 1.0)
    history.add_sample(40, {0: QueueSample(0, 45, 5)}, ALL)
    assert history.compute_queue_lags(LATEST)[0][6:] == (2.0, None)
    history.add_sample(50, {0: QueueSample(0, 65, 35)}, ALL)
    assert history.compute_queue_lags(LATEST)[0][6:] == (2.0, 3.0)
    history.add_sample(60, {0: QueueSample(0, 85, None, is_known=False)}, ALL)
    assert history.compute_queue_lags(LATEST)[0][6:] == (2.0, None)
    history.add_sample(70, {0: QueueSample(0, 105, 75)}, ALL)
    assert history.compute_queue_lags(LATEST)[0].consumed_rate == pytest.approx(7 / 3), (
        "30 s ago its committed offset was 5"
    )


def test_lag_history_of_a_queue_that_ends_before_its_start_is_unknown() -> None:
    history = a_history(
        Sample(0, {0: QueueSample(0, 5, 5)}),
        Sample(15, {0: QueueSample(0, 5, 5)}),
        Sample(30, {0: QueueSample(9, 5, 5)}),
    )
    assert history.compute_queue_lags(LATEST)[0][3:6] == (None, None, None)


def test_lag_history_flow_is_the_inflow_of_up_to_an_hour() -> None:
    history = a_history(
        *(Sample(15.0 * number, {0: QueueSample(0, 30 * number, 0), 1: QueueSample(0, 7, 0)}) for number in range(8))
    )
    assert history.incoming_rates() == {0: None, 1: None}, "not two minutes yet"
    history.add_sample(120, {0: QueueSample(0, 240, 0), 1: QueueSample(0, 7, 0)}, ALL)
    assert history.incoming_rates() == {0: 2.0, 1: 0.0}
    for number in range(9, 240):
        history.add_sample(
            15.0 * number, {0: QueueSample(0, 240 + (number >= 200) * 3000, 0), 1: QueueSample(0, 7, 0)}, ALL
        )
    hour, burst = history.incoming_rates()[0], history.compute_queue_lags(LATEST)[0].incoming_rate
    assert hour == pytest.approx(3240 / (15 * 239), rel=0.1)
    assert burst == 0.0, "the rate of the last samples alone differs"


def test_lag_history_flow_starts_over_for_recreated_topics_and_new_queues() -> None:
    history = a_history(*(Sample(15.0 * number, {0: QueueSample(0, 90000 + number, 0)}) for number in range(100)))
    for number in range(100, 109):
        history.add_sample(
            15.0 * number, {0: QueueSample(0, 15 * (number - 100), 0), 1: QueueSample(0, number, 0)}, ALL
        )
        assert history.incoming_rates() == ({0: None, 1: None} if number < 108 else {0: 1.0, 1: pytest.approx(1 / 15)})
    assert a_history().incoming_rates() == {}
