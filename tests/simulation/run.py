"""One run: a fleet and its faults from a seed; and the minimal faults of a run that fails."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from simulation.faults import FAULTS, Fault
from simulation.judge import InvariantError
from simulation.world import Simulation

FAULTS_END_SECONDS = 120.0  # the last fault starts before
SETTLED_SECONDS = 420.0  # the fleet has come to rest by then
QUIET_SECONDS = 60.0  # nothing may be written afterwards


class PlannedFault(NamedTuple):
    """A fault with its time and its own random generator, so that omitting other faults does not change it."""

    number: int
    at: float
    fault: Fault
    random: Random


@dataclass(frozen=True)
class Failure:
    """A run that violated an invariant, with the command that reproduces it."""

    seed: int
    numbers: tuple[int, ...]
    problem: str
    faults: tuple[str, ...]

    def __str__(self) -> str:
        """Return the violation, the faults, and the command."""
        listed = "".join(f"\n  {line}" for line in self.faults)
        only = ",".join(map(str, self.numbers)) or "none"
        return f"{self.problem}\n{listed}\n  again: python -m simulation --seed {self.seed} --only {only}"


def draw_faults(seed: int) -> list[PlannedFault]:
    """Return the faults of a seed."""
    random = Random(f"{seed}/troubles")
    fault_count = random.randint(1, 12)
    times = sorted(random.uniform(0.5, FAULTS_END_SECONDS) for _ in range(fault_count))
    return [
        PlannedFault(number, at, random.choice(FAULTS), Random(f"{seed}/fault/{number}"))
        for number, at in enumerate(times)
    ]


def run(seed: int, only: Collection[int] | None = None) -> Simulation:
    """Run a whole simulation; raise InvariantError at the first violation."""
    world = Simulation(seed)
    for fault in draw_faults(seed):
        if only is None or fault.number in only:
            world.clock.after(fault.at, partial(fault.fault, world, fault.random))
    world.clock.after(FAULTS_END_SECONDS + 1, world.end_faults)
    try:
        world.clock.run(SETTLED_SECONDS)
        world.judge.check_settled()
        writes, statuses = len(world.api.writes), world.judge.statuses
        world.clock.run(SETTLED_SECONDS + QUIET_SECONDS)
        world.judge.check_quiet(writes, statuses)
        world.judge.check_settled()
    except InvariantError as violation:
        raise InvariantError(f"{world.clock.now:.2f} s: {violation}") from None
    return world


def find_failure(seed: int) -> Failure | None:
    """Run a seed; if it fails, omit faults while it still fails."""
    problem = violation_of(seed)
    if problem is None:
        return None
    numbers = [fault.number for fault in draw_faults(seed)]
    for number in list(numbers):
        fewer = [fault for fault in numbers if fault != number]
        problem_of_fewer = violation_of(seed, fewer)
        if problem_of_fewer:
            numbers, problem = fewer, problem_of_fewer
    listed = tuple(
        f"{fault.at:6.2f} s {fault.fault.__name__}" for fault in draw_faults(seed) if fault.number in numbers
    )
    return Failure(seed, tuple(numbers), problem, listed)


def find_failures(seeds: range) -> list[Failure]:
    """Run seeds and return their failures."""
    return [failure for seed in seeds if (failure := find_failure(seed))]


def violation_of(seed: int, only: Collection[int] | None = None) -> str | None:
    """Run a seed and return the violation, or None."""
    try:
        run(seed, only)
    except InvariantError as error:
        return str(error)
    return None
