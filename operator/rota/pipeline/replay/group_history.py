"""History of one group: pods, queues and policy over time, arrivals of each queue, and the first assignment.

Built from journal records or by the synthetic generator; `rota.pipeline.replay.replay` replays it under any policy.

A *fact* is a journal record about a group. An `owners` record has the whole assignment, with the states of all members
and the policy (`rules`); the other records have changes. A *place* is a topic on a broker.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import filterfalse
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rota.documents import Assignment, Release, Share
from rota.lag_columns import NOT_COMMITTED
from rota.model import RETRY_TOPIC_PREFIX, Holder, Queue
from rota.pipeline.history.ordering import MAX_CLOCK_SKEW_SECONDS
from rota.pipeline.history.samples import Places, Samples
from rota.ranges import from_ranges
from rota.records import Fact, HandoverRecord, MembershipRecord, Owner, OwnersRecord, Releasing
from rota.spec import GroupSpec, PolicySpec, parse_group, parse_policy
from rota.timestamps import format_time

STEP_SECONDS = 300.0  # within a step the arrival rate of a queue is constant
MAX_HISTORY_SECONDS = 366 * 86400.0  # limited because all steps of a history are in memory
OWNERS_KNOWN_STEPS = 2  # steps from an `owners` record on in which owners count as known, if no handover follows
QUEUE_ID_BITS = 32  # size of a queue's id in the keys of `_offset_arrays`
CAPACITY_HEADROOM = 1.1  # capacity of a member, as a multiple of the highest measured rate of a member

# The records of which a history is built, by kind; it also needs samples of offsets.
REPLAYED_KINDS: Mapping[str, type[Fact]] = {
    "owners": OwnersRecord,
    "membership": MembershipRecord,
    "handover": HandoverRecord,
}

Rates = NDArray[np.float64]
QueueMask = NDArray[np.bool_]  # by queue


class MemberPresence(NamedTuple):
    """A pod that exists, with its member state and machine room."""

    uid: str
    state: str
    room: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """The pods, queues and policy of a group from the time `at` until the next change."""

    at: float
    members: Mapping[str, MemberPresence]
    queues: frozenset[Queue]
    policy: PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """The whole history of a group."""

    group: str
    spec: GroupSpec
    begins: float  # in seconds since 1970, as all times here
    ends: float
    document: Assignment  # the assignment in force at the start
    changes: tuple[Change, ...]  # the first is the state at the start
    queues: tuple[Queue, ...]  # all queues that ever existed, sorted
    arrivals: Rates  # messages a second, by step and queue
    lag: Rates  # messages by queue, at the start
    capacity: float  # messages a second that one member can consume

    @property
    def step_count(self) -> int:
        """The number of steps."""
        return len(self.arrivals)


def index_queues(queues: Sequence[Queue]) -> dict[Queue, int]:
    """Return the index of each queue in arrays by queue."""
    return {queue: index for index, queue in enumerate(queues)}


def sort_facts(facts: Iterable[Fact]) -> list[Fact]:
    """Sort a group's records by time; records with a generation by generation, as two leaders' clocks may differ.

    - If the writer's clock was behind, a record gets the time of the record before it in the order of generations.
    - Generations start again when a group is recreated: each *life* of the group is ordered by itself.
    - An `owners` record sums up its generation, and comes after the other records of that generation.
    """
    by_time = sorted(facts, key=lambda fact: (fact.at, *_generation_order(fact)))
    documents = list(filter(_generation, by_time))
    ordered = list(filterfalse(_generation, by_time))
    at = datetime.min.replace(tzinfo=UTC)
    for _, fact in sorted(_number_lives(documents), key=_life_order):
        at = max(at, fact.at)
        ordered.append(fact if fact.at == at else structs.replace(fact, at=at))
    return sorted(ordered, key=lambda fact: fact.at)


def _generation_order(fact: Fact) -> tuple[int, bool]:
    return _generation(fact), isinstance(fact, OwnersRecord)


def _life_order(numbered: tuple[int, Fact]) -> tuple[int, int, bool]:
    life, fact = numbered
    return life, *_generation_order(fact)


def _number_lives(documents: Iterable[Fact]) -> Iterator[tuple[int, Fact]]:
    """Yield each record with the number of its life, which grows when the group is recreated."""
    life = 0
    previous: Fact | None = None
    for document in documents:
        life += _was_recreated(previous, document)
        yield life, document
        previous = document


def _generation(fact: Fact) -> int:
    """Return the generation of a record; 0 for a record that is not about an assignment."""
    return getattr(fact, "generation", 0)


def _was_recreated(previous: Fact | None, document: Fact) -> bool:
    """Whether the group was recreated between two records: the generation fell to 1, or fell after a long time.

    A lower generation soon afterwards is a late record of another leader.
    """
    if previous is None or _generation(document) >= _generation(previous):
        return False
    return _generation(document) == 1 or (document.at - previous.at).total_seconds() > MAX_CLOCK_SKEW_SECONDS


def build_history(
    group: str, facts: Sequence[Fact], samples: Samples, places: Places, ends: float | None = None
) -> GroupHistory:
    """Return the history of a group from its records and samples, each in order of time.

    The history begins with the first `owners` record, and ends with the last record or sample, unless `ends` is given.
    Samples before the beginning are used for the rates at the beginning.

    Raise ValueError if the history cannot be replayed.
    """
    first_owners = next((fact for fact in facts if isinstance(fact, OwnersRecord)), None)
    if first_owners is None:
        raise ValueError(f"Group {group} has no owners record, with which a replay could start")
    if first_owners.model == "Broadcasting":
        raise ValueError(f"Group {group} is Broadcasting: its queues have no owner")
    begins = first_owners.at.timestamp()
    facts = facts[bisect_left(facts, first_owners.at, key=attrgetter("at")) :]
    if ends is None:
        ends = max([facts[-1].at.timestamp(), *samples.seconds[-1:].tolist()])
    changes = tuple(_state_changes(group, first_owners, facts))
    queues_of_changes = (change.queues for change in changes)
    queues = tuple(sorted(frozenset().union(*queues_of_changes)))
    if not queues:
        raise ValueError(f"Group {group} has no queues")
    if ends - begins > MAX_HISTORY_SECONDS:
        days = (ends - begins) / 86400
        raise ValueError(f"Group {group} was recorded for {days:.0f} days; a replay is limited to 366 days")
    flows = _measure_flows(samples, places, queues, begins, ends)
    return GroupHistory(
        group=group,
        spec=planner_spec(group, queues, first_owners.ordering),
        begins=begins,
        ends=ends,
        document=_first_assignment(group, first_owners),
        changes=changes,
        queues=queues,
        arrivals=flows.arrivals,
        lag=flows.lag,
        capacity=_member_capacity(facts, queues, flows.consumed, begins),
    )


def planner_spec(group: str, queues: Sequence[Queue], ordering: str) -> GroupSpec:
    """Return a spec that is enough for the planner; the journal lacks the broker's address, so it is a placeholder."""
    subscribed: set[str] = set()
    for queue in queues:
        if not queue.topic.startswith(RETRY_TOPIC_PREFIX):
            subscribed.add(queue.topic)
    topics = sorted(subscribed) or [queues[0].topic]  # a spec needs a topic, even if only retry queues are known
    return parse_group(
        {
            "metadata": {"name": group.partition("/")[2]},
            "spec": {
                "broker": {"rocketmq": {"nameServers": ["replayed:9876"]}},
                "subscriptions": [{"topic": topic} for topic in topics],
                "ordering": ordering,
            },
        }
    )


def _first_assignment(group: str, fact: OwnersRecord) -> Assignment:
    at = format_time(fact.at.timestamp())
    releasing: dict[Queue, Release] = {}
    for revoked in fact.releasing:
        release = Release(Holder(revoked.holder, revoked.holder_uid), revoked.to, fact.generation, at)
        releasing |= dict.fromkeys(from_ranges(revoked.queues), release)
    members: dict[str, Share] = {}
    for name, pod in fact.members.items():
        queues = from_ranges(pod.queues)
        if queues or pod.standing != "Ended":  # an ended member has an entry only while it still owns queues
            members[name] = Share(pod.uid, tuple(sorted(queues)))
    return Assignment(
        group=group,
        generation=fact.generation,
        issued_at=at,
        strategy=str(fact.rules.get("strategy", "")),
        members=members,
        releasing=releasing,
    )


def _state_changes(group: str, first_owners: OwnersRecord, facts: Iterable[Fact]) -> Iterator[Change]:
    """Yield the state at the start, then each different state, with the time of the record that changes it."""
    present = _state_from_owners(group, first_owners)
    yield present
    for fact in facts:
        match fact:
            case MembershipRecord():
                changed = replace(present, members=_members_after(present.members, fact))
            case OwnersRecord():
                changed = _state_from_owners(group, fact)
            case HandoverRecord():
                changed = replace(present, queues=_queues_after(present.queues, fact))
            case _:
                continue
        changed = replace(changed, at=fact.at.timestamp())
        if replace(changed, at=present.at) != present:  # they differ in more than the time
            yield changed
        present = changed


def _state_from_owners(group: str, fact: OwnersRecord) -> Change:
    queues: set[Queue] = set()
    parts: list[Owner | Releasing] = [*fact.members.values(), *fact.releasing]
    for part in parts:
        queues.update(from_ranges(part.queues))
    queues.update(from_ranges(fact.unowned))
    members = {name: MemberPresence(pod.uid, pod.standing, pod.room) for name, pod in fact.members.items()}
    return Change(fact.at.timestamp(), members, frozenset(queues), recorded_policy(group, fact.rules))


def _members_after(previous: Mapping[str, MemberPresence], fact: MembershipRecord) -> dict[str, MemberPresence]:
    """Return the members of a record. It has no machine rooms, so members keep the rooms that they had."""
    rooms = {name: presence.room for name, presence in previous.items()}
    return {name: MemberPresence(pod.uid, pod.standing, rooms.get(name)) for name, pod in fact.members.items()}


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


class _Flows(NamedTuple):
    """Arrivals and consumption in messages a second, by step and queue, and the lag of each queue at the start."""

    arrivals: Rates
    consumed: Rates
    lag: Rates


def _measure_flows(samples: Samples, places: Places, queues: Sequence[Queue], start: float, end: float) -> _Flows:
    """Measure the flows of a history: rates are constant between two samples, also across a gap in the records.

    Where offsets go back, the flow is 0.
    """
    steps = max(1, int(np.ceil((end - start) / STEP_SECONDS)))
    edges: Rates = start + STEP_SECONDS * np.arange(steps + 1, dtype=np.float64)
    if end > start:
        edges[-1] = end  # the last step may be shorter than the others
    last, committed = _offset_arrays(samples, places, queues)
    arrivals = _rates(samples.seconds, last, edges, _cumulative_arrivals)
    consumed = _rates(samples.seconds, committed, edges, np.maximum.accumulate)
    return _Flows(arrivals, consumed, _lag_at(start, samples.seconds, np.maximum(last - committed, 0.0)))


def _lag_at(at: float, times: Rates, lag: Rates) -> Rates:
    """Return the lag of each queue at a time, interpolated between its samples; 0 if it is never known."""
    lag_at = np.zeros(lag.shape[1])
    for column in range(lag.shape[1]):
        is_known = ~np.isnan(lag[:, column])
        if is_known.any():
            lag_at[column] = np.interp(at, times[is_known], lag[is_known, column])
    return lag_at


def _offset_arrays(samples: Samples, places: Places, queues: Sequence[Queue]) -> tuple[Rates, Rates]:
    """Return the last and the committed offsets, by record of samples and queue; NaN: unknown or not committed."""
    keys = samples.place << QUEUE_ID_BITS | samples.queue  # one integer for each place and queue id
    # Records repeat the same queues, so look up each queue once.
    distinct, inverse = np.unique(keys, return_inverse=True)
    index_of_queue = index_queues(queues)
    indexes = np.full(len(distinct), -1)  # by distinct key the index in `queues`; -1: the group does not consume it
    for number, key in enumerate(distinct.tolist()):
        place = places.by_code[key >> QUEUE_ID_BITS]
        queue = Queue(place.topic, place.broker, key % (1 << QUEUE_ID_BITS))
        indexes[number] = index_of_queue.get(queue, -1)
    column = indexes[inverse]
    is_known = column >= 0
    cells = samples.record[is_known], column[is_known]  # row and column of each sample
    last = np.full((len(samples.at), len(queues)), np.nan)
    committed = last.copy()
    last[cells] = samples.last[is_known]
    committed[cells] = np.where(samples.committed == NOT_COMMITTED, np.nan, samples.committed)[is_known]
    return last, committed


def _cumulative_arrivals(ends: Rates) -> Rates:
    """Return the cumulative arrivals at each sample. A fall of the end offset (a recreated topic) is no arrival."""
    arrived: Rates = np.cumsum(np.maximum(np.diff(ends, prepend=ends[0]), 0.0))
    return arrived


def _rates(times: Rates, offsets: Rates, edges: Rates, make_monotonic: Callable[[Rates], Rates]) -> Rates:
    """Return how fast each queue's offsets grow between edges; `make_monotonic` makes them monotonic before."""
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
    """Return the highest rate of any member in steps without a handover, times CAPACITY_HEADROOM.

    Only steps just after an `owners` record and before the next handover count: there, the owners are known. The
    capacity is infinite if no rate was measured.
    """
    index_of_queue = index_queues(queues)
    # A queue's consumption in a step with a handover has no single owner.
    moving_steps = {_step_of(fact, begins) for fact in facts if isinstance(fact, HandoverRecord)}
    next_handover = len(consumed)  # the step of the handover that follows a record, or the end
    highest = 0.0
    for fact in reversed(facts):  # backwards, so that the next handover is known
        if isinstance(fact, HandoverRecord):
            next_handover = _step_of(fact, begins)
        if isinstance(fact, OwnersRecord):
            first = _step_of(fact, begins)
            end = min(first + OWNERS_KNOWN_STEPS, next_handover, len(consumed))
            quiet_steps = set(range(first, end)) - moving_steps
            for pod in fact.members.values():
                owned = [index_of_queue[queue] for queue in from_ranges(pod.queues) if queue in index_of_queue]
                for step in quiet_steps:
                    highest = max(highest, float(consumed[step, owned].sum()))
    return highest * CAPACITY_HEADROOM or float("inf")


def _step_of(fact: Fact, begins: float) -> int:
    return int((fact.at.timestamp() - begins) / STEP_SECONDS)
