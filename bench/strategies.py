"""The strategy library on large fleets, compared with the reference client and Kafka's assignors."""

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from bench import peers
from bench.measure import Row, Sample, timed
from rota.documents import Assignment, Share, encode_assignment
from rota.model import NO_OWNER, Queue, Roster
from rota.strategies import REFERENCE_NAMES, allocate, prepared

MEMBERS = list(map("orders-7d9f-{:05d}".format, range(10_000)))
ROOMS = ["room0", "room1", "room2"]
MEMBER_ROOMS = {member: ROOMS[number % 3] for number, member in enumerate(MEMBERS)}
BROKERS = {f"{ROOMS[number % 3]}@b{number:02d}": ROOMS[number % 3] for number in range(10)}
QUEUES = [Queue("orders", broker, number) for broker in BROKERS for number in range(10_000)]
NEARBY = {"queueRooms": BROKERS, "memberRooms": MEMBER_ROOMS}
CHANGES = {"full": "full", "joins": "one joins", "leaves": "one leaves"}
TARGETS = {"Averagely": "≤ 2 ms", "Sticky full": "≤ 15 ms", "Sticky joins": "≤ 5 ms", "Sticky leaves": "≤ 5 ms"}


@dataclass(frozen=True)
class Case:
    """A change in a cell of the grid of Kafka's own benchmark, in which all members subscribe to all topics."""

    members: int
    ratio: int
    topics: int
    change: str

    @property
    def large(self) -> bool:
        """Whether the targets apply to groups of this size."""
        return (self.members, self.ratio) == (10_000, 10)

    @property
    def each(self) -> int:
        """The number of queues of a topic; one where Kafka's own benchmark would have none."""
        return max(self.members * self.ratio // self.topics, 1)

    def roster(self, name: str) -> Roster:
        """Return the strategy's input: no queue is owned, or a member joins or leaves an existing assignment."""
        topics = [f"topic{topic}" for topic in range(self.topics)]
        queues = [Queue(topic, "b", number) for topic in topics for number in range(self.each)]
        roster = Roster.of(queues, MEMBERS[: self.members])
        if self.change == "full":
            return roster
        owned = zip(roster.queues, prepared(name)(roster).tolist(), strict=True)
        new_members = [*roster.members, "orders-7d9f-new"] if self.change == "joins" else roster.members[:-1]
        return Roster.of(roster.queues, new_members, {queue: roster.members[owner] for queue, owner in owned})

    def __str__(self) -> str:
        """Format size and change."""
        queues = f"{self.topics * self.each:,} queues in {self.topics:,} topics"
        return f"{self.members:,} members, {queues}, {CHANGES[self.change]}"


def rows() -> Iterator[Row]:
    """Time each strategy and its peers, and the additional cost of the document."""
    large = Roster.of(QUEUES, MEMBERS)
    yield from _compare_with_reference(large, "Averagely", 10_000, "≤ 2 ms")
    yield from _compare_with_reference(large, "AveragelyByCircle", 1000, "≤ 2 ms")
    yield from _compare_with_reference(large, "ByMachineRoom", 20, "≤ 2 ms", rooms=ROOMS)
    yield from _compare_with_reference(large, "MachineRoomNearby", 20, "≤ 20 ms", **NEARBY)
    # The reference searches the whole ring for each member that it adds: at this size one call takes over a minute.
    yield from _compare_with_reference(large, "ConsistentHash", 0, "≤ 400 ms")
    yield from _compare_with_reference(Roster.of(QUEUES[::10], MEMBERS[::10]), "ConsistentHash", 3, "")
    yield _measure_balanced()
    yield from _measure_overhead(large)
    for members in (100, 1000, 10_000):
        yield from _compare_with_kafka(members, "Sticky", "Uniform")
        yield from _compare_with_kafka(members, "Averagely", "Range")


def _compare_with_reference(roster: Roster, name: str, calls: int, target: str, **options: Any) -> Iterator[Row]:
    size = f"{len(roster.members):,} members, {len(roster.queues):,} queues"
    peer = None
    if calls:
        reference = peers.Reference(roster, [MEMBER_ROOMS[member] for member in roster.members])
        their_names = {ours: theirs for theirs, ours in REFERENCE_NAMES.items()}
        peer = reference.measure(their_names[name], calls, prepared(name, options)(roster).tolist())
    sampled = peer and calls < len(roster.members)
    estimated = f"; peer estimated from {calls:,} of {len(roster.members):,} members" if sampled else ""
    yield Row(f"{name}, {size}{estimated}", _time_strategy(name, roster, options), peer, target)


def _measure_balanced() -> Row:
    chance = random.Random(7)
    queues = [Queue(f"topic{topic}", "b", number) for topic in range(10) for number in range(1000)]
    roster = Roster.of(queues, MEMBERS[:1000])
    options = {"queueWeights": {queue: chance.paretovariate(1.2) for queue in queues}}
    return Row("Balanced, 1,000 members, 10,000 queues", _time_strategy("Balanced", roster, options), target="≤ 300 ms")


def _measure_overhead(roster: Roster) -> Iterator[Row]:
    """Time the steps before and after a strategy, from queues and members to the document; no peer has them."""
    size = f"{len(roster.members):,} members, {len(roster.queues):,} queues"
    yield Row(f"on top: Roster.of, {size}", timed(partial(Roster.of, QUEUES, MEMBERS)))
    plain = [(topic, broker, number) for topic, broker, number in QUEUES]
    whole = timed(partial(allocate, "Averagely", plain, MEMBERS))
    yield Row(f"`allocate` from plain tuples to lists of queues, Averagely, {size}", whole, target="≤ 80 ms")
    chance = random.Random(7)
    uids = [str(uuid.UUID(int=chance.getrandbits(128))) for _ in roster.members]
    for name in ("Averagely", "Sticky"):
        shares = roster.assignment(prepared(name)(roster).tolist()).items()
        members = {member: Share(uid, tuple(queues)) for uid, (member, queues) in zip(uids, shares, strict=True)}
        document = Assignment(group="orders", generation=1, issued_at="", members=members)
        (data,) = encode_assignment(document).values()
        written = timed(partial(encode_assignment, document))
        yield Row(f"on top: {name}'s document written ({len(data) / 1024:,.0f} KiB), {size}", written)


def _compare_with_kafka(members: int, name: str, assignor: str) -> Iterator[Row]:
    cells: list[Case] = []
    spelled: list[str] = []
    for ratio, topics, change in product((5, 10, 50), (10, 100, 1000), CHANGES):
        if change != "leaves" or (name == "Sticky" and ratio == 10):
            case = Case(members, ratio, topics, change)
            cells.append(case)
            spelled.append(f"{members}:{topics}:{case.each}:{change}")
    for work, peer in zip(cells, peers.kafka(assignor.lower(), spelled), strict=True):
        roster = work.roster(name)
        what = f"{name} / {assignor}, {work}"
        if work.change != "full":
            what += f": {_count_moves(name, roster):,} moves" + (f" / {peer.answer['moved']:,}" if peer else "")
        sample = peer.sample if peer else None
        target = TARGETS.get(name, TARGETS.get(f"{name} {work.change}", "")) if work.large else ""
        yield Row(what, _time_strategy(name, roster), sample, target)
        if work.large and work.change == "full":
            yield Row(f"{what}; ours as lists of queues", _time_as_lists(name, roster), sample)


def _count_moves(name: str, roster: Roster) -> int:
    owners = prepared(name)(roster).tolist()
    return sum(owner not in (previous, NO_OWNER) for previous, owner in zip(roster.owners, owners, strict=True))


def _time_as_lists(name: str, roster: Roster) -> Sample:
    strategy = prepared(name)
    return timed(lambda: roster.assignment(strategy(roster).tolist()))


def _time_strategy(name: str, roster: Roster, options: dict[str, Any] | None = None) -> Sample:
    return timed(partial(prepared(name, options), roster))
