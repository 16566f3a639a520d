"""The operator's journal in a bucket, which refuses, is cut off or loses answers, and works again."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ground.poll import eventually
from ground.s3.faults import FaultProxy
from rota import records
from rota.kube.telemetry.journal import segment_rules
from rota.kube.telemetry.journal.journal_writer import Journal
from rota.object_store import ObjectStore
from rota.object_store.segments import parse_segment
from rota.records import decode_record, journal_record

UID = "0f8e1c5a-93b7-4d2f-8a61-000000000001"
FIELDS: dict[str, Any] = {"strategy": "Sticky", "reason": "MemberJoined", "members": 3, "queues": 8, "held": None}


def a_record(number: int, message: str = "b joined") -> dict[str, object]:
    at = f"2026-11-21T09:00:{number % 60:02}.000Z"
    return journal_record("plan", "shop/orders", at, generation=number, message=message, **FIELDS)


def stored(store: ObjectStore) -> list[records.AnyRecord]:
    """Return the records in the bucket, in the order of their segments."""
    keys = sorted(info.key for info in store.list_objects())
    assert all(map(parse_segment, keys))
    return [decode_record(line) for key in keys for line in gzip.decompress(store.read(key)).splitlines()]


def generations(store: ObjectStore) -> list[int]:
    return [record.generation for record in stored(store) if isinstance(record, records.PlanRecord)]


@pytest.fixture
def journal(
    store: ObjectStore, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Journal]:
    """A journal in the bucket of `store`, by way of the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setattr(segment_rules, "SEGMENT_SECONDS", 0.01)
    monkeypatch.setattr(segment_rules, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(segment_rules, "MAX_RETRY_SECONDS", 0.05)
    journal = open_journal(store, tmp_path)
    yield journal
    journal.close()


def open_journal(store: ObjectStore, spool: Path, limit: str = "8Gi") -> Journal:
    return Journal(store.uri, "rota-6c8d-x2", limit, pod_uid=UID, spool=str(spool))


def test_journal_in_a_bucket_has_a_segment_for_each_interval(
    journal: Journal, store: ObjectStore, tmp_path: Path
) -> None:
    for number in range(3):
        journal.write([a_record(number)])
        eventually(lambda number=number: journal.counts.shipped_segments > number)  # type: ignore[misc]
    assert generations(store) == [0, 1, 2]
    names = [parse_segment(info.key) for info in store.list_objects()]
    assert {(name.hour, name.pod, name.uid) for name in names if name} == {
        ("2026-11-21T09", "rota-6c8d-x2", UID.replace("-", ""))
    }
    assert not [*tmp_path.glob("*/*.jsonl")]


@pytest.mark.parametrize("status", [403, 503])
def test_journal_in_a_bucket_that_refuses_waits_in_the_spool(
    journal: Journal, store: ObjectStore, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    proxy.answer(status)
    for number in range(3):
        journal.write([a_record(number)])
        eventually(lambda number=number: journal.counts.failed_attempts > number)  # type: ignore[misc]
    assert journal.counts.spool_bytes
    proxy.heal()
    eventually(lambda: not journal.counts.spool_bytes)
    assert generations(store) == [0, 1, 2]
    assert journal.counts.dropped_records == 0
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert f"the server answered {status}" in caplog.messages[0]


def test_journal_upload_that_is_cut_is_repeated(journal: Journal, store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.cut_uploads(after_bytes=20)
    journal.write([a_record(1, 100_000 * "x")])
    eventually(lambda: journal.counts.failed_attempts)
    assert stored(store) == []
    proxy.heal()
    eventually(lambda: journal.counts.shipped_segments)
    assert generations(store) == [1]


def test_journal_answer_of_a_bucket_that_is_lost_stores_no_record_twice(
    journal: Journal, store: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.lose_answers()
    journal.write([a_record(1)])
    eventually(lambda: journal.counts.failed_attempts)
    proxy.heal()
    eventually(lambda: journal.counts.shipped_segments)
    assert generations(store) == [1]


def test_journal_outage_beyond_the_spool_is_a_gap(
    journal: Journal, store: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    journal.close()
    proxy.answer(403)
    small = open_journal(store, tmp_path / "small", "1Mi")
    for number in range(60):
        small.write([a_record(number, 30_000 * "x")])
    eventually(lambda: small.counts.dropped_records)
    proxy.heal()
    small.close()
    kept = generations(store)
    missing = sum(record.missing for record in stored(store) if isinstance(record, records.GapRecord))
    assert kept == [*range(60 - len(kept), 60)]
    assert len(kept) + missing == 60


def test_journal_that_ends_while_its_bucket_refuses_is_continued_by_the_next_process(
    journal: Journal, store: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.answer(403)
    journal.write([a_record(1)])
    journal.close()
    assert generations(store) == []
    proxy.heal()
    following = open_journal(store, tmp_path)
    following.write([a_record(2)])
    following.close()
    assert generations(store) == [1, 2]
    assert not [*tmp_path.iterdir()]
