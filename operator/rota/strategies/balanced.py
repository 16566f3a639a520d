"""Balanced: spreads weight, not counts, over members of unequal capacity, in the queues' machine rooms, with few moves.

Weights of queues (messages a second) and capacities of members are measured, and a measurement may be wrong. A value
that is not a number, negative or implausible is replaced before use, so a wrong value costs a bounded number of moves.

The cost of an assignment is the sum over members of load² / capacity, which is least when all members are equally full,
plus a penalty for every queue whose owner is in another room; `rota.strategies.scales` has the formulas. The decision
is greedy, in three stages:

1. queues without an owner go, heaviest first, to a member of their room that is not yet full (`Step.HOME`), otherwise
   to the member where they add least cost (EMPTIEST if that is also the emptiest member, else CHEAPEST). This is no
   move: no member loses them;
2. a member without any queue takes one from the fullest member that has at least two (IDLE);
3. single queues move wherever that lowers the cost by enough, until no move does (EVEN if the fleet becomes more even,
   else HOMEWARD). A member's last queue stays.

Stages 2 and 3 end when `maxMoves` queues have been taken from members. Every move of stage 3 lowers the cost by more
than rounding, so the stage ends, and a second run on the result changes nothing.

The reasons come from a second run of the same decision, which records each step (`Scales.placements`), so they cannot
differ from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from statistics import median

import numpy as np

from rota.model import NO_OWNER, Queue, Roster
from rota.sentences import pluralize
from rota.strategies import input_checks
from rota.strategies.arrays import Owners, is_retry_topic, is_whole_number
from rota.strategies.phrases import NO_PREVIOUS_OWNER
from rota.strategies.scales import Scales, Step

MAX_WEIGHT_RATIO = 1000.0  # no queue counts for more than this many ordinary ones
# Limits of a measured value in any unit: beyond them, sums of squares exceed the range of floats.
MIN_WEIGHT = 1e-15
MAX_WEIGHT = 1e15
MIN_WEIGHT_SHARE = 0.001  # queues that weigh nothing are spread, too: each counts for this share of an ordinary one
UNITS_PER_MEAN_WEIGHT = 2**40  # weights are whole numbers of units, so small that rounding does not matter


def balanced(
    roster: Roster,
    *,
    queueWeights: Mapping[Queue, float] | None = None,
    memberWeights: Mapping[str, float] | None = None,
    queueRooms: Mapping[str, str] | None = None,
    memberRooms: Mapping[str, str] | None = None,
    maxMoves: int | None = None,
) -> Owners:
    """Spread weight over capacity, in the queue's room if possible; take at most `maxMoves` queues from members."""
    if maxMoves is not None and not is_whole_number(maxMoves):
        raise ValueError(f"Option maxMoves must be a whole number from 0 up, not {maxMoves!r}")
    scales = _build_scales(roster, queueWeights, memberWeights, queueRooms, memberRooms)
    scales.decide(roster.owners, maxMoves)
    return np.array(scales.owners, dtype=np.int32)


def replace_implausible(measured: Sequence[float | None], min_share: float = 0.0) -> list[float]:
    """Replace each implausible value.

    A value that is unknown, negative or not a number becomes the median of the positive ones, or 1 if there are none.
    Any other is limited to at most MAX_WEIGHT_RATIO, and at least `min_share`, of that median.
    """
    plausible = [*map(_limit_weight, measured)]
    positive = [*filter(None, plausible)]
    ordinary = median(positive or [1.0])
    least = ordinary * min_share
    most = ordinary * MAX_WEIGHT_RATIO
    return [ordinary if value is None else max(min(value, most), least) for value in plausible]


def _limit_weight(measured: float | None) -> float | None:
    """Return a measurement within the limits of floats; None if it is unknown, negative or not a number."""
    if measured is None or not 0 <= measured < inf:
        return None
    return float(max(min(measured, MAX_WEIGHT), MIN_WEIGHT)) if measured else 0.0


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
    """Yield a sentence for each queue (an index): the loads by which it got its owner, or why it stays.

    It also names measurements that were replaced.
    """
    scales = _build_scales(roster, queueWeights, memberWeights, queueRooms, memberRooms)
    scales.decide(roster.owners, maxMoves)
    reasons = _Reasons(roster, scales, maxMoves)
    remarks = _ReplacedMeasurements(roster, queueWeights or {}, memberWeights or {})
    for queue in queues:
        reason, members = reasons.reason_of(queue)
        yield "; ".join([reason, *remarks.describe(queue, members)])


def _build_scales(
    roster: Roster,
    queue_weights: Mapping[Queue, float] | None,
    member_weights: Mapping[str, float] | None,
    queue_rooms: Mapping[str, str] | None,
    member_rooms: Mapping[str, str] | None,
) -> Scales:
    broker_rooms = input_checks.check_texts("Option queueRooms", queue_rooms)
    own_rooms = input_checks.check_texts("Option memberRooms", member_rooms)
    return Scales(
        _scale_weights(roster, input_checks.check_weights("Option queueWeights", queue_weights)),
        _replace_capacities(roster, input_checks.check_weights("Option memberWeights", member_weights)),
        [broker_rooms.get(queue.broker) for queue in roster.queues],
        list(map(own_rooms.get, roster.members)),
    )


def _replace_capacities(roster: Roster, measured: Mapping[str, float]) -> list[float]:
    return replace_implausible(list(map(measured.get, roster.members)), min_share=1 / MAX_WEIGHT_RATIO)


def _replace_weights(roster: Roster, measured: Mapping[Queue, float]) -> list[float]:
    """Return each queue's weight, with implausible ones replaced.

    A retry queue is entered as 0 here, even if it was measured; `_scale_weights` gives it its negligible weight.
    """
    return replace_implausible([0.0 if is_retry_topic(queue.topic) else measured.get(queue) for queue in roster.queues])


def _scale_weights(roster: Roster, measured: Mapping[Queue, float]) -> list[int]:
    """Return weights as whole numbers, so that sums are exact in any order and a second run has the same input.

    A retry queue has a negligible weight: it must not make the spread of the other queues uneven.
    """
    weights = _replace_weights(roster, measured)
    unit = sum(weights) / len(weights) / UNITS_PER_MEAN_WEIGHT or 1.0  # any unit if all weights are 0
    floor = int(UNITS_PER_MEAN_WEIGHT * MIN_WEIGHT_SHARE)
    negligible = int(UNITS_PER_MEAN_WEIGHT * MIN_WEIGHT_SHARE * MIN_WEIGHT_SHARE)  # a small share of the floor
    scaled = [round(weight / unit) + floor for weight in weights]
    for index, queue in enumerate(roster.queues):
        if is_retry_topic(queue.topic):
            scaled[index] = negligible
    return scaled


class _Reasons:
    """Returns the reason for a queue's owner as text, with the members that it mentions."""

    def __init__(self, roster: Roster, scales: Scales, max_moves: int | None) -> None:
        self._roster = roster
        self._scales = scales
        self._max_moves = max_moves
        weighed = zip(roster.queues, scales.weights, strict=True)
        weights = {weight for queue, weight in weighed if not is_retry_topic(queue.topic)}
        self._has_equal_weights = len(weights) <= 1 and len(set(scales.capacities)) == 1

    def reason_of(self, queue: int) -> tuple[str, list[int]]:
        """Return the reason for a queue's owner, and the members that it mentions."""
        was = self._roster.owners[queue]
        now = self._scales.owners[queue]
        if was == now:
            return self._reason_to_stay(queue, now)
        if was == NO_OWNER:
            reason, members = self._reason_to_move(queue, now)
            return f"{NO_PREVIOUS_OWNER}; {reason}", members
        return self._reason_to_move(queue, now)

    def _reason_to_move(self, queue: int, owner: int) -> tuple[str, list[int]]:
        # The loads are of both members just before this step.
        step, giver, giver_load_before, owner_load_before = self._scales.placements[queue]
        place = self._describe_member(owner, queue)
        load = self._describe_load(owner, owner_load_before)
        if step is Step.HOME:
            return f"{place} had {f'capacity for it ({load})' if owner_load_before else 'no queue yet'}", [owner]
        if step is Step.EMPTIEST:
            return f"{self._describe_other_room(owner, queue)}{place} was the emptiest ({load})", [owner]
        if step is Step.CHEAPEST:
            reason = f"{place} ({load}) is the best choice by load and room"
            return f"{self._describe_other_room(owner, queue)}{reason}", [owner]
        name = self._roster.members[giver]
        giver_load = self._describe_load(giver, giver_load_before)
        reasons = {
            Step.IDLE: f"{place} was idle, and {name} ({giver_load}) was the fullest that could spare one",
            Step.EVEN: f"with {place} ({load}) the fleet is more even than with {name} ({giver_load})",
            Step.HOMEWARD: f"{place} ({load}) could take it from {name} ({giver_load}), which is in another room",
        }
        return reasons[step], [owner, giver]

    def _reason_to_stay(self, queue: int, owner: int) -> tuple[str, list[int]]:
        candidates = self._scales.candidates(skipped_member=owner)
        name = self._roster.members[owner]
        if not candidates:
            return "there is no other member", [owner]
        if self._scales.queue_counts[owner] == 1:
            return f"it is the only queue of {name}, and a member's last queue is never taken", [owner]
        taker, reason = self._reason_against_move(queue, candidates)
        loads = f"{name} has {self._describe_load(owner)}, {self._roster.members[taker]} {self._describe_load(taker)}"
        return f"{reason} ({loads})", [owner, taker]

    def _reason_against_move(self, queue: int, candidates: Sequence[int]) -> tuple[int, str]:
        """Return the best candidate among the emptiest members of each room, and the reason against it.

        `lowers_cost` accepts any change beyond rounding errors, `is_worthwhile` only one that stage 3 would make.
        """
        scales = self._scales
        cost_change, cheapest = min((scales.cost_change(queue, member), member) for member in candidates)
        evenness_change, evenest = min((scales.evenness_change(queue, member), member) for member in candidates)
        for member in candidates:
            if scales.is_worthwhile(scales.cost_change(queue, member), queue, member):
                obstacle = f"but maxMoves {self._max_moves} allows no more moves"
                return member, f"it would be better with {self._describe_emptiest(member)}, {obstacle}"
        if scales.lowers_cost(cost_change, queue):
            return cheapest, f"{self._describe_emptiest(cheapest)}, is almost as full, so a move is not worth it"
        if scales.lowers_cost(evenness_change, queue):
            obstacle = f"but not by enough to leave room {scales.queue_rooms[queue]}"
            return evenest, f"the fleet would be more even with {self._describe_emptiest(evenest)}, {obstacle}"
        return cheapest, f"moving it to {self._describe_emptiest(cheapest)}, would not make the fleet more even"

    def _describe_emptiest(self, member: int) -> str:
        room = self._scales.member_rooms[member]
        return f"{self._roster.members[member]}, the emptiest of the others{f' in room {room}' if room else ''}"

    def _describe_member(self, member: int, queue: int) -> str:
        """Name a member, and its room if that matters for the queue."""
        room = self._scales.member_rooms[member]
        home = self._scales.queue_rooms[queue]
        where = f" in {'its own ' if room == home else ''}room {room}" if room and home else ""
        return f"{self._roster.members[member]}{where}"

    def _describe_other_room(self, member: int, queue: int) -> str:
        if not self._scales.room_mismatch(member, queue):
            return ""
        home = self._scales.queue_rooms[queue]
        return f"its room {home} {'was full' if home in self._scales.member_rooms else 'has no member'}, and "

    def _describe_load(self, member: int, load_before: int | None = None) -> str:
        """Describe a member's load, by default the present one.

        It is a number of queues if all count alike; the negligible weight of retry queues is then rounded away.
        """
        load = self._scales.loads[member] if load_before is None else load_before
        if self._has_equal_weights:
            return pluralize(round(load / max(self._scales.weights)), "queue")
        return f"{load / self._scales.capacities[member] / self._scales.mean_fullness:.0%} of its share"


class _ReplacedMeasurements:
    """Describes the measurements that were replaced before the decision."""

    def __init__(
        self, roster: Roster, queue_weights: Mapping[Queue, float], member_weights: Mapping[str, float]
    ) -> None:
        self._roster = roster
        self._weights = queue_weights  # as measured
        self._capacities = member_weights
        self._used_weights = _replace_weights(roster, queue_weights)
        self._used_capacities = _replace_capacities(roster, member_weights)
        self._has_weights = any(map(self._is_measured, roster.queues))

    def _is_measured(self, queue: Queue) -> bool:
        return not is_retry_topic(queue.topic) and _limit_weight(self._weights.get(queue)) is not None

    def describe(self, queue: int, members: Sequence[int]) -> Iterator[str]:
        """Yield a remark for each replaced measurement of a queue and of the members that its reason mentions."""
        roster_queue = self._roster.queues[queue]
        if is_retry_topic(roster_queue.topic):
            yield "a retry queue has a negligible weight"
        elif not self._has_weights:
            yield "no weights are known, so queues are counted"
        else:
            yield from _describe_replacement("its weight", self._weights.get(roster_queue), self._used_weights[queue])
        if self._capacities:
            for member in members:
                name = self._roster.members[member]
                yield from _describe_replacement(
                    f"the capacity of {name}", self._capacities.get(name), self._used_capacities[member]
                )


def _describe_replacement(subject: str, measured: float | None, used: float) -> Iterator[str]:
    if measured is None:
        yield f"{subject} is unknown and counts as {used:g}"
    elif measured != used:
        yield f"{subject} has the implausible value {_format_number(measured)} and counts as {used:g}"


def _format_number(number: float) -> str:
    try:
        return f"{float(number):g}"
    except OverflowError:  # a whole number may be of any size
        return "over 1e308"
