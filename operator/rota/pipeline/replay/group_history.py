"""History of one group: pods, queues and policy over time, arrivals of each queue, and the first assignment.

Built from journal records or by the synthetic generator; `rota.pipeline.replay.replay` replays it under any policy.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rota.documents import Assignment, Release, Share
from rota.model import RETRY_TOPIC_PREFIX, Holder, Queue
from rota.pipeline.history.ordering import MAX_CLOCK_SKEW_SECONDS
from rota.ranges import from_ranges
from rota.records import Fact, HandoverRecord, MembershipRecord, OffsetsRecord, OwnersRecord
from rota.spec import GroupSpec, PolicySpec, parse_group, parse_policy
from rota.timestamps import format_time

STEP_SECONDS = 300.0  # seconds; within a step the arrival rate of a queue is constant
MAX_HISTORY_SECONDS = 366 * 86400.0  # seconds of a history; all of its steps are in memory
CAPACITY_HEADROOM = 1.1  # capacity of a member over its highest measured rate

Rates = NDArray[np.float64]


class MemberPresence(NamedTuple):
    """A pod that exists, with its member state and machine room."""

    uid: str
    state: str
    room: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """The pods, queues and policy of a group from a time on."""

    at: float
    members: Mapping[str, MemberPresence]
    queues: frozenset[Queue]
    policy: PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """The whole history of a group."""

    group: str
    spec: GroupSpec
    begins: float
    ends: float
    document: Assignment
    changes: tuple[Change, ...]  # the first is the state at the start
    queues: tuple[Queue, ...]  # all queues that ever existed, sorted
    arrivals: Rates  # messages a second, by step and queue
    lag: Rates  # by queue, at the start
    capacity: float  # messages a second that one member can consume

    @property
    def step_count(self) -> int:
        """The number of steps."""
        return len(self.arrivals)


def sort_facts(facts: Iterable[Fact]) -> list[Fact]:
    """Sort a group's records by time; records of documents by generation, as the clocks of two leaders may differ.

    A record's time is raised to that of the previous generation if its clock was behind. Generations start again when a
    group is recreated. An `owners` record comes after the other records of its generation, which it sums up.
    """
    by_time = sorted(facts, key=lambda fact: (fact.at, _generation(fact), isinstance(fact, OwnersRecord)))
    documents = [fact for fact in by_time if _generation(fact)]
    lives = list(accumulate(map(_was_recreated, [None, *documents], documents), initial=0))[1:]
    numbered = sorted(zip(lives, documents, strict=True), key=_generation_order)
    ordered = [fact for fact in by_time if not _generation(fact)]
    at = datetime.min.replace(tzinfo=UTC)
    for _, fact in numbered:
        at = max(at, fact.at)
        ordered.append(fact if fact.at == at else structs.replace(fact, at=at))
    return sorted(ordered, key=lambda fact: fact.at)


def _generation_order(entry: tuple[int, Fact]) -> tuple[int, int, bool]:
    life, fact = entry
    return life, _generation(fact), isinstance(fact, OwnersRecord)


def _generation(fact: Fact) -> int:
    return getattr(fact, "generation", 0)


def _was_recreated(previous: Fact | None, document: Fact) -> bool:
    """Whether the group was recreated between two records: the generation is 1 again, or lower and much later."""
    if previous is None or _generation(document) >= _generation(previous):
        return False
    return _generation(document) == 1 or (document.at - previous.at).total_seconds() > MAX_CLOCK_SKEW_SECONDS


def build_history(group: str, facts: Sequence[Fact], ends: float | None = None) -> GroupHistory:
    """Return the history of a group from its records in order; raise ValueError if it cannot be replayed."""
    first_owners = next((fact for fact in facts if isinstance(fact, OwnersRecord)), None)
    if first_owners is None:
        raise ValueError(f"Group {group} has no owners record, with which a replay could start")
    if first_owners.model == "Broadcasting":
        raise ValueError(f"Group {group} is Broadcasting: its queues have no owner")
    begins = first_owners.at.timestamp()
    later = [fact for fact in facts if fact.at.timestamp() >= begins]
    last = later[-1].at.timestamp() if ends is None else ends
    changes = tuple(_state_changes(first_owners, later))
    queues = tuple(sorted(frozenset().union(*(change.queues for change in changes))))
    if not queues:
        raise ValueError(f"Group {group} has no queues")
    if last - begins > MAX_HISTORY_SECONDS:
        days = (last - begins) / 86400
        raise ValueError(f"Group {group} was recorded for {days:.0f} days; a replay is limited to 366 days")
    arrivals, consumed, lag = _measure_flows(
        [fact for fact in later if isinstance(fact, OffsetsRecord)], queues, begins, last
    )
    return GroupHistory(
        group=group,
        spec=planner_spec(group, queues, first_owners.ordering),
        begins=begins,
        ends=last,
        document=_first_assignment(first_owners),
        changes=changes,
        queues=queues,
        arrivals=arrivals,
        lag=lag,
        capacity=_member_capacity(later, queues, consumed, begins),
    )


def planner_spec(group: str, queues: Iterable[Queue], ordering: str) -> GroupSpec:
    """Return the group's spec as the planner needs it; the broker's address is a placeholder."""
    topics = sorted({queue.topic for queue in queues if not queue.topic.startswith(RETRY_TOPIC_PREFIX)})
    return parse_group(
        {
            "metadata": {"name": group.partition("/")[2]},
            "spec": {
                "broker": {"rocketmq": {"nameServers": ["replayed:9876"]}},
                "subscriptions": [{"topic": topic} for topic in topics or [queue.topic for queue in queues][:1]],
                "ordering": ordering,
            },
        }
    )


def _first_assignment(fact: OwnersRecord) -> Assignment:
    at = format_time(fact.at.timestamp())
    drains = {
        queue: Release(Holder(revoked.holder, revoked.holder_uid), revoked.to, fact.generation, at)
        for revoked in fact.releasing
        for queue in from_ranges(revoked.queues)
    }
    shares = {name: Share(pod.uid, tuple(sorted(from_ranges(pod.queues)))) for name, pod in fact.members.items()}
    members = {name: share for name, share in shares.items() if share.queues or fact.members[name].standing != "Ended"}
    strategy = str(fact.rules.get("strategy", ""))
    return Assignment(
        group=fact.group, generation=fact.generation, issued_at=at, strategy=strategy, members=members, releasing=drains
    )


def _state_changes(first_owners: OwnersRecord, facts: Iterable[Fact]) -> Iterator[Change]:
    """Yield the state at the start, then each different state, at the time of the record that has it."""
    present = _state_from_owners(first_owners)
    yield present
    for fact in facts:
        match fact:
            case MembershipRecord():
                rooms = {name: presence.room for name, presence in present.members.items()}
                members = {
                    name: MemberPresence(pod.uid, pod.standing, rooms.get(name)) for name, pod in fact.members.items()
                }
                changed = replace(present, members=members)
            case OwnersRecord():
                changed = _state_from_owners(fact)
            case HandoverRecord():
                changed = replace(present, queues=_queues_after(present.queues, fact))
            case _:
                continue
        changed = replace(changed, at=fact.at.timestamp())
        if (changed.members, changed.queues, changed.policy) != (present.members, present.queues, present.policy):
            yield changed
        present = changed


def _state_from_owners(fact: OwnersRecord) -> Change:
    named = [pod.queues for pod in fact.members.values()] + [part.queues for part in fact.releasing] + [fact.unowned]
    members = {name: MemberPresence(pod.uid, pod.standing, pod.room) for name, pod in fact.members.items()}
    queues = frozenset(queue for ranges in named for queue in from_ranges(ranges))
    return Change(fact.at.timestamp(), members, queues, recorded_policy(fact.group, fact.rules))


def recorded_policy(group: str, rules: Mapping[str, Any]) -> PolicySpec:
    """Return the policy that was in force; raise ValueError if this version cannot read it."""
    try:
        return parse_policy({"spec": rules or {}})
    except ValueError as error:
        raise ValueError(f"The recorded policy of group {group} cannot be used: {error}") from None


def _queues_after(queues: frozenset[Queue], handover: HandoverRecord) -> frozenset[Queue]:
    """Return the queues that exist after a handover: a grant adds them, a drop or a revoke to no owner removes them."""
    named = from_ranges(handover.queues)
    if handover.act in {"Grant", "Force"}:
        return queues.union(named)
    is_removed = handover.act == "Drop" or (handover.act == "Revoke" and handover.to is None)
    return queues.difference(named) if is_removed else queues


def _measure_flows(
    samples: Sequence[OffsetsRecord], queues: Sequence[Queue], start: float, end: float
) -> tuple[Rates, Rates, Rates]:
    """Return arrivals and consumption in messages a second, by step and queue, and the lag at the start.

    Offsets that go back count as no flow. Between two samples, also across a gap in the records, rates are constant.
    """
    indexes = {queue: index for index, queue in enumerate(queues)}
    steps = max(1, int(np.ceil((end - start) / STEP_SECONDS)))
    edges: Rates = start + STEP_SECONDS * np.arange(steps + 1, dtype=np.float64)
    last, committed = _offset_arrays(samples, indexes)
    times = np.array([sample.at.timestamp() for sample in samples])
    lag = np.zeros(len(queues))
    if len(samples):
        lag = np.nan_to_num(np.maximum(last[0] - committed[0], 0.0))
    return _rates(times, last, edges, _cumulative_arrivals), _rates(times, committed, edges, np.maximum.accumulate), lag


def _offset_arrays(samples: Sequence[OffsetsRecord], index_of_queue: Mapping[Queue, int]) -> tuple[Rates, Rates]:
    last = np.full((len(samples), len(index_of_queue)), np.nan)
    committed = last.copy()
    for row, sample in enumerate(samples):
        for topic, brokers in sample.topics.items():
            for broker, columns in brokers.items():
                positions = [index_of_queue.get(Queue(topic, broker, number), -1) for number in columns.ids]
                indexes = [index for index, position in enumerate(positions) if position >= 0]
                queue_indexes = [positions[index] for index in indexes]
                last[row, queue_indexes] = [columns.last[index] for index in indexes]
                offsets = [columns.committed[index] for index in indexes]
                committed[row, queue_indexes] = [np.nan if offset is None else offset for offset in offsets]
    return last, committed


def _cumulative_arrivals(ends: Rates) -> Rates:
    """Return the cumulative arrivals at each sample; an end offset that falls belongs to a recreated topic."""
    arrived: Rates = np.cumsum(np.maximum(np.diff(ends, prepend=ends[0]), 0.0))
    return arrived


def _rates(times: Rates, offsets: Rates, edges: Rates, make_monotonic: Callable[[Rates], Rates]) -> Rates:
    """Return the growth of offsets a second between edges; `make_monotonic` makes a queue's offsets monotonic first."""
    rates = np.zeros((len(edges) - 1, offsets.shape[1]))
    if len(times) < 2:  # noqa: PLR2004 - a rate needs two samples
        return rates
    for column in range(offsets.shape[1]):
        is_known = ~np.isnan(offsets[:, column])
        if is_known.sum() > 1:
            at_edges = np.interp(edges, times[is_known], make_monotonic(offsets[is_known, column]))
            rates[:, column] = np.diff(at_edges) / np.diff(edges)
    return rates


def _member_capacity(facts: Sequence[Fact], queues: Sequence[Queue], consumed: Rates, begins: float) -> float:
    """Return the highest rate of any member in steps without a handover, times CAPACITY_HEADROOM."""
    indexes = {queue: index for index, queue in enumerate(queues)}
    # A queue's consumption in a step with a handover has no single owner.
    moving = {int((fact.at.timestamp() - begins) / STEP_SECONDS) for fact in facts if isinstance(fact, HandoverRecord)}
    highest = 0.0
    for record in (fact for fact in facts if isinstance(fact, OwnersRecord)):
        first = int((record.at.timestamp() - begins) / STEP_SECONDS)
        quiet = [step for step in (first, first + 1) if step < len(consumed) and step not in moving]
        owned = (
            [indexes[queue] for queue in from_ranges(pod.queues) if queue in indexes] for pod in record.members.values()
        )
        loads = [float(consumed[step, columns].sum()) for columns in owned if columns for step in quiet]
        highest = max([highest, *loads])
    return highest * CAPACITY_HEADROOM or float("inf")
