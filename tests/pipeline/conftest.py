"""One small Spark session for all of these tests: to start one takes longer than most of its queries."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from ground.s3 import Bucket
from pipeline.spark_buckets import enter_bucket, s3_jars_folder
from rota.cli.commands.pipeline import progress
from rota.pipeline.common.spark_session import SETTINGS, create_session

SMALL = {
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.adaptive.enabled": "false",  # tiny frames: planning them again costs more than it saves
    # C2 pays off after minutes only. The JVM is older than the buckets, so it does not have their variables.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -Daws.accessKeyId=ground -Daws.secretAccessKey=ground",
}
# Most queries of these tests run once, on a few rows: compiling a query takes longer than interpreting it. Commands
# that run as processes of their own, and the CronJob of tests/e2e, compile them as in production.
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


@pytest.fixture(scope="session", autouse=True)
def no_progress_output() -> Iterator[None]:
    """Suppress the progress output of commands, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "QUIET_SECONDS", 1e6)
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Return the session that all tests share; stop it at the end, or its JVM outlives them."""
    warehouse: Path = tmp_path_factory.mktemp("warehouse")
    SETTINGS.update({**SMALL, **INTERPRETED})  # commands take this session, and would change its settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROTA_SPARK_JARS", str(s3_jars_folder()))  # commands that run as processes take it, too
        session = create_session("rota-tests", {"spark.sql.warehouse.dir": str(warehouse)}, lakes=["s3://any"])
        yield session
        session.stop()


@pytest.fixture
def spark_bucket(bucket: Bucket, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return an empty bucket that the session's tasks can enter, too."""
    enter_bucket(bucket.variables, spark, monkeypatch)
    return bucket


@pytest.fixture(params=["folder", "bucket"])
def lake_uri(request: pytest.FixtureRequest, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the place of a lake that does not exist yet: a folder, then a bucket of a real S3 server."""
    for name, value in bucket.variables.items():
        monkeypatch.setenv(name, value)
    return str(tmp_path / "lake") if request.param == "folder" else f"{bucket.uri}/some/lake"
