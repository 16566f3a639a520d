"""One run: a world and its troubles from a seed; and what is left of the troubles when they are shrunk."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from simulation.faults import FAULTS, Fault
from simulation.judge import Broken
from simulation.world import Simulation

TROUBLE, QUIET, REST = 120.0, 420.0, 60.0  # seconds with faults, to come to rest, in which nothing may be written


class Trouble(NamedTuple):
    """A fault, when it happens, and its own chance, so that leaving another out does not change it."""

    number: int
    at: float
    fault: Fault
    chance: Random


@dataclass(frozen=True)
class Failure:
    """A run in which something did not hold; its text is what reproduces it."""

    seed: int
    kept: tuple[int, ...]
    told: str
    troubles: tuple[str, ...]

    def __str__(self) -> str:
        """Tell what broke, and the one line that shows it again."""
        listed = "".join(f"\n  {line}" for line in self.troubles)
        only = ",".join(map(str, self.kept)) or "none"
        return f"{self.told}\n{listed}\n  again: python -m simulation --seed {self.seed} --only {only}"


def troubles(seed: int) -> list[Trouble]:
    """Return the troubles of a seed."""
    chance = Random(f"{seed}/troubles")
    many = chance.randint(1, 12)
    times = sorted(chance.uniform(0.5, TROUBLE) for _ in range(many))
    return [Trouble(n, at, chance.choice(FAULTS), Random(f"{seed}/fault/{n}")) for n, at in enumerate(times)]


def run(seed: int, only: Collection[int] | None = None) -> Simulation:
    """Go through a whole run; what does not hold is raised."""
    world = Simulation(seed)
    for trouble in troubles(seed):
        if only is None or trouble.number in only:
            world.clock.after(trouble.at, partial(trouble.fault, world, trouble.chance))
    world.clock.after(TROUBLE + 1, world.settle)
    try:
        world.clock.run(QUIET)
        world.judge.settled()
        writes, statuses = len(world.api.writes), world.judge.statuses
        world.clock.run(QUIET + REST)
        world.judge.quiet(writes, statuses)
        world.judge.settled()
    except Broken as broken:
        raise Broken(f"{world.clock.now:.2f} s: {broken}") from None
    return world


def failure(seed: int) -> Failure | None:
    """Run a seed; if it fails, leave out troubles as long as it still does."""
    told = broken(seed)
    if told is None:
        return None
    kept = [trouble.number for trouble in troubles(seed)]
    for number in list(kept):
        fewer = [it for it in kept if it != number]
        still = broken(seed, fewer)
        if still:
            kept, told = fewer, still
    listed = tuple(f"{it.at:6.2f} s {it.fault.__name__}" for it in troubles(seed) if it.number in kept)
    return Failure(seed, tuple(kept), told, listed)


def failures(seeds: range) -> list[Failure]:
    """Run seeds and return what failed."""
    return [found for seed in seeds if (found := failure(seed))]


def broken(seed: int, only: Collection[int] | None = None) -> str | None:
    """Run a seed and say what did not hold, if anything."""
    try:
        run(seed, only)
    except Broken as broken:
        return str(broken)
    return None
