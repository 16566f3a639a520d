"""The commands of `rota pipeline`: one complete run, and their errors for invalid input."""

import gzip
import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from pipeline.lake_folders import ingest, verdict_line, write_file, write_segment
from rota.cli import main
from rota.pipeline.ingest.extent import first_day
from rota.pipeline.lake.tables import Lake
from rota.records import journal_record

DAY = "date=2025-11-21"
STEADY = "kind: RebalancePolicy\nmetadata: {name: steady}\nspec: {strategy: Sticky}\n"
GROUPS, HOURS = 2, 3
NOTE = re.compile(r"rota: (reading|published) snapshot \d+ of .*\n|rota: \d+ new segments? of .*\n")


def rota(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["pipeline", *map(str, arguments)])


def output_of(*arguments: object) -> str:
    result = rota(*arguments)
    assert (result.exit_code, NOTE.sub("", result.stderr)) == (0, ""), result.exception
    return result.stdout


def error_of(*arguments: object) -> str:
    """Return the one sentence of a command's error."""
    result = rota(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, "")
    error = NOTE.sub("", result.stderr)
    assert error.startswith("rota: ")
    assert error.count("\n") == 1
    return error.removeprefix("rota: ").rstrip()


def mart_rows(lake: Path, name: str, snapshot: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a mart in a snapshot, read without Spark."""
    opened = Lake(str(lake))
    rows: list[dict[str, Any]] = (
        opened.table(f"marts/{name}").to_arrow(opened.snapshot(snapshot).version(f"marts/{name}")).to_pylist()
    )
    return rows


class CommandOutputs(NamedTuple):
    """The outputs of a sequence of commands."""

    lake: Path
    policy: Path
    printed: dict[str, str]


@pytest.fixture(scope="module")
def outputs(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> CommandOutputs:
    assert spark.version  # the commands take its session
    folder = tmp_path_factory.mktemp("outputs")
    policy = folder / "policy.yaml"
    policy.write_text(STEADY)
    outputs = CommandOutputs(folder / "lake", policy, {})
    size = ("--groups", GROUPS, "--hours", HOURS)
    outputs.printed["generate"] = output_of("generate", *size, "--to", outputs.lake, "-o", "json")
    outputs.printed["ingest"] = output_of("ingest", outputs.lake, "-o", "json")
    outputs.printed["simulate"] = output_of("simulate", outputs.lake, "--policies", policy, "-o", "json")
    return outputs


# A complete run.


def test_ingest_command_puts_each_generated_line_into_the_lake(outputs: CommandOutputs) -> None:
    generated = json.loads(outputs.printed["generate"])
    ingested = json.loads(outputs.printed["ingest"])
    segments = [gzip.decompress(path.read_bytes()) for path in outputs.lake.glob("journal/date=*/*.jsonl.gz")]
    lines = [line for segment in segments for line in segment.splitlines()]
    assert generated == {"groups": GROUPS, "records": len(lines)}
    assert sum(ingested.values()) == len(set(lines))
    assert not ingested["quarantine"]
    second_run = output_of("ingest", outputs.lake)
    assert second_run.split()[:2] == ["TABLE", "ROWS"]
    assert ["quarantine", "0"] in [line.split() for line in second_run.splitlines()]


def test_ingest_command_reads_a_journal_elsewhere(outputs: CommandOutputs, tmp_path: Path) -> None:
    rows = output_of("ingest", tmp_path / "lake", "--journal", outputs.lake / "journal", "-o", "json")
    assert rows == outputs.printed["ingest"]


def test_rollup_command_has_a_row_for_each_group_and_hour_and_prints_them(outputs: CommandOutputs) -> None:
    printed = json.loads(output_of("rollup", outputs.lake, "-o", "json"))
    rows = mart_rows(outputs.lake, "rollup")
    assert {(row["group"], row["hour"].hour) for row in rows} == {
        (group, hour) for group in {row["group"] for row in printed} for hour in range(HOURS)
    }
    assert len(printed) == len(rows) == GROUPS * HOURS


@pytest.mark.slow("a rollup of the last days equals the same days of a whole one")
def test_rollup_command_of_the_last_days_rewrites_only_these_and_equals_a_complete_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = three_days(tmp_path)
    ingest(spark, lake)
    output_of("rollup", lake)
    complete_rows = sorted(mart_rows(lake, "rollup"), key=lambda row: row["hour"])
    assert len({row["hour"] for row in complete_rows}) == 6
    printed = json.loads(output_of("rollup", lake, "--days", 2, "-o", "json"))
    assert len(printed) == 4
    assert sorted(mart_rows(lake, "rollup"), key=lambda row: row["hour"]) == complete_rows
    opened = Lake(str(lake))
    assert str(first_day(opened, opened.snapshot(), 1)) == "2025-11-23"


def three_days(lake: Path) -> Path:
    """Write a journal of a group without changes, and a segment with a date by a wrong clock."""
    share = {"uid": "u1", "standing": "Ready", "queues": {"orders": {"broker-a": "0-3"}}}
    rules: dict[str, Any] = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None}
    state = {"rules": {}, "members": {"a": share}, "releasing": [], "unowned": {}}
    for day, hour in product((21, 22, 23), ("00", "23")):
        time = f"2025-11-{day}T{hour}:00:00.000Z"
        record = journal_record("owners", "shop/orders", time, generation=1, **rules, **state)
        write_segment(lake, f"{hour}-a.jsonl.gz", json.dumps(record).encode(), day=f"date=2025-11-{day}")
    write_segment(lake, "00-a.jsonl.gz", day="date=2999-01-01")
    return lake


def test_timeline_command_without_violations_reports_none_and_writes_its_marts(outputs: CommandOutputs) -> None:
    assert output_of("timeline", outputs.lake) == "No violations of queue ownership\n"
    assert mart_rows(outputs.lake, "violations") == []
    assert len({row["group"] for row in mart_rows(outputs.lake, "intervals")}) == GROUPS


@pytest.mark.slow("rota pipeline timeline of a journal with two owners")
def test_timeline_command_with_two_owners_exits_with_1_and_prints_the_violation(
    spark: SparkSession, tmp_path: Path
) -> None:
    owner = {"standing": "Ready", "queues": {"orders": {"broker-a": "0"}}}
    rules: dict[str, Any] = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None}
    state = {"rules": {}, "members": {name: owner | {"uid": name} for name in ("a", "b")}, "releasing": []}
    record = journal_record(
        "owners", "shop/orders", "2025-11-21T08:00:00.000Z", generation=1, unowned={}, **rules, **state
    )
    write_segment(tmp_path, "08-a.jsonl.gz", json.dumps(record).encode(), day=DAY)
    ingest(spark, tmp_path)
    result = rota("timeline", tmp_path)
    assert (result.exit_code, NOTE.sub("", result.stderr)) == (1, "")
    assert "TwoOwners" in result.stdout


def test_simulate_command_prints_a_line_for_each_policy(outputs: CommandOutputs) -> None:
    rows = json.loads(outputs.printed["simulate"])
    assert [(row["policy"], row["groups"], row["problems"]) for row in rows] == [
        ("recorded", GROUPS, 0),
        ("steady", GROUPS, 0),
    ]
    assert len(mart_rows(outputs.lake, "results")) == 2 * GROUPS
    assert mart_rows(outputs.lake, "series")


def test_recommend_command_writes_marts_and_a_folder_with_report_and_manifests(
    outputs: CommandOutputs, tmp_path: Path
) -> None:
    target = tmp_path / "advice"
    lines = output_of("recommend", outputs.lake, "--policies", outputs.policy, "--to", target, "--top", 1).splitlines()
    assert re.match(rf"\d of {GROUPS} groups would benefit from another policy", lines[0])
    assert lines[1] == "Up to 3 h of each group's history was replayed; counts are per day"
    assert lines[-1] == f"The report is {target / 'report.html'}; the manifests are in {target / 'policies'}"
    assert (target / "report.html").read_text().lstrip().startswith("<!")
    assert len(mart_rows(outputs.lake, "chosen")) == GROUPS
    assert len(mart_rows(outputs.lake, "costs")) == 2 * GROUPS
    for path in (target / "policies").glob("*.yaml"):
        assert {body["kind"] for body in yaml.safe_load_all(path.read_text()) if body} == {"RebalancePolicy"}


# Snapshots.


def test_pipeline_command_says_which_snapshot_it_reads_and_publishes(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    ingest(spark, tmp_path)
    result = rota("rollup", tmp_path)
    reading, published = result.stderr.splitlines()
    assert re.fullmatch(rf"rota: reading snapshot 1 of {tmp_path}, published 20\S+Z", reading)
    assert published == f"rota: published snapshot 2 of {tmp_path}"
    write_segment(tmp_path, "09-a.jsonl.gz", verdict_line(2, 9))
    result = rota("ingest", tmp_path)
    note = f"rota: 1 new segment of {tmp_path}/journal; the newest snapshot of {tmp_path} is 3\n"
    assert (result.exit_code, result.stderr) == (0, note)


def test_rollup_command_of_an_older_snapshot_prints_it_and_writes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    for hour in (8, 9):
        write_segment(tmp_path, f"{hour:02}-a.jsonl.gz", verdict_line(1, hour))
        ingest(spark, tmp_path)
    lake = Lake(str(tmp_path))
    for option in (("--snapshot", 1), ("--as-of", f"{lake.snapshot(1).created_at:%Y-%m-%dT%H:%M:%S.%fZ}")):
        result = rota("rollup", tmp_path, *option, "-o", "json")
        assert [row["hour"] for row in json.loads(result.stdout)] == ["2026-11-21T08:00:00Z"]
        assert result.stderr.endswith(
            "rota: nothing is written to the lake: snapshot 1 is an older one; the marts are of the newest one, and "
            "stay as they are\n"
        )
    assert lake.snapshot().number == 2
    assert lake.table("marts/rollup").version() is None


def test_pipeline_command_rejects_a_snapshot_that_does_not_exist(outputs: CommandOutputs) -> None:
    assert re.match(rf"{outputs.lake} has no snapshot 99; it has 1", error_of("rollup", outputs.lake, "--snapshot", 99))
    error = error_of("rollup", outputs.lake, "--as-of", "2001-01-01T00:00:00Z")
    assert re.match(rf"{outputs.lake} has no snapshot as old as 2001-01-01T00:00:00\+00:00; ", error)
    for time in ("yesterday", "9999-12-31T23:59:59-10:00", "0001-01-01T00:00:00+10:00"):
        assert "is not a time with a zone; write it as " in error_of("rollup", outputs.lake, "--as-of", time)
    both = ("--snapshot", 1, "--as-of", "2001-01-01T00:00:00Z")
    assert error_of("rollup", outputs.lake, *both) == "--snapshot and --as-of both choose a snapshot; give one of them"


# Invalid input.


def a_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def options_of(command: str, outputs: CommandOutputs, tmp_path: Path) -> list[object]:
    """Return the options that a command needs."""
    policies = ["--policies", outputs.policy]
    return {"simulate": policies, "recommend": [*policies, "--to", tmp_path / "to"]}.get(command, [])


@pytest.mark.parametrize("command", ["rollup", "timeline", "simulate", "recommend", "ingest"])
@pytest.mark.parametrize("lake_kind", ["missing", "empty", "without segments"])
def test_pipeline_command_names_a_lake_that_holds_nothing_to_read(
    outputs: CommandOutputs, tmp_path: Path, command: str, lake_kind: str
) -> None:
    lake = tmp_path / "lake"
    if lake_kind != "missing":
        lake.mkdir()
    if lake_kind == "without segments":
        write_file(lake, "notes.txt", b"x")
    error = error_of(command, lake, *options_of(command, outputs, tmp_path))
    place = lake / "journal" if command == "ingest" else lake
    absent = "contains no segment of a journal, such as " if command == "ingest" else "has no snapshot yet; "
    assert error.startswith(f"{place} {absent if place.exists() else 'does not exist; '}")
    assert not (tmp_path / "to").exists()
    assert not (lake / "_rota").exists()


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (None, r"p\.yaml cannot be read: No such file or directory$"),
        ("{", r"p\.yaml is not valid YAML, line 1; give a file with RebalancePolicies$"),
        ("a: 2026-13-45", r"p\.yaml contains no RebalancePolicy; "),
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
    options = ["--to", tmp_path / "to"] if command == "recommend" else []
    assert re.search(pattern, error_of(command, outputs.lake, "--policies", path, *options))
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "w.yaml cannot be read: No such file or directory"),
        ("{", "w.yaml is not valid YAML; write lines such as moves: 1"),
        ("move: 1", "w.yaml names 'move', which is not a weight; choose from moves, pause, "),
        ("moves: -1", "w.yaml: moves is -1; give a number of at least 0, below 1e+12"),
    ],
)
def test_recommend_command_rejects_invalid_weights_with_a_sentence(
    outputs: CommandOutputs, tmp_path: Path, text: str | None, sentence: str
) -> None:
    path = tmp_path / "w.yaml" if text is None else a_file(tmp_path / "w.yaml", text)
    options = ["--policies", outputs.policy, "--to", tmp_path / "to", "--weights", path]
    assert sentence in error_of("recommend", outputs.lake, *options)


@pytest.mark.parametrize("command", ["ingest", "generate"])
def test_pipeline_command_rejects_a_lake_that_cannot_be_written(tmp_path: Path, command: str) -> None:
    file = a_file(tmp_path / "file", "mine")
    option = ["--to"] if command == "generate" else []
    problem = f"cannot be a folder, because {file} is a file; name another"
    assert error_of(command, *option, file) == f"The lake {file} {problem}"
    assert error_of(command, *option, file / "under") == f"The lake {file / 'under'} {problem}"
    assert error_of(command, *option, "").startswith("'' is neither a folder nor a URI; use s3://BUCKET/PREFIX, ")
    foreign = a_file(tmp_path / "home" / "thesis.txt", "mine")
    error = f"{foreign.parent} is not a lake, and contains other files: thesis.txt; name a folder of its own"
    assert error_of(command, *option, foreign.parent) == error
    assert file.read_text() == foreign.read_text() == "mine"


def test_generate_command_rejects_a_lake_that_has_a_journal(outputs: CommandOutputs) -> None:
    error = error_of("generate", "--groups", 1, "--to", outputs.lake)
    assert error == f"{outputs.lake}/journal is not empty; name another lake"


def test_recommend_command_rejects_a_folder_that_cannot_be_written_or_is_in_the_lake(
    outputs: CommandOutputs, tmp_path: Path
) -> None:
    command = ["recommend", outputs.lake, "--policies", outputs.policy, "--to"]
    file = a_file(tmp_path / "file", "mine")
    assert error_of(*command, file) == f"--to {file} cannot be a folder, because {file} is a file; name another"
    assert error_of(*command, "") == "--to is empty; name a folder"
    assert error_of(*command, "s3://bucket/to").startswith("--to s3://bucket/to is a URI, but ")
    for target in (outputs.lake, outputs.lake / "deep" / "er", outputs.lake / ".." / outputs.lake.name):
        assert re.match(r"--to .* is inside the lake .*; name a folder elsewhere$", error_of(*command, target))


@pytest.mark.parametrize("path", ["policies/steady.yaml", "report.html"])
def test_recommend_command_never_replaces_files_that_are_not_its_own(
    outputs: CommandOutputs, tmp_path: Path, path: str
) -> None:
    foreign_file = a_file(tmp_path / "to" / path, "mine")
    error = error_of("recommend", outputs.lake, "--policies", outputs.policy, "--to", tmp_path / "to")
    assert error == f"{foreign_file} would be replaced, but is not a file of this command; name another --to"
    assert [path for path in (tmp_path / "to").rglob("*") if path.is_file()] == [foreign_file]


@pytest.mark.parametrize("command", ["ingest", "generate"])
def test_pipeline_command_reports_an_unwritable_lake_with_a_sentence(outputs: CommandOutputs, command: str) -> None:
    option = ["--groups", 1, "--hours", 1, "--to"] if command == "generate" else ["--journal", outputs.lake / "journal"]
    error = error_of(command, *option, "/proc/nowhere")  # even root cannot write there
    assert "/proc/nowhere" in error
    assert "cannot be" in error


def test_pipeline_command_says_how_to_recreate_a_lake_of_the_former_layout(
    outputs: CommandOutputs, tmp_path: Path
) -> None:
    (tmp_path / "verdict" / "date=2025-11-21").mkdir(parents=True)
    for command in ("ingest", "rollup", "simulate"):
        error = error_of(command, tmp_path, *options_of(command, outputs, tmp_path))
        assert error.startswith(f"{tmp_path} is a lake of an earlier version of Rota (it has verdict/); ")


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("ftp://host/lake", "'ftp://host/lake' has the unknown scheme ftp; use s3://BUCKET/PREFIX, "),
        ("bucket.s3.amazonaws.com/lake", "'bucket.s3.amazonaws.com/lake' has no scheme; use s3://BUCKET/PREFIX, "),
    ],
)
def test_pipeline_command_rejects_a_uri_that_names_no_lake(uri: str, sentence: str) -> None:
    for arguments in (["ingest", uri], ["rollup", uri], ["generate", "--to", uri]):
        assert error_of(*arguments).startswith(sentence)


# Damaged lakes.


def copy_lake(outputs: CommandOutputs, tmp_path: Path) -> tuple[Path, list[object]]:
    """Return a copy of the lake to damage, and a command that reads it."""
    lake = tmp_path / "lake"
    shutil.copytree(outputs.lake, lake)
    return lake, ["simulate", lake, "--policies", outputs.policy]


def owners_files(lake: Path) -> list[Path]:
    return list((lake / "lake" / "owners").rglob("*.parquet"))


def test_lake_table_with_a_truncated_or_missing_file_is_named(outputs: CommandOutputs, tmp_path: Path) -> None:
    lake, command = copy_lake(outputs, tmp_path)
    for path in owners_files(lake):
        path.write_bytes(path.read_bytes()[:100])
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    assert re.match(rf"{lake}/lake/owners/.*\.parquet cannot be read: the file is damaged", error_of(*command))
    for path in owners_files(lake):
        path.unlink()
    assert re.search(r"lake/owners/.*\.parquet is missing; restore it, ", error_of(*command))


def test_lake_table_with_corrupt_data_is_named(outputs: CommandOutputs, tmp_path: Path) -> None:
    lake, command = copy_lake(outputs, tmp_path)
    for path in owners_files(lake):
        content = path.read_bytes()
        # The footer, which describes the content, stays intact.
        path.write_bytes(content[:4] + bytes(60) + content[64:])
    error = error_of(*command)
    assert re.match(rf"{lake}/lake/owners/.*\.parquet cannot be read: the file is damaged", error)


def test_lake_table_with_a_damaged_log_is_named(outputs: CommandOutputs, tmp_path: Path) -> None:
    lake, command = copy_lake(outputs, tmp_path)
    (lake / "lake" / "owners" / "_delta_log" / f"{0:020}.json").write_text("nonsense")
    assert "lake/owners" in error_of(*command)


@pytest.mark.slow("a rollup printed as a table")
def test_rollup_command_prints_readable_metrics(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", verdict_line(1))
    ingest(spark, tmp_path)
    _, line = output_of("rollup", tmp_path).splitlines()[-2:]
    assert line.split() == ["shop/orders", "2026-11-21T08:00:00Z", "0", "0", "0", "unknown", "unknown", "True"]


@pytest.mark.slow("rollups and violations of more rows than are printed")
def test_rollup_and_timeline_commands_print_the_first_rows_and_where_the_others_are(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a", "b", "c")
    owner = {"standing": "Ready", "queues": {"orders": {"broker-a": "0"}}}
    rules: dict[str, Any] = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None}
    state = {"rules": {}, "members": {name: owner | {"uid": name} for name in names}, "releasing": [], "unowned": {}}
    for hour in (8, 9):
        at = f"2025-11-21T{hour:02}:00:00.000Z"
        records = [journal_record("owners", f"shop/{name}", at, generation=1, **rules, **state) for name in names]
        lines = [f"{json.dumps(record)}\n".encode() for record in records]
        write_segment(tmp_path, f"{hour:02}-a.jsonl.gz", *lines, day=DAY)
    ingest(spark, tmp_path)
    monkeypatch.setattr("rota.cli.commands.pipeline.rollup.MAX_TABLE_ROWS", 2)
    others = f"`rota history GROUP --lake {tmp_path}` prints those of a group, the table marts/rollup has all"
    _, first, second, last = output_of("rollup", tmp_path).splitlines()
    assert [line.split()[:2] for line in (first, second)] == [[f"shop/{name}", "2025-11-21T09:00:00Z"] for name in "ab"]
    assert last == f"And 4 more rows: {others}"
    assert rota("rollup", tmp_path, "--snapshot", 1).stdout.endswith("\nAnd 4 more rows: -o json prints all\n")
    assert len(json.loads(output_of("rollup", tmp_path, "-o", "json"))) == len(mart_rows(tmp_path, "rollup")) == 6
    result = rota("timeline", tmp_path)
    assert result.exit_code == 1
    assert [line.split()[4] for line in result.stdout.splitlines()[1:-1]] == ["TwoOwners"] * 2
    assert re.fullmatch(r"And \d+ more rows: the table marts/violations has all", result.stdout.splitlines()[-1])

    monkeypatch.setattr("rota.cli.commands.pipeline.rollup.MAX_COLLECTED_ROWS", 3)
    assert output_of("rollup", tmp_path).splitlines()[-1] == f"And at least 2 more rows: {others}"
    error = "marts/rollup has more than 3 rows, too many to print; read the table"
    assert error_of("rollup", tmp_path, "-o", "json") == error
    assert rota("timeline", tmp_path).exit_code == 1


# Journals with invalid content.

UNREADABLE = pytest.mark.slow("journals of a later schema or with impossible times, through three commands")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"schema":1,"kind":"verd', "The line is incomplete, or not a journal record"),
        pytest.param(
            verdict_line(8).replace(b'"schema":1', b'"schema":2'),
            "The record has schema 2; this version reads 1",
            marks=UNREADABLE,
        ),
        pytest.param(verdict_line(8).replace(b"2026-11-21T", b"9999-99-99T"), ".*", marks=UNREADABLE),
    ],
)
def test_journal_without_a_readable_record_is_rejected(
    outputs: CommandOutputs, tmp_path: Path, line: bytes, reason: str
) -> None:
    write_segment(tmp_path, "08-a.jsonl.gz", line)
    rows_by_table = json.loads(output_of("ingest", tmp_path, "-o", "json"))
    assert {kind: rows for kind, rows in rows_by_table.items() if rows} == {"quarantine": 1}
    error = rf"{tmp_path} has no record that this version can read; one line was rejected because: {reason}"
    for command in ("simulate", "rollup"):
        assert re.match(error, error_of(command, tmp_path, *options_of(command, outputs, tmp_path)))


def change_time(line: bytes, hour: str) -> bytes:
    return line.replace(b'"at":"2025-11-21T01', f'"at":"{hour}'.encode())


@pytest.mark.slow("clocks that jump, up to 1970 and 9999, and a missing hour, from the journal to the simulation")
@pytest.mark.parametrize("jump_to", ["2025-11-20T19", "1970-01-01T01", "9999-12-31T23", None])
def test_ingest_command_keeps_every_line_after_clock_jumps_or_missing_hours(
    outputs: CommandOutputs, tmp_path: Path, jump_to: str | None
) -> None:
    shutil.copytree(outputs.lake / "journal", tmp_path / "journal")
    [path] = tmp_path.glob(f"journal/{DAY}/01-*.jsonl.gz")
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.unlink()
    if jump_to is not None:
        day, _, hour = jump_to.partition("T")
        changed_lines = [change_time(line, jump_to) for line in lines]
        write_segment(tmp_path, f"{hour}-a.jsonl.gz", *changed_lines, day=f"date={day}")
    segments = [gzip.decompress(path.read_bytes()) for path in tmp_path.glob("journal/date=*/*.jsonl.gz")]
    expected_lines = {line for segment in segments for line in segment.splitlines()}
    rows_by_table = json.loads(output_of("ingest", tmp_path, "-o", "json"))
    impossible = jump_to is not None and not jump_to.startswith("2025")
    assert (sum(rows_by_table.values()), rows_by_table["quarantine"]) == (
        len(expected_lines),
        len(lines) if impossible else 0,
    )
    rows = json.loads(output_of("simulate", tmp_path, "--policies", outputs.policy, "-o", "json"))
    assert [(row["policy"], row["groups"]) for row in rows] == [("recorded", GROUPS), ("steady", GROUPS)]


def test_ingest_command_reports_missing_java_and_pyspark_in_one_sentence(
    outputs: CommandOutputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["rollup", outputs.lake]
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    error = f"Spark needs Java, but JAVA_HOME ({tmp_path}) has none: correct it, or unset it"
    assert error_of(*command) == error
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    error = "Spark needs Java, but no java command was found: install Java 17 or later, or set JAVA_HOME"
    assert error_of(*command) == error
    monkeypatch.setitem(__import__("sys").modules, "pyspark.sql", None)
    assert error_of(*command).endswith(", which is not installed: pip install 'rota-operator[pipeline]'")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("ROTA_SPARK_CORES", "all", "ROTA_SPARK_CORES (all) is no number of cores; set it to a number such as 4"),
        ("ROTA_SPARK_CORES", "0", "ROTA_SPARK_CORES (0) is no number of cores; set it to a number such as 4"),
        ("ROTA_SPARK_MEMORY", "lots", "ROTA_SPARK_MEMORY (lots) is no size of 512m or more; set it to one such as 4g"),
        ("ROTA_SPARK_MEMORY", "511M", "ROTA_SPARK_MEMORY (511M) is no size of 512m or more; set it to one such as 4g"),
    ],
)
def test_pipeline_command_rejects_a_size_of_spark_that_it_cannot_start_with(
    outputs: CommandOutputs, monkeypatch: pytest.MonkeyPatch, name: str, value: str, error: str
) -> None:
    monkeypatch.setenv(name, value)
    assert error_of("rollup", outputs.lake) == f"{error}, or unset it"
