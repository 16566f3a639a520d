"""ConsistentHash: members have many places on a ring, and a queue belongs to the member with the next place.

This is the reference's CONSISTENT_HASH.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import md5

import numpy as np

from rota.model import Roster
from rota.strategies.arrays import Indices, Owners, nobody, whole

Hash = Callable[[str], int]
MAX_VIRTUAL_NODES = 1000  # for each member; more places are slower, and no more even to any visible degree


def ring_position(key: str) -> int:
    """Return the position of a key on the reference's ring: the first four bytes of its MD5."""
    return int(_ring_positions([key], ring_position)[0])


def consistent_hash(roster: Roster, *, virtualNodes: int = 10, hash: Hash = ring_position) -> Owners:  # noqa: A002
    """Give each queue to the first member at or after its place on the ring.

    Few queues move when a member joins or leaves; the spread is only as even as the hashes happen to be.
    """
    if not whole(virtualNodes):
        raise ValueError(f"Option virtualNodes must be a whole number from 0 up, not {virtualNodes!r}")
    if not callable(hash):
        raise ValueError(f"Option hash must be a function from text to number, not {hash!r}")  # noqa: TRY004
    if virtualNodes > MAX_VIRTUAL_NODES:
        raise ValueError(f"Option virtualNodes may be at most {MAX_VIRTUAL_NODES}, not {virtualNodes}")
    if virtualNodes == 0:
        return nobody(len(roster.queues))
    replicas = [f"-{number}" for number in range(virtualNodes)]
    nodes = _ring_positions([member + replica for member in roster.members for replica in replicas], hash)
    order = np.argsort(nodes, kind="stable")
    nodes = nodes[order]
    last = np.append(nodes[1:] != nodes[:-1], True)  # of places at the same position, the last one counts
    nodes = nodes[last]
    owners = (order[last] // virtualNodes).astype(np.int32)
    owned: Owners = owners[np.searchsorted(nodes, _ring_positions(_queue_keys(roster), hash)) % len(nodes)]
    return owned


def why_consistent_hash(
    roster: Roster, owners: Owners, queues: Sequence[int], *, virtualNodes: int = 10, **_hash: Hash
) -> Iterator[str]:
    """Yield the member with the next place on the ring."""
    places = len(roster.members) * virtualNodes
    for queue in queues:
        if not places:
            yield "with virtualNodes 0 no member is on the ring"
        else:
            nearest = f"one of the {virtualNodes} of {roster.members[owners[queue]]}"
            yield f"the next of the {places} places on the ring is {nearest}"


def _ring_positions(keys: Sequence[str], hash: Hash) -> Indices:  # noqa: A002
    if hash is not ring_position:
        try:
            return np.fromiter(map(hash, keys), dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"Option hash must return integers of at most 63 bits: {error}") from error
    # The reference's hash: all sums are joined first and cut once, which takes two thirds of the time.
    sums = b"".join([md5(key.encode("utf-8", "replace"), usedforsecurity=False).digest() for key in keys])
    return np.frombuffer(sums, ">u4")[::4].astype(np.int64)


def _queue_keys(roster: Roster) -> list[str]:
    keys: list[str] = []
    for topic, broker, start, stop in roster.runs:
        prefix = f"MessageQueue [topic={topic}, brokerName={broker}, queueId="
        keys += [f"{prefix}{queue.id}]" for queue in roster.queues[start:stop]]
    return keys
