"""Keys of states: states with equal keys have the same future.

A key has no absolute generations, no ages beyond the planner's limits, and no absolute lease numbers.
"""

from bisect import bisect_left
from itertools import pairwise
from typing import Any

from simulation.exploration.documents import Document, Numbering
from simulation.exploration.state import ExploredState, PodSlot, Write, age

GAP = 3  # larger gaps between generations are equal: the next generation may be in use, and the one after it


class Order:
    """The generations in use; the rank of each keeps the order and the gap to the lower one, up to GAP."""

    def __init__(self, used: frozenset[int]) -> None:
        self.sorted = sorted(used)
        self.rank = {0: 0}
        rank_of_last = 0
        for lower, number in pairwise(self.sorted):
            rank_of_last += min(number - lower, GAP) if lower else 1
            self.rank[number] = rank_of_last

    def below(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return for each number how many generations in use are lower."""
        return tuple(bisect_left(self.sorted, number) for number in numbers)


class Keys:
    """Computes the key of a state; each part is computed once and represented by a number."""

    def __init__(self) -> None:
        self._used: dict[PodSlot, frozenset[int]] = {}
        self._orders: dict[frozenset[int], Order] = {}
        self._parts: dict[Any, int] = {}
        self._numbers = Numbering()

    def __call__(self, state: ExploredState) -> tuple[Any, ...]:
        """Return the key of a state."""
        order = self._order(state)
        now = state.now
        return (
            *[self._slot_number(slot, order, now) for slot in state.slots],
            self._document_number(state.stored, order, now),
            self._document_number(state.replaced, order, now),
            self._write_key(state.write, order, state),
            self._write_key(state.former, order, state),
            state.faults_left,
            state.route,
            state.deleted_uids & state.stored.uids if state.stored else None,
            state.awaited_reports,
            state.paused,
            state.schema,
            frozenset([(queue, uid, *order.below((since,))) for queue, uid, since in state.overruled]),
        )

    def _order(self, state: ExploredState) -> Order:
        documents = [write.document for write in (state.write, state.former) if write]
        documents += [document for document in (state.stored, state.replaced) if document]
        used = frozenset([0, *(document.number for document in documents)]).union(*map(self._used_by, state.slots))
        order = self._orders.get(used)
        if order is None:
            order = self._orders[used] = Order(used)
        return order

    def _used_by(self, slot: PodSlot) -> frozenset[int]:
        used = self._used.get(slot)
        if used is None:
            numbers = {source.number for source in (slot.mounted, slot.report) if source}
            used = self._used[slot] = frozenset({slot.disk.generation, slot.highest} | numbers)
        return used

    def _slot_number(self, slot: PodSlot, order: Order, now: float) -> int:
        key = (slot, order, None if slot.silent_since is None else now)
        number = self._parts.get(key)
        if number is None:
            number = self._parts[key] = self._numbers[_slot_key(slot, order, now)]
        return number

    def _document_number(self, document: Document | None, order: Order, now: float) -> int:
        if document is None:
            return -1
        key = (document, order, now)
        number = self._parts.get(key)
        if number is None:
            ages = tuple(age(at, now) for at in document.times)
            number = self._parts[key] = self._numbers[
                document.body, order.rank[document.number], order.below(document.numbers), ages
            ]
        return number

    def _write_key(self, write: Write | None, order: Order, state: ExploredState) -> tuple[Any, ...] | None:
        if write is None:
            return None
        return (
            self._document_number(write.document, order, state.now),
            write.version is None,
            write.version == state.version,
        )


def _slot_key(slot: PodSlot, order: Order, now: float) -> tuple[Any, ...]:
    rank = order.rank
    part = slot.mounted.part(slot.name) if slot.mounted else (-1, ())
    return (
        slot.name,
        slot.pods_created,
        slot.api_pod,
        slot.process and slot.process.body,
        (slot.dead, slot.hung, slot.lost, slot.disk.final, slot.disk.starts),
        (rank[slot.disk.generation], rank[slot.highest]),
        slot.mounted and (rank[slot.mounted.number], part[0], order.below(part[1])),
        slot.observed,
        slot.report and (slot.report.body, rank[slot.report.number]),
        age(slot.silent_since, now),
    )
