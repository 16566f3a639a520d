"""What benchmarks share: a sample with its spread, and a row of the table."""

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
        """The middle run."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        """Spell the median and the spread in a unit that fits."""
        unit, factor = ("s", 1.0) if self.median >= 1 else ("ms", 1000.0)
        low, middle, high = (factor * it for it in (min(self.seconds), self.median, max(self.seconds)))
        return f"{_three_digits(middle)} {unit} ({_three_digits(low)} to {_three_digits(high)})"


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table."""

    what: str
    ours: Sample
    peer: Sample | None = None
    target: str = ""

    def __str__(self) -> str:
        """Spell it as a line of a Markdown table."""
        ratio = _ratio(self.ours.median / self.peer.median) if self.peer else ""
        return f"| {self.what} | {self.ours} | {self.peer or ''} | {ratio} | {self.target} |"


def _ratio(ratio: float) -> str:
    """Spell a ratio, and a small one as 1 / n with two digits that say something."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"1 / {float(f'{1 / ratio:.2g}'):,.0f}"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def timed(work: Callable[[], object], runs: int = 7, seconds: float = 0.1) -> Sample:
    """Run the work several times and time each run; short work more often, for as many seconds."""
    gc.collect()  # what others left behind is not this work's to clear away
    taken: list[float] = []
    while len(taken) < runs or sum(taken) < seconds:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return Sample(taken)
