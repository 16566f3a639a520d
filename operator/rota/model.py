"""The nouns: Queue, Holder, Roster; frozen, sorted, without I/O.

Two orders hold everywhere, the reference client's: queues by topic, broker and id; names by UTF-16 code units, as Java
compares strings (it differs from code points only beyond U+FFFF).
"""

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from itertools import pairwise
from typing import Literal, NamedTuple, Self

TopicKind = Literal["Subscribed", "Retry"]

RETRY = "%RETRY%"
NOBODY = -1

_QUEUE = re.compile(r"([^/]+)/(.+)/(\d{1,6})", re.ASCII)


class Queue(NamedTuple):
    """The unit of assignment."""

    topic: str
    broker: str
    id: int

    def __str__(self) -> str:
        """Spell it as in messages to people."""
        return f"{self.topic}/{self.broker}/{self.id}"


def queue_of(text: str) -> Queue:
    """Read a queue as people spell it; a topic has no slash, a broker may have one."""
    found = _QUEUE.fullmatch(text)
    if not found:
        told = f"The queue {plain(text, 100)!r} cannot be read"
        raise ValueError(f"{told}: write it as TOPIC/BROKER/ID, orders/broker-a/3")
    return Queue(found[1], found[2], int(found[3]))


# Who owns what at present; a Mapping does not take a Queue where a tuple is promised, hence both.
Present = Mapping[Queue, str] | Mapping[tuple[str, str, int], str]


class Holder(NamedTuple):
    """A member as an owner: its name, and the uid of its pod, for a pod made anew under an old name is another."""

    name: str
    uid: str


class Use(Flag):
    """How a reason is used. As a reported problem, a reason makes the group Degraded unless it is HARMLESS."""

    OTHER = 0
    CAUSE = auto()  # a rebalance's, with a series of its own in the metrics
    GATE = auto()  # of what holds a rebalance back; likewise
    HARMLESS = auto()  # a problem that leaves the group as it is
    NOT_READY = auto()  # a problem with which the group is not Ready
    STALLS = auto()  # a problem that only a user can fix; when it lasts, the group is Stalled


class Reason(StrEnum):
    """Why something is so: the one catalogue that conditions, Events, metric labels and logs are worded from."""

    use: Use

    def __new__(cls, value: str, use: Use = Use.OTHER) -> Self:
        """Make a reason of this name."""
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.use = use
        return reason

    # Why queues change hands.
    FIRST_ASSIGNMENT = "FirstAssignment", Use.CAUSE
    MEMBER_JOINED = "MemberJoined", Use.CAUSE
    MEMBER_LEFT = "MemberLeft", Use.CAUSE
    MEMBER_ENDED = "MemberEnded", Use.CAUSE
    MEMBER_RESTARTED = "MemberRestarted", Use.CAUSE
    MEMBER_LOST = "MemberLost", Use.CAUSE
    MEMBER_UNREADY = "MemberUnready", Use.CAUSE
    BROKER_UNREACHABLE = "BrokerUnreachable", Use.CAUSE
    QUEUES_ADDED = "QueuesAdded", Use.CAUSE
    QUEUES_REMOVED = "QueuesRemoved", Use.CAUSE
    SUBSCRIPTION_CHANGED = "SubscriptionChanged", Use.CAUSE
    POLICY_CHANGED = "PolicyChanged", Use.CAUSE
    SETTINGS_CHANGED = "SettingsChanged"
    FOREIGN_MEMBERS = "ForeignMembers", Use.CAUSE | Use.HARMLESS
    GROUP_PAUSED = "GroupPaused", Use.CAUSE
    GROUP_RESUMED = "GroupResumed", Use.CAUSE
    RECORD_LOST = "RecordLost"
    LOAD_SHIFTED = "LoadShifted", Use.CAUSE
    # What holds a rebalance back.
    NOTHING_WOULD_CHANGE = "NothingWouldChange"
    PAUSED = "Paused", Use.GATE
    NO_VIEW = "NoView", Use.GATE
    DEBOUNCE = "Debounce", Use.GATE
    MEMBERS_STILL_JOINING = "MembersStillJoining", Use.GATE
    HANDOVER_IN_FLIGHT = "HandoverInFlight", Use.GATE
    BUDGET_SPENT = "BudgetSpent", Use.GATE
    SETTINGS_NOT_OBEYED = "SettingsNotObeyed"
    # What is wrong.
    INVALID_SPEC = "InvalidSpec", Use.STALLS
    INVALID_POLICY = "InvalidPolicy", Use.GATE | Use.STALLS
    MISSING_POLICY = "MissingPolicy", Use.STALLS
    MISSING_SECRET = "MissingSecret", Use.STALLS
    UNKNOWN_TOPIC = "UnknownTopic", Use.STALLS
    BROKER_REFUSES = "BrokerRefuses", Use.STALLS
    SWITCHED_OFF = "SwitchedOff", Use.NOT_READY | Use.STALLS
    DUPLICATE_CLIENT_IDS = "DuplicateClientIds"
    SUBSCRIPTION_MISMATCH = "SubscriptionMismatch"
    NO_SIDECAR = "NoSidecar"
    MEMBER_NOT_AUTHENTICATED = "MemberNotAuthenticated"
    REPORT_TOO_LARGE = "ReportTooLarge"
    NAME_TAKEN = "NameTaken", Use.STALLS
    TEMPLATE_REFUSED = "TemplateRefused", Use.STALLS
    WRITE_REFUSED = "WriteRefused", Use.STALLS
    CLAIMED_TWICE = "ClaimedTwice", Use.CAUSE | Use.NOT_READY | Use.STALLS
    TOO_MANY_QUEUES = "TooManyQueues", Use.STALLS
    TOO_MANY_BROKERS = "TooManyBrokers", Use.STALLS
    TOO_MANY_MEMBERS = "TooManyMembers", Use.STALLS
    STRATEGY_FAILED = "StrategyFailed", Use.STALLS
    NO_MEMBERS = "NoMembers", Use.NOT_READY
    UNSIGNED_MEMBERS = "UnsignedMembers", Use.HARMLESS
    IDLE_MEMBERS = "IdleMembers", Use.HARMLESS
    QUEUES_UNOWNED = "QueuesUnowned", Use.NOT_READY
    QUEUES_FORCED = "QueuesForced"
    DOCUMENT_TOO_LARGE = "DocumentTooLarge", Use.NOT_READY | Use.STALLS
    RECORD_TOO_NEW = "RecordTooNew", Use.NOT_READY | Use.STALLS
    # What members say is wrong, besides.
    MESSAGE_NOT_TAKEN_BACK = "MessageNotTakenBack"
    QUEUES_NOT_TAKEN_UP = "QueuesNotTakenUp"
    QUEUES_NOT_READ = "QueuesNotRead"
    NOTHING_MATCHES = "NothingMatches", Use.HARMLESS
    INTERNAL_ERROR = "InternalError"
    MEMBER_PROBLEM = "MemberProblem"  # a problem that only the sidecar's version knows
    STATE_NOT_WRITTEN = "StateNotWritten"
    SETTINGS_NOT_READ = "SettingsNotRead"
    APP_PATH_NOT_FOUND = "AppPathNotFound"
    APP_NOT_LISTENING = "AppNotListening"
    PULL_NOT_ANSWERED = "PullNotAnswered"
    DELIVERIES_FAILING = "DeliveriesFailing"
    # What is well.
    SETTLED = "Settled"


_BY_NAME = {str(reason): reason for reason in Reason}


def reason_named(name: object) -> Reason | None:
    """Return the reason of this name; None if this version has none, as a later sidecar's may be."""
    return _BY_NAME.get(str(name))


def reasons(use: Use) -> list[Reason]:
    """Return the reasons with this use."""
    return [reason for reason in Reason if use in reason.use]


class Verdict(NamedTuple):
    """What was found, for people and for machines."""

    reason: Reason
    message: str


class Run(NamedTuple):
    """The neighbouring queues of one topic on one broker: `queues[start:stop]`."""

    topic: str
    broker: str
    start: int
    stop: int


class Poke(NamedTuple):
    """What a pod's annotation `rota.dev/generation` says: the generation, and how often the pod was poked for it."""

    generation: int = 0
    times: int = 0

    def __str__(self) -> str:
        """Spell it as the annotation does."""
        return f"{self.generation}-{self.times}"


def plain(text: str, most: int = 300) -> str:
    """Return a stranger's text as a part of a sentence: one line, not too long, and the same each time it is told."""
    line = re.sub(r"\b0x[0-9a-f]+\b", "0x…", " ".join(text.split())).encode(errors="replace").decode()
    return line if len(line) <= most else line[:most] + "…"


def java_order(name: str) -> bytes:
    """Return the key under which names sort as in the reference client."""
    return name.encode("utf-16-be", "surrogatepass")


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """A strategy's input: sorted queues, sorted member names, and who owns what at present.

    `owners[q]` is the index of the one member that owns `queues[q]`, or -1: two owners cannot be written down.
    """

    queues: tuple[Queue, ...]
    members: tuple[str, ...]
    owners: "array[int]"
    runs: tuple[Run, ...]

    @classmethod
    def of(
        cls,
        queues: Iterable[tuple[str, str, int]],
        members: Iterable[str],
        current: Present | None = None,
    ) -> "Roster":
        """Sort and check; present owners that are gone, and queues that are gone, do not count."""
        sorted_members = _sorted_members(members)
        sorted_queues = _sorted_queues(queues)
        return cls(sorted_queues, sorted_members, _owners(sorted_queues, sorted_members, current), _runs(sorted_queues))

    @property
    def topics(self) -> list[tuple[int, int]]:
        """Return where each topic begins and ends among the queues."""
        bounds: list[tuple[int, int]] = []
        for index, run in enumerate(self.runs):
            if index and self.runs[index - 1].topic == run.topic:
                bounds[-1] = (bounds[-1][0], run.stop)
            else:
                bounds.append((run.start, run.stop))
        return bounds

    def assignment(self, owners: Sequence[int]) -> dict[str, list[Queue]]:
        """Return each member's queues in order; every member appears."""
        shares: dict[str, list[Queue]] = {member: [] for member in self.members}
        lists = list(shares.values())
        for queue, owner in zip(self.queues, owners, strict=True):
            if owner >= 0:
                lists[owner].append(queue)
        return shares


def _sorted_queues(queues: Iterable[tuple[str, str, int]]) -> tuple[Queue, ...]:
    listed = [queue if type(queue) is Queue else _queue(queue) for queue in queues or ()]
    if not listed:
        raise ValueError("There is nothing to assign: give at least one queue")
    plain = all(name.isascii() for name in {queue.topic for queue in listed} | {queue.broker for queue in listed})
    listed.sort(key=None if plain else lambda queue: (java_order(queue.topic), java_order(queue.broker), queue.id))
    if len(set(listed)) != len(listed):
        twice = next(queue for queue, after in pairwise(listed) if queue == after)
        raise ValueError(f"Queue {twice} is listed twice; list each queue once")
    return tuple(listed)


def _queue(given: object) -> Queue:
    if not isinstance(given, tuple | list) or len(given) != len(Queue._fields):
        raise ValueError(f"Queue {given!r} cannot be meant: give (topic, broker, id)")
    return Queue._make(given)


def _sorted_members(members: Iterable[str]) -> tuple[str, ...]:
    listed = [members] if isinstance(members, str) else list(members or ())
    for name in listed:
        if not isinstance(name, str):
            raise ValueError(f"A member is named {name!r}, which is no name; give a text")  # noqa: TRY004 - as above
    listed.sort(key=java_order)
    if not listed:
        raise ValueError("There is nobody to assign to: give at least one member")
    if not all(listed):
        raise ValueError("A member's name is empty; name every member")
    for name, after in pairwise(listed):
        if name == after:
            raise ValueError(f"Member {name} is listed twice; list each member once")
    return tuple(listed)


def _owners(queues: Sequence[Queue], members: Sequence[str], current: Present | None) -> "array[int]":
    if not current:
        return array("i", [NOBODY]) * len(queues)
    index = {name: number for number, name in enumerate(members)}
    return array("i", [index.get(current.get(queue, ""), NOBODY) for queue in queues])


def _runs(queues: Sequence[Queue]) -> tuple[Run, ...]:
    """Find the runs by jumping: walking 100,000 queues one by one costs more than sorting them."""
    runs: list[Run] = []
    start = 0
    while start < len(queues):
        topic, broker, _ = queues[start]
        stop = bisect_left(queues, 1, start, key=lambda queue: queue[:2] != (topic, broker))
        runs.append(Run(topic, broker, start, stop))
        start = stop
    return tuple(runs)
