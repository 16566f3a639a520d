"""Recorded message rates (`--rates`) for generated histories: each topic of a group follows one recorded *trace*.

A file has one trace a line, with the number of messages in each step from `start` (UTC) on:

    {"name": "clicks", "start": "2015-02-26T21:42:53", "step_seconds": 300, "values": [104, 99]}
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from rota.model import Queue, single_line
from rota.pipeline.replay.group_history import STEP_SECONDS, Rates

DAY_SECONDS = 86_400.0
MAX_RATE = 1e9  # messages a second; with it, the offsets of a year still are integers of 64 bits
MAX_TOPICS = 3  # topics of a group, each with a trace of its own

_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,100}$")]  # RocketMQ accepts it as a topic
_Positive = Annotated[float, Meta(gt=0)]
_Count = Annotated[float, Meta(ge=0)]


class RateTrace(Struct, frozen=True, forbid_unknown_fields=True):
    """Recorded numbers of messages."""

    name: _Name
    start: datetime
    step_seconds: _Positive
    values: Annotated[list[_Count], Meta(min_length=2)]

    @property
    def start_seconds(self) -> float:
        """The start in seconds since 1970; a time without a zone is UTC."""
        start = self.start if self.start.tzinfo else self.start.replace(tzinfo=UTC)
        return start.timestamp()

    @property
    def seconds(self) -> float:
        """The length of the trace."""
        return len(self.values) * self.step_seconds


class RecordedRates(NamedTuple):
    """Traces for generated groups."""

    traces: Sequence[RateTrace]
    scale: float = 1.0  # factor of all rates


def read_rates(path: Path, scale: float = 1.0) -> RecordedRates:
    """Read a file of traces; raise ValueError with a sentence for a file that has none, or a mistake in a line."""
    if not 0 < scale < float("inf"):
        raise ValueError(f"The scale of recorded rates is {scale:g}; give a number above 0")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    traces = tuple(_parse_traces(lines, path, scale))
    if not traces:
        raise ValueError(f"{path} has no traces; give a file of JSON lines with name, start, step_seconds, values")
    names = [trace.name for trace in traces]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path} has several traces with the name {name}; give each a name of its own")
    return RecordedRates(traces, scale)


def _parse_traces(lines: Iterable[bytes], path: Path, scale: float) -> Iterator[RateTrace]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            trace = msgspec.json.decode(line, type=RateTrace)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {number}, is not a trace: {single_line(str(error), 200)}") from None
        if not any(trace.values):
            raise ValueError(f"{path}, line {number}: trace {trace.name} has no messages; remove it")
        if max(trace.values) * max(scale, 1.0) / trace.step_seconds > MAX_RATE:
            most = f"more than {MAX_RATE:,.0f} messages a second"
            raise ValueError(f"{path}, line {number}: trace {trace.name} has {most}; correct it, or --scale")
        yield trace


def trace_rates(trace: RateTrace, begins: float, steps: int, first_day: int) -> Rates:
    """Return the rate, in messages a second, in each step of a history that starts at `begins`.

    - The history starts at the same time of day in the trace, on its day `first_day` (modulo its number of whole days).
    - A history that is longer than the trace repeats its whole days.
    - A trace shorter than a day is repeated as a whole, so its times of day shift.
    """
    whole_days = max(1, int(trace.seconds // DAY_SECONDS))
    period = min(whole_days * DAY_SECONDS, trace.seconds)
    offset = (begins - trace.start_seconds) % DAY_SECONDS + first_day % whole_days * DAY_SECONDS
    edges = offset + STEP_SECONDS * np.arange(steps + 1)
    trace_edges = trace.step_seconds * np.arange(len(trace.values) + 1)
    cumulative = np.concatenate([[0.0], np.cumsum(trace.values)])
    arrived_in_period = np.interp(period, trace_edges, cumulative)
    # Arrivals from the start of the trace to each edge: those of the complete periods, and of the present one so far.
    arrived = edges // period * arrived_in_period + np.interp(edges % period, trace_edges, cumulative)
    rates: Rates = np.diff(arrived) / STEP_SECONDS
    return rates


class GeneratedTraffic(NamedTuple):
    """The queues of a group, sorted, and their arrivals by step and queue."""

    queues: tuple[Queue, ...]
    arrivals: Rates


def generate_traffic(
    rng: np.random.Generator, recorded: RecordedRates, queue_count: int, skew: float, *, begins: float, steps: int
) -> GeneratedTraffic:
    """Return queues of up to MAX_TOPICS topics; each topic follows a random trace, from a random day on.

    The queues of a topic share its rate by the weights of a lognormal distribution with sigma `skew`.
    """
    max_topics = min(MAX_TOPICS, len(recorded.traces), queue_count)
    chosen = rng.choice(len(recorded.traces), size=int(rng.integers(1, max_topics + 1)), replace=False)
    queues: list[Queue] = []
    columns: list[Rates] = []
    for topic_number, index in enumerate(chosen.tolist()):
        trace = recorded.traces[index]
        count = len(range(topic_number, queue_count, len(chosen)))  # queues are dealt to the topics in turn
        rates = recorded.scale * trace_rates(trace, begins, steps, int(rng.integers(0, 1 << 30)))
        shares = rng.lognormal(0.0, skew, count)
        queues += [Queue(trace.name, f"broker-{'ab'[number % 2]}", number // 2) for number in range(count)]
        columns.append(rates[:, None] * (shares / shares.sum())[None, :])
    arrivals = np.hstack(columns)
    order = sorted(range(len(queues)), key=queues.__getitem__)
    return GeneratedTraffic(tuple(queues[index] for index in order), arrivals[:, order])
