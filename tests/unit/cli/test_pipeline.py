"""What `rota pipeline` refuses before Spark begins, where in a file a mistake stands, and what it says meanwhile."""

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


# Before Spark begins.


def no_policies(at: Path) -> tuple[list[object], str]:
    file = a_file(at / "p.yaml", STEADY.replace("Sticky", "Clingy"))
    told = f"{file}, line 5: RebalancePolicy steady: spec.strategy: invalid enum value 'Clingy'; choose one of "
    return ["simulate", at / "journal", "--policies", file, "--to", at / "to"], told


def no_weights(at: Path) -> tuple[list[object], str]:
    file, weights = a_file(at / "p.yaml", STEADY), a_file(at / "w.yaml", "moves: -1")
    asked = ["recommend", at / "journal", "--policies", file, "--weights", weights, "--to", at / "to"]
    return asked, f"{weights}: moves is -1; give a number of at least 0"


def no_source(at: Path) -> tuple[list[object], str]:
    return ["rollup", at / "nowhere"], f"{at}/nowhere is not a folder; give a journal's, or a lake"


def an_empty_source(at: Path) -> tuple[list[object], str]:
    (at / "empty").mkdir()
    return ["timeline", at / "empty"], f"{at}/empty contains no journal ({DAY.replace('2025', '2026')}/08-NAME.jsonl)"


def no_journal(at: Path) -> tuple[list[object], str]:
    return ["ingest", at / "empty", "--to", at / "to"], f"{at}/empty contains no journal: no file such as "


def an_output_that_is_a_file(at: Path) -> tuple[list[object], str]:
    file = a_file(at / "file", "mine")
    return [
        "rollup",
        at / "journal",
        "--to",
        file,
    ], f"--to {file} cannot be a folder, because {file} is a file; name an"


def an_output_that_is_somebodys(at: Path) -> tuple[list[object], str]:
    a_file(at / "to" / "thesis.txt", "mine")
    return ["generate", "--to", at / "to"], f"--to {at}/to is not empty; give an empty folder or a new name"


def half_a_simulation(at: Path) -> tuple[list[object], str]:
    (at / "simulated" / "results").mkdir(parents=True)
    asked = ["recommend", at / "simulated", "--policies", a_file(at / "p.yaml", STEADY), "--to", at / "to"]
    return asked, f"{at}/simulated contains no complete simulation; run `rota pipeline simulate` again"


def a_simulation(at: Path, tried: str) -> list[object]:
    for name in ("results", "series"):
        a_file(at / "simulated" / name / "_SUCCESS", "")
    a_file(at / "simulated" / "results" / "_policies.json", tried)
    return ["recommend", at / "simulated", "--policies", a_file(at / "p.yaml", STEADY), "--to", at / "to"]


def a_simulation_that_was_cut_short(at: Path) -> tuple[list[object], str]:
    return a_simulation(at, ""), f"{at}/simulated contains no complete simulation; run `rota pipeline simulate` again"


def a_simulation_that_is_damaged(at: Path) -> tuple[list[object], str]:
    return a_simulation(at, "[]"), f"{at}/simulated contains no complete simulation; run `rota pipeline simulate` again"


def a_simulation_of_more(at: Path) -> tuple[list[object], str]:
    steady = msgspec.json.encode(policy_body(PolicySpec(strategy="Sticky"))).decode()
    asked = a_simulation(at, f'{{"even": {{}}, "steady": {steady}}}')
    return asked, "Policy even was simulated, but is missing in --policies; add its file"


def a_lake_that_is_somebodys(at: Path) -> tuple[list[object], str]:
    a_file(at / "home" / "thesis.txt", "mine")
    (at / "home" / "plan").mkdir()
    return [
        "ingest",
        at / "journal",
        "--to",
        at / "home",
    ], f"--to {at}/home is not a lake, and contains other files: plan"


def a_name_that_is_too_long(at: Path) -> tuple[list[object], str]:
    return ["rollup", at / ("x" * 300)], f"{at}/{'x' * 300} cannot be read or written: File name too long"


def days_of_a_simulation(at: Path) -> tuple[list[object], str]:
    asked, _ = half_a_simulation(at)
    return [*asked, "--days", 1], f"--days works with a journal or a lake; {at}/simulated is a finished simulation"


def a_lake_of_another_format(at: Path) -> tuple[list[object], str]:
    lake = at / "lake"
    for name in ("verdict/_delta_log", "_inbox"):
        (lake / name).mkdir(parents=True)
    a_file(lake / "_checkpoint" / "metadata", "{}")
    a_file(lake / "_lock", "")
    return ["ingest", at / "journal", "--to", lake], f"{lake} is a lake of the other format; use --format of that lake"


@pytest.mark.parametrize(
    "case",
    [
        no_policies,
        no_weights,
        no_source,
        an_empty_source,
        no_journal,
        an_output_that_is_a_file,
        an_output_that_is_somebodys,
        half_a_simulation,
        a_simulation_that_was_cut_short,
        a_simulation_that_is_damaged,
        a_simulation_of_more,
        a_lake_that_is_somebodys,
        a_name_that_is_too_long,
        days_of_a_simulation,
        a_lake_of_another_format,
    ],
)
def test_pipeline_rejects_invalid_input_before_spark_starts(
    case: Callable[[Path], tuple[list[object], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # there is no Java, so that whatever needs Spark ends with that
    a_file(tmp_path / "journal" / DAY / "08-a.jsonl", "")
    asked, sentence = case(tmp_path)
    ran = CliRunner().invoke(main, ["pipeline", *map(str, asked)])
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith(f"rota: {sentence}")


@pytest.mark.parametrize("command", [["ingest"], ["rollup"], ["recommend", "--policies", "p.yaml"]])
@pytest.mark.parametrize("there", [None, ".", "_checkpoint", "lost+found"])
def test_pipeline_with_if_any_succeeds_on_an_empty_source(
    command: list[str], there: str | None, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    if there:
        (source / there).mkdir(parents=True)
    ran = CliRunner().invoke(main, ["pipeline", *command, str(source), "--to", str(tmp_path / "to"), "--if-any"])
    assert (ran.exit_code, ran.output) == (0, f"{source} contains no records yet\n")


def test_pipeline_with_if_any_still_rejects_invalid_arguments(tmp_path: Path) -> None:
    journal = a_file(tmp_path / "journal" / DAY / "08-a.jsonl", "").parents[1]
    ran = CliRunner().invoke(main, ["pipeline", "rollup", str(journal), "--to", str(journal), "--if-any"])
    assert (ran.exit_code, ran.stdout) == (2, "")


# Where a mistake stands.


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("budget: {maxMoves: -1, per: 1m}", "line 15: RebalancePolicy other: spec.budget.maxMoves: "),
        ("triggers:\n    resync: 1", "line 16: RebalancePolicy other: spec.triggers.resync: "),
        ("handovr: {}", "line 15: RebalancePolicy other: spec: object contains unknown field handovr"),
        ("options: {balanced: {}}", "line 15: RebalancePolicy other: spec.options.balanced does not belong to "),
        (
            "options:\n    byConfig:\n      members:\n        - index: 0\n          queue: []",
            "line 19: RebalancePolicy other: spec.options.byConfig.members[0]: object contains unknown field queue",
        ),
        ("strategy: Clingy", "line 15: RebalancePolicy other: spec.strategy: "),  # the last one counts
        ("paused: [", "line 16; give a file with RebalancePolicies"),
    ],
)
def test_pipeline_policy_error_names_file_line_and_field(text: str, told: str, tmp_path: Path) -> None:
    other = STEADY.replace("steady", "other") + f"  {text}\n"
    file = a_file(tmp_path / "p.yaml", f"# Both.\n---\n{STEADY}---\n# The second.\n{other}")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - which one is the question
        read_policies(str(file))
    assert told in str(caught.value)
    assert str(file) in str(caught.value)


def test_pipeline_duplicate_policy_error_names_both_files(tmp_path: Path) -> None:
    one, other = a_file(tmp_path / "a.yaml", STEADY), a_file(tmp_path / "b.yaml", f"---\n{STEADY}")
    with pytest.raises(ValueError, match="steady is defined twice") as caught:
        read_policies(f"{one}, {other}")
    words = f"RebalancePolicy steady is defined twice, at {one}, line 3 and {other}, line 4; remove one"
    assert str(caught.value) == words


# How far it is.


class Terminal(StringIO):
    """Where a person looks on."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "quiet", "told"),
    [
        (Terminal(), 1e6, "rota: reading lake\nrota: writing\n"),
        (StringIO(), 1e6, ""),
        (StringIO(), 0.0, "rota: reading lake\nrota: writing\n"),
    ],
    ids=["a terminal", "a log", "a log of what takes long"],
)
def test_pipeline_progress_is_shown_on_terminals_and_in_slow_runs(
    stderr: StringIO, quiet: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", quiet)
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress() as at:
        at("reading lake")
        at("writing")
    assert stderr.getvalue() == told


def test_pipeline_progress_shows_a_slow_step_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = StringIO()
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress() as at:
        at("reading lake")
        assert at.pending_timer is not None
        at.pending_timer.join(60)
        assert stderr.getvalue() == "rota: reading lake\n"
