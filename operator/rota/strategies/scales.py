"""The decision of Balanced: members' loads while owners are decided, and the step that gave each queue its owner.

`rota.strategies.balanced` prepares the weights, runs the decision (`Scales.decide`), and words the reasons.

A member's load is the sum of its queues' weights, its *fullness* is load / capacity. The cost of an assignment is

    sum over members of load² / capacity  +  penalty · sum of the weights of queues whose owner is in another room

If queue w moves from giver g to taker t, the first sum changes by

    slope · w²  -  2 · gap · w,  with  slope = 1 / capacity of g + 1 / capacity of t
                                 and   gap = fullness of g - fullness of t

This change is least for w = gap / slope, at which both become equally full. The second sum changes by
penalty · mismatch · w: mismatch is 1 if the queue leaves its room, -1 if it returns there, else 0. The penalty is
2 · ROOM_COST_SHARE · mean fullness: a small queue leaves its room if the fullness of its owner and of the taker differ
by more than ROOM_COST_SHARE of the mean.

Of the members of one room, only the emptiest is considered as the taker of a queue. With equal capacities, no other
member of the room lowers the cost more. With unequal ones, a slightly fuller member of more capacity might; that choice
is missed, which keeps the search short.
"""

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

Room = str | None  # the machine room of a queue's broker or of a member; None: unknown
# Plain tuples, since named ones would make Balanced some 5 % slower; the first element is what they are sorted by.
WeightedQueue = tuple[float, int]  # a queue's weight and index
CandidateMove = tuple[float, int, int]  # the change of the cost, the queue, the taker
FullnessEntry = tuple[float, float, int]  # a member's fullness, its negative capacity (most capacity first), its index


class Step(Enum):
    """The step that gave a queue to its owner; in the order of the three stages of `Scales.decide`."""

    # Stage 1: the queue had no owner.
    HOME = auto()  # the emptiest member of its room had capacity left
    EMPTIEST = auto()  # the emptiest member of all took it
    CHEAPEST = auto()  # it added least cost here
    # Stage 2.
    IDLE = auto()  # the taker owned nothing
    # Stage 3.
    EVEN = auto()  # the fleet became more even
    HOMEWARD = auto()  # the queue returned to its room


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
        self.placements: dict[int, Placement] = {}  # the last step of each queue that got an owner here
        # By member: the queues of each room that the member owns, lightest first.
        self._queues_by_room: list[dict[Room, list[WeightedQueue]]] = [{} for _ in capacities]
        self._min_difference = self.mean_fullness * MIN_DIFFERENCE_SHARE
        self._room_penalty = 2 * self.mean_fullness * ROOM_COST_SHARE
        # A heap of the members of each room, emptiest first. A change of a member's load only adds an entry: its older
        # entries are stale, and are removed when they come first.
        self._fullness_heaps: dict[Room, list[FullnessEntry]] = {}
        for member in range(len(capacities)):
            self._push_fullness(member)

    def decide(self, current: Sequence[int], max_moves: int | None) -> None:
        """Run the three stages from the present owners; at most `max_moves` queues are taken from members."""
        self._assign_unowned(current)
        remaining_moves = self._fill_idle_members(sys.maxsize if max_moves is None else max_moves)
        self._even_out(remaining_moves)

    def fullness(self, member: int) -> float:
        """Return a member's load in proportion to its capacity."""
        return self.loads[member] / self.capacities[member]

    def candidates(self, skipped_member: int = NO_OWNER) -> list[int]:
        """Return the possible takers of a queue: the emptiest member of each room, other than `skipped_member`."""
        candidates: list[int] = []
        for heap in self._fullness_heaps.values():
            member = self._emptiest(heap, skipped_member)
            if member != NO_OWNER:
                candidates.append(member)
        return candidates

    def cost_change(self, queue: int, taker: int) -> float:
        """Return by how much the cost changes if the taker gets the queue from its owner."""
        mismatch = self.room_mismatch(taker, queue) - self.room_mismatch(self.owners[queue], queue)
        return self.evenness_change(queue, taker) + self._room_penalty * self.weights[queue] * mismatch

    def evenness_change(self, queue: int, taker: int) -> float:
        """Return by how much the sum of load² / capacity changes if the taker gets the queue from its owner."""
        giver = self.owners[queue]
        weight = self.weights[queue]
        slope = 1 / self.capacities[giver] + 1 / self.capacities[taker]
        gap = self.fullness(giver) - self.fullness(taker)
        return weight * weight * slope - 2 * weight * gap

    def lowers_cost(self, change: float, queue: int) -> bool:
        """Whether moving a queue from its owner lowers the cost, by more than rounding errors may.

        The terms of a change near zero are about weight · the owner's fullness (evenness) and weight · mean fullness
        (rooms), so the margin is a share of their sum. Without it, placements of equal cost would alternate for ever.
        """
        return change < -ROUNDING_SHARE * self.weights[queue] * (self.fullness(self.owners[queue]) + self.mean_fullness)

    def is_worthwhile(self, change: float, queue: int, taker: int) -> bool:
        """Whether the move lowers the cost, and the members differ clearly or the queue returns to its room."""
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
        unowned: list[int] = []
        for queue, owner in enumerate(current):
            if owner == NO_OWNER:
                unowned.append(queue)
            else:
                self._assign(queue, owner)
        unowned.sort(key=lambda queue: (-self.weights[queue], queue))
        # Before any queue goes elsewhere, all go to their rooms, as far as members there have capacity left.
        remaining = [queue for queue in unowned if not self._assign_in_room(queue)]
        for queue in remaining:
            candidates = self.candidates()
            _, cheapest = min((self._added_cost(member, queue), member) for member in candidates)
            is_emptiest = min(map(self.fullness, candidates)) == self.fullness(cheapest)
            self._record_placement(Step.EMPTIEST if is_emptiest else Step.CHEAPEST, queue, cheapest)
            self._assign(queue, cheapest)

    def _assign_in_room(self, queue: int) -> bool:
        """Give a queue to the emptiest member of its room if the queue fits there; return whether it does.

        It fits if the member owns nothing, or is then at most ROOM_COST_SHARE fuller than the mean.
        """
        home = self.queue_rooms[queue]
        member = NO_OWNER if home is None else self._emptiest(self._fullness_heaps.get(home, []))
        if member == NO_OWNER:
            return False
        fullness = (self.loads[member] + self.weights[queue]) / self.capacities[member]
        fits = not self.queue_counts[member] or fullness <= self.mean_fullness * (1 + ROOM_COST_SHARE)
        if fits:
            self._record_placement(Step.HOME, queue, member)
            self._assign(queue, member)
        return fits

    def _fill_idle_members(self, moves: int) -> int:
        """Give each idle member a queue of a member that has at least two; return how many moves remain."""
        idle_members = [member for member, count in enumerate(self.queue_counts) if count == 0]
        givers = [(-self.fullness(member), member) for member, count in enumerate(self.queue_counts) if count > 1]
        heapq.heapify(givers)
        for idle in idle_members:
            if not moves or not givers:
                break
            _, giver = heapq.heappop(givers)
            _, queue = min((self.cost_change(queue, idle), queue) for queue in self._best_queues(giver, idle))
            self._move(Step.IDLE, queue, idle)
            moves -= 1
            if self.queue_counts[giver] > 1:
                heapq.heappush(givers, (-self.fullness(giver), giver))
        return moves

    def _even_out(self, moves: int) -> None:
        """Move single queues while that lowers the cost.

        Each pass starts with the fullest member, and goes on to the next when no move of a member's queues is
        worthwhile. The passes end with one that moves nothing.
        """
        moved = True
        while moved and moves:
            moved = False
            givers = [(-self.fullness(member), member) for member in range(len(self.capacities))]
            heapq.heapify(givers)
            while givers and moves:
                _, giver = heapq.heappop(givers)
                best_move = min(self._worthwhile_moves(giver), default=None)
                if best_move:
                    _, queue, taker = best_move
                    is_more_even = self.lowers_cost(self.evenness_change(queue, taker), queue)
                    self._move(Step.EVEN if is_more_even else Step.HOMEWARD, queue, taker)
                    moves -= 1
                    moved = True
                    heapq.heappush(givers, (-self.fullness(giver), giver))

    def _worthwhile_moves(self, giver: int) -> Iterator[CandidateMove]:
        """Yield the worthwhile moves of a queue from a member."""
        if self.queue_counts[giver] < 2:  # noqa: PLR2004 - a member's last queue stays
            return
        for taker in self.candidates(skipped_member=giver):
            for queue in self._best_queues(giver, taker):
                change = self.cost_change(queue, taker)
                if self.is_worthwhile(change, queue, taker):
                    yield change, queue, taker

    def _best_queues(self, giver: int, taker: int) -> Iterator[int]:
        """Yield the giver's queues of each room with the weights just below and above the optimum for the taker.

        For queues of one room, slope · w² - 2 · gap · w + penalty · mismatch · w is to be least. Its derivative is 0 at
        w = (gap - penalty · mismatch / 2) / slope; from there the change grows in both directions, so the queue with
        the least change is one of these two neighbours.
        """
        slope = 1 / self.capacities[giver] + 1 / self.capacities[taker]
        gap = self.fullness(giver) - self.fullness(taker)
        for held in self._queues_by_room[giver].values():
            _, any_queue = held[0]  # all are of one room
            mismatch = self.room_mismatch(taker, any_queue) - self.room_mismatch(giver, any_queue)
            optimal_weight = (gap - self._room_penalty * mismatch / 2) / slope
            place = bisect_left(held, (optimal_weight, -1))  # -1: before all queues of exactly this weight
            neighbours = held[
                max(place - 1, 0) : place + 1
            ]  # the last lighter queue and the next one, where they exist
            for _, queue in neighbours:
                yield queue

    def _added_cost(self, member: int, queue: int) -> float:
        """Return by how much the cost grows if a member gets a queue that has no owner."""
        weight = self.weights[queue]
        added = weight * (2 * self.loads[member] + weight) / self.capacities[member]
        return added + self._room_penalty * weight * self.room_mismatch(member, queue)

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

    def _emptiest(self, heap: list[FullnessEntry], skipped_member: int = NO_OWNER) -> int:
        """Return the emptiest member of a room other than `skipped_member`, or NO_OWNER; stale entries are removed."""
        emptiest = self._drop_to_valid_entry(heap)
        if emptiest == NO_OWNER or emptiest != skipped_member:
            return emptiest
        skipped = heap[0]
        emptiest = self._drop_to_valid_entry(heap, skipped_member)  # removes all its entries, also equal ones
        heapq.heappush(heap, skipped)
        return emptiest

    def _drop_to_valid_entry(self, heap: list[FullnessEntry], dropped_member: int = NO_OWNER) -> int:
        """Remove a heap's first entries while they are stale or of `dropped_member`; return the first one's member."""
        while heap:
            fullness, _, member = heap[0]
            if fullness == self.fullness(member) and member != dropped_member:
                return member
            heapq.heappop(heap)
        return NO_OWNER
