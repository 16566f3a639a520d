"""The journal: facts handed over and written down, beside the handler of Python's log that has a file an hour.

Figures are of 100,000 records, handed over plan by plan as the operator does: a membership, a plan, eight handovers.
The peer has the same encoder; each of its records is a line of the log.
"""

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

PER, MEMBERS, HANDOVERS, RUNS = 100_000, 10, 8, 7
AT = "2026-11-21T09:00:00.000Z"
QUEUES = {"orders": {"broker-a": "0-3,7", "broker-b": "1,5-6"}}


def rows() -> Iterator[Row]:
    """Time both until all is written, and how long the caller was kept."""
    plans = [_plan(number) for number in range(PER // (HANDOVERS + 2))]
    with tempfile.TemporaryDirectory() as folder:
        ours = [_checked(plans, _journal, Path(folder) / f"ours-{run}") for run in range(RUNS)]
        peers = [_checked(plans, _handler, Path(folder) / f"peer-{run}") for run in range(RUNS)]
    written, theirs = Sample([it for it, _ in ours]), Sample([it for it, _ in peers])
    rates = f"{PER / written.median:,.0f} / {PER / theirs.median:,.0f} a second"
    yield Row(f"100,000 records written: {rates}", written, theirs, "≤ 5 s")
    yield Row("the caller is kept", Sample([it for _, it in ours]), theirs)


def _plan(number: int) -> list[JournalRecord]:
    """Return the records of a plan for a group of ten members, one of which leaves."""
    names = [f"orders-7d9f8b6c5-{name:05}" for name in range(MEMBERS)]
    members = {name: {"uid": f"0f8e1c5a-93b7-4d2f-8a61-{number:012}", "standing": "Ready"} for name in names}
    group = f"shop/orders-{number % 1000}"
    why: dict[str, Any] = {"generation": number, "reason": "MemberLeft", "message": f"{names[0]} is leaving"}
    how: dict[str, Any] = {"generation": number, "act": "Revoke", "proof": "None", "state": "Owned"}
    how |= {"from": names[0], "fromUid": members[names[0]]["uid"]}
    return [
        journal_record("membership", group, AT, generation=number, members=members),
        journal_record("plan", group, AT, **why, strategy="Sticky", members=MEMBERS, queues=100, held=None),
        *(
            journal_record("handover", group, AT, **how, to=name, toUid=it["uid"], queues=QUEUES)
            for name, it in list(members.items())[1 : HANDOVERS + 1]
        ),
    ]


def _checked(
    plans: list[list[JournalRecord]], side: Callable[[list[list[JournalRecord]], Path], float], folder: Path
) -> tuple[float, float]:
    """Return the seconds until all is written, and those of them that the caller was kept."""
    folder.mkdir()
    began = time.perf_counter()
    kept = side(plans, folder)
    seconds = time.perf_counter() - began
    (path,) = folder.rglob("*.*")
    with path.open("rb") as lines:
        found = sum(1 for _ in map(decode_record, lines))
    path.unlink()
    if found != PER:
        raise RuntimeError(f"{found:,} records of {PER:,} were written")
    return seconds, kept


def _journal(plans: list[list[JournalRecord]], folder: Path) -> float:
    journal, kept = Journal(str(folder), "bench"), 0.0
    for facts in plans:
        while journal._unwritten_values > MAX_QUEUED_VALUES // 2:  # noqa: SLF001 - no operator has so much to say
            time.sleep(0.001)
        began = time.perf_counter()
        journal.write(facts)
        kept += time.perf_counter() - began
    journal.close()
    return kept


def _handler(plans: list[list[JournalRecord]], folder: Path) -> float:
    handler = TimedRotatingFileHandler(folder / "peer.jsonl", when="H", utc=True)
    log = logging.getLogger(folder.name)
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    for facts in plans:
        for fact in facts:
            log.info(msgspec.json.encode(fact).decode())
    handler.close()
    return 0.0
