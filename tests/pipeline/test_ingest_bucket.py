"""Ingest of a journal in a bucket of a real S3 server, which Spark's tasks read; also while it refuses."""

import gzip
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ground.poll import eventually
from ground.s3 import Bucket, S3Server
from ground.s3.faults import FaultProxy
from pipeline.lake_folders import DAY, reasons, verdict_line
from rota.cli.commands.pipeline.spark.errors import describe_user_error
from rota.object_store import ObjectStore, open_store
from rota.pipeline.ingest.batch import ingest_journal
from rota.pipeline.ingest.lease import IngestLease
from rota.pipeline.lake.tables import Lake


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.address).running() as proxy:
        yield proxy


@pytest.fixture
def journal(bucket: Bucket, proxy: FaultProxy, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return a journal of two segments; the driver and the tasks have its credentials."""
    for name, value in (bucket.variables | {"AWS_ENDPOINT_URL": proxy.endpoint}).items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    journal = open_store(f"{bucket.uri}/rota/journal")
    for number in (8, 9):
        journal.create(f"{DAY}/{number:02}-a.jsonl.gz", gzip.compress(verdict_line(number, number)))
    return journal


def test_ingest_reads_a_journal_in_a_bucket_and_each_segment_once(
    journal: ObjectStore, spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(str(tmp_path))
    assert ingest_journal(lambda: spark, lake, journal).rows["verdict"] == 2
    journal.create(f"{DAY}/10-a.jsonl.gz", gzip.compress(verdict_line(10, 10)))
    assert ingest_journal(lambda: spark, lake, journal).segments == 1
    assert reasons(tmp_path) == ["R10", "R8", "R9"]


def test_ingest_reads_segments_of_a_bucket_concurrently(
    journal: ObjectStore, proxy: FaultProxy, spark: SparkSession, tmp_path: Path
) -> None:
    both_requested = threading.Barrier(2, timeout=30)

    def answer_together(exchange: Any) -> None:
        if exchange.path.endswith(".jsonl.gz"):
            both_requested.wait()
        exchange.reply(*exchange._forward())

    proxy.fault = answer_together
    assert ingest_journal(lambda: spark, Lake(str(tmp_path)), journal).rows["verdict"] == 2


def test_ingest_of_a_bucket_that_refuses_is_a_sentence_and_continues_later(
    journal: ObjectStore, proxy: FaultProxy, spark: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(str(tmp_path))

    def refuse_reads(step: str) -> None:
        if step == "after _rota/runs":
            proxy.answer(403, b"<Error><Code>AccessDenied</Code></Error>")

    with pytest.raises(Exception, match="AccessDenied") as failed:
        ingest_journal(lambda: spark, lake, journal, refuse_reads)
    sentence = describe_user_error(failed.value)
    assert sentence
    assert journal.uri in sentence
    assert "AccessDenied" in sentence
    assert "\n" not in sentence
    assert lake.snapshots.latest().number == 0
    proxy.heal()
    assert ingest_journal(lambda: spark, lake, journal).rows["verdict"] == 2


def test_ingest_succeeds_though_its_lease_cannot_be_renewed_and_released(
    journal: ObjectStore, proxy: FaultProxy
) -> None:
    with IngestLease(journal).hold(renewal=0.01):
        proxy.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        answered = len(proxy.requests)
        eventually(lambda: len(proxy.requests) > answered)
