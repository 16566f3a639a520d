"""Generator of synthetic group histories (see `replay.group_history`): rolling updates, autoscaling, crashes, outages.

A history depends only on the seed and the group's number, so any group can be regenerated alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from rota.documents import Assignment, Share
from rota.model import Queue, Roster
from rota.pipeline.common.history_sources import generated_group_name
from rota.pipeline.replay.group_history import STEP_SECONDS, Change, GroupHistory, MemberPresence, Rates, planner_spec
from rota.pipeline.synthetic.rates import DAY_SECONDS, GeneratedTraffic, RecordedRates, generate_traffic
from rota.planner import compute_owners
from rota.spec import PolicySpec, parse_policy
from rota.timestamps import format_time

START_SECONDS = 1_763_683_200.0  # 2025-11-21, midnight
ZONES = ("east", "middle", "west")
LARGE_GROUP_QUEUES = 1000
LARGE_GROUP_PODS = 40
# With recorded rates, a fleet has capacity for its usual peak, not for the highest spike, which is an exception.
USUAL_PEAK_QUANTILE = 0.99

_POLICY_BODIES: tuple[Mapping[str, object], ...] = (
    {"strategy": "Averagely"},
    {"strategy": "Averagely"},  # twice, so that it is as frequent as both Sticky policies together
    {"strategy": "AveragelyByCircle"},
    {"strategy": "Sticky"},
    {"strategy": "Sticky", "budget": {"maxMoves": 10, "per": "1m"}},
)
POLICIES = tuple(parse_policy({"spec": body}) for body in _POLICY_BODIES)


@dataclass
class SyntheticFleet:
    """Pods of a generated group; `changes` has the members after each change, with its time."""

    rng: np.random.Generator
    group: str
    members: dict[str, MemberPresence] = field(default_factory=dict)
    changes: list[tuple[float, Mapping[str, MemberPresence]]] = field(default_factory=list)

    def start_pods(self, count: int) -> None:
        """Start pods in random zones."""
        for _ in range(count):
            token = self.rng.bytes(6).hex()
            name = f"{self.group.partition('/')[2]}-{token[:5]}"
            self.members[name] = MemberPresence(token, "Ready", str(self.rng.choice(ZONES)))

    def set_state(self, name: str, state: str) -> None:
        """Set the member state of a pod, if the pod exists."""
        if name in self.members:
            self.members[name] = self.members[name]._replace(state=state)

    def remove_pod(self, name: str) -> None:
        """Remove a pod."""
        self.members.pop(name, None)

    def record_change(self, at: float) -> None:
        """Record the present members as a change at a time."""
        self.changes.append((at, dict(self.members)))

    def has_changed_since(self, at: float) -> bool:
        """Whether a change is recorded at `at` or later: an event that began before is not over then."""
        return bool(self.changes) and self.changes[-1][0] >= at

    def terminate_pod(self, name: str, at: float) -> float:
        """Terminate a pod gracefully; return the time when it has ended."""
        self.set_state(name, "Leaving")
        self.record_change(at)
        self.remove_pod(name)
        ended = at + float(self.rng.uniform(1.0, 4.0))
        self.record_change(ended)
        return ended

    def roll_pods(self, at: float) -> float:
        """Replace every pod in turn, starting a new one before ending an old one; return the time of completion."""
        for name in list(self.members):
            at += float(self.rng.uniform(8.0, 40.0))
            self.start_pods(1)
            self.record_change(at)
            at = self.terminate_pod(name, at + float(self.rng.uniform(1.0, 5.0)))
        return at

    def random_pod(self) -> str:
        """Return the name of a random pod."""
        return str(self.rng.choice(sorted(self.members)))


Scenario = Callable[[SyntheticFleet, float, float], None]


def roll_out_often(fleet: SyntheticFleet, begins: float, ends: float) -> None:
    """Roll out about six times a day."""
    for at in _random_times(fleet.rng, begins, ends, 6):
        if not fleet.has_changed_since(at):
            fleet.roll_pods(at)


def autoscale(fleet: SyntheticFleet, begins: float, ends: float) -> None:
    """Scale the number of pods with the time of day."""
    least = max(1, len(fleet.members) // 2)
    most = len(fleet.members) * 2
    for at in np.arange(begins + 1800, ends - 60, 1800.0).tolist():
        count = round(least + (most - least) * _day_factor(at))
        if count > len(fleet.members):
            fleet.start_pods(count - len(fleet.members))
            fleet.record_change(at)
        ended = at
        while count < len(fleet.members):
            ended = fleet.terminate_pod(fleet.random_pod(), ended)


def crash_pods(fleet: SyntheticFleet, begins: float, ends: float) -> None:
    """Crash a pod about ten times a day; its replacement starts 5 to 120 seconds later."""
    for at in _random_times(fleet.rng, begins, ends - 300, 10):
        if not fleet.has_changed_since(at):
            fleet.remove_pod(fleet.random_pod())
            fleet.record_change(at)
            fleet.start_pods(1)
            fleet.record_change(at + float(fleet.rng.uniform(5.0, 120.0)))


def lose_zone(fleet: SyntheticFleet, begins: float, ends: float) -> None:
    """Lose all pods of a zone at once: first unreachable, then deleted, and later replaced."""
    for at in _random_times(fleet.rng, begins, ends - 3600, 1):
        if fleet.has_changed_since(at):
            continue
        zone = str(fleet.rng.choice(ZONES))
        lost = [name for name, member in fleet.members.items() if member.room == zone]
        if not lost or len(lost) == len(fleet.members):
            continue
        for name in lost:
            fleet.set_state(name, "Lost")
        fleet.record_change(at)
        for name in lost:
            fleet.remove_pod(name)
        fleet.record_change(at + 60.0)
        fleet.start_pods(len(lost))
        fleet.record_change(at + float(fleet.rng.uniform(90.0, 900.0)))


def roll_out_daily(fleet: SyntheticFleet, begins: float, ends: float) -> None:
    """Roll out about once a day."""
    for at in _random_times(fleet.rng, begins, ends, 1):
        if not fleet.has_changed_since(at):
            fleet.roll_pods(at)


def keep_pods(_fleet: SyntheticFleet, _begins: float, _ends: float) -> None:
    """Keep the initial pods."""


SCENARIOS: tuple[tuple[Scenario, float], ...] = (  # with their probabilities
    (roll_out_daily, 0.5),
    (roll_out_often, 0.2),
    (autoscale, 0.15),
    (crash_pods, 0.1),
    (lose_zone, 0.05),
)


class HistoryKind(NamedTuple):
    """Fixed values for parameters of a history that are otherwise random, as tests and benchmarks need them."""

    scenario: Scenario
    skew: float  # sigma of the lognormal distribution of the queues' message rates
    queues: int


KINDS = {"rolled": HistoryKind(roll_out_often, 0.0, 32), "skewed": HistoryKind(keep_pods, 1.0, 32)}


def generate_history(
    number: int,
    seed: int,
    hours: float,
    *,
    largest: int = 0,
    kind: HistoryKind | None = None,
    rates: RecordedRates | None = None,
) -> GroupHistory:
    """Return the history of group `number`; group 0 has `largest` queues, unless that is 0.

    A `kind` replaces some random values after they were drawn, so that all other values are the same as without a
    `kind`. With `rates`, messages arrive as in recorded traces, and the group's namespace says so.
    """
    rng = np.random.default_rng((seed, number))
    is_largest = largest and number == 0
    random_count = largest if is_largest else int(rng.choice([4, 8, 8, 16, 16, 32, 64]))
    count = kind.queues if kind else random_count
    fleet = SyntheticFleet(rng, generated_group_name(number, has_recorded_rates=rates is not None))
    is_large = count >= LARGE_GROUP_QUEUES
    fleet.start_pods(LARGE_GROUP_PODS if is_large else min(int(rng.integers(2, 9)), max(2, count)))
    fleet.record_change(START_SECONDS)
    scenarios, chances = zip(*SCENARIOS, strict=True)
    scenario: Scenario = scenarios[int(rng.choice(len(scenarios), p=chances))]
    policy = POLICIES[int(rng.integers(len(POLICIES)))]
    skew = float(rng.choice([0.2, 0.2, 0.5, 1.5]))
    if kind:
        scenario = kind.scenario
        skew = kind.skew
    steps = max(1, int(np.ceil(hours * 3600 / STEP_SECONDS)))
    if rates is None:
        traffic = _synthetic_traffic(rng, f"group-{number:05d}", count, steps, skew)
    else:
        traffic = generate_traffic(rng, rates, count, skew, begins=START_SECONDS, steps=steps)
    scenario(fleet, START_SECONDS, START_SECONDS + steps * STEP_SECONDS)
    return build_fleet_history(fleet, traffic, policy, sizing_quantile=1.0 if rates is None else USUAL_PEAK_QUANTILE)


def build_fleet_history(
    fleet: SyntheticFleet, traffic: GeneratedTraffic, policy: PolicySpec, *, sizing_quantile: float = 1.0
) -> GroupHistory:
    """Return the history of a fleet, which starts settled.

    A member has 1.5 times the capacity that it needs for the peak: the quantile `sizing_quantile` of the message rates.
    """
    queues, arrivals = traffic
    group = fleet.group
    _, first = fleet.changes[0]
    ends = START_SECONDS + len(arrivals) * STEP_SECONDS
    roster = Roster.of(queues, sorted(first))
    shares = roster.assignment(compute_owners(policy, roster).tolist())
    document = Assignment(
        group=group,
        generation=1,
        issued_at=format_time(START_SECONDS - 60),
        strategy=policy.strategy,
        members={name: Share(first[name].uid, tuple(sorted(share))) for name, share in shares.items()},
    )
    routes = frozenset(queues)
    changes: list[Change] = []
    for at, members in sorted(fleet.changes, key=itemgetter(0)):
        if at < ends:
            changes.append(Change(at, members, routes, policy))
    peak_of_group = float(np.quantile(arrivals.sum(axis=1), sizing_quantile))
    peak_of_queue = float(np.quantile(arrivals, sizing_quantile, axis=0).max())
    return GroupHistory(
        group=group,
        spec=planner_spec(group, queues, "Concurrent"),
        begins=START_SECONDS,
        ends=ends,
        document=document,
        changes=tuple(changes),
        queues=queues,
        arrivals=arrivals,
        lag=np.zeros(len(queues)),
        capacity=1.5 * max(peak_of_group / len(first), peak_of_queue),
    )


def _synthetic_traffic(rng: np.random.Generator, topic: str, count: int, steps: int, skew: float) -> GeneratedTraffic:
    """Return the queues of a topic, with rates that are skewed between queues and higher by day, with 10 % noise."""
    queues = tuple(sorted(Queue(topic, f"broker-{'ab'[index % 2]}", index // 2) for index in range(count)))
    mean_rates = rng.lognormal(1.0, skew, count)
    by_day = 0.4 + np.array([_day_factor(START_SECONDS + step * STEP_SECONDS) for step in range(steps)])
    noise = rng.uniform(0.9, 1.1, (steps, count))
    arrivals: Rates = by_day[:, None] * mean_rates[None, :] * noise
    return GeneratedTraffic(queues, arrivals)


def _day_factor(at: float) -> float:
    """Return 0 at midnight, 1 at noon."""
    return float((1 - np.cos(2 * np.pi * (at % DAY_SECONDS) / DAY_SECONDS)) / 2)


def _random_times(rng: np.random.Generator, begins: float, ends: float, per_day: int) -> Iterator[float]:
    """Yield random times in order, `per_day` of them on average."""
    count = rng.poisson(per_day * (ends - begins) / DAY_SECONDS) if ends > begins else 0
    yield from np.sort(rng.uniform(begins + 60, max(ends - 60, begins + 61), count)).tolist()
