"""What a run of a fleet was like, reckoned from what came to whom and when; nothing but values.

A queue gets a message every few milliseconds at best, and where machines are busy not even those. So a pause is not
the time between two messages: it is how long the later one lay there while nobody worked its queue.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from ground import deliveries
from ground.deliveries import Came

STILL = 1.0  # seconds: who pauses less long and then goes on with a queue is busy, not away
TOGETHER = 1.0  # seconds within which a member goes on with a queue that another one has touched: both work it
CALM = 5.0  # seconds without any trouble, to believe that there will be none


class Span(NamedTuple):
    """From when until when."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long that is."""
        return self.end - self.begin


@dataclass(frozen=True)
class Run:
    """A run: what came, how many were sent until when, and the moments at which something was done to the fleet.

    `struck` is the member that it was done to, if it was one.
    """

    came: Sequence[Came]
    sent: int
    queues: int
    acts: Sequence[float]
    over: float
    struck: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a run was like.

    touched: the longest pause of each queue that moved, was the struck member's, is new, or stood still
    others: the longest pause of each other queue
    twice, lost, disorder: messages that came again, that never came, that came after a later one of their queue
    overlap: seconds in which two members worked one queue; right: seconds until nothing changed any more, None: never
    """

    touched: Sequence[float]
    others: Sequence[float]
    twice: int
    lost: int
    disorder: int
    overlap: float
    right: float | None
    watched: float = 0.0  # how long it was looked at


Queues = Mapping[int, Sequence[Came]]


def outcome(run: Run) -> Outcome:
    """Look at each queue by itself."""
    times = Counter(it.number for it in run.came)
    queues = by_queue(run)
    pauses = {queue: [*pauses_of(its, run)] for queue, its in queues.items()}
    longest = {queue: max((it.seconds for it in spans), default=0.0) for queue, spans in pauses.items()}
    touched = {queue for queue, its in queues.items() if has_moved(its, run) or longest[queue] >= STILL}
    shared = [span for its in queues.values() for span in shared_of(its) if span.end >= run.acts[0]]
    moves = [span for its in queues.values() for span in moves_of(its)]
    long = [span for spans in pauses.values() for span in spans if span.seconds >= STILL]
    return Outcome(
        touched=[longest[queue] for queue in sorted(touched)],
        others=[longest[queue] for queue in sorted(queues.keys() - touched)],
        twice=sum(many - 1 for many in times.values()),
        lost=run.sent - len(times),
        disorder=sum(disorder_of(its) for its in queues.values()),
        overlap=sum(span.seconds for span in united(shared)),
        right=right_after([*moves, *long], run),
        watched=run.over - run.acts[0],
    )


def by_queue(run: Run) -> Queues:
    """Sort what came by queues; those of which nothing came are there too."""
    return {queue: [] for queue in range(run.queues)} | deliveries.by_queue(run.came)


def has_moved(its: Sequence[Came], run: Run) -> bool:
    """Whether another member worked a queue after the first act than before, or one that is struck, or the first."""
    before = [it.member for it in its if it.at < run.acts[0]]
    after = {it.member for it in its if it.at >= run.acts[0]}
    return not before or before[-1] == run.struck or bool(after - {before[-1]})


def pauses_of(its: Sequence[Came], run: Run) -> Iterator[Span]:
    """Tell when a queue was not worked though something lay in it, from the first act until sending was over."""
    last = run.acts[0]
    for it in its:
        if it.at >= run.acts[0]:
            yield Span(min(it.at, max(last, it.born, run.acts[0])), it.at)
        last = it.at
    if last < run.over - STILL:  # a queue gets messages all the time
        yield Span(max(last, run.acts[0]), run.over)


def moves_of(its: Sequence[Came]) -> Iterator[Span]:
    """Tell when a queue went from one member to another."""
    return (Span(before.at, after.at) for before, after in pairwise(its) if before.member != after.member)


def shared_of(its: Sequence[Came]) -> Iterator[Span]:
    """Tell when members went on with a queue that others worked meanwhile."""
    last: dict[str, tuple[int, float]] = {}
    for place, it in enumerate(its):
        before, at = last.get(it.member, (place, it.at))
        if place - before > 1 and it.at - at <= TOGETHER:
            yield Span(at, it.at)
        last[it.member] = place, it.at


def disorder_of(its: Iterable[Came]) -> int:
    """Count messages that came for the first time after a later one of their queue."""
    seen: set[int] = set()
    highest, count = -1, 0
    for it in its:
        count += it.number not in seen and it.number < highest
        seen.add(it.number)
        highest = max(highest, it.number)
    return count


def united(spans: Iterable[Span]) -> list[Span]:
    """Return the same time in spans that do not overlap."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def right_after(troubles: Iterable[Span], run: Run) -> float | None:
    """Return how long after each act there was trouble, added up; None if there was no end of it after the last."""
    spans, total = [*troubles], 0.0
    for begin, end in pairwise([*run.acts, run.over]):
        until = max((min(it.end, end) for it in spans if it.end > begin and it.begin < end), default=begin)
        if end == run.over and until > end - CALM:
            return None
        total += until - begin
    return total


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that is not below so large a share of them."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else 0.0


# The table.


@dataclass(frozen=True)
class Line:
    """One event, and what became of it with either system."""

    what: str
    ours: Outcome
    theirs: Outcome
    ordered: bool = field(default=False)  # whether messages were to come in their order


HEAD = (
    "| event | Rota: pause, s | duplicates | lost | two owners, s | settled after | "
    "Java: pause, s | duplicates | lost | two owners, s | settled after |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(lines: Iterable[Line]) -> str:
    """Spell the lines as a Markdown table."""
    return "\n".join([HEAD, *map(spelled, lines)])


def spelled(line: Line) -> str:
    """Spell one line of it."""
    cells = [*_cells(line.ours, ordered=line.ordered), *_cells(line.theirs, ordered=line.ordered)]
    return f"| {line.what} | {' | '.join(cells)} |"


def _cells(it: Outcome, *, ordered: bool) -> list[str]:
    pauses = [percentile(it.touched, 0.5), percentile(it.touched, 0.99), max([*it.touched, *it.others, 0.0])]
    disorder = f", {it.disorder:,} out of order" if ordered and it.disorder else ""
    right = f"never, in {it.watched:.0f} s" if it.right is None else f"{_short(it.right)} s"
    return [" / ".join(map(_short, pauses)), f"{it.twice:,}", f"{it.lost:,}{disorder}", _short(it.overlap), right]


def _short(seconds: float) -> str:
    """Spell seconds with as many digits as say something."""
    return f"{seconds:.2f}" if seconds < 9.995 else f"{seconds:.1f}"


class Unmarked(Exception):  # noqa: N818 - it names what is wrong with the file
    """A text without the two lines between which the table goes."""


BEGIN, END = "<!-- compare -->", "<!-- /compare -->"


def replaced(text: str, found: str) -> str:
    """Put the table between the two lines that are there for it."""
    lines = text.split("\n")
    if lines.count(BEGIN) != 1 or lines.count(END) != 1 or lines.index(BEGIN) > lines.index(END):
        raise Unmarked(f"it needs one line {BEGIN} and, after it, one line {END}")
    return "\n".join([*lines[: lines.index(BEGIN) + 1], found, *lines[lines.index(END) :]])
