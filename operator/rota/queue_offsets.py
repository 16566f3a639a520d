"""A member's offsets in its queues, as its sidecar returns them in pages at `/v1/report/queues`."""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from rota.model import Queue
from rota.ranges import MAX_QUEUES_PER_DOCUMENT

_Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _QueueEntry(Struct):
    """A member's offsets in one queue, as `QueueProgress` explains them.

    A pod may send anything: each offset must fit into a column of 64-bit integers.
    """

    topic: str
    broker: str
    id: int
    committed: _Offset | None
    start: _Offset | None = None
    given: _Offset | None = None  # `QueueProgress.delivered_offset`

    @property
    def queue(self) -> Queue:
        return Queue(self.topic, self.broker, self.id)


class _QueuePage(Struct):
    queues: Annotated[list[_QueueEntry], Meta(max_length=MAX_QUEUES_PER_DOCUMENT)] = []
    next: int | None = None
    incarnation: Annotated[str, Meta(max_length=64)] = ""


def _decode_page(text: bytes | str) -> _QueuePage | None:
    try:
        return msgspec.json.decode(text, type=_QueuePage)
    except (ValueError, RecursionError):
        return None


class QueueOffsets(dict[Queue, int | None]):
    """A member's committed offsets by queue; a class, since a plain dict cannot have weak references."""


class OffsetsPage(NamedTuple):
    """One page; `next_start` is where the next page starts, or None on the last page."""

    offsets: QueueOffsets
    next_start: int | None = None


def decode_offsets(text: bytes | str) -> OffsetsPage:
    """Read the committed offsets in a page, or in a report of an earlier version; empty if it cannot be read."""
    page = _decode_page(text) or _QueuePage()
    return OffsetsPage(QueueOffsets((entry.queue, entry.committed) for entry in page.queues), page.next)


class QueueProgress(NamedTuple):
    """A member's progress in a queue; None: unknown, or not reported by the sidecar's version."""

    start_offset: int | None  # the offset at which the member began to read
    delivered_offset: int | None  # the highest offset that the app was given
    committed_offset: int | None  # or the one that an unanswered pull carries, if that is higher


class ProgressPage(NamedTuple):
    """The progress of one process in some queues; `next_start` is the start of the next page, None on the last page."""

    incarnation: str
    queues: dict[Queue, QueueProgress]
    next_start: int | None


def decode_progress(text: bytes | str) -> ProgressPage | None:
    """Read the progress in a page; None if it cannot be read."""
    page = _decode_page(text)
    if page is None:
        return None
    progress = {entry.queue: QueueProgress(entry.start, entry.given, entry.committed) for entry in page.queues}
    return ProgressPage(page.incarnation, progress, page.next)
