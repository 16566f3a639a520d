"""Consumer groups of the in-memory cluster: settings, online members, offsets and queue locks."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rota.brokers.errors import NotFoundError
from rota.brokers.memory.message_store import queues_of_topic
from rota.brokers.port import BrokerGroupSettings, Membership
from rota.model import Queue

LOCK_SECONDS = 60.0  # a lock that is not renewed for this time expires


class ConsumerGroups:
    """The state of all groups; offsets, members and locks are kept by the group's name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.auto_creates = True  # create a missing group on first use, as brokers do unless configured otherwise
        self.members: defaultdict[str, list[Membership]] = defaultdict(list)  # one entry for each connection
        self.committed_offsets: defaultdict[str, dict[Queue, int]] = defaultdict(dict)
        self.pulled_offsets: defaultdict[str, dict[Queue, int]] = defaultdict(dict)
        self.reset_queues: defaultdict[str, set[Queue]] = defaultdict(set)  # queues that were not pulled since a reset
        self.locks: dict[tuple[str, Queue], tuple[str, float]] = {}  # client id and expiry, by group and queue
        self._clock = clock
        self._settings: dict[tuple[str, str], BrokerGroupSettings] = {}  # by group and broker

    def require_settings(self, group: str, broker: str, *, create: bool = True) -> BrokerGroupSettings:
        """Return a group's settings; create a missing group if that is allowed, else raise `NotFoundError`."""
        if create and self.auto_creates:
            self._settings.setdefault((group, broker), BrokerGroupSettings())
        if (group, broker) not in self._settings:
            raise NotFoundError(f"There is no group {group} on {broker}")
        return self._settings[group, broker]

    def update_settings(self, group: str, broker: str, changed: Mapping[str, Any]) -> None:
        """Create a group, or change the named fields of its settings."""
        current = self._settings.get((group, broker), BrokerGroupSettings())
        self._settings[group, broker] = current._replace(**changed)

    def notify_members(self, group: str) -> None:
        """Tell the members of a group, except broadcasting ones, that its membership has changed."""
        for member in self.members[group]:
            if not member.broadcasting:
                asyncio.get_running_loop().call_soon(member.on_members_changed)

    def commit(self, group: str, queue: Queue, offset: int) -> None:
        """Commit an offset, unless the queue's offset was reset and no pull has followed."""
        if queue not in self.reset_queues[group]:
            self.committed_offsets[group][queue] = offset

    def reset_offsets(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Replace offsets of a group; until the next pull of a queue, its commits are ignored."""
        self.committed_offsets[group] |= offsets
        self.reset_queues[group] |= offsets.keys()

    def forget_topic(self, topic: str) -> None:
        """Forget the offsets of all groups in a topic."""
        for table in (*self.committed_offsets.values(), *self.pulled_offsets.values()):
            for queue in queues_of_topic(table, topic):
                del table[queue]
        for queues in self.reset_queues.values():
            queues.difference_update(queues_of_topic(queues, topic))

    def lock(self, group: str, client_id: str, queues: Collection[Queue]) -> frozenset[Queue]:
        """Lock queues that no other client has locked; return them."""
        now = self._clock()
        locked: set[Queue] = set()
        for queue in queues:
            owner, expiry = self.locks.get((group, queue), (client_id, now))  # without a lock: as if the client had it
            if owner == client_id or expiry < now:
                self.locks[group, queue] = client_id, now + LOCK_SECONDS
                locked.add(queue)
        return frozenset(locked)

    def unlock(self, group: str, client_id: str, queue: Queue) -> None:
        """Release a client's lock; another client's lock stays."""
        owner, _ = self.locks.get((group, queue), ("", 0.0))
        if owner == client_id:
            del self.locks[group, queue]

    def drop_locks(self, broker: str) -> None:
        """Drop all locks of a broker's queues."""
        self.locks = {(group, queue): lock for (group, queue), lock in self.locks.items() if queue.broker != broker}
