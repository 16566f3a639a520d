"""Records of one group except samples of offsets, and the hours in which the group has records of any kind.

`Fact` is the base class of all journal records about a group.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TypeVar

import numpy as np

from rota.pipeline.history.hours import hour_of
from rota.pipeline.history.ordering import AssignmentRecord
from rota.pipeline.history.samples import Integers
from rota.records import (
    ConditionRecord,
    Fact,
    HandoverRecord,
    MembershipRecord,
    ObeyedRecord,
    OffsetsRecord,
    OwnersRecord,
    PlanRecord,
)

MICROS_PER_HOUR = 3_600_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Records of a group's state at one time. They show until when the operator has recorded the group.
_STATE_RECORDS = (PlanRecord, ObeyedRecord, OwnersRecord, OffsetsRecord, ConditionRecord)
_Kind = TypeVar("_Kind", bound=Fact)


class GroupRecords:
    """Records of one group."""

    def __init__(self, records: Iterable[Fact] = ()) -> None:
        self.hours: set[datetime] = set()  # hours with any record
        self.recorded_until: datetime | None = None  # time of the last record in _STATE_RECORDS; None: no such record
        self._by_kind: dict[type[Fact], list[Fact]] = {}
        for record in records:
            self.add(record)

    def add(self, record: Fact) -> None:
        """Add a record."""
        self._by_kind.setdefault(type(record), []).append(record)
        if isinstance(record, _STATE_RECORDS):
            self._add_state_time(record.at)
        self.hours.add(hour_of(record.at))

    def add_state_times(self, at: Integers) -> None:
        """Add only the times, in microseconds since 1970, of some _STATE_RECORDS."""
        if len(at):
            self._add_state_time(to_time(int(at.max())))
            for hour in np.unique(at // MICROS_PER_HOUR).tolist():
                self.hours.add(to_time(hour * MICROS_PER_HOUR))

    def since(self, at: datetime) -> "GroupRecords":
        """Return the records from the time `at` on, which is a full hour."""
        later = GroupRecords()
        for record in chain.from_iterable(self._by_kind.values()):
            if record.at >= at:
                later.add(record)
        later.hours = {hour for hour in self.hours if hour >= at}
        if self.recorded_until and self.recorded_until >= at:
            later.recorded_until = self.recorded_until
        return later

    def of_kind(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the records of a kind."""
        return self._by_kind.get(kind, [])  # type: ignore[return-value]  # `add` keys records by their type

    def of_kinds(self, kinds: Iterable[type[Fact]]) -> list[Fact]:
        """Return the records of some kinds."""
        return list(chain.from_iterable(map(self.of_kind, kinds)))

    def assignments(self) -> list[AssignmentRecord]:
        """Return the records of assignments."""
        return [
            *self.of_kind(MembershipRecord),
            *self.of_kind(PlanRecord),
            *self.of_kind(HandoverRecord),
            *self.of_kind(OwnersRecord),
        ]

    def _add_state_time(self, at: datetime) -> None:
        self.recorded_until = max(at, self.recorded_until or at)


def to_time(micros: int) -> datetime:
    """Return the time that is `micros` microseconds after the start of 1970."""
    return _EPOCH + timedelta(microseconds=micros)
