"""The Spark session: made in one place, given to everything else."""

import os
import sys
from importlib.resources import files
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

CORES = os.environ.get("ROTA_SPARK_CORES", "*")  # of this machine, if nobody says where else it runs
_MANY = int(CORES) if CORES.isdigit() else os.cpu_count() or 1

_PARTITIONS = "spark.sql.shuffle.partitions"
_EACH = 16 * 2**20  # bytes of the source's files for each of them, at least

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.memory": os.environ.get("ROTA_SPARK_MEMORY", "2g"),
    # Many, so that what is in one of them fits in memory, of twenty million records too; `fit` makes fewer of what is
    # small. Where there is more of both, spark-submit says so: --conf spark.sql.shuffle.partitions=2000
    _PARTITIONS: str(32 * _MANY),
    "spark.shuffle.sort.bypassMergeThreshold": "16",  # else each task would write a file for each of these
    # What is sent to everybody is what we say. Spark would go by how small a table is on disk, and run out of memory.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # Percentiles of so many hours are held at once before they are sorted; a hundred, Spark's own, is soon too few.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "20000",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.skewJoin.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.metricsEnabled": "false",
    # Both name a line of our code in errors: by five more requests to the JVM, and a stack trace there, per function.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def session(name: str, settings: dict[str, str] | None = None) -> SparkSession:
    """Return a session on this machine, or where spark-submit wants it, and as it was told there."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers run the python3 that is first on the path
    builder = SparkSession.builder.appName(name)
    for key, value in (_submitted() if "PYSPARK_GATEWAY_PORT" in os.environ else _here() | (settings or {})).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def fit(spark: SparkSession, folder: Path) -> None:
    """Shuffle what is small in fewer parts: each costs some milliseconds, in every step. What others have set stays."""
    ours = int(SETTINGS[_PARTITIONS])
    if spark.conf.get(_PARTITIONS) == str(ours):
        size = sum(map(_size, folder.rglob("[!._]*.*")))
        spark.conf.set(_PARTITIONS, str(min(ours, max(4 * _MANY, size // _EACH))))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the journal has made room
        return 0


def _submitted() -> dict[str, str]:
    """Return our settings but those that spark-submit was given: ours would count for more."""
    given = SparkContext.getOrCreate().getConf()
    return {key: value for key, value in SETTINGS.items() if not given.contains(key)}


def _here() -> dict[str, str]:
    """Say how Spark runs on this machine alone: with no word to the network, nor to people but errors."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    words = Path(
        str(files("rota.pipeline.common") / "log4j2.properties")
    ).as_uri()  # a blank in it would end the option
    return {
        "spark.master": f"local[{CORES}]",
        # The parallel collector, for nobody waits for an answer: a rollup takes a tenth less.
        "spark.driver.defaultJavaOptions": f"-Dlog4j2.configurationFile={words} -XX:+UseParallelGC",
        **SETTINGS,
    }
