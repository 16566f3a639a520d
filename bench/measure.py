"""What benchmarks share: a sample with its spread, and a row of the table."""

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
        return f"{middle:.3g} {unit} ({low:.3g} to {high:.3g})"


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table."""

    what: str
    ours: Sample
    peer: Sample | None = None
    target: str = ""

    def __str__(self) -> str:
        """Spell it as a line of a Markdown table."""
        ratio = f"{self.ours.median / self.peer.median:.2f}" if self.peer else ""
        return f"| {self.what} | {self.ours} | {self.peer or ''} | {ratio} | {self.target} |"


def timed(work: Callable[[], object], runs: int = 7) -> Sample:
    """Run the work several times and time each run."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return Sample(seconds)
