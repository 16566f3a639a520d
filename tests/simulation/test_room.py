"""The same fleets and troubles as in the simulation, decided and written by the operator's own room."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from builders import a_policy
from simulation.room import InTheRoom, failures_in_the_room
from simulation.world import Simulation

RUNS = range(20)
MORE_RUNS = range(20, 200)
CHUNK = 10  # runs of one task


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(RUNS, id="20"),
        pytest.param(
            MORE_RUNS,
            id="180 more",
            marks=pytest.mark.slow("180 more simulated fleets, decided and written by the operator's own controller"),
        ),
    ],
)
def test_simulation_of_random_fleets_with_the_real_controller_keeps_every_invariant(runs: range) -> None:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        chunks = [range(first, first + CHUNK) for first in runs[::CHUNK]]
        found = [it for chunk in pool.map(failures_in_the_room, chunks) for it in chunk]
    assert not found, "\n".join(map(str, found))


@pytest.fixture
def in_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "operator", InTheRoom)


@pytest.mark.usefixtures("in_the_room")
@pytest.mark.parametrize("points", range(1, 25))
def test_crash_of_the_real_controller_around_every_write_of_a_rebalance_is_recovered(points: int) -> None:
    world = Simulation(points, routes={"orders": {"a": 8, "b": 8}}, policy=a_policy(), replicas=3)
    world.clock.run(20.0)
    world.scale(5)
    world.arm_crash(points)
    world.clock.run(120.0)
    world.settle()
    world.clock.run(200.0)
    world.judge.settled()
