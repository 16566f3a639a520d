"""`rota pipeline`: what it rejects before Spark starts, the places that its errors name, and its progress."""

import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from rota.cli import main
from rota.cli.commands.pipeline import progress
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.commands.pipeline.simulate import read_policies
from rota.spec import PolicySpec, policy_body

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
    return ["simulate", folder / "journal", "--policies", file, "--to", folder / "to"], error


def invalid_weights(folder: Path) -> tuple[list[object], str]:
    file = a_file(folder / "p.yaml", STEADY)
    weights = a_file(folder / "w.yaml", "moves: -1")
    arguments = ["recommend", folder / "journal", "--policies", file, "--weights", weights, "--to", folder / "to"]
    return arguments, f"{weights}: moves is -1; give a number of at least 0"


def missing_source(folder: Path) -> tuple[list[object], str]:
    return ["rollup", folder / "nowhere"], f"{folder}/nowhere is not a folder; give a journal's, or a lake"


def empty_source(folder: Path) -> tuple[list[object], str]:
    (folder / "empty").mkdir()
    return [
        "timeline",
        folder / "empty",
    ], f"{folder}/empty contains no journal ({DAY.replace('2025', '2026')}/08-NAME.jsonl)"


def source_without_journal(folder: Path) -> tuple[list[object], str]:
    return ["ingest", folder / "empty", "--to", folder / "to"], f"{folder}/empty contains no journal: no file such as "


def output_that_is_a_file(folder: Path) -> tuple[list[object], str]:
    file = a_file(folder / "file", "mine")
    return [
        "rollup",
        folder / "journal",
        "--to",
        file,
    ], f"--to {file} cannot be a folder, because {file} is a file; name an"


def output_with_other_files(folder: Path) -> tuple[list[object], str]:
    a_file(folder / "to" / "thesis.txt", "mine")
    return ["generate", "--to", folder / "to"], f"--to {folder}/to is not empty; give an empty folder or a new name"


def simulation_without_success_marker(folder: Path) -> tuple[list[object], str]:
    (folder / "simulated" / "results").mkdir(parents=True)
    arguments = [
        "recommend",
        folder / "simulated",
        "--policies",
        a_file(folder / "p.yaml", STEADY),
        "--to",
        folder / "to",
    ]
    return arguments, f"{folder}/simulated contains no complete simulation; run `rota pipeline simulate` again"


def a_simulation(folder: Path, simulated_policies: str) -> list[object]:
    for name in ("results", "series"):
        a_file(folder / "simulated" / name / "_SUCCESS", "")
    a_file(folder / "simulated" / "results" / "_policies.json", simulated_policies)
    return ["recommend", folder / "simulated", "--policies", a_file(folder / "p.yaml", STEADY), "--to", folder / "to"]


def simulation_that_was_interrupted(folder: Path) -> tuple[list[object], str]:
    return a_simulation(
        folder, ""
    ), f"{folder}/simulated contains no complete simulation; run `rota pipeline simulate` again"


def simulation_that_is_damaged(folder: Path) -> tuple[list[object], str]:
    return a_simulation(
        folder, "[]"
    ), f"{folder}/simulated contains no complete simulation; run `rota pipeline simulate` again"


def simulation_of_more_policies(folder: Path) -> tuple[list[object], str]:
    steady = msgspec.json.encode(policy_body(PolicySpec(strategy="Sticky"))).decode()
    arguments = a_simulation(folder, f'{{"even": {{}}, "steady": {steady}}}')
    return arguments, "Policy even was simulated, but is missing in --policies; add its file"


def lake_with_other_files(folder: Path) -> tuple[list[object], str]:
    a_file(folder / "home" / "thesis.txt", "mine")
    (folder / "home" / "plan").mkdir()
    return [
        "ingest",
        folder / "journal",
        "--to",
        folder / "home",
    ], f"--to {folder}/home is not a lake, and contains other files: plan"


def too_long_name(folder: Path) -> tuple[list[object], str]:
    return ["rollup", folder / ("x" * 300)], f"{folder}/{'x' * 300} cannot be read or written: File name too long"


def days_of_a_simulation(folder: Path) -> tuple[list[object], str]:
    arguments, _ = simulation_without_success_marker(folder)
    return [
        *arguments,
        "--days",
        1,
    ], f"--days works with a journal or a lake; {folder}/simulated is a finished simulation"


def lake_of_another_format(folder: Path) -> tuple[list[object], str]:
    lake = folder / "lake"
    for name in ("verdict/_delta_log", "_inbox"):
        (lake / name).mkdir(parents=True)
    a_file(lake / "_checkpoint" / "metadata", "{}")
    a_file(lake / "_lock", "")
    return [
        "ingest",
        folder / "journal",
        "--to",
        lake,
    ], f"{lake} is a lake of the other format; use --format of that lake"


@pytest.mark.parametrize(
    "case",
    [
        invalid_policies,
        invalid_weights,
        missing_source,
        empty_source,
        source_without_journal,
        output_that_is_a_file,
        output_with_other_files,
        simulation_without_success_marker,
        simulation_that_was_interrupted,
        simulation_that_is_damaged,
        simulation_of_more_policies,
        lake_with_other_files,
        too_long_name,
        days_of_a_simulation,
        lake_of_another_format,
    ],
)
def test_pipeline_rejects_invalid_input_before_spark_starts(
    case: Callable[[Path], tuple[list[object], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # without Java, anything that starts Spark fails with another error
    a_file(tmp_path / "journal" / DAY / "08-a.jsonl", "")
    arguments, sentence = case(tmp_path)
    result = CliRunner().invoke(main, ["pipeline", *map(str, arguments)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"rota: {sentence}")


@pytest.mark.parametrize("command", [["ingest"], ["rollup"], ["recommend", "--policies", "p.yaml"]])
@pytest.mark.parametrize("entry", [None, ".", "_checkpoint", "lost+found"])
def test_pipeline_with_if_any_succeeds_on_an_empty_source(
    command: list[str], entry: str | None, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    if entry:
        (source / entry).mkdir(parents=True)
    result = CliRunner().invoke(main, ["pipeline", *command, str(source), "--to", str(tmp_path / "to"), "--if-any"])
    assert (result.exit_code, result.output) == (0, f"{source} contains no records yet\n")


def test_pipeline_with_if_any_still_rejects_invalid_arguments(tmp_path: Path) -> None:
    journal = a_file(tmp_path / "journal" / DAY / "08-a.jsonl", "").parents[1]
    result = CliRunner().invoke(main, ["pipeline", "rollup", str(journal), "--to", str(journal), "--if-any"])
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
