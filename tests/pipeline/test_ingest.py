"""A journal's folder or a lake as tables: lines that count once, quarantined lines, and folders without a journal."""

import shutil
from datetime import date
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from pyspark.sql import Row, SparkSession
from pyspark.testing import assertDataFrameEqual, assertSchemaEqual

from rota.cli import main
from rota.pipeline.common.paths import TABLE_FOLDERS
from rota.pipeline.ingest.facts import TABLE_SCHEMAS, read_facts
from rota.records import journal_record


def journal_line(kind: str, time: str, **fields: object) -> bytes:
    return msgspec.json.encode(journal_record(kind, "shop/orders", f"2026-11-21T{time}Z", **fields)) + b"\n"


def verdict_line(time: str, status: str, reason: str) -> bytes:
    return journal_line("verdict", time, condition="Ready", status=status, reason=reason, message="")


def rebalance_line(time: str, began: str, generation: int = 6) -> bytes:
    fields = {"reason": "MemberLeft", "outcome": "Settled", "moved": 4, "forced": 0, "seconds": 0.5}
    return journal_line("rebalance", time, generation=generation, began=f"2026-11-21T{began}Z", **fields)


def a_journal(folder: Path, name: str = "08-rota-a.jsonl", *lines: bytes) -> str:
    path = folder / "date=2026-11-21" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
    return str(folder)


def test_journal_lines_that_are_identical_count_once_across_files(spark: SparkSession, tmp_path: Path) -> None:
    repeated = journal_line("offsets", "08:00:00.000", topics={}, verdicts={})
    a_journal(
        tmp_path, "08-a.jsonl", repeated, repeated, journal_line("offsets", "08:00:05.000", topics={}, verdicts={})
    )
    a_journal(tmp_path, "08-b.jsonl", repeated)
    assert read_facts(spark, str(tmp_path)).offsets.count() == 2


def test_journal_verdict_that_repeats_the_previous_one_is_not_counted(spark: SparkSession, tmp_path: Path) -> None:
    verdicts = [("True", "A"), ("True", "A"), ("True", "B"), ("False", "B"), ("False", "B"), ("True", "A")]
    a_journal(
        tmp_path,
        "08-a.jsonl",
        *[verdict_line(f"08:00:0{second}.000", *verdict) for second, verdict in enumerate(verdicts)],
    )
    rows = read_facts(spark, str(tmp_path)).verdict.orderBy("at").select("at", "status", "reason").collect()
    assert [(row.at.second, row.status, row.reason) for row in rows] == [
        (0, "True", "A"),
        (2, "True", "B"),
        (3, "False", "B"),
        (5, "True", "A"),
    ]


def test_journal_rebalance_recorded_by_two_leaders_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    first = rebalance_line("08:01:00", "08:00:00")
    by_next_leader = rebalance_line("08:01:02", "08:00:00", 7)
    second = rebalance_line("08:03:00", "08:02:00")
    a_journal(tmp_path, "08-a.jsonl", by_next_leader, first, second)
    rebalances = read_facts(spark, str(tmp_path)).rebalance.orderBy("at").select("generation", "moved")
    assertDataFrameEqual(rebalances, [Row(generation=6, moved=4), Row(generation=6, moved=4)])


def test_journal_lines_that_are_no_records_are_quarantined_with_a_reason(spark: SparkSession, tmp_path: Path) -> None:
    unknown_kind = journal_line("weather", "08:00:00")
    later_schema = journal_line("plan", "08:00:00").replace(b'"schema":1', b'"schema":2')
    valid = verdict_line("08:00:00", "True", "A")
    a_journal(tmp_path, "08-a+b c.jsonl", valid, unknown_kind, later_schema, b"\xff\n", valid[:30])
    rows = read_facts(spark, str(tmp_path)).quarantine.orderBy("line").collect()
    assert {(row.file, row.date) for row in rows} == {("date=2026-11-21/08-a+b c.jsonl", date(2026, 11, 21))}
    assert [row.reason.partition(":")[0] for row in rows] == [
        "The line is incomplete, or not a journal record",
        "Record kind 'weather' is unknown to this version; skip the record",
        "The record has schema 2; this version reads 1",
        "The line is incomplete, or not a journal record",
    ]
    assert read_facts(spark, str(tmp_path)).verdict.count() == 1


def test_ingest_tables_have_the_documented_schema(spark: SparkSession, tmp_path: Path) -> None:
    facts = read_facts(spark, a_journal(tmp_path, "08-a.jsonl", verdict_line("08:00:00", "True", "A")))
    assert set(TABLE_SCHEMAS) == set(TABLE_FOLDERS)
    for kind, schema in TABLE_SCHEMAS.items():
        assertSchemaEqual(getattr(facts, kind).schema, schema)


@pytest.mark.slow("a journal with deleted hours, or with special characters in its path")
def test_journal_with_deleted_hours_or_special_characters_in_its_path_is_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = tmp_path / "a[b] {c,d}*"
    earlier = read_facts(spark, a_journal(folder, "08-a.jsonl", verdict_line("08:00:00", "True", "A")))
    later = read_facts(spark, a_journal(folder, "11-a.jsonl", verdict_line("11:00:00", "False", "B")))
    (folder / "date=2026-11-21" / "08-a.jsonl").unlink()
    assert [row.reason for row in later.verdict.collect()] == ["B"]
    assert earlier.verdict.count() == 0


@pytest.mark.parametrize("folder_content", [None, "empty", "other"])
def test_journal_folder_that_is_missing_or_holds_no_journal_is_rejected(
    spark: SparkSession, tmp_path: Path, folder_content: str | None
) -> None:
    folder = tmp_path / "source"
    if folder_content:
        folder.mkdir()
    if folder_content == "other":
        (folder / "date=2026-11-21").mkdir()
        (folder / "date=2026-11-21" / "notes.txt").touch()
    with pytest.raises(
        ValueError, match=rf"^{folder} (is not a folder|contains no journal \(date=2026-11-21/08-NAME\.jsonl\))"
    ):
        read_facts(spark, str(folder))


def test_ingest_command_prints_the_rows_it_wrote_to_each_table(spark: SparkSession, tmp_path: Path) -> None:
    journal = a_journal(tmp_path / "journal", "08-a.jsonl", verdict_line("08:00:00", "True", "A"), b"torn\n")
    result = CliRunner().invoke(
        main, ["pipeline", "ingest", journal, "--to", str(tmp_path / "lake"), "--all", "-o", "json"]
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert {kind: count for kind, count in msgspec.json.decode(result.stdout).items() if count} == {
        "verdict": 1,
        "quarantine": 1,
    }
    assert read_facts(spark, str(tmp_path / "lake")).verdict.count() == 1


@pytest.mark.usefixtures("spark")
def test_ingest_command_reports_missing_journal_java_and_pyspark_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    command = ["pipeline", "ingest", str(journal), "--to", str(tmp_path / "lake")]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stderr) == (
        2,
        f"rota: {journal} contains no journal: no file such as date=2026-11-21/08-NAME.jsonl\n",
    )
    assert not (tmp_path / "lake").exists()
    a_journal(journal, "08-a.jsonl", verdict_line("08:00:00", "True", "A"))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stderr) == (
        2,
        "rota: Spark needs Java, but no java command was found: install Java 17 or later, or set JAVA_HOME\n",
    )
    monkeypatch.setitem(__import__("sys").modules, "pyspark.sql", None)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert result.stderr.endswith(", which is not installed: pip install 'rota-operator[pipeline]'\n")
