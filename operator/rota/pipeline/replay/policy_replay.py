"""Replay of a history under one policy, as a row of results."""

from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import MetricsRow, ReplayMetrics
from rota.spec import PolicySpec


def replay_policy(history: GroupHistory, policy: PolicySpec | None) -> MetricsRow:
    """Return the metrics of a replay, its strategy, problem and series; without a policy, of the recorded policies."""
    metrics = ReplayMetrics(history)
    replay = Replay(history, policy, metrics)
    replay.run()
    problem = metrics.problem
    if policy and not problem:  # the recorded policies (None) were in force, so they are usable
        problem = metrics.find_neglected_queue()
    return metrics.to_row() | {"strategy": replay.policy.strategy, "problem": problem, "series": metrics.series}
