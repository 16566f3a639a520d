"""Generator of synthetic group histories: rolling updates, autoscaling, crashes, zone outages.

A history depends only on the seed and the group's number, so any group can be regenerated alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rota.documents import Assignment, Share
from rota.model import Queue, Roster
from rota.pipeline.replay.group_history import STEP, Change, GroupHistory, MemberPresence, Rates, spec_of
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
    """Simulated pods of a group; `changes` records the membership at each time of change."""

    rng: np.random.Generator
    group: str
    members: dict[str, MemberPresence] = field(default_factory=dict)
    changes: list[tuple[float, Mapping[str, MemberPresence]]] = field(default_factory=list)

    def start(self, count: int) -> list[str]:
        """Start pods in random zones; return their names."""
        names = []
        for _ in range(count):
            token = self.rng.bytes(6).hex()
            name = f"{self.group.partition('/')[2]}-{token[:5]}"
            self.members[name] = MemberPresence(token, "Ready", str(self.rng.choice(ZONES)))
            names.append(name)
        return names

    def stand(self, name: str, standing: str) -> None:
        """Set the member state of a pod, if the pod exists."""
        if name in self.members:
            self.members[name] = self.members[name]._replace(standing=standing)

    def end(self, name: str) -> None:
        """Remove a pod."""
        self.members.pop(name, None)

    def told(self, at: float) -> None:
        """Record the present members as a change at a time."""
        self.changes.append((at, dict(self.members)))

    def leave(self, name: str, at: float) -> float:
        """Terminate a pod gracefully; return the time when it has ended."""
        self.stand(name, "Leaving")
        self.told(at)
        self.end(name)
        ended = at + float(self.rng.uniform(1.0, 4.0))
        self.told(ended)
        return ended

    def replace_all(self, at: float) -> float:
        """Replace every pod in turn, starting a new one before ending an old one; return the time of completion."""
        for name in list(self.members):
            at += float(self.rng.uniform(8.0, 40.0))
            self.start(1)
            self.told(at)
            at = self.leave(name, at + float(self.rng.uniform(1.0, 5.0)))
        return at

    def any(self) -> str:
        """Return the name of a random pod."""
        return str(self.rng.choice(sorted(self.members)))


Scenario = Callable[[Fleet, float, float], None]


def rolling(fleet: Fleet, begins: float, ends: float) -> None:
    """Roll out about six times a day."""
    for at in _times(fleet.rng, begins, ends, 6):
        if not fleet.changes or fleet.changes[-1][0] < at:
            fleet.replace_all(at)


def autoscaled(fleet: Fleet, begins: float, ends: float) -> None:
    """Scale the number of pods with the time of day."""
    least, most = max(1, len(fleet.members) // 2), len(fleet.members) * 2
    for at in np.arange(begins + 1800, ends - 60, 1800.0).tolist():
        count = round(least + (most - least) * _daylight(at))
        if count > len(fleet.members):
            fleet.start(count - len(fleet.members))
            fleet.told(at)
        ended = at
        while count < len(fleet.members):
            ended = fleet.leave(fleet.any(), ended)


def crashing(fleet: Fleet, begins: float, ends: float) -> None:
    """Crash a pod about ten times a day; its replacement starts 5 to 120 seconds later."""
    for at in _times(fleet.rng, begins, ends - 300, 10):
        if fleet.changes and fleet.changes[-1][0] >= at:
            continue
        fleet.end(fleet.any())
        fleet.told(at)
        fleet.start(1)
        fleet.told(at + float(fleet.rng.uniform(5.0, 120.0)))


def zone_lost(fleet: Fleet, begins: float, ends: float) -> None:
    """Lose all pods of a zone at once: first unreachable, then deleted, and later replaced."""
    for at in _times(fleet.rng, begins, ends - 3600, 1):
        zone = str(fleet.rng.choice(ZONES))
        lost = [name for name, member in fleet.members.items() if member.room == zone]
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
    """Roll out about once a day."""
    for at in _times(fleet.rng, begins, ends, 1):
        fleet.replace_all(at)


def steady(_fleet: Fleet, _begins: float, _ends: float) -> None:
    """Keep the initial pods."""


SCENARIOS: tuple[tuple[Scenario, float], ...] = (  # with their probabilities
    (quiet, 0.5),
    (rolling, 0.2),
    (autoscaled, 0.15),
    (crashing, 0.1),
    (zone_lost, 0.05),
)


class Kind(NamedTuple):
    """Fixed parameters of a history that are otherwise random."""

    scenario: Scenario
    skew: float  # sigma of the lognormal distribution of the queues' message rates
    queues: int


KINDS = {"rolled": Kind(rolling, 0.0, 32), "skewed": Kind(steady, 1.0, 32)}


def generate_history(
    number: int, seed: int, hours: float, *, largest: int = 0, kind: Kind | None = None
) -> GroupHistory:
    """Return the history of a group; group 0 has `largest` queues, unless that is 0."""
    rng = np.random.default_rng((seed, number))
    name = f"group-{number:05d}"
    group = f"team-{number % 97}/{name}"
    chosen = largest if largest and not number else int(rng.choice([4, 8, 8, 16, 16, 32, 64]))
    count = kind.queues if kind else chosen
    queues = tuple(Queue(name, f"broker-{'ab'[index % 2]}", index // 2) for index in range(count))
    queues = tuple(sorted(queues))
    fleet = Fleet(rng, group)
    fleet.start(int(np.clip(rng.integers(2, 9), 2, max(2, count))) if count < 1000 else 40)  # noqa: PLR2004 - large
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


def story_of(fleet: Fleet, queues: tuple[Queue, ...], policy: PolicySpec, arrivals: Rates) -> GroupHistory:
    """Return the history of a fleet. It starts settled; a member's capacity is 1.5 times what it needs at peak."""
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
    routes = frozenset(queues)
    changes = [Change(at, members, routes, policy) for at, members in sorted(fleet.changes, key=lambda pair: pair[0])]
    peak = max(float(arrivals.sum(axis=1).max()) / len(first), float(arrivals.max()))
    return GroupHistory(
        group=group,
        spec=spec_of(group, queues, "Concurrent"),
        begins=BEGINS,
        ends=ends,
        document=document,
        changes=tuple(change for change in changes if change.at < ends),
        queues=queues,
        arrivals=arrivals,
        lag=np.zeros(len(queues)),
        capacity=1.5 * peak,
    )


def _arrivals(rng: np.random.Generator, count: int, hours: float, skew: float) -> Rates:
    """Return the message rates by step and queue: skewed between queues, higher by day, with 10 % noise."""
    steps = max(1, int(np.ceil(hours * 3600 / STEP)))
    of_each = rng.lognormal(1.0, skew, count)
    by_day = 0.4 + np.array([_daylight(BEGINS + step * STEP) for step in range(steps)])
    noise = rng.uniform(0.9, 1.1, (steps, count))
    arrivals: Rates = by_day[:, None] * of_each[None, :] * noise
    return arrivals


def _daylight(at: float) -> float:
    """Return 0 at midnight, 1 at noon."""
    return float((1 - np.cos(2 * np.pi * (at % DAY) / DAY)) / 2)


def _times(rng: np.random.Generator, begins: float, ends: float, a_day: int) -> Iterator[float]:
    """Yield random times in order, `a_day` of them per day on average."""
    count = rng.poisson(a_day * (ends - begins) / DAY) if ends > begins else 0
    yield from np.sort(rng.uniform(begins + 60, max(ends - 60, begins + 61), count)).tolist()
