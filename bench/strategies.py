"""The strategy library on large fleets: owners array in, owners array out."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from bench.measure import Row, Sample, timed
from rota.model import Queue, Roster
from rota.strategies import prepared

MEMBERS = [f"orders-7d9f-{number:05d}" for number in range(10_000)]
QUEUES = [
    Queue("orders", f"room{broker % 3}@b{broker:02d}", number) for broker in range(10) for number in range(10_000)
]
ROOMS = {queue.broker: queue.broker.partition("@")[0] for queue in QUEUES}


def rows() -> Iterator[Row]:
    """Time each strategy on 10,000 members and 100,000 queues, and what the roster itself costs."""
    roster = Roster.of(QUEUES, MEMBERS)
    yield Row("Roster.of 10,000 members, 100,000 queues", timed(lambda: Roster.of(QUEUES, MEMBERS)))
    nearby = {"queueRooms": ROOMS, "memberRooms": {name: f"room{index % 3}" for index, name in enumerate(MEMBERS)}}
    for name, options, target in (
        ("Averagely", {}, "2 ms"),
        ("AveragelyByCircle", {}, "2 ms"),
        ("ByMachineRoom", {"rooms": ["room0", "room1", "room2"]}, "2 ms"),
        ("MachineRoomNearby", nearby, "20 ms"),
        ("ConsistentHash", {}, "400 ms"),
        ("Sticky", {}, "15 ms"),
    ):
        yield Row(f"{name}, full", run(name, roster, options), target=f"≤ {target}")
    current = _owned(roster, "Sticky")
    for what, members in (("one joins", [*MEMBERS, "orders-7d9f-new"]), ("one leaves", MEMBERS[:-1])):
        yield Row(f"Sticky, {what}", run("Sticky", Roster.of(QUEUES, members, current), {}), target="≤ 5 ms")
    yield from _balanced()


def _balanced() -> Iterator[Row]:
    chance = random.Random(7)
    queues = [Queue(f"topic{topic}", "b", number) for topic in range(10) for number in range(1000)]
    roster = Roster.of(queues, MEMBERS[:1000])
    options = {"queueWeights": {queue: chance.paretovariate(1.2) for queue in queues}}
    yield Row("Balanced, 1,000 members, 10,000 queues", run("Balanced", roster, options), target="≤ 300 ms")


def run(name: str, roster: Roster, options: dict[str, Any]) -> Sample:
    """Time a strategy on a roster."""
    strategy: Callable[[Roster], object] = prepared(name, options)
    return timed(lambda: strategy(roster))


def _owned(roster: Roster, name: str) -> dict[tuple[str, str, int], str]:
    owners = prepared(name)(roster)
    return {queue: roster.members[owner] for queue, owner in zip(roster.queues, owners, strict=True)}
