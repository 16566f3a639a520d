"""Tables in a bucket of a real S3 server that refuses, does not answer, or loses answers."""

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from ground.s3 import Bucket, S3Server
from ground.s3.faults import FaultProxy
from pipeline.lake_files import GROUPS, append_file, open_log, write_file
from rota.object_store import StoreError, open_store
from rota.pipeline.lake import storage
from rota.pipeline.lake.data_files import TableSpec, write_partitions
from rota.pipeline.lake.delta_log import FileChanges, list_files
from rota.pipeline.lake.storage import check_root, spark_pattern, spark_uri, storage_options
from rota.pipeline.lake.table import Table
from rota.pipeline.lake.tables import FILES_TABLE, Lake


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.address).running() as proxy:
        yield proxy


@pytest.fixture
def uri(bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in (bucket.variables | {"AWS_ENDPOINT_URL": proxy.endpoint}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(storage.REQUEST_OPTIONS, "max_retries", "1")
    return f"{bucket.uri}/lake"


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", r"the server answered 403 Forbidden \(AccessDenied\)"),
        (503, b"", "the server answered 503 Service Unavailable"),
        (301, b"", "the bucket is in another region; set AWS_REGION"),
    ],
)
def test_table_in_a_bucket_that_refuses_is_told_and_works_later(
    uri: str, proxy: FaultProxy, status: int, body: bytes, reason: str
) -> None:
    append_file(uri, "a")
    file = write_file(open_store(uri), "b")
    log = open_log(uri)

    def plan(_table: DeltaTable | None) -> FileChanges:
        proxy.answer(status, body)
        return FileChanges([file])

    with pytest.raises(StoreError, match=f"{uri}/lake/groups cannot be read or written: {reason}"):
        log.commit(plan)
    with pytest.raises(StoreError, match=reason):
        log.load()
    proxy.heal()
    assert log.commit(lambda _: FileChanges([file])).version == 1


def test_table_in_a_bucket_that_does_not_answer_is_told(
    uri: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(storage.REQUEST_OPTIONS, "timeout", "1s")
    proxy.hold()
    with pytest.raises(StoreError, match="it did not answer in time"):
        open_log(uri).load()


def test_table_in_a_bucket_without_a_server_is_told(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match=r"no connection to 127.0.0.1:1"):
        open_log(uri).load()


@pytest.mark.parametrize("is_first", [True, False])
def test_table_commit_whose_answer_is_lost_counts_once(uri: str, proxy: FaultProxy, *, is_first: bool) -> None:
    if not is_first:
        append_file(uri, "a")
    file = write_file(open_store(uri), "b")

    def lose_one_answer(exchange: Any) -> None:
        if exchange.command == "PUT":
            proxy.heal()
            exchange.lose_answer()
        else:
            exchange.reply(*exchange._forward())

    def plan(_table: DeltaTable | None) -> FileChanges:
        proxy.fault = lose_one_answer
        return FileChanges([file])

    assert open_log(uri).commit(plan).is_changed
    proxy.heal()
    assert [stored.path for stored in list_files(open_log(uri).load())].count(file.path) == 1


@pytest.mark.parametrize("rows", [1, 300_000])  # an upload by one request, and by several
def test_table_file_that_a_bucket_refuses_is_told(
    uri: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("rota.object_store.bucket.RETRIES", 1)
    proxy.answer(503)
    write = partial(write_partitions, lake_uri=uri, table=TableSpec("lake/groups", GROUPS, ()), label="run1")
    batch = pa.RecordBatch.from_pydict({"digest": [secrets.token_bytes(32) for _ in range(rows)]})
    with pytest.raises(StoreError, match=r"run1-.* cannot be written: the server answered 503"):
        list(write(iter([batch])))
    proxy.heal()
    [written] = write(iter([batch]))
    [file] = written.to_pylist()
    content = open_store(uri).read(f"lake/groups/{file['path']}")
    assert (len(content), pq.read_metadata(pa.BufferReader(content)).num_rows) == (file["size_bytes"], rows)


def test_table_version_is_loaded_once(uri: str, proxy: FaultProxy) -> None:
    table = Table(open_store(uri), TableSpec("lake/groups", GROUPS))
    version = append_file(uri, "a")
    assert table.count(version) == 1
    sent = len(proxy.requests)
    assert (table.count(version), len(table.dates(version))) == (1, 1)
    assert len(proxy.requests) == sent
    append_file(uri, "b")
    assert table.count(table.version()) == 2
    lake = Lake(uri)
    assert lake.table(FILES_TABLE.name) is lake.table(FILES_TABLE.name)


def test_table_versions_that_many_runs_read_do_not_all_stay_in_memory(uri: str, proxy: FaultProxy) -> None:
    table = Table(open_store(uri), TableSpec("lake/groups", GROUPS))
    versions = [append_file(uri, group) for group in "abcde"]
    assert [table.count(version) for version in versions] == [1, 2, 3, 4, 5]
    sent = len(proxy.requests)
    assert table.count(versions[-1]) == 5
    assert len(proxy.requests) == sent
    assert table.count(versions[0]) == 1
    assert len(proxy.requests) > sent


def test_table_places_have_the_names_that_spark_and_deltalake_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("UNRELATED", "x")
    assert storage_options("/lake") == {}
    options = storage_options("s3://bucket/lake")
    assert options["AWS_REGION"] == "eu-central-1"
    assert "UNRELATED" not in options
    assert [spark_uri("s3://b/lake"), spark_uri("gs://b/lake"), spark_uri("/s3://")] == [
        "s3a://b/lake",
        "gs://b/lake",
        "/s3://",
    ]
    assert spark_pattern("/a[b]{c}*?\\") == "/a\\[b\\]\\{c\\}\\*\\?\\\\"
    with pytest.raises(ValueError, match="/a%20b cannot be a lake"):
        check_root("/a%20b")
