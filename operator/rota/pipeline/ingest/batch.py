"""Batch ingest: new segments of the journal become rows of the lake's tables, each line once, and then a snapshot.

A run takes these steps, in this order:

1. The segments of the journal that the ledger (`lake/files`: a row for each ingested segment) lacks are stored as the
   plan of run N, with the journal's name. A repeated run takes exactly the segments of the plan: a table that already
   has rows of run N skips the run, so it would never get the rows of a segment that was added to the plan.
2. The segments are divided into shares, one for each task of Spark (a small run is one share, and needs no Spark),
   whose rows are written to files.
3. The rows of each kind of record, then the rejected lines, then the ledger are appended, each with one commit that
   names run N.
4. A snapshot with the versions of these tables is published.

A run that is killed is repeated by the next one; until then, readers use the previous snapshot. Two concurrent runs
have the same number and the same plan. The first one to commit a table wins, and the other one skips the table.

Lines that are in several segments count once. A copy of an ingested line has the same time. So new rows are compared
with the table's rows only if their times overlap with those of ingested segments.

A segment that was removed before it was read gets a row without an ETag in the ledger, so it is new if it comes back.
The times in that row span its whole day, since an earlier attempt of the run may have appended the segment's rows.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time
from functools import partial
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from rota.object_store import ObjectStore
from rota.object_store.segments import segment_hour
from rota.pipeline.ingest.ingested_rows import drop_ingested_rows
from rota.pipeline.ingest.rows import KINDS, table_columns
from rota.pipeline.ingest.shares import (
    KindRows,
    SegmentCounts,
    ShareResult,
    divide_segments,
    ingest_share,
    segment_day,
)
from rota.pipeline.lake.data_files import FileTarget, write_rows
from rota.pipeline.lake.runs import PlannedSegment, RunPlan
from rota.pipeline.lake.snapshots import LakeSnapshot
from rota.pipeline.lake.table import Table, TableCommit, TableHead
from rota.pipeline.lake.tables import FILES_TABLE, INGESTED_TABLES, TABLES, Lake
from rota.sentences import join_names

MAX_RUN_BYTES = 2**30  # of compressed segments in one run, unless a single segment is larger
MAX_RUN_SEGMENTS = 10_000
SMALL_RUN_BYTES = 32 * 2**20  # of compressed segments; one process ingests them in the time that Spark needs to start
SMALL_APPEND_ROWS = 500_000  # rows of a run for one table; Spark compares more than that with the table's rows
TASK_BYTES = 12 * 2**20  # of compressed segments in a task of Spark: some 90 MB of lines
MISSING_ETAG = ""  # ETag of a row in the ledger whose segment was removed before it was read
LEDGER_COLUMNS = ["key", "etag", "first_at", "last_at"]  # by which new segments and rows are recognized

StartSpark = Callable[[], SparkSession]
AtStep = Callable[[str], None]
RowCounts = dict[str, int]
ListedSegment = tuple[str, str]  # key and ETag


class IngestSummary(NamedTuple):
    """What an ingest has added, and the newest snapshot after it."""

    snapshot: LakeSnapshot
    runs: int
    segments: int
    rows: RowCounts  # by kind


def no_step(_step: str) -> None:
    """Do nothing at a step of an ingest."""


def ingest_journal(
    start_spark: StartSpark, lake: Lake, journal: ObjectStore, at_step: AtStep = no_step
) -> IngestSummary:
    """Ingest all segments that the lake lacks; return what was added.

    Spark is started only for large runs, and to compare new rows with those of a table or of other tasks.

    `at_step` is called before and after each write, with its name, such as `before lake/plan`.
    """
    runs = 0
    segments = 0
    rows: RowCounts = dict.fromkeys(KINDS, 0)
    missing: set[ListedSegment] = set()
    while (run := IngestRun(start_spark, lake, journal, at_step, missing=missing)).plan is not None:
        runs += 1
        segments += len(run.plan.segments)
        for kind, count in run.ingest(run.plan).items():
            rows[kind] += count
    return IngestSummary(run.base, runs, segments, rows)


class IngestRun:
    """The run that follows the newest snapshot; `plan` is None if no segment is new.

    Segments of the plan that the journal lacks are added to `missing`. Segments in `missing` do not count as new.
    """

    def __init__(
        self, start_spark: StartSpark, lake: Lake, journal: ObjectStore, at_step: AtStep, *, missing: set[ListedSegment]
    ) -> None:
        self._start_spark = start_spark
        self._lake = lake
        self._journal = journal
        self._at_step = at_step
        self._missing = missing
        self.base = lake.snapshots.latest()
        self._ledger = lake.table(FILES_TABLE.name)
        self._ingested = self._ledger.to_arrow(self.base.version(FILES_TABLE.name), LEDGER_COLUMNS)
        self.plan = self._read_or_create_plan(self.base.run + 1)
        if self.plan is not None:
            self._check_journal(self.plan)

    def _read_or_create_plan(self, number: int) -> RunPlan | None:
        plan = self._lake.runs.read(number)
        if plan is not None:
            self._read_heads()  # raises ValueError if a table has lost commits
            return plan
        segments = tuple(limit_run(find_new_segments(self._journal, self._ingested, self._missing)))
        if not segments:
            return None
        newer_tables: list[str] = []
        for name, head in self._read_heads().items():
            if head.run >= number:
                newer_tables.append(name)
        if newer_tables:
            return self._read_plan_of(number, newer_tables)
        with self._step("_rota/runs"):
            return self._lake.runs.create(number, self._journal.uri, segments)

    def _read_plan_of(self, number: int, tables: Sequence[str]) -> RunPlan:
        """Return the plan of a run whose rows some tables have; another process may have stored it just now.

        Raise ValueError if there is no plan: the tables would skip the rows of a new plan's segments.
        """
        plan = self._lake.runs.read(number)
        if plan is None:
            raise ValueError(
                f"{self._lake.uri}: {join_names(tables)} already have rows of run {number} or a later one, but _rota "
                "has neither its snapshot nor its plan; restore _rota, or recreate the lake from the journal"
            )
        return plan

    def _check_journal(self, plan: RunPlan) -> None:
        """Raise ValueError if the plan is of another journal, since this journal has none of its segments."""
        if plan.journal != self._journal.uri:
            raise ValueError(
                f"{self._lake.uri}: run {plan.number} of the journal {plan.journal} is unfinished; ingest that one "
                f"first (if it has moved, change its name in {self._lake.uri}/_rota/runs/{plan.number}.json)"
            )

    def ingest(self, plan: RunPlan) -> RowCounts:
        """Append the rows of the plan's segments to all tables, and publish a snapshot; return the number of rows."""
        commits: dict[str, TableCommit] = {}
        if self._ledger.transaction() < plan.number:  # the ledger is last, so if it has the run, all tables have it
            commits = self._append_rows(plan)
        # All tables with the run: `commits` lacks those that another process, or a killed attempt, has appended to.
        versions: dict[str, int | None] = {}
        for name, head in self._read_heads().items():
            if head.run == plan.number:
                versions[name] = head.version
        with self._step("_rota/snapshots"):
            self._lake.snapshots.publish(self.base, versions, plan.number)
        rows: RowCounts = {}
        for kind in KINDS:
            if kind in commits:
                rows[kind] = commits[kind].rows
        return rows

    def _append_rows(self, plan: RunPlan) -> dict[str, TableCommit]:
        self._lake.add_missing_columns()
        result = _merge_results(self._ingest_shares(plan))
        self._check_missing(plan, result.segments)
        commits: dict[str, TableCommit] = {}
        for kind in KINDS:
            if kind in result.rows:
                table = self._lake.table(f"lake/{kind}")
                commits[kind] = self._append(plan, table, result.rows[kind])
        ledger_rows = _ledger_rows(plan.number, result.segments)
        with self._step(self._ledger.name):
            files = write_rows(ledger_rows, FileTarget(self._lake.store, FILES_TABLE, _label(plan)))
            self._ledger.append_files(files, plan.number)
        return commits

    def _ingest_shares(self, plan: RunPlan) -> list[ShareResult]:
        """Ingest the segments in this process if they are small, since Spark needs longer to start; else in tasks."""
        ingest = partial(ingest_share, journal_uri=self._journal.uri, lake_uri=self._lake.uri, label=_label(plan))
        size_bytes = sum(segment.size_bytes for segment in plan.segments)
        if size_bytes <= SMALL_RUN_BYTES:
            return [ingest(plan.segments)]
        context = self._start_spark().sparkContext
        tasks = max(context.defaultParallelism, ceil(size_bytes / TASK_BYTES))
        shares = divide_segments(plan.segments, min(tasks, len(plan.segments)))
        return context.parallelize(shares, len(shares)).map(ingest).collect()

    def _append(self, plan: RunPlan, table: Table, rows: KindRows) -> TableCommit:
        """Append the rows of a run to a table: repeated rows once, and no rows that the table has already.

        - Two shares may have the same row: Spark compares all rows.
        - The table cannot have any of the rows: their files are committed as they are.
        - The table may have some: this process compares the rows or, if they are many, Spark does.
        """
        with self._step(table.name):
            if _may_repeat(rows.short_digests):
                distinct_rows = table.read_files(self._start_spark(), rows.files).dropDuplicates(["digest"])
                return table.merge(distinct_rows, plan.number)
            if not self._may_be_ingested(plan, rows):
                return table.append_files(rows.files, plan.number)
            if rows.count > SMALL_APPEND_ROWS:
                return table.merge_files(rows.files, plan.number, self._start_spark)
            target = FileTarget(self._lake.store, TABLES[table.name], _label(plan))
            new_files = drop_ingested_rows(table, target, rows.files)
            return table.append_files(new_files, plan.number)

    def _check_missing(self, plan: RunPlan, segments: Iterable[SegmentCounts]) -> None:
        """Note the segments that were not found; raise ValueError if the journal has no segment of the plan."""
        missing = [(counts.key, counts.etag) for counts in segments if counts.is_missing]
        self._missing.update(missing)
        if len(missing) == len(plan.segments):
            raise ValueError(
                f"{self._journal.uri} has none of the segments of run {plan.number}, such as {plan.segments[0].key}; "
                f"restore them, or delete {self._lake.uri}/_rota/runs/{plan.number}.json if they are gone for good"
            )

    def _may_be_ingested(self, plan: RunPlan, rows: KindRows) -> bool:
        """Return whether a table may have some of the rows: times overlap with ingested ones, or a segment came back.

        An earlier attempt may have appended rows of a segment that was missing later; the ledger has only its day.
        Rejected lines have no time, so they are always compared.
        """
        was_missing = pc.equal(self._ingested["etag"], MISSING_ETAG)
        missing_keys = set(self._ingested["key"].filter(was_missing).to_pylist())
        if rows.first_at is None or not missing_keys.isdisjoint(segment.key for segment in plan.segments):
            return True
        first = pa.scalar(rows.first_at, pa.timestamp("us", "UTC"))
        last = pa.scalar(rows.last_at, pa.timestamp("us", "UTC"))
        overlaps = pc.and_(
            pc.less_equal(self._ingested["first_at"], last), pc.greater_equal(self._ingested["last_at"], first)
        )
        return bool(pc.any(overlaps).as_py())

    def _read_heads(self) -> dict[str, TableHead]:
        """Return the newest version of all tables that ingest writes; raise ValueError if a log has lost commits."""
        heads: dict[str, TableHead] = {}
        for name in INGESTED_TABLES:
            heads[name] = self._lake.head(self.base, name)
        return heads

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._at_step(f"before {name}")
        yield
        self._at_step(f"after {name}")


def find_new_segments(
    journal: ObjectStore, ingested: pa.Table, missing: Collection[ListedSegment] = ()
) -> list[PlannedSegment]:
    """Return the journal's segments that no run has ingested with the same content, the oldest hours first.

    A segment in `missing` is left out: it is listed, but could not be read.
    """
    known = {*zip(ingested["key"].to_pylist(), ingested["etag"].to_pylist(), strict=True), *missing}
    segments = [
        PlannedSegment(listed.key, listed.size_bytes, listed.etag)
        for listed in journal.list_objects()
        if segment_hour(listed.key) and (listed.key, listed.etag) not in known
    ]
    return sorted(segments, key=attrgetter("key"))


def limit_run(segments: Sequence[PlannedSegment]) -> Sequence[PlannedSegment]:
    """Return the first segments, as many as one run takes, at least one."""
    total_bytes = 0
    for count, segment in enumerate(segments):
        total_bytes += segment.size_bytes
        if count and (total_bytes > MAX_RUN_BYTES or count == MAX_RUN_SEGMENTS):
            return segments[:count]
    return segments


def _merge_results(results: Iterable[ShareResult]) -> ShareResult:
    """Return the results of all shares as one."""
    merged = ShareResult([], {})
    for result in results:
        merged.segments.extend(result.segments)
        for kind, rows in result.rows.items():
            merged.rows.setdefault(kind, KindRows()).extend(rows)
    return merged


def _may_repeat(short_digests: bytes) -> bool:
    """Return whether two shares may have the same row, since two digests begin equally; a share has no row twice."""
    numbers = np.frombuffer(short_digests, np.uint64)
    return len(np.unique(numbers)) < len(numbers)


def _ledger_rows(run: int, segments: Iterable[SegmentCounts]) -> pa.Table:
    """Return a row for each segment of a run; without an ETag if it is missing, to ingest it if it comes back."""
    rows: list[dict[str, Any]] = []
    for counts in segments:
        day = segment_day(counts.key)
        times = _times_of_missing(day) if counts.is_missing else (counts.first_at, counts.last_at)
        rows.append(
            {
                "key": counts.key,
                "etag": MISSING_ETAG if counts.is_missing else counts.etag,
                "size_bytes": counts.size_bytes,
                "run": run,
                "lines": 0 if counts.is_missing else counts.lines,
                "first_at": times[0],
                "last_at": times[1],
                "date": day,
            }
        )
    return pa.Table.from_pylist(rows, schema=table_columns(FILES_TABLE))


def _times_of_missing(day: date) -> tuple[datetime, datetime]:
    """Return the first and last time of a day, since a missing segment may have rows of any time of its day."""
    return datetime.combine(day, time.min, UTC), datetime.combine(day, time.max, UTC)


def _label(plan: RunPlan) -> str:
    """Return the first part of the names of a run's files."""
    return f"run{plan.number}"
