"""The scales of Balanced: members' loads while owners are decided, and the step that gave each queue its owner."""

import heapq
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from rota.model import NOBODY

CLEARLY = 0.02  # two members differ if their fullness differs by this share of the mean
NEAR = 0.10  # a queue stays in its room while that costs at most this share of the mean fullness
NOISE = 1e-9  # rounding errors are below this share

Room = str | None
Weighed = tuple[float, int]  # a queue's weight, or what moving it changes, and its index: sorts as needed


class Step(Enum):
    """The step that gave a queue to its owner."""

    HOME = auto()  # it had no owner, and the emptiest member of its room had capacity left
    EMPTIEST = auto()  # it had no owner, and the emptiest member of all took it
    CHEAPEST = auto()  # it had no owner, and added least cost here
    IDLE = auto()  # its taker owned nothing
    EVEN = auto()  # the fleet became more even
    HOMEWARD = auto()  # it returned to its room


class Placement(NamedTuple):
    """The step that gave a queue to its owner, the previous owner, and the loads of both just before."""

    step: Step
    giver: int
    giver_carried: int
    taker_carried: int


class Scales:
    """The loads of all members, while owners are decided."""

    def __init__(
        self, weights: list[int], capacities: list[float], queue_rooms: list[Room], member_rooms: list[Room]
    ) -> None:
        self.owners = [NOBODY] * len(weights)
        self.weights, self.capacities = weights, capacities
        self.queue_rooms, self.member_rooms = queue_rooms, member_rooms
        self.mean = sum(weights) / sum(capacities)
        self.carried = [0] * len(capacities)
        self.counts = [0] * len(capacities)
        self.deeds: dict[int, Placement] = {}
        self._held: list[dict[Room, list[Weighed]]] = [{} for _ in capacities]
        self._clearly, self._fine = self.mean * CLEARLY, 2 * self.mean * NEAR
        self._emptiest: dict[Room, list[tuple[float, float, int]]] = {}  # a heap for each room, with stale entries
        for member in range(len(capacities)):
            self._note(member)

    def decide(self, current: Sequence[int], most: int | None) -> None:
        """Take the three steps from the present owners; at most `most` queues are taken from members."""
        self._put(current)
        self._level(self._feed_the_idle(sys.maxsize if most is None else most))

    def fullness(self, member: int) -> float:
        """Return a member's load in proportion to its capacity."""
        return self.carried[member] / self.capacities[member]

    def candidates(self, but: int = NOBODY) -> list[int]:
        """Return the emptiest member of each room."""
        emptiest = []
        for heap in self._emptiest.values():
            excluded = None
            while heap and (self._stale(heap[0]) or heap[0][2] == but):
                popped = heapq.heappop(heap)
                excluded = popped if popped[2] == but and not self._stale(popped) else excluded
            if heap:
                emptiest.append(heap[0][2])
            if excluded:
                heapq.heappush(heap, excluded)
        return emptiest

    def change(self, queue: int, taker: int) -> float:
        """Return by how much the cost changes if the taker gets the queue from its owner."""
        stranger = self.strange(taker, queue) - self.strange(self.owners[queue], queue)
        return self.change_of_evenness(queue, taker) + self._fine * self.weights[queue] * stranger

    def change_of_evenness(self, queue: int, taker: int) -> float:
        """Return the same change without the penalties for other rooms."""
        giver, weight = self.owners[queue], self.weights[queue]
        slope = 1 / self.capacities[giver] + 1 / self.capacities[taker]
        return weight * weight * slope - 2 * weight * (self.fullness(giver) - self.fullness(taker))

    def lowers(self, change: float, queue: int) -> bool:
        """Whether moving a queue from its owner lowers the cost, and not just by rounding.

        If a change is near zero, its terms are at most about weight times the owner's fullness; noise is measured
        against that. Otherwise two placements of equal cost would alternate for ever.
        """
        return change < -NOISE * self.weights[queue] * (self.fullness(self.owners[queue]) + self.mean)

    def improves(self, change: float, queue: int, taker: int) -> bool:
        """Whether the move is also worth it: the members differ clearly, or the queue returns to its room."""
        if not self.lowers(change, queue):
            return False
        giver = self.owners[queue]
        unlike = self.fullness(giver) - self.fullness(taker) >= self._clearly
        return unlike or self.strange(giver, queue) > self.strange(taker, queue)

    def strange(self, member: int, queue: int) -> int:
        """Return 1 if the member is in another room than the queue."""
        room, home = self.member_rooms[member], self.queue_rooms[queue]
        return int(room is not None and home is not None and room != home)

    def _put(self, current: Sequence[int]) -> None:
        """Apply the present owners, then assign the queues without an owner, heaviest first."""
        for queue, owner in enumerate(current):
            if owner != NOBODY:
                self._give(queue, owner)
        orphans = [queue for queue, owner in enumerate(current) if owner == NOBODY]
        orphans.sort(key=lambda queue: (-self.weights[queue], queue))
        for queue in [queue for queue in orphans if not self._stays_home(queue)]:
            candidates = self.candidates()
            _, cheapest = min((self._cost_of_taking(member, queue), member) for member in candidates)
            emptiest = min(map(self.fullness, candidates)) == self.fullness(cheapest)
            self._deed(Step.EMPTIEST if emptiest else Step.CHEAPEST, queue, cheapest)
            self._give(queue, cheapest)

    def _stays_home(self, queue: int) -> bool:
        """Give a queue to a member of its own room that has capacity left or no queue; return whether one was found."""
        home = self.queue_rooms[queue]
        member = next((member for member in self.candidates() if self.member_rooms[member] == home), None)
        if home is None or member is None:
            return False
        fullness = (self.carried[member] + self.weights[queue]) / self.capacities[member]
        fits = not self.counts[member] or fullness <= self.mean * (1 + NEAR)
        if fits:
            self._deed(Step.HOME, queue, member)
            self._give(queue, member)
        return fits

    def _feed_the_idle(self, moves: int) -> int:
        """Give each idle member a queue of a member that has two; return how many moves remain."""
        givers = [(-self.fullness(member), member) for member, count in enumerate(self.counts) if count > 1]
        heapq.heapify(givers)
        for idle in [member for member, count in enumerate(self.counts) if count == 0]:
            if not moves or not givers:
                break
            _, giver = heapq.heappop(givers)
            self._move(Step.IDLE, min(self._worth_moving(giver, idle))[1], idle)
            moves -= 1
            if self.counts[giver] > 1:
                heapq.heappush(givers, (-self.fullness(giver), giver))
        return moves

    def _level(self, moves: int) -> None:
        """Move single queues while that lowers the cost, from the fullest member down, in repeated passes."""
        moved = True
        while moved and moves:
            moved = False
            givers = [(-self.fullness(member), member) for member in range(len(self.capacities))]
            heapq.heapify(givers)
            while givers and moves:
                _, giver = heapq.heappop(givers)
                best = min(self._improvements(giver), default=None)
                if best:
                    _, queue, taker = best
                    evens = self.lowers(self.change_of_evenness(queue, taker), queue)
                    self._move(Step.EVEN if evens else Step.HOMEWARD, queue, taker)
                    moves, moved = moves - 1, True
                    heapq.heappush(givers, (-self.fullness(giver), giver))

    def _improvements(self, giver: int) -> Iterator[tuple[float, int, int]]:
        """Yield the moves that lower the cost: (change, queue, taker)."""
        if self.counts[giver] < 2:  # noqa: PLR2004 - a member's last queue stays
            return
        for taker in self.candidates(but=giver):
            for change, queue in self._worth_moving(giver, taker):
                if self.improves(change, queue, taker):
                    yield change, queue, taker

    def _worth_moving(self, giver: int, taker: int) -> Iterator[Weighed]:
        """Yield (change of cost, queue) for the queues of each room with weights nearest to the optimum."""
        slope = 1 / self.capacities[giver] + 1 / self.capacities[taker]
        gap = self.fullness(giver) - self.fullness(taker)
        for held in self._held[giver].values():
            stranger = self.strange(taker, held[0][1]) - self.strange(giver, held[0][1])
            best = (gap - self._fine * stranger / 2) / slope
            place = bisect_left(held, (best, -1))
            for _, queue in held[max(place - 1, 0) : place + 1]:
                yield self.change(queue, taker), queue

    def _cost_of_taking(self, member: int, queue: int) -> float:
        weight = self.weights[queue]
        more = weight * (2 * self.carried[member] + weight) / self.capacities[member]
        return more + self._fine * weight * self.strange(member, queue)

    def _deed(self, step: Step, queue: int, taker: int) -> None:
        giver = self.owners[queue]
        self.deeds[queue] = Placement(step, giver, self.carried[giver] if giver != NOBODY else 0, self.carried[taker])

    def _move(self, step: Step, queue: int, taker: int) -> None:
        self._deed(step, queue, taker)
        giver = self.owners[queue]
        held = self._held[giver][self.queue_rooms[queue]]
        del held[bisect_left(held, (self.weights[queue], queue))]
        if not held:
            del self._held[giver][self.queue_rooms[queue]]
        self.counts[giver] -= 1
        self.carried[giver] -= self.weights[queue]
        self._note(giver)
        self._give(queue, taker)

    def _give(self, queue: int, taker: int) -> None:
        self.owners[queue] = taker
        insort(self._held[taker].setdefault(self.queue_rooms[queue], []), (self.weights[queue], queue))
        self.counts[taker] += 1
        self.carried[taker] += self.weights[queue]
        self._note(taker)

    def _note(self, member: int) -> None:
        entry = (self.fullness(member), -self.capacities[member], member)
        heapq.heappush(self._emptiest.setdefault(self.member_rooms[member], []), entry)

    def _stale(self, entry: tuple[float, float, int]) -> bool:
        return entry[0] != self.fullness(entry[2])
