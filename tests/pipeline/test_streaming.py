"""The journal into a lake: every line once, although lines are repeated or late and ingests are killed."""

import os
import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from rota.pipeline.ingest import streaming
from rota.pipeline.ingest.facts import first_day, read_facts
from rota.pipeline.ingest.inbox import Inbox
from rota.pipeline.ingest.streaming import ingest_journal

WITHOUT_SETTLING = None


@pytest.fixture(autouse=True)
def _one_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streaming.STREAM_SETTINGS, "spark.sql.shuffle.partitions", "1")


def verdict_line(number: int, hour: int = 8, group: str = "shop/orders") -> str:
    return (
        f'{{"schema":1,"kind":"verdict","group":"{group}","at":"2026-11-21T{hour:02}:00:{number:02}.000Z",'
        f'"condition":"Ready","status":"True","reason":"R{number}","message":""}}\n'
    )


def append_lines(journal: Path, name: str, *lines: str) -> Path:
    path = journal / "date=2026-11-21" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(lines)
    return path


def reasons(spark: SparkSession, lake: Path) -> list[str]:
    return sorted(row.reason for row in read_facts(spark, str(lake)).verdict.collect())


def test_ingest_does_not_repeat_lines_of_earlier_batches(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    append_lines(journal, "08-a.jsonl", verdict_line(1), verdict_line(1), "{torn\n", verdict_line(2)[:-1])
    append_lines(journal, "08-b.jsonl", verdict_line(1))
    first = ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    assert {kind: count for kind, count in first.items() if count} == {"verdict": 2, "quarantine": 1}
    assert not any(ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING).values())
    append_lines(journal, "09-a.jsonl", verdict_line(3, 9))
    append_lines(journal, "08-c.jsonl", verdict_line(2))  # a copy, in another batch
    assert ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)["verdict"] == 1
    assert reasons(spark, lake) == ["R1", "R2", "R3"]
    assert first_day(str(lake), 1) == date(2026, 11, 21)
    assert [read_facts(spark, str(lake), date(2026, 11, day)).verdict.count() for day in (21, 22)] == [3, 0]
    [quarantined] = read_facts(spark, str(lake)).quarantine.collect()
    assert (quarantined.file, quarantined.line, str(quarantined.date)) == (
        "date=2026-11-21/08-a.jsonl",
        "{torn",
        "2026-11-21",
    )


@pytest.mark.slow("a file that grows between two ingests")
def test_ingest_reads_a_grown_file_again_and_counts_its_lines_once(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    append_lines(journal, "08-a.jsonl", verdict_line(1), verdict_line(2)[:40])
    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    append_lines(journal, "08-a.jsonl", "\n", verdict_line(2))
    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    assert reasons(spark, lake) == ["R1", "R2"]
    assert read_facts(spark, str(lake)).quarantine.count() == 1


@pytest.mark.slow("lines that arrive too late")
def test_ingest_quarantines_lines_that_arrive_too_late(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    append_lines(journal, "12-a.jsonl", verdict_line(1, 12))
    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    append_lines(journal, "11-b.jsonl", verdict_line(2, 11))
    append_lines(journal, "08-b.jsonl", verdict_line(3))
    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    assert reasons(spark, lake) == ["R1", "R2"]
    [late] = read_facts(spark, str(lake)).quarantine.collect()
    assert (late.file, late.line + "\n", late.reason) == (
        "date=2026-11-21/08-b.jsonl",
        verdict_line(3),
        streaming.LATE_REASON,
    )


def test_ingest_killed_during_a_batch_writes_it_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    append_lines(journal, "08-a.jsonl", verdict_line(1), "{torn\n")

    write_table = streaming._write_table

    def write_and_die(*args: object) -> None:
        write_table(*args)  # type: ignore[arg-type]
        raise OSError("killed")

    monkeypatch.setattr(streaming, "_write_table", write_and_die)
    with pytest.raises(Exception, match="killed"):
        ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    monkeypatch.undo()
    append_lines(journal, "09-a.jsonl", verdict_line(2, 9))
    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    assert reasons(spark, lake) == ["R1", "R2"]
    assert read_facts(spark, str(lake)).quarantine.count() == 1


def test_ingest_killed_before_its_inbox_is_updated_takes_each_line_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    append_lines(journal, "08-a.jsonl", verdict_line(1))
    monkeypatch.setattr(Inbox, "mark_ingested", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    monkeypatch.undo()
    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    assert reasons(spark, lake) == ["R1"]


@pytest.mark.parametrize(("minutes_ago", "is_ready"), [(4, False), (6, True)])
def test_ingest_takes_an_hour_that_has_ended_and_stopped_growing_for_minutes(
    tmp_path: Path, minutes_ago: int, *, is_ready: bool
) -> None:
    path = append_lines(tmp_path / "journal", "08-a.jsonl", verdict_line(1))
    modified_at = datetime(2026, 11, 21, 9, 1, tzinfo=UTC)
    os.utime(path, (modified_at.timestamp(), modified_at.timestamp()))
    inbox = Inbox(tmp_path / "inbox", tmp_path / "journal", timedelta(hours=2))
    now = modified_at + timedelta(minutes=minutes_ago)
    assert inbox.link_complete_files(now, timedelta(minutes=5)) is is_ready
    assert not Inbox(tmp_path / "other", tmp_path / "journal", timedelta(hours=2)).link_complete_files(
        datetime(2026, 11, 21, 9, 4, tzinfo=UTC), timedelta(minutes=5)
    )


def test_ingest_leaves_the_journal_unchanged_and_takes_a_file_once(tmp_path: Path) -> None:
    path = append_lines(tmp_path / "journal", "08-a.jsonl", verdict_line(1))
    inbox = Inbox(tmp_path / "inbox", tmp_path / "journal", timedelta(hours=2))
    assert inbox.link_complete_files(datetime.now(UTC), None)
    inbox.mark_ingested()
    assert not inbox.has_pending_files()
    assert not inbox.link_complete_files(datetime.now(UTC), None)
    assert path.read_text() == verdict_line(1)


@pytest.mark.slow("an ingest that watches for new hours")
def test_ingest_watch_continues_with_new_hours(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    append_lines(journal, "08-a.jsonl", verdict_line(1))
    batches: list[dict[str, int]] = []

    def watch(counts: dict[str, int]) -> bool:
        batches.append(counts)
        append_lines(journal, "09-a.jsonl", verdict_line(2, 9))
        return len(batches) < 2

    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING, on_ingested=watch)
    assert batches == [{"verdict": 1}, {"verdict": 1}]


def test_lake_is_partitioned_by_kind_and_day(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    append_lines(journal, "08-a.jsonl", verdict_line(1))
    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    [folder] = (lake / "verdict").glob("date=*")
    assert folder.name == "date=2026-11-21"
    assert read_facts(spark, str(lake)).offsets.count() == 0
    assert read_facts(spark, str(lake)).verdict.select(F.count("at")).first() == (1,)


def test_lake_day_that_was_removed_does_not_return(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    append_lines(journal, "08-a.jsonl", verdict_line(1), "{torn\n")
    ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)
    for day in lake.glob("*/date=2026-11-21"):
        shutil.rmtree(day)
    assert not any(ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING).values())
    append_lines(journal, "09-a.jsonl", verdict_line(1), verdict_line(3, 9))  # with a copy of a removed line
    assert ingest_journal(spark, str(journal), str(lake), settle=WITHOUT_SETTLING)["verdict"] == 1
    assert reasons(spark, lake) == ["R3"]
    assert read_facts(spark, str(lake)).quarantine.count() == 0


def test_ingest_reports_missing_journal_missing_delta_and_a_concurrent_ingest(
    spark: SparkSession, tmp_path: Path
) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    with pytest.raises(
        ValueError, match=r"journal contains no journal: no file such as date=2026-11-21/08-NAME\.jsonl$"
    ):
        ingest_journal(spark, str(journal), str(lake))
    append_lines(journal, "08-a.jsonl", verdict_line(1))
    with pytest.raises(ValueError, match=r"^Delta is not on Spark's class path; give spark-submit --packages "):
        ingest_journal(spark, str(journal), str(lake), table_format="delta")
    with streaming._lock_lake(lake), pytest.raises(ValueError, match=r"^Another `rota pipeline ingest` is writing "):
        ingest_journal(spark, str(journal), str(lake))
