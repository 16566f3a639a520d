"""Tests the lag, the delay and the lag state of a queue, computed from its samples."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.lag import LagState, OffsetSample, compute_delay, compute_lag_state, lowest_offsets
from rota.model import Queue
from rota.spec import StartFrom

LATEST, EARLIEST, TIMED = (StartFrom(position=position) for position in ("Latest", "Earliest", "Timestamp"))


def samples_of(*offset_pairs: tuple[int | None, int], has_owner: bool = True) -> list[OffsetSample]:
    """Return samples 15 s apart, one for each pair of committed offset and end."""
    return [
        OffsetSample(15.0 * number, 0, max_offset, committed, has_owner)
        for number, (committed, max_offset) in enumerate(offset_pairs)
    ]


@pytest.mark.parametrize(
    ("sample", "start_from", "lag"),
    [
        pytest.param(OffsetSample(0, 0, 100, 40), LATEST, 60, id="behind"),
        pytest.param(OffsetSample(0, 0, 100, 100), LATEST, 0, id="at the end"),
        pytest.param(OffsetSample(0, 50, 100, 40), LATEST, 50, id="deleted messages are no lag"),
        pytest.param(OffsetSample(0, 100, 100, 40), LATEST, 0, id="all of it was deleted"),
        pytest.param(OffsetSample(0, 0, 100, 101), LATEST, None, id="an offset above the end"),
        pytest.param(OffsetSample(0, 0, 100, None), LATEST, 0, id="starts at the end"),
        pytest.param(OffsetSample(0, 30, 100, None), EARLIEST, 70, id="starts at the oldest"),
        pytest.param(OffsetSample(0, 0, 100, None), TIMED, None, id="start is unknown"),
        pytest.param(OffsetSample(0, 0, 0, 0), LATEST, 0, id="an empty queue"),
        pytest.param(OffsetSample(0, 101, 100, None), EARLIEST, None, id="the end is before the beginning"),
    ],
)
def test_lag_of_one_sample_follows_from_offsets_and_start_from(
    sample: OffsetSample, start_from: StartFrom, lag: int | None
) -> None:
    assert sample.lag(start_from) == lag


@pytest.mark.parametrize(
    ("samples", "lag_state"),
    [
        pytest.param(samples_of((10, 20), (20, 30), (30, 40)), LagState.KEEPING_UP, id="constant lag"),
        pytest.param(samples_of((10, 50), (30, 60), (60, 70)), LagState.KEEPING_UP, id="catching up"),
        pytest.param(samples_of((10, 20), (30, 30), (30, 90)), LagState.KEEPING_UP, id="at the end once"),
        pytest.param(samples_of((10, 20), (11, 20), (12, 90), (30, 91)), LagState.KEEPING_UP, id="up and down"),
        pytest.param(samples_of((10, 20), (15, 40), (20, 60)), LagState.SLOW, id="consumed, but the lag grows"),
        pytest.param(samples_of((10, 20), (15, 25), (20, 60)), LagState.SLOW, id="lag never shrinks"),
        pytest.param(samples_of((10, 20), (15, 40), (20, 45)), LagState.SLOW, id="lag grows, then stays"),
        pytest.param(samples_of((10, 20), (10, 40), (10, 60)), LagState.STALLED, id="no progress"),
        pytest.param(samples_of((10, 20), (10, 20)), LagState.STALLED, id="no progress, no new messages"),
        pytest.param(samples_of((10, 20), (10, 40), has_owner=False), LagState.STOPPED, id="no owner"),
        pytest.param(
            [*samples_of((10, 20), (10, 40), has_owner=False), *samples_of((10, 60))],
            LagState.STALLED,
            id="owner in one sample",
        ),
        pytest.param(samples_of((20, 20), (20, 20), has_owner=False), LagState.KEEPING_UP, id="all is consumed"),
        pytest.param(samples_of((50, 60), (10, 60), (20, 60)), LagState.REWOUND, id="offset went back"),
        pytest.param(samples_of((50, 60), (10, 60), (50, 60)), LagState.KEEPING_UP, id="offset went back and returned"),
        pytest.param(samples_of((60, 60), (10, 60)), LagState.REWOUND, id="offset went back from the end"),
        pytest.param(samples_of((10, 20)), None, id="a single sample"),
        pytest.param(samples_of((30, 20), (31, 20), (10, 20)), None, id="a single sample with a known lag"),
        pytest.param(
            [OffsetSample(at, 0, 20, 10) for at in (0.0, 15.0)], LagState.STALLED, id="has an owner by default"
        ),
        pytest.param([], None, id="no sample"),
    ],
)
def test_verdict_follows_from_the_samples(samples: Sequence[OffsetSample], lag_state: LagState | None) -> None:
    assert compute_lag_state(samples, LATEST) == lag_state


def test_verdict_without_committed_offset_depends_on_start_from() -> None:
    samples = samples_of((None, 20), (None, 40))
    assert compute_lag_state(samples, LATEST) is LagState.KEEPING_UP
    assert compute_lag_state(samples, EARLIEST) is LagState.STALLED
    assert compute_lag_state(samples_of((None, 20), (None, 40), has_owner=False), EARLIEST) is LagState.STOPPED
    assert compute_lag_state(samples, TIMED) is None


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [
        pytest.param(samples_of((0, 10), (20, 20)), 0.0, id="all is consumed"),
        pytest.param(samples_of((0, 10), (10, 20)), 13.5, id="the first of ten new messages"),
        pytest.param(samples_of((0, 10), (19, 20)), 0.0, id="the last of ten new messages"),
        pytest.param(samples_of((0, 10), (0, 20), (15, 30)), 21.0, id="arrived between the two previous samples"),
        pytest.param(samples_of((0, 10), (5, 20)), None, id="older than the first sample"),
        pytest.param(samples_of(*[(5, 20)] * 8), None, id="older than a short history"),
        pytest.param(samples_of(*[(5, 20)] * 9), 120.0, id="at least as old as the history"),
        pytest.param(samples_of(*[(19, 20)] * 9), 120.0, id="the last of the old messages"),
        pytest.param(samples_of(*[(10, 20)] * 9, (20, 21)), 0.0, id="the first new message"),
        pytest.param(samples_of((5, 10)), None, id="one sample gives no time"),
        pytest.param([OffsetSample(at, 0, 20, 5) for at in (1000.0, 1119.9)], None, id="history slightly too short"),
        pytest.param(
            [OffsetSample(at, 0, 20, 5) for at in (1000.0, 1120.5)], 120.5, id="with another start of the clock"
        ),
        pytest.param(samples_of((30, 10)), None, id="an offset above the end"),
        pytest.param(samples_of((None, 10)), 0.0, id="starts at the end"),
        pytest.param([], None, id="no sample"),
    ],
)
def test_delay_is_the_age_of_the_oldest_unconsumed_message(
    samples: Sequence[OffsetSample], seconds: float | None
) -> None:
    assert compute_delay(samples, LATEST) == (None if seconds is None else pytest.approx(seconds))


def test_delay_without_committed_offset_is_unknown_unless_the_queue_is_empty() -> None:
    assert compute_delay(samples_of((None, 0), (None, 10)), EARLIEST) is None
    assert compute_delay(samples_of((None, 0), (None, 0)), EARLIEST) == 0.0


def test_verdict_names_are_those_of_metrics_and_pages() -> None:
    assert [*map(str, LagState)] == ["KeepingUp", "Slow", "Stalled", "Stopped", "Rewound"]


offsets = st.integers(0, 50)
histories = st.lists(st.tuples(st.none() | offsets, offsets, offsets, st.booleans()), max_size=10).map(
    lambda rows: [
        OffsetSample(15.0 * number, min(first, last), last, committed, worked)
        for number, (committed, first, last, worked) in enumerate(rows)
    ]
)


@given(histories, st.sampled_from([LATEST, EARLIEST, TIMED]))
def test_lag_and_delay_are_never_negative(samples: list[OffsetSample], start_from: StartFrom) -> None:
    assert all((sample.lag(start_from) or 0) >= 0 for sample in samples)
    assert (compute_delay(samples, start_from) or 0) >= 0


@given(histories, st.integers(1, 1000))
def test_verdict_is_independent_of_absolute_offsets(samples: list[OffsetSample], shift: int) -> None:
    shifted = [
        sample._replace(
            min_offset=sample.min_offset + shift,
            max_offset=sample.max_offset + shift,
            committed_offset=None if sample.committed_offset is None else sample.committed_offset + shift,
        )
        for sample in samples
    ]
    assert compute_lag_state(shifted, EARLIEST) == compute_lag_state(samples, EARLIEST)


@given(histories)
def test_verdict_after_reaching_the_end_is_keeping_up_or_rewound(samples: list[OffsetSample]) -> None:
    lag_state = compute_lag_state(samples, LATEST)
    if lag_state and 0 in [sample.lag(LATEST) for sample in samples]:
        assert lag_state in {LagState.KEEPING_UP, LagState.REWOUND}


FIRST = Queue("orders", "a", 0)
SECOND = Queue("orders", "a", 1)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([], {}),
        ([{FIRST: 5, SECOND: 7}], {FIRST: 5, SECOND: 7}),
        ([{FIRST: 5, SECOND: 7}, {FIRST: 9, SECOND: 0}], {FIRST: 5, SECOND: 0}),
        ([{FIRST: 5, SECOND: 7}, {FIRST: 9}], {FIRST: 5}),
        ([{FIRST: 5}, {FIRST: 9, SECOND: 7}], {FIRST: 5}),
        ([{FIRST: 5, SECOND: 7}, {FIRST: None, SECOND: 8}], {SECOND: 7}),
        ([{FIRST: None}], {}),
        ([{FIRST: 5}, None], {}),
        ([None, {FIRST: 5}], {}),
        ([{FIRST: 5}, {}], {}),
    ],
)
def test_broadcasting_offset_is_that_of_the_slowest_member_if_all_report(
    members: list[dict[Queue, int | None] | None], expected: dict[Queue, int]
) -> None:
    assert lowest_offsets(members) == expected


@pytest.mark.parametrize("start_from", [LATEST, EARLIEST, TIMED])
@pytest.mark.parametrize("committed", [None, 2, 5, 7])
def test_lag_of_a_queue_that_ends_before_its_start_is_unknown(start_from: StartFrom, committed: int | None) -> None:
    sample = OffsetSample(0, 9, 5, committed)
    assert sample.lag(start_from) is None
    assert compute_lag_state([sample, sample], start_from) is None
    assert compute_delay([sample, sample], start_from) is None


def test_lag_of_an_empty_queue_is_0_for_start_from_timestamp() -> None:
    assert OffsetSample(0, 5, 5, None).lag(TIMED) == 0


def test_delay_ignores_samples_before_the_topic_was_recreated() -> None:
    old_samples = [OffsetSample(15.0 * number, 0, 1000, 1000) for number in range(80)]
    new_samples = [OffsetSample(1200.0 + 15 * number, 0, 3, 1) for number in range(9)]
    assert compute_delay([*old_samples, *new_samples[:1]], LATEST) is None
    assert compute_delay([*old_samples, *new_samples], LATEST) == 120.0
    grown = [
        new_samples[0],
        new_samples[1]._replace(max_offset=4),
        new_samples[2]._replace(max_offset=4, committed_offset=3),
    ]
    assert compute_delay([*old_samples, *grown], LATEST) == 15.0, "the arrival of later messages is known"


def test_verdict_is_unknown_while_the_lag_is_unknown() -> None:
    samples = samples_of((10, 20), (20, 20), (30, 20))
    assert compute_lag_state(samples[:2], LATEST) is LagState.KEEPING_UP
    assert compute_lag_state(samples, LATEST) is None


def test_verdict_of_an_uncommitted_queue_without_owner_is_unknown() -> None:
    unowned = samples_of((None, 20), (None, 20), has_owner=False)
    assert compute_lag_state(unowned, LATEST) is None
    assert compute_lag_state([*unowned, *samples_of((None, 20))], LATEST) is LagState.KEEPING_UP
    assert compute_lag_state([*unowned, *samples_of((20, 20), has_owner=False)], LATEST) is LagState.KEEPING_UP
