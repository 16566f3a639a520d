"""The Spark session of a command, stopped at its end."""

# ruff: noqa: PLC0415 - Spark is imported when a command starts it

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def open_session(command: str, lakes: Collection[str], source_bytes: int | None) -> Iterator["SparkSession"]:
    """Start Spark for a command that reads and writes these lakes; a session that exists already is not stopped.

    `source_bytes` is the compressed size of the records that the command reads; None if it is unknown.
    """
    from pyspark.sql import SparkSession

    from rota.pipeline.common.spark_session import create_session

    _check_java()
    existing_session = SparkSession.getActiveSession()  # of a program that embeds this command
    spark = create_session(f"rota-pipeline-{command}", lakes=lakes, source_bytes=source_bytes)
    try:
        yield spark
    finally:
        if existing_session is None:
            spark.stop()


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=os.path.join(home, "bin") if home else None):  # noqa: PTH118 - which takes strings
        return
    if home:
        raise ValueError(f"Spark needs Java, but JAVA_HOME ({home}) has none: correct it, or unset it")
    raise ValueError("Spark needs Java, but no java command was found: install Java 17 or later, or set JAVA_HOME")
