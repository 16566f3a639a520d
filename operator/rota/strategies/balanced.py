"""Balanced: spreads weight, not counts, over members of unequal capacity, in the queues' machine rooms, with few moves.

Weights of queues (messages a second) and capacities of members are measured, and a measurement may be wrong. A value
that is no number, negative or absurd is replaced before use, so a wrong value costs a bounded number of moves.

The cost of an assignment is the sum over members of carried² / capacity, which is least when all members are equally
full, plus a penalty for every queue whose owner is in another room. The decision is greedy, in three steps:

1. queues without an owner go, heaviest first, to a member of their room that is not yet full, otherwise to the member
   where they add least cost (this is no move: no member loses them);
2. a member without any queue takes one from the fullest member that has two;
3. single queues move wherever that lowers the cost, until no move does. A member's last queue stays.

Steps 2 and 3 end when `maxMoves` queues have been taken from members. Every move of step 3 lowers the cost by more
than rounding, so the step ends, and a second run on the result changes nothing.

Reasons are read off the same scales (`rota.strategies.scales`) after the same decision, so they cannot differ from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import median
from typing import TypeGuard

import numpy as np

from rota.model import NOBODY, RETRY, Queue, Roster
from rota.sentences import count
from rota.strategies import given
from rota.strategies.arrays import Owners, whole
from rota.strategies.scales import Scales, Step
from rota.strategies.words import NOBODY_OWNED_IT

ABSURD = 1000.0  # no queue counts for more than this many ordinary ones
TINY, HUGE = 1e-15, 1e15  # in any unit: beyond these, sums of squares exceed the range of floats
COUNTS = 0.001  # queues that weigh nothing are spread, too: each counts for this share of an ordinary one
PRECISION = 2**40  # steps to a mean weight


def balanced(
    roster: Roster,
    *,
    queueWeights: Mapping[Queue, float] | None = None,
    memberWeights: Mapping[str, float] | None = None,
    queueRooms: Mapping[str, str] | None = None,
    memberRooms: Mapping[str, str] | None = None,
    maxMoves: int | None = None,
) -> Owners:
    """Spread weight over capacity, in the queue's room where that can be, taking at most `maxMoves` from anybody."""
    if maxMoves is not None and not whole(maxMoves):
        raise ValueError(f"Option maxMoves must be a whole number from 0 up, not {maxMoves!r}")
    scales = _scales(roster, queueWeights, memberWeights, queueRooms, memberRooms)
    scales.decide(roster.owners, maxMoves)
    return np.array(scales.owners, dtype=np.int32)


def sanitize(measured: Sequence[float | None], least: float = 0.0) -> list[float]:
    """Replace impossible values: no number, negative, or far from the median. If all are unknown, all are equal."""
    plausible = [_bounded(value) if _can_be(value) else None for value in measured]
    ordinary = median([value for value in plausible if value] or [1.0])
    return [ordinary if value is None else max(min(value, ordinary * ABSURD), ordinary * least) for value in plausible]


def _can_be(measured: float | None) -> TypeGuard[float]:
    return measured is not None and 0 <= measured < inf


def _bounded(measured: float) -> float:
    return float(max(min(measured, HUGE), TINY)) if measured else 0.0


def why_balanced(
    roster: Roster,
    _owners: Owners,
    queues: Sequence[int],
    *,
    queueWeights: Mapping[Queue, float] | None = None,
    memberWeights: Mapping[str, float] | None = None,
    queueRooms: Mapping[str, str] | None = None,
    memberRooms: Mapping[str, str] | None = None,
    maxMoves: int | None = None,
) -> Iterator[str]:
    """Yield the loads that gave a queue to its owner, or why it stays, and which measurements were replaced."""
    scales = _scales(roster, queueWeights, memberWeights, queueRooms, memberRooms)
    scales.decide(roster.owners, maxMoves)
    reasons, doubts = (
        _Reasons(roster, scales, maxMoves),
        _ReplacedMeasurements(roster, queueWeights or {}, memberWeights or {}),
    )
    for queue in queues:
        reason, members = reasons.of(queue)
        yield "; ".join([reason, *doubts.about(queue, members)])


def _scales(
    roster: Roster,
    queue_weights: Mapping[Queue, float] | None,
    member_weights: Mapping[str, float] | None,
    queue_rooms: Mapping[str, str] | None,
    member_rooms: Mapping[str, str] | None,
) -> Scales:
    broker_rooms = given.texts("Option queueRooms", queue_rooms)
    own_rooms = given.texts("Option memberRooms", member_rooms)
    return Scales(
        _weights(roster, given.weights("Option queueWeights", queue_weights)),
        _trusted_capacities(roster, given.weights("Option memberWeights", member_weights)),
        [broker_rooms.get(queue.broker) for queue in roster.queues],
        [own_rooms.get(member) for member in roster.members],
    )


def _trusted_capacities(roster: Roster, measured: Mapping[str, float]) -> list[float]:
    return sanitize([measured.get(member) for member in roster.members], least=1 / ABSURD)


def _believed(roster: Roster, measured: Mapping[Queue, float]) -> list[float]:
    """Return the weights of queues after replacement; a retry queue weighs nothing, even if it was measured."""
    return sanitize([0.0 if _retry(queue) else measured.get(queue) for queue in roster.queues])


def _weights(roster: Roster, measured: Mapping[Queue, float]) -> list[int]:
    """Return weights as whole numbers, so that sums are exact in any order and a second run has the same input.

    A retry queue counts for next to nothing: it must not make the spread of the other queues uneven.
    """
    weights = _believed(roster, measured)
    unit = sum(weights) / len(weights) / PRECISION or 1.0
    floor, next_to_nothing = int(PRECISION * COUNTS), int(PRECISION * COUNTS * COUNTS)
    return [
        next_to_nothing if _retry(queue) else round(weight / unit) + floor
        for queue, weight in zip(roster.queues, weights, strict=True)
    ]


def _retry(queue: Queue) -> bool:
    return queue.topic.startswith(RETRY)


class _Reasons:
    """Returns the reason for a queue's owner as text, with the members that it mentions."""

    def __init__(self, roster: Roster, scales: Scales, most: int | None) -> None:
        self._roster, self._scales, self._most = roster, scales, most
        weights = {weight for queue, weight in zip(roster.queues, scales.weights, strict=True) if not _retry(queue)}
        self._alike = len(weights) <= 1 and len(set(scales.capacities)) == 1

    def of(self, queue: int) -> tuple[str, list[int]]:
        """Return the reason for a queue's owner, and the members that it mentions."""
        was, now = self._roster.owners[queue], self._scales.owners[queue]
        if was == now:
            return self._why_it_stays(queue, now)
        if was == NOBODY:
            reason, members = self._why_it_moves(queue, now)
            return f"{NOBODY_OWNED_IT}; {reason}", members
        return self._why_it_moves(queue, now)

    def _why_it_moves(self, queue: int, owner: int) -> tuple[str, list[int]]:
        step, giver, giver_carried, carried = self._scales.deeds[queue]
        place, load = self._place(owner, queue), self._load(owner, carried)
        if step is Step.HOME:
            return f"{place} had {f'room for it ({load})' if carried else 'nothing yet'}", [owner]
        if step is Step.EMPTIEST:
            return f"{self._away(owner, queue)}{place} was the emptiest ({load})", [owner]
        if step is Step.CHEAPEST:
            return f"{self._away(owner, queue)}{place} ({load}) could best take it, evenness and rooms considered", [
                owner
            ]
        name, giver_load = self._roster.members[giver], self._load(giver, giver_carried)
        reasons = {
            Step.IDLE: f"{place} was idle, and {name} ({giver_load}) was the fullest that could spare one",
            Step.EVEN: f"with {place} ({load}) the fleet is more even than with {name} ({giver_load})",
            Step.HOMEWARD: f"{place} ({load}) could take it home from {name} ({giver_load})",
        }
        return reasons[step], [owner, giver]

    def _why_it_stays(self, queue: int, owner: int) -> tuple[str, list[int]]:
        candidates, name = self._scales.candidates(but=owner), self._roster.members[owner]
        if not candidates:
            return "there is no other member", [owner]
        if self._scales.counts[owner] == 1:
            return f"it is the only queue of {name}, and nobody's last queue is taken", [owner]
        taker, reason = self._why_nobody_takes_it(queue, candidates)
        loads = f"{name} has {self._load(owner)}, {self._roster.members[taker]} {self._load(taker)}"
        return f"{reason} ({loads})", [owner, taker]

    def _why_nobody_takes_it(self, queue: int, candidates: Sequence[int]) -> tuple[int, str]:
        """Return the best candidate among the emptiest members of each room, and the reason against it."""
        scales = self._scales
        change, least = min((scales.change(queue, member), member) for member in candidates)
        change_of_evenness, evenest = min((scales.change_of_evenness(queue, member), member) for member in candidates)
        for member in candidates:
            if scales.improves(scales.change(queue, member), queue, member):
                obstacle = f"but maxMoves {self._most} allows no more moves"
                return member, f"it would be better with {self._emptiest(member)}, {obstacle}"
        if scales.lowers(change, queue):
            return least, f"{self._emptiest(least)}, is too nearly as full for a move"
        if scales.lowers(change_of_evenness, queue):
            obstacle = f"but not by enough to leave room {scales.queue_rooms[queue]}"
            return evenest, f"the fleet would be more even with {self._emptiest(evenest)}, {obstacle}"
        return least, f"moving it to {self._emptiest(least)}, would not make the fleet more even"

    def _emptiest(self, member: int) -> str:
        room = self._scales.member_rooms[member]
        return f"{self._roster.members[member]}, the emptiest of the others{f' in room {room}' if room else ''}"

    def _place(self, member: int, queue: int) -> str:
        """Name a member, and its room if that matters for the queue."""
        room, home = self._scales.member_rooms[member], self._scales.queue_rooms[queue]
        where = f" in {'its own ' if room == home else ''}room {room}" if room and home else ""
        return f"{self._roster.members[member]}{where}"

    def _away(self, member: int, queue: int) -> str:
        if not self._scales.strange(member, queue):
            return ""
        home = self._scales.queue_rooms[queue]
        return f"its room {home} {'was full' if home in self._scales.member_rooms else 'has no member'}, and "

    def _load(self, member: int, carried: int | None = None) -> str:
        """Describe a member's load: a number of queues if all queues count alike; retry queues are then left out."""
        carries = self._scales.carried[member] if carried is None else carried
        if self._alike:
            return count(round(carries / max(self._scales.weights)), "queue")
        return f"{carries / self._scales.capacities[member] / self._scales.mean:.0%} of its share"


class _ReplacedMeasurements:
    """The measurements that were replaced."""

    def __init__(
        self, roster: Roster, queue_weights: Mapping[Queue, float], member_weights: Mapping[str, float]
    ) -> None:
        self._roster, self._weights, self._capacities = roster, queue_weights, member_weights
        self._used_weights = _believed(roster, queue_weights)
        self._used_capacities = _trusted_capacities(roster, member_weights)
        self._known = [queue for queue in roster.queues if _can_be(queue_weights.get(queue)) and not _retry(queue)]

    def about(self, queue: int, members: Sequence[int]) -> Iterator[str]:
        """Yield a remark for each replaced measurement that a reason depends on."""
        roster_queue = self._roster.queues[queue]
        if _retry(roster_queue):
            yield "a retry queue counts for next to nothing"
        elif not self._known:
            yield "no weights are known, so queues are counted"
        else:
            yield from _doubt("its weight", self._weights.get(roster_queue), self._used_weights[queue])
        if self._capacities:
            for member in members:
                name = self._roster.members[member]
                yield from _doubt(f"the capacity of {name}", self._capacities.get(name), self._used_capacities[member])


def _doubt(subject: str, measured: float | None, used: float) -> Iterator[str]:
    if measured is None:
        yield f"{subject} is unknown and counts as {used:g}"
    elif measured != used:
        yield f"{subject} cannot be {_shown(measured)} and counts as {used:g}"


def _shown(number: float) -> str:
    try:
        return f"{float(number):g}"
    except OverflowError:  # a whole number may be of any size
        return "so large"
