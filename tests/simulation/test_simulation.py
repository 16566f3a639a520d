"""Whole fleets in virtual time with the real controller: random faults, and scenarios with limits of their own."""

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from builders import a_policy
from rota.documents import Assignment
from simulation.faults import hang
from simulation.run import SETTLED_SECONDS, draw_faults, find_failures
from simulation.world import Simulation

TESTS = Path(__file__).parents[1]
RUNS = range(40)
MORE_RUNS = range(40, 600)
CHUNK = 20  # runs of one task
ORDERS = {"orders": {"a": 8, "b": 8}}


@pytest.mark.timeout(1800)  # no performance limit: it must end on the slowest machine
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(RUNS, id="40"),
        pytest.param(MORE_RUNS, id="560 more", marks=pytest.mark.slow("560 more simulated fleets with random faults")),
    ],
)
def test_simulation_of_random_fleets_keeps_every_invariant(runs: range) -> None:
    # Each worker is a new interpreter: it does not inherit threads or loops of other tests.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        chunks = [range(first, first + CHUNK) for first in runs[::CHUNK]]
        found_failures = [failure for chunk in pool.map(find_failures, chunks) for failure in chunk]
    assert not found_failures, "\n".join(map(str, found_failures))


def test_simulation_run_is_reproducible_within_a_process() -> None:
    assert [(fault.at, fault.fault) for fault in draw_faults(5)] == [
        (fault.at, fault.fault) for fault in draw_faults(5)
    ]
    worlds = [_run_for(Simulation(5), 100.0) for _ in range(2)]
    assert worlds[0].judge.texts == worlds[1].judge.texts
    assert worlds[0].judge.plans == worlds[1].judge.plans


MORE_SEEDS = pytest.mark.slow("simulated runs of more seeds are the same in every process")


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=MORE_SEEDS) for seed in (7, 8, 11))])
def test_simulation_run_is_reproducible_across_processes(seed: int) -> None:
    # The iteration order of a set differs between processes; code that depends on it must sort first.
    command = [sys.executable, "-m", "simulation", "--seed", str(seed)]
    outputs = {
        subprocess.check_output(command, cwd=TESTS, text=True, env={**os.environ, "PYTHONHASHSEED": order})
        for order in ("1", "2", "3")
    }
    assert len(outputs) == 1
    assert "holds" in outputs.pop()


def _run_for(world: Simulation, seconds: float) -> Simulation:
    world.clock.run(world.clock.now + seconds)
    return world


@pytest.mark.parametrize("points", range(1, 25))
def test_crash_of_the_operator_around_every_write_of_a_rebalance_is_recovered(points: int) -> None:
    world = _run_for(Simulation(points, routes=ORDERS, policy=a_policy(), replicas=3), 20.0)
    world.scale(5)
    world.arm_crash(points)
    _run_for(world, 120.0)
    world.judge.check_settled()


def test_assignment_that_is_sent_is_obeyed_before_the_volumes_show_it() -> None:
    world = _run_for(Simulation(3, routes=ORDERS, policy=a_policy(), replicas=3), 30.0)
    world.scale(4)
    _run_for(world, 2.0)
    for kubelet in world.kubelets.values():
        kubelet.delay_factor = 180.0  # a volume follows a poke after 9 s at least
    obeyed_before = world.judge.obeyed_before_mounted
    _run_for(world, 8.0)
    assert world.judge.obeyed_before_mounted > obeyed_before
    assert world.judge.document
    stored = world.judge.texts[world.judge.document.generation]
    assert all(kubelet.mounted != stored for kubelet in world.kubelets.values())
    world.judge.check_settled()


@pytest.mark.parametrize("strategy", ["Sticky", "Averagely"])
def test_rolling_update_needs_at_most_two_moves_per_queue_in_total(strategy: str) -> None:
    routes = {"orders": {"a": 40, "b": 40}}
    world = _run_for(Simulation(3, routes=routes, policy=a_policy(strategy=strategy), replicas=20), 60.0)
    grants_before = world.judge.granted
    world.roll()
    _run_for(world, 400.0)
    world.judge.check_settled()
    moved = world.judge.granted - grants_before
    queues = 81
    assert moved <= 2 * queues
    if strategy == "Sticky":
        assert moved <= 1.2 * queues, "the new pod takes over the queues of the old pod"


def test_member_that_flaps_causes_no_assignment_writes() -> None:
    world = _run_for(Simulation(4, routes=ORDERS, policy=a_policy(), replicas=3), 30.0)
    written = world.judge.written
    for number in range(100):
        world.clock.after(number * 6.0, next(iter(world.kubelets.values())).flap)
    _run_for(world, 620.0)
    assert world.judge.written == written


def test_scale_up_and_scale_down_by_many_members_keep_moves_bounded() -> None:
    world = _run_for(Simulation(6, routes={"orders": {"a": 60, "b": 60}}, policy=a_policy(), replicas=3), 30.0)
    grants_before = world.judge.granted
    world.scale(60)
    _run_for(world, 60.0)
    world.scale(3)
    _run_for(world, 200.0)
    world.judge.check_settled()
    assert world.judge.granted - grants_before <= 2 * 2 * 121


def test_node_failure_of_two_members_moves_their_queues_and_settles_on_return() -> None:
    world = _run_for(Simulation(8, routes=ORDERS, policy=a_policy(), replicas=6), 30.0)
    for kubelet in list(world.kubelets.values())[:2]:
        kubelet.cut_off_node(100.0)
    _run_for(world, 70.0)
    assert not _owned_by(world.judge.document, list(world.kubelets)[:2])
    _run_for(world, 200.0)
    world.judge.check_settled()


def _owned_by(document: Assignment | None, names: list[str]) -> int:
    assert document
    return sum(len(document.members[name].queues) for name in names)


def test_leader_election_without_a_leader_leaves_every_queue_consumed() -> None:
    world = _run_for(Simulation(9, routes=ORDERS, policy=a_policy(), replicas=3), 30.0)
    world.leader = None
    _run_for(world, 600.0)
    world.judge.check_settled()


def test_simulation_of_an_hour_without_faults_writes_nothing() -> None:
    world = _run_for(Simulation(10, routes=ORDERS, policy=a_policy(), replicas=3), 60.0)
    writes, statuses = len(world.api.writes), world.judge.statuses
    _run_for(world, 3600.0)
    assert (len(world.api.writes), world.judge.statuses) == (writes, statuses)


def test_member_that_hangs_leaves_the_group_settled_in_the_end() -> None:
    world = _run_for(Simulation(11, routes=ORDERS, policy=a_policy(), replicas=3), 30.0)
    hang(world, world.random)
    world.clock.run(SETTLED_SECONDS)
    world.judge.check_settled()
