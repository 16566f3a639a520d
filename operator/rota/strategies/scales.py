"""The scales of Balanced: members' loads while owners are decided, and the step that gave each queue its owner."""

import heapq
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from rota.model import NO_OWNER

MIN_DIFFERENCE_SHARE = 0.02  # two members differ if their fullness differs by this share of the mean
ROOM_COST_SHARE = 0.10  # a queue stays in its room while that costs at most this share of the mean fullness
ROUNDING_SHARE = 1e-9  # rounding errors are below this share

Room = str | None
WeightedQueue = tuple[float, int]  # a queue's weight, or what moving it changes, and its index: sorts as needed


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
    giver_load: int
    taker_load: int


class Scales:
    """The loads of all members, while owners are decided."""

    def __init__(
        self, weights: list[int], capacities: list[float], queue_rooms: list[Room], member_rooms: list[Room]
    ) -> None:
        self.owners = [NO_OWNER] * len(weights)
        self.weights = weights
        self.capacities = capacities
        self.queue_rooms = queue_rooms
        self.member_rooms = member_rooms
        self.mean_fullness = sum(weights) / sum(capacities)
        self.loads = [0] * len(capacities)
        self.queue_counts = [0] * len(capacities)
        self.placements: dict[int, Placement] = {}
        self._queues_by_room: list[dict[Room, list[WeightedQueue]]] = [{} for _ in capacities]
        self._min_difference = self.mean_fullness * MIN_DIFFERENCE_SHARE
        self._room_penalty = 2 * self.mean_fullness * ROOM_COST_SHARE
        # A heap for each room, with stale entries.
        self._fullness_heaps: dict[Room, list[tuple[float, float, int]]] = {}
        for member in range(len(capacities)):
            self._push_fullness(member)

    def decide(self, current: Sequence[int], max_moves: int | None) -> None:
        """Take the three steps from the present owners; at most `max_moves` queues are taken from members."""
        self._assign_unowned(current)
        self._even_out(self._fill_idle_members(sys.maxsize if max_moves is None else max_moves))

    def fullness(self, member: int) -> float:
        """Return a member's load in proportion to its capacity."""
        return self.loads[member] / self.capacities[member]

    def candidates(self, skipped_member: int = NO_OWNER) -> list[int]:
        """Return the emptiest member of each room."""
        emptiest = []
        for heap in self._fullness_heaps.values():
            excluded = None
            while heap and (self._is_stale(heap[0]) or heap[0][2] == skipped_member):
                popped = heapq.heappop(heap)
                excluded = popped if popped[2] == skipped_member and not self._is_stale(popped) else excluded
            if heap:
                emptiest.append(heap[0][2])
            if excluded:
                heapq.heappush(heap, excluded)
        return emptiest

    def cost_change(self, queue: int, taker: int) -> float:
        """Return by how much the cost changes if the taker gets the queue from its owner."""
        mismatch_change = self.room_mismatch(taker, queue) - self.room_mismatch(self.owners[queue], queue)
        return self.evenness_change(queue, taker) + self._room_penalty * self.weights[queue] * mismatch_change

    def evenness_change(self, queue: int, taker: int) -> float:
        """Return the same change without the penalties for other rooms."""
        giver = self.owners[queue]
        weight = self.weights[queue]
        slope = 1 / self.capacities[giver] + 1 / self.capacities[taker]
        return weight * weight * slope - 2 * weight * (self.fullness(giver) - self.fullness(taker))

    def lowers_cost(self, change: float, queue: int) -> bool:
        """Whether moving a queue from its owner lowers the cost, and not just by rounding.

        If a change is near zero, its terms are at most about weight times the owner's fullness; noise is measured
        against that. Otherwise two placements of equal cost would alternate for ever.
        """
        return change < -ROUNDING_SHARE * self.weights[queue] * (self.fullness(self.owners[queue]) + self.mean_fullness)

    def is_worthwhile(self, change: float, queue: int, taker: int) -> bool:
        """Whether the move is also worth it: the members differ clearly, or the queue returns to its room."""
        if not self.lowers_cost(change, queue):
            return False
        giver = self.owners[queue]
        differs_clearly = self.fullness(giver) - self.fullness(taker) >= self._min_difference
        return differs_clearly or self.room_mismatch(giver, queue) > self.room_mismatch(taker, queue)

    def room_mismatch(self, member: int, queue: int) -> int:
        """Return 1 if the member is in another room than the queue."""
        room = self.member_rooms[member]
        home = self.queue_rooms[queue]
        return int(room is not None and home is not None and room != home)

    def _assign_unowned(self, current: Sequence[int]) -> None:
        """Apply the present owners, then assign the queues without an owner, heaviest first."""
        for queue, owner in enumerate(current):
            if owner != NO_OWNER:
                self._assign(queue, owner)
        unowned = [queue for queue, owner in enumerate(current) if owner == NO_OWNER]
        unowned.sort(key=lambda queue: (-self.weights[queue], queue))
        for queue in [queue for queue in unowned if not self._assign_in_room(queue)]:
            candidates = self.candidates()
            _, cheapest = min((self._added_cost(member, queue), member) for member in candidates)
            emptiest = min(map(self.fullness, candidates)) == self.fullness(cheapest)
            self._record_placement(Step.EMPTIEST if emptiest else Step.CHEAPEST, queue, cheapest)
            self._assign(queue, cheapest)

    def _assign_in_room(self, queue: int) -> bool:
        """Give a queue to a member of its own room that has capacity left or no queue; return whether one was found."""
        home = self.queue_rooms[queue]
        member = next((member for member in self.candidates() if self.member_rooms[member] == home), None)
        if home is None or member is None:
            return False
        fullness = (self.loads[member] + self.weights[queue]) / self.capacities[member]
        fits = not self.queue_counts[member] or fullness <= self.mean_fullness * (1 + ROOM_COST_SHARE)
        if fits:
            self._record_placement(Step.HOME, queue, member)
            self._assign(queue, member)
        return fits

    def _fill_idle_members(self, moves: int) -> int:
        """Give each idle member a queue of a member that has two; return how many moves remain."""
        givers = [(-self.fullness(member), member) for member, count in enumerate(self.queue_counts) if count > 1]
        heapq.heapify(givers)
        for idle in [member for member, count in enumerate(self.queue_counts) if count == 0]:
            if not moves or not givers:
                break
            _, giver = heapq.heappop(givers)
            self._move(Step.IDLE, min(self._candidate_moves(giver, idle))[1], idle)
            moves -= 1
            if self.queue_counts[giver] > 1:
                heapq.heappush(givers, (-self.fullness(giver), giver))
        return moves

    def _even_out(self, moves: int) -> None:
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
                    evens = self.lowers_cost(self.evenness_change(queue, taker), queue)
                    self._move(Step.EVEN if evens else Step.HOMEWARD, queue, taker)
                    moves -= 1
                    moved = True
                    heapq.heappush(givers, (-self.fullness(giver), giver))

    def _improvements(self, giver: int) -> Iterator[tuple[float, int, int]]:
        """Yield the moves that lower the cost: (change, queue, taker)."""
        if self.queue_counts[giver] < 2:  # noqa: PLR2004 - a member's last queue stays
            return
        for taker in self.candidates(skipped_member=giver):
            for change, queue in self._candidate_moves(giver, taker):
                if self.is_worthwhile(change, queue, taker):
                    yield change, queue, taker

    def _candidate_moves(self, giver: int, taker: int) -> Iterator[WeightedQueue]:
        """Yield (change of cost, queue) for the queues of each room with weights nearest to the optimum."""
        slope = 1 / self.capacities[giver] + 1 / self.capacities[taker]
        gap = self.fullness(giver) - self.fullness(taker)
        for held in self._queues_by_room[giver].values():
            mismatch_change = self.room_mismatch(taker, held[0][1]) - self.room_mismatch(giver, held[0][1])
            best = (gap - self._room_penalty * mismatch_change / 2) / slope
            place = bisect_left(held, (best, -1))
            for _, queue in held[max(place - 1, 0) : place + 1]:
                yield self.cost_change(queue, taker), queue

    def _added_cost(self, member: int, queue: int) -> float:
        weight = self.weights[queue]
        more = weight * (2 * self.loads[member] + weight) / self.capacities[member]
        return more + self._room_penalty * weight * self.room_mismatch(member, queue)

    def _record_placement(self, step: Step, queue: int, taker: int) -> None:
        giver = self.owners[queue]
        self.placements[queue] = Placement(
            step, giver, self.loads[giver] if giver != NO_OWNER else 0, self.loads[taker]
        )

    def _move(self, step: Step, queue: int, taker: int) -> None:
        self._record_placement(step, queue, taker)
        giver = self.owners[queue]
        held = self._queues_by_room[giver][self.queue_rooms[queue]]
        del held[bisect_left(held, (self.weights[queue], queue))]
        if not held:
            del self._queues_by_room[giver][self.queue_rooms[queue]]
        self.queue_counts[giver] -= 1
        self.loads[giver] -= self.weights[queue]
        self._push_fullness(giver)
        self._assign(queue, taker)

    def _assign(self, queue: int, taker: int) -> None:
        self.owners[queue] = taker
        insort(self._queues_by_room[taker].setdefault(self.queue_rooms[queue], []), (self.weights[queue], queue))
        self.queue_counts[taker] += 1
        self.loads[taker] += self.weights[queue]
        self._push_fullness(taker)

    def _push_fullness(self, member: int) -> None:
        entry = (self.fullness(member), -self.capacities[member], member)
        heapq.heappush(self._fullness_heaps.setdefault(self.member_rooms[member], []), entry)

    def _is_stale(self, entry: tuple[float, float, int]) -> bool:
        return entry[0] != self.fullness(entry[2])
