"""Computes the outcome of a run (pauses, duplicates, losses, overlaps) from the log of deliveries; pure functions.

A queue gets a message every few milliseconds at best, on a busy machine less often. So a pause is not the time between
two messages: it is how long the later message waited in the queue while no member consumed it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from ground import deliveries
from ground.deliveries import Came

STILL = 1.0  # seconds: a member that pauses for less and then goes on with its queue is busy, not away
TOGETHER = 1.0  # seconds: two members consume a queue at once if one goes on this soon after the other's message
CALM = 5.0  # seconds without any trouble after which the fleet counts as settled


class Span(NamedTuple):
    """A period of time, in seconds since the epoch."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return self.end - self.begin


@dataclass(frozen=True)
class Run:
    """A run: the deliveries, how many messages were sent, when the fleet was acted on, and when sending ended.

    `struck` is the member that was acted on, if it was a single one.
    """

    came: Sequence[Came]
    sent: int
    queues: int
    acts: Sequence[float]
    over: float
    struck: str = ""


@dataclass(frozen=True)
class Outcome:
    """The figures of a run.

    touched: the longest pause of each queue that moved, belonged to the struck member, is new, or stood still
    others: the longest pause of each other queue
    twice, lost, disorder: messages delivered again, never delivered, delivered after a later message of their queue
    overlap: seconds in which two members consumed one queue
    right: seconds until the fleet had settled; None: it never did
    """

    touched: Sequence[float]
    others: Sequence[float]
    twice: int
    lost: int
    disorder: int
    overlap: float
    right: float | None
    watched: float = 0.0  # seconds from the first act until sending ended


Queues = Mapping[int, Sequence[Came]]


def outcome(run: Run) -> Outcome:
    """Compute the outcome of a run, queue by queue."""
    queues = by_queue(run)
    touched: list[float] = []  # the longest pause of each queue
    others: list[float] = []
    shared: list[Span] = []
    troubles: list[Span] = []  # moves and long pauses
    for _, messages in sorted(queues.items()):
        pauses = [*pauses_of(messages, run)]
        longest = max((pause.seconds for pause in pauses), default=0.0)
        (touched if has_moved(messages, run) or longest >= STILL else others).append(longest)
        shared += [span for span in shared_of(messages) if span.end >= run.acts[0]]
        troubles += moves_of(messages)
        troubles += [pause for pause in pauses if pause.seconds >= STILL]
    repeats = count_repeats(run.came)
    return Outcome(
        touched=touched,
        others=others,
        twice=repeats,
        lost=run.sent - (len(run.came) - repeats),
        disorder=sum(disorder_of(messages) for messages in queues.values()),
        overlap=total_seconds(united(shared)),
        right=right_after(troubles, run),
        watched=run.over - run.acts[0],
    )


def count_repeats(messages: Sequence[Came]) -> int:
    """Return how many deliveries were of messages that had been delivered before."""
    return len(messages) - len({message.number for message in messages})


def by_queue(run: Run) -> Queues:
    """Return the deliveries of each queue; a queue without any has an empty list."""
    return {queue: [] for queue in range(run.queues)} | deliveries.by_queue(run.came)


def has_moved(messages: Sequence[Came], run: Run) -> bool:
    """Whether a queue got another owner after the first act, was the struck member's, or had no owner before."""
    earlier_members = [message.member for message in messages if message.at < run.acts[0]]
    later_members = {message.member for message in messages if message.at >= run.acts[0]}
    return not earlier_members or earlier_members[-1] == run.struck or bool(later_members - {earlier_members[-1]})


def pauses_of(messages: Sequence[Came], run: Run) -> Iterator[Span]:
    """Yield the spans in which a queue had messages but no consumer, from the first act until sending ended."""
    last = run.acts[0]
    for message in messages:
        if message.at >= run.acts[0]:
            yield Span(min(message.at, max(last, message.born, run.acts[0])), message.at)
        last = message.at
    if last < run.over - STILL:  # a queue gets messages all the time
        yield Span(max(last, run.acts[0]), run.over)


def moves_of(messages: Sequence[Came]) -> Iterator[Span]:
    """Yield the spans in which a queue went from one member to another."""
    for previous, following in pairwise(messages):
        if previous.member != following.member:
            yield Span(previous.at, following.at)


def shared_of(messages: Sequence[Came]) -> Iterator[Span]:
    """Yield the spans in which a member went on with a queue that another member consumed meanwhile."""
    last: dict[str, tuple[int, float]] = {}
    for place, message in enumerate(messages):
        last_place, last_at = last.get(message.member, (place, message.at))
        if place - last_place > 1 and message.at - last_at <= TOGETHER:
            yield Span(last_at, message.at)
        last[message.member] = place, message.at


def disorder_of(messages: Iterable[Came]) -> int:
    """Count messages whose first delivery came after that of a later message of their queue."""
    seen_numbers: set[int] = set()
    highest = -1
    count = 0
    for message in messages:
        count += message.number not in seen_numbers and message.number < highest
        seen_numbers.add(message.number)
        highest = max(highest, message.number)
    return count


def total_seconds(spans: Iterable[Span]) -> float:
    """Return the total length of the spans."""
    return sum(span.seconds for span in spans)


def united(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap or touch."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.begin <= merged[-1].end:
            merged[-1] = Span(merged[-1].begin, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def right_after(troubles: Iterable[Span], run: Run) -> float | None:
    """Return the seconds of trouble after each act, added up; None if the fleet had not settled after the last act."""
    spans = [*troubles]
    total = 0.0
    for begin, end in pairwise([*run.acts, run.over]):
        until = max(
            (min(trouble.end, end) for trouble in spans if trouble.end > begin and trouble.begin < end), default=begin
        )
        if end == run.over and until > end - CALM:
            return None
        total += until - begin
    return total


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else 0.0


# The table.


@dataclass(frozen=True)
class Line:
    """One event, and its outcome with either system."""

    what: str
    ours: Outcome
    theirs: Outcome
    ordered: bool = field(default=False)  # whether the group guarantees the order of messages


HEAD = (
    "| event | Rota: pause, s | duplicates | lost | two owners, s | settled after | "
    "Java: pause, s | duplicates | lost | two owners, s | settled after |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(lines: Iterable[Line]) -> str:
    """Format the lines as a Markdown table."""
    return "\n".join([HEAD, *map(spelled, lines)])


def spelled(line: Line) -> str:
    """Format one line of the table."""
    cells = [*_cells(line.ours, ordered=line.ordered), *_cells(line.theirs, ordered=line.ordered)]
    return f"| {line.what} | {' | '.join(cells)} |"


def _cells(outcome: Outcome, *, ordered: bool) -> list[str]:
    pauses = [
        percentile(outcome.touched, 0.5),
        percentile(outcome.touched, 0.99),
        max([*outcome.touched, *outcome.others, 0.0]),
    ]
    disorder = f", {outcome.disorder:,} out of order" if ordered and outcome.disorder else ""
    settled = f"never, in {outcome.watched:.0f} s" if outcome.right is None else f"{_short(outcome.right)} s"
    return [
        " / ".join(map(_short, pauses)),
        f"{outcome.twice:,}",
        f"{outcome.lost:,}{disorder}",
        _short(outcome.overlap),
        settled,
    ]


def _short(seconds: float) -> str:
    """Format seconds with three significant digits."""
    return f"{seconds:.2f}" if seconds < 9.995 else f"{seconds:.1f}"


class Unmarked(Exception):  # noqa: N818 - it names what is wrong with the file
    """A file lacks the two marker lines that enclose the table."""


BEGIN, END = "<!-- compare -->", "<!-- /compare -->"


def replaced(text: str, new_table: str) -> str:
    """Replace the text between the two marker lines by the table."""
    lines = text.split("\n")
    if lines.count(BEGIN) != 1 or lines.count(END) != 1 or lines.index(BEGIN) > lines.index(END):
        raise Unmarked(f"it needs one line {BEGIN} and, after it, one line {END}")
    return "\n".join([*lines[: lines.index(BEGIN) + 1], new_table, *lines[lines.index(END) :]])
