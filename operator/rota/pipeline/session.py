"""The Spark session: made in one place, given to everything else."""

import os
import sys

from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.memory": os.environ.get("ROTA_SPARK_MEMORY", "2g"),
    "spark.sql.shuffle.partitions": str(4 * (os.cpu_count() or 1)),  # by itself Spark would take 200, on any machine
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.skewJoin.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


CORES = os.environ.get("ROTA_SPARK_CORES", "*")  # of this machine, if nobody says where else it runs


def session(name: str, settings: dict[str, str] | None = None) -> SparkSession:
    """Return a session on this machine, or where spark-submit wants it."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers run the python3 that is first on the path
    builder = SparkSession.builder.appName(name)
    chosen = ({} if "PYSPARK_GATEWAY_PORT" in os.environ else {"spark.master": f"local[{CORES}]"}) | SETTINGS
    chosen |= settings or {}
    for key, value in chosen.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
