"""Online consumers of a group, and the group's settings, as its brokers return them; and problems in both."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rota.brokers.errors import NotFoundError
from rota.brokers.port import BrokerGroupSettings, Brokers, OnlineConsumer
from rota.model import Finding, Reason

SILENT_CONNECTION_SECONDS = 120.0  # after which brokers close a silent connection


def suffix_of(client_id: str) -> str:
    """Return the suffix of a client id: for a member's `address@pod#uid` it is `pod#uid`."""
    return client_id.partition("@")[2]


class DuplicateId(NamedTuple):
    """A client id that a broker lists more than once: several consumers, or one consumer and its old connection."""

    since: float  # loop's time of the poll that first found it
    # Whether each broker that lists the id repeatedly lists it with one address. Two brokers may see two addresses.
    same_address: bool

    def may_be_old_connection(self, now: float) -> bool:
        """Whether a broker may still hold the old connection of a consumer that has connected again."""
        return self.same_address and now - self.since <= SILENT_CONNECTION_SECONDS


@dataclass(frozen=True)
class OnlineConsumers:
    """The consumers last seen in a group, and its problems."""

    # Sorted client ids; an id that a broker lists several times is repeated as often. None: no response.
    ids: tuple[str, ...] | None = None
    consumers: Mapping[str, OnlineConsumer] = field(default_factory=dict)  # by id
    settings: Mapping[str, BrokerGroupSettings] = field(default_factory=dict)  # by broker
    problems: tuple[Finding, ...] = ()
    duplicates: Mapping[str, DuplicateId] = field(default_factory=dict)  # ids that one broker lists more than once

    @property
    def is_accepted(self) -> bool | None:
        """Whether the brokers of the group's topics accept it and list its consumers; None: they did not respond."""
        if self.ids is not None:
            return True
        is_refused = any(problem.reason is Reason.BROKER_REFUSES for problem in self.problems)
        return False if is_refused else None

    def unmanaged_ids(self, member_suffixes: Collection[str]) -> tuple[str, ...] | None:
        """Return the client ids without a member's suffix; None if the brokers did not respond."""
        if self.ids is None:
            return None
        return tuple(client_id for client_id in self.ids if suffix_of(client_id) not in member_suffixes)

    def duplicate_problems(self, now: float, member_suffixes: Collection[str]) -> list[Finding]:
        """Report client ids that several consumers share.

        A member's id is not reported as long as the second entry may be the member's old connection.
        """
        duplicate_ids: list[str] = []
        for client_id, duplicate in sorted(self.duplicates.items()):
            is_member = suffix_of(client_id) in member_suffixes
            if not (is_member and duplicate.may_be_old_connection(now)):
                duplicate_ids.append(client_id)
        if not duplicate_ids:
            return []
        names = ", ".join(duplicate_ids[:3])
        message = f"Several consumers use the client ids {names}, so some of their queues stay unread"
        return [Finding(Reason.DUPLICATE_CLIENT_IDS, f"{message}; make client ids unique")]


class BrokerResponse(NamedTuple):
    """One broker's response about a group."""

    broker: str
    consumers: tuple[OnlineConsumer, ...]
    settings: BrokerGroupSettings | None


async def read_group_at(brokers: Brokers, slots: asyncio.Semaphore, consumer_group: str, broker: str) -> BrokerResponse:
    """Ask a broker for a group's online consumers and settings; `slots` limits the concurrent requests."""
    async with slots:
        consumers = await brokers.online_consumers(consumer_group, broker)
    try:
        async with slots:
            settings = await brokers.group_settings(consumer_group, broker)
    except NotFoundError:
        settings = None  # no consumer has joined at this broker yet
    return BrokerResponse(broker, consumers, settings)


def merge_consumers(
    responses: Collection[BrokerResponse], previous_duplicates: Mapping[str, DuplicateId], now: float
) -> OnlineConsumers:
    """Merge the responses of a group's brokers; `previous_duplicates` is the `duplicates` of the last poll."""
    occurrences = Counter[str]()
    consumers: dict[str, OnlineConsumer] = {}
    duplicates: dict[str, DuplicateId] = {}
    for response in responses:
        hosts_by_id: defaultdict[str, list[str]] = defaultdict(list)
        for consumer in response.consumers:
            consumers[consumer.client_id] = consumer
            hosts_by_id[consumer.client_id].append(consumer.address.rpartition(":")[0])
        for client_id, hosts in hosts_by_id.items():
            # The maximum, not the sum: each broker lists all consumers.
            occurrences[client_id] = max(occurrences[client_id], len(hosts))
            if len(hosts) > 1:
                at_other_broker = duplicates.get(client_id)
                previous = at_other_broker or previous_duplicates.get(client_id)
                same_address = len({*hosts}) == 1 and (at_other_broker is None or at_other_broker.same_address)
                duplicates[client_id] = DuplicateId(previous.since if previous else now, same_address)
    settings = {response.broker: response.settings for response in responses if response.settings}
    ids = tuple(sorted(occurrences.elements()))
    return OnlineConsumers(ids, consumers, settings, _find_disabled(settings), duplicates)


def _find_disabled(settings: Mapping[str, BrokerGroupSettings]) -> tuple[Finding, ...]:
    disabled = [broker for broker, setting in settings.items() if not setting.consume_enabled]
    if not disabled:
        return ()
    message = f"Consumption is disabled for the group at {', '.join(disabled)}"
    return (Finding(Reason.CONSUMPTION_DISABLED, f"{message}; enable it with mqadmin updateSubGroup -s true"),)
