"""Gives a Spark session access to buckets: the jars of their file systems, and the settings for S3.

Rota fetches the jars for S3, which s3_jars.txt lists. Other buckets need jars that users give to spark-submit.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from rota.object_store import FOLDER_SCHEME, Location, parse_location
from rota.pipeline.common import s3_jars
from rota.pipeline.common.s3a_settings import s3a_settings, shared_variables

_S3 = "s3"
_S3_OF_HADOOP = "s3a"
_HADOOP_JAR = re.compile(r"hadoop-client-api-(.+)\.jar")


def jar_settings(uris: Iterable[str]) -> dict[str, str]:
    """Return Spark settings with the jars that the URIs need; fetch the jars for S3 if they are missing.

    Raise ValueError if a jar is damaged or cannot be fetched, or if this Spark has another version of Hadoop.
    """
    if all(parse_location(uri).scheme != _S3 for uri in uris) or _has_s3_jars():
        return {}
    needed = s3_jars.hadoop_version()
    if (present := _hadoop_version()) != needed:
        raise ValueError(
            f"Spark {pyspark.__version__} brings Hadoop {present}, but the jars for S3 are of Hadoop {needed}; install "
            f"another pyspark, or run spark-submit --packages org.apache.hadoop:hadoop-aws:{present}"
        )
    folder = s3_jars.default_folder(os.environ)
    s3_jars.fetch_jars(folder)
    return {"spark.driver.extraClassPath": f"{folder}/*"}


def reach_buckets(spark: SparkSession, uris: Iterable[str]) -> None:
    """Let a session read and write URIs with the environment variables of obstore; settings of users are kept.

    Raise ValueError if the session lacks the jars of a bucket's file system.
    """
    spark.sparkContext.environment.update(shared_variables(os.environ))  # for Python tasks
    configured = spark.sparkContext.getConf()
    for location in map(parse_location, uris):
        if location.scheme == FOLDER_SCHEME:
            continue
        _check_file_system(spark, location)
        if location.scheme == _S3:
            for key, value in s3a_settings(os.environ, location.container).items():
                if not configured.contains(f"spark.hadoop.{key}"):
                    spark.conf.set(key, value)


def _check_file_system(spark: SparkSession, location: Location) -> None:
    scheme = _S3_OF_HADOOP if location.scheme == _S3 else location.scheme
    jvm, context = spark.sparkContext._jvm, spark.sparkContext._jsc  # noqa: SLF001 - Python has no API for it
    try:
        jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, context.hadoopConfiguration())  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001 - an exception of Java, for which pyspark has no public type
        jars = "`rota pipeline jars --to FOLDER`, then spark-submit --jars with these files"
        remedy = jars if location.scheme == _S3 else "run it by spark-submit --packages with the jars of that storage"
        raise ValueError(f"{location.uri} cannot be read: Spark lacks the jars for {scheme}://; {remedy}") from None


def _spark_jars() -> Path:
    return Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent, "jars")


def _has_s3_jars() -> bool:
    return any(_spark_jars().glob(f"{s3_jars.MODULE}-*.jar"))


def _hadoop_version() -> str:
    matches = (_HADOOP_JAR.fullmatch(path.name) for path in _spark_jars().glob("hadoop-client-api-*.jar"))
    return next((match[1] for match in matches if match), "of an unknown version")
