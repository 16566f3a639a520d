"""A whole lake in a bucket of a real S3 server: written and read by Spark, equal to the same lake in a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from ground.s3 import Bucket, S3Server
from ground.s3.faults import proxy_process
from pipeline.lake_files import table_rows
from pipeline.small_spark import delete_lease, kill_when, run_ingest
from pipeline.spark_buckets import enter_bucket
from rota.cli import main
from rota.object_store import open_store
from rota.pipeline.common.bucket_access import reach_buckets
from rota.pipeline.lake.tables import RECORD_TABLES, Lake

SIZE = ("--groups", 1, "--hours", 2)


def rota(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def pipeline(*arguments: object) -> str:
    result = rota("pipeline", *arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result.stdout


def error_of(*arguments: object) -> str:
    """Return the sentence of a pipeline command's error."""
    result = rota("pipeline", *arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr.splitlines()[-1].removeprefix("rota: ")


def test_lake_in_a_bucket_has_the_same_tables_and_history_as_one_in_a_folder(
    spark_bucket: Bucket, tmp_path: Path
) -> None:
    folder = str(tmp_path / "lake")
    bucket = f"{spark_bucket.uri}/some/lake"
    printed = {uri: write_and_read(uri) for uri in (folder, bucket)}
    assert printed[bucket] == printed[folder]
    names = [spec.name for spec in RECORD_TABLES.values()]
    assert sum(len(table_rows(bucket, name)) for name in names) > 0
    for name in (*names, "marts/rollup"):
        assert table_rows(bucket, name) == table_rows(folder, name)


def write_and_read(uri: str) -> list[Any]:
    """Make a lake, and return what its commands print."""
    pipeline("generate", *SIZE, "--to", uri)
    ingested = json.loads(pipeline("ingest", uri, "-o", "json"))
    rollup = json.loads(pipeline("rollup", uri, "-o", "json"))
    history = rota("history", rollup[0]["group"], "--lake", uri, "-o", "json")
    assert history.exit_code == 0, history.stderr
    return [ingested, rollup, json.loads(history.stdout)]


def test_lake_in_a_bucket_that_is_busy_now_and_then_is_complete(
    spark_bucket: Bucket, s3_server: S3Server, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = f"{spark_bucket.uri}/lake"
    generated = json.loads(pipeline("generate", *SIZE, "--to", lake, "-o", "json"))
    with proxy_process(s3_server.address, 503, "SlowDown", every=5) as endpoint:
        enter_bucket({"AWS_ENDPOINT_URL": endpoint}, spark, monkeypatch)
        ingested = json.loads(pipeline("ingest", lake, "-o", "json"))
        rows = json.loads(pipeline("rollup", lake, "-o", "json"))
        enter_bucket(spark_bucket.variables, spark, monkeypatch)
    assert sum(ingested.values()) == generated["records"]
    assert len(table_rows(lake, "marts/rollup")) == len(rows) == 2


def test_lake_in_a_bucket_that_refuses_spark_is_told_in_a_sentence(
    spark_bucket: Bucket, s3_server: S3Server, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = f"{spark_bucket.uri}/lake"
    pipeline("generate", *SIZE, "--to", lake)
    pipeline("ingest", lake)
    with proxy_process(s3_server.address, 403, "AccessDenied", path_has="lake/owners/date") as endpoint:
        enter_bucket({"AWS_ENDPOINT_URL": endpoint}, spark, monkeypatch)
        sentence = error_of("rollup", lake)
        enter_bucket(spark_bucket.variables, spark, monkeypatch)
    assert lake.replace("s3://", "s3a://") in sentence
    assert "403" in sentence
    assert Lake(lake).snapshot().number == 1


@pytest.mark.slow("an ingest into a bucket, killed with its Java")
def test_lake_in_a_bucket_is_complete_after_an_ingest_that_was_killed(spark_bucket: Bucket, tmp_path: Path) -> None:
    lake = f"{spark_bucket.uri}/lake"
    generated = json.loads(pipeline("generate", *SIZE, "--to", lake, "-o", "json"))
    store = open_store(lake)
    with run_ingest(lake, tmp_path) as process:
        kill_when(process, lambda: any("_delta_log" in info.key for info in store.list_objects("lake")))
    assert Lake(lake).snapshots.latest().number == 0
    delete_lease(lake)
    pipeline("ingest", lake)
    digests = [row["digest"] for spec in RECORD_TABLES.values() for row in table_rows(lake, spec.name)]
    assert len(digests) == len(set(digests)) == generated["records"]


@pytest.mark.parametrize(
    ("lake", "variables", "sentence"),
    [
        ("s3://missing-bucket/lake", {}, "the bucket does not exist"),
        ("s4://bucket/lake", {}, "'s4://bucket/lake' has the unknown scheme s4; use s3://BUCKET/PREFIX, "),
        ("hdfs://name/lake", {}, "'hdfs://name/lake' has the unknown scheme hdfs; use s3://BUCKET/PREFIX, "),
        ("s3://bucket/lake", {"AWS_ALLOW_HTTP": "false"}, "is not encrypted; set AWS_ALLOW_HTTP=true to allow that"),
    ],
)
def test_lake_in_a_bucket_that_cannot_be_used_is_told_before_spark_starts(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, lake: str, variables: dict[str, str], sentence: str
) -> None:
    for name, value in (bucket.variables | variables).items():
        monkeypatch.setenv(name, value)
    for command in (["ingest", lake], ["rollup", lake], ["generate", "--to", lake]):
        assert sentence in error_of(*command)


def test_lake_in_a_bucket_of_another_kind_needs_the_users_jars(spark: SparkSession) -> None:
    with pytest.raises(
        ValueError, match=r"gs://bucket/lake cannot be read: Spark lacks the jars for gs://; run it by "
    ):
        reach_buckets(spark, ["gs://bucket/lake"])


def test_lake_in_a_bucket_keeps_the_users_settings_of_s3(spark_bucket: Bucket, spark: SparkSession) -> None:
    context = spark.sparkContext
    reach_buckets(spark, [spark_bucket.uri])
    assert spark.conf.get("fs.s3a.endpoint") == spark_bucket.endpoint
    assert context.environment["AWS_REGION"] == "us-east-1"
    configured = context.getConf().set("spark.hadoop.fs.s3a.endpoint", "http://own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "getConf", lambda: configured)
        spark.conf.unset("fs.s3a.endpoint")
        reach_buckets(spark, [spark_bucket.uri])
        assert spark.conf.get("fs.s3a.endpoint", None) is None
