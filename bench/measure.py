"""Shared by all benchmarks: a sample with its spread, and a row of the table."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """Several runs of the same work, in seconds."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        """The median of the runs."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        """Format the median and the spread in a suitable unit."""
        unit, factor = ("s", 1.0) if self.median >= 1 else ("ms", 1000.0)
        low = _three_digits(factor * min(self.seconds))
        high = _three_digits(factor * max(self.seconds))
        return f"{_three_digits(factor * self.median)} {unit} ({low} to {high})"


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table."""

    what: str
    ours: Sample
    peer: Sample | None = None
    target: str = ""

    def __str__(self) -> str:
        """Format the row as a line of a Markdown table."""
        ratio = _ratio(self.ours.median / self.peer.median) if self.peer else ""
        return f"| {self.what} | {self.ours} | {self.peer or ''} | {ratio} | {self.target} |"


def _ratio(ratio: float) -> str:
    """Format a ratio; one below 0.1 as 1 / n with two significant digits."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"1 / {float(f'{1 / ratio:.2g}'):,.0f}"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def timed(work: Callable[[], object], runs: int = 7, seconds: float = 0.1) -> Sample:
    """Time at least so many runs of the work, and more until they add up to so many seconds."""
    gc.collect()  # garbage of earlier work must not be collected during the runs
    durations: list[float] = []
    while len(durations) < runs or sum(durations) < seconds:
        began = time.perf_counter()
        work()
        durations.append(time.perf_counter() - began)
    return Sample(durations)
