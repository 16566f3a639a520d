"""Buckets of the ground's S3 server, as the shared Spark session reads and writes them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from ground import cache
from ground.report import progress
from rota.pipeline.common import s3_jars


def s3_jars_folder() -> Path:
    """Return a folder with the jars for S3, fetched once."""
    return cache.entry("s3-jars", s3_jars.LIST.read_text(), _fetch_jars)


def _fetch_jars(into: Path) -> None:
    with progress("fetching the jars for S3, once"):
        s3_jars.fetch_jars(into)


def enter_bucket(variables: Mapping[str, str], spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the variables of a bucket to this process and to the session's Python tasks."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
