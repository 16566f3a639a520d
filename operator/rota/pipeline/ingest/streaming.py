"""The journal into a lake: Structured Streaming over hours that are over, each line once, whatever is killed.

**Once.** A batch is what the checkpoint says, again after a crash. Its rows go to `KIND/date=…/batch=N`, by overwriting
just those folders: written twice, they are there once. (Delta keeps the batch's number itself.) One query writes all
kinds, for they come from the same lines, which are read and judged once.

**Identical lines** are told apart as long as the watermark remembers them. Its time is that of the hour's end, since
copies of a line lie in files of one hour, and even a torn line has one. What comes later than that would be dropped
without a word; so such files are marked in the inbox, and their lines go to the quarantine instead.

Whoever reads the lake meanwhile may see a batch in some tables and not yet in others.
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
from rota.pipeline.ingest.facts import TABLES, of_kind, refused
from rota.pipeline.ingest.inbox import Inbox
from rota.pipeline.ingest.lines import judged

SETTLE, LATENESS = timedelta(minutes=5), timedelta(hours=2)
STREAMING = {
    "spark.sql.session.timeZone": "UTC",  # a new session forgets it where the context was not ours
    "spark.sql.shuffle.partitions": "8",  # fixed by the first batch; each has its own store of what was seen
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",  # what need not be remembered is forgotten a batch later
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"  # beside the heap, not in it
    ),
}
LATE = "The file came so long after later hours that its lines can no longer be told from copies; make the lake anew"

Counts = dict[str, int]


def stream(
    spark: SparkSession,
    source: str,
    lake: str,
    *,
    settle: timedelta | None = SETTLE,
    lateness: timedelta = LATENESS,
    form: str = "parquet",
    watch: Callable[[Counts], bool] | None = None,
) -> Counts:
    """Bring a lake up to date with a journal; return how many rows each of its tables got.

    An hour is taken when its file has not grown for `settle` after its end; with None, whatever is there, once nobody
    writes it any more. `watch` is told what there was, waits a while, and says whether to go on with hours to come.
    """
    journal, place = Path(source), Path(lake)
    check_ingest(journal, place, form)
    if form == "delta" and not _has_delta(spark):
        raise ValueError(
            "Delta is not on Spark's class path; give spark-submit --packages io.delta:delta-spark, or leave --format"
        )
    own = spark.newSession()
    for key, value in STREAMING.items():
        own.conf.set(key, value)
    total: Counts = {}
    with _alone(place):
        inbox = Inbox(place / "_inbox", journal, lateness)
        while True:
            counts: Counts = {}
            waits = inbox.waits()  # what a killed one has left
            while waits or inbox.fill(datetime.now(UTC), settle):
                _drain(own, place, lateness, form, counts)
                inbox.finish()
                waits = False
            total = {kind: total.get(kind, 0) + counts.get(kind, 0) for kind in TABLES}
            if watch is None or not watch(counts):
                return total


def _has_delta(spark: SparkSession) -> bool:
    try:
        spark.read.format("delta").load("/nowhere")
    except Exception as error:  # noqa: BLE001 - of Java's own kind where it is missing, of Spark's where it is not
        return "DATA_SOURCE_NOT_FOUND" not in str(error)
    return True


@contextmanager
def _alone(lake: Path) -> Iterator[None]:
    """Keep others from the lake; the system lets them in again when we end, however that is."""
    lake.mkdir(parents=True, exist_ok=True)
    with (lake / "_lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another `rota pipeline ingest` is writing {lake}; wait until it is done") from None
        yield


def _drain(spark: SparkSession, lake: Path, lateness: timedelta, form: str, counts: Counts) -> None:
    """Have everything in the inbox read and written."""
    reader = spark.readStream.option("lineSep", "\n").option("maxFileAge", "36500d")  # hours may come in any order
    lines = reader.text(str(lake / "_inbox")).transform(_with_place)
    new = lines.withWatermark("hour", f"{int(lateness.total_seconds())} seconds")

    wrong: list[Exception] = []

    def write(batch: DataFrame, number: int) -> None:
        try:
            _write(batch, number, lake, form, counts)
        except Exception as error:
            wrong.append(error)
            raise

    asked = (
        new.dropDuplicatesWithinWatermark(["sum", "other"])  # 96 bits of a line, for the line itself
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(lake / "_checkpoint"))
        .trigger(availableNow=True)
    )
    try:
        _run(asked)
    except Exception as error:  # noqa: BLE001 - Java's are of all kinds, and none is ours
        if wrong:  # of which Spark says no more than that it was
            raise wrong[0] from None
        raise ValueError(
            f"{lake} cannot be gone on with: {_reason(error)}; if its _checkpoint is damaged, or was made where the "
            f"lake had another path, have the lake where it was, or make it anew"
        ) from None


def _reason(error: Exception) -> str:
    """Return what is wrong, without Spark's codes and the names of its queries."""
    first = str(error).partition("\n")[0].rpartition("terminated with exception: ")[2]
    return re.sub(r"\[[A-Z_.]+\] | SQLSTATE: \w+", "", first)


def _run(asked: DataStreamWriter) -> None:
    query = asked.start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def _with_place(values: DataFrame) -> DataFrame:
    """Say where in the journal a line stood, and whether it came too late."""
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


def _write(batch: DataFrame, number: int, lake: Path, form: str, counts: Counts) -> None:
    """Write a batch's rows, so that a second time changes nothing."""
    lines = batch.select("line", "file", "date", "late").transform(judged).transform(_without_late).persist()
    try:
        found = F.coalesce("kind", F.lit("quarantine")).alias("kind")
        for kind, count in lines.groupBy(found).count().collect():  # at most one row for each kind
            table = lines.transform(refused) if kind == "quarantine" else lines.transform(of_kind, kind)
            _put(table, lake / kind, number, form)
            counts[kind] = counts.get(kind, 0) + count
    finally:
        lines.unpersist()


def _without_late(lines: DataFrame) -> DataFrame:
    """Refuse what came too late to be told from copies."""
    late = F.col("late")
    kind, reason = F.when(~late, F.col("kind")), F.when(late, F.lit(LATE)).otherwise(F.col("reason"))
    line = F.when(reason.isNotNull(), F.col("line"))  # whoever keeps these rows a while need not keep that, too
    return lines.withColumns({"kind": kind, "reason": reason, "line": line}).drop("late")


def _put(table: DataFrame, folder: Path, number: int, form: str) -> None:
    if form == "delta":
        again = {"txnAppId": f"rota-{folder.name}", "txnVersion": str(number)}
        table.write.format("delta").mode("append").options(**again).partitionBy("date").save(str(folder))
        return
    numbered = table.withColumn("batch", F.lit(number))
    writer = numbered.write.mode("overwrite").option("partitionOverwriteMode", "dynamic")
    writer.partitionBy("date", "batch").parquet(str(folder))
