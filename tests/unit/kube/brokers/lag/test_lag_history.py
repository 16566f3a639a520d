"""What was seen of queues over time, kept in columns: it says what the looks themselves say."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.kube.brokers.lag.lag_history import FEW, LOOKS, OLDER, OLDER_SECONDS, LagHistory, QueueLag, QueueSample
from rota.lag import Judgement, OffsetSample, delay, judge
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
        history.see(*look)
    return history


def test_lag_history_without_samples_is_empty() -> None:
    assert seen().judged(LATEST) == {}
    assert seen(One(0, {})).judged(LATEST) == {}


def test_lag_history_of_one_sample_has_lag_but_no_verdict_or_rate() -> None:
    assert seen(One(0, {3: QueueSample(0, 10, 4)})).judged(LATEST) == {3: QueueLag(0, 10, 4, 6)}


def test_lag_history_of_a_queue_at_its_end_is_keeping_up() -> None:
    found = seen(One(0, {0: QueueSample(0, 10, 10)}), One(10, {0: QueueSample(0, 30, 30)})).judged(LATEST)
    assert found == {0: QueueLag(0, 30, 30, 0, 0.0, Judgement.KEEPING_UP, 2.0, 2.0)}


def test_lag_history_of_an_unanswered_queue_has_no_lag() -> None:
    found = seen(One(0, {0: QueueSample(0, 10, 4)}), One(15, {0: QueueSample(0, 10, None, asked=False)})).judged(LATEST)
    assert found == {0: QueueLag(0, 10, rate=0.0)}


def test_lag_history_with_an_offset_above_the_end_has_no_lag() -> None:
    found = seen(One(0, {0: QueueSample(0, 10, 10)}), One(15, {0: QueueSample(0, 3, 10)})).judged(LATEST)
    assert (found[0].committed, found[0].lag, found[0].delay) == (10, None, None)


def test_lag_history_gives_no_verdict_from_an_offset_above_the_end() -> None:
    found = seen(One(0, {0: QueueSample(0, 0, 1)}), One(15, {0: QueueSample(0, 1, 1)})).judged(LATEST)
    assert (found[0].lag, found[0].verdict) == (0, None)


def test_lag_history_is_kept_while_other_queues_appear_and_disappear() -> None:
    behind = QueueSample(0, 10, 4)
    history = seen(One(0, {0: behind, 1: behind}), One(15, {0: behind, 1: behind}), One(30, {1: behind, 2: behind}))
    found = history.judged(LATEST)
    assert [*found] == [1, 2]
    assert (found[1].verdict, found[2].verdict) == (Judgement.STALLED, None)
    assert (found[1].rate, found[2].rate) == (0.0, None)


def test_lag_history_of_a_returning_queue_starts_over() -> None:
    history = seen(One(0, {0: QueueSample(0, 90, 90)}), One(15, {}), One(30, {0: QueueSample(0, 9, 9)}))
    assert history.judged(LATEST)[0].verdict is None


def test_lag_history_keeps_the_delay_of_an_old_message() -> None:
    looks = [One(15.0 * place, {0: QueueSample(0, 10 if place < 4 else 20, 10)}) for place in range(200)]
    waited = seen(*looks).judged(LATEST)[0].delay
    assert waited == pytest.approx(15 * (199 - 4), abs=OLDER_SECONDS)


def test_lag_history_is_bounded() -> None:
    history = seen(*(One(15.0 * place, {0: QueueSample(0, 1, 0)}) for place in range(2000)))
    oldest = 15.0 * (LOOKS + 1) + OLDER_SECONDS * (OLDER + 1)
    waited = history.judged(LATEST)[0].delay
    assert waited is not None
    assert OLDER_SECONDS * (OLDER - 1) <= waited <= oldest


offsets = st.integers(0, 6)
rows = st.builds(QueueSample, offsets, offsets, st.none() | offsets, st.booleans())
histories = st.lists(st.tuples(st.dictionaries(st.integers(0, 2), rows), st.frozensets(st.integers(0, 2))), max_size=9)


@given(histories, st.sampled_from([LATEST, EARLIEST, AT_A_TIME]), st.sampled_from([0, FEW]))
def test_lag_history_agrees_with_the_samples(
    told: Sequence[tuple[Mapping[int, QueueSample], frozenset[int]]], begins: StartFrom, few: int
) -> None:
    history = LagHistory(few)
    kept: dict[int, list[OffsetSample]] = {}
    for place, (found, worked) in enumerate(told):
        at = 15.0 * place
        history.see(at, found, worked)
        kept = {number: kept.get(number, []) for number in found}
        for number, it in found.items():
            if it.asked:
                kept[number].append(OffsetSample(at, it.first, it.last, it.committed, number in worked))
    judged = history.judged(begins)
    assert {*judged} == {*kept}
    for number, looks in kept.items():
        if looks and looks[-1].at == 15.0 * (len(told) - 1):
            assert judged[number].verdict == judge(looks, begins)
            assert judged[number].lag == looks[-1].behind(begins)
            assert judged[number].delay == (None if (there := delay(looks, begins)) is None else pytest.approx(there))
        else:
            assert judged[number][2:6] == (None, None, None, None)


def test_lag_history_rates_restart_at_an_offset_reset_or_topic_recreation() -> None:
    history = seen(
        One(0, {0: QueueSample(0, 1000, 900)}),
        One(10, {0: QueueSample(0, 1010, 910)}),
        One(20, {0: QueueSample(0, 5, 0)}),
    )
    assert history.judged(LATEST)[0][6:] == (None, None), "one look tells no rate"
    history.see(30, {0: QueueSample(0, 25, 10)}, ALL)
    assert history.judged(LATEST)[0][6:] == (2.0, 1.0)
    history.see(40, {0: QueueSample(0, 45, 5)}, ALL)
    assert history.judged(LATEST)[0][6:] == (2.0, None)
    history.see(50, {0: QueueSample(0, 65, 35)}, ALL)
    assert history.judged(LATEST)[0][6:] == (2.0, 3.0)
    history.see(60, {0: QueueSample(0, 85, None, asked=False)}, ALL)
    assert history.judged(LATEST)[0][6:] == (2.0, None)
    history.see(70, {0: QueueSample(0, 105, 75)}, ALL)
    assert history.judged(LATEST)[0].worked == pytest.approx(7 / 3), "30 s ago it was at 5"


def test_lag_history_of_a_queue_that_ends_before_its_start_is_unknown() -> None:
    history = seen(
        One(0, {0: QueueSample(0, 5, 5)}), One(15, {0: QueueSample(0, 5, 5)}), One(30, {0: QueueSample(9, 5, 5)})
    )
    assert history.judged(LATEST)[0][3:6] == (None, None, None)


def test_lag_history_flow_is_the_inflow_of_up_to_an_hour() -> None:
    history = seen(
        *(One(15.0 * place, {0: QueueSample(0, 30 * place, 0), 1: QueueSample(0, 7, 0)}) for place in range(8))
    )
    assert history.flows() == {0: None, 1: None}, "not two minutes yet"
    history.see(120, {0: QueueSample(0, 240, 0), 1: QueueSample(0, 7, 0)}, ALL)
    assert history.flows() == {0: 2.0, 1: 0.0}
    for place in range(9, 240):
        history.see(15.0 * place, {0: QueueSample(0, 240 + (place >= 200) * 3000, 0), 1: QueueSample(0, 7, 0)}, ALL)
    hour, burst = history.flows()[0], history.judged(LATEST)[0].rate
    assert hour == pytest.approx(3240 / (15 * 239), rel=0.1)
    assert burst == 0.0, "the last looks alone say something else"


def test_lag_history_flow_starts_over_for_recreated_topics_and_new_queues() -> None:
    history = seen(*(One(15.0 * place, {0: QueueSample(0, 90000 + place, 0)}) for place in range(100)))
    for place in range(100, 109):
        history.see(15.0 * place, {0: QueueSample(0, 15 * (place - 100), 0), 1: QueueSample(0, place, 0)}, ALL)
        assert history.flows() == ({0: None, 1: None} if place < 108 else {0: 1.0, 1: pytest.approx(1 / 15)})
    assert seen().flows() == {}
