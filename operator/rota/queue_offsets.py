"""Where a member is with its queues, as it answers in pages at `/v1/report/queues`."""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from rota.model import Queue
from rota.ranges import MOST_IDS

_Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Place(Struct):
    """Where a member is with a queue; it is somebody else's word, so it must fit into a column of offsets."""

    topic: str
    broker: str
    id: int
    committed: _Offset | None
    start: _Offset | None = None
    given: _Offset | None = None


class _Places(Struct):
    queues: Annotated[list[_Place], Meta(max_length=MOST_IDS)] = []
    next: int | None = None
    incarnation: Annotated[str, Meta(max_length=64)] = ""


class QueueOffsets(dict[Queue, int | None]):
    """Where a member is with queues; unlike a plain dict it can be referred to weakly."""


class Offsets(NamedTuple):
    """One page; `next` is where the next page begins, if there is one."""

    offsets: QueueOffsets
    next: int | None = None


def read_offsets(text: bytes | str) -> Offsets:
    """Read a page, or a report of an earlier version; of what cannot be read nothing is known."""
    try:
        found = msgspec.json.decode(text, type=_Places)
    except (ValueError, RecursionError):
        return Offsets(QueueOffsets())
    offsets = QueueOffsets((Queue(it.topic, it.broker, it.id), it.committed) for it in found.queues)
    return Offsets(offsets, found.next)


class QueueProgress(NamedTuple):
    """How far a member is with a queue; None: it is not known, or the sidecar is of a version that does not say."""

    start: int | None  # the offset at which it began to read
    given: int | None  # the highest offset that the app was given
    committed: int | None


class ProgressPage(NamedTuple):
    """The progress of some queues at one process; `next` is where the next page begins, if there is one."""

    incarnation: str
    queues: dict[Queue, QueueProgress]
    next: int | None


def read_progress(text: bytes | str) -> ProgressPage | None:
    """Read the progress in a page; None if it cannot be read."""
    try:
        page = msgspec.json.decode(text, type=_Places)
    except (ValueError, RecursionError):
        return None
    queues = {Queue(it.topic, it.broker, it.id): QueueProgress(it.start, it.given, it.committed) for it in page.queues}
    return ProgressPage(page.incarnation, queues, page.next)
