"""Schema of the JSON API: the values that the page, the command line and other programs read.

Field names and values are frozen by the API version v1, also where the code has other words by now: `Foreign` is an
unmanaged consumer or its queue, `looked_at` a sample's time, `verdict` a lag state. Delays are in seconds.
"""

from typing import Literal

from msgspec import Struct

from rota.kube.state.rebalance import Rebalance
from rota.model import TopicKind

# Free: no owner; Foreign: an unmanaged consumer owns it; Everyone: each member reads it, the group is Broadcasting.
QueueOwnership = Literal["Owned", "Releasing", "Free", "Foreign", "Everyone"]


class OperatorInfo(Struct, frozen=True, rename="camel"):
    """The operator that responds."""

    identity: str
    version: str
    leads: bool  # a standby replica knows the owners, but polls no broker and no member


class GroupSummary(Struct, frozen=True, rename="camel"):
    """A group's row in the list; None: not known."""

    namespace: str
    name: str
    ready: bool
    reason: str  # of condition Ready
    message: str
    moving: bool  # whether a handover is in progress
    members: int
    queues: int
    idle: int  # members without a queue
    unowned: int  # queues without an owner
    generation: int
    strategy: str
    lag: int | None = None  # of the subscribed topics
    retrying: int | None = None  # lag of the group's retry topic
    dead: int | None = None  # messages in the dead-letter topic
    delay: float | None = None  # the longest delay of all queues
    estimate: bool = False  # whether the lag includes messages that a filter may skip
    verdicts: dict[str, int] = {}  # number of queues by `rota.lag.LagState`
    last_rebalance: Rebalance | None = None
    delayed: int | None = None  # an estimate: failed messages that brokers delay until their next attempt


class GroupList(Struct, frozen=True, rename="camel"):
    """`GET /v1/groups`."""

    operator: OperatorInfo
    groups: list[GroupSummary]


class ConditionInfo(Struct, frozen=True, rename="camel"):
    """A condition of the group's status."""

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: str = ""


class SubscriptionInfo(Struct, frozen=True, rename="camel"):
    """A topic that a member reads, with the filter for its messages."""

    topic: str
    expression: str
    type: str  # Tag or SQL92


class MemberInfo(Struct, frozen=True, rename="camel"):
    """A consumer of the group: one of Rota's members, or an unmanaged consumer."""

    name: str  # of the pod; for an unmanaged consumer, its client id
    client_id: str
    origin: Literal["Rota", "Foreign"]
    state: str  # its `MemberState`; Foreign: an unmanaged consumer
    address: str = ""
    version: str = ""  # of its client, as the broker has it
    language: str = ""
    queues: int | None = None  # number of owned queues; None: not known for an unmanaged consumer
    generation: int | None = None  # the generation it obeys; None: no report yet
    rate: float | None = None  # messages consumed per second; None: not known
    troubles: list[str] = []  # its own messages about problems that keep it from consuming
    queue_states: dict[str, int] = {}  # queues that it does not pull now: number by `rota.reports.QueueState`
    failing: list[str] = []  # one sentence per message that hangs or has failed several times
    subscriptions: list[SubscriptionInfo] = []  # without the retry topic; empty: not known
    model: str = ""  # Clustering or Broadcasting; empty: not known
    start: str = ""  # Latest, Earliest or Timestamp; empty: not known


class TopicInfo(Struct, frozen=True, rename="camel"):
    """A topic of the group; None: not known."""

    topic: str
    kind: TopicKind
    queues: int
    lag: int | None = None
    delay: float | None = None
    estimate: bool = False


class QueueDetail(Struct, frozen=True, rename="camel"):
    """A queue of the group; None: not known, or without an owner."""

    topic: str
    broker: str
    id: int
    kind: TopicKind
    state: QueueOwnership
    owner: str | None = None  # the member that consumes it, also while that member releases it
    to: str | None = None  # the next owner
    forced: bool = False  # revoked from an unreachable member, which may still consume it
    first: int | None = None  # offset of the oldest message
    last: int | None = None  # offset that the next message will have
    committed: int | None = None
    lag: int | None = None
    delay: float | None = None
    verdict: str | None = None  # a `rota.lag.LagState`
    estimate: bool = False


class BrokerSettings(Struct, frozen=True, rename="camel"):
    """The group's settings at a broker (RocketMQ: subscription group), set with mqadmin; Rota only reads them."""

    broker: str
    enabled: bool  # whether the broker lets the group consume
    retries: int  # limit for each message of clients that set none; sidecars obey delivery.retry.maxAttempts
    retry_queues: int


class GroupDetail(Struct, frozen=True, rename="camel"):
    """`GET /v1/groups/NAMESPACE/NAME`."""

    operator: OperatorInfo
    summary: GroupSummary
    at_broker: str  # the name of the consumer group at brokers
    conditions: list[ConditionInfo]
    members: list[MemberInfo]
    topics: list[TopicInfo]
    queues: list[QueueDetail]  # sorted by topic, broker and id
    rebalances: list[Rebalance]  # newest first
    looked_at: str | None = None  # when the group's lag was sampled last; None: not since this replica leads
    settings: list[BrokerSettings] = []  # one entry per broker that knows the group


class QueueExplanation(Struct, frozen=True, rename="camel"):
    """Why a queue has its owner."""

    topic: str
    broker: str
    id: int
    owner: str | None
    why: str


class OwnerReasons(Struct, frozen=True, rename="camel"):
    """`GET /v1/groups/NAMESPACE/NAME/why?queue=TOPIC/BROKER/ID`; without `queue`, of one queue of each member."""

    strategy: str
    generation: int
    queues: list[QueueExplanation]
    last_rebalance: Rebalance | None = None
