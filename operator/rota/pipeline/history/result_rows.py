"""Converts results of the history to rows of its tables, and rows to Arrow batches."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa

from rota.model import Queue
from rota.pipeline.history.audit import Interval, Violation

MAX_BATCH_ROWS = 10_000


def to_batches(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches."""
    remaining = iter(rows)
    while batch := list(islice(remaining, MAX_BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist(batch, schema=schema)


def interval_row(group: str, interval: Interval) -> dict[str, Any]:
    """Return an interval by the names of schemas.INTERVALS."""
    return interval._asdict() | _queue_fields(group, interval.queue)


def violation_row(group: str, violation: Violation) -> dict[str, Any]:
    """Return a violation by the names of schemas.VIOLATIONS."""
    return violation._asdict() | _queue_fields(group, violation.queue)


def _queue_fields(group: str, queue: Queue) -> dict[str, Any]:
    """Return the columns of group and queue; the field `queue` of an interval or violation is replaced by the id."""
    return {"group": group, "topic": queue.topic, "broker": queue.broker, "queue": queue.id}
