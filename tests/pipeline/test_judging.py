"""How far groups were, by the journal's looks: what `rota.lag` says of the same looks, and operators saw."""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from pipeline.frames import frames
from rota.kube.brokers.lag.lag_history import LagHistory, QueueSample
from rota.lag import LagState, OffsetSample, compute_delay, compute_lag_state
from rota.pipeline.history.lag_states import SAMPLE_WINDOW, offset_samples
from rota.records import journal_record
from rota.spec import StartFrom

EIGHT = datetime(2026, 11, 21, 8, tzinfo=UTC)
LATEST, EARLIEST = StartFrom(), StartFrom(position="Earliest")
RETRIES = "%RETRY%orders"
MINUTES = 130
Line = dict[str, Any]
Places = Callable[[float], tuple[int, int, int | None]]  # first, last and committed at some second


def at(seconds: float) -> str:
    return (EIGHT + timedelta(seconds=seconds)).isoformat()


# What each queue does: topic, its number, and where it is.
QUEUES: Mapping[tuple[str, int], Places] = {
    ("orders", 0): lambda t: (0, int(t), int(t)),  # keeps up
    ("orders", 1): lambda t: (0, int(2 * t), int(t)),  # slow
    ("orders", 2): lambda t: (0, 100 + int(t), 50),  # stalled, and stopped where nobody has it
    ("orders", 3): lambda t: (0, 90_000, 90_000 if t < 1800 else 400 + int(t)),  # rewound
    ("orders", 4): lambda _: (0, 500, None),  # never was there
    (RETRIES, 0): lambda t: (0, int(t / 60), None if t < 600 else int(t / 60) - 3),
}


def offsets(seconds: float) -> Line:
    topics: dict[str, Any] = {}
    for (topic, number), place in QUEUES.items():
        first, last, done = place(seconds)
        columns = topics.setdefault(topic, {}).setdefault("a", {"ids": [], "first": [], "last": [], "committed": []})
        for name, value in (("ids", number), ("first", first), ("last", last), ("committed", done)):
            columns[name].append(value)
    return journal_record("offsets", "shop/orders", at(seconds), topics=topics, verdicts=dict(seen(seconds)))


HISTORIES: dict[str, LagHistory] = {}


def seen(until: float) -> Counter[str]:
    """Count what the operator says, who looks each 15 s."""
    found: Counter[str] = Counter()
    for topic, begins in (("orders", LATEST), (RETRIES, EARLIEST)):
        history = HISTORIES.setdefault(topic, LagHistory())
        for seconds in (until - 45, until - 30, until - 15, until):
            rows = {number: place(max(seconds, 0)) for (of, number), place in QUEUES.items() if of == topic}
            worked = frozenset(rows) - ({2} if seconds >= 3600 else set())
            history.add_sample(seconds, {number: QueueSample(*row) for number, row in rows.items()}, worked)
        found.update(str(it.lag_state) for it in history.judge_queues(begins).values() if it.lag_state)
    return found


def owners(seconds: float, unowned: str = "") -> Line:
    queues = "0-4" if not unowned else "0-1,3-4"
    members = {"m1": {"uid": "u1", "standing": "Ready", "queues": {"orders": {"a": queues}, RETRIES: {"a": "0"}}}}
    given: Line = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None, "rules": {}}
    free = {"orders": {"a": unowned}} if unowned else {}
    generation = 6 if unowned else 5
    return journal_record(
        "owners",
        "shop/orders",
        at(seconds),
        generation=generation,
        members=members,
        releasing=[],
        unowned=free,
        **given,
    )


DROP = [
    journal_record(
        "plan",
        "shop/orders",
        at(3600),
        generation=6,
        strategy="Sticky",
        reason="MemberLeft",
        message="",
        members=1,
        queues=5,
        held=None,
    ),
    journal_record(
        "handover",
        "shop/orders",
        at(3600),
        generation=6,
        act="Drop",
        proof="Ended",
        state="Owned",
        queues={"orders": {"a": "2"}},
        **{"from": "m1", "fromUid": "u1"},
    ),
]


@pytest.fixture(scope="module")
def told() -> list[Line]:
    HISTORIES.clear()
    return [offsets(60.0 * minute) for minute in range(MINUTES)]


@pytest.fixture(scope="module")
def judged(spark: SparkSession, told: list[Line]) -> list[Row]:
    facts = frames(spark, [owners(0), *DROP, owners(3601, "2"), *told])
    return offset_samples(facts).orderBy("at").collect()


def own(minute: int) -> list[tuple[list[OffsetSample], StartFrom]]:
    """Return each queue's looks until a minute, as `rota.lag` takes them."""
    found = []
    for (topic, number), place in QUEUES.items():
        times = [60.0 * past for past in range(minute + 1)]
        free = (topic, number) == ("orders", 2)
        made = [OffsetSample(time, *place(time), has_owner=not (free and time >= 3600)) for time in times]
        found.append((made, EARLIEST if topic == RETRIES else LATEST))
    return found


@pytest.mark.slow("the pipeline's lag states equal the operator's")
def test_lag_state_of_each_sample_equals_the_operators_lag_module(judged: list[Row]) -> None:
    assert len(judged) == MINUTES
    for minute, row in enumerate(judged):
        counts: Counter[str] = Counter()
        waits, lags = [], []
        for place, (made, begins) in enumerate(own(minute)):
            inside = [it for it in made if made[-1].sampled_at - it.sampled_at <= SAMPLE_WINDOW.always_within_seconds]
            counts[str(compute_lag_state(inside, begins))] += 1
            if place < 5:
                waits.append(compute_delay([it for it in made if made[-1].sampled_at - it.sampled_at <= 3600], begins))
                lags.append(made[-1].lag(begins))
        assert {str(it): row[str(it)] for it in LagState} == {str(it): counts[str(it)] for it in LagState}
        assert row["lag"] == sum(it for it in lags if it is not None)
        if None in waits:
            assert row["delay"] is None
        else:  # of a stretch that begins at nine, only some of the looks before that are there
            near = 0 if minute <= 60 else 240
            assert row["delay"] == pytest.approx(max(it for it in waits if it is not None), abs=near)


def test_lag_states_equal_the_operators_verdicts_except_after_a_change(judged: list[Row], told: list[Line]) -> None:
    differing = [
        minute
        for minute, (row, line) in enumerate(zip(judged, told, strict=True))
        if any(row[str(it)] != line["verdicts"].get(str(it), 0) for it in LagState)
    ]
    turns = [0, 10, 30, 60]  # the first look; a retry begins, an offset goes back, somebody leaves
    assert all(any(turn <= minute <= turn + 3 for turn in turns) for minute in differing)


def test_lag_samples_count_rewound_and_retried_messages(judged: list[Row]) -> None:
    assert sum(row["back"] for row in judged) == 90_000 - 400 - 1800
    assert sum(row["retries"] for row in judged) == MINUTES - 1
    assert [row["seconds"] for row in judged] == [0.0] + [60.0] * (MINUTES - 1)
