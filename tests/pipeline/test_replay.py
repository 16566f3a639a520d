"""Replays of histories: they use the real planner, and their results can be computed by hand."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.group_lines import samples_of
from rota import records
from rota.documents import Assignment, Share
from rota.model import Queue
from rota.pipeline.history.samples import Places
from rota.pipeline.replay.group_history import (
    STEP_SECONDS,
    Change,
    GroupHistory,
    MemberPresence,
    build_history,
    planner_spec,
)
from rota.pipeline.replay.policy_replay import replay_policies
from rota.pipeline.replay.replay import Replay
from rota.pipeline.replay.replay_metrics import ReplayMetrics
from rota.pipeline.replay.simulated_fleet import DRAIN_SECONDS, OBEY_SECONDS
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


def a_policy(strategy: str = "Sticky", **fields: Any) -> PolicySpec:
    return parse_policy({"spec": {"strategy": strategy, **fields}})


def pods(*names: str, **standings: str) -> dict[str, MemberPresence]:
    """Return pods by name, Ready unless another member state is given."""
    return {name: MemberPresence(f"uid-{name}", standings.get(name, "Ready")) for name in (*names, *standings)}


def a_history(
    *changes: tuple[float, Mapping[str, MemberPresence]], rates: float | Iterable[float] = 1.0, **overrides: Any
) -> GroupHistory:
    """Return a history of two hours that starts with members a and b, with four queues each; times are in seconds."""
    policy = overrides.pop("policy", a_policy())
    queues = overrides.pop("queues", QUEUES)
    queue_set = frozenset(queues)
    start = Change(BEGINS, pods("a", "b"), queue_set, policy)
    later = [Change(BEGINS + seconds, members, queue_set, policy) for seconds, members in changes]
    shares = {"a": Share("uid-a", queues[:4]), "b": Share("uid-b", queues[4:])}
    fields: dict[str, Any] = {
        "group": "shop/orders",
        "spec": planner_spec("shop/orders", queues, "Concurrent"),
        "begins": BEGINS,
        "ends": BEGINS + 2 * HOUR,
        "document": Assignment(
            group="shop/orders", generation=5, issued_at="2025-11-21T07:00:00.000Z", strategy="Sticky", members=shares
        ),
        "changes": (start, *later),
        "queues": queues,
        "arrivals": np.full((24, len(queues)), 1.0) * np.asarray(rates),
        "lag": np.zeros(len(queues)),
        "capacity": 100.0,
    }
    return GroupHistory(**(fields | overrides))


def replay_row(history: GroupHistory, policy: PolicySpec | None = None) -> dict[str, Any]:
    metrics = ReplayMetrics(history)
    Replay(history, policy, metrics).run()
    return metrics.to_row()


def test_replay_without_changes_moves_no_queue() -> None:
    row = replay_row(a_history())
    assert (row["moves"], row["rebalances"], row["pause_seconds"], row["duplicates"], row["lag_peak"]) == (0,) * 5
    assert (row["imbalance"], row["hours"], row["changes"]) == (1.0, 2.0, 0)


def test_replay_of_a_joining_member_moves_its_share_with_a_pause_per_handover() -> None:
    row = replay_row(a_history((600.0, pods("a", "b", "c"))))
    assert (row["rebalances"], row["moves"], row["forced"], row["duplicates"]) == (1, 2, 0, 0)
    assert DRAIN_SECONDS + OBEY_SECONDS <= row["pause_p99"] < 1.0
    assert row["pause_seconds"] == pytest.approx(2 * row["pause_p99"])


def test_replay_counts_duplicates_for_a_crashed_member_but_not_for_a_drained_one() -> None:
    leaving = replay_row(a_history((600.0, pods("a", b="Leaving")), (610.0, pods("a"))))
    crashed = replay_row(a_history((600.0, pods("a"))))
    assert (leaving["moves"], leaving["duplicates"]) == (4, 0)
    # Duplicates are a second of four queues, with one message a second each.
    assert (crashed["moves"], crashed["duplicates"]) == (4, 4.0)


def test_replay_counts_forced_grants_of_an_unreachable_member() -> None:
    row = replay_row(a_history((600.0, pods("a", b="Lost"))))
    assert (row["moves"], row["forced"], row["duplicates"]) == (4, 4, 4.0)


def test_replay_of_a_lost_member_that_returns_assigns_queues_to_it_again() -> None:
    row = replay_row(a_history((600.0, pods("a", b="Lost")), (1200.0, pods("a", "b"))))
    assert row["moves"] == 4 + 4
    assert row["lag_peak"] < 20


def test_replay_without_members_pauses_every_queue_until_a_member_joins() -> None:
    row = replay_row(a_history((600.0, {}), (1800.0, pods("c"))))
    assert row["pause_seconds"] == pytest.approx(8 * 1200, rel=0.01)
    assert row["lag_peak"] == pytest.approx(8 * 1200, rel=0.01)


def test_replay_lag_grows_by_what_exceeds_the_members_capacity() -> None:
    row = replay_row(a_history((600.0, pods("a")), capacity=6.0, ends=BEGINS + HOUR))
    assert row["lag_peak"] == pytest.approx((8 - 6) * 3000, rel=0.01)


def test_replay_counts_idle_hours_of_members_without_queues() -> None:
    names = [f"m{number}" for number in range(8)]
    row = replay_row(a_history((HOUR, pods("a", "b", *names))))
    assert row["idle_member_hours"] == pytest.approx(2.0, rel=0.01)


def test_replay_of_balanced_evens_out_queue_rates_in_few_moves() -> None:
    history = a_history(rates=[9, 9, 9, 9, 1, 1, 1, 1])
    balanced = replay_row(history, a_policy("Balanced"))
    recorded = replay_row(history)
    assert recorded["imbalance"] == pytest.approx(36 / 20)
    assert balanced["imbalance"] < 1.1
    assert 0 < balanced["moves"] <= 4


def noisy_rates(hours: int, seed: int = 7) -> NDArray[np.float64]:
    """Return rates with noise of up to a tenth at each step; two queues are heavier than the others."""
    random = np.random.default_rng(seed)
    return np.array([9, 9, 1, 1, 1, 1, 1, 1]) * random.uniform(0.9, 1.1, (hours * 12, len(QUEUES)))


def moves_over_time(history: GroupHistory) -> list[int]:
    """Return the number of queues that Balanced had moved, every ten minutes."""
    metrics = ReplayMetrics(history)
    Replay(history, a_policy("Balanced"), metrics).run()
    return [point["moves"] for point in metrics.series]


@pytest.mark.parametrize("seed", range(4))
def test_replay_of_balanced_ignores_rate_noise_once_settled(seed: int) -> None:
    moves = moves_over_time(a_history(arrivals=noisy_rates(12, seed), ends=BEGINS + 12 * HOUR))
    assert moves[0] == 0, "no queue moves before its rate is measured"
    assert 0 < moves[2] == moves[-1]


def test_replay_of_balanced_moves_queues_when_load_shifts() -> None:
    rates = noisy_rates(12)
    rates[72:] = rates[72:, [2, 3, 0, 1, 4, 5, 6, 7]]  # both heavy queues are now of one member
    moves = moves_over_time(a_history(arrivals=rates, ends=BEGINS + 12 * HOUR))
    assert moves[2] == moves[35] < moves[48] == moves[-1]


@pytest.mark.parametrize("strategy", ["Sticky", "Averagely", "Balanced"])
def test_replay_of_the_only_recorded_policy_is_shared_with_an_equal_one(strategy: str) -> None:
    policy = a_policy(strategy)
    history = a_history((600.0, pods("a", "b", "c")), policy=policy, rates=[9, 9, 9, 9, 1, 1, 1, 1])
    rows = replay_policies(history, {"recorded": None, "equal": a_policy(strategy), "other": a_policy(paused=True)})
    assert rows["equal"]["series"] is rows["recorded"]["series"]
    assert rows["other"]["series"] is not rows["recorded"]["series"]
    for name, own_policy in (("recorded", None), ("equal", policy), ("other", a_policy(paused=True))):
        metrics = ReplayMetrics(history)
        Replay(history, own_policy, metrics).run()
        assert metrics.series == rows[name]["series"]
        assert metrics.to_row().items() <= rows[name].items()


def test_replay_of_a_policy_that_was_in_force_only_for_some_time_is_not_shared() -> None:
    history = a_history((600.0, pods("a", "b", "c")), (900.0, pods("a", "b", "c", "d")))
    changes = (*history.changes[:2], replace(history.changes[2], policy=a_policy(paused=True)))
    history = replace(history, changes=changes)
    rows = replay_policies(history, {"recorded": None, "first": a_policy()})
    assert (rows["recorded"]["moves"], rows["first"]["moves"]) == (2, 4)


def test_replay_reports_a_neglected_queue_of_an_equal_policy_but_not_of_the_recorded_one() -> None:
    """No broker of the group is in the room of the policy, so no member gets a queue."""
    policy = a_policy("ByMachineRoom", options={"byMachineRoom": {"rooms": ["up"]}})
    rows = replay_policies(a_history((1.0, pods("c")), policy=policy), {"recorded": None, "equal": policy})
    assert rows["recorded"]["problem"] is None
    assert "would have no owner nearly all the time" in rows["equal"]["problem"]


def test_replay_does_not_plan_again_while_weights_are_unchanged() -> None:
    history = a_history(arrivals=noisy_rates(12), ends=BEGINS + 12 * HOUR)
    planned_at: list[float] = []

    class RecordingReplay(Replay):
        def on_planned(self, new_plan: Plan, previous: Assignment) -> None:
            planned_at.append(self.now)
            super().on_planned(new_plan, previous)

    RecordingReplay(history, a_policy("Balanced"), ReplayMetrics(history)).run()
    assert planned_at[-1] < BEGINS + HOUR
    assert len(planned_at) < 12


def test_replay_weight_of_a_new_queue_is_unknown_until_a_whole_step_is_measured() -> None:
    traffic = TrafficModel(np.array([[1.0, 0.0], [2.0, 4.0], [3.0, 6.0]]), np.zeros(2), 0.0, 9.0)
    traffic.set_queues(np.array([True, False]))
    assert np.isnan(traffic.mean_rates(0.0)).all()
    traffic.advance_to(STEP_SECONDS / 2, np.array([0, -1]), 1)
    traffic.set_queues(np.array([True, True]))
    assert traffic.mean_rates(STEP_SECONDS)[0] == 1.0
    assert np.isnan(traffic.mean_rates(STEP_SECONDS)[1])
    assert traffic.mean_rates(2 * STEP_SECONDS).tolist() == [1.5, 4.0]


def test_replay_of_a_paused_policy_moves_orphaned_queues_only() -> None:
    history = a_history((600.0, pods("a", "b", "c")), (1200.0, pods("a", "c")))
    assert replay_row(history, a_policy(paused=True))["moves"] == 4


def test_replay_with_a_budget_splits_moves_into_several_rebalances() -> None:
    history = a_history((600.0, pods("a", "b", "c", "d")))
    row = replay_row(history, a_policy(budget={"maxMoves": 1, "per": "1m"}))
    assert row["moves"] == 4
    assert row["rebalances"] == 4


def test_replay_reports_a_custom_strategy_that_is_not_installed() -> None:
    policy = a_policy("Custom", options={"custom": {"name": "missing-strategy"}})
    metrics = ReplayMetrics(a_history())
    Replay(a_history(), policy, metrics).run()
    assert metrics.problem
    assert "missing-strategy" in metrics.problem


def test_replay_assigns_added_queues_and_forgets_removed_ones_without_moves() -> None:
    history = a_history()
    six, eight = frozenset(QUEUES[:6]), frozenset(QUEUES)
    shares = {"a": Share("uid-a", QUEUES[:3]), "b": Share("uid-b", QUEUES[3:6])}
    changes = tuple(
        Change(BEGINS + seconds, pods("a", "b"), queues, a_policy())
        for seconds, queues in ((0, six), (600, eight), (1200, six))
    )
    history = replace(history, changes=changes, document=replace(history.document, members=shares))
    row = replay_row(history)
    assert row["moves"] == 0
    assert row["lag_peak"] == pytest.approx(0.0, abs=5)
    assert row["unowned_queue_seconds"] == 0


def test_replay_series_has_a_point_every_ten_minutes() -> None:
    metrics = ReplayMetrics(a_history((600.0, pods("a", "b", "c"))))
    Replay(metrics.history, None, metrics).run()
    assert [(point["at"].timestamp() - BEGINS) / 600 for point in metrics.series] == [*range(12)]
    assert [point["moves"] for point in metrics.series][:3] == [0, 0, 2]


@pytest.mark.parametrize(
    ("capacity", "workers", "expected_lag"),
    [
        (100.0, [0, 1], [0, 0]),
        (0.5, [0, 1], [STEP_SECONDS / 2, STEP_SECONDS / 2]),
        (1.0, [0, 0], [STEP_SECONDS / 2] * 2),
        (9.0, [0, -1], [0, STEP_SECONDS]),
    ],
)
def test_replay_traffic_model_consumes_up_to_the_members_capacity(
    capacity: float, workers: list[int], expected_lag: list[float]
) -> None:
    traffic = TrafficModel(np.ones((2, 2)), np.zeros(2), 0.0, capacity)
    traffic.advance_to(STEP_SECONDS, np.array(workers), 2)
    assert traffic.lag.tolist() == pytest.approx(expected_lag)
    assert traffic.peak_lag == pytest.approx(sum(expected_lag))


def recorded_facts(history: GroupHistory) -> list[Fact]:
    """Return the facts that the operator would have written to the journal, read back."""
    lines: list[bytes] = []
    JournalingReplay(history, lambda line: lines.append(msgspec.json.encode(line))).run()
    facts = [fact for fact in map(records.decode_record, lines) if isinstance(fact, Fact)]
    return sorted(facts, key=lambda fact: fact.at)


def rebuild_history(group: str, facts: Iterable[Fact], ends: float | None = None) -> GroupHistory:
    """Return the history of a group from its records, which are in order of time."""
    facts = list(facts)
    samples = [fact for fact in facts if isinstance(fact, records.OffsetsRecord)]
    facts_without_offsets = [fact for fact in facts if not isinstance(fact, records.OffsetsRecord)]
    places = Places()
    return build_history(group, facts_without_offsets, samples_of(samples, places), places, ends)


@pytest.mark.parametrize("number", range(1, 13))
def test_replay_of_a_written_journal_repeats_its_moves_forced_grants_and_pauses(number: int) -> None:
    history = generate_history(number, 7, 6)
    metrics = ReplayMetrics(history)
    Replay(history, None, metrics).run()
    rebuilt = rebuild_history(history.group, recorded_facts(history), history.ends)
    row = replay_row(rebuilt)
    expected = metrics.to_row()
    assert row["moves"] == expected["moves"]
    assert row["forced"] == expected["forced"]
    # The journal has the end of a rebalance only approximately.
    assert row["rebalances"] == pytest.approx(expected["rebalances"], abs=1)
    assert row["pause_seconds"] == pytest.approx(expected["pause_seconds"], rel=0.02, abs=1)


def test_replay_writes_every_counted_move_to_the_journal() -> None:
    history = generate_history(1, 7, 6)
    metrics = ReplayMetrics(history)
    Replay(history, None, metrics).run()
    facts = recorded_facts(history)
    rebalances = [fact for fact in facts if isinstance(fact, records.RebalanceRecord)]
    assert rebalances
    assert sum(fact.moved for fact in rebalances) == metrics.moves > 0
    grants = [fact for fact in facts if isinstance(fact, records.HandoverRecord) and fact.act == "Grant"]
    obeyed = [fact for fact in facts if isinstance(fact, records.ObeyedRecord)]
    assert (
        sum(len(from_ranges(record.queues)) for record in grants)
        == sum(len(from_ranges(record.queues)) for record in obeyed)
        == metrics.moves
    )


def test_replay_synthetic_group_is_reproducible_from_its_number_and_seed() -> None:
    assert msgspec.json.encode(recorded_facts(generate_history(3, 7, 2))) == msgspec.json.encode(
        recorded_facts(generate_history(3, 7, 2))
    )
    assert generate_history(3, 7, 2).arrivals.tolist() != generate_history(3, 8, 2).arrivals.tolist()


def test_replay_of_an_unusable_history_fails_with_a_sentence() -> None:
    facts = recorded_facts(generate_history(3, 7, 1))
    other_facts = [fact for fact in facts if not isinstance(fact, records.OwnersRecord)]
    with pytest.raises(ValueError, match=r"^Group shop/orders has no owners record, with which a replay could start$"):
        rebuild_history("shop/orders", other_facts)
    owners = next(fact for fact in facts if isinstance(fact, records.OwnersRecord))
    with pytest.raises(ValueError, match=r"^Group shop/orders is Broadcasting: its queues have no owner$"):
        rebuild_history("shop/orders", [msgspec.structs.replace(owners, model="Broadcasting")])
    with pytest.raises(ValueError, match=r"^The recorded policy of group .* cannot be used: spec.strategy"):
        rebuild_history("shop/orders", [msgspec.structs.replace(owners, rules={"strategy": "OfTomorrow"})])


def test_replay_arrival_rates_continue_over_a_recreated_topic() -> None:
    """End and committed offsets of the recreated topic start at 0 again; both grow by one a second throughout."""
    owners, *_ = (fact for fact in recorded_facts(generate_history(3, 7, 1)) if isinstance(fact, records.OwnersRecord))
    member = next(iter(owners.members.values()))
    owner = msgspec.structs.replace(member, queues={"orders": {"a": "0"}})
    facts: list[Fact] = [msgspec.structs.replace(owners, members={"m": owner}, releasing=[], unowned={})]
    for minute in range(61):
        offset = 60 * minute + (50_000 if minute <= 30 else -1800)
        columns = records.Columns(ids=[0], first=[0], last=[offset], committed=[offset])
        time = owners.at + timedelta(minutes=minute)
        facts.append(
            records.OffsetsRecord(schema=1, group=owners.group, at=time, topics={"orders": {"a": columns}}, verdicts={})
        )
    rates = rebuild_history(owners.group, facts).arrivals[:, 0]
    assert rates[[0, 4, 7, 11]].tolist() == pytest.approx([1.0] * 4)


def test_replay_measures_the_first_and_the_last_step_by_the_samples_around_them() -> None:
    """The queue's end grows by 2 a second, and the lag by 1; the history begins and ends between two samples."""
    owners, *_ = (fact for fact in recorded_facts(generate_history(3, 7, 1)) if isinstance(fact, records.OwnersRecord))
    owner = msgspec.structs.replace(next(iter(owners.members.values())), queues={"orders": {"a": "0"}})
    owners = msgspec.structs.replace(owners, members={"m": owner}, releasing=[], unowned={})
    samples: list[Fact] = []
    for seconds in (-100, 200, 500, 800):
        columns = records.Columns(ids=[0], first=[0], last=[1000 + 2 * seconds], committed=[800 + seconds])
        time = owners.at + timedelta(seconds=seconds)
        topics = {"orders": {"a": columns}}
        samples.append(records.OffsetsRecord(schema=1, group=owners.group, at=time, topics=topics, verdicts={}))
    history = rebuild_history(owners.group, [samples[0], owners, *samples[1:]], owners.at.timestamp() + 750)
    assert history.begins == owners.at.timestamp()
    assert history.arrivals[:, 0].tolist() == pytest.approx([2.0, 2.0, 2.0])
    assert history.lag.tolist() == pytest.approx([200.0])


def test_replay_credits_a_member_with_no_queue_that_it_has_handed_over() -> None:
    """One queue is handed over from m to n in the first step; then its rate grows from 1 to 5 a second."""
    owners, *_ = (fact for fact in recorded_facts(generate_history(3, 7, 1)) if isinstance(fact, records.OwnersRecord))
    member = next(iter(owners.members.values()))
    of_m = msgspec.structs.replace(member, queues={"orders": {"a": "0-1"}})
    of_n = msgspec.structs.replace(member, uid="uid-n", queues={"orders": {"a": "2"}})
    owners = msgspec.structs.replace(owners, members={"m": of_m, "n": of_n}, releasing=[], unowned={})
    handover = records.HandoverRecord(
        schema=1,
        group=owners.group,
        at=owners.at + timedelta(minutes=1),
        generation=owners.generation + 1,
        act="Grant",
        proof="Released",
        state="Releasing",
        queues={"orders": {"a": "1"}},
        holder="m",
        holder_uid=member.uid,
        to="n",
        to_uid="uid-n",
    )
    later_owners = msgspec.structs.replace(
        owners,
        at=owners.at + timedelta(minutes=20),
        members={
            "m": msgspec.structs.replace(of_m, queues={"orders": {"a": "0"}}),
            "n": msgspec.structs.replace(of_n, queues={"orders": {"a": "1-2"}}),
        },
    )
    facts: list[Fact] = [owners, handover]
    for minute in range(31):
        slow = 60 * minute
        fast = slow if minute <= 5 else 300 + 300 * (minute - 5) if minute <= 10 else 1800 + slow - 600
        offsets = [slow, fast, slow]
        columns = records.Columns(ids=[0, 1, 2], first=[0, 0, 0], last=offsets, committed=[*offsets])
        time = owners.at + timedelta(minutes=minute)
        topics = {"orders": {"a": columns}}
        facts.append(records.OffsetsRecord(schema=1, group=owners.group, at=time, topics=topics, verdicts={}))
    facts.append(later_owners)
    history = rebuild_history(owners.group, sorted(facts, key=lambda fact: fact.at))
    assert history.capacity == pytest.approx(2.0 * 1.1), (
        "not 6.0: m consumed two queues at 1 a second each, as n did later"
    )
