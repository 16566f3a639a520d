"""Synthetic groups with an evident best policy: with the product's own weights it costs least, on several seeds."""

from typing import Any

import pytest
from pyspark.sql import SparkSession

from rota.pipeline.common.schemas import RECORDED_POLICY, RESULTS
from rota.pipeline.recommend.cost_weights import CostWeights
from rota.pipeline.recommend.ranking import compute_costs
from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.synthetic.histories import KINDS, generate_history
from rota.spec import PolicySpec, parse_policy

SEEDS, GROUPS, HOURS = (1, 2, 3), 2, 24
POLICIES = {
    "even": parse_policy({"spec": {"strategy": "Averagely"}}),
    "steady": parse_policy({"spec": {"strategy": "Sticky"}}),
    "weighed": parse_policy({"spec": {"strategy": "Balanced"}}),
}


def a_row(history: GroupHistory, name: str, policy: PolicySpec | None) -> dict[str, Any]:
    metrics = ReplayMetrics(history)
    replay = Replay(history, policy, metrics)
    replay.run()
    identity = {"group": history.group, "policy": name, "strategy": replay.policy.strategy, "problem": metrics.problem}
    return identity | metrics.to_row()


@pytest.mark.parametrize(
    "seeds", [SEEDS[:1], pytest.param(SEEDS[1:], marks=pytest.mark.slow("the ranking of policies on other seeds"))]
)
@pytest.mark.parametrize(("kind", "best"), [("rolled", "steady"), ("skewed", "weighed")])
def test_recommend_ranks_sticky_first_for_rollouts_and_balanced_for_skewed_load(
    spark: SparkSession, kind: str, best: str, seeds: tuple[int, ...]
) -> None:
    rows = []
    for seed in seeds:
        for number in range(GROUPS):
            history = generate_history(number, seed, HOURS, kind=KINDS[kind])
            for name, policy in {RECORDED_POLICY: None, **POLICIES}.items():
                rows.append(a_row(history, name, policy) | {"group": f"{history.group}-{seed}"})
    costs_frame = compute_costs(
        spark.createDataFrame([tuple(row[name] for name in RESULTS.names) for row in rows], RESULTS), CostWeights()
    )
    tested = costs_frame.where(f"policy != '{RECORDED_POLICY}'").orderBy("group", "rank").collect()
    first = {row["group"]: row["policy"] for row in reversed(tested)}
    assert first == {row["group"]: best for row in rows}
