"""`rota pipeline`: what it rejects before Spark starts, the places that its errors name, and its progress."""

import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner

from rota.cli import main
from rota.cli.commands.pipeline import progress
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.commands.pipeline.simulate import read_policies
from rota.pipeline.lake.snapshots import EMPTY_SNAPSHOT
from rota.pipeline.lake.tables import Lake
from sidecar.small_disk import a_small_disk, fill_inodes

DAY = "date=2025-11-21"
STEADY = "kind: RebalancePolicy\nmetadata:\n  name: steady\nspec:\n  strategy: Sticky\n"


def a_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# Before Spark starts.


def invalid_policies(folder: Path) -> tuple[list[object], str]:
    file = a_file(folder / "p.yaml", STEADY.replace("Sticky", "Clingy"))
    error = f"{file}, line 5: RebalancePolicy steady: spec.strategy: invalid enum value 'Clingy'; choose one of "
    return ["simulate", folder / "lake", "--policies", file], error


def invalid_weights(folder: Path) -> tuple[list[object], str]:
    file = a_file(folder / "p.yaml", STEADY)
    weights = a_file(folder / "w.yaml", "moves: -1")
    arguments = ["recommend", folder / "lake", "--policies", file, "--weights", weights, "--to", folder / "to"]
    return arguments, f"{weights}: moves is -1; give a number of at least 0, below 1e+12"


def missing_lake(folder: Path) -> tuple[list[object], str]:
    return ["rollup", folder / "nowhere"], f"{folder}/nowhere does not exist; `rota pipeline ingest "


def missing_snapshot(folder: Path) -> tuple[list[object], str]:
    return ["timeline", folder / "lake", "--snapshot", 7], f"{folder}/lake has no snapshot 7; it has 1"


def lake_without_records(folder: Path) -> tuple[list[object], str]:
    return ["rollup", folder / "lake"], f"{folder}/lake has no record that this version can read"


def lake_without_journal(folder: Path) -> tuple[list[object], str]:
    return ["ingest", folder / "lake"], f"{folder}/lake/journal does not exist; name the journal with --journal"


def journal_without_segments(folder: Path) -> tuple[list[object], str]:
    (folder / "journal").mkdir()
    segment = "date=2026-11-21/08-NAME.jsonl.gz"
    error = f"{folder}/journal contains no segment of a journal, such as {segment}; name the journal with --journal"
    return ["ingest", folder / "lake", "--journal", folder / "journal"], error


def report_folder_that_is_a_file(folder: Path) -> tuple[list[object], str]:
    file = a_file(folder / "file", "mine")
    arguments = ["recommend", folder / "lake", "--policies", a_file(folder / "p.yaml", STEADY), "--to", file]
    return arguments, f"--to {file} cannot be a folder, because {file} is a file; name another"


def report_folder_that_cannot_be_created(folder: Path) -> tuple[list[object], str]:
    arguments = ["recommend", folder / "lake", "--policies", a_file(folder / "p.yaml", STEADY), "--to", "/proc/x"]
    return arguments, "--to /proc/x cannot be written: nothing can be created in /proc ("  # not even by root


def report_folder_with_a_file_for_manifests(folder: Path) -> tuple[list[object], str]:
    file = a_file(folder / "to" / "policies", "mine")
    policies = a_file(folder / "p.yaml", STEADY)
    arguments = ["recommend", folder / "lake", "--policies", policies, "--to", file.parent]
    return arguments, f"--to {file.parent} cannot be a folder, because {file} is a file; name another"


def report_folder_that_is_a_dangling_link(folder: Path) -> tuple[list[object], str]:
    (folder / "to").symlink_to(folder / "nowhere")
    policies = a_file(folder / "p.yaml", STEADY)
    arguments = ["recommend", folder / "lake", "--policies", policies, "--to", folder / "to"]
    return arguments, f"--to {folder}/to cannot be a folder, because {folder}/to is a file; name another"


def report_folder_in_the_lake(folder: Path) -> tuple[list[object], str]:
    to = folder / "lake" / "report"
    arguments = ["recommend", folder / "lake", "--policies", a_file(folder / "p.yaml", STEADY), "--to", to]
    return arguments, f"--to {to} is inside the lake {folder}/lake; name a folder elsewhere"


def folder_with_other_files(folder: Path) -> tuple[list[object], str]:
    a_file(folder / "home" / "thesis.txt", "mine")
    error = f"{folder}/home is not a lake, and contains other files: thesis.txt; name a folder of its own"
    return ["generate", "--to", folder / "home"], error


def lake_of_the_former_layout(folder: Path) -> tuple[list[object], str]:
    (folder / "old" / "_checkpoint").mkdir(parents=True)
    return ["ingest", folder / "old"], f"{folder}/old is a lake of an earlier version of Rota (it has _checkpoint/); "


def folder_of_tables_in_the_lake(folder: Path) -> tuple[list[object], str]:
    (folder / "lake" / "lake" / "owners").mkdir(parents=True)
    return ["run", folder / "lake" / "lake"], f"{folder}/lake/lake is inside the lake {folder}/lake; name that one"


def journal_that_is_not_empty(folder: Path) -> tuple[list[object], str]:
    a_file(folder / "new" / "journal" / DAY / "08-a.jsonl.gz", "")
    return ["generate", "--to", folder / "new"], f"{folder}/new/journal is not empty; name another lake"


def unknown_scheme(_folder: Path) -> tuple[list[object], str]:
    return ["ingest", "ftp://host/lake"], "'ftp://host/lake' has the unknown scheme ftp; use s3://BUCKET/PREFIX, "


@pytest.mark.parametrize(
    "case",
    [
        invalid_policies,
        invalid_weights,
        missing_lake,
        missing_snapshot,
        lake_without_records,
        lake_without_journal,
        journal_without_segments,
        report_folder_that_is_a_file,
        report_folder_that_cannot_be_created,
        report_folder_with_a_file_for_manifests,
        report_folder_that_is_a_dangling_link,
        report_folder_in_the_lake,
        folder_with_other_files,
        lake_of_the_former_layout,
        folder_of_tables_in_the_lake,
        journal_that_is_not_empty,
        unknown_scheme,
    ],
)
def test_pipeline_rejects_invalid_input_before_spark_starts(
    case: Callable[[Path], tuple[list[object], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # without Java, anything that starts Spark fails with another error
    Lake(str(tmp_path / "lake")).snapshots.publish(EMPTY_SNAPSHOT, {})
    arguments, sentence = case(tmp_path)
    paths_at_start = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(main, ["pipeline", *map(str, arguments)])
    stderr = "".join(line for line in result.stderr.splitlines(keepends=True) if "reading snapshot" not in line)
    assert (result.exit_code, result.stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith(f"rota: {sentence}")
    assert sorted(tmp_path.rglob("*")) == paths_at_start


@pytest.mark.parametrize("command", [["rollup"], ["simulate", "--policies", "p.yaml"]])
def test_pipeline_rejects_a_lake_that_cannot_be_written_before_spark_starts(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    a_file(tmp_path / "p.yaml", STEADY)
    lake = tmp_path / "lake"
    lake.mkdir()
    with a_small_disk(lake, max_inodes=20):
        Lake(str(lake)).snapshots.publish(EMPTY_SNAPSHOT, {})
        fill_inodes(lake)
        result = CliRunner().invoke(main, ["pipeline", *command, str(lake)])
    problem = f"nothing can be created in {lake} (No space left on device)"
    assert result.stderr == f"rota: The lake {lake} cannot be written: {problem}; name another folder\n"
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize("command", [["ingest"], ["rollup"], ["recommend", "--policies", "p.yaml", "--to", "to"]])
@pytest.mark.parametrize("entry", [None, ".", "journal", "lost+found"])
def test_pipeline_with_if_any_succeeds_on_an_empty_lake(
    command: list[str], entry: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a_file(tmp_path / "p.yaml", STEADY)
    lake = tmp_path / "lake"
    if entry:
        (lake / entry).mkdir(parents=True)
    result = CliRunner().invoke(main, ["pipeline", *command, str(lake), "--if-any"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(str(lake))
    assert result.stdout.count("\n") == 1


def test_pipeline_with_if_any_still_rejects_invalid_arguments(tmp_path: Path) -> None:
    a_file(tmp_path / "home" / "thesis.txt", "mine")
    result = CliRunner().invoke(main, ["pipeline", "rollup", str(tmp_path / "home"), "--if-any"])
    assert (result.exit_code, result.stdout) == (2, "")


# Places of mistakes.


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("budget: {maxMoves: -1, per: 1m}", "line 15: RebalancePolicy other: spec.budget.maxMoves: "),
        ("triggers:\n    resync: 1", "line 16: RebalancePolicy other: spec.triggers.resync: "),
        ("handovr: {}", "line 15: RebalancePolicy other: spec: object contains unknown field handovr"),
        ("options: {balanced: {}}", "line 15: RebalancePolicy other: spec.options.balanced does not belong to "),
        (
            "options:\n    byConfig:\n      members:\n        - index: 0\n          queue: []",
            "line 19: RebalancePolicy other: spec.options.byConfig.members[0]: object contains unknown field queue",
        ),
        ("strategy: Clingy", "line 15: RebalancePolicy other: spec.strategy: "),  # the last of two keys counts
        ("paused: [", "line 16; give a file with RebalancePolicies"),
    ],
)
def test_pipeline_policy_error_names_file_line_and_field(text: str, error: str, tmp_path: Path) -> None:
    second_policy = STEADY.replace("steady", "other") + f"  {text}\n"
    file = a_file(tmp_path / "p.yaml", f"# Both.\n---\n{STEADY}---\n# The second.\n{second_policy}")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is checked below
        read_policies(str(file))
    assert error in str(caught.value)
    assert str(file) in str(caught.value)


def test_pipeline_duplicate_policy_error_names_both_files(tmp_path: Path) -> None:
    first = a_file(tmp_path / "a.yaml", STEADY)
    second = a_file(tmp_path / "b.yaml", f"---\n{STEADY}")
    with pytest.raises(ValueError, match="steady is defined twice") as caught:
        read_policies(f"{first}, {second}")
    error = f"RebalancePolicy steady is defined twice, at {first}, line 3 and {second}, line 4; remove one"
    assert str(caught.value) == error


# Progress.


class Terminal(StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "quiet_seconds", "shown"),
    [
        (Terminal(), 1e6, "rota: reading lake\nrota: writing\n"),
        (StringIO(), 1e6, ""),
        (StringIO(), 0.0, "rota: reading lake\nrota: writing\n"),
    ],
    ids=["a terminal", "a log", "a log of a slow run"],
)
def test_pipeline_progress_is_shown_on_terminals_and_in_slow_runs(
    stderr: StringIO, quiet_seconds: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", quiet_seconds)
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress() as show_step:
        show_step("reading lake")
        show_step("writing")
    assert stderr.getvalue() == shown


def test_pipeline_progress_shows_a_slow_step_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = StringIO()
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress() as show_step:
        show_step("reading lake")
        assert show_step.pending_timer is not None
        show_step.pending_timer.join(60)
        assert stderr.getvalue() == "rota: reading lake\n"
