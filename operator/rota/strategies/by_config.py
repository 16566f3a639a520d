"""ByConfig: the policy names the queues of each member.

The strategy CONFIG of RocketMQ's Java client returns the same list of queues for all members, so each queue has several
owners. No policy can choose that; `rota.strategies.allocate` can (option `queues`), for tests against that client.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap

from rota.model import NO_OWNER, Queue, Roster
from rota.strategies import input_checks
from rota.strategies.arrays import Owners, index_by_item, no_owners


def by_config(roster: Roster, *, members: Mapping[str, Iterable[tuple[str, str, int]]]) -> Owners:
    """Give each member the queues named for it; queues named for no member have no owner.

    Unknown members and queues are ignored; a queue named for two members is a mistake.
    """
    member_indexes = index_by_item(roster.members)
    queue_indexes = index_by_item(roster.queues)
    owners = no_owners(len(roster.queues))
    claimed: dict[Queue, str] = {}
    if members is None:
        raise ValueError("Option members must be a mapping of members to their queues, not None")
    for member, listed in input_checks.check_mapping("Option members", members).items():
        for queue in input_checks.check_queues(f"Option members, for {member},", listed):
            if claimed.setdefault(queue, member) != member:
                raise ValueError(f"Queue {queue} is configured for {claimed[queue]} and for {member}; name it once")
            if queue in queue_indexes and member in member_indexes:
                owners[queue_indexes[queue]] = member_indexes[member]
    return owners


def why_by_config(
    roster: Roster, owners: Owners, queues: Sequence[int], *, members: Mapping[str, Iterable[tuple[str, str, int]]]
) -> Iterator[str]:
    """Yield a sentence for each queue (an index): for which member the policy names it."""
    configured: dict[Queue, str] = {}
    for member, listed in members.items():
        configured |= dict.fromkeys(starmap(Queue, listed), member)
    for queue in queues:
        owner = configured.get(roster.queues[queue])
        absent = ", which is not a member" if owners[queue] == NO_OWNER else ""
        yield f"the policy names it for {owner}{absent}" if owner else "the policy names it for no present member"
