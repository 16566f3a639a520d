"""Invented stories: groups as fleets have them, with rolling updates, autoscaling, crashes, zones that are lost.

Everything follows from a seed and the group's number, so that one group can be made anew without the others.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rota.documents import Assignment, Share
from rota.model import Queue, Roster
from rota.pipeline.replay.group_history import STEP, Change, Presence, Rates, Story, spec_of
from rota.planner import target
from rota.spec import PolicySpec, policy_spec
from rota.timestamps import format_time

DAY = 86_400.0
BEGINS = 1_763_683_200.0  # 2025-11-21, midnight
ZONES = ("east", "middle", "west")

POLICIES: tuple[PolicySpec, ...] = tuple(
    policy_spec({"spec": body})
    for body in (
        {"strategy": "Averagely"},
        {"strategy": "Averagely"},
        {"strategy": "AveragelyByCircle"},
        {"strategy": "Sticky"},
        {"strategy": "Sticky", "budget": {"maxMoves": 10, "per": "1m"}},
    )
)


@dataclass
class Fleet:
    """Pods as they come and go."""

    rng: np.random.Generator
    group: str
    members: dict[str, Presence] = field(default_factory=dict)
    changes: list[tuple[float, Mapping[str, Presence]]] = field(default_factory=list)

    def start(self, count: int) -> list[str]:
        """Have so many more pods, each in some zone."""
        names = []
        for _ in range(count):
            token = self.rng.bytes(6).hex()
            name = f"{self.group.partition('/')[2]}-{token[:5]}"
            self.members[name] = Presence(token, "Ready", str(self.rng.choice(ZONES)))
            names.append(name)
        return names

    def stand(self, name: str, standing: str) -> None:
        """Have a pod stand in another way."""
        if name in self.members:
            self.members[name] = self.members[name]._replace(standing=standing)

    def end(self, name: str) -> None:
        """Have a pod gone."""
        self.members.pop(name, None)

    def told(self, at: float) -> None:
        """Have that seen at a time."""
        self.changes.append((at, dict(self.members)))

    def leave(self, name: str, at: float) -> float:
        """Have a pod go in order; return when it is gone."""
        self.stand(name, "Leaving")
        self.told(at)
        self.end(name)
        gone = at + float(self.rng.uniform(1.0, 4.0))
        self.told(gone)
        return gone

    def replace_all(self, at: float) -> float:
        """Roll the fleet: one new pod, then one old one less; return when it is done."""
        for name in list(self.members):
            at += float(self.rng.uniform(8.0, 40.0))
            self.start(1)
            self.told(at)
            at = self.leave(name, at + float(self.rng.uniform(1.0, 5.0)))
        return at

    def any(self) -> str:
        """Pick one."""
        return str(self.rng.choice(sorted(self.members)))


Scenario = Callable[[Fleet, float, float], None]


def rolling(fleet: Fleet, begins: float, ends: float) -> None:
    """Roll out several times a day."""
    for at in _times(fleet.rng, begins, ends, 6):
        if not fleet.changes or fleet.changes[-1][0] < at:
            fleet.replace_all(at)


def autoscaled(fleet: Fleet, begins: float, ends: float) -> None:
    """Follow the time of day with the number of pods."""
    least, most = max(1, len(fleet.members) // 2), len(fleet.members) * 2
    for at in np.arange(begins + 1800, ends - 60, 1800.0).tolist():
        wanted = round(least + (most - least) * _daylight(at))
        if wanted > len(fleet.members):
            fleet.start(wanted - len(fleet.members))
            fleet.told(at)
        gone = at
        while wanted < len(fleet.members):
            gone = fleet.leave(fleet.any(), gone)


def crashing(fleet: Fleet, begins: float, ends: float) -> None:
    """Lose a pod now and then, and have another one some time later."""
    for at in _times(fleet.rng, begins, ends - 300, 10):
        if fleet.changes and fleet.changes[-1][0] >= at:
            continue
        fleet.end(fleet.any())
        fleet.told(at)
        fleet.start(1)
        fleet.told(at + float(fleet.rng.uniform(5.0, 120.0)))


def zone_lost(fleet: Fleet, begins: float, ends: float) -> None:
    """Lose all pods of a zone at once, unheard first; others take their places."""
    for at in _times(fleet.rng, begins, ends - 3600, 1):
        zone = str(fleet.rng.choice(ZONES))
        lost = [name for name, it in fleet.members.items() if it.room == zone]
        if not lost or len(lost) == len(fleet.members):
            continue
        for name in lost:
            fleet.stand(name, "Lost")
        fleet.told(at)
        for name in lost:
            fleet.end(name)
        fleet.told(at + 60.0)
        fleet.start(len(lost))
        fleet.told(at + float(fleet.rng.uniform(90.0, 900.0)))


def quiet(fleet: Fleet, begins: float, ends: float) -> None:
    """Roll out once, as most do."""
    for at in _times(fleet.rng, begins, ends, 1):
        fleet.replace_all(at)


def steady(_fleet: Fleet, _begins: float, _ends: float) -> None:
    """Have nobody come or go."""


SCENARIOS: tuple[tuple[Scenario, float], ...] = (  # and how often each is met
    (quiet, 0.5),
    (rolling, 0.2),
    (autoscaled, 0.15),
    (crashing, 0.1),
    (zone_lost, 0.05),
)


class Kind(NamedTuple):
    """What a group's history is about, where that is not left to chance."""

    scenario: Scenario
    skew: float  # how much more comes to some queues than to others
    queues: int


KINDS = {"rolled": Kind(rolling, 0.0, 32), "skewed": Kind(steady, 1.0, 32)}


def invented(number: int, seed: int, hours: float, *, largest: int = 0, kind: Kind | None = None) -> Story:
    """Return the story of a group; that of number 0 has `largest` queues, if that is any."""
    rng = np.random.default_rng((seed, number))
    name = f"group-{number:05d}"
    group = f"team-{number % 97}/{name}"
    chosen = largest if largest and not number else int(rng.choice([4, 8, 8, 16, 16, 32, 64]))
    count = kind.queues if kind else chosen
    queues = tuple(Queue(name, f"broker-{'ab'[index % 2]}", index // 2) for index in range(count))
    queues = tuple(sorted(queues))
    fleet = Fleet(rng, group)
    fleet.start(int(np.clip(rng.integers(2, 9), 2, max(2, count))) if count < 1000 else 40)  # noqa: PLR2004 - a big one
    fleet.told(BEGINS)
    chances = [chance for _, chance in SCENARIOS]
    scenario, _ = SCENARIOS[int(rng.choice(len(SCENARIOS), p=chances))]
    policy = POLICIES[int(rng.integers(len(POLICIES)))]
    skew = float(rng.choice([0.2, 0.2, 0.5, 1.5]))
    if kind:
        scenario, skew = kind.scenario, kind.skew
    arrivals = _arrivals(rng, count, hours, skew)
    scenario(fleet, BEGINS, BEGINS + len(arrivals) * STEP)
    return story_of(fleet, queues, policy, arrivals)


def story_of(fleet: Fleet, queues: tuple[Queue, ...], policy: PolicySpec, arrivals: Rates) -> Story:
    """Make a story of a fleet: it begins settled, and its members can work half as much again as comes at most."""
    group, first = fleet.group, fleet.changes[0][1]
    ends = BEGINS + len(arrivals) * STEP
    roster = Roster.of(queues, sorted(first))
    shares = roster.assignment(target(policy, roster).tolist())
    document = Assignment(
        group=group,
        generation=1,
        issued_at=format_time(BEGINS - 60),
        strategy=policy.strategy,
        members={name: Share(first[name].uid, tuple(sorted(share))) for name, share in shares.items()},
    )
    known = frozenset(queues)
    changes = [Change(at, members, known, policy) for at, members in sorted(fleet.changes, key=lambda it: it[0])]
    most = max(float(arrivals.sum(axis=1).max()) / len(first), float(arrivals.max()))
    return Story(
        group=group,
        spec=spec_of(group, queues, "Concurrent"),
        begins=BEGINS,
        ends=ends,
        document=document,
        changes=tuple(it for it in changes if it.at < ends),
        queues=queues,
        arrivals=arrivals,
        lag=np.zeros(len(queues)),
        capacity=1.5 * most,
    )


def _arrivals(rng: np.random.Generator, count: int, hours: float, skew: float) -> Rates:
    """Return what comes to each queue: some much more than others, more by day, and never quite evenly."""
    steps = max(1, int(np.ceil(hours * 3600 / STEP)))
    of_each = rng.lognormal(1.0, skew, count)
    by_day = 0.4 + np.array([_daylight(BEGINS + step * STEP) for step in range(steps)])
    noise = rng.uniform(0.9, 1.1, (steps, count))
    arrivals: Rates = by_day[:, None] * of_each[None, :] * noise
    return arrivals


def _daylight(at: float) -> float:
    """Return 0 in the depth of the night, 1 at noon."""
    return float((1 - np.cos(2 * np.pi * (at % DAY) / DAY)) / 2)


def _times(rng: np.random.Generator, begins: float, ends: float, a_day: int) -> Iterator[float]:
    """Yield some times, so many a day."""
    count = rng.poisson(a_day * (ends - begins) / DAY) if ends > begins else 0
    yield from np.sort(rng.uniform(begins + 60, max(ends - 60, begins + 61), count)).tolist()
