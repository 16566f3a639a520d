"""A bucket as a store, and a proxy in front of it."""

from collections.abc import Iterator

import pytest

from ground.s3 import Bucket, S3Server
from ground.s3.faults import FaultProxy
from rota.object_store import ObjectStore, open_store


@pytest.fixture
def store(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in bucket.variables.items():
        monkeypatch.setenv(name, value)
    return open_store(f"{bucket.uri}/some/prefix")


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.address).running() as proxy:
        yield proxy
