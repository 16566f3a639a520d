"""Tables of the history of groups: hourly measures, owners over time, violations.

Spark distributes the records by group. Each of its tasks computes its groups one by one in a Python worker, without
Spark (`measures.roll_up`, `audit.audit_group`). Samples are read in batches, in order of group and time, so that a
worker's memory is bounded even if one group has half of all samples.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from rota.pipeline.common.columns import arrow_schema
from rota.pipeline.common.schemas import INTERVALS, ROLLUP, VIOLATIONS, table_schema
from rota.pipeline.history.audit import audit_group
from rota.pipeline.history.lag_states import CONTEXT_SECONDS
from rota.pipeline.history.measures import roll_up
from rota.pipeline.history.ordering import Gap, Gaps
from rota.pipeline.history.reading.buckets import History, read_task, shuffle_records
from rota.pipeline.history.reading.group_rows import GroupRows
from rota.pipeline.history.result_rows import interval_row, to_batches, violation_row
from rota.pipeline.history.samples import Places

# Only the times of these records are read: they show until when the operator has recorded the group.
_TIME_ONLY_KIND = "verdict"
_FULL_KINDS = ("membership", "plan", "handover", "obeyed", "owners", "rebalance", "redelivered")
HISTORY_KINDS = (*_FULL_KINDS, _TIME_ONLY_KIND, "gap")
# A row has either measures of an hour, an interval or a violation.
HISTORY = table_schema(measures=ROLLUP, interval=INTERVALS, violation=VIOLATIONS)

Batches = Iterator[pa.RecordBatch]


class HistoryReport(StrEnum):
    """A kind of result that is computed from a history."""

    ROLLUP = "rollup"
    AUDIT = "audit"


def compute_history(history: History, reports: Sequence[HistoryReport], tasks: int | None = None) -> DataFrame:
    """Return the rows (HISTORY) of `reports` for each group, from the day `history.audited_since` on."""
    task = _HistoryTask(history, reports)
    rows = shuffle_records(history, _FULL_KINDS, time_only=[_TIME_ONLY_KIND], tasks=tasks)
    return rows.mapInArrow(task.compute, HISTORY)


def select_rollup(rows: DataFrame) -> DataFrame:
    """Return the measures of each group and hour with any record (schemas.ROLLUP)."""
    return rows.where("measures is not null").select("measures.*")


def select_intervals(rows: DataFrame) -> DataFrame:
    """Return the owners of each queue over time, one row per period (schemas.INTERVALS)."""
    return rows.where("interval is not null").select("interval.*")


def select_violations(rows: DataFrame) -> DataFrame:
    """Return violations: two owners, grants without proof, queues without an owner, periods without information."""
    return rows.where("violation is not null").select("violation.*")


class _HistoryTask:
    """Computes the rows of a Spark task in a Python worker."""

    def __init__(self, history: History, reports: Sequence[HistoryReport]) -> None:
        self._sample_files = history.sample_files
        self._reports = reports
        self._gaps = _collect_gaps(history.records["gap"])
        day = history.audited_since  # the first day of which results are computed; None: all
        self._audited_since = datetime.combine(day, time(), UTC) if day else None
        # Lag states need the samples of the hour before.
        self._read_since = self._audited_since - timedelta(seconds=CONTEXT_SECONDS) if self._audited_since else None
        self._audited_gaps = [gap for gap in self._gaps if not self._audited_since or gap.at >= self._audited_since]

    def compute(self, records: Batches) -> Batches:
        """Yield the rows of the groups of a task."""
        # The audit needs the times of samples, not their values.
        has_rollup = HistoryReport.ROLLUP in self._reports
        groups = read_task(records, self._sample_files, self._read_since, sample_times_only=not has_rollup)
        yield from to_batches(self._compute_groups(groups), arrow_schema(HISTORY))

    def _compute_groups(self, groups: Iterable[GroupRows]) -> Iterator[dict[str, Any]]:
        # The rollup gets all records, and so all gaps; the audit only those since `_audited_since`.
        gaps = Gaps(self._gaps)
        audited_gaps = Gaps(self._audited_gaps)
        for rows in groups:
            if HistoryReport.ROLLUP in self._reports:
                places = Places()  # integer codes of topics on brokers, shared by samples and rollup
                for hour, measures in roll_up(rows.records, gaps, rows.samples(places), places):
                    if not self._audited_since or hour >= self._audited_since:
                        yield {"measures": {"group": rows.group, "hour": hour} | measures.to_row()}
            else:
                rows.add_sample_times()  # for the audit; `roll_up` adds these times while it reads the samples
            if HistoryReport.AUDIT in self._reports:
                yield from self._audit(rows, audited_gaps)

    def _audit(self, rows: GroupRows, gaps: Gaps) -> Iterator[dict[str, Any]]:
        records = rows.records.since(self._audited_since) if self._audited_since else rows.records
        audit = audit_group(records, gaps)
        for interval in audit.intervals:
            yield {"interval": interval_row(rows.group, interval)}
        for violation in audit.violations:
            yield {"violation": violation_row(rows.group, violation)}


def _collect_gaps(gaps: DataFrame) -> list[Gap]:
    """Return all gaps (periods of which records are missing), which are few. Each may hide records of any group."""
    rows = gaps.select("since", "at").toArrow()
    return list(map(Gap, rows["since"].to_pylist(), rows["at"].to_pylist()))
