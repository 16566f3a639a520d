"""Structured Streaming job from the journal to a lake: ingests complete hours, each line once, also after a crash.

**Exactly once.** The checkpoint defines the content of a batch, also when it runs again after a crash. Its rows go to
`KIND/date=…/batch=N` by overwriting just those folders, so a second write changes nothing. (Delta stores the batch's
number itself.) One query writes all kinds, since their lines are read and judged together, once.

**Identical lines** are dropped as long as the watermark remembers them. The event time is the end of the file's hour,
since copies of a line are in files of the same hour, and even a torn line has one. Spark would silently drop lines that
are older than the watermark; so the inbox marks such files, and their lines go to the quarantine.

A reader of the lake may meanwhile see a batch in some tables and not yet in others.
"""

import fcntl
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from rota.pipeline.common.paths import check_ingest
from rota.pipeline.ingest.facts import TABLE_SCHEMAS, records_of_kind, rejected_lines
from rota.pipeline.ingest.inbox import Inbox
from rota.pipeline.ingest.lines import judge_lines

SETTLE = timedelta(minutes=5)
LATENESS = timedelta(hours=2)
STREAM_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",  # a new session lacks it if another program created the context
    "spark.sql.shuffle.partitions": "8",  # fixed by the first batch; each partition has a state store
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",  # expired state is removed one batch later
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"  # off the JVM heap
    ),
}
LATE_REASON = (
    "The file arrived so long after later hours that its lines cannot be distinguished from copies; recreate the lake"
)

RowCounts = dict[str, int]


def ingest_journal(
    spark: SparkSession,
    source: str,
    lake: str,
    *,
    settle: timedelta | None = SETTLE,
    lateness: timedelta = LATENESS,
    table_format: str = "parquet",
    on_ingested: Callable[[RowCounts], bool] | None = None,
) -> RowCounts:
    """Bring a lake up to date with a journal; return the number of new rows by table.

    Files are ingested once they have not grown for `settle` after their hour; with None all are, as no operator writes
    them any more. `on_ingested` gets the new rows by table, waits, and returns whether to continue with later hours.
    """
    journal = Path(source)
    lake_folder = Path(lake)
    check_ingest(journal, lake_folder, table_format)
    if table_format == "delta" and not _has_delta(spark):
        remedy = "give spark-submit --packages io.delta:delta-spark, or remove --format delta"
        raise ValueError(f"Delta is not on Spark's class path; {remedy}")
    stream_session = spark.newSession()
    for key, value in STREAM_SETTINGS.items():
        stream_session.conf.set(key, value)
    total: RowCounts = {}
    with _lock_lake(lake_folder):
        inbox = Inbox(lake_folder / "_inbox", journal, lateness)
        while True:
            counts: RowCounts = {}
            pending = inbox.has_pending_files()  # files that a killed run has left
            while pending or inbox.link_complete_files(datetime.now(UTC), settle):
                _ingest_pending(stream_session, lake_folder, lateness, table_format, counts)
                inbox.mark_ingested()
                pending = False
            total = {kind: total.get(kind, 0) + counts.get(kind, 0) for kind in TABLE_SCHEMAS}
            if on_ingested is None or not on_ingested(counts):
                return total


def _has_delta(spark: SparkSession) -> bool:
    try:
        spark.read.format("delta").load("/nowhere")
    except Exception as error:  # noqa: BLE001 - a Java exception without Delta, a Spark exception with it
        return "DATA_SOURCE_NOT_FOUND" not in str(error)
    return True


@contextmanager
def _lock_lake(lake: Path) -> Iterator[None]:
    """Lock the lake against other writers; the kernel releases the lock when this process ends, even by a crash."""
    lake.mkdir(parents=True, exist_ok=True)
    with (lake / "_lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another `rota pipeline ingest` is writing {lake}; wait until it is done") from None
        yield


def _ingest_pending(spark: SparkSession, lake: Path, lateness: timedelta, table_format: str, counts: RowCounts) -> None:
    """Ingest all pending files of the inbox."""
    reader = spark.readStream.option("lineSep", "\n").option("maxFileAge", "36500d")  # in any order of hours
    lines = reader.text(str(lake / "_inbox")).transform(_with_file_and_hour)
    new = lines.withWatermark("hour", f"{int(lateness.total_seconds())} seconds")
    errors: list[Exception] = []

    def write(batch: DataFrame, number: int) -> None:
        try:
            _write_batch(batch, number, lake, table_format, counts)
        except Exception as error:
            errors.append(error)
            raise

    unique = new.dropDuplicatesWithinWatermark(["sum", "other"])  # a 96-bit hash instead of the line
    writer = unique.writeStream.foreachBatch(write).option("checkpointLocation", str(lake / "_checkpoint"))
    try:
        _run_to_end(writer.trigger(availableNow=True))
    except Exception as error:  # noqa: BLE001 - Java's exceptions share no useful base class
        if errors:  # Spark's own error does not say what failed in `write`
            raise errors[0] from None
        remedy = "if its _checkpoint is damaged, or the lake was moved, move it back or recreate it"
        raise ValueError(f"The lake {lake} cannot be continued: {_first_error_line(error)}; {remedy}") from None


def _first_error_line(error: Exception) -> str:
    """Return the first line of an error, without Spark's codes and query names."""
    first = str(error).partition("\n")[0].rpartition("terminated with exception: ")[2]
    return re.sub(r"\[[A-Z_.]+\] | SQLSTATE: \w+", "", first)


def _run_to_end(writer: DataStreamWriter) -> None:
    query = writer.start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def _with_file_and_hour(values: DataFrame) -> DataFrame:
    """Add the file and hour of each line, both by its file's name in the inbox, whether it is late, and its hash."""
    name = F.try_url_decode(F.replace(F.col("_metadata.file_name"), F.lit("+"), F.lit("%2B")))
    hour = F.regexp_extract(name, r"^(\S{13})\.", 1)
    file = F.regexp_extract(name, r"^\S{13}\.\d+\.(.*)$", 1)
    return values.select(
        F.col("value").alias("line"),
        F.concat(F.lit("date="), F.regexp_replace(file, r"^(\S{10})T", "$1/")).alias("file"),
        F.substring(file, 1, 10).cast("date").alias("date"),
        (F.to_timestamp(hour, "yyyy-MM-dd'T'HH") + F.expr("INTERVAL 1 HOUR")).alias("hour"),
        (F.substring(file, 1, 13) != hour).alias("late"),
        F.xxhash64("value").alias("sum"),
        F.hash("value").alias("other"),
    )


def _write_batch(batch: DataFrame, batch_id: int, lake: Path, table_format: str, counts: RowCounts) -> None:
    """Write a batch's rows idempotently, and add their number to `counts`."""
    lines = batch.select("line", "file", "date", "late").transform(judge_lines).transform(_reject_late).persist()
    try:
        table_name = F.coalesce("kind", F.lit("quarantine")).alias("kind")
        for kind, count in lines.groupBy(table_name).count().collect():  # at most one row per kind
            table = lines.transform(rejected_lines) if kind == "quarantine" else lines.transform(records_of_kind, kind)
            _write_table(table, lake / kind, batch_id, table_format)
            counts[kind] = counts.get(kind, 0) + count
    finally:
        lines.unpersist()


def _reject_late(lines: DataFrame) -> DataFrame:
    """Reject late lines: the stream can no longer tell whether they are copies."""
    late = F.col("late")
    kind = F.when(~late, F.col("kind"))
    reason = F.when(late, F.lit(LATE_REASON)).otherwise(F.col("reason"))
    line = F.when(reason.isNotNull(), F.col("line"))  # only rejected lines need it: these rows are persisted
    return lines.withColumns({"kind": kind, "reason": reason, "line": line}).drop("late")


def _write_table(table: DataFrame, folder: Path, batch_id: int, table_format: str) -> None:
    if table_format == "delta":
        transaction = {"txnAppId": f"rota-{folder.name}", "txnVersion": str(batch_id)}
        table.write.format("delta").mode("append").options(**transaction).partitionBy("date").save(str(folder))
        return
    numbered = table.withColumn("batch", F.lit(batch_id))
    writer = numbered.write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
    writer.partitionBy("date", "batch").parquet(str(folder))
