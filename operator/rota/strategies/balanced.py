"""Balanced: spreads weight, not counts, over members of unequal capacity, near where the queues are, with few moves.

What a queue weighs (messages a second, lag) and what a member can carry come from measurement, and measurements lie:
what is no number, negative or absurd is replaced before it is used, so a lie costs a bounded number of moves.

How good an assignment is, is one number, its cost: the sum over members of carried² / capacity, which is least when
all are equally full, plus a fine for every queue whose owner is in another room. The decision is greedy, in three
steps:

1. queues that nobody owns go, heaviest first, to a member of their room that is not yet full, then to where they add
   least cost (this is no move: nobody loses them);
2. a member without any queue takes one from the fullest member that has two;
3. single queues move wherever that lowers the cost, until none does. A member's last queue stays.

Steps 2 and 3 end when `maxMoves` queues have been taken from somebody. The cost falls with every move of step 3, so
it ends, and a second run on the result finds nothing to do.
"""

import heapq
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from statistics import median

import numpy as np

from rota.model import NOBODY, RETRY, Queue, Roster
from rota.strategies.arrays import Owners, whole

ABSURD = 1000.0  # no queue counts for more than so many ordinary ones
CLEARLY = 0.02  # two members differ if their fullness does by this share of the mean
COUNTS = 0.001  # queues that weigh nothing are spread too: each counts for this share of an ordinary one
PRECISION = 2**40  # steps to a mean weight
NEAR = 0.10  # a queue stays in its room while that costs at most this share of the mean fullness

Room = str | None
Weighed = tuple[float, int]  # a queue's weight, or what moving it changes, and its index: sorts as needed


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
    scales = _Scales(
        _weights(roster, queueWeights or {}),
        trusted([(memberWeights or {}).get(member) for member in roster.members], least=1 / ABSURD),
        [(queueRooms or {}).get(queue.broker) for queue in roster.queues],
        [(memberRooms or {}).get(member) for member in roster.members],
    )
    scales.put(roster.owners)
    moves = scales.feed_the_idle(sys.maxsize if maxMoves is None else maxMoves)
    scales.level(moves)
    return np.array(scales.owners, dtype=np.int32)


def trusted(measured: Sequence[float | None], least: float = 0.0) -> list[float]:
    """Replace what cannot be true: no number, negative, or far from the ordinary. All unknown means all equal."""
    known = [float(it) if it is not None and isfinite(it) and it >= 0 else None for it in measured]
    ordinary = median([it for it in known if it] or [1.0])
    return [ordinary if it is None else max(min(it, ordinary * ABSURD), ordinary * least) for it in known]


def _weights(roster: Roster, measured: Mapping[Queue, float]) -> list[int]:
    """Return whole numbers, so that sums are exact in any order and a second run sees what the first one saw.

    A retry queue counts for next to nothing, whatever was measured: it must not make the spread of the others uneven.
    """
    weights = trusted([0.0 if queue.topic.startswith(RETRY) else measured.get(queue) for queue in roster.queues])
    unit = sum(weights) / len(weights) / PRECISION or 1.0
    floor, next_to_nothing = int(PRECISION * COUNTS), int(PRECISION * COUNTS * COUNTS)
    return [
        next_to_nothing if queue.topic.startswith(RETRY) else round(weight / unit) + floor
        for queue, weight in zip(roster.queues, weights, strict=True)
    ]


class _Scales:
    """Who carries what, while it is being decided."""

    def __init__(
        self, weights: list[int], capacities: list[float], queue_rooms: list[Room], member_rooms: list[Room]
    ) -> None:
        self.owners = [NOBODY] * len(weights)
        self._weights, self._capacities = weights, capacities
        self._queue_rooms, self._member_rooms = queue_rooms, member_rooms
        self._carried = [0] * len(capacities)
        self._counts = [0] * len(capacities)
        self._held: list[dict[Room, list[Weighed]]] = [{} for _ in capacities]
        self._mean = sum(weights) / sum(capacities)
        self._clearly, self._fine = self._mean * CLEARLY, 2 * self._mean * NEAR
        self._emptiest: dict[Room, list[tuple[float, float, int]]] = {}  # a heap a room, with stale entries
        for member in range(len(capacities)):
            self._note(member)

    def put(self, current: Sequence[int]) -> None:
        """Take over the present owners, then give away what nobody owns, heaviest first."""
        for queue, owner in enumerate(current):
            if owner != NOBODY:
                self._give(queue, owner)
        orphans = [queue for queue, owner in enumerate(current) if owner == NOBODY]
        orphans.sort(key=lambda queue: (-self._weights[queue], queue))
        for queue in [queue for queue in orphans if not self._stays_home(queue)]:
            costs = [(self._cost_of_taking(member, queue), member) for member in self._candidates()]
            self._give(queue, min(costs)[1])

    def _stays_home(self, queue: int) -> bool:
        """Give a queue to a member of its own room, if one has room for it or nothing yet."""
        home = self._queue_rooms[queue]
        member = next((member for member in self._candidates() if self._member_rooms[member] == home), None)
        if home is None or member is None:
            return False
        fullness = (self._carried[member] + self._weights[queue]) / self._capacities[member]
        fits = not self._counts[member] or fullness <= self._mean * (1 + NEAR)
        if fits:
            self._give(queue, member)
        return fits

    def feed_the_idle(self, moves: int) -> int:
        """Give each idle member a queue of one that has two; return how many moves are left."""
        givers = [(-self._fullness(member), member) for member, count in enumerate(self._counts) if count > 1]
        heapq.heapify(givers)
        for idle in [member for member, count in enumerate(self._counts) if count == 0]:
            if not moves or not givers:
                break
            _, giver = heapq.heappop(givers)
            self._move(min(self._worth_moving(giver, idle))[1], idle)
            moves -= 1
            if self._counts[giver] > 1:
                heapq.heappush(givers, (-self._fullness(giver), giver))
        return moves

    def level(self, moves: int) -> None:
        """Move single queues while that lowers the cost, from the fullest member down, round after round."""
        moved = True
        while moved and moves:
            moved = False
            givers = [(-self._fullness(member), member) for member in range(len(self._capacities))]
            heapq.heapify(givers)
            while givers and moves:
                _, giver = heapq.heappop(givers)
                best = min(self._improvements(giver), default=None)
                if best:
                    self._move(best[1], best[2])
                    moves, moved = moves - 1, True
                    heapq.heappush(givers, (-self._fullness(giver), giver))

    def _improvements(self, giver: int) -> Iterator[tuple[float, int, int]]:
        """Yield what lowers the cost: (change, queue, taker)."""
        if self._counts[giver] < 2:  # noqa: PLR2004 - the last one stays
            return
        for taker in self._candidates(but=giver):
            unlike = self._fullness(giver) - self._fullness(taker) >= self._clearly
            for change, queue in self._worth_moving(giver, taker):
                homeward = self._strange(giver, queue) > self._strange(taker, queue)
                if change < -1e-9 * self._carried[giver] and (unlike or homeward):
                    yield change, queue, taker

    def _worth_moving(self, giver: int, taker: int) -> Iterator[Weighed]:
        """Yield (change of cost, queue) for the queues that weigh nearest to what is best, room by room."""
        slope = 1 / self._capacities[giver] + 1 / self._capacities[taker]
        gap = self._fullness(giver) - self._fullness(taker)
        for held in self._held[giver].values():
            stranger = self._strange(taker, held[0][1]) - self._strange(giver, held[0][1])
            best = (gap - self._fine * stranger / 2) / slope
            place = bisect_left(held, (best, -1))
            for weight, queue in held[max(place - 1, 0) : place + 1]:
                yield weight * weight * slope - 2 * weight * gap + self._fine * weight * stranger, queue

    def _candidates(self, but: int = NOBODY) -> list[int]:
        """Return the emptiest member of each room."""
        found = []
        for heap in self._emptiest.values():
            aside = None
            while heap and (self._stale(heap[0]) or heap[0][2] == but):
                popped = heapq.heappop(heap)
                aside = popped if popped[2] == but and not self._stale(popped) else aside
            if heap:
                found.append(heap[0][2])
            if aside:
                heapq.heappush(heap, aside)
        return found

    def _cost_of_taking(self, member: int, queue: int) -> float:
        weight = self._weights[queue]
        more = weight * (2 * self._carried[member] + weight) / self._capacities[member]
        return more + self._fine * weight * self._strange(member, queue)

    def _strange(self, member: int, queue: int) -> int:
        here, home = self._member_rooms[member], self._queue_rooms[queue]
        return int(here is not None and home is not None and here != home)

    def _fullness(self, member: int) -> float:
        return self._carried[member] / self._capacities[member]

    def _move(self, queue: int, taker: int) -> None:
        giver = self.owners[queue]
        held = self._held[giver][self._queue_rooms[queue]]
        del held[bisect_left(held, (self._weights[queue], queue))]
        if not held:
            del self._held[giver][self._queue_rooms[queue]]
        self._counts[giver] -= 1
        self._carried[giver] -= self._weights[queue]
        self._note(giver)
        self._give(queue, taker)

    def _give(self, queue: int, taker: int) -> None:
        self.owners[queue] = taker
        insort(self._held[taker].setdefault(self._queue_rooms[queue], []), (self._weights[queue], queue))
        self._counts[taker] += 1
        self._carried[taker] += self._weights[queue]
        self._note(taker)

    def _note(self, member: int) -> None:
        entry = (self._fullness(member), -self._capacities[member], member)
        heapq.heappush(self._emptiest.setdefault(self._member_rooms[member], []), entry)

    def _stale(self, entry: tuple[float, float, int]) -> bool:
        return entry[0] != self._fullness(entry[2])
