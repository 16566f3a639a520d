"""What crosses a process boundary: assignment document, member report, journal record.

Queues are written as ranges, by topic and broker: `{"orders": {"broker-a": "0-3,7"}}`.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Literal

import msgspec

from rota.model import Queue

Ranged = dict[str, dict[str, str]]

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MOST_IDS = 1_000_000  # what one document can name; a wider range is a slip of the pen


def to_ranges(queues: Iterable[Queue]) -> Ranged:
    """Write queues as ranges; `from_ranges` reads them back."""
    ranged: Ranged = {}
    for (topic, broker), run in groupby(sorted(queues), key=lambda queue: (queue.topic, queue.broker)):
        ranged.setdefault(topic, {})[broker] = ",".join(_ranges([queue.id for queue in run]))
    return ranged


def _ranges(ids: list[int]) -> Iterable[str]:
    start = before = ids[0]
    for number in [*ids[1:], None]:
        if number is not None and number == before + 1:
            before = number
            continue
        yield str(start) if start == before else f"{start}-{before}"
        if number is not None:
            start = before = number


def from_ranges(ranged: Mapping[str, Mapping[str, str]]) -> list[Queue]:
    """Read queues that are written as ranges; what cannot be read is a sentence."""
    return [
        Queue(topic, broker, number)
        for topic, brokers in ranged.items()
        for broker, ids in brokers.items()
        for number in ids_of(ids)
    ]


def ids_of(ranges: str) -> list[int]:
    """Read `0-3,7` as 0, 1, 2, 3, 7."""
    ids: list[int] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first or last - first + len(ids) >= MOST_IDS:
            raise ValueError(f"Queue ids {ranges!r} cannot be read: write them as 0-3,7")
        ids += range(first, last + 1)
    if len(set(ids)) != len(ids):
        raise ValueError(f"Queue ids {ranges!r} name one id twice")
    return ids


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a member says of itself: one consistent cut, so that what it does not name it does not work."""

    member: str
    uid: str
    generation: int
    revision: int = 0
    reads: int = 1
    state: Literal["serving", "draining", "drained"] = "serving"
    final: bool = False
    held: dict[str, dict[str, str]] = {}
    releasing: dict[str, dict[str, str]] = {}

    @property
    def working(self) -> frozenset[Queue]:
        """Every queue that it may still deliver from or commit for."""
        return frozenset([*from_ranges(self.held), *from_ranges(self.releasing)])

    @property
    def drained(self) -> bool:
        """Whether it has given up everything for good."""
        return self.final and self.state == "drained"


def read_report(text: bytes | str) -> Report:
    """Read a report; what is none is a sentence, and fields of later versions are passed over."""
    try:
        report = msgspec.json.decode(text, type=Report)
        report.working  # noqa: B018 - its ranges must be readable
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"The report cannot be read: {error}") from None
    return report
