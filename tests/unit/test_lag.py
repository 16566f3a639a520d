"""How far behind a queue is, and what its history says."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.lag import LagState, OffsetSample, compute_delay, compute_lag_state, lowest_offsets
from rota.model import Queue
from rota.spec import StartFrom

LATEST, EARLIEST, TIMED = (StartFrom(position=it) for it in ("Latest", "Earliest", "Timestamp"))


def looks(*seen: tuple[int | None, int], worked: bool = True) -> list[OffsetSample]:
    """Return looks 15 s apart, each with the group's offset and the end."""
    return [OffsetSample(15.0 * place, 0, last, committed, worked) for place, (committed, last) in enumerate(seen)]


@pytest.mark.parametrize(
    ("look", "begins", "behind"),
    [
        pytest.param(OffsetSample(0, 0, 100, 40), LATEST, 60, id="behind"),
        pytest.param(OffsetSample(0, 0, 100, 100), LATEST, 0, id="at the end"),
        pytest.param(OffsetSample(0, 50, 100, 40), LATEST, 50, id="what was deleted is nobody's lag"),
        pytest.param(OffsetSample(0, 100, 100, 40), LATEST, 0, id="all of it was deleted"),
        pytest.param(OffsetSample(0, 0, 100, 101), LATEST, None, id="an offset above the end"),
        pytest.param(OffsetSample(0, 0, 100, None), LATEST, 0, id="it will begin at the end"),
        pytest.param(OffsetSample(0, 30, 100, None), EARLIEST, 70, id="it will begin at the oldest"),
        pytest.param(OffsetSample(0, 0, 100, None), TIMED, None, id="it will begin somewhere"),
        pytest.param(OffsetSample(0, 0, 0, 0), LATEST, 0, id="an empty queue"),
    ],
)
def test_lag_of_one_sample_follows_from_offsets_and_start_from(
    look: OffsetSample, begins: StartFrom, behind: int | None
) -> None:
    assert look.lag(begins) == behind


@pytest.mark.parametrize(
    ("seen", "judgement"),
    [
        pytest.param(looks((10, 20), (20, 30), (30, 40)), LagState.KEEPING_UP, id="behind by the same all the time"),
        pytest.param(looks((10, 50), (30, 60), (60, 70)), LagState.KEEPING_UP, id="catching up"),
        pytest.param(looks((10, 20), (30, 30), (30, 90)), LagState.KEEPING_UP, id="at the end once"),
        pytest.param(looks((10, 20), (11, 20), (12, 90), (30, 91)), LagState.KEEPING_UP, id="up and down"),
        pytest.param(looks((10, 20), (15, 40), (20, 60)), LagState.SLOW, id="worked, and more and more behind"),
        pytest.param(looks((10, 20), (15, 25), (20, 60)), LagState.SLOW, id="never less"),
        pytest.param(looks((10, 20), (15, 40), (20, 45)), LagState.SLOW, id="behind by more, and then by the same"),
        pytest.param(looks((10, 20), (10, 40), (10, 60)), LagState.STALLED, id="nothing is worked"),
        pytest.param(looks((10, 20), (10, 20)), LagState.STALLED, id="nothing is worked, and nothing comes"),
        pytest.param(looks((10, 20), (10, 40), worked=False), LagState.STOPPED, id="nobody has it"),
        pytest.param(
            [*looks((10, 20), (10, 40), worked=False), *looks((10, 60))], LagState.STALLED, id="somebody had it once"
        ),
        pytest.param(looks((20, 20), (20, 20), worked=False), LagState.KEEPING_UP, id="nothing is left"),
        pytest.param(looks((50, 60), (10, 60), (20, 60)), LagState.REWOUND, id="went back"),
        pytest.param(looks((50, 60), (10, 60), (50, 60)), LagState.KEEPING_UP, id="went back, and is there again"),
        pytest.param(looks((60, 60), (10, 60)), LagState.REWOUND, id="went back from the end"),
        pytest.param(looks((10, 20)), None, id="one look says nothing"),
        pytest.param(looks((30, 20), (31, 20), (10, 20)), None, id="of looks that say nothing one is left"),
        pytest.param(
            [OffsetSample(at, 0, 20, 10) for at in (0.0, 15.0)], LagState.STALLED, id="somebody has it, unless said"
        ),
        pytest.param([], None, id="no look"),
    ],
)
def test_verdict_follows_from_the_samples(seen: Sequence[OffsetSample], judgement: LagState | None) -> None:
    assert compute_lag_state(seen, LATEST) == judgement


def test_verdict_without_committed_offset_depends_on_start_from() -> None:
    seen = looks((None, 20), (None, 40))
    assert compute_lag_state(seen, LATEST) is LagState.KEEPING_UP
    assert compute_lag_state(seen, EARLIEST) is LagState.STALLED
    assert compute_lag_state(looks((None, 20), (None, 40), worked=False), EARLIEST) is LagState.STOPPED
    assert compute_lag_state(seen, TIMED) is None


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [
        pytest.param(looks((0, 10), (20, 20)), 0.0, id="nothing is left"),
        pytest.param(looks((0, 10), (10, 20)), 13.5, id="the first of ten that came since the last look"),
        pytest.param(looks((0, 10), (19, 20)), 0.0, id="the last of ten"),
        pytest.param(looks((0, 10), (0, 20), (15, 30)), 21.0, id="it came between the two looks before"),
        pytest.param(looks((0, 10), (5, 20)), None, id="it was there before the first look"),
        pytest.param(looks(*[(5, 20)] * 8), None, id="and we have not looked for long"),
        pytest.param(looks(*[(5, 20)] * 9), 120.0, id="at least as long as we have looked"),
        pytest.param(looks(*[(19, 20)] * 9), 120.0, id="the last of those that were there"),
        pytest.param(looks(*[(10, 20)] * 9, (20, 21)), 0.0, id="the first that was not there yet"),
        pytest.param(looks((5, 10)), None, id="one look tells no time"),
        pytest.param([OffsetSample(at, 0, 20, 5) for at in (1000.0, 1119.9)], None, id="not quite long enough"),
        pytest.param(
            [OffsetSample(at, 0, 20, 5) for at in (1000.0, 1120.5)], 120.5, id="by a clock that began earlier"
        ),
        pytest.param(looks((30, 10)), None, id="an offset above the end"),
        pytest.param(looks((None, 10)), 0.0, id="it will begin at the end"),
        pytest.param([], None, id="no look"),
    ],
)
def test_delay_is_the_age_of_the_oldest_unconsumed_message(seen: Sequence[OffsetSample], seconds: float | None) -> None:
    assert compute_delay(seen, LATEST) == (None if seconds is None else pytest.approx(seconds))


def test_delay_without_committed_offset_is_unknown_unless_the_queue_is_empty() -> None:
    assert compute_delay(looks((None, 0), (None, 10)), EARLIEST) is None
    assert compute_delay(looks((None, 0), (None, 0)), EARLIEST) == 0.0


def test_verdict_names_are_those_of_metrics_and_pages() -> None:
    assert [*map(str, LagState)] == ["KeepingUp", "Slow", "Stalled", "Stopped", "Rewound"]


offsets = st.integers(0, 50)
histories = st.lists(st.tuples(st.none() | offsets, offsets, offsets, st.booleans()), max_size=10).map(
    lambda seen: [
        OffsetSample(15.0 * place, min(first, last), last, committed, worked)
        for place, (committed, first, last, worked) in enumerate(seen)
    ]
)


@given(histories, st.sampled_from([LATEST, EARLIEST, TIMED]))
def test_lag_and_delay_are_never_negative(seen: list[OffsetSample], begins: StartFrom) -> None:
    assert all((look.lag(begins) or 0) >= 0 for look in seen)
    assert (compute_delay(seen, begins) or 0) >= 0


@given(histories, st.integers(1, 1000))
def test_verdict_is_independent_of_absolute_offsets(seen: list[OffsetSample], by: int) -> None:
    moved = [
        it._replace(
            min_offset=it.min_offset + by,
            max_offset=it.max_offset + by,
            committed_offset=None if it.committed_offset is None else it.committed_offset + by,
        )
        for it in seen
    ]
    assert compute_lag_state(moved, EARLIEST) == compute_lag_state(seen, EARLIEST)


@given(histories)
def test_verdict_after_reaching_the_end_is_keeping_up_or_rewound(seen: list[OffsetSample]) -> None:
    judgement = compute_lag_state(seen, LATEST)
    if judgement and 0 in [look.lag(LATEST) for look in seen]:
        assert judgement in {LagState.KEEPING_UP, LagState.REWOUND}


ONE, OTHER = Queue("orders", "a", 0), Queue("orders", "a", 1)


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([], {}),
        ([{ONE: 5, OTHER: 7}], {ONE: 5, OTHER: 7}),
        ([{ONE: 5, OTHER: 7}, {ONE: 9, OTHER: 0}], {ONE: 5, OTHER: 0}),
        ([{ONE: 5, OTHER: 7}, {ONE: 9}], {ONE: 5}),
        ([{ONE: 5}, {ONE: 9, OTHER: 7}], {ONE: 5}),
        ([{ONE: 5, OTHER: 7}, {ONE: None, OTHER: 8}], {OTHER: 7}),
        ([{ONE: None}], {}),
        ([{ONE: 5}, None], {}),
        ([None, {ONE: 5}], {}),
        ([{ONE: 5}, {}], {}),
    ],
)
def test_broadcasting_offset_is_that_of_the_slowest_member_if_all_report(
    members: list[dict[Queue, int | None] | None], told: dict[Queue, int]
) -> None:
    assert lowest_offsets(members) == told


@pytest.mark.parametrize("begins", [LATEST, EARLIEST, TIMED])
@pytest.mark.parametrize("committed", [None, 2, 5, 7])
def test_lag_of_a_queue_that_ends_before_its_start_is_unknown(begins: StartFrom, committed: int | None) -> None:
    look = OffsetSample(0, 9, 5, committed)
    assert look.lag(begins) is None
    assert compute_lag_state([look, look], begins) is None
    assert compute_delay([look, look], begins) is None


def test_lag_of_an_empty_queue_is_0_for_start_from_timestamp() -> None:
    assert OffsetSample(0, 5, 5, None).lag(TIMED) == 0


def test_delay_ignores_samples_before_the_topic_was_recreated() -> None:
    old = [OffsetSample(15.0 * place, 0, 1000, 1000) for place in range(80)]
    new = [OffsetSample(1200.0 + 15 * place, 0, 3, 1) for place in range(9)]
    assert compute_delay([*old, *new[:1]], LATEST) is None
    assert compute_delay([*old, *new], LATEST) == 120.0
    grown = [new[0], new[1]._replace(max_offset=4), new[2]._replace(max_offset=4, committed_offset=3)]
    assert compute_delay([*old, *grown], LATEST) == 15.0, "what came since then is known"


def test_verdict_is_unknown_while_the_lag_is_unknown() -> None:
    seen = looks((10, 20), (20, 20), (30, 20))
    assert compute_lag_state(seen[:2], LATEST) is LagState.KEEPING_UP
    assert compute_lag_state(seen, LATEST) is None


def test_verdict_of_an_uncommitted_queue_without_owner_is_unknown() -> None:
    never = looks((None, 20), (None, 20), worked=False)
    assert compute_lag_state(never, LATEST) is None
    assert compute_lag_state([*never, *looks((None, 20))], LATEST) is LagState.KEEPING_UP
    assert compute_lag_state([*never, *looks((20, 20), worked=False)], LATEST) is LagState.KEEPING_UP
