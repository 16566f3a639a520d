"""ConsistentHash: each member has virtual nodes on a ring, and a queue belongs to the member of the next virtual node.

The names of virtual nodes and of queues are hashed to positions on the ring. Names and hash are those of RocketMQ's
Java client ("the reference" below), so this strategy gives the same owners as its AllocateMessageQueueConsistentHash.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import md5
from itertools import product

import numpy as np

from rota.model import Roster
from rota.strategies.arrays import Indices, Owners, is_whole_number, no_owners

Hash = Callable[[str], int]
MAX_VIRTUAL_NODES = 1000  # virtual nodes of a member; more are slower, and the spread is not visibly more even


def ring_position(key: str) -> int:
    """Return the position of a key on the reference's ring: the first four bytes of its MD5."""
    return int(_reference_positions([key])[0])


def consistent_hash(roster: Roster, *, virtualNodes: int = 10, hash: Hash = ring_position) -> Owners:  # noqa: A002
    """Give each queue to the member of the first virtual node at or after the queue's position on the ring.

    Few queues move when a member joins or leaves; the spread is only as even as the hashes happen to be.
    """
    if not is_whole_number(virtualNodes):
        raise ValueError(f"Option virtualNodes must be a whole number from 0 up, not {virtualNodes!r}")
    if not callable(hash):
        raise ValueError(f"Option hash must be a function from text to number, not {hash!r}")  # noqa: TRY004
    if virtualNodes > MAX_VIRTUAL_NODES:
        raise ValueError(f"Option virtualNodes may be at most {MAX_VIRTUAL_NODES}, not {virtualNodes}")
    if virtualNodes == 0:
        return no_owners(len(roster.queues))
    suffixes = [f"-{number}" for number in range(virtualNodes)]
    node_names = [*map("".join, product(roster.members, suffixes))]  # "m1-0", "m1-1", …: a member's nodes are adjacent
    positions = _ring_positions(node_names, hash)
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    is_last = np.append(positions[1:] != positions[:-1], True)  # of virtual nodes at one position, the last one counts
    positions = positions[is_last]
    members = (order[is_last] // virtualNodes).astype(np.int32)  # from the node's index to its member's
    next_nodes = np.searchsorted(positions, _ring_positions(_queue_keys(roster), hash))
    owners: Owners = members[next_nodes % len(positions)]  # behind the last virtual node the first one follows
    return owners


def why_consistent_hash(
    roster: Roster, owners: Owners, queues: Sequence[int], *, virtualNodes: int = 10, **_hash: Hash
) -> Iterator[str]:
    """Yield a sentence for each queue (an index) on why its owner has it: it has the next virtual node on the ring."""
    node_count = len(roster.members) * virtualNodes
    for queue in queues:
        if not node_count:
            yield "with virtualNodes 0 no member is on the ring"
        else:
            owner = roster.members[owners[queue]]
            yield f"the next of the {node_count} virtual nodes on the ring is one of the {virtualNodes} of {owner}"


def _ring_positions(keys: Sequence[str], hash: Hash) -> Indices:  # noqa: A002
    """Return the positions of keys by the chosen hash."""
    if hash is ring_position:
        return _reference_positions(keys)
    try:
        return np.fromiter(map(hash, keys), dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"Option hash must return integers of at most 63 bits: {error}") from error


def _reference_positions(keys: Sequence[str]) -> Indices:
    """Return `ring_position` of each key.

    Converting all digests in one array takes a third less time than slicing each digest.
    """
    digests = b"".join([md5(key.encode("utf-8", "replace"), usedforsecurity=False).digest() for key in keys])
    return np.frombuffer(digests, ">u4")[::4].astype(np.int64)  # the first of the four integers in each digest


def _queue_keys(roster: Roster) -> list[str]:
    """Return each queue's text as Java's `MessageQueue.toString()` spells it: this is what the reference hashes."""
    keys: list[str] = []
    for topic, broker, start, stop in roster.runs:
        prefix = f"MessageQueue [topic={topic}, brokerName={broker}, queueId="
        keys += [f"{prefix}{queue.id}]" for queue in roster.queues[start:stop]]
    return keys
