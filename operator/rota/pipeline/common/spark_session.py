"""Creates the Spark session of pipeline commands, with the pipeline's settings."""

import os
import sys
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from rota.pipeline.common.bucket_access import jar_settings, reach_buckets

CORES = os.environ.get("ROTA_SPARK_CORES", "*")  # cores of this machine to use; spark-submit may name a cluster instead
_CORE_COUNT = int(CORES) if CORES.isdigit() else os.cpu_count() or 1

_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
# Compressed bytes of a journal up to which only Java's quick compiler (C1) is used. The optimizing compiler (C2) itself
# takes about ten seconds of CPU at any size. Its faster code saves more than that only in long queries: at 85 MB, C1
# alone takes 8 % more CPU than both.
SMALL_SOURCE_BYTES = 8 * 2**20
# Compressed bytes of the journal in a shuffle partition, at least; but each core gets four partitions in any case.
_MIN_PARTITION_BYTES = 16 * 2**20

# Settings of every session, even if spark-submit or spark-defaults.conf sets others: another time zone would move hours
# and days, and with "true", Spark would leave out the rows of missing or damaged files silently.
_FIXED_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
}
SETTINGS = {
    **_FIXED_SETTINGS,
    "spark.driver.memory": os.environ.get("ROTA_SPARK_MEMORY", "2g"),
    # Many, so that one partition fits in memory even with twenty million records; `fit_partitions` reduces the number
    # for small sources. For larger sources and clusters: spark-submit --conf spark.sql.shuffle.partitions=2000
    _SHUFFLE_PARTITIONS: str(32 * _CORE_COUNT),
    # Above this number of partitions, a task writes one sorted file, else a file per partition. Spark's default is 200.
    "spark.shuffle.sort.bypassMergeThreshold": "16",
    # Only explicit broadcasts, because Spark decides by a table's compressed size on disk, and may run out of memory.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # Keys (hours) with percentile buffers in memory before Spark falls back to sorting; its default is only 128.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "20000",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.skewJoin.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Both add a line of our code to errors, at the cost of five JVM calls and a stack trace per Spark function.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def create_session(
    name: str,
    settings: dict[str, str] | None = None,
    *,
    lakes: Collection[str] = (),
    source_bytes: int | None = None,
) -> SparkSession:
    """Return a session on spark-submit's cluster if spark-submit runs us, else a local one. `settings`: of a local one.

    It can read and write the URIs of `lakes`. Raise ValueError if it lacks the jars for one of them. `source_bytes` is
    the compressed size of the records that will be read, if it is known.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # otherwise workers run the first python3 on the path
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # spark-submit sets it
    if is_submitted:
        session_settings = _unsubmitted_settings()
    else:
        session_settings = local_settings(source_bytes) | jar_settings(lakes) | (settings or {})
    builder = SparkSession.builder.appName(name)
    for key, value in session_settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    for key, value in _FIXED_SETTINGS.items():
        spark.conf.set(key, value)
    spark.sparkContext.setLogLevel("ERROR")
    reach_buckets(spark, lakes)
    return spark


def fit_partitions(spark: SparkSession, size_bytes: int) -> None:
    """Use fewer shuffle partitions for a small source, as each costs milliseconds per step; keep a user's number."""
    default = int(SETTINGS[_SHUFFLE_PARTITIONS])
    if spark.conf.get(_SHUFFLE_PARTITIONS) == str(default):
        partitions = max(4 * _CORE_COUNT, size_bytes // _MIN_PARTITION_BYTES)
        spark.conf.set(_SHUFFLE_PARTITIONS, str(min(default, partitions)))


def _unsubmitted_settings() -> dict[str, str]:
    """Return our settings without those passed to spark-submit, which ours would override."""
    submitted = SparkContext.getOrCreate().getConf()
    return {key: value for key, value in SETTINGS.items() if not submitted.contains(key)}


def local_settings(source_bytes: int | None) -> dict[str, str]:
    """Return the settings for this machine alone: bound to the loopback address, logging only errors."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # A URI escapes blanks, which would end the JVM option.
    log_config = Path(str(files("rota.pipeline.common") / "log4j2.properties")).as_uri()
    # With the parallel collector, a rollup takes 10 % less time. Its longer pauses do not matter in batch jobs.
    java_options = f"-Dlog4j2.configurationFile={log_config} -XX:+UseParallelGC"
    if source_bytes is not None and source_bytes <= SMALL_SOURCE_BYTES:
        java_options += " -XX:TieredStopAtLevel=1"
    return {
        "spark.master": f"local[{CORES}]",
        "spark.driver.defaultJavaOptions": java_options,
        **SETTINGS,
    }
