"""Lag states from the journal's samples: the pipeline's equal those of `rota.lag` and of the operator."""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from pipeline.group_lines import group_records, samples_in
from rota.kube.brokers.lag.lag_history import LagHistory, QueueSample
from rota.lag import LagState, OffsetSample, compute_delay, compute_lag_state
from rota.lag_columns import LAG_UNKNOWN
from rota.pipeline.history.audit import unowned_periods
from rota.pipeline.history.lag_states import CHUNK_SAMPLES, SAMPLE_WINDOW, GroupNotes, RecordTotals, judge_samples
from rota.pipeline.history.ordering import Gaps
from rota.pipeline.history.ownership import build_account
from rota.pipeline.history.samples import Places
from rota.records import OwnersRecord, journal_record
from rota.spec import StartFrom

EIGHT = datetime(2026, 11, 21, 8, tzinfo=UTC)
LATEST, EARLIEST = StartFrom(), StartFrom(position="Earliest")
RETRIES = "%RETRY%orders"
MINUTES = 130
Line = dict[str, Any]
OffsetsAt = Callable[[float], tuple[int, int, int | None]]  # first, last and committed offset at a second


def time_at(seconds: float) -> str:
    return (EIGHT + timedelta(seconds=seconds)).isoformat()


# The offsets of each queue, by topic and id.
QUEUES: Mapping[tuple[str, int], OffsetsAt] = {
    ("orders", 0): lambda t: (0, int(t), int(t)),  # keeps up
    ("orders", 1): lambda t: (0, int(2 * t), int(t)),  # slow
    ("orders", 2): lambda t: (0, 100 + int(t), 50),  # stalled, and stopped once it has no owner
    ("orders", 3): lambda t: (0, 90_000, 90_000 if t < 1800 else 400 + int(t)),  # rewound
    ("orders", 4): lambda _: (0, 500, None),  # was never committed
    (RETRIES, 0): lambda t: (0, int(t / 60), None if t < 600 else int(t / 60) - 3),
}


def offsets(seconds: float) -> Line:
    topics: dict[str, Any] = {}
    for (topic, number), offsets_at in QUEUES.items():
        first, last, committed = offsets_at(seconds)
        columns = topics.setdefault(topic, {}).setdefault("a", {"ids": [], "first": [], "last": [], "committed": []})
        for name, value in (("ids", number), ("first", first), ("last", last), ("committed", committed)):
            columns[name].append(value)
    return journal_record(
        "offsets", "shop/orders", time_at(seconds), topics=topics, verdicts=dict(operator_verdicts(seconds))
    )


HISTORIES: dict[str, LagHistory] = {}


def operator_verdicts(until: float) -> Counter[str]:
    """Count the lag states that an operator with a sample each 15 s reports."""
    verdicts: Counter[str] = Counter()
    for topic, start_from in (("orders", LATEST), (RETRIES, EARLIEST)):
        history = HISTORIES.setdefault(topic, LagHistory())
        for seconds in (until - 45, until - 30, until - 15, until):
            rows = {
                number: offsets_at(max(seconds, 0))
                for (queue_topic, number), offsets_at in QUEUES.items()
                if queue_topic == topic
            }
            owned = frozenset(rows) - ({2} if seconds >= 3600 else set())
            history.add_sample(seconds, {number: QueueSample(*row) for number, row in rows.items()}, owned)
        verdicts.update(
            str(judgement.lag_state)
            for judgement in history.compute_queue_lags(start_from).values()
            if judgement.lag_state
        )
    return verdicts


def owners(seconds: float, unowned: str = "") -> Line:
    queues = "0-4" if not unowned else "0-1,3-4"
    members = {"m1": {"uid": "u1", "standing": "Ready", "queues": {"orders": {"a": queues}, RETRIES: {"a": "0"}}}}
    fields: Line = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None, "rules": {}}
    free = {"orders": {"a": unowned}} if unowned else {}
    generation = 6 if unowned else 5
    return journal_record(
        "owners",
        "shop/orders",
        time_at(seconds),
        generation=generation,
        members=members,
        releasing=[],
        unowned=free,
        **fields,
    )


DROP = [
    journal_record(
        "plan",
        "shop/orders",
        time_at(3600),
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
        time_at(3600),
        generation=6,
        act="Drop",
        proof="Ended",
        state="Owned",
        queues={"orders": {"a": "2"}},
        **{"from": "m1", "fromUid": "u1"},
    ),
]


@pytest.fixture(scope="module")
def offset_lines() -> list[Line]:
    HISTORIES.clear()
    return [offsets(60.0 * minute) for minute in range(MINUTES)]


def judge(offset_lines: list[Line], max_samples: int = CHUNK_SAMPLES, part_records: int = 1000) -> list[RecordTotals]:
    """Return the totals of the lines' samples, which come in parts of some records."""
    records = group_records([owners(0), *DROP, owners(3601, "2")])
    account = build_account(records.assignments(), Gaps())
    unowned = [period for queue, holdings in account.holdings() for period in unowned_periods(queue, holdings)]
    places = Places()
    parts = (
        samples_in(offset_lines[start : start + part_records], places)
        for start in range(0, len(offset_lines), part_records)
    )
    notes = GroupNotes(records.of_kind(OwnersRecord), unowned)
    return list(judge_samples(parts, places, notes, max_samples))


def rows_of(totals: list[RecordTotals]) -> list[dict[str, Any]]:
    """Return the totals by sample, None where a value is unknown."""
    rows: list[dict[str, Any]] = []
    for part in totals:
        for index, at in enumerate(part.at.tolist()):
            lag = int(part.lag[index])
            delay = float(part.delay[index])
            rows.append(
                {
                    "at": at,
                    "seconds": float(part.seconds[index]),
                    "lag": None if lag == LAG_UNKNOWN else lag,
                    "delay": None if np.isnan(delay) else delay,
                    "back": int(part.rewound[index]),
                    "retries": int(part.retries[index]),
                    **{str(state): int(queues[index]) for state, queues in part.by_lag_state.items()},
                }
            )
    return rows


@pytest.fixture(scope="module")
def lag_samples(offset_lines: list[Line]) -> list[dict[str, Any]]:
    return rows_of(judge(offset_lines))


@pytest.mark.parametrize(("max_samples", "part_records"), [(1, 1), (40, 1), (300, 7), (500, 100)])
def test_lag_samples_do_not_depend_on_the_size_of_chunks(
    offset_lines: list[Line], lag_samples: list[dict[str, Any]], max_samples: int, part_records: int
) -> None:
    totals = judge(offset_lines, max_samples, part_records)
    assert len(totals) > 1
    assert rows_of(totals) == lag_samples


def test_lag_samples_of_a_group_without_samples_are_none() -> None:
    assert judge([]) == []


def samples_by_queue(minute: int) -> list[tuple[list[OffsetSample], StartFrom]]:
    """Return the samples and start positions of all queues up to a minute, as `rota.lag` takes them."""
    histories = []
    for (topic, number), offsets_at in QUEUES.items():
        times = [60.0 * past for past in range(minute + 1)]
        is_dropped = (topic, number) == ("orders", 2)
        samples = [OffsetSample(time, *offsets_at(time), has_owner=not (is_dropped and time >= 3600)) for time in times]
        histories.append((samples, EARLIEST if topic == RETRIES else LATEST))
    return histories


def test_lag_state_of_each_sample_equals_the_operators_lag_module(lag_samples: list[dict[str, Any]]) -> None:
    assert len(lag_samples) == MINUTES
    for minute, row in enumerate(lag_samples):
        counts: Counter[str] = Counter()
        delays, lags = [], []
        for index, (samples, start_from) in enumerate(samples_by_queue(minute)):
            recent = [
                sample
                for sample in samples
                if samples[-1].sampled_at - sample.sampled_at <= SAMPLE_WINDOW.always_within_seconds
            ]
            counts[str(compute_lag_state(recent, start_from))] += 1
            if index < 5:
                delays.append(
                    compute_delay(
                        [sample for sample in samples if samples[-1].sampled_at - sample.sampled_at <= 3600], start_from
                    )
                )
                lags.append(samples[-1].lag(start_from))
        assert {str(state): row[str(state)] for state in LagState} == {
            str(state): counts[str(state)] for state in LagState
        }
        assert row["lag"] == sum(lag for lag in lags if lag is not None)
        if None in delays:
            assert row["delay"] is None
        else:
            assert row["delay"] == pytest.approx(max(delay for delay in delays if delay is not None))


def test_lag_states_equal_the_operators_verdicts_except_after_a_change(
    lag_samples: list[dict[str, Any]], offset_lines: list[Line]
) -> None:
    differing = [
        minute
        for minute, (row, line) in enumerate(zip(lag_samples, offset_lines, strict=True))
        if any(row[str(state)] != line["verdicts"].get(str(state), 0) for state in LagState)
    ]
    changes = [0, 10, 30, 60]  # the first sample; a retry starts, an offset goes back, a member leaves
    assert all(any(change <= minute <= change + 3 for change in changes) for minute in differing)


def test_lag_samples_count_rewound_and_retried_messages(lag_samples: list[dict[str, Any]]) -> None:
    assert sum(row["back"] for row in lag_samples) == 90_000 - 400 - 1800
    assert sum(row["retries"] for row in lag_samples) == MINUTES - 1
    assert [row["seconds"] for row in lag_samples] == [0.0] + [60.0] * (MINUTES - 1)
