"""Compact notation of queues: ranges of ids by topic and broker, such as `{"orders": {"broker-a": "0-3,7"}}`."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter
from typing import TypeVar

from rota.model import Queue

T = TypeVar("T")

RangesByTopic = dict[str, dict[str, str]]

_MAX_ID_DIGITS = 9
_RANGE_PATTERN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_ID_PATTERN = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)
MAX_TOPIC_BROKER_PAIRS = 20_000  # pairs of topic and broker of one group: each takes memory, however few queues it has
# In a document or a report: a short text can name very many queues, and most readers expand them.
MAX_QUEUES_PER_DOCUMENT = 2**17
_TOO_MANY_QUEUES = f"more than {MAX_QUEUES_PER_DOCUMENT} queues are named"


class RangedQueues(AbstractSet[Queue]):
    """A set of queues that is stored as ranges: a short text can name 131,072 queues, which would take 20 MiB."""

    def __init__(self, *mappings: Mapping[str, Mapping[str, str]]) -> None:
        """Take one or more mappings of valid ranges; the set is their union, and is parsed on first use."""
        self._mappings = mappings

    @cached_property
    def _spans_by_broker(self) -> dict[tuple[str, str], list[tuple[int, int]]]:
        spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for ranged in self._mappings:
            for topic, brokers in ranged.items():
                for broker, ids in brokers.items():
                    spans.setdefault((topic, broker), []).extend(_parse_spans(ids))
        return {topic_and_broker: _merge_spans(parts) for topic_and_broker, parts in spans.items()}

    @classmethod
    def _from_iterable(cls, queues: Iterable[Queue]) -> frozenset[Queue]:  # type: ignore[override]  # set operators return it
        return frozenset(queues)

    def __contains__(self, queue: object) -> bool:
        if not isinstance(queue, Queue):
            return False
        spans = self._spans_by_broker.get((queue.topic, queue.broker), ())
        index = bisect_right(spans, queue.id, key=itemgetter(0)) - 1  # of the last span that starts at or below the id
        return index >= 0 and queue.id <= spans[index][1]

    def __iter__(self) -> Iterator[Queue]:
        for (topic, broker), spans in self._spans_by_broker.items():
            for first, last in spans:
                for number in range(first, last + 1):
                    yield Queue(topic, broker, number)

    def __len__(self) -> int:
        return sum(map(_count_ids, self._spans_by_broker.values()))

    def __hash__(self) -> int:
        return self._hash()


def to_ranges(queues: Iterable[Queue]) -> RangesByTopic:
    """Write queues as ranges; `from_ranges` reads them back."""
    ids_by_topic: dict[str, dict[str, list[int]]] = {}
    for topic, broker, number in sorted(queues):
        ids_by_topic.setdefault(topic, {}).setdefault(broker, []).append(number)
    ranged: RangesByTopic = {}
    for topic, brokers in ids_by_topic.items():
        ranged[topic] = {broker: _format_ids(ids) for broker, ids in brokers.items()}
    return ranged


def _format_ids(ids: list[int]) -> str:
    """Write ascending ids as `0-3,7`."""
    if len(ids) == 1:  # in a large group, most members have one queue of a broker
        return str(ids[0])
    spans = []
    first: int | None = ids[0]
    for last, following in zip(ids, [*ids[1:], None], strict=True):
        if following != last + 1:
            spans.append(str(first) if first == last else f"{first}-{last}")
            first = following
    return ",".join(spans)


def from_ranges(ranged: Mapping[str, Mapping[str, str]]) -> list[Queue]:
    """Parse queues that are written as ranges; raise ValueError with a sentence if they are invalid."""
    queues: list[Queue] = []
    for topic, brokers in ranged.items():
        for broker, ids in brokers.items():
            queues += [Queue(topic, broker, number) for number in parse_ids(ids)]
            if len(queues) > MAX_QUEUES_PER_DOCUMENT:
                raise ValueError(_TOO_MANY_QUEUES)
    return queues


def parse_ids(ranges: str) -> list[int]:
    """Parse `0-3,7` as 0, 1, 2, 3, 7."""
    ids: list[int] = []
    for first, last in _parse_spans(ranges):
        ids += range(first, last + 1)
    return ids


def check_ranges(*mappings: RangesByTopic) -> None:
    """Raise ValueError if ranges are invalid or name too many queues; the queues are not expanded."""
    count = 0
    for brokers in chain.from_iterable(ranged.values() for ranged in mappings):
        for ids in brokers.values():
            count += _count_ids(_parse_spans(ids))
        if count > MAX_QUEUES_PER_DOCUMENT:
            raise ValueError(_TOO_MANY_QUEUES)


def count_topic_broker_pairs(*mappings: RangesByTopic) -> int:
    """Count the pairs of topic and broker; a topic without a broker counts as well."""
    return sum(max(1, len(brokers)) for brokers in chain.from_iterable(ranged.values() for ranged in mappings))


def _parse_spans(ranges: str) -> list[tuple[int, int]]:
    """Parse `0-3,7` as 0 to 3, 7 to 7."""
    if len(ranges) <= _MAX_ID_DIGITS and ranges.isascii() and ranges.isdigit():  # a single id, as in large groups
        return [(int(ranges), int(ranges))]
    spans: list[tuple[int, int]] = []
    count = 0
    for part in ranges.split(","):
        match = _RANGE_PATTERN.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        count += last - first + 1
        is_invalid = last < first  # as after a failed match, with (0, -1)
        if is_invalid:
            raise ValueError(f"Invalid queue ids {_shorten(ranges)}: write them as 0-3,7")
        if count > MAX_QUEUES_PER_DOCUMENT:
            raise ValueError(f"Invalid queue ids {_shorten(ranges)}: {_TOO_MANY_QUEUES}")
        spans.append((first, last))
    if any(later[0] <= earlier[1] for earlier, later in pairwise(sorted(spans))):
        raise ValueError(f"Invalid queue ids {_shorten(ranges)}: an id is named twice")
    return spans


def _count_ids(spans: Iterable[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in spans)


def _merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same ids in ascending spans that do not touch."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _shorten(ranges: str) -> str:
    return repr(f"{ranges[:50]}…" if len(ranges) > 50 else ranges)  # noqa: PLR2004 - a line's worth


def iterate_entries(nested: Mapping[str, Mapping[str, Mapping[str, T]]]) -> Iterator[tuple[Queue, T]]:
    """Yield each queue with its entry from a mapping by topic, broker and id."""
    for topic, brokers in nested.items():
        for broker, ids in brokers.items():
            for number, entry in ids.items():
                if not _ID_PATTERN.fullmatch(number):
                    raise ValueError(f"Queue id {number!r} is not a number")
                yield Queue(topic, broker, int(number)), entry
