"""Tests that lags, delays and lag states of many queues at once equal the results of `rota.lag` for each queue."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.lag import LagState, OffsetSample, compute_delay, compute_lag_state
from rota.lag_columns import (
    LAG_STATES,
    LAG_UNKNOWN,
    NOT_COMMITTED,
    OFFSET_UNKNOWN,
    START_CODES,
    START_UNKNOWN,
    OffsetColumns,
    SampleWindow,
    compute_delays,
    compute_lag_states,
    compute_lags,
)
from rota.spec import StartFrom

POSITIONS = [StartFrom(position="Latest"), StartFrom(position="Earliest"), StartFrom(position="Timestamp")]
offsets = st.integers(0, 7)
samples_without_time = st.builds(
    OffsetSample,
    st.just(0.0),
    offsets,
    offsets,
    st.one_of(st.none(), offsets, st.just(OFFSET_UNKNOWN)),
    st.booleans(),
)
# A few queues: each has samples with the intervals before them, and the start position of its group.
intervals = st.sampled_from([1.0, 15.0, 60.0, 240.0])
histories = st.lists(st.tuples(intervals, samples_without_time), min_size=1, max_size=9)
queues = st.lists(st.tuples(histories, st.sampled_from(POSITIONS)), max_size=6)


class Row(NamedTuple):
    """The index of a queue, and of one of its samples."""

    queue: int
    sample: int


def with_times(history: Sequence[tuple[float, OffsetSample]]) -> list[OffsetSample]:
    times = np.cumsum([interval for interval, _ in history])
    return [sample._replace(sampled_at=float(time)) for time, (_, sample) in zip(times, history, strict=True)]


def shuffled_rows(histories: Sequence[Sequence[OffsetSample]], order: Sequence[int]) -> list[Row]:
    """Return a row for each sample, in an order in which the samples of each queue stay sorted."""
    rows = [Row(queue, sample) for queue, history in enumerate(histories) for sample in range(len(history))]
    numbered = sorted(zip(order, rows, strict=False), key=lambda pair: (pair[1].sample, pair[0]))
    return [row for _, row in numbered]


def columns(
    queue_samples: Sequence[tuple[Sequence[OffsetSample], StartFrom]], order: Sequence[int]
) -> tuple[OffsetColumns, list[int]]:
    """Return the samples of all queues as columns, and the index of each queue's last sample."""
    histories = [history for history, _ in queue_samples]
    rows = shuffled_rows(histories, order)
    index_of = {row: index for index, row in enumerate(rows)}
    samples = [histories[row.queue][row.sample] for row in rows]
    committed = [sample.committed_offset for sample in samples]
    positions = [queue_samples[row.queue][1].position for row in rows]
    offset_columns = OffsetColumns(
        np.array([sample.sampled_at for sample in samples], np.float64),
        np.array([sample.min_offset for sample in samples], np.int64),
        np.array([sample.max_offset for sample in samples], np.int64),
        np.array([NOT_COMMITTED if offset is None else offset for offset in committed], np.int64),
        np.array([sample.has_owner for sample in samples], np.bool_),
        np.array([index_of.get(Row(row.queue, row.sample - 1), -1) for row in rows], np.intp),
        np.array([START_CODES.get(position, START_UNKNOWN) for position in positions], np.int8),
    )
    return offset_columns, [index_of[Row(queue, len(history) - 1)] for queue, history in enumerate(histories)]


def samples_in_window(samples: Sequence[OffsetSample], window: SampleWindow) -> list[OffsetSample]:
    now = samples[-1].sampled_at
    latest_first = [
        sample
        for number, sample in enumerate(reversed(samples))
        if now - sample.sampled_at <= window.always_within_seconds
        or (number < window.max_samples and now - sample.sampled_at <= window.max_age_seconds)
    ]
    return latest_first[::-1]


def with_known_offset(samples: Sequence[OffsetSample]) -> list[OffsetSample]:
    return [sample for sample in samples if sample.committed_offset != OFFSET_UNKNOWN]


@settings(max_examples=60)
@given(
    queues,
    st.permutations(range(54)),
    st.sampled_from([SampleWindow(99), SampleWindow(3, 300.0, 155.0), SampleWindow(2)]),
)
def test_lag_columns_agree_with_the_samples_of_each_queue(
    drawn: Sequence[tuple[Sequence[tuple[float, OffsetSample]], StartFrom]], order: Sequence[int], window: SampleWindow
) -> None:
    queue_samples = [(with_times(history), start_from) for history, start_from in drawn]
    offset_columns, last_rows = columns(queue_samples, order)
    wanted_rows = np.array(last_rows, np.intp)
    lags = compute_lags(offset_columns)
    states = compute_lag_states(offset_columns, lags, wanted_rows, window).tolist()
    delays = compute_delays(offset_columns, lags, wanted_rows).tolist()
    for (samples, start_from), row, state, delay in zip(queue_samples, last_rows, states, delays, strict=True):
        if samples[-1].committed_offset == OFFSET_UNKNOWN:
            assert lags[row] == LAG_UNKNOWN
            assert np.isnan(delay)
            continue
        in_window = with_known_offset(samples_in_window(samples, window))
        assert LAG_STATES[state] == compute_lag_state(in_window, start_from)
        with_offset = with_known_offset(samples)
        lag = with_offset[-1].lag(start_from)
        assert lags[row] == (LAG_UNKNOWN if lag is None else lag)
        expected = compute_delay(with_offset, start_from)
        assert np.isnan(delay) if expected is None else delay == pytest.approx(expected)


def test_lag_columns_have_a_number_for_every_verdict() -> None:
    assert (None, *LagState) == LAG_STATES
