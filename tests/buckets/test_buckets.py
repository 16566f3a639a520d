"""Tests buckets as stores, at a real S3 server, and what they say when it fails."""

import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from ground.s3 import Bucket
from ground.s3.faults import FaultProxy
from rota.object_store import ObjectStore, StoreError, create_same, open_store, parse_location
from rota.object_store.bucket import PART_BYTES, BucketStore

REQUEST_SECONDS = 0.5  # of a server that does not answer


@pytest.fixture
def failing(store: ObjectStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The same store, through the proxy, with little patience."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return BucketStore(parse_location(store.uri), request_seconds=REQUEST_SECONDS, retries=1)


def test_lake_bucket_keeps_what_was_created_first(store: ObjectStore) -> None:
    assert store.create("a/b", b"one")
    assert not store.create("a/b", b"two")
    assert create_same(store, "a/b", b"one")
    assert not create_same(store, "a/b", b"two")
    assert store.read("a/b") == b"one"


def test_lake_bucket_lets_one_of_many_writers_win(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = [*pool.map(lambda number: store.create("key", b"%d" % number), range(40))]
    assert won.count(True) == 1
    assert store.read("key") == b"%d" % won.index(True)


def test_lake_bucket_lists_what_is_below_a_folder(store: ObjectStore, bucket: Bucket) -> None:
    keys = {"top", "x/one", "x/y/two", "xy/three", "date=2026-11-21/08-a.jsonl.gz"}
    for key in keys:
        store.create(key, b"12345")
    open_store(f"{bucket.uri}/some/other").create("foreign", b"")
    assert {info.key for info in store.list_objects()} == keys
    assert {info.key for info in store.list_objects("x")} == {"x/one", "x/y/two"}
    assert [*store.list_objects("nothing")] == []
    info = next(store.list_objects("date=2026-11-21"))
    assert info.size_bytes == 5
    assert info.etag
    assert info.modified.tzinfo


def test_lake_bucket_lists_more_than_a_page(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda number: store.create(f"x/{number}", b""), range(1200))]
    assert len({info.key for info in store.list_objects("x")}) == 1200


def test_lake_bucket_etag_tells_another_content(store: ObjectStore) -> None:
    store.create("a", b"one")
    first = next(store.list_objects())
    store.delete("a")
    store.create("a", b"two")
    assert next(store.list_objects()).etag != first.etag


def test_lake_bucket_deletes_once_and_again(store: ObjectStore) -> None:
    store.create("a", b"")
    store.delete("a")
    store.delete("a")
    with pytest.raises(FileNotFoundError, match="a cannot be read: there is no such object"):
        store.read("a")


def test_lake_bucket_without_a_prefix_is_a_store(store: ObjectStore, bucket: Bucket) -> None:
    root = open_store(bucket.uri)
    store.create("a", b"1")
    assert [info.key for info in root.list_objects()] == ["some/prefix/a"]
    assert root.read("some/prefix/a") == b"1"


@pytest.mark.parametrize("key", ["../a", "a//b", "./a"])
def test_lake_bucket_prefix_is_never_left(store: ObjectStore, key: str) -> None:
    with pytest.raises(StoreError, match=r"cannot be written"):
        store.create(key, b"")


@pytest.mark.usefixtures("store")
def test_lake_bucket_that_does_not_exist_is_told() -> None:
    missing = open_store("s3://no-such-bucket/x")
    for act in (missing.read, lambda key: missing.create(key, b""), lambda key: [*missing.list_objects(key)]):
        with pytest.raises(StoreError, match=r"s3://no-such-bucket/x: a .*: the bucket does not exist"):
            act("a")


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", r"the server answered 403 Forbidden \(AccessDenied\)"),
        (401, b"", "the server answered 401 Unauthorized"),
        (503, b"<Error><Code>SlowDown</Code></Error>", "the server answered 503 Service Unavailable"),
        (301, b"", "the bucket is in another region; set AWS_REGION"),
    ],
)
def test_lake_bucket_that_refuses_is_told_and_works_later(
    failing: ObjectStore, proxy: FaultProxy, status: int, body: bytes, reason: str
) -> None:
    proxy.answer(status, body)
    acts = (
        failing.read,
        failing.delete,
        lambda key: failing.create(key, b"1"),
        lambda key: [*failing.list_objects(key)],
    )
    for act in acts:
        with pytest.raises(StoreError, match=f"{failing.uri}: a cannot be .*: {reason}"):
            act("a")
    proxy.heal()
    assert failing.create("a", b"1")


def test_lake_bucket_that_answers_503_once_is_asked_again(failing: ObjectStore, proxy: FaultProxy) -> None:
    failing.create("a", b"1")
    proxy.answer(503, times=1)
    assert failing.read("a") == b"1"


def test_lake_bucket_that_does_not_answer_is_told(failing: ObjectStore, proxy: FaultProxy) -> None:
    proxy.hold()
    with pytest.raises(StoreError, match="a cannot be written: it did not answer in time"):
        failing.create("a", b"1")


def test_lake_bucket_upload_that_is_cut_leaves_nothing(
    failing: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.cut_uploads(after_bytes=100_000)
    with pytest.raises(StoreError, match=r"a cannot be written: the connection to 127.0.0.1:\d+ was lost"):
        failing.create("a", bytes(2_000_000))
    assert [*store.list_objects()] == []
    proxy.heal()
    assert failing.create("a", bytes(2_000_000))


@pytest.mark.parametrize("size_bytes", [1000, 2 * PART_BYTES + 1])  # an upload by one request, and in parts
def test_lake_bucket_upload_that_is_not_completed_leaves_nothing(
    store: ObjectStore, bucket: Bucket, size_bytes: int
) -> None:
    writer = store.open_writer("a")
    writer.write(bytes(size_bytes))
    del writer  # as an error of the caller does
    assert [*store.list_objects()] == []
    with urllib.request.urlopen(f"{bucket.endpoint}/{bucket.name}?uploads", timeout=30) as response:
        assert b"<Upload>" not in response.read()


def test_lake_bucket_answer_that_is_lost_is_found_by_the_content(failing: ObjectStore, proxy: FaultProxy) -> None:
    proxy.lose_answers()
    with pytest.raises(StoreError, match="was lost"):
        failing.create("a", b"1")
    proxy.heal()
    assert not failing.create("a", b"1")
    assert create_same(failing, "a", b"1")


def test_lake_bucket_without_conditional_requests_names_the_variable_that_disables_them(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    with pytest.raises(StoreError, match="requests are disabled; remove the variable AWS_CONDITIONAL_PUT"):
        open_store(store.uri).create("a", b"1")


def test_lake_bucket_without_a_server_is_told(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    unreachable = BucketStore(parse_location(store.uri), request_seconds=REQUEST_SECONDS, retries=0)
    with pytest.raises(StoreError, match=r"a cannot be read: no connection to 127.0.0.1:1"):
        unreachable.read("a")


def test_lake_bucket_without_credentials_names_those_it_looked_for(
    proxy: FaultProxy, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    proxy.answer(404)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", proxy.endpoint)
    anonymous = BucketStore(parse_location(store.uri), request_seconds=REQUEST_SECONDS, retries=0)
    with pytest.raises(StoreError, match=r"no valid credentials were found; looked for AWS_ACCESS_KEY_ID"):
        anonymous.read("a")
