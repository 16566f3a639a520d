"""Broker port: what operator and sidecar require of brokers, as protocols that each kind of brokers implements.

The operator uses `Brokers` (a cluster), a sidecar uses `Consumer` (one member of a group).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from rota.brokers.message import MEBIBYTE, Message
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.spec import Buffer, StartFrom, Subscription
from rota.spec.consumer_settings import ConsumerSettings

# Delay levels of `send_back`, as in RocketMQ; levels above 0 name a fixed delay.
RETRY_LEVEL = 0  # a delay that grows with each attempt
DEAD_LETTER_LEVEL = -1  # no further attempt: to the dead-letter topic


class OffsetCorrection(StrEnum):
    """Why a pull returns no messages, but another offset from which to continue (`PullResult.next_offset`)."""

    OUT_OF_RANGE = "OutOfRange"  # the offset is before the queue's first message or after its end
    RESET = "Reset"  # the group's offset was reset at the broker


class PullResult(NamedTuple):
    """The result of a pull."""

    messages: tuple[Message, ...]
    next_offset: int  # the offset of the next pull
    min_offset: int  # the offset of the queue's oldest message
    max_offset: int  # the offset that the queue's next message will have
    correction: OffsetCorrection | None = None  # RESET invalidates all messages fetched from the queue before


class Admission(Protocol):
    """Memory limit of one pull: the consumer requests admission of a message before it keeps the message.

    Admission of all messages of one pull is requested in one turn of the event loop, in the order of their offsets.
    """

    @property
    def max_body_bytes(self) -> int:
        """The largest decompressed size of a body; a larger one stays compressed, with a `Message.body_error`."""

    def admit(self, memory_bytes: int) -> bool:
        """Return whether the pull keeps a message of this size; after a refusal it keeps no further message."""


class AdmitAll:
    """Admits every message, for pulls without a memory limit."""

    max_body_bytes = Buffer().mebibytes_per_message * MEBIBYTE

    def admit(self, memory_bytes: int) -> bool:  # noqa: ARG002 - the port's signature
        """Return True."""
        return True


ADMIT_ALL = AdmitAll()


class OnlineConsumer(NamedTuple):
    """An online consumer of a group as a broker lists it, once for each of its connections."""

    client_id: str
    address: str
    language: str = ""
    version: str = ""


class BrokerOffsets(NamedTuple):
    """A group's offsets in a queue, as the broker reports them."""

    max_offset: int
    committed_offset: int  # 0: at the start, or the group never committed
    pulled_offset: int
    consumed_until: float = 0.0  # store time of the last consumed message, seconds since 1970; 0: unknown


class OffsetRange(NamedTuple):
    """The range of offsets in a queue; equal offsets mean that it is empty."""

    min_offset: int  # the offset of the oldest message
    max_offset: int  # the offset that the next message will have
    last_stored_at: float = 0.0  # store time of the newest message, seconds since 1970; 0: unknown


class BrokerGroupSettings(NamedTuple):
    """A group's settings at a broker."""

    consume_enabled: bool = True
    broadcast_enabled: bool = True
    retry_queues: int = 1
    max_attempts: int = 16


def queues_of(topic: str, queue_counts: Mapping[str, int]) -> tuple[Queue, ...]:
    """Return a topic's queues, sorted, from the number of its queues on each broker."""
    queues: list[Queue] = []
    for broker, count in sorted(queue_counts.items()):
        queues.extend(Queue(topic, broker, number) for number in range(count))
    return tuple(queues)


class Brokers(Protocol):
    """The brokers of one cluster, as the operator uses them.

    Every request returns the response of a broker or raises a `BrokerError`; no value is guessed.
    """

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the readable queues of a topic; raise `NotFoundError` if the topic does not exist."""

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        """Return the number of a topic's queues on each broker; takes less memory than `queues`. Ids count from 0."""

    async def broker_names(self) -> tuple[str, ...]:
        """Return the names of all brokers."""

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return the known addresses of these brokers; two clients that share an address use the same broker."""

    async def online_consumers(self, group: str, broker: str) -> tuple[OnlineConsumer, ...]:
        """Return the consumers of a group that are online at a broker."""

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return the settings that a consumer online at this broker reports of itself."""

    async def group_settings(self, group: str, broker: str) -> BrokerGroupSettings:
        """Return a group's settings; raise `NotFoundError` if it does not exist and the broker does not create it."""

    async def group_offsets(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, BrokerOffsets]:
        """Return a group's offsets in the queues of a broker; without `topics`, of all topics of the group."""

    async def committed_offset(self, group: str, queue: Queue) -> int | None:
        """Return a group's committed offset, or None if it never committed; `group_offsets` reports 0 in both cases."""

    async def offset_at_time(self, queue: Queue, timestamp: float) -> int:
        """Return the offset of the first message that was stored at this time or later."""

    async def offset_ranges(self, topic: str, broker: str) -> dict[Queue, OffsetRange]:
        """Return the range of offsets in each queue of a topic at a broker."""

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Release queue locks on behalf of a member that has ended."""

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        """Send a message to the given queue, or to any queue of the topic."""

    def reconnect(self) -> None:
        """Use new connections from now on, because certificates or credentials were renewed.

        Cached routes and addresses are kept. Each present connection ends when its pending requests do.
        """

    async def close(self) -> None:
        """Close all connections."""


class ConsumedQueue(NamedTuple):
    """A queue's state that a member reports when a tool such as mqadmin requests it; times: seconds since 1970."""

    committed_offset: int = 0
    min_buffered_offset: int = 0  # the lowest offset of the buffered messages
    max_buffered_offset: int = 0  # the highest offset of the buffered messages
    buffered_messages: int = 0
    buffered_bytes: int = 0
    locked: bool = False
    locked_at: float = 0.0
    pulled_at: float = 0.0
    delivered_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A member of a group: its identity, subscriptions, settings, and callbacks for events."""

    group: str
    client_id: str
    subscriptions: Sequence[Subscription]
    broadcasting: bool = False
    orderly: bool = False
    is_push: bool = True  # messages are pushed to the app; if False, the app polls for them
    get_start_from: Callable[[], StartFrom] = field(default=StartFrom)  # may change while the member is online
    get_queues: Callable[[], Mapping[Queue, ConsumedQueue]] = field(default=dict)  # the queues that the member owns
    on_members_changed: Callable[[], None] = field(default=lambda: None)  # other members have joined or left
    # An administrator has reset the group's offsets to these.
    on_offsets_reset: Callable[[Mapping[Queue, int]], None] = field(default=lambda _: None)

    @property
    def subscriptions_by_topic(self) -> dict[str, Subscription]:
        """Subscriptions by topic; unless broadcasting, with the implicit one to the group's retry topic."""
        by_topic = {subscription.topic: subscription for subscription in self.subscriptions}
        if not self.broadcasting:
            retry_topic = RETRY_TOPIC_PREFIX + self.group
            by_topic[retry_topic] = Subscription(topic=retry_topic)
        return by_topic


class Consumer(Protocol):
    """One member of a group at the brokers.

    Reading from a queue or joining a group that does not exist raises `NotFoundError`, whatever the broker responds.
    Commits, locks and unlocks are sent without that check: a member may release a queue that is no longer in the route.
    When a connection breaks, its pending calls fail at once with `UnreachableError`; the next call reconnects.
    """

    async def check_subscriptions(self) -> None:
        """Ask the brokers whether they accept the subscriptions; raise `RejectedError` with the reason if not."""

    async def join(self) -> None:
        """Register with the brokers and stay registered; callable once, and again only after a failure."""

    async def leave(self) -> None:
        """Unregister from the brokers and close all connections; later calls raise `UnreachableError`."""

    async def ping_broker(self, broker: str) -> None:
        """Send a broker a request without effect; return on any response, since that shows it is reachable."""

    async def pull(
        self,
        queue: Queue,
        offset: int,
        *,
        max_messages: int = 32,
        wait_seconds: float = 15.0,
        commit_offset: int | None = None,
        admission: Admission = ADMIT_ALL,
    ) -> PullResult:
        """Request messages from an offset on; if the queue has none yet, the broker waits for `wait_seconds`.

        The broker stores `commit_offset` before it waits. Only its response confirms that: until then the commit may
        still be applied, and overwrite a later commit. The result ends before the first message that is not admitted;
        the offset of that message is the result's `next_offset`.
        """

    async def committed_offset(self, queue: Queue) -> int | None:
        """Return the group's committed offset, or None if it never committed."""

    async def commit(self, queue: Queue, offset: int) -> None:
        """Commit an offset for the group: all messages below it are done."""

    async def min_offset(self, queue: Queue) -> int:
        """Return the offset of a queue's oldest message."""

    async def max_offset(self, queue: Queue) -> int:
        """Return the offset that a queue's next message will have."""

    async def offset_at_time(self, queue: Queue, timestamp: float) -> int:
        """Return the offset of the first message that was stored at this time or later."""

    async def lock(self, queues: Collection[Queue]) -> frozenset[Queue]:
        """Request locks on queues of one broker; return the queues that were locked."""

    async def unlock(self, queues: Collection[Queue]) -> None:
        """Release locks on queues of one broker."""

    async def send_back(self, message: Message, *, delay_level: int = RETRY_LEVEL, max_attempts: int = 16) -> None:
        """Send a message back for redelivery after a delay, or to the dead-letter topic."""
