"""What tells worlds apart: those with one key have one future.

How high generations are, how old things are beyond what matters, and how lives are numbered, nobody can tell.
"""

from bisect import bisect_left
from itertools import pairwise
from typing import Any

from simulation.exploration.documents import Document, Numbering
from simulation.exploration.world import ExploredState, Place, Write, age

GAP = 3  # how far apart two generations are matters up to here: the next one may be in use, and the one after it


class Order:
    """The generations in use, and what can be told of each: its place, and how near it is to the one before."""

    def __init__(self, used: frozenset[int]) -> None:
        self.sorted = sorted(used)
        self.rank, last = {0: 0}, 0
        for before, number in pairwise(self.sorted):
            last += min(number - before, GAP) if before else 1
            self.rank[number] = last

    def below(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Say of numbers to which those in use are compared how many of these are lower."""
        return tuple(bisect_left(self.sorted, number) for number in numbers)


class Keys:
    """Says of each world what matters of it; each part is worked out once and is a number from then on."""

    def __init__(self) -> None:
        self._used: dict[Place, frozenset[int]] = {}
        self._orders: dict[frozenset[int], Order] = {}
        self._parts: dict[Any, int] = {}
        self._numbers = Numbering()

    def __call__(self, world: ExploredState) -> tuple[Any, ...]:
        """Return a world's key."""
        order, now = self._order(world), world.now
        return (
            *[self._place(place, order, now) for place in world.places],
            self._document(world.record, order, now),
            self._write(world.write, order, world),
            self._write(world.former, order, world),
            world.left,
            world.route,
            world.gone & world.record.uids if world.record else None,
            world.asking,
            world.paused,
            world.schema,
            frozenset([(queue, uid, *order.below((since,))) for queue, uid, since in world.overruled]),
        )

    def _order(self, world: ExploredState) -> Order:
        written = [it.document for it in (world.write, world.former) if it]
        documents = [world.record, *written] if world.record else written
        used = frozenset([0, *(it.number for it in documents)]).union(*map(self._used_by, world.places))
        found = self._orders.get(used)
        if found is None:
            found = self._orders[used] = Order(used)
        return found

    def _used_by(self, it: Place) -> frozenset[int]:
        found = self._used.get(it)
        if found is None:
            said = {said.number for said in (it.shown, it.heard) if said}
            found = self._used[it] = frozenset({it.disk[0], it.highest} | said)
        return found

    def _place(self, it: Place, order: Order, now: float) -> int:
        key = (it, order, None if it.silent is None else now)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._numbers[_of_place(it, order, now)]
        return found

    def _document(self, it: Document | None, order: Order, now: float) -> int:
        if it is None:
            return -1
        key = (it, order, now)
        found = self._parts.get(key)
        if found is None:
            ages = tuple(age(at, now) for at in it.times)
            found = self._parts[key] = self._numbers[it.body, order.rank[it.number], order.below(it.numbers), ages]
        return found

    def _write(self, it: Write | None, order: Order, world: ExploredState) -> tuple[Any, ...] | None:
        if it is None:
            return None
        return self._document(it.document, order, world.now), it.version is None, it.version == world.version


def _of_place(it: Place, order: Order, now: float) -> tuple[Any, ...]:
    rank, part = order.rank, it.shown.part(it.name) if it.shown else (-1, ())
    return (
        it.name,
        it.made,
        it.facts,
        it.process and it.process.body,
        (it.over, it.hung, it.lost, it.disk[1:]),
        (rank[it.disk[0]], rank[it.highest]),
        it.shown and (rank[it.shown.number], part[0], order.below(part[1])),
        it.seen,
        it.heard and (it.heard.body, rank[it.heard.number]),
        age(it.silent, now),
    )
