"""Spark plays every group under every policy; what it says of one is what the replay says of it."""

import json
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from rota.pipeline.figures import Figures
from rota.pipeline.generate import generated
from rota.pipeline.ingest import Facts, facts
from rota.pipeline.invent import invented
from rota.pipeline.replay import Replay
from rota.pipeline.schemas import RESULTS, SERIES
from rota.pipeline.simulate import Simulation, simulated
from rota.spec import policy_spec

GROUPS, HOURS, SEED = 4, 2, 7
POLICIES = {
    "sticky": policy_spec({"spec": {"strategy": "Sticky"}}),
    "by-config": policy_spec(
        {"spec": {"strategy": "Custom", "options": {"custom": {"name": "nobody-wrote-it"}}}},
    ),
}


@pytest.fixture(scope="module")
def journal(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journal")
    [told] = generated(spark, GROUPS, HOURS, SEED, folder).collect()
    assert told["groups"] == GROUPS
    assert told["records"] == sum(len(path.read_bytes().splitlines()) for path in folder.glob("date=*/*.jsonl"))
    return folder


@pytest.fixture(scope="module")
def found(spark: SparkSession, journal: Path) -> Facts:
    return facts(spark, str(journal))


@pytest.fixture(scope="module")
def simulation(found: Facts) -> Simulation:
    return simulated(found, POLICIES)


def test_a_journal_is_written_in_the_operators_own_layout(journal: Path) -> None:
    assert [path.relative_to(journal).as_posix() for path in sorted(journal.rglob("*.*"))] == [
        "date=2025-11-21/00-generated-000000.jsonl",
        "date=2025-11-21/01-generated-000000.jsonl",
        "date=2025-11-21/02-generated-000000.jsonl",
    ]


def test_nothing_is_written_into_a_folder_that_has_something(spark: SparkSession, journal: Path) -> None:
    with pytest.raises(ValueError, match=r"is not empty; give a folder that is, or is not there yet$"):
        generated(spark, 1, 1, 1, journal)


def test_every_group_is_played_under_every_policy_and_those_in_force(simulation: Simulation) -> None:
    assert simulation.results.schema.simpleString() == RESULTS.simpleString()
    assert simulation.series.schema.simpleString() == SERIES.simpleString()
    rows = simulation.results.collect()
    names = {invented(number, SEED, HOURS).group for number in range(GROUPS)}
    assert {(row["group"], row["policy"]) for row in rows} == {
        (group, policy) for group in names for policy in ("recorded", "sticky", "by-config")
    }
    assert {row["policy"]: bool(row["problem"]) for row in rows} == {
        "recorded": False,
        "sticky": False,
        "by-config": True,
    }


def test_what_was_recorded_is_reproduced(simulation: Simulation) -> None:
    played = {row["group"]: row for row in simulation.results.where("policy = 'recorded'").collect()}
    for number in range(GROUPS):
        it = invented(number, SEED, HOURS)
        figures = Figures(it)
        Replay(it, None, figures).run()
        row = played[it.group]
        assert (row["moves"], row["forced"]) == (figures.moves, figures.forced)
        assert row["strategy"] == it.changes[0].policy.strategy


def test_points_of_plots_are_those_of_each_run(simulation: Simulation) -> None:
    counted = simulation.series.groupBy("group", "policy").count().collect()
    assert {row["count"] for row in counted} == {HOURS * 6}


def test_a_group_without_a_beginning_is_told_and_others_are_played(
    spark: SparkSession, journal: Path, tmp_path: Path
) -> None:
    [path, *_] = sorted(journal.glob("date=*/*.jsonl"))
    lost = invented(1, SEED, HOURS).group
    lines = [line for line in path.read_bytes().splitlines() if not _is_whole(line, lost)]
    kept = tmp_path / "date=2025-11-21" / "00-a.jsonl"
    kept.parent.mkdir()
    kept.write_bytes(b"\n".join([*lines, b""]))
    rows = simulated(facts(spark, str(tmp_path)), {}).results.collect()
    problems = {row["group"]: row["problem"] for row in rows}
    assert problems.pop(lost) == f"Group {lost} has no owners record, with which a replay could begin"
    assert {*problems.values()} == {None}


def _is_whole(line: bytes, group: str) -> bool:
    told = json.loads(line)
    return bool(told["kind"] == "owners" and told["group"] == group)


def test_the_plan_gathers_nothing_on_the_driver(found: Facts) -> None:
    """What is broadcast is only the policies; no step but the readers' has a single partition."""
    runs = simulated(found, POLICIES).results
    told = runs._jdf.queryExecution().toString()
    assert "CollectLimit" not in told
    assert "SinglePartition" not in told
    assert msgspec.json.encode(told)
