"""Batch ingest: new segments of the journal become rows of the lake's tables, each line once, and then a snapshot.

A run takes these steps, in this order:

1. Its segments, those of the journal that the ledger lacks, are stored as the plan of run N, with the journal's name.
   A repeated run takes exactly these: tables that have rows of run N already skip it, and so would lose a segment that
   the plan lacks.
2. The rows of each kind of record, then the rejected lines, then the ledger are appended, each with one commit that
   names run N.
3. A snapshot with the versions of these tables is published.

A run that is killed is repeated by the next one; readers stay at the snapshot before. Two concurrent runs have the same
number and the same plan, so whichever commits a table first wins, and the other one skips that table.

Lines that are in several segments count once. A line that an earlier run has ingested has the same time as its copy: so
only if the times of new records overlap with those of ingested segments, rows are compared with the table's.

A segment that was removed before it was read is ingested if it comes back: the ledger has it without an ETag, and with
the times of its whole day, since an earlier attempt of the run may have appended its rows.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from rota.object_store import ObjectStore
from rota.object_store.segments import segment_hour
from rota.pipeline.common.schemas import JOURNAL_SCHEMAS
from rota.pipeline.ingest.lines import judge_lines
from rota.pipeline.ingest.rows import QUARANTINE_KIND, table_rows
from rota.pipeline.ingest.segment_lines import DATE_CHARACTERS, MISSING_REASON, read_segment_lines
from rota.pipeline.lake.runs import PlannedSegment, RunPlan
from rota.pipeline.lake.snapshots import LakeSnapshot
from rota.pipeline.lake.table import Table, TableCommit, TableHead
from rota.pipeline.lake.tables import FILES_TABLE, Lake
from rota.sentences import join_names

MAX_RUN_BYTES = 2**30  # of compressed segments in one run, unless a single segment is larger
MAX_RUN_SEGMENTS = 10_000
KINDS = (*JOURNAL_SCHEMAS, QUARANTINE_KIND)
LEDGER_COLUMNS = ["key", "etag", "first_at", "last_at"]  # that decide what is new
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

AtStep = Callable[[str], None]
RowCounts = dict[str, int]
ListedSegment = tuple[str, str]  # key and ETag


class IngestSummary(NamedTuple):
    """What an ingest has added, and the newest snapshot after it."""

    snapshot: LakeSnapshot
    runs: int
    segments: int
    rows: RowCounts  # by kind


class LineCounts(NamedTuple):
    """Number of lines, and the times of the first and last record among them; None without a record."""

    lines: int
    first_at: datetime | None
    last_at: datetime | None


class BatchCounts(NamedTuple):
    """Lines of a run, with those that are repeated in other segments."""

    by_kind: Mapping[str, LineCounts]
    by_file: Mapping[str, LineCounts]
    missing: frozenset[str]  # segments that were removed before they were read
    repeated: frozenset[str]  # kinds with lines that may be repeated in several segments


def no_step(_step: str) -> None:
    """Do nothing at a step of an ingest."""


def ingest_journal(spark: SparkSession, lake: Lake, journal: ObjectStore, at_step: AtStep = no_step) -> IngestSummary:
    """Ingest all segments that the lake lacks; return what was added.

    `at_step` is called before and after each write, with its name, such as `before lake/plan`.
    """
    runs = 0
    segments = 0
    rows: RowCounts = dict.fromkeys(KINDS, 0)
    missing: set[ListedSegment] = set()
    while (run := IngestRun(spark, lake, journal, at_step, missing=missing)).plan is not None:
        runs += 1
        segments += len(run.plan.segments)
        for kind, count in run.ingest(run.plan).items():
            rows[kind] += count
    return IngestSummary(run.base, runs, segments, rows)


class IngestRun:
    """The run that follows the newest snapshot; `plan` is None if no segment is new.

    Segments that the run does not find are added to `missing`; those that it has already are no new segments.
    """

    def __init__(
        self, spark: SparkSession, lake: Lake, journal: ObjectStore, at_step: AtStep, *, missing: set[ListedSegment]
    ) -> None:
        self._spark = spark
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
            return plan
        segments = tuple(limit_run(find_new_segments(self._journal, self._ingested, self._missing)))
        if not segments:
            return None
        if newer := [name for name, head in self._heads().items() if head.run >= number]:
            return self._read_plan_of(number, newer)
        with self._step("_rota/runs"):
            return self._lake.runs.create(number, self._journal.uri, segments)

    def _read_plan_of(self, number: int, tables: Sequence[str]) -> RunPlan:
        """Return the plan of a run whose rows some tables have; another process may have stored it just now.

        Raise ValueError if there is none: with another plan, these tables would skip the rows of its segments.
        """
        plan = self._lake.runs.read(number)
        if plan is None:
            raise ValueError(
                f"{self._lake.uri}: {join_names(tables)} already have rows of run {number} or a later one, but _rota "
                "has neither its snapshot nor its plan; restore _rota, or recreate the lake from the journal"
            )
        return plan

    def _check_journal(self, plan: RunPlan) -> None:
        """Raise ValueError if a run takes segments of another journal: all of them would be missing in this one."""
        if plan.journal != self._journal.uri:
            raise ValueError(
                f"{self._lake.uri}: run {plan.number} of the journal {plan.journal} is unfinished; ingest that one "
                f"first (if it has moved, change its name in {self._lake.uri}/_rota/runs/{plan.number}.json)"
            )

    def ingest(self, plan: RunPlan) -> RowCounts:
        """Append the rows of the plan's segments to all tables, and publish a snapshot; return the number of rows."""
        commits: dict[str, TableCommit] = {}
        if self._ledger.transaction() < plan.number:  # the ledger is the last table: otherwise all are complete
            commits = self._append_rows(plan)
        # Also of tables that another process, or this run before it was killed, has appended to.
        versions = {name: head.version for name, head in self._heads().items() if head.run == plan.number}
        with self._step("_rota/snapshots"):
            self._lake.snapshots.publish(self.base, versions, plan.number)
        commits.pop(self._ledger.name, None)
        return {name.removeprefix("lake/"): commit.rows for name, commit in commits.items()}

    def _append_rows(self, plan: RunPlan) -> dict[str, TableCommit]:
        self._lake.add_missing_columns()
        lines = read_segment_lines(self._spark, self._journal.uri, plan.segments).transform(_judge).persist()
        commits: dict[str, TableCommit] = {}
        try:
            counts = _count_lines(lines)
            self._check_missing(plan, counts.missing)
            for kind in KINDS:
                if kind in counts.by_kind:
                    table = self._lake.table(f"lake/{kind}")
                    rows = table_rows(lines, kind, has_repeated=kind in counts.repeated)
                    commits[table.name] = self._append(table, rows, plan.number, counts.by_kind[kind])
        finally:
            lines.unpersist()
        ledger_rows = self._spark.createDataFrame(list(_ledger_rows(plan, counts)), self._ledger.schema)
        with self._step(self._ledger.name):
            commits[self._ledger.name] = self._ledger.append(ledger_rows, plan.number)
        return commits

    def _append(self, table: Table, rows: DataFrame, number: int, counts: LineCounts) -> TableCommit:
        """Append rows to a table, without those that it has; only records of ingested times can be in it already."""
        may_be_present = counts.first_at is None or self._overlaps_ingested(counts)
        with self._step(table.name):
            return table.merge(rows, number) if may_be_present else table.append(rows, number)

    def _check_missing(self, plan: RunPlan, missing: Collection[str]) -> None:
        """Note the segments that were not found; raise ValueError if these are all, as if it were another journal."""
        self._missing.update((segment.key, segment.etag) for segment in plan.segments if segment.key in missing)
        if all(segment.key in missing for segment in plan.segments):
            raise ValueError(
                f"{self._journal.uri} has none of the segments of run {plan.number}, such as {plan.segments[0].key}; "
                f"restore them, or delete {self._lake.uri}/_rota/runs/{plan.number}.json if they are gone for good"
            )

    def _overlaps_ingested(self, counts: LineCounts) -> bool:
        """Return whether an ingested segment has records of the times of these lines."""
        first = pa.scalar(counts.first_at, pa.timestamp("us", "UTC"))
        last = pa.scalar(counts.last_at, pa.timestamp("us", "UTC"))
        overlaps = pc.and_(
            pc.less_equal(self._ingested["first_at"], last), pc.greater_equal(self._ingested["last_at"], first)
        )
        return bool(pc.any(overlaps).as_py())

    def _heads(self) -> dict[str, TableHead]:
        """Return the newest version of all tables that ingest writes."""
        return {name: self._lake.table(name).head() for name in (*(f"lake/{kind}" for kind in KINDS), FILES_TABLE.name)}

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._at_step(f"before {name}")
        yield
        self._at_step(f"after {name}")


def find_new_segments(
    journal: ObjectStore, ingested: pa.Table, missing: Collection[ListedSegment] = ()
) -> list[PlannedSegment]:
    """Return the journal's segments that no run has ingested with the same content, the oldest hours first.

    Those that were listed, but `missing` when they were read, would be missing again.
    """
    known = {*zip(ingested["key"].to_pylist(), ingested["etag"].to_pylist(), strict=True), *missing}
    segments = (listed for listed in journal.list_objects() if segment_hour(listed.key))
    new_segments = [listed for listed in segments if (listed.key, listed.etag) not in known]
    return [PlannedSegment(listed.key, listed.size_bytes, listed.etag) for listed in sorted(new_segments)]


def limit_run(segments: Sequence[PlannedSegment]) -> Sequence[PlannedSegment]:
    """Return the first segments, as many as one run takes, at least one."""
    total_bytes = 0
    for count, segment in enumerate(segments):
        total_bytes += segment.size_bytes
        if count and (total_bytes > MAX_RUN_BYTES or count == MAX_RUN_SEGMENTS):
            return segments[:count]
    return segments


def _judge(lines: DataFrame) -> DataFrame:
    """Judge lines; keep the text only of rejected lines, since these rows are persisted."""
    judged = judge_lines(lines)
    reason = F.coalesce("broken", "reason")
    return judged.withColumns({"reason": reason, "line": F.when(reason.isNotNull(), F.col("line"))}).drop("broken")


def _count_lines(lines: DataFrame) -> BatchCounts:
    """Count judged lines by kind and by file; this evaluates and persists them."""
    at = F.unix_micros("at")
    rows = (
        lines.withColumn("is_missing", F.col("reason").eqNullSafe(MISSING_REASON))
        .groupBy("file", F.coalesce("kind", F.lit(QUARANTINE_KIND)).alias("kind"), "is_missing")
        .agg(F.count("*").alias("lines"), F.min(at).alias("first_at"), F.max(at).alias("last_at"))
        .collect()
    )
    by_file = _sum_counts(rows, "file")
    repeated = _repeated_kinds(lines) if _have_common_times(by_file.values()) else frozenset()
    return BatchCounts(
        by_kind=_sum_counts(rows, "kind"),
        by_file=by_file,
        missing=frozenset(row["file"] for row in rows if row["is_missing"]),
        repeated=repeated | {QUARANTINE_KIND},
    )


def _have_common_times(files: Iterable[LineCounts]) -> bool:
    """Return whether two segments may contain the same record: both have records of the same time."""
    spans = sorted((file.first_at, file.last_at) for file in files if file.first_at and file.last_at)
    latest = EPOCH
    for first_at, last_at in spans:
        if first_at <= latest:
            return True
        latest = max(latest, last_at)
    return False


def _repeated_kinds(lines: DataFrame) -> frozenset[str]:
    """Return the kinds with repeated lines. Digests alone are compared, since rows are much larger."""
    counts = lines.groupBy("kind").agg(F.count("*").alias("lines"), F.count_distinct("digest").alias("digests"))
    return frozenset(row["kind"] for row in counts.where("kind is not null and lines > digests").collect())


def _sum_counts(rows: Sequence[Row], key: str) -> dict[str, LineCounts]:
    sums: dict[str, LineCounts] = {}
    for row in rows:
        others = sums.get(row[key], LineCounts(0, None, None))
        firsts = [time for time in (others.first_at, _to_time(row["first_at"])) if time]
        lasts = [time for time in (others.last_at, _to_time(row["last_at"])) if time]
        sums[row[key]] = LineCounts(others.lines + row["lines"], min(firsts, default=None), max(lasts, default=None))
    return sums


def _to_time(micros: int | None) -> datetime | None:
    return None if micros is None else EPOCH + timedelta(microseconds=micros)


def _ledger_rows(plan: RunPlan, counts: BatchCounts) -> Iterator[dict[str, Any]]:
    """Yield a row for each segment of a run. That of a missing one has no ETag, so it is ingested if it comes back."""
    for segment in plan.segments:
        hour = segment_hour(segment.key)
        if hour:
            day = date.fromisoformat(hour[:DATE_CHARACTERS])
            row = msgspec.structs.asdict(segment) | {"run": plan.number, "date": day}
            if segment.key in counts.missing:
                yield row | {"etag": ""} | _counts_of_missing(day)._asdict()
            else:
                yield row | counts.by_file.get(segment.key, LineCounts(0, None, None))._asdict()


def _counts_of_missing(day: date) -> LineCounts:
    """Return the times of the day: an earlier attempt of the run may have appended the segment's records."""
    first_at = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return LineCounts(0, first_at, first_at + timedelta(days=1))
