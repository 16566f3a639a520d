"""Values that all packages share: Queue, Holder, Reason, Roster; frozen, without I/O.

Two sort orders apply everywhere, both those of RocketMQ's Java client ("the reference client"): queues by topic, broker
and id; names by UTF-16 code units, as Java compares strings (this differs from code points only beyond U+FFFF).
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

RETRY_TOPIC_PREFIX = "%RETRY%"
NO_OWNER = -1

_QUEUE_PATTERN = re.compile(r"([^/]+)/(.+)/(\d{1,6})", re.ASCII)


class Queue(NamedTuple):
    """A queue of a topic on a broker: the smallest unit that is assigned to a member."""

    topic: str
    broker: str
    id: int

    def __str__(self) -> str:
        """Spell the queue as in messages to users."""
        return f"{self.topic}/{self.broker}/{self.id}"


def parse_queue(text: str) -> Queue:
    """Parse a queue as users spell it; a topic has no slash, a broker may have one."""
    match = _QUEUE_PATTERN.fullmatch(text)
    if not match:
        spelled = repr(single_line(text, 100))
        raise ValueError(f"Invalid queue {spelled}: write it as TOPIC/BROKER/ID, such as orders/broker-a/3")
    return Queue(match[1], match[2], int(match[3]))


# Member names by queue. Two types, since a Mapping is invariant in its key type, and Queue is a subtype of tuple.
PresentOwners = Mapping[Queue, str] | Mapping[tuple[str, str, int], str]


class Holder(NamedTuple):
    """A member as an owner: its name and its pod's uid, which differs if the pod was recreated under the same name."""

    name: str
    uid: str


class ReasonKind(Flag):
    """The uses of a reason. A problem with this reason makes the group Degraded, unless the reason is HARMLESS."""

    OTHER = 0
    CAUSE = auto()  # the cause of a rebalance; has a series of its own in the metrics
    GATE = auto()  # a gate that holds a rebalance back; has a series of its own, too
    HARMLESS = auto()  # a problem that leaves the group as it is
    NOT_READY = auto()  # a problem with which the group is not Ready
    STALLS = auto()  # a problem that only a user can fix; when it lasts, the group is Stalled


class Reason(StrEnum):
    """All reasons that conditions, Events, metric labels and logs name."""

    kinds: ReasonKind

    def __new__(cls, value: str, kinds: ReasonKind = ReasonKind.OTHER) -> Self:
        """Create a reason with this name and use."""
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.kinds = kinds
        return reason

    # Why queues change hands.
    FIRST_ASSIGNMENT = "FirstAssignment", ReasonKind.CAUSE
    MEMBER_JOINED = "MemberJoined", ReasonKind.CAUSE
    MEMBER_LEFT = "MemberLeft", ReasonKind.CAUSE
    MEMBER_TERMINATED = "MemberTerminated", ReasonKind.CAUSE
    MEMBER_RESTARTED = "MemberRestarted", ReasonKind.CAUSE
    MEMBER_LOST = "MemberLost", ReasonKind.CAUSE
    MEMBER_UNREADY = "MemberUnready", ReasonKind.CAUSE
    BROKER_UNREACHABLE = "BrokerUnreachable", ReasonKind.CAUSE
    QUEUES_ADDED = "QueuesAdded", ReasonKind.CAUSE
    QUEUES_REMOVED = "QueuesRemoved", ReasonKind.CAUSE
    SUBSCRIPTION_CHANGED = "SubscriptionChanged", ReasonKind.CAUSE
    POLICY_CHANGED = "PolicyChanged", ReasonKind.CAUSE
    SETTINGS_CHANGED = "SettingsChanged"
    UNMANAGED_CONSUMERS = "UnmanagedConsumers", ReasonKind.CAUSE | ReasonKind.HARMLESS
    GROUP_PAUSED = "GroupPaused", ReasonKind.CAUSE
    GROUP_RESUMED = "GroupResumed", ReasonKind.CAUSE
    ASSIGNMENT_LOST = "AssignmentLost"
    LOAD_SHIFTED = "LoadShifted", ReasonKind.CAUSE
    # Why a rebalance is held back.
    NOTHING_WOULD_CHANGE = "NothingWouldChange"
    PAUSED = "Paused", ReasonKind.GATE
    BROKER_METADATA_UNAVAILABLE = "BrokerMetadataUnavailable", ReasonKind.GATE
    DEBOUNCE = "Debounce", ReasonKind.GATE
    MEMBERS_STILL_JOINING = "MembersStillJoining", ReasonKind.GATE
    HANDOVER_IN_FLIGHT = "HandoverInFlight", ReasonKind.GATE
    BUDGET_SPENT = "BudgetSpent", ReasonKind.GATE
    SETTINGS_NOT_OBEYED = "SettingsNotObeyed"
    ROLLING_OUT = "RollingOut"  # of the condition Reconciling only; gates hold with MembersStillJoining in a rollout
    # Problems that the operator finds.
    INVALID_SPEC = "InvalidSpec", ReasonKind.STALLS
    INVALID_POLICY = "InvalidPolicy", ReasonKind.GATE | ReasonKind.STALLS
    MISSING_POLICY = "MissingPolicy", ReasonKind.STALLS
    MISSING_SECRET = "MissingSecret", ReasonKind.STALLS
    UNKNOWN_TOPIC = "UnknownTopic", ReasonKind.STALLS
    BROKER_REFUSES = "BrokerRefuses", ReasonKind.STALLS
    CONSUMPTION_DISABLED = "ConsumptionDisabled", ReasonKind.NOT_READY | ReasonKind.STALLS
    DUPLICATE_CLIENT_IDS = "DuplicateClientIds"
    SUBSCRIPTION_MISMATCH = "SubscriptionMismatch"
    NO_SIDECAR = "NoSidecar"
    MEMBER_NOT_AUTHENTICATED = "MemberNotAuthenticated"
    REPORT_TOO_LARGE = "ReportTooLarge"
    RESOURCE_CONFLICT = "ResourceConflict", ReasonKind.STALLS
    TEMPLATE_REJECTED = "TemplateRejected", ReasonKind.STALLS
    ROLLOUT_FAILED = "RolloutFailed", ReasonKind.STALLS
    WRITE_REJECTED = "WriteRejected", ReasonKind.STALLS
    DUPLICATE_CONSUMER_GROUP = "DuplicateConsumerGroup", ReasonKind.CAUSE | ReasonKind.NOT_READY | ReasonKind.STALLS
    TOO_MANY_QUEUES = "TooManyQueues", ReasonKind.STALLS
    TOO_MANY_BROKERS = "TooManyBrokers", ReasonKind.STALLS
    TOO_MANY_MEMBERS = "TooManyMembers", ReasonKind.STALLS
    STRATEGY_FAILED = "StrategyFailed", ReasonKind.STALLS
    NO_MEMBERS = "NoMembers", ReasonKind.NOT_READY
    UNSIGNED_MEMBERS = "UnsignedMembers", ReasonKind.HARMLESS
    IDLE_MEMBERS = "IdleMembers", ReasonKind.HARMLESS
    QUEUES_UNOWNED = "QueuesUnowned", ReasonKind.NOT_READY
    QUEUES_FORCED = "QueuesForced"
    ASSIGNMENT_TOO_LARGE = "AssignmentTooLarge", ReasonKind.NOT_READY | ReasonKind.STALLS
    UNSUPPORTED_ASSIGNMENT = "UnsupportedAssignment", ReasonKind.NOT_READY | ReasonKind.STALLS
    # Problems that members report.
    RETRY_REJECTED = "RetryRejected"
    QUEUE_START_FAILED = "QueueStartFailed"
    QUEUES_NOT_READ = "QueuesNotRead"
    NOTHING_MATCHES = "NothingMatches", ReasonKind.HARMLESS
    TRACE_EXPORT_FAILED = "TraceExportFailed", ReasonKind.HARMLESS
    INTERNAL_ERROR = "InternalError"
    MEMBER_PROBLEM = "MemberProblem"  # a problem that only the sidecar's version knows
    STATE_WRITE_FAILED = "StateWriteFailed"
    UNSUPPORTED_SETTINGS = "UnsupportedSettings"
    APP_PATH_NOT_FOUND = "AppPathNotFound"
    APP_NOT_LISTENING = "AppNotListening"
    PULL_PORT_UNAVAILABLE = "PullPortUnavailable"
    DELIVERIES_FAILING = "DeliveriesFailing"
    # No problem.
    SETTLED = "Settled"


_BY_NAME = {str(reason): reason for reason in Reason}


def reason_named(name: object) -> Reason | None:
    """Return the reason of this name; None if this version does not know it, as a later sidecar may report one."""
    return _BY_NAME.get(str(name))


def reasons_of_kind(kind: ReasonKind) -> list[Reason]:
    """Return the reasons with this use."""
    return [reason for reason in Reason if kind in reason.kinds]


class Finding(NamedTuple):
    """A problem or a state that was found: its reason for programs, and its message for users."""

    reason: Reason
    message: str

    @property
    def is_harmful(self) -> bool:
        """Whether a group with this problem is Degraded."""
        return ReasonKind.HARMLESS not in self.reason.kinds


class Run(NamedTuple):
    """Adjacent queues of one topic on one broker: `queues[start:stop]`."""

    topic: str
    broker: str
    start: int
    stop: int


class Poke(NamedTuple):
    """The value of a pod's annotation `rota.dev/generation`: the generation, and how often the pod was poked for it."""

    generation: int = 0
    attempts: int = 0

    def __str__(self) -> str:
        """Spell the value as the annotation does."""
        return f"{self.generation}-{self.attempts}"


def single_line(text: str, max_chars: int = 300) -> str:
    """Return untrusted text as part of a sentence: one line, limited in length, without memory addresses."""
    line = re.sub(r"\b0x[0-9a-f]+\b", "0x…", " ".join(text.split())).encode(errors="replace").decode()
    return line if len(line) <= max_chars else line[:max_chars] + "…"


def java_sort_key(name: str) -> bytes:
    """Return the key by which names sort as in the reference client."""
    return name.encode("utf-16-be", "surrogatepass")


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """A strategy's input: sorted queues, sorted member names, and the present owners.

    `owners[q]` is the index in `members` of the owner of `queues[q]`, or NO_OWNER: no queue can have two owners.
    """

    queues: tuple[Queue, ...]
    members: tuple[str, ...]
    owners: "array[int]"
    runs: tuple[Run, ...]

    @classmethod
    def of(
        cls, queues: Iterable[tuple[str, str, int]], members: Iterable[str], current: PresentOwners | None = None
    ) -> "Roster":
        """Sort and check the input; `current` may also name former members and removed queues, which are ignored."""
        sorted_members = _sorted_members(members)
        sorted_queues = _sorted_queues(queues)
        owners = _owner_indexes(sorted_queues, sorted_members, current)
        return cls(sorted_queues, sorted_members, owners, _runs(sorted_queues))

    @property
    def topics(self) -> list[tuple[int, int]]:
        """Return the start and stop of each topic in `queues`."""
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
    listed = [queue if type(queue) is Queue else _to_queue(queue) for queue in queues or ()]
    if not listed:
        raise ValueError("The list of queues is empty; give at least one queue")
    names = {queue.topic for queue in listed}.union(queue.broker for queue in listed)
    if all(name.isascii() for name in names):
        listed.sort()
    else:
        listed.sort(key=lambda queue: (java_sort_key(queue.topic), java_sort_key(queue.broker), queue.id))
    if len(set(listed)) != len(listed):
        duplicate = next(queue for queue, following in pairwise(listed) if queue == following)
        raise ValueError(f"Queue {duplicate} is listed twice; list each queue once")
    return tuple(listed)


def _to_queue(value: object) -> Queue:
    if not isinstance(value, tuple | list) or len(value) != len(Queue._fields):
        raise ValueError(f"{value!r} is not a queue: give (topic, broker, id)")
    return Queue._make(value)


def _sorted_members(members: Iterable[str]) -> tuple[str, ...]:
    listed = [members] if isinstance(members, str) else list(members or ())
    for name in listed:
        if not isinstance(name, str):
            raise ValueError(f"Member name {name!r} is not a string")  # noqa: TRY004 - bad input
    listed.sort(key=java_sort_key)
    if not listed:
        raise ValueError("The list of members is empty; give at least one member")
    if not all(listed):
        raise ValueError("A member's name is empty; name every member")
    for name, following in pairwise(listed):
        if name == following:
            raise ValueError(f"Member {name} is listed twice; list each member once")
    return tuple(listed)


def _owner_indexes(queues: Sequence[Queue], members: Sequence[str], current: PresentOwners | None) -> "array[int]":
    if not current:
        return array("i", [NO_OWNER]) * len(queues)
    index = {name: number for number, name in enumerate(members)}
    return array("i", [index.get(current.get(queue, ""), NO_OWNER) for queue in queues])


def _runs(queues: Sequence[Queue]) -> tuple[Run, ...]:
    """Find the runs by binary search: visiting 100,000 queues one by one costs more than sorting them."""
    runs: list[Run] = []
    start = 0
    while start < len(queues):
        topic, broker, _ = queues[start]
        # The key is 0 (False) for the queues of this run, and 1 (True) from the next run on.
        stop = bisect_left(queues, 1, start, key=lambda queue: queue[:2] != (topic, broker))
        runs.append(Run(topic, broker, start, stop))
        start = stop
    return tuple(runs)
