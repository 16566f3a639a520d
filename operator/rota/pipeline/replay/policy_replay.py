"""Replays a group's history under several policies, and returns the metrics of each as a row of RESULTS."""

from collections.abc import Mapping

from rota.pipeline.replay.group_history import GroupHistory
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import MetricsRow, ReplayMetrics
from rota.spec import PolicySpec


def replay_policies(history: GroupHistory, policies: Mapping[str, PolicySpec | None]) -> dict[str, MetricsRow]:
    """Return the results of each policy by its name; None stands for the recorded policies.

    A policy that was in force during the whole history shares the replay of the recorded policies, because a replay of
    its own would have the same result.
    """
    first_policy = history.changes[0].policy
    is_only_policy = all(change.policy == first_policy for change in history.changes)
    rows: dict[str, MetricsRow] = {}
    recorded: Replay | None = None
    for name, policy in policies.items():
        if policy is None or (is_only_policy and policy == first_policy):
            recorded = recorded or _run_replay(history, None)
            rows[name] = _to_row(recorded, policy)
        else:
            rows[name] = _to_row(_run_replay(history, policy), policy)
    return rows


def _run_replay(history: GroupHistory, policy: PolicySpec | None) -> Replay:
    replay = Replay(history, policy, ReplayMetrics(history))
    replay.run()
    return replay


def _to_row(replay: Replay, policy: PolicySpec | None) -> MetricsRow:
    """Return the metrics of a replay, with its strategy, its problem and the points of its plots (`series`)."""
    metrics = replay.metrics
    problem = metrics.problem
    if policy and not problem:  # recorded policies (None) are usable, even if a queue had no owner
        problem = metrics.find_neglected_queue()
    return metrics.to_row() | {"strategy": replay.policy.strategy, "problem": problem, "series": metrics.series}
