"""The commands of `rota pipeline`: one complete run, and their errors for invalid input."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from rota.cli import main
from rota.pipeline.ingest.facts import first_day, read_facts
from rota.records import journal_record

DAY = "date=2025-11-21"
STEADY = "kind: RebalancePolicy\nmetadata: {name: steady}\nspec: {strategy: Sticky}\n"
GROUPS, HOURS = 2, 3


def rota(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["pipeline", *map(str, arguments)])


def output_of(*arguments: object) -> str:
    result = rota(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    return result.stdout


def error_of(*arguments: object) -> str:
    """Return the one sentence of a command's error."""
    result = rota(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rota: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("rota: ").rstrip()


class CommandOutputs(NamedTuple):
    """The outputs of a sequence of commands."""

    journal: Path
    lake: Path
    simulated: Path
    policy: Path
    printed: dict[str, str]


@pytest.fixture(scope="module")
def outputs(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> CommandOutputs:
    assert spark.version  # the commands take its session
    folder = tmp_path_factory.mktemp("outputs")
    policy = folder / "policy.yaml"
    policy.write_text(STEADY)
    outputs = CommandOutputs(folder / "journal", folder / "lake", folder / "simulated", policy, {})
    size = ("--groups", GROUPS, "--hours", HOURS)
    outputs.printed["generate"] = output_of("generate", *size, "--to", outputs.journal, "-o", "json")
    outputs.printed["ingest"] = output_of("ingest", outputs.journal, "--all", "--to", outputs.lake, "-o", "json")
    outputs.printed["simulate"] = output_of(
        "simulate", outputs.lake, "--policies", policy, "--to", outputs.simulated, "-o", "json"
    )
    return outputs


# A complete run.


def test_ingest_command_puts_each_generated_line_into_the_lake(outputs: CommandOutputs) -> None:
    generated = json.loads(outputs.printed["generate"])
    ingested = json.loads(outputs.printed["ingest"])
    lines = [line for path in outputs.journal.glob("date=*/*.jsonl") for line in path.read_bytes().splitlines()]
    assert generated == {"groups": GROUPS, "records": len(lines)}
    assert sum(ingested.values()) == len(set(lines))
    assert not ingested["quarantine"]
    second_run = output_of("ingest", outputs.journal, "--all", "--to", outputs.lake)
    assert second_run.split()[:2] == ["TABLE", "ROWS"]
    assert ["quarantine", "0"] in [line.split() for line in second_run.splitlines()]


def test_rollup_command_has_a_row_for_each_group_and_hour_and_overwrites_its_folder(
    outputs: CommandOutputs, spark: SparkSession, tmp_path: Path
) -> None:
    folder = tmp_path / "rollup"
    spark.range(3).write.parquet(str(folder))  # as an earlier run of the same command left them
    assert not output_of("rollup", outputs.lake, "--to", folder)
    rows = spark.read.parquet(str(folder)).select("group", "hour").collect()
    assert len({row["group"] for row in rows}) == GROUPS
    assert {row["hour"].hour for row in rows} == set(range(HOURS))


@pytest.mark.slow("a rollup of the last days equals the same days of a whole one")
def test_rollup_command_of_the_last_days_rewrites_only_these_and_equals_a_complete_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    source = three_days(tmp_path / "journal")
    folder = tmp_path / "rollup"
    output_of("rollup", source, "--to", folder)
    complete_rows = rows_by_hour(spark, folder)
    assert len({row["hour"] for row in complete_rows}) == 6
    oldest_file = next(folder.glob("date=2025-11-21/*.parquet"))
    output_of("rollup", source, "--to", folder, "--days", 2)
    assert oldest_file.exists()
    assert rows_by_hour(spark, folder) == complete_rows
    assert read_facts(spark, str(source)).owners.count() == 6
    assert read_facts(spark, str(source), first_day(str(source), 1)).owners.count() == 2


def three_days(journal: Path) -> Path:
    """Write a journal of a group without changes, and a folder with a date by a wrong clock."""
    share = {"uid": "u1", "standing": "Ready", "queues": {"orders": {"broker-a": "0-3"}}}
    rules: dict[str, Any] = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None}
    state = {"rules": {}, "members": {"a": share}, "releasing": [], "unowned": {}}
    for day, hour in product((21, 22, 23), ("00", "23")):
        time = f"2025-11-{day}T{hour}:00:00.000Z"
        record = journal_record("owners", "shop/orders", time, generation=1, **rules, **state)
        a_file(journal / f"date=2025-11-{day}" / f"{hour}-a.jsonl", json.dumps(record) + "\n")
    (journal / "date=2999-01-01").mkdir()
    return journal


def rows_by_hour(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in spark.read.parquet(str(folder)).orderBy("hour").collect()]


def test_timeline_command_without_violations_reports_none_and_writes_its_tables(
    outputs: CommandOutputs, spark: SparkSession, tmp_path: Path
) -> None:
    assert output_of("timeline", outputs.lake, "--to", tmp_path / "who") == "No violations of queue ownership\n"
    assert spark.read.parquet(str(tmp_path / "who" / "violations")).count() == 0
    assert spark.read.parquet(str(tmp_path / "who" / "intervals")).select("group").distinct().count() == GROUPS


@pytest.mark.usefixtures("spark")
@pytest.mark.slow("rota pipeline timeline of a journal with two owners")
def test_timeline_command_with_two_owners_exits_with_1_and_prints_the_violation(tmp_path: Path) -> None:
    owner = {"standing": "Ready", "queues": {"orders": {"broker-a": "0"}}}
    rules: dict[str, Any] = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None}
    state = {"rules": {}, "members": {name: owner | {"uid": name} for name in ("a", "b")}, "releasing": []}
    record = journal_record(
        "owners", "shop/orders", "2025-11-21T08:00:00.000Z", generation=1, unowned={}, **rules, **state
    )
    a_file(tmp_path / "journal" / DAY / "08-a.jsonl", json.dumps(record) + "\n")
    result = rota("timeline", tmp_path / "journal")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "TwoOwners" in result.stdout


def test_simulate_command_prints_a_line_for_each_policy(outputs: CommandOutputs, spark: SparkSession) -> None:
    rows = json.loads(outputs.printed["simulate"])
    assert [(row["policy"], row["groups"], row["problems"]) for row in rows] == [
        ("recorded", GROUPS, 0),
        ("steady", GROUPS, 0),
    ]
    assert spark.read.parquet(str(outputs.simulated / "results")).count() == 2 * GROUPS
    assert spark.read.parquet(str(outputs.simulated / "series")).count() > 0


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("journal", marks=pytest.mark.slow("recommendations from a journal, without a lake")),
        pytest.param("lake", marks=pytest.mark.slow("recommendations from a lake, simulated in the same command")),
        "simulated",
    ],
)
def test_recommend_command_accepts_a_journal_a_lake_or_a_simulation(
    outputs: CommandOutputs, spark: SparkSession, tmp_path: Path, source: str
) -> None:
    target = tmp_path / "advice"
    a_file(target / "results" / "part-0.parquet", "of an earlier run")
    a_file(target / "series" / "part-0.parquet", "of an earlier run")
    lines = output_of(
        "recommend", getattr(outputs, source), "--policies", outputs.policy, "--to", target, "--top", 1
    ).splitlines()
    assert re.match(rf"\d of {GROUPS} groups would benefit from another policy", lines[0])
    assert lines[1] == "Up to 3 h of each group's history was replayed; counts are per day"
    assert lines[-1] == f"The report is {target / 'report.html'}; the manifests are in {target / 'policies'}"
    assert (target / "report.html").read_text().lstrip().startswith("<!")
    assert spark.read.parquet(str(target / "chosen")).count() == GROUPS
    assert spark.read.parquet(str(target / "costs")).count() == 2 * GROUPS
    assert (target / "results").is_dir() == (target / "series").is_dir() == (source != "simulated")
    for path in (target / "policies").glob("*.yaml"):
        assert {body["kind"] for body in yaml.safe_load_all(path.read_text()) if body} == {"RebalancePolicy"}


# Invalid input.


def a_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("command", ["rollup", "timeline", "simulate", "recommend", "ingest"])
@pytest.mark.parametrize("source_kind", ["missing", "a file", "empty", "other files"])
def test_pipeline_command_names_a_source_that_holds_no_journal(
    outputs: CommandOutputs, tmp_path: Path, command: str, source_kind: str
) -> None:
    source = tmp_path / "source"
    if source_kind == "a file":
        source.touch()
    elif source_kind != "missing":
        source.mkdir()
    if source_kind == "other files":
        a_file(source / "date=2025-11-21" / "notes.txt", "x")
    options = ["--policies", outputs.policy] if command in {"simulate", "recommend"} else []
    error = error_of(command, source, *options, "--to", tmp_path / "to")
    assert re.match(rf"{source} (is not a folder; give a journal's, or a lake|contains no journal)", error)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (None, r"p\.yaml cannot be read: No such file or directory$"),
        ("{", r"p\.yaml is not valid YAML, line 1; give a file with RebalancePolicies$"),
        ("a: 2026-13-45", r"p\.yaml is not valid YAML; "),
        ("", r"p\.yaml contains no RebalancePolicy; give a file with one or more$"),
        ("[1]", r"p\.yaml contains no RebalancePolicy; "),
        ("kind: ConsumerGroup", r"p\.yaml contains no RebalancePolicy; "),
        ("kind: RebalancePolicy", r"p\.yaml, line 1: this RebalancePolicy has no name; give it one in metadata.name$"),
        ("{kind: RebalancePolicy, metadata: [a]}", r"p\.yaml, line 1: this RebalancePolicy has no name; "),
        ("{kind: RebalancePolicy, metadata: {name: A B}}", r"'A B' is not a valid RebalancePolicy name; use a-z"),
        (
            "{kind: RebalancePolicy, metadata: {name: recorded}}",
            r"p\.yaml, line 1: the name recorded is reserved .*; use another name$",
        ),
        (
            f"{STEADY}---\n{STEADY}",
            r"steady is defined twice, at \S+p\.yaml, line 2 and \S+p\.yaml, line 6; remove one$",
        ),
        (
            STEADY.replace("strategy", "strategi"),
            r"p\.yaml, line 3: RebalancePolicy steady: spec: .* unknown field strategi$",
        ),
        (STEADY.replace("Sticky", "Clingy"), r"p\.yaml, line 3: RebalancePolicy steady: spec.strategy: "),
        ("{kind: RebalancePolicy, metadata: {name: a}, spec: 3}", r"RebalancePolicy a: spec: expected object, got int"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "recommend"])
def test_pipeline_command_rejects_invalid_policies_with_a_sentence(
    outputs: CommandOutputs, tmp_path: Path, command: str, text: str | None, pattern: str
) -> None:
    path = tmp_path / "p.yaml" if text is None else a_file(tmp_path / "p.yaml", text)
    assert re.search(pattern, error_of(command, outputs.lake, "--policies", path, "--to", tmp_path / "to"))
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "w.yaml cannot be read: No such file or directory"),
        ("{", "w.yaml is not valid YAML; write lines such as moves: 1"),
        ("move: 1", "w.yaml names 'move', which is not a weight; choose from moves, pause, "),
        ("moves: -1", "w.yaml: moves is -1; give a number of at least 0"),
    ],
)
def test_recommend_command_rejects_invalid_weights_with_a_sentence(
    outputs: CommandOutputs, tmp_path: Path, text: str | None, sentence: str
) -> None:
    path = tmp_path / "w.yaml" if text is None else a_file(tmp_path / "w.yaml", text)
    options = ["--policies", outputs.policy, "--to", tmp_path / "to", "--weights", path]
    assert sentence in error_of("recommend", outputs.simulated, *options)


def valid_command(outputs: CommandOutputs, command: str) -> list[object]:
    """Return a command that would succeed, up to its --to."""
    if command == "generate":
        return [command, "--groups", 1, "--hours", 1, "--to"]
    options: dict[str, list[object]] = {"ingest": ["--all"], "rollup": [], "timeline": []}
    source = outputs.journal if command == "ingest" else outputs.lake
    return [command, source, *options.get(command, ["--policies", outputs.policy]), "--to"]


WRITERS = ["ingest", "rollup", "timeline", "simulate", "recommend", "generate"]


@pytest.mark.parametrize("command", WRITERS)
def test_pipeline_command_rejects_a_target_that_is_a_file_or_empty(
    outputs: CommandOutputs, tmp_path: Path, command: str
) -> None:
    file = a_file(tmp_path / "file", "mine")
    arguments = valid_command(outputs, command)
    reason = f"cannot be a folder, because {file} is a file; name another"
    assert error_of(*arguments, file) == f"--to {file} {reason}"
    assert error_of(*arguments, file / "under") == f"--to {file / 'under'} {reason}"
    assert error_of(*arguments, "") == "--to is empty; name a folder"
    assert file.read_text() == "mine"


@pytest.mark.parametrize("command", ["ingest", "rollup", "timeline", "simulate", "recommend"])
def test_pipeline_command_rejects_a_target_within_its_source(outputs: CommandOutputs, command: str) -> None:
    *arguments, _ = valid_command(outputs, command)
    source = Path(str(arguments[1]))
    files_before = sorted(source.rglob("*"))
    for target in (source, source / "deep" / "er", source / ".." / source.name):
        assert re.match(
            r"--to .* is inside the source .*; name a folder elsewhere$", error_of(*arguments, "--to", target)
        )
    assert sorted(source.rglob("*")) == files_before


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("ingest", "thesis.txt"),
        ("rollup", "thesis.txt"),
        ("timeline", "intervals/thesis.txt"),
        ("simulate", "results/thesis.txt"),
        ("recommend", "costs/thesis.txt"),
        ("simulate", "results"),
        ("recommend", "date=2025-11-21/08-a.jsonl"),
        ("simulate", "_lock"),
        ("recommend", "policies/steady.yaml"),
        ("recommend", "report.html"),
        ("generate", "thesis.txt"),
    ],
)
def test_pipeline_command_never_replaces_files_that_are_not_its_own(
    outputs: CommandOutputs, tmp_path: Path, command: str, path: str
) -> None:
    foreign_file = a_file(tmp_path / "to" / path, "mine")
    error = error_of(*valid_command(outputs, command), tmp_path / "to")
    reasons = r"other files: .*; name|not a file of this command; name|is a lake or a journal; name|is not empty; give"
    assert re.search(reasons, error)
    assert foreign_file.read_text() == "mine"
    assert [path for path in (tmp_path / "to").rglob("*") if path.is_file()] == [foreign_file]


@pytest.mark.parametrize("command", ["ingest", "simulate", "generate"])
def test_pipeline_command_reports_an_unwritable_target_with_a_sentence(outputs: CommandOutputs, command: str) -> None:
    error = error_of(*valid_command(outputs, command), "/proc/nowhere")  # even root cannot write there
    assert "/proc/nowhere" in error
    assert "cannot be" in error


# Damaged input.


def copy_lake(outputs: CommandOutputs, tmp_path: Path) -> tuple[Path, list[object]]:
    """Return a copy of the lake to damage, and a command that reads it."""
    lake = tmp_path / "lake"
    shutil.copytree(outputs.lake, lake)
    return lake, ["simulate", lake, "--policies", outputs.policy, "--to", tmp_path / "to"]


def rewrite_table(path: Path, change: Callable[[Any], Any]) -> None:
    pq.write_table(change(pq.ParquetFile(path).read()), path)
    path.with_name(f".{path.name}.crc").unlink()


def test_lake_table_that_is_truncated_or_lacks_a_column_is_named(outputs: CommandOutputs, tmp_path: Path) -> None:
    lake, command = copy_lake(outputs, tmp_path)
    for path in (lake / "owners").rglob("*.parquet"):
        rewrite_table(path, lambda table: table.drop_columns(["generation"]))
    error = error_of(*command)
    assert re.match(rf"{lake}/owners/.*\.parquet has no column generation, which this version needs; ", error)
    for path in (lake / "owners").rglob("*.parquet"):
        truncated = path.read_bytes()[:100]
        path.write_bytes(truncated)
    assert re.match(rf"{lake}/owners/.*\.parquet cannot be read: it is damaged, or not Parquet; ", error_of(*command))


def test_lake_table_with_corrupt_data_is_named(outputs: CommandOutputs, tmp_path: Path) -> None:
    lake, command = copy_lake(outputs, tmp_path)
    for path in (lake / "owners").rglob("*.parquet"):
        content = path.read_bytes()
        # The footer, which describes the content, stays intact.
        path.write_bytes(content[:4] + bytes(60) + content[64:])
    error = error_of(*command)
    assert re.match(rf"{lake}/owners/.*\.parquet cannot be read: the file is damaged or has another format", error)


def test_lake_with_a_wrong_column_type_or_an_invalid_day_folder_is_reported(
    outputs: CommandOutputs, tmp_path: Path
) -> None:
    lake, command = copy_lake(outputs, tmp_path)
    [day] = (lake / "owners").glob("date=*")
    day.rename(day.with_name("date=tomorrow"))
    assert re.match(r"A partition folder has an invalid date: .*'tomorrow'.*; recreate the lake$", error_of(*command))
    day.with_name("date=tomorrow").rename(day)
    for path in day.rglob("*.parquet"):
        rewrite_table(path, lambda table: table.set_column(0, "group", pa.array([1] * len(table))))
    assert re.match(rf"{lake}/owners/.*\.parquet cannot be read: ", error_of(*command))


def test_recommend_command_rejects_an_incomplete_simulation(outputs: CommandOutputs, tmp_path: Path) -> None:
    folder = tmp_path / "simulated"
    shutil.copytree(outputs.simulated, folder)
    command = ["recommend", folder, "--policies", outputs.policy, "--to", tmp_path / "to"]
    (folder / "series" / "_SUCCESS").unlink()
    error = f"{folder} contains no complete simulation; run `rota pipeline simulate` again"
    assert error_of(*command) == error
    shutil.rmtree(folder / "results")
    (folder / "results").mkdir()
    assert error_of(*command) == error


def test_recommend_command_rejects_a_policy_that_was_edited_or_not_simulated(
    outputs: CommandOutputs, tmp_path: Path
) -> None:
    """Otherwise the report would show outdated figures of an edited policy, and none of a new one."""
    edited = a_file(tmp_path / "edited.yaml", STEADY.replace("Sticky", "Averagely"))
    not_simulated = a_file(tmp_path / "other.yaml", STEADY.replace("steady", "other"))
    for path, name in ((edited, "steady"), (not_simulated, "other")):
        error = error_of("recommend", outputs.simulated, "--policies", path, "--to", tmp_path / "to")
        assert error == f"Policy {name} was not simulated, or has changed since; simulate again"


def lake_with_pending_hour(tmp_path: Path) -> tuple[Path, Path, list[object]]:
    """Return a journal with an hour that is not in its lake yet, the lake, and the ingest command."""
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    command = ["ingest", journal, "--all", "--to", lake]
    a_file(journal / DAY / "08-a.jsonl", verdict_line(8))
    output_of(*command)
    a_file(journal / DAY / "09-a.jsonl", verdict_line(9))
    return journal, lake, command


def verdict_line(hour: int) -> str:
    return (
        f'{{"schema":1,"kind":"verdict","group":"shop/orders","at":"2025-11-21T{hour:02}:00:00.000Z",'
        f'"condition":"Ready","status":"True","reason":"R{hour}","message":""}}\n'
    )


@pytest.mark.slow("a rollup printed as a table")
@pytest.mark.usefixtures("spark")
def test_rollup_command_prints_readable_metrics(tmp_path: Path) -> None:
    a_file(tmp_path / "journal" / DAY / "08-a.jsonl", verdict_line(8))
    _, line = output_of("rollup", tmp_path / "journal").splitlines()[-2:]
    assert line.split() == ["shop/orders", "2025-11-21T08:00:00Z", "0", "0", "0", "unknown", "unknown", "True"]


OTHER_CHECKPOINT_FILES = pytest.mark.slow("each file of a checkpoint, damaged")


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    "damaged",
    [
        "offsets/0",
        *(pytest.param(file, marks=OTHER_CHECKPOINT_FILES) for file in ("metadata", "commits/0", "sources/0/0")),
    ],
)
def test_ingest_command_reports_a_damaged_checkpoint(tmp_path: Path, damaged: str) -> None:
    _, lake, command = lake_with_pending_hour(tmp_path)
    path = lake / "_checkpoint" / damaged
    path.write_text("nonsense")
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    error = error_of(*command)
    assert re.match(
        rf"The lake {lake} cannot be continued: .*; if its _checkpoint is damaged, or the lake was moved", error
    )
    assert "Query" not in error


def test_lake_without_inbox_or_checkpoint_is_rejected_and_keeps_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    _, lake, command = lake_with_pending_hour(tmp_path)
    (lake / "_inbox").rename(tmp_path / "_inbox")
    assert error_of(*command) == f"{lake} has no _inbox any more, so the ingested files are unknown; recreate the lake"
    (tmp_path / "_inbox").rename(lake / "_inbox")
    shutil.rmtree(lake / "_checkpoint")
    error = error_of(*command)
    assert error == f"{lake} has tables, but no _checkpoint, so the ingested lines are unknown; recreate the lake"
    assert spark.read.parquet(str(lake / "verdict")).count() == 1


@pytest.mark.usefixtures("spark")
@pytest.mark.slow("a lake of the other format")
def test_lake_of_the_other_format_or_delta_without_its_package_is_rejected(tmp_path: Path) -> None:
    _, lake, command = lake_with_pending_hour(tmp_path)
    error = error_of(*command[:-1], tmp_path / "another", "--format", "delta")
    assert error.startswith("Delta is not on Spark's class path; give spark-submit ")
    (lake / "verdict" / "_delta_log").mkdir()
    error = error_of(*command)
    assert error == f"{lake} is a lake of the other format; use --format of that lake, or choose another folder"


# Journals with invalid content.

UNREADABLE = pytest.mark.slow("journals of a later schema or with impossible times, through three commands")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"schema":1,"kind":"verd', "The line is incomplete, or not a journal record"),
        pytest.param(
            verdict_line(8).replace('"schema":1', '"schema":2'),
            "The record has schema 2; this version reads 1",
            marks=UNREADABLE,
        ),
        pytest.param(verdict_line(8).replace("2025-11-21T", "9999-99-99T"), ".*", marks=UNREADABLE),
    ],
)
def test_journal_without_a_readable_record_is_rejected(
    outputs: CommandOutputs, tmp_path: Path, line: str, reason: str
) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    a_file(journal / DAY / "08-a.jsonl", line)
    options = ["--policies", outputs.policy, "--to", tmp_path / "to"]
    error = rf"{journal} has no record that this version can read; one line was rejected because: {reason}"
    assert re.match(error, error_of("simulate", journal, *options))
    rows_by_table = json.loads(output_of("ingest", journal, "--all", "--to", lake, "-o", "json"))
    assert {kind: rows for kind, rows in rows_by_table.items() if rows} == {"quarantine": 1}
    assert re.match(error.replace(str(journal), str(lake)), error_of("recommend", lake, *options))
    assert not (tmp_path / "to").exists()


def change_time(line: bytes, hour: str) -> bytes:
    return line.replace(b'"at":"2025-11-21T01', f'"at":"{hour}'.encode())


@pytest.mark.slow("clocks that jump, up to 1970 and 9999, and a missing hour, from the journal to the simulation")
@pytest.mark.parametrize("jump_to", ["2025-11-20T19", "1970-01-01T01", "9999-12-31T23", None])
def test_ingest_command_keeps_every_line_after_clock_jumps_or_missing_hours(
    outputs: CommandOutputs, tmp_path: Path, jump_to: str | None
) -> None:
    journal = tmp_path / "journal"
    shutil.copytree(outputs.journal, journal)
    [path] = journal.glob(f"{DAY}/01-*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    if jump_to is not None:
        day, _, hour = jump_to.partition("T")
        changed_lines = b"".join(change_time(line, jump_to) for line in lines)
        a_file(journal / f"date={day}" / f"{hour}-a.jsonl", changed_lines.decode())
    expected_lines = {line for path in journal.glob("date=*/*.jsonl") for line in path.read_bytes().splitlines()}
    rows_by_table = json.loads(output_of("ingest", journal, "--all", "--to", tmp_path / "lake", "-o", "json"))
    impossible = jump_to is not None and not jump_to.startswith("2025")
    assert (sum(rows_by_table.values()), rows_by_table["quarantine"]) == (
        len(expected_lines),
        len(lines) if impossible else 0,
    )
    options = ["--policies", outputs.policy, "--to", tmp_path / "to", "-o", "json"]
    rows = json.loads(output_of("simulate", tmp_path / "lake", *options))
    assert [(row["policy"], row["groups"]) for row in rows] == [("recorded", GROUPS), ("steady", GROUPS)]


def test_pipeline_command_reports_missing_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_file(tmp_path / DAY / "08-a.jsonl", verdict_line(8))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    error = error_of("rollup", tmp_path)
    assert error == (f"Spark needs Java, but JAVA_HOME ({tmp_path}) has none: correct it, or unset it")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    error = error_of("rollup", tmp_path)
    assert error == "Spark needs Java, but no java command was found: install Java 17 or later, or set JAVA_HOME"
