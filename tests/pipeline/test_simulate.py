"""Spark replays every group under every policy; the results equal those of a direct replay."""

import gzip
import json
import pickle
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipeline.frames import history_of
from pipeline.journal_lines import iso_time, owners_line
from pipeline.lake_folders import history_of_lake, ingest, write_segment
from rota.object_store import open_store
from rota.object_store.segments import parse_segment
from rota.pipeline.common.schemas import RESULTS, SERIES
from rota.pipeline.history.reading.buckets import History
from rota.pipeline.recommend.cost_weights import CostWeights
from rota.pipeline.recommend.ranking import compute_costs
from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.replay.job import (
    HEAVY_REPLAY_SIZE,
    Simulation,
    build_histories,
    divide_replays,
    persist_on_disk,
    replay_histories,
)
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.report.formatting import describe_problem
from rota.pipeline.report.report_data import count_problems, sum_by_policy
from rota.pipeline.synthetic.generate import generate_journal
from rota.pipeline.synthetic.histories import generate_history
from rota.records import journal_record
from rota.spec import parse_policy

GROUPS, HOURS, SEED = 4, 2, 7
POLICIES = {
    "sticky": parse_policy({"spec": {"strategy": "Sticky"}}),
    "by-config": parse_policy(
        {"spec": {"strategy": "Custom", "options": {"custom": {"name": "missing-strategy"}}}},
    ),
    "elsewhere": parse_policy(
        {
            "spec": {
                "strategy": "MachineRoomNearby",
                "options": {
                    "machineRoomNearby": {"roomLabel": "zone", "brokers": [{"broker": "broker-z", "room": "east"}]}
                },
            }
        }
    ),
    "for-others": parse_policy(
        {"spec": {"strategy": "ByMachineRoom", "options": {"byMachineRoom": {"rooms": ["up"]}}}}
    ),
}
PROBLEMS = {
    "recorded": None,
    "sticky": None,
    "by-config": "missing-strategy",
    "elsewhere": r"Queue \S+ has no room: give broker broker-[ab] one in spec.options.machineRoomNearby.brokers$",
    "for-others": r"Queue \S+ would have no owner nearly all the time: the policy assigns it to no present member$",
}


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a lake with a generated journal, which is ingested."""
    folder = tmp_path_factory.mktemp("lake")
    [counts] = generate_journal(spark, GROUPS, HOURS, SEED, open_store(str(folder / "journal"))).collect()
    assert counts["groups"] == GROUPS
    assert counts["records"] == sum(len(segment.splitlines()) for segment in segments_of(folder).values())
    ingest(spark, folder)
    return folder


def segments_of(lake: Path) -> dict[str, bytes]:
    """Return the content of a journal's segments, by their keys."""
    return {
        path.relative_to(lake / "journal").as_posix(): gzip.decompress(path.read_bytes())
        for path in sorted(lake.glob("journal/date=*/*.jsonl.gz"))
    }


@pytest.fixture(scope="module")
def history(spark: SparkSession, lake: Path) -> History:
    return history_of_lake(spark, lake)


@pytest.fixture(scope="module")
def simulation(history: History) -> Simulation:
    return replay_histories(persist_on_disk(build_histories(history)), POLICIES)


def test_generate_writes_segments_as_the_operator_names_them(lake: Path) -> None:
    names = [parse_segment(key) for key in segments_of(lake)]
    assert [(name.hour, name.pod, name.uid, name.sequence) for name in names if name] == [
        ("2025-11-21T00", "generated", "000000", 0),
        ("2025-11-21T01", "generated", "000000", 0),
    ]


def test_generate_writes_the_same_segments_for_the_same_seed(spark: SparkSession, lake: Path, tmp_path: Path) -> None:
    generate_journal(spark, GROUPS, HOURS, SEED, open_store(str(tmp_path / "journal"))).collect()
    assert segments_of(tmp_path) == segments_of(lake)


def test_generate_rejects_a_journal_that_is_not_empty(spark: SparkSession, lake: Path) -> None:
    with pytest.raises(ValueError, match=r"journal is not empty; name another lake$"):
        generate_journal(spark, 1, 1, 1, open_store(str(lake / "journal")))


def test_simulate_replays_every_group_under_every_policy_and_the_recorded_ones(simulation: Simulation) -> None:
    assert simulation.results.schema.simpleString() == RESULTS.simpleString()
    assert simulation.series.schema.simpleString() == SERIES.simpleString()
    rows = simulation.results.collect()
    names = {generate_history(number, SEED, HOURS).group for number in range(GROUPS)}
    assert {(row["group"], row["policy"]) for row in rows} == {
        (group, policy) for group in names for policy in PROBLEMS
    }
    for row in rows:
        problem = PROBLEMS[row["policy"]]
        assert re.search(problem, row["problem"]) if problem else row["problem"] is None


@pytest.mark.slow("a simulation of a policy that cannot be used")
def test_simulate_reports_an_unusable_policy_with_its_reason_and_without_metrics(simulation: Simulation) -> None:
    rows = {row["policy"]: row for row in sum_by_policy(simulation.results).collect()}
    assert {name: (row["groups"], row["problems"]) for name, row in rows.items()} == {
        name: (GROUPS, GROUPS if problem else 0) for name, problem in PROBLEMS.items()
    }
    assert {name for name, row in rows.items() if row["moves"] is None} == {"by-config", "elsewhere", "for-others"}
    reason = "A queue would have no owner nearly all the time: the policy assigns it to no present member"
    assert [
        (row["problem"], row["groups"])
        for row in count_problems(simulation.results).collect()
        if row.policy == "for-others"
    ] == [(reason, GROUPS)]
    [row] = [row for row in count_problems(simulation.results).collect() if row.policy == "for-others"]
    assert describe_problem(row, GROUPS) == f"for-others in 4 of 4 groups, such as {row['example']}: unusable: {reason}"
    ranked = (
        compute_costs(simulation.results, CostWeights()).where("rank is not null").select("policy").distinct().collect()
    )
    assert {row["policy"] for row in ranked} == {"recorded", "sticky"}


def test_simulate_of_recorded_policies_equals_a_direct_replay(simulation: Simulation) -> None:
    rows = {row["group"]: row for row in simulation.results.where("policy = 'recorded'").collect()}
    for number in range(GROUPS):
        history = generate_history(number, SEED, HOURS)
        metrics = ReplayMetrics(history)
        Replay(history, None, metrics).run()
        row = rows[history.group]
        assert (row["moves"], row["forced"]) == (metrics.moves, metrics.forced_grants)
        assert row["strategy"] == history.changes[0].policy.strategy


def test_simulate_series_has_six_points_an_hour_for_each_group_and_policy(simulation: Simulation) -> None:
    counts = simulation.series.groupBy("group", "policy").count().collect()
    assert {row["count"] for row in counts} == {HOURS * 6}


@pytest.mark.slow("a simulation of a group without records of its owners")
def test_simulate_reports_a_group_without_owners_record_and_replays_the_others(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    [content, *_] = segments_of(lake).values()
    group = generate_history(1, SEED, HOURS).group
    lines = [line for line in content.splitlines(keepends=True) if not _is_owners_record(line, group)]
    write_segment(tmp_path, "00-a.jsonl.gz", *lines, day="date=2025-11-21")
    ingest(spark, tmp_path)
    histories = persist_on_disk(build_histories(history_of_lake(spark, tmp_path)))
    rows = replay_histories(histories, {}).results.collect()
    problems = {row["group"]: row["problem"] for row in rows}
    assert problems.pop(group) == f"Group {group} has no owners record, with which a replay could start"
    assert {*problems.values()} == {None}


def _is_owners_record(line: bytes, group: str) -> bool:
    record = json.loads(line)
    return bool(record["kind"] == "owners" and record["group"] == group)


def test_spark_plan_of_a_simulation_has_no_single_partition_and_no_broadcast(simulation: Simulation) -> None:
    plan = simulation.results._jdf.queryExecution().toString()
    assert not re.search("SinglePartition|Collect|Broadcast", plan)


def test_spark_plan_of_histories_shuffles_and_sorts_once(history: History) -> None:
    plan = build_histories(history)._jdf.queryExecution().executedPlan().toString()
    assert [len(re.findall(rf"\b{node} [\[hs]", plan)) for node in ("Exchange", "Sort", "Window")] == [1, 1, 0], plan


def test_spark_history_has_the_first_sample_and_the_last_of_each_step(spark: SparkSession, tmp_path: Path) -> None:
    """The queue's end grows by 1 a second; another sample, between two of these, would show other rates."""
    lines = [owners_line("shop/orders", 1, 0, a="0")]
    for seconds, last in ((0, 0), (200, 5_000), (290, 290), (310, 5_000), (590, 590), (890, 890)):
        columns = {"ids": [0], "first": [0], "last": [last], "committed": [last]}
        topics = {"t": {"a": columns}}
        lines.append(journal_record("offsets", "shop/orders", iso_time(seconds), topics=topics, verdicts={}))
    [row] = build_histories(history_of(spark, lines, tmp_path)).collect()
    assert row["problem"] is None
    history: GroupHistory = pickle.loads(row["history"])  # noqa: S301 - written by the job
    assert history.group == history.document.group == "shop/orders"
    assert history.ends - history.begins == 890
    assert history.arrivals[:, 0].tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_spark_partitions_of_heavy_groups_come_first_and_one_for_each_policy(spark: SparkSession) -> None:
    sizes = [(f"shop/group-{number}", HEAVY_REPLAY_SIZE + 1 if number % 10 == 9 else 1) for number in range(100)]
    groups = spark.createDataFrame(sizes, "group string, size long")
    rows = divide_replays(groups, ["a", "b"]).withColumn("part", F.spark_partition_id()).collect()
    heavy = [row for row in rows if row["size"] > HEAVY_REPLAY_SIZE]
    light = [row for row in rows if row["size"] <= HEAVY_REPLAY_SIZE]
    assert sorted(row["policies"] for row in heavy) == [["a"]] * 10 + [["b"]] * 10
    assert [row["policies"] for row in light] == [["a", "b"]] * 90
    assert max(row["part"] for row in heavy) < min(row["part"] for row in light)
    assert len({row["part"] for row in heavy}) > 5
