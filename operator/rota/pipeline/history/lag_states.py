"""Lag states of a group's queues, record by record, by the operator's own rules (`rota.lag_columns`).

The operator judges a queue by its last ten samples, 15 s apart. The journal has only one record of offsets a minute,
with a sample of each queue. So this module uses the samples of about the same time: those of the last 155 s, and also
the last three if they are at most 5 minutes old.

Records are judged in chunks, so that memory does not depend on the length of the history. Each chunk has the records of
the hour before it as context: no rule needs older ones, so the results do not depend on the size of chunks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rota import lag_columns
from rota.lag import LagState
from rota.model import RETRY_TOPIC_PREFIX
from rota.pipeline.history.audit import UnownedPeriod
from rota.pipeline.history.samples import MICROSECONDS, Integers, Place, Places, Samples, chunk, concatenate
from rota.records import OwnersRecord

SAMPLE_WINDOW = lag_columns.SampleWindow(max_samples=3, max_age_seconds=300.0, always_within_seconds=155.0)
MAX_RECORD_SECONDS = 120.0  # a record stands for the time since the previous one, but for no more than this
CHUNK_SAMPLES = 250_000  # samples in a chunk; the context adds 600,000 if the group has 10,000 queues
CONTEXT_SECONDS = 3600  # length of the context
_KEEPING_UP = lag_columns.LAG_STATES.index(LagState.KEEPING_UP)

Flags = NDArray[np.bool_]


class RecordTotals(NamedTuple):
    """Totals over a group's queues, by record of offsets; `lag` and `delay` leave out the retry topic."""

    at: Integers  # in microseconds since 1970
    seconds: NDArray[np.float64]  # time that the record stands for
    lag: Integers  # in messages; LAG_UNKNOWN: the lag of some queue is unknown
    delay: NDArray[np.float64]  # in seconds; NaN: the delay of some queue is unknown
    rewound: Integers  # messages by which committed offsets went back
    retries: Integers  # messages that arrived in the retry topic
    by_lag_state: dict[LagState, Integers]  # number of queues in each state

    def after(self, count: int) -> "RecordTotals":
        """Return the totals without the first `count` records."""
        return RecordTotals(
            at=self.at[count:],
            seconds=self.seconds[count:],
            lag=self.lag[count:],
            delay=self.delay[count:],
            rewound=self.rewound[count:],
            retries=self.retries[count:],
            by_lag_state={state: queues[count:] for state, queues in self.by_lag_state.items()},
        )


class GroupNotes:
    """Data that samples lack: start position and consumption model (of `owners` records), and unowned periods."""

    def __init__(self, owners: Iterable[OwnersRecord], unowned: Iterable[UnownedPeriod]) -> None:
        self._owners = sorted(owners, key=lambda record: record.at)
        self._owners_at = np.array([_to_micros(record.at) for record in self._owners], np.int64)
        # The ids of queues that had no owner, by place and period: these queues are looked up together.
        grouped: defaultdict[tuple[Place, datetime, datetime | None], list[int]] = defaultdict(list)
        for queue, since, until in unowned:
            grouped[Place(queue.topic, queue.broker), since, until].append(queue.id)
        self._unowned = grouped

    def start_codes(self, at: Integers) -> NDArray[np.int8]:
        """Return the start position in force at each time; before the first `owners` record, that of this record."""
        codes = [
            lag_columns.START_CODES.get(record.start_from, lag_columns.START_UNKNOWN) for record in self._owners
        ] or [lag_columns.START_UNKNOWN]
        return np.array(codes, np.int8)[self._find_owners(at)]

    def are_broadcasting(self, at: Integers) -> Flags:
        """Return for each time whether the group was Broadcasting."""
        flags = [record.model == "Broadcasting" for record in self._owners] or [False]
        return np.array(flags, np.bool_)[self._find_owners(at)]

    def have_owner(self, samples: Samples, places: Places) -> Flags:
        """Return for each sample whether its queue had an owner."""
        flags = np.ones(len(samples.record), np.bool_)
        bounds = samples.bounds
        for (place, since, until), ids in self._unowned.items():
            first_record = int(np.searchsorted(samples.at, _to_micros(since)))
            end_record = len(samples.at) if until is None else int(np.searchsorted(samples.at, _to_micros(until)))
            if first_record < end_record:
                during = slice(int(bounds[first_record]), int(bounds[end_record]))
                is_listed = np.isin(samples.queue[during], ids)
                flags[during] &= ~(is_listed & (samples.place[during] == places.encode(place)))
        return flags

    def _find_owners(self, at: Integers) -> NDArray[np.intp]:
        return np.maximum(np.searchsorted(self._owners_at, at, side="right") - 1, 0)


class _JudgedSamples(NamedTuple):
    """Lag, delay and lag state of each sample."""

    lags: lag_columns.Offsets
    delays: NDArray[np.float64]
    lag_states: NDArray[np.int8]


def judge_samples(
    parts: Iterable[Samples], places: Places, notes: GroupNotes, max_samples: int = CHUNK_SAMPLES
) -> Iterator[RecordTotals]:
    """Yield the totals of all records of offsets, which come in order of time, in parts of any size."""
    context: list[Samples] = []
    for new in chunk(parts, max_samples):
        samples = concatenate([*context, new])
        yield _judge_chunk(samples, len(samples.at) - len(new.at), places, notes)
        context = [samples.since(int(samples.at[-1]) - CONTEXT_SECONDS * MICROSECONDS)]


def _judge_chunk(samples: Samples, context_count: int, places: Places, notes: GroupNotes) -> RecordTotals:
    """Return the totals of the records after the first `context_count` ones."""
    is_retry_place = np.array([place.topic.startswith(RETRY_TOPIC_PREFIX) for place in places.by_code], np.bool_)
    is_retry = is_retry_place[samples.place]
    columns = lag_columns.OffsetColumns(
        sampled_at=samples.seconds[samples.record],
        min_offset=samples.first,
        max_offset=samples.last,
        committed_offset=samples.committed,
        has_owner=notes.have_owner(samples, places),
        previous_row=_previous_samples(samples, len(places.by_code)),
        # The operator starts retry topics at their beginning, whatever the group's start position.
        start_code=np.where(
            is_retry, np.int8(lag_columns.START_EARLIEST), notes.start_codes(samples.at)[samples.record]
        ),
    )
    is_judged = ~notes.are_broadcasting(samples.at)
    is_judged[:context_count] = False
    judged = _judge(samples, columns, is_judged[samples.record])
    return _total(samples, columns, judged, is_retry).after(context_count)


def _judge(samples: Samples, columns: lag_columns.OffsetColumns, is_judged: Flags) -> _JudgedSamples:
    """Return lag, delay and lag state by sample. The slow rules are applied only to the few queues that may lag."""
    lags = lag_columns.compute_lags(columns)
    is_steady = is_judged & _find_keeping_up(samples, columns, lags)
    others = np.flatnonzero(is_judged & ~is_steady)
    lag_states = np.where(is_steady, _KEEPING_UP, lag_columns.NO_STATE).astype(np.int8)
    delays = np.where(is_steady, 0.0, np.nan)
    lag_states[others] = lag_columns.compute_lag_states(columns, lags, others, SAMPLE_WINDOW)
    delays[others] = lag_columns.compute_delays(columns, lags, others, CONTEXT_SECONDS)
    return _JudgedSamples(lags, delays, lag_states)


def _find_keeping_up(samples: Samples, columns: lag_columns.OffsetColumns, lags: lag_columns.Offsets) -> Flags:
    """Return which samples certainly keep up, without the slow rules.

    Their lag is 0, the lag of their previous sample is known and recent, and no committed offset of the group went back
    lately.
    """
    has_previous = columns.previous_row >= 0
    previous = np.maximum(columns.previous_row, 0)  # without a previous sample, 0: its values are not used
    is_rewound = has_previous & (columns.committed_offset < columns.committed_offset[previous])
    rewound_at = samples.seconds[np.unique(samples.record[is_rewound])]
    last_index = np.searchsorted(rewound_at, samples.seconds, side="right") - 1  # -1: never rewound before
    last_rewound_at = np.concatenate([rewound_at, [-np.inf]])[last_index]  # index -1 is the appended -inf
    is_undisturbed = samples.seconds - last_rewound_at > SAMPLE_WINDOW.max_age_seconds
    is_at_end = (lags == 0) & (columns.committed_offset >= 0)
    is_recent = columns.sampled_at - columns.sampled_at[previous] <= SAMPLE_WINDOW.max_age_seconds
    is_comparable = has_previous & (lags[previous] != lag_columns.LAG_UNKNOWN) & is_recent
    is_steady: Flags = is_at_end & is_comparable & is_undisturbed[samples.record]
    return is_steady


def _previous_samples(samples: Samples, place_count: int) -> lag_columns.RowIndices:
    """Return the index of the queue's sample in the previous record, or -1; a queue that was absent counts as new."""
    key = samples.queue * place_count + samples.place  # a number for each queue
    order = np.argsort(key, kind="stable")
    earlier = order[:-1]
    later = order[1:]
    is_next_record = samples.record[later] == samples.record[earlier] + 1
    is_same_queue = (key[earlier] == key[later]) & is_next_record
    previous = np.full(len(key), -1, np.intp)
    previous[later[is_same_queue]] = earlier[is_same_queue]
    return previous


def _total(
    samples: Samples, columns: lag_columns.OffsetColumns, judged: _JudgedSamples, is_retry: Flags
) -> RecordTotals:
    """Add up the queues of each record."""
    is_subscribed = ~is_retry
    is_lag_unknown = judged.lags == lag_columns.LAG_UNKNOWN
    # Lag and delay are unknown if the lag of any subscribed queue is unknown, or if the record has no subscribed queue.
    unknown_count = samples.sum_by_record(is_subscribed & is_lag_unknown)
    is_unknown = (unknown_count > 0) | (samples.sum_by_record(is_subscribed) == 0)
    lag = samples.sum_by_record(np.where(is_lag_unknown | is_retry, 0, judged.lags))
    delay = np.zeros(len(samples.at))
    delayed = np.flatnonzero(is_subscribed & (judged.delays != 0))
    delays = judged.delays[delayed]
    # The highest delay of each record's queues; infinite: unknown.
    np.maximum.at(delay, samples.record[delayed], np.where(np.isnan(delays), np.inf, delays))
    rewound, arrived = _count_redeliveries(columns, is_retry)
    step_seconds = np.diff(samples.seconds, prepend=np.nan)
    is_covered = step_seconds <= SAMPLE_WINDOW.max_age_seconds
    return RecordTotals(
        at=samples.at,
        seconds=np.where(is_covered, np.minimum(step_seconds, MAX_RECORD_SECONDS), 0.0),
        lag=np.where(is_unknown, lag_columns.LAG_UNKNOWN, lag),
        delay=np.where(is_unknown | np.isinf(delay), np.nan, delay),
        rewound=samples.sum_by_record(rewound),
        retries=samples.sum_by_record(arrived),
        by_lag_state={
            state: samples.sum_by_record(judged.lag_states == code)
            for code, state in enumerate(lag_columns.LAG_STATES)
            if state  # None: the code NO_STATE
        },
    )


def _count_redeliveries(columns: lag_columns.OffsetColumns, is_retry: Flags) -> tuple[Integers, Integers]:
    """Return by how far committed offsets went back since the previous sample, and how many retries have arrived.

    Across a gap in the samples nothing is counted.
    """
    previous = np.maximum(columns.previous_row, 0)
    age_seconds = columns.sampled_at - columns.sampled_at[previous]
    is_recent = (columns.previous_row >= 0) & (age_seconds <= SAMPLE_WINDOW.max_age_seconds)
    is_comparable = is_recent & (columns.committed_offset >= 0) & (columns.committed_offset[previous] >= 0)
    went_back = np.maximum(columns.committed_offset[previous] - columns.committed_offset, 0)
    arrived = np.maximum(columns.max_offset - columns.max_offset[previous], 0)
    return np.where(is_comparable, went_back, 0), np.where(is_retry & is_recent, arrived, 0)


def _to_micros(at: datetime) -> int:
    return round(at.timestamp() * MICROSECONDS)
