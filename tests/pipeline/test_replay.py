"""A story played again: the planner that is used is the real one, and what it comes to can be reckoned by hand."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rota import records
from rota.documents import Assignment, Share
from rota.model import Queue
from rota.pipeline.replay.group_history import (
    STEP_SECONDS,
    Change,
    GroupHistory,
    MemberPresence,
    build_history,
    planner_spec,
)
from rota.pipeline.replay.replay import DRAIN_SECONDS, OBEY_SECONDS, Replay
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.replay.traffic import TrafficModel
from rota.pipeline.synthetic.histories import generate_history
from rota.pipeline.synthetic.journaling_replay import JournalingReplay
from rota.planner import Plan
from rota.ranges import from_ranges
from rota.records import Fact
from rota.spec import PolicySpec, parse_policy

BEGINS = 1_763_712_000.0
HOUR = 3600.0
QUEUES = tuple(Queue("orders", "a", number) for number in range(8))


def a_policy(strategy: str = "Sticky", **changed: Any) -> PolicySpec:
    return parse_policy({"spec": {"strategy": strategy, **changed}})


def there(*names: str, **standings: str) -> dict[str, MemberPresence]:
    """Return pods by name, each Ready unless said."""
    return {name: MemberPresence(f"uid-{name}", standings.get(name, "Ready")) for name in (*names, *standings)}


def a_story(
    *changes: tuple[float, Mapping[str, MemberPresence]], rates: float | Iterable[float] = 1.0, **more: Any
) -> GroupHistory:
    """Return a story of some hours; it begins with a and b, who have four queues each; times are seconds."""
    policy = more.pop("policy", a_policy())
    queues = more.pop("queues", QUEUES)
    known = frozenset(queues)
    begun = Change(BEGINS, there("a", "b"), known, policy)
    later = [Change(BEGINS + at, members, known, policy) for at, members in changes]
    shares = {"a": Share("uid-a", queues[:4]), "b": Share("uid-b", queues[4:])}
    fields: dict[str, Any] = {
        "group": "shop/orders",
        "spec": planner_spec("shop/orders", queues, "Concurrent"),
        "begins": BEGINS,
        "ends": BEGINS + 2 * HOUR,
        "document": Assignment(
            group="shop/orders", generation=5, issued_at="2025-11-21T07:00:00.000Z", strategy="Sticky", members=shares
        ),
        "changes": (begun, *later),
        "queues": queues,
        "arrivals": np.full((24, len(queues)), 1.0) * np.asarray(rates),
        "lag": np.zeros(len(queues)),
        "capacity": 100.0,
    }
    return GroupHistory(**(fields | more))


def played(it: GroupHistory, policy: PolicySpec | None = None) -> dict[str, Any]:
    figures = ReplayMetrics(it)
    Replay(it, policy, figures).run()
    return figures.to_row()


def test_replay_without_changes_moves_no_queue() -> None:
    row = played(a_story())
    assert (row["moves"], row["rebalances"], row["pause_seconds"], row["duplicates"], row["lag_peak"]) == (0,) * 5
    assert (row["imbalance"], row["hours"], row["changes"]) == (1.0, 2.0, 0)


def test_replay_of_a_joining_member_moves_its_share_with_a_pause_per_handover() -> None:
    row = played(a_story((600.0, there("a", "b", "c"))))
    assert (row["rebalances"], row["moves"], row["forced"], row["duplicates"]) == (1, 2, 0, 0)
    assert DRAIN_SECONDS + OBEY_SECONDS <= row["pause_p99"] < 1.0
    assert row["pause_seconds"] == pytest.approx(2 * row["pause_p99"])


def test_replay_counts_duplicates_for_a_crashed_member_but_not_for_a_drained_one() -> None:
    leaves = played(a_story((600.0, there("a", b="Leaving")), (610.0, there("a"))))
    crashes = played(a_story((600.0, there("a"))))
    assert (leaves["moves"], leaves["duplicates"]) == (4, 0)
    assert (crashes["moves"], crashes["duplicates"]) == (4, 4.0)  # a second of four queues, one message a second each


def test_replay_counts_forced_grants_of_an_unreachable_member() -> None:
    row = played(a_story((600.0, there("a", b="Lost"))))
    assert (row["moves"], row["forced"], row["duplicates"]) == (4, 4, 4.0)


def test_replay_of_a_lost_member_that_returns_assigns_queues_to_it_again() -> None:
    row = played(a_story((600.0, there("a", b="Lost")), (1200.0, there("a", "b"))))
    assert row["moves"] == 4 + 4
    assert row["lag_peak"] < 20


def test_replay_without_members_pauses_every_queue_until_a_member_joins() -> None:
    row = played(a_story((600.0, {}), (1800.0, there("c"))))
    assert row["pause_seconds"] == pytest.approx(8 * 1200, rel=0.01)
    assert row["lag_peak"] == pytest.approx(8 * 1200, rel=0.01)


def test_replay_lag_grows_by_what_exceeds_the_members_capacity() -> None:
    row = played(a_story((600.0, there("a")), capacity=6.0, ends=BEGINS + HOUR))
    assert row["lag_peak"] == pytest.approx((8 - 6) * 3000, rel=0.01)


def test_replay_counts_idle_hours_of_members_without_queues() -> None:
    names = [f"m{number}" for number in range(8)]
    row = played(a_story((HOUR, there("a", "b", *names))))
    assert row["idle_member_hours"] == pytest.approx(2.0, rel=0.01)


def test_replay_of_balanced_evens_out_queue_rates_in_few_moves() -> None:
    it = a_story(rates=[9, 9, 9, 9, 1, 1, 1, 1])
    even, uneven = played(it, a_policy("Balanced")), played(it)
    assert uneven["imbalance"] == pytest.approx(36 / 20)
    assert even["imbalance"] < 1.1
    assert 0 < even["moves"] <= 4


def noisy(hours: int, seed: int = 7) -> NDArray[np.float64]:
    """Return rates that differ by up to a tenth each time, two queues heavier than the others."""
    chance = np.random.default_rng(seed)
    return np.array([9, 9, 1, 1, 1, 1, 1, 1]) * chance.uniform(0.9, 1.1, (hours * 12, len(QUEUES)))


def moved(it: GroupHistory) -> list[int]:
    """Return how many queues Balanced had moved, every ten minutes."""
    figures = ReplayMetrics(it)
    Replay(it, a_policy("Balanced"), figures).run()
    return [point["moves"] for point in figures.series]


@pytest.mark.parametrize("seed", range(4))
def test_replay_of_balanced_ignores_rate_noise_once_settled(seed: int) -> None:
    told = moved(a_story(arrivals=noisy(12, seed), ends=BEGINS + 12 * HOUR))
    assert told[0] == 0, "nothing is evened out by guesses"
    assert 0 < told[2] == told[-1]


def test_replay_of_balanced_moves_queues_when_load_shifts() -> None:
    rates = noisy(12)
    rates[72:] = rates[72:, [2, 3, 0, 1, 4, 5, 6, 7]]  # what is heavy now is of one member
    told = moved(a_story(arrivals=rates, ends=BEGINS + 12 * HOUR))
    assert told[2] == told[35] < told[48] == told[-1]


def test_replay_does_not_plan_again_while_weights_are_unchanged() -> None:
    it = a_story(arrivals=noisy(12), ends=BEGINS + 12 * HOUR)
    asked: list[float] = []

    class Counted(Replay):
        def on_planned(self, new_plan: Plan, previous: Assignment) -> None:
            asked.append(self.now)
            super().on_planned(new_plan, previous)

    Counted(it, a_policy("Balanced"), ReplayMetrics(it)).run()
    assert asked[-1] < BEGINS + HOUR
    assert len(asked) < 12


def test_replay_weight_of_a_new_queue_is_unknown_until_a_whole_step_is_measured() -> None:
    fluid = TrafficModel(np.array([[1.0, 0.0], [2.0, 4.0], [3.0, 6.0]]), np.zeros(2), 0.0, 9.0)
    fluid.set_queues(np.array([True, False]))
    assert np.isnan(fluid.mean_rates(0.0)).all()
    fluid.advance_to(STEP_SECONDS / 2, np.array([0, -1]), 1)
    fluid.set_queues(np.array([True, True]))
    assert fluid.mean_rates(STEP_SECONDS)[0] == 1.0
    assert np.isnan(fluid.mean_rates(STEP_SECONDS)[1])
    assert fluid.mean_rates(2 * STEP_SECONDS).tolist() == [1.5, 4.0]


def test_replay_of_a_paused_policy_moves_orphaned_queues_only() -> None:
    it = a_story((600.0, there("a", "b", "c")), (1200.0, there("a", "c")))
    assert played(it, a_policy(paused=True))["moves"] == 4


def test_replay_with_a_budget_splits_moves_into_several_rebalances() -> None:
    it = a_story((600.0, there("a", "b", "c", "d")))
    row = played(it, a_policy(budget={"maxMoves": 1, "per": "1m"}))
    assert row["moves"] == 4
    assert row["rebalances"] == 4


def test_replay_reports_a_custom_strategy_that_is_not_installed() -> None:
    policy = a_policy("Custom", options={"custom": {"name": "nobody-wrote-it"}})
    figures = ReplayMetrics(a_story())
    Replay(a_story(), policy, figures).run()
    assert figures.problem
    assert "nobody-wrote-it" in figures.problem


def test_replay_assigns_added_queues_and_forgets_removed_ones_without_moves() -> None:
    it = a_story()
    more, less = frozenset(QUEUES[:6]), frozenset(QUEUES)
    shares = {"a": Share("uid-a", QUEUES[:3]), "b": Share("uid-b", QUEUES[3:6])}
    changes = tuple(
        Change(BEGINS + at, there("a", "b"), queues, a_policy())
        for at, queues in ((0, more), (600, less), (1200, more))
    )
    it = replace(it, changes=changes, document=replace(it.document, members=shares))
    row = played(it)
    assert row["moves"] == 0
    assert row["lag_peak"] == pytest.approx(0.0, abs=5)
    assert row["unowned_queue_seconds"] == 0


def test_replay_series_has_a_point_every_ten_minutes() -> None:
    figures = ReplayMetrics(a_story((600.0, there("a", "b", "c"))))
    Replay(figures.history, None, figures).run()
    assert [(it["at"].timestamp() - BEGINS) / 600 for it in figures.series] == [*range(12)]
    assert [it["moves"] for it in figures.series][:3] == [0, 0, 2]


@pytest.mark.parametrize(
    ("capacity", "workers", "left"),
    [
        (100.0, [0, 1], [0, 0]),
        (0.5, [0, 1], [STEP_SECONDS / 2, STEP_SECONDS / 2]),
        (1.0, [0, 0], [STEP_SECONDS / 2] * 2),
        (9.0, [0, -1], [0, STEP_SECONDS]),
    ],
)
def test_replay_traffic_model_consumes_up_to_the_members_capacity(
    capacity: float, workers: list[int], left: list[float]
) -> None:
    fluid = TrafficModel(np.ones((2, 2)), np.zeros(2), 0.0, capacity)
    fluid.advance_to(STEP_SECONDS, np.array(workers), 2)
    assert fluid.lag.tolist() == pytest.approx(left)
    assert fluid.peak_lag == pytest.approx(sum(left))


def journal(it: GroupHistory) -> list[Fact]:
    """Return what the operator would have written, read back."""
    lines: list[bytes] = []
    JournalingReplay(it, lambda line: lines.append(msgspec.json.encode(line))).run()
    found = [it for it in map(records.decode_record, lines) if isinstance(it, Fact)]
    return sorted(found, key=lambda it: it.at)


@pytest.mark.parametrize("number", range(1, 13))
def test_replay_of_a_written_journal_repeats_its_moves_forced_grants_and_pauses(number: int) -> None:
    it = generate_history(number, 7, 6)
    figures = ReplayMetrics(it)
    Replay(it, None, figures).run()
    again = build_history(it.group, journal(it), it.ends)
    row, told = played(again), figures.to_row()
    assert row["moves"] == told["moves"]
    assert row["forced"] == told["forced"]
    assert row["rebalances"] == pytest.approx(told["rebalances"], abs=1)  # when one ends is not told to the moment
    assert row["pause_seconds"] == pytest.approx(told["pause_seconds"], rel=0.02, abs=1)


def test_replay_writes_every_counted_move_to_the_journal() -> None:
    it = generate_history(1, 7, 6)
    figures = ReplayMetrics(it)
    Replay(it, None, figures).run()
    facts = journal(it)
    moved = [fact for fact in facts if isinstance(fact, records.RebalanceRecord)]
    assert moved
    assert sum(fact.moved for fact in moved) == figures.moves > 0
    given = [fact for fact in facts if isinstance(fact, records.HandoverRecord) and fact.act == "Grant"]
    obeyed = [fact for fact in facts if isinstance(fact, records.ObeyedRecord)]
    assert (
        sum(len(from_ranges(it.queues)) for it in given)
        == sum(len(from_ranges(it.queues)) for it in obeyed)
        == figures.moves
    )


def test_replay_synthetic_group_is_reproducible_from_its_number_and_seed() -> None:
    assert msgspec.json.encode(journal(generate_history(3, 7, 2))) == msgspec.json.encode(
        journal(generate_history(3, 7, 2))
    )
    assert generate_history(3, 7, 2).arrivals.tolist() != generate_history(3, 8, 2).arrivals.tolist()


def test_replay_of_an_unusable_history_fails_with_a_sentence() -> None:
    facts = journal(generate_history(3, 7, 1))
    without = [it for it in facts if not isinstance(it, records.OwnersRecord)]
    with pytest.raises(ValueError, match=r"^Group shop/orders has no owners record, with which a replay could start$"):
        build_history("shop/orders", without)
    whole = next(it for it in facts if isinstance(it, records.OwnersRecord))
    with pytest.raises(ValueError, match=r"^Group shop/orders is Broadcasting: its queues have no owner$"):
        build_history("shop/orders", [msgspec.structs.replace(whole, model="Broadcasting")])
    with pytest.raises(ValueError, match=r"^The recorded policy of group .* cannot be used: spec.strategy"):
        build_history("shop/orders", [msgspec.structs.replace(whole, rules={"strategy": "OfTomorrow"})])


def test_replay_arrival_rates_continue_over_a_recreated_topic() -> None:
    """Its ends begin at 0 once more, and so do committed offsets; both grow by one a second all the while."""
    whole, *_ = (it for it in journal(generate_history(3, 7, 1)) if isinstance(it, records.OwnersRecord))
    member = next(iter(whole.members.values()))
    owner = msgspec.structs.replace(member, queues={"orders": {"a": "0"}})
    told: list[Fact] = [msgspec.structs.replace(whole, members={"m": owner}, releasing=[], unowned={})]
    for minute in range(61):
        end = 60 * minute + (50_000 if minute <= 30 else -1800)
        columns = records.Columns(ids=[0], first=[0], last=[end], committed=[end])
        at = whole.at + timedelta(minutes=minute)
        told.append(
            records.OffsetsRecord(schema=1, group=whole.group, at=at, topics={"orders": {"a": columns}}, verdicts={})
        )
    rates = build_history(whole.group, told).arrivals[:, 0]
    assert rates[[0, 4, 7, 11]].tolist() == pytest.approx([1.0] * 4)
