"""Samples of one group's offsets in columns: records in order of time, and the queues that each of them lists.

A *place*, a topic on a broker, is encoded as an integer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
MICROSECONDS = 1_000_000


class Place(NamedTuple):
    """A topic on a broker."""

    topic: str
    broker: str


@dataclass
class Places:
    """Codes of a group's places: their indices in the order in which they appeared."""

    by_code: list[Place] = field(default_factory=list)
    _codes: dict[Place, int] = field(default_factory=dict)

    def encode(self, place: Place) -> int:
        """Return the code of a place; a new place gets the next code."""
        code = self._codes.setdefault(place, len(self.by_code))
        if code == len(self.by_code):
            self.by_code.append(place)
        return code


class Samples(NamedTuple):
    """Records of offsets in order of time, and the queues listed in them."""

    # By record.
    at: Integers  # in microseconds since 1970
    # By sample of a queue, in the order of the records. `since` and `keep` rely on the order of the fields.
    record: Integers  # index of the record
    place: Integers  # code of the queue's topic and broker
    queue: Integers  # queue id
    first: Integers  # minimum offset of the queue
    last: Integers  # maximum offset of the queue: its end
    committed: Integers  # offset committed by the group, or `rota.lag_columns.NOT_COMMITTED`

    @property
    def seconds(self) -> NDArray[np.float64]:
        """The times of the records in seconds."""
        return self.at / MICROSECONDS

    @property
    def bounds(self) -> NDArray[np.intp]:
        """Bounds of the samples of each record: record n has the samples from `bounds[n]` to `bounds[n + 1]`."""
        return np.searchsorted(self.record, np.arange(len(self.at) + 1))

    def since(self, at: int) -> "Samples":
        """Return the records from a time (in microseconds since 1970) on, and their samples."""
        record = int(np.searchsorted(self.at, at))
        sample = int(np.searchsorted(self.record, record))
        by_sample = [column[sample:] for column in self[2:]]  # `place` and the columns after it
        return Samples(self.at[record:], self.record[sample:] - record, *by_sample)

    def keep(self, records: NDArray[np.bool_]) -> "Samples":
        """Return some of the records, and their samples."""
        indices = np.cumsum(records) - 1
        is_kept = records[self.record]
        by_sample = [column[is_kept] for column in self[2:]]
        return Samples(self.at[records], indices[self.record[is_kept]], *by_sample)

    def downsample(self, step: int) -> "Samples":
        """Return the first record, and the last record of each interval of `step` microseconds, with their samples."""
        is_needed = np.diff(self.at // step, append=-1) != 0
        is_needed[:1] = True
        return self.keep(is_needed)

    def sum_by_record(self, values: Integers | NDArray[np.bool_]) -> Integers:
        """Return the sum of values of samples for each record."""
        sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        bounds = self.bounds
        return np.asarray(sums[bounds[1:]] - sums[bounds[:-1]])


def concatenate(parts: Sequence[Samples]) -> Samples:
    """Return the records of all parts in their order."""
    if len(parts) == 1:
        return parts[0]
    at, record, *by_sample = zip(*parts, strict=True)
    # `record` counts from 0 in each part: add the number of records in the parts before.
    first_records = np.cumsum([0, *map(len, at[:-1])])
    records = list(map(np.add, record, first_records))
    return Samples(np.concatenate(at), np.concatenate(records), *map(np.concatenate, by_sample))


def chunk(parts: Iterable[Samples], max_samples: int) -> Iterator[Samples]:
    """Join parts to chunks of about `max_samples` samples, so that any length of history fits in memory."""
    waiting: list[Samples] = []
    count = 0
    for part in parts:
        if waiting and count + len(part.record) > max_samples:
            yield concatenate(waiting)
            waiting = []
            count = 0
        if len(part.at):
            waiting.append(part)
            count += len(part.record)
    if waiting:
        yield concatenate(waiting)
