"""Many queues judged at once: each is told what `rota.lag` says of its looks alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.lag import LagState, OffsetSample, compute_delay, compute_lag_state
from rota.lag_columns import (
    LAG_STATES,
    NO_LAG,
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
looks = st.builds(
    OffsetSample,
    st.just(0.0),
    offsets,
    offsets,
    st.one_of(st.none(), offsets, st.just(OFFSET_UNKNOWN)),
    st.booleans(),
)
# Some queues, each with looks at times of its own, and where it begins.
waits = st.sampled_from([1.0, 15.0, 60.0, 240.0])
queues = st.lists(
    st.tuples(st.lists(st.tuples(waits, looks), min_size=1, max_size=9), st.sampled_from(POSITIONS)), max_size=6
)


def timed(waited: Sequence[tuple[float, OffsetSample]]) -> list[OffsetSample]:
    times = np.cumsum([wait for wait, _ in waited])
    return [look._replace(sampled_at=float(at)) for at, (_, look) in zip(times, waited, strict=True)]


def columns(
    of: Sequence[tuple[Sequence[OffsetSample], StartFrom]], order: Sequence[int]
) -> tuple[OffsetColumns, list[int]]:
    """Lay looks of all queues into columns, in an order that keeps each queue's own; and where the last ones are."""
    rows = [(number, place) for number, (seen, _) in enumerate(of) for place in range(len(seen))]
    rows = [row for _, row in sorted(zip(order, rows, strict=False), key=lambda it: (it[1][1], it[0]))]
    at = {row: index for index, row in enumerate(rows)}
    seen = [of[number][0][place] for number, place in rows]
    return OffsetColumns(
        np.array([it.sampled_at for it in seen], np.float64),
        np.array([it.min_offset for it in seen], np.int64),
        np.array([it.max_offset for it in seen], np.int64),
        np.array([NOT_COMMITTED if it.committed_offset is None else it.committed_offset for it in seen], np.int64),
        np.array([it.has_owner for it in seen], np.bool_),
        np.array([at.get((number, place - 1), -1) for number, place in rows], np.intp),
        np.array([START_CODES.get(of[number][1].position, START_UNKNOWN) for number, _ in rows], np.int8),
    ), [at[number, len(it) - 1] for number, (it, _) in enumerate(of)]


@settings(max_examples=60)
@given(
    queues,
    st.permutations(range(54)),
    st.sampled_from([SampleWindow(99), SampleWindow(3, 300.0, 155.0), SampleWindow(2)]),
)
def test_lag_columns_agree_with_the_samples_of_each_queue(
    told: Sequence[tuple[Sequence[tuple[float, OffsetSample]], StartFrom]], order: Sequence[int], window: SampleWindow
) -> None:
    of = [(timed(waited), begins) for waited, begins in told]
    it, ends = columns(of, order)
    lags = compute_lags(it)
    found = compute_lag_states(it, lags, np.array(ends, np.intp), window)
    waited = compute_delays(it, lags, np.array(ends, np.intp))
    for (seen, begins), end, verdict, seconds in zip(of, ends, found.tolist(), waited.tolist(), strict=True):
        if seen[-1].committed_offset == OFFSET_UNKNOWN:
            assert lags[end] == NO_LAG
            assert np.isnan(seconds)
            continue
        now = seen[-1].sampled_at
        inside = [
            look
            for place, look in enumerate(reversed(seen))
            if now - look.sampled_at <= window.always_within_seconds
            or (place < window.max_samples and now - look.sampled_at <= window.max_age_seconds)
        ]
        assert LAG_STATES[verdict] == compute_lag_state(
            [one for one in reversed(inside) if one.committed_offset != OFFSET_UNKNOWN], begins
        )
        there = [one for one in seen if one.committed_offset != OFFSET_UNKNOWN]
        assert lags[end] == (NO_LAG if (lag := there[-1].lag(begins)) is None else lag)
        expected = compute_delay(there, begins)
        assert np.isnan(seconds) if expected is None else seconds == pytest.approx(expected)


def test_lag_columns_have_a_number_for_every_verdict() -> None:
    assert (None, *LagState) == LAG_STATES
