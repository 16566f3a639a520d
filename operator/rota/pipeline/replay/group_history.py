"""What happened to one group: who was there and which queues, when; how much came to each; who owned what at first.

Made of the journal's records, or invented by the generator; `rota.pipeline.replay.replay` replays it under any policy.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace as replaced
from numpy.typing import NDArray

from rota.documents import Assignment, Release, Share
from rota.model import RETRY, Holder, Queue
from rota.pipeline.history.ordering import CLOCKS_DIFFER
from rota.ranges import from_ranges
from rota.records import Fact, Handover, Membership, Offsets, Owners
from rota.spec import GroupSpec, PolicySpec, group_spec, policy_spec
from rota.timestamps import format_time

STEP = 300.0  # seconds: between two of these, what comes to a queue comes evenly
LONGEST = 366 * 86400.0  # seconds of a story; all of its steps are in memory
HEADROOM = 1.1  # that a member can work more than it ever was seen to

Rates = NDArray[np.float64]


class Presence(NamedTuple):
    """A pod that is there, and how it stands."""

    uid: str
    standing: str
    room: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """From this time on these members were there, and these queues; `policy` was in force."""

    at: float
    members: Mapping[str, Presence]
    queues: frozenset[Queue]
    policy: PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All of it."""

    group: str
    spec: GroupSpec
    begins: float
    ends: float
    document: Assignment
    changes: tuple[Change, ...]  # the first is how it begins
    queues: tuple[Queue, ...]  # all that there ever were, sorted
    arrivals: Rates  # messages a second, by step and queue
    lag: Rates  # by queue, at the beginning
    capacity: float  # messages a second that one member can work

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.arrivals)


def in_order(facts: Iterable[Fact]) -> list[Fact]:
    """Sort a group's records by time, and documents by their numbers, as two leaders' clocks may differ.

    A document is written after the one before it, whatever its clock says; one with a much lower number is of a group
    that was made anew. What is whole comes after what it sums up.
    """
    by_time = sorted(facts, key=lambda it: (it.at, _generation(it), isinstance(it, Owners)))
    documents = [it for it in by_time if _generation(it)]
    lives = list(accumulate(map(_is_another, [None, *documents], documents), initial=0))[1:]
    numbered = sorted(zip(lives, documents, strict=True), key=_place)
    told, at = [it for it in by_time if not _generation(it)], datetime.min.replace(tzinfo=UTC)
    for _, it in numbered:
        at = max(at, it.at)
        told.append(it if it.at == at else replaced(it, at=at))
    return sorted(told, key=lambda it: it.at)


def _place(numbered: tuple[int, Fact]) -> tuple[int, int, bool]:
    life, it = numbered
    return life, _generation(it), isinstance(it, Owners)


def _generation(it: Fact) -> int:
    return getattr(it, "generation", 0)


def _is_another(before: Fact | None, it: Fact) -> bool:
    """Say whether a document is of a group that was made anew since."""
    if before is None or _generation(it) >= _generation(before):
        return False
    return _generation(it) == 1 or (it.at - before.at).total_seconds() > CLOCKS_DIFFER


def story(group: str, facts: Sequence[Fact], ends: float | None = None) -> Story:
    """Put a group's records together, in order; a history that nobody can replay is a sentence."""
    whole = next((it for it in facts if isinstance(it, Owners)), None)
    if whole is None:
        raise ValueError(f"Group {group} has no owners record, with which a replay could begin")
    if whole.model == "Broadcasting":
        raise ValueError(f"Group {group} is Broadcasting: nobody owns its queues")
    begins = whole.at.timestamp()
    later = [it for it in facts if it.at.timestamp() >= begins]
    last = later[-1].at.timestamp() if ends is None else ends
    changes = tuple(_changes(whole, later))
    queues = tuple(sorted(frozenset().union(*(it.queues for it in changes))))
    if not queues:
        raise ValueError(f"Group {group} has no queues")
    if last - begins > LONGEST:
        days = (last - begins) / 86400
        raise ValueError(f"Group {group} was recorded for {days:.0f} days; a replay is of 366 at most")
    arrivals, worked, lag = _flows([it for it in later if isinstance(it, Offsets)], queues, begins, last)
    return Story(
        group=group,
        spec=spec_of(group, queues, whole.ordering),
        begins=begins,
        ends=last,
        document=_document(whole),
        changes=changes,
        queues=queues,
        arrivals=arrivals,
        lag=lag,
        capacity=_capacity(later, queues, worked, begins),
    )


def spec_of(group: str, queues: Iterable[Queue], ordering: str) -> GroupSpec:
    """Return what the planner has to know of a group; where its brokers are it need not."""
    topics = sorted({queue.topic for queue in queues if not queue.topic.startswith(RETRY)})
    return group_spec(
        {
            "metadata": {"name": group.partition("/")[2]},
            "spec": {
                "broker": {"rocketmq": {"nameServers": ["replayed:9876"]}},
                "subscriptions": [{"topic": topic} for topic in topics or [queue.topic for queue in queues][:1]],
                "ordering": ordering,
            },
        }
    )


def _document(it: Owners) -> Assignment:
    at = format_time(it.at.timestamp())
    releasing = {
        queue: Release(Holder(some.holder, some.holder_uid), some.to, it.generation, at)
        for some in it.releasing
        for queue in from_ranges(some.queues)
    }
    shares = {name: Share(own.uid, tuple(sorted(from_ranges(own.queues)))) for name, own in it.members.items()}
    kept = {name: share for name, share in shares.items() if share.queues or it.members[name].standing != "Ended"}
    strategy = str(it.rules.get("strategy", ""))
    return Assignment(
        group=it.group, generation=it.generation, issued_at=at, strategy=strategy, members=kept, releasing=releasing
    )


def _changes(whole: Owners, facts: Iterable[Fact]) -> Iterator[Change]:
    """Yield what changed, at the times at which it was told."""
    now = _beginning(whole)
    yield now
    for it in facts:
        match it:
            case Membership():
                rooms = {name: there.room for name, there in now.members.items()}
                members = {name: Presence(pod.uid, pod.standing, rooms.get(name)) for name, pod in it.members.items()}
                after = replace(now, members=members)
            case Owners():
                after = _beginning(it)
            case Handover():
                after = replace(now, queues=_routes(now.queues, it))
            case _:
                continue
        after = replace(after, at=it.at.timestamp())
        if (after.members, after.queues, after.policy) != (now.members, now.queues, now.policy):
            yield after
        now = after


def _beginning(it: Owners) -> Change:
    given = [own.queues for own in it.members.values()] + [some.queues for some in it.releasing] + [it.unowned]
    members = {name: Presence(own.uid, own.standing, own.room) for name, own in it.members.items()}
    queues = frozenset(queue for ranges in given for queue in from_ranges(ranges))
    return Change(it.at.timestamp(), members, queues, rules_of(it.group, it.rules))


def rules_of(group: str, rules: Mapping[str, Any]) -> PolicySpec:
    """Return the policy that was in force; one of a later version than ours is a sentence."""
    try:
        return policy_spec({"spec": rules or {}})
    except ValueError as error:
        raise ValueError(f"The policy that group {group} had cannot be followed: {error}") from None


def _routes(queues: frozenset[Queue], it: Handover) -> frozenset[Queue]:
    """Say which queues there are after a handover: one that was nobody's is new, one that nobody shall have left."""
    named = from_ranges(it.queues)
    if it.act in {"Grant", "Force"}:
        return queues.union(named)
    leaves = it.act == "Drop" or (it.act == "Revoke" and it.to is None)
    return queues.difference(named) if leaves else queues


def _flows(looks: Sequence[Offsets], queues: Sequence[Queue], begins: float, ends: float) -> tuple[Rates, Rates, Rates]:
    """Return by step and queue what came and what was worked, a second, and the lag at first.

    Offsets that go back, or that a hole in the records hides, are no flow; what came meanwhile came evenly.
    """
    places = {queue: index for index, queue in enumerate(queues)}
    steps = max(1, int(np.ceil((ends - begins) / STEP)))
    edges: Rates = begins + STEP * np.arange(steps + 1, dtype=np.float64)
    last, done = _read(looks, places)
    times = np.array([it.at.timestamp() for it in looks])
    lag = np.zeros(len(queues))
    if len(looks):
        lag = np.nan_to_num(np.maximum(last[0] - done[0], 0.0))
    return _rates(times, last, edges, _came), _rates(times, done, edges, np.maximum.accumulate), lag


def _read(looks: Sequence[Offsets], places: Mapping[Queue, int]) -> tuple[Rates, Rates]:
    last = np.full((len(looks), len(places)), np.nan)
    done = last.copy()
    for row, look in enumerate(looks):
        for topic, brokers in look.topics.items():
            for broker, columns in brokers.items():
                found = [places.get(Queue(topic, broker, number), -1) for number in columns.ids]
                kept = [index for index, place in enumerate(found) if place >= 0]
                at = [found[index] for index in kept]
                last[row, at] = [columns.last[index] for index in kept]
                committed = [columns.committed[index] for index in kept]
                done[row, at] = [np.nan if offset is None else offset for offset in committed]
    return last, done


def _came(ends: Rates) -> Rates:
    """Return how much has come by each look; an end that falls is of a topic that was made anew."""
    came: Rates = np.cumsum(np.maximum(np.diff(ends, prepend=ends[0]), 0.0))
    return came


def _rates(times: Rates, offsets: Rates, edges: Rates, so_far: Callable[[Rates], Rates]) -> Rates:
    """Return how fast offsets grew between edges; what is worked again after they went back is not counted twice."""
    rates = np.zeros((len(edges) - 1, offsets.shape[1]))
    if len(times) < 2:  # noqa: PLR2004 - growth has two ends
        return rates
    for column in range(offsets.shape[1]):
        known = ~np.isnan(offsets[:, column])
        if known.sum() > 1:
            at_edges = np.interp(edges, times[known], so_far(offsets[known, column]))
            rates[:, column] = np.diff(at_edges) / np.diff(edges)
    return rates


def _capacity(facts: Sequence[Fact], queues: Sequence[Queue], worked: Rates, begins: float) -> float:
    """Return what a member can work: a bit more than the most that one was seen to.

    Where queues change hands within a step nobody knows whose work it was, so such steps are left out.
    """
    places = {queue: index for index, queue in enumerate(queues)}
    moving = {int((it.at.timestamp() - begins) / STEP) for it in facts if isinstance(it, Handover)}
    most = 0.0
    for whole in (it for it in facts if isinstance(it, Owners)):
        step = int((whole.at.timestamp() - begins) / STEP)
        quiet = [it for it in (step, step + 1) if it < len(worked) and it not in moving]
        owned = ([places[it] for it in from_ranges(own.queues) if it in places] for own in whole.members.values())
        loads = [float(worked[it, own].sum()) for own in owned if own for it in quiet]
        most = max([most, *loads])
    return most * HEADROOM or float("inf")
