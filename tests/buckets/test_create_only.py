"""Servers that ignore the condition of a request would let two writers overwrite each other: a lake refuses them."""

import pytest

from ground.s3.faults import FaultProxy
from rota.object_store import ObjectStore, StoreError, check_create_only, open_store
from rota.pipeline.ingest.lease import IngestLease
from rota.pipeline.lake.runs import RunStore
from rota.pipeline.lake.snapshots import EMPTY_SNAPSHOT, SnapshotStore

REFUSAL = r"s3://.*/some/prefix overwrites existing objects: its server ignores the header If-None-Match"


@pytest.fixture
def through_proxy(store: ObjectStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The same store, through the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return open_store(store.uri)


def test_lake_bucket_that_ignores_conditions_is_refused_before_anything_is_overwritten(
    through_proxy: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.ignore_conditions()
    for _ in range(2):  # the object of the first check is there at the second one
        with pytest.raises(StoreError, match=REFUSAL):
            RunStore(through_proxy).create(1, "s3://bucket/journal", ())
        with pytest.raises(StoreError, match=REFUSAL):
            SnapshotStore(through_proxy).publish(EMPTY_SNAPSHOT, {"lake/offsets": 0})
        with pytest.raises(StoreError, match=REFUSAL), IngestLease(through_proxy).hold():
            pytest.fail("two ingests could have the lease")
    assert [info.key for info in store.list_objects()] == ["_rota/create-only"]


def test_lake_bucket_that_keeps_objects_is_checked_by_one_request(
    through_proxy: ObjectStore, proxy: FaultProxy
) -> None:
    snapshots = SnapshotStore(through_proxy)
    first = snapshots.publish(EMPTY_SNAPSHOT, {"lake/offsets": 0})
    assert len(proxy.requests) == 3  # two to check, and one for the snapshot
    snapshots.publish(first, {"lake/offsets": 1})
    assert len(proxy.requests) == 5


def test_lake_bucket_that_is_checked_by_two_commands_at_once_accepts_both(
    through_proxy: ObjectStore, store: ObjectStore
) -> None:
    store.create("key", b"")  # by the other one
    check_create_only(through_proxy, "key")
