"""The Spark session of a command, stopped at its end."""

# ruff: noqa: PLC0415 - Spark is imported when a command starts it

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_CORES = re.compile(r"\*|[1-9]\d*", re.ASCII)
_MEMORY = re.compile(r"(\d+)([mg])", re.ASCII)
_UNITS_MB = {"m": 1, "g": 1024}
_MIN_MEMORY_MB = 512  # Spark exits with less


@contextmanager
def open_session(command: str, lakes: Collection[str], source_bytes: int | None) -> Iterator["SparkSession"]:
    """Start Spark for a command that reads and writes these lakes; a session that exists already is not stopped.

    `source_bytes` is the compressed size of the records that the command reads; None if it is unknown.
    """
    from pyspark.sql import SparkSession

    from rota.pipeline.common.spark_session import create_session

    _check_java()
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit sets it, and sizes Spark by its own settings
        _check_variables()
    existing_session = SparkSession.getActiveSession()  # of a program that embeds this command
    spark = create_session(f"rota-pipeline-{command}", lakes=lakes, source_bytes=source_bytes)
    try:
        yield spark
    finally:
        if existing_session is None:
            spark.stop()


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=os.path.join(home, "bin") if home else None):  # noqa: PTH118 - `which` takes a str
        return
    if home:
        raise ValueError(f"Spark needs Java, but JAVA_HOME ({home}) has none: correct it, or unset it")
    raise ValueError("Spark needs Java, but no java command was found: install Java 17 or later, or set JAVA_HOME")


def _check_variables() -> None:
    """Raise ValueError if Spark cannot use the variables that size it on this machine."""
    cores = os.environ.get("ROTA_SPARK_CORES", "*")
    if not _CORES.fullmatch(cores):
        raise ValueError(f"ROTA_SPARK_CORES ({cores}) is no number of cores; set it to a number such as 4, or unset it")
    memory = os.environ.get("ROTA_SPARK_MEMORY", "2g")
    size = _MEMORY.fullmatch(memory.lower())
    if not size or int(size[1]) * _UNITS_MB[size[2]] < _MIN_MEMORY_MB:
        problem = f"ROTA_SPARK_MEMORY ({memory}) is no size of {_MIN_MEMORY_MB}m or more"
        raise ValueError(f"{problem}; set it to one such as 4g, or unset it")
