"""The journal compared with the `logging` handler of the standard library that starts a file every hour.

Figures are of 100,000 records, passed plan by plan as the operator does: a membership, a plan, eight handovers. The
journal also compresses them into segments and stores these durably; the peer only writes lines, by the same encoder.
"""

import gzip
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec

from bench.measure import Row, Sample
from rota.kube.telemetry.journal.journal_writer import MAX_QUEUED_VALUES, Journal, JournalRecord
from rota.records import decode_record, journal_record

PER = 100_000  # records
MEMBERS, HANDOVERS = 10, 8
RUNS = 7
AT = "2026-11-21T09:00:00.000Z"
QUEUES = {"orders": {"broker-a": "0-3,7", "broker-b": "1,5-6"}}


def rows() -> Iterator[Row]:
    """Measure for both how long writing takes, and for how long the caller is blocked."""
    plans = [_plan_records(number) for number in range(PER // (HANDOVERS + 2))]
    with tempfile.TemporaryDirectory() as folder:
        ours = [_timed_write(plans, _write_by_journal, Path(folder) / f"ours-{run}") for run in range(RUNS)]
        peers = [_timed_write(plans, _write_by_handler, Path(folder) / f"peer-{run}") for run in range(RUNS)]
    seconds, blocked_seconds = zip(*ours, strict=True)
    peer_seconds, _ = zip(*peers, strict=True)
    written = Sample(seconds)
    theirs = Sample(peer_seconds)
    rates = f"{PER / written.median:,.0f} / {PER / theirs.median:,.0f} a second"
    yield Row(f"100,000 records written: {rates}", written, theirs, "≤ 5 s")
    yield Row("the caller is blocked", Sample(blocked_seconds), theirs)


def _plan_records(number: int) -> list[JournalRecord]:
    """Return the records of a plan for a group of ten members, one of which leaves."""
    names = list(map("orders-7d9f8b6c5-{:05}".format, range(MEMBERS)))
    members = {name: {"uid": f"0f8e1c5a-93b7-4d2f-8a61-{number:012}", "standing": "Ready"} for name in names}
    group = f"shop/orders-{number % 1000}"
    plan_fields: dict[str, Any] = {"generation": number, "reason": "MemberLeft", "message": f"{names[0]} is leaving"}
    handover_fields: dict[str, Any] = {"generation": number, "act": "Revoke", "proof": "None", "state": "Owned"}
    handover_fields |= {"from": names[0], "fromUid": members[names[0]]["uid"]}
    return [
        journal_record("membership", group, AT, generation=number, members=members),
        journal_record("plan", group, AT, **plan_fields, strategy="Sticky", members=MEMBERS, queues=100, held=None),
        *(
            journal_record("handover", group, AT, **handover_fields, to=name, toUid=member["uid"], queues=QUEUES)
            for name, member in list(members.items())[1 : HANDOVERS + 1]
        ),
    ]


def _timed_write(
    plans: list[list[JournalRecord]], write: Callable[[list[list[JournalRecord]], Path], float], folder: Path
) -> tuple[float, float]:
    """Return the seconds until all records are written, and for how many of them the caller was blocked."""
    folder.mkdir()
    began = time.perf_counter()
    blocked = write(plans, folder)
    seconds = time.perf_counter() - began
    count = 0
    for path in folder.rglob("*.jsonl*"):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            count += sum(1 for _ in map(decode_record, lines))
        path.unlink()
    if count != PER:
        raise RuntimeError(f"{count:,} records of {PER:,} were written")
    return seconds, blocked


def _write_by_journal(plans: list[list[JournalRecord]], folder: Path) -> float:
    journal = Journal(str(folder), "bench")
    blocked = 0.0
    for records in plans:
        while journal._unwritten_values > MAX_QUEUED_VALUES // 2:  # noqa: SLF001 - no operator writes so much
            time.sleep(0.001)
        began = time.perf_counter()
        journal.write(records)
        blocked += time.perf_counter() - began
    journal.close()
    return blocked


def _write_by_handler(plans: list[list[JournalRecord]], folder: Path) -> float:
    handler = TimedRotatingFileHandler(folder / "peer.jsonl", when="H", utc=True)
    log = logging.getLogger(folder.name)
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    for records in plans:
        for record in records:
            log.info(msgspec.json.encode(record).decode())
    handler.close()
    return 0.0
