"""Where a member is with its queues, as it answers in pages at `/v1/report/queues`."""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from rota.model import Queue
from rota.ranges import MOST_IDS


class _Place(Struct):
    """Where a member is with a queue; it is somebody else's word, so it must fit into a column of offsets."""

    topic: str
    broker: str
    id: int
    committed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None


class _Places(Struct):
    queues: Annotated[list[_Place], Meta(max_length=MOST_IDS)] = []
    next: int | None = None


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
