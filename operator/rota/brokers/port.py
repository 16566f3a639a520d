"""The port through which operator and sidecar see a broker: routes, members, offsets, locks, messages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from rota.brokers.message import MEBIBYTE, Message
from rota.model import RETRY, Queue
from rota.spec import Buffer, StartFrom, Subscription
from rota.spec.consumer_settings import ConsumerSettings

LATER, NEVER = 0, -1  # levels of a message that is given back: later the more often it was tried; to the dead letters


class Moved(StrEnum):
    """Why messages are not to be had where they were asked for."""

    OUTSIDE = "Outside"  # the queue begins later, or ends sooner
    RESET = "Reset"  # somebody set the group's offset


class Pulled(NamedTuple):
    """What came of asking a queue for messages."""

    messages: tuple[Message, ...]
    next: int  # where to ask next
    first: int  # the offset of the queue's oldest message
    last: int  # the offset that its next message will have
    moved: Moved | None = None  # after a RESET whatever was fetched of the queue before is worth nothing


class Admission(Protocol):
    """The memory that one pull may take: the consumer asks before it keeps a message.

    All messages of one pull are asked for in one turn of the event loop, in the order of their offsets.
    """

    @property
    def largest_body_bytes(self) -> int:
        """The size up to which a packed body is unpacked; a larger one stays packed, with the reason as its damage."""

    def admit(self, memory_bytes: int) -> bool:
        """Whether a message that takes so much memory is kept; after a refusal the pull keeps no other one."""


class AdmitAll:
    """Admits every message: for pulls whose memory is not limited."""

    largest_body_bytes = Buffer().mebibytes_per_message * MEBIBYTE

    def admit(self, memory_bytes: int) -> bool:  # noqa: ARG002 - the port's signature
        """Return True."""
        return True


ADMIT_ALL = AdmitAll()


class Client(NamedTuple):
    """A consumer that a broker sees in a group, once for each of its connections."""

    id: str
    address: str
    language: str = ""
    version: str = ""


class Progress(NamedTuple):
    """How far a group is with a queue, as its broker tells it."""

    last: int
    committed: int  # 0 also where it never committed anything
    pulled: int
    consumed_until: float = 0.0  # seconds since 1970: when the last message that it consumed was stored; 0: not known


class Ends(NamedTuple):
    """Where a queue begins and ends."""

    first: int
    last: int
    updated: float = 0.0  # seconds since 1970


class Settings(NamedTuple):
    """A group's settings at a broker."""

    enabled: bool = True
    broadcast: bool = True
    retry_queues: int = 1
    attempts: int = 16


def queues_of(topic: str, counts: Mapping[str, int]) -> tuple[Queue, ...]:
    """Return the queues of a topic, sorted, by how many each broker has."""
    return tuple(Queue(topic, broker, number) for broker in sorted(counts) for number in range(counts[broker]))


class Brokers(Protocol):
    """The brokers of one cluster, as an operator sees them.

    Whatever is asked either answers, or raises a `BrokerError`; nothing that was not said is made up.
    """

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """Return the queues of a topic that can be read; `Unknown` if there is no such topic."""

    async def queue_counts(self, topic: str) -> Mapping[str, int]:
        """Return how many queues of a topic each broker has, whose ids are 0, 1, …; that takes little memory."""

    async def brokers(self) -> tuple[str, ...]:
        """Return the names of all brokers."""

    def addresses(self, brokers: Collection[str]) -> frozenset[str]:
        """Return the known addresses of these brokers; clients with a common address use the same broker."""

    async def clients(self, group: str, broker: str) -> tuple[Client, ...]:
        """Return who is online in a group."""

    async def consumer_settings(self, group: str, client_id: str, broker: str) -> ConsumerSettings:
        """Return what a consumer that is online at this broker says of its own settings."""

    async def settings(self, group: str, broker: str) -> Settings:
        """Return a group's settings; `Unknown` if there is no such group, where the broker does not make it by that."""

    async def progress(self, group: str, broker: str, topics: Collection[str] = ()) -> dict[Queue, Progress]:
        """Return how far a group is with the queues of a broker."""

    async def committed(self, group: str, queue: Queue) -> int | None:
        """Return where a group is with a queue, or None where it never was; `progress` cannot tell 0 from that."""

    async def at(self, queue: Queue, seconds: float) -> int:
        """Return the offset of the first message that was stored at a time or later."""

    async def ends(self, topic: str, broker: str) -> dict[Queue, Ends]:
        """Return where a topic's queues begin and end."""

    async def unlock(self, group: str, client_id: str, queues: Collection[Queue]) -> None:
        """Give locks back in the name of a member that has ended."""

    async def send(
        self, topic: str, body: bytes, properties: Mapping[str, str] | None = None, queue: Queue | None = None
    ) -> None:
        """Send a message, to one queue or to any."""

    async def close(self) -> None:
        """Close all connections."""


class Working(NamedTuple):
    """What a member tells of a queue to who asks it by the broker; times are seconds since 1970."""

    committed: int = 0
    first: int = 0  # of what is buffered
    last: int = 0
    buffered: int = 0
    bytes: int = 0
    locked: bool = False
    locked_at: float = 0.0
    pulled_at: float = 0.0
    delivered_at: float = 0.0


def _let_it_be(_: Mapping[Queue, int]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who wants to consume what, and what it wants to hear of."""

    group: str
    client_id: str
    subscriptions: Sequence[Subscription]
    broadcasting: bool = False
    orderly: bool = False
    pushed: bool = True  # messages are brought to it; else it asks for them
    start_from: Callable[[], StartFrom] = field(default=StartFrom)  # may change while the member is online
    queues: Callable[[], Mapping[Queue, Working]] = field(default=dict)
    on_members: Callable[[], None] = field(default=lambda: None)  # others have come or gone
    on_reset: Callable[[Mapping[Queue, int]], None] = field(default=_let_it_be)  # somebody set the group's offsets

    @property
    def topics(self) -> dict[str, Subscription]:
        """What is subscribed to by topic, and what comes of itself: the group's retry topic."""
        retry = [] if self.broadcasting else [Subscription(topic=RETRY + self.group)]
        return {it.topic: it for it in [*self.subscriptions, *retry]}


class Consumer(Protocol):
    """One member's place in a group at the brokers.

    To read from a queue that there is not is `Unknown`, whatever a broker makes of it, and so is to join a group that
    there is not. Commits, locks and their return go to the broker as they are: a queue may be given back after it left
    the route. A lost connection fails what waits on it at once as `Unreachable`; the next call connects again.
    """

    async def check(self) -> None:
        """Ask the brokers whether they take the subscriptions; `Refused` says what they do not take."""

    async def join(self) -> None:
        """Become known to the brokers, and stay so; once, unless it fails."""

    async def leave(self) -> None:
        """Tell the brokers that the member goes, and close all connections; whatever is asked then is `Unreachable`."""

    async def reach(self, broker: str) -> None:
        """Ask a broker something that changes nothing: whatever it answers, it is reached."""

    async def pull(
        self,
        queue: Queue,
        offset: int,
        *,
        most: int = 32,
        wait: float = 15.0,
        commit: int | None = None,
        admission: Admission = ADMIT_ALL,
    ) -> Pulled:
        """Ask for messages from an offset on; where there are none, the broker waits for some.

        What is to be committed is so before it waits, and surely so when it is answered. Until then nobody knows, and
        what is committed later may be undone by it. At the first message that is not admitted the result ends: that
        message's offset is where to ask next.
        """

    async def committed(self, queue: Queue) -> int | None:
        """Return where the group is, or None where it never was."""

    async def commit(self, queue: Queue, offset: int) -> None:
        """Say where the group is: everything below this offset is done."""

    async def first(self, queue: Queue) -> int:
        """Return the offset of a queue's oldest message."""

    async def last(self, queue: Queue) -> int:
        """Return the offset that a queue's next message will have."""

    async def at(self, queue: Queue, seconds: float) -> int:
        """Return the offset of the first message that was stored at a time or later."""

    async def lock(self, queues: Collection[Queue]) -> frozenset[Queue]:
        """Ask for queues of one broker to be locked; return those that are."""

    async def unlock(self, queues: Collection[Queue]) -> None:
        """Give locks on queues of one broker back."""

    async def give_back(self, message: Message, *, level: int = LATER, attempts: int = 16) -> None:
        """Have a message tried again later, or never."""
