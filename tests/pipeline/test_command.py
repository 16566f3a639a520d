"""`rota pipeline` as a user meets it: the whole way, and what it says to what cannot be meant."""

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


def rota(*words: object) -> Result:
    return CliRunner().invoke(main, ["pipeline", *map(str, words)])


def ok(*words: object) -> str:
    ran = rota(*words)
    assert (ran.exit_code, ran.stderr) == (0, ""), ran.exception
    return ran.stdout


def complaint(*words: object) -> str:
    """Return the one sentence that a command ends with."""
    ran = rota(*words)
    assert isinstance(ran.exception, SystemExit), ran.exception
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.startswith("rota: ")
    assert ran.stderr.count("\n") == 1
    return ran.stderr.removeprefix("rota: ").rstrip()


class CommandOutputs(NamedTuple):
    """What commands left behind, one after the other."""

    journal: Path
    lake: Path
    simulated: Path
    policy: Path
    told: dict[str, str]


@pytest.fixture(scope="module")
def world(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> CommandOutputs:
    assert spark.version  # whose session the commands take
    at = tmp_path_factory.mktemp("world")
    policy = at / "policy.yaml"
    policy.write_text(STEADY)
    it = CommandOutputs(at / "journal", at / "lake", at / "simulated", policy, {})
    few = ("--groups", GROUPS, "--hours", HOURS)
    it.told["generate"] = ok("generate", *few, "--to", it.journal, "-o", "json")
    it.told["ingest"] = ok("ingest", it.journal, "--all", "--to", it.lake, "-o", "json")
    it.told["simulate"] = ok("simulate", it.lake, "--policies", policy, "--to", it.simulated, "-o", "json")
    return it


# The whole way.


def test_ingest_command_puts_each_generated_line_into_the_lake(world: CommandOutputs) -> None:
    made, taken = json.loads(world.told["generate"]), json.loads(world.told["ingest"])
    lines = [line for path in world.journal.glob("date=*/*.jsonl") for line in path.read_bytes().splitlines()]
    assert made == {"groups": GROUPS, "records": len(lines)}
    assert sum(taken.values()) == len(set(lines))
    assert not taken["quarantine"]
    again = ok("ingest", world.journal, "--all", "--to", world.lake)
    assert again.split()[:2] == ["TABLE", "ROWS"]
    assert ["quarantine", "0"] in [line.split() for line in again.splitlines()]


def test_rollup_command_has_a_row_for_each_group_and_hour_and_overwrites_its_folder(
    world: CommandOutputs, spark: SparkSession, tmp_path: Path
) -> None:
    folder = tmp_path / "rollup"
    spark.range(3).write.parquet(str(folder))  # what the same command left there an hour ago
    assert not ok("rollup", world.lake, "--to", folder)
    rows = spark.read.parquet(str(folder)).select("group", "hour").collect()
    assert len({row["group"] for row in rows}) == GROUPS
    assert {row["hour"].hour for row in rows} == set(range(HOURS))


@pytest.mark.slow("a rollup of the last days equals the same days of a whole one")
def test_rollup_command_of_the_last_days_rewrites_these_only_and_equals_the_whole(
    spark: SparkSession, tmp_path: Path
) -> None:
    source, folder = three_days(tmp_path / "journal"), tmp_path / "rollup"
    ok("rollup", source, "--to", folder)
    whole = by_hour(spark, folder)
    assert len({row["hour"] for row in whole}) == 6
    old = next(folder.glob("date=2025-11-21/*.parquet"))
    ok("rollup", source, "--to", folder, "--days", 2)
    assert old.exists()
    assert by_hour(spark, folder) == whole
    assert read_facts(spark, str(source)).owners.count() == 6
    assert read_facts(spark, str(source), first_day(str(source), 1)).owners.count() == 2


def three_days(journal: Path) -> Path:
    """Write a journal of a group that stands still, and a folder that a wrong clock has made."""
    share = {"uid": "u1", "standing": "Ready", "queues": {"orders": {"broker-a": "0-3"}}}
    rules: dict[str, Any] = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None}
    whole = {"rules": {}, "members": {"a": share}, "releasing": [], "unowned": {}}
    for day, hour in product((21, 22, 23), ("00", "23")):
        at = f"2025-11-{day}T{hour}:00:00.000Z"
        told = journal_record("owners", "shop/orders", at, generation=1, **rules, **whole)
        a_file(journal / f"date=2025-11-{day}" / f"{hour}-a.jsonl", json.dumps(told) + "\n")
    (journal / "date=2999-01-01").mkdir()
    return journal


def by_hour(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in spark.read.parquet(str(folder)).orderBy("hour").collect()]


def test_timeline_command_without_violations_says_so_and_writes_its_tables(
    world: CommandOutputs, spark: SparkSession, tmp_path: Path
) -> None:
    assert ok("timeline", world.lake, "--to", tmp_path / "who") == "No violations of queue ownership\n"
    assert spark.read.parquet(str(tmp_path / "who" / "violations")).count() == 0
    assert spark.read.parquet(str(tmp_path / "who" / "intervals")).select("group").distinct().count() == GROUPS


@pytest.mark.usefixtures("spark")
@pytest.mark.slow("rota pipeline timeline of a journal with two owners")
def test_timeline_command_with_two_owners_exits_with_1_and_prints_the_violation(tmp_path: Path) -> None:
    owner = {"standing": "Ready", "queues": {"orders": {"broker-a": "0"}}}
    rules: dict[str, Any] = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None}
    whole = {"rules": {}, "members": {name: owner | {"uid": name} for name in ("a", "b")}, "releasing": []}
    told = journal_record(
        "owners", "shop/orders", "2025-11-21T08:00:00.000Z", generation=1, unowned={}, **rules, **whole
    )
    a_file(tmp_path / "journal" / DAY / "08-a.jsonl", json.dumps(told) + "\n")
    ran = rota("timeline", tmp_path / "journal")
    assert (ran.exit_code, ran.stderr) == (1, "")
    assert "TwoOwners" in ran.stdout


def test_simulate_command_prints_a_line_for_each_policy(world: CommandOutputs, spark: SparkSession) -> None:
    rows = json.loads(world.told["simulate"])
    assert [(row["policy"], row["groups"], row["problems"]) for row in rows] == [
        ("recorded", GROUPS, 0),
        ("steady", GROUPS, 0),
    ]
    assert spark.read.parquet(str(world.simulated / "results")).count() == 2 * GROUPS
    assert spark.read.parquet(str(world.simulated / "series")).count() > 0


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("journal", marks=pytest.mark.slow("recommendations from a journal, without a lake")),
        pytest.param("lake", marks=pytest.mark.slow("recommendations from a lake, simulated in the same command")),
        "simulated",
    ],
)
def test_recommend_command_accepts_a_journal_a_lake_or_a_simulation(
    world: CommandOutputs, spark: SparkSession, tmp_path: Path, source: str
) -> None:
    to = tmp_path / "advice"
    a_file(to / "results" / "part-0.parquet", "of an earlier run")
    a_file(to / "series" / "part-0.parquet", "of an earlier run")
    said = ok("recommend", getattr(world, source), "--policies", world.policy, "--to", to, "--top", 1).splitlines()
    assert re.match(rf"\d of {GROUPS} groups would benefit from another policy", said[0])
    assert said[1] == "Up to 3 h of each group's history was replayed; counts are per day"
    assert said[-1] == f"The report is {to / 'report.html'}; the manifests are in {to / 'policies'}"
    assert (to / "report.html").read_text().lstrip().startswith("<!")
    assert spark.read.parquet(str(to / "chosen")).count() == GROUPS
    assert spark.read.parquet(str(to / "costs")).count() == 2 * GROUPS
    assert (to / "results").is_dir() == (to / "series").is_dir() == (source != "simulated")
    for path in (to / "policies").glob("*.yaml"):
        assert {body["kind"] for body in yaml.safe_load_all(path.read_text()) if body} == {"RebalancePolicy"}


# What cannot be meant.


def a_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("command", ["rollup", "timeline", "simulate", "recommend", "ingest"])
@pytest.mark.parametrize("made", ["nothing", "a file", "empty", "neither"])
def test_pipeline_command_names_a_source_that_holds_no_journal(
    world: CommandOutputs, tmp_path: Path, command: str, made: str
) -> None:
    source = tmp_path / "source"
    if made == "a file":
        source.touch()
    elif made != "nothing":
        source.mkdir()
    if made == "neither":
        a_file(source / "date=2025-11-21" / "notes.txt", "x")
    more = ["--policies", world.policy] if command in {"simulate", "recommend"} else []
    told = complaint(command, source, *more, "--to", tmp_path / "to")
    assert re.match(rf"{source} (is not a folder; give a journal's, or a lake|contains no journal)", told)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("text", "words"),
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
    world: CommandOutputs, tmp_path: Path, command: str, text: str | None, words: str
) -> None:
    path = tmp_path / "p.yaml" if text is None else a_file(tmp_path / "p.yaml", text)
    assert re.search(words, complaint(command, world.lake, "--policies", path, "--to", tmp_path / "to"))
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "w.yaml cannot be read: No such file or directory"),
        ("{", "w.yaml is not valid YAML; write lines such as moves: 1"),
        ("move: 1", "w.yaml names 'move', which is not a weight; choose from moves, pause, "),
        ("moves: -1", "w.yaml: moves is -1; give a number of at least 0"),
    ],
)
def test_recommend_command_rejects_invalid_weights_with_a_sentence(
    world: CommandOutputs, tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "w.yaml" if text is None else a_file(tmp_path / "w.yaml", text)
    given = ["--policies", world.policy, "--to", tmp_path / "to", "--weights", path]
    assert words in complaint("recommend", world.simulated, *given)


def reading(world: CommandOutputs, command: str) -> list[object]:
    """Return a command that would do, up to its --to."""
    if command == "generate":
        return [command, "--groups", 1, "--hours", 1, "--to"]
    more: dict[str, list[object]] = {"ingest": ["--all"], "rollup": [], "timeline": []}
    source = world.journal if command == "ingest" else world.lake
    return [command, source, *more.get(command, ["--policies", world.policy]), "--to"]


WRITERS = ["ingest", "rollup", "timeline", "simulate", "recommend", "generate"]


@pytest.mark.parametrize("command", WRITERS)
def test_pipeline_command_rejects_a_target_that_is_a_file_or_empty(
    world: CommandOutputs, tmp_path: Path, command: str
) -> None:
    file = a_file(tmp_path / "file", "mine")
    asked = reading(world, command)
    words = f"cannot be a folder, because {file} is a file; name another"
    assert complaint(*asked, file) == f"--to {file} {words}"
    assert complaint(*asked, file / "under") == f"--to {file / 'under'} {words}"
    assert complaint(*asked, "") == "--to is empty; name a folder"
    assert file.read_text() == "mine"


@pytest.mark.parametrize("command", ["ingest", "rollup", "timeline", "simulate", "recommend"])
def test_pipeline_command_rejects_a_target_within_its_source(world: CommandOutputs, command: str) -> None:
    *asked, _ = reading(world, command)
    source = Path(str(asked[1]))
    before = sorted(source.rglob("*"))
    for to in (source, source / "deep" / "er", source / ".." / source.name):
        assert re.match(r"--to .* is inside the source .*; name a folder elsewhere$", complaint(*asked, "--to", to))
    assert sorted(source.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "inside"),
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
    world: CommandOutputs, tmp_path: Path, command: str, inside: str
) -> None:
    mine = a_file(tmp_path / "to" / inside, "mine")
    told = complaint(*reading(world, command), tmp_path / "to")
    words = r"other files: .*; name|not a file of this command; name|is a lake or a journal; name|is not empty; give"
    assert re.search(words, told)
    assert mine.read_text() == "mine"
    assert [path for path in (tmp_path / "to").rglob("*") if path.is_file()] == [mine]


@pytest.mark.parametrize("command", ["ingest", "simulate", "generate"])
def test_pipeline_command_reports_an_unwritable_target_with_a_sentence(world: CommandOutputs, command: str) -> None:
    told = complaint(*reading(world, command), "/proc/nowhere")  # root may write everywhere but there
    assert "/proc/nowhere" in told
    assert "cannot be" in told


# What is damaged.


def copied(world: CommandOutputs, tmp_path: Path) -> tuple[Path, list[object]]:
    """Return a lake to damage, and a command that reads it."""
    lake = tmp_path / "lake"
    shutil.copytree(world.lake, lake)
    return lake, ["simulate", lake, "--policies", world.policy, "--to", tmp_path / "to"]


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    pq.write_table(change(pq.ParquetFile(path).read()), path)
    path.with_name(f".{path.name}.crc").unlink()


def test_lake_table_that_is_truncated_or_lacks_a_column_is_named(world: CommandOutputs, tmp_path: Path) -> None:
    lake, asked = copied(world, tmp_path)
    for path in (lake / "owners").rglob("*.parquet"):
        rewritten(path, lambda table: table.drop_columns(["generation"]))
    told = complaint(*asked)
    assert re.match(rf"{lake}/owners/.*\.parquet has no column generation, which this version needs; ", told)
    for path in (lake / "owners").rglob("*.parquet"):
        rewritten_or_cut = path.read_bytes()[:100]
        path.write_bytes(rewritten_or_cut)
    assert re.match(rf"{lake}/owners/.*\.parquet cannot be read: it is damaged, or not Parquet; ", complaint(*asked))


def test_lake_table_with_corrupt_data_is_named(world: CommandOutputs, tmp_path: Path) -> None:
    lake, asked = copied(world, tmp_path)
    for path in (lake / "owners").rglob("*.parquet"):
        whole = path.read_bytes()
        path.write_bytes(whole[:4] + bytes(60) + whole[64:])  # its end, which says what is in it, is as it was
    told = complaint(*asked)
    assert re.match(rf"{lake}/owners/.*\.parquet cannot be read: the file is damaged or has another format", told)


def test_lake_with_a_wrong_column_type_or_an_invalid_day_folder_is_reported(
    world: CommandOutputs, tmp_path: Path
) -> None:
    lake, asked = copied(world, tmp_path)
    [day] = (lake / "owners").glob("date=*")
    day.rename(day.with_name("date=tomorrow"))
    assert re.match(r"A partition folder has an invalid date: .*'tomorrow'.*; recreate the lake$", complaint(*asked))
    day.with_name("date=tomorrow").rename(day)
    for path in day.rglob("*.parquet"):
        rewritten(path, lambda table: table.set_column(0, "group", pa.array([1] * len(table))))
    assert re.match(rf"{lake}/owners/.*\.parquet cannot be read: ", complaint(*asked))


def test_recommend_command_rejects_an_incomplete_simulation(world: CommandOutputs, tmp_path: Path) -> None:
    folder = tmp_path / "simulated"
    shutil.copytree(world.simulated, folder)
    asked = ["recommend", folder, "--policies", world.policy, "--to", tmp_path / "to"]
    (folder / "series" / "_SUCCESS").unlink()
    words = f"{folder} contains no complete simulation; run `rota pipeline simulate` again"
    assert complaint(*asked) == words
    shutil.rmtree(folder / "results")
    (folder / "results").mkdir()
    assert complaint(*asked) == words


def test_recommend_command_rejects_a_policy_that_was_edited_or_not_simulated(
    world: CommandOutputs, tmp_path: Path
) -> None:
    """Or old figures would be told of a policy that was edited since, and of another nothing would be."""
    edited = a_file(tmp_path / "edited.yaml", STEADY.replace("Sticky", "Averagely"))
    other = a_file(tmp_path / "other.yaml", STEADY.replace("steady", "other"))
    for path, name in ((edited, "steady"), (other, "other")):
        told = complaint("recommend", world.simulated, "--policies", path, "--to", tmp_path / "to")
        assert told == f"Policy {name} was not simulated, or has changed since; simulate again"


def a_lake(tmp_path: Path) -> tuple[Path, Path, list[object]]:
    """Return a journal with an hour that is new to its lake, the lake, and the command."""
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    asked = ["ingest", journal, "--all", "--to", lake]
    a_file(journal / DAY / "08-a.jsonl", verdict(8))
    ok(*asked)
    a_file(journal / DAY / "09-a.jsonl", verdict(9))
    return journal, lake, asked


def verdict(hour: int) -> str:
    return (
        f'{{"schema":1,"kind":"verdict","group":"shop/orders","at":"2025-11-21T{hour:02}:00:00.000Z",'
        f'"condition":"Ready","status":"True","reason":"R{hour}","message":""}}\n'
    )


@pytest.mark.slow("a rollup printed for people")
@pytest.mark.usefixtures("spark")
def test_rollup_command_prints_readable_metrics(tmp_path: Path) -> None:
    a_file(tmp_path / "journal" / DAY / "08-a.jsonl", verdict(8))
    _, told = ok("rollup", tmp_path / "journal").splitlines()[-2:]
    assert told.split() == ["shop/orders", "2025-11-21T08:00:00Z", "0", "0", "0", "unknown", "unknown", "True"]


OTHER_CHECKPOINT_FILES = pytest.mark.slow("each file of a checkpoint, damaged")


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    "damaged",
    ["offsets/0", *(pytest.param(it, marks=OTHER_CHECKPOINT_FILES) for it in ("metadata", "commits/0", "sources/0/0"))],
)
def test_ingest_command_reports_a_damaged_checkpoint(tmp_path: Path, damaged: str) -> None:
    _, lake, asked = a_lake(tmp_path)
    path = lake / "_checkpoint" / damaged
    path.write_text("nonsense")
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    told = complaint(*asked)
    assert re.match(
        rf"The lake {lake} cannot be continued: .*; if its _checkpoint is damaged, or the lake was moved", told
    )
    assert "Query" not in told


def test_lake_without_inbox_or_checkpoint_is_rejected_and_keeps_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    _, lake, asked = a_lake(tmp_path)
    (lake / "_inbox").rename(tmp_path / "_inbox")
    assert complaint(*asked) == f"{lake} has no _inbox any more, so the ingested files are unknown; recreate the lake"
    (tmp_path / "_inbox").rename(lake / "_inbox")
    shutil.rmtree(lake / "_checkpoint")
    told = complaint(*asked)
    assert told == f"{lake} has tables, but no _checkpoint, so the ingested lines are unknown; recreate the lake"
    assert spark.read.parquet(str(lake / "verdict")).count() == 1


@pytest.mark.usefixtures("spark")
@pytest.mark.slow("a lake of the other format")
def test_lake_of_the_other_format_or_delta_without_its_package_is_rejected(tmp_path: Path) -> None:
    _, lake, asked = a_lake(tmp_path)
    told = complaint(*asked[:-1], tmp_path / "another", "--format", "delta")
    assert told.startswith("Delta is not on Spark's class path; give spark-submit ")
    (lake / "verdict" / "_delta_log").mkdir()
    told = complaint(*asked)
    assert told == f"{lake} is a lake of the other format; use --format of that lake, or choose another folder"


# What journals hold that they should not.

UNREADABLE = pytest.mark.slow("journals of a later schema or with impossible times, through three commands")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"schema":1,"kind":"verd', "The line is incomplete, or not a journal record"),
        pytest.param(
            verdict(8).replace('"schema":1', '"schema":2'),
            "The record has schema 2; this version reads 1",
            marks=UNREADABLE,
        ),
        pytest.param(verdict(8).replace("2025-11-21T", "9999-99-99T"), ".*", marks=UNREADABLE),
    ],
)
def test_journal_without_a_readable_record_is_rejected(
    world: CommandOutputs, tmp_path: Path, line: str, reason: str
) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    a_file(journal / DAY / "08-a.jsonl", line)
    asked = ["--policies", world.policy, "--to", tmp_path / "to"]
    words = rf"{journal} has no record that this version can read; one line was rejected because: {reason}"
    assert re.match(words, complaint("simulate", journal, *asked))
    taken = json.loads(ok("ingest", journal, "--all", "--to", lake, "-o", "json"))
    assert {kind: rows for kind, rows in taken.items() if rows} == {"quarantine": 1}
    assert re.match(words.replace(str(journal), str(lake)), complaint("recommend", lake, *asked))
    assert not (tmp_path / "to").exists()


def moved(line: bytes, to: str) -> bytes:
    return line.replace(b'"at":"2025-11-21T01', f'"at":"{to}'.encode())


@pytest.mark.slow("clocks that jump, up to 1970 and 9999, and a missing hour, from the journal to the simulation")
@pytest.mark.parametrize("to", ["2025-11-20T19", "1970-01-01T01", "9999-12-31T23", None])
def test_ingest_command_keeps_every_line_after_clock_jumps_or_missing_hours(
    world: CommandOutputs, tmp_path: Path, to: str | None
) -> None:
    journal = tmp_path / "journal"
    shutil.copytree(world.journal, journal)
    [path] = journal.glob(f"{DAY}/01-*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    if to is not None:
        day, _, hour = to.partition("T")
        a_file(journal / f"date={day}" / f"{hour}-a.jsonl", b"".join(moved(line, to) for line in lines).decode())
    left = {line for path in journal.glob("date=*/*.jsonl") for line in path.read_bytes().splitlines()}
    taken = json.loads(ok("ingest", journal, "--all", "--to", tmp_path / "lake", "-o", "json"))
    impossible = to is not None and not to.startswith("2025")
    assert (sum(taken.values()), taken["quarantine"]) == (len(left), len(lines) if impossible else 0)
    asked = ["--policies", world.policy, "--to", tmp_path / "to", "-o", "json"]
    rows = json.loads(ok("simulate", tmp_path / "lake", *asked))
    assert [(row["policy"], row["groups"]) for row in rows] == [("recorded", GROUPS), ("steady", GROUPS)]


def test_pipeline_command_reports_missing_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_file(tmp_path / DAY / "08-a.jsonl", verdict(8))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    told = complaint("rollup", tmp_path)
    assert told == (f"Spark needs Java, but JAVA_HOME ({tmp_path}) has none: correct it, or unset it")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    told = complaint("rollup", tmp_path)
    assert told == "Spark needs Java, but no java command was found: install Java 17 or later, or set JAVA_HOME"
