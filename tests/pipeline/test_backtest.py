"""Tests of advice on histories: how they are cut, and what regret and wrong changes are; without Spark."""

from math import inf

import msgspec
import numpy as np
import pytest
from pyspark.sql import Row

from pipeline.simulation_results import a_result
from pipeline.test_replay import BEGINS, HOUR, a_history, pods, replay_row
from rota.pipeline.common.history_sources import HistorySource, source_of
from rota.pipeline.recommend.backtest import (
    ADVISED,
    BEST_IN_HINDSIGHT,
    BacktestRow,
    BacktestSummary,
    add_summaries,
    backtest_history,
    backtest_lines,
    judge_advice,
    summarize,
)
from rota.pipeline.recommend.cost_weights import MIN_GAIN_FRACTION, CostWeights
from rota.pipeline.recommend.history_halves import cut_history
from rota.pipeline.replay.group_history import STEP_SECONDS, MemberPresence
from rota.pipeline.synthetic.histories import KINDS, generate_history
from rota.spec import parse_policy

MOVES_ONLY = CostWeights(pause=0, duplicates=0, imbalance=0, idle=0, unowned=0, lag=0)
POLICIES = {
    "even": parse_policy({"spec": {"strategy": "Averagely"}}),
    "steady": parse_policy({"spec": {"strategy": "Sticky"}}),
}
SUMMED = ("moves", "forced", "rebalances", "duplicates", "pause_seconds", "unowned_queue_seconds", "idle_member_hours")


# Cutting a history.


def test_replay_of_both_halves_of_a_history_sums_up_to_that_of_the_whole() -> None:
    for number in range(6):
        history = generate_history(number, 3, 12)
        first, second = cut_history(history)
        whole = replay_row(history)
        halves = replay_row(first), replay_row(second)
        for name in SUMMED:
            assert halves[0][name] + halves[1][name] == pytest.approx(whole[name], rel=0.01, abs=0.01), name
        assert max(half["lag_peak"] for half in halves) == pytest.approx(whole["lag_peak"], rel=0.01, abs=0.01)


def test_replay_of_a_cut_history_starts_with_the_state_at_the_cut() -> None:
    """The capacity of one member does not suffice, so there is lag at the cut."""
    history = a_history((600.0, pods("a")), (5400.0, pods("a", "c")), capacity=6.0)
    first, second = cut_history(history)
    assert (first.begins, first.ends) == (BEGINS, BEGINS + HOUR)
    assert (second.begins, second.ends) == (BEGINS + HOUR, BEGINS + 2 * HOUR)
    assert [change.at - BEGINS for change in first.changes] == [0, 600]
    assert [(change.at - BEGINS, {*change.members}) for change in second.changes] == [(3600, {"a"}), (5400, {"a", "c"})]
    assert {name: len(share.queues) for name, share in second.document.members.items()} == {"a": 8}
    assert second.lag.sum() == pytest.approx((8 - 6) * 3000, rel=0.01)
    assert (first.step_count, second.step_count) == (12, 12)


def test_replay_of_a_cut_history_continues_arrivals_in_the_same_steps() -> None:
    rates = np.arange(36.0)[:, None] * np.ones(8)
    first, second = cut_history(a_history(arrivals=rates, ends=BEGINS + 3 * HOUR))
    assert first.arrivals[:, 0].tolist() == [*range(18)]
    assert second.arrivals[:, 0].tolist() == [*range(18, 36)]
    assert second.begins == BEGINS + 18 * STEP_SECONDS


@pytest.mark.parametrize("seconds_before_the_cut", [0.0, 20.0])
def test_replay_of_a_cut_history_reassigns_queues_of_pods_that_are_gone_at_the_cut(
    seconds_before_the_cut: float,
) -> None:
    """While no pod exists, the document names those that are gone."""
    history = a_history((HOUR - seconds_before_the_cut, {}), (HOUR + 600, pods("c")))
    first, second = map(replay_row, cut_history(history))
    whole = replay_row(history)
    assert first["moves"] + second["moves"] == whole["moves"] == 8
    assert first["pause_seconds"] + second["pause_seconds"] == pytest.approx(whole["pause_seconds"])
    assert first["duplicates"] + second["duplicates"] == whole["duplicates"] == 8


def test_replay_of_a_cut_history_reassigns_queues_of_a_pod_that_was_replaced_by_a_namesake_before_the_cut() -> None:
    """While the namesake starts, the document names the former pod."""
    starting = {"a": MemberPresence("uid-new", "Joining")}
    ready = {"a": MemberPresence("uid-new", "Ready")}
    history = a_history((HOUR - 20.0, starting), (HOUR + 600, ready))
    first, second = cut_history(history)
    assert second.document.members["a"].uid == "uid-a"
    whole = replay_row(history)
    halves = replay_row(first), replay_row(second)
    assert halves[0]["pause_seconds"] + halves[1]["pause_seconds"] == pytest.approx(whole["pause_seconds"])
    assert whole["pause_seconds"] == pytest.approx(8 * 620, rel=0.01)


def test_replay_of_a_cut_history_finishes_a_handover_in_progress() -> None:
    history = a_history((HOUR - 0.7, pods("a", "b", "c")))
    first, second = cut_history(history)
    assert second.document.releasing or second.document.generation > first.document.generation
    assert replay_row(first)["moves"] + replay_row(second)["moves"] == 2


def test_recommend_rejects_a_history_that_is_too_short_to_cut() -> None:
    with pytest.raises(ValueError, match=r"^Group shop/orders has 1.9 hours of history; to test advice it needs two h"):
        cut_history(a_history(arrivals=np.ones((23, 8)), ends=BEGINS + 23 * STEP_SECONDS))


# Judging advice.


def moves(group: str = "shop/orders", **by_policy: int | None) -> list[Row]:
    """Return results of a day in which the policies differ by moves only; None: the policy cannot be used."""
    return [
        a_result(group, policy, moves=count or 0, problem="Room x is missing" if count is None else None)
        for policy, count in by_policy.items()
    ]


def judged(first_half: list[Row], second_half: list[Row]) -> BacktestRow:
    first_rows = list(map(Row.asDict, first_half))
    second_rows = list(map(Row.asDict, second_half))
    return judge_advice(first_rows, second_rows, CostWeights(), MIN_GAIN_FRACTION)


def test_recommend_backtest_advises_from_the_first_half_and_compares_the_second() -> None:
    row = judged(moves(recorded=100, steady=50, even=80), moves(recorded=90, steady=60, even=40))
    assert row == {
        "group": "shop/orders",
        "source": "real",
        "hours": 24.0,
        "use": "steady",
        "change": True,
        "wrong": False,
        "best": "even",
        "cost_recorded": 90.0,
        "cost_advised": 60.0,
        "cost_best": 40.0,
        "costs": {"recorded": 90.0, "steady": 60.0, "even": 40.0},
    }


@pytest.mark.parametrize(
    ("steady_moves", "wrong", "advised"),
    [(89, False, 89.0), (90, False, 90.0), (91, True, 91.0), (None, True, 90.0)],
    ids=["less", "equal", "more", "unusable"],
)
def test_recommend_backtest_change_is_wrong_if_it_costs_more_or_cannot_be_used(
    steady_moves: int | None, *, wrong: bool, advised: float
) -> None:
    row = judged(moves(recorded=100, steady=50), moves(recorded=90, steady=steady_moves))
    assert (row["change"], row["wrong"], row["cost_advised"]) == (True, wrong, advised)


def test_recommend_backtest_without_a_change_is_never_wrong() -> None:
    row = judged(moves(recorded=100, steady=98), moves(recorded=100, steady=1))
    assert (row["use"], row["change"], row["wrong"]) == ("recorded", False, False)
    assert (row["cost_advised"], row["cost_best"]) == (100.0, 1.0)


@pytest.mark.parametrize("half", [0, 1])
def test_recommend_backtest_of_a_group_without_a_present_cost_has_a_problem(half: int) -> None:
    halves = [moves(recorded=9, steady=5), moves(recorded=9, steady=5)]
    halves[half] = moves(recorded=None, steady=5)
    assert judged(*halves) == {"group": "shop/orders", "source": "real", "problem": "Room x is missing"}
    assert judged(moves(recorded=None), [])["problem"] == "Room x is missing"


def fleet() -> list[BacktestRow]:
    """Return tests of four groups: a right change, two wrong ones, one to a policy that could not be used; and none."""
    return [
        judged(moves("a/right", recorded=100, steady=50, even=80), moves("a/right", recorded=90, steady=60, even=40)),
        judged(moves("a/wrong", recorded=100, steady=50, even=80), moves("a/wrong", recorded=30, steady=37, even=50)),
        judged(moves("a/gone", recorded=100, steady=50, even=80), moves("a/gone", recorded=20, steady=None, even=10)),
        judged(moves("a/kept", recorded=10, steady=10, even=10), moves("a/kept", recorded=10, steady=10, even=8)),
        judged(moves("a/none", recorded=None), []),
    ]


def test_recommend_backtest_sums_regret_and_wrong_changes_over_groups() -> None:
    summary = summarize(fleet(), ["steady", "even"])
    assert (summary.groups, summary.untested, summary.changes, summary.wrong, summary.unusable) == (4, 1, 3, 2, 1)
    assert (summary.loss, summary.saved) == (7.0, 30.0)
    assert (summary.recorded, summary.advised, summary.best) == (150.0, 60 + 37 + 20 + 10, 40 + 30 + 10 + 8)
    assert summary.costs == {"steady": 60 + 37 + 20 + 10, "even": 40 + 50 + 10 + 8}, "a group keeps its own policy"
    assert (summary.usable, summary.best_single) == ({"steady": 3, "even": 4}, "even")
    assert [tuple(line) for line in backtest_lines(summary)] == [
        (BEST_IN_HINDSIGHT, 88.0, 0.0, -20.0, 0),
        ("even", 108.0, 20.0, 0.0, 0),
        (ADVISED, 127.0, 39.0, 19.0, 0),
        ("steady", 127.0, 39.0, 19.0, 1),
        ("recorded", 150.0, 62.0, 42.0, 0),
    ]


def test_recommend_backtest_sums_do_not_depend_on_how_groups_are_divided() -> None:
    rows = fleet()
    names = ["steady", "even"]
    parts = [summarize(rows[:2], names), summarize([], names), summarize(rows[2:], names)]
    total = BacktestSummary()
    for part in parts:
        text = msgspec.json.encode(part)
        total = add_summaries(total, msgspec.json.decode(text, type=BacktestSummary))
    assert total == summarize(rows, names)


def test_recommend_backtest_of_no_group_has_no_best_policy() -> None:
    summary = summarize([], ["steady"])
    assert (summary.best_single, summary.groups) == (None, 0)
    assert {line.cost for line in backtest_lines(summary)} == {0.0}


def test_recommend_backtest_of_a_rolled_out_group_confirms_the_change_to_sticky() -> None:
    history = generate_history(1, 5, 24, kind=KINDS["rolled"])
    row = backtest_history(history, POLICIES, MOVES_ONLY, MIN_GAIN_FRACTION)
    halves = [
        {name: replay_row(half, policy)["moves"] * 2 for name, policy in {"recorded": None, **POLICIES}.items()}
        for half in cut_history(history)
    ]
    assert row["costs"] == pytest.approx(halves[1])
    assert row["use"] == min(halves[0], key=lambda name: (halves[0][name], name != "recorded"))
    assert row["cost_best"] == min(halves[1].values()) < inf


@pytest.mark.parametrize(
    ("group", "source"),
    [
        ("shop/orders", HistorySource.REAL),
        ("synthetics/orders", HistorySource.REAL),
        (generate_history(3, 1, 1).group, HistorySource.SYNTHETIC),
        ("synthetic-rates-3/group-00003", HistorySource.RATES),
    ],
)
def test_recommend_backtest_tells_generated_groups_by_their_namespace(group: str, source: HistorySource) -> None:
    assert source_of(group) is source
