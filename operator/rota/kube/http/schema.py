"""What the operator shows of its groups, as values: the page, the command line and other programs read it as JSON."""

from typing import Literal

from msgspec import Struct

from rota.kube.state.rebalance import Rebalance
from rota.model import TopicKind

# Foreign: a consumer that is not Rota's works it; Everyone: each member does, the group is Broadcasting.
State = Literal["Owned", "Releasing", "Free", "Foreign", "Everyone"]


class Operator(Struct, frozen=True, rename="camel"):
    """Who answers."""

    identity: str
    version: str
    leads: bool  # one that stands by knows who owns what, but asks no broker and no member


class Summary(Struct, frozen=True, rename="camel"):
    """A group in a line; None: not known."""

    namespace: str
    name: str
    ready: bool
    reason: str  # and why it is ready, or is not
    message: str
    moving: bool  # whether a handover is under way
    members: int
    queues: int
    idle: int
    unowned: int
    generation: int
    strategy: str
    lag: int | None = None  # of what is subscribed to
    retrying: int | None = None  # the same, of the group's retry topic
    dead: int | None = None  # messages that lie in the dead-letter topic
    delay: float | None = None
    estimate: bool = False  # whether a filter passes over some of what is counted
    verdicts: dict[str, int] = {}  # queues by `rota.lag.Judgement`
    last_rebalance: Rebalance | None = None
    delayed: int | None = None  # an estimate: messages that failed, which brokers delay until their next attempt


class Groups(Struct, frozen=True, rename="camel"):
    """`GET /v1/groups`."""

    operator: Operator
    groups: list[Summary]


class Condition(Struct, frozen=True, rename="camel"):
    """A condition as it stands in the group's status."""

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: str = ""


class Subscription(Struct, frozen=True, rename="camel"):
    """A topic that a member reads, and which of its messages."""

    topic: str
    expression: str
    type: str  # Tag or SQL92


class Member(Struct, frozen=True, rename="camel"):
    """Somebody who works for the group."""

    name: str  # of the pod; of a foreign one, its client id
    client_id: str
    origin: Literal["Rota", "Foreign"]
    state: str  # its `Standing`; Foreign: one that is not Rota's
    address: str = ""
    version: str = ""  # of its client, as its broker knows it
    language: str = ""
    queues: int | None = None  # how many it owns; None: nobody can know
    generation: int | None = None  # which it obeys; None: it was not heard
    rate: float | None = None  # messages a second that it works
    troubles: list[str] = []  # what keeps it from working, in its own words
    queue_states: dict[str, int] = {}  # how many of its queues it is not reading now, by state: full, paused, stuck …
    failing: list[str] = []  # a sentence for each message that hangs, or failed several times
    subscriptions: list[Subscription] = []  # without the retry topic; none: not known
    model: str = ""  # Clustering or Broadcasting; empty: not known
    start: str = ""  # Latest, Earliest or Timestamp; empty: not known


class Topic(Struct, frozen=True, rename="camel"):
    """A topic of the group."""

    topic: str
    kind: TopicKind
    queues: int
    lag: int | None = None
    delay: float | None = None
    estimate: bool = False


class Queue(Struct, frozen=True, rename="camel"):
    """A queue of the group."""

    topic: str
    broker: str
    id: int
    kind: TopicKind
    state: State
    owner: str | None = None  # who works it; while it is released, the one who still does
    to: str | None = None  # who is to have it next
    forced: bool = False  # taken from one who was not heard, and who may still work it
    first: int | None = None
    last: int | None = None
    committed: int | None = None
    lag: int | None = None
    delay: float | None = None
    verdict: str | None = None  # a `rota.lag.Judgement`
    estimate: bool = False


class Settings(Struct, frozen=True, rename="camel"):
    """What a broker has for the group: mqadmin sets it, and Rota only shows it."""

    broker: str
    enabled: bool  # whether it gives the group messages at all
    retries: int  # for clients that leave the number to it; sidecars go by delivery.retry.maxAttempts
    retry_queues: int


class Detail(Struct, frozen=True, rename="camel"):
    """`GET /v1/groups/NAMESPACE/NAME`."""

    operator: Operator
    summary: Summary
    at_broker: str  # what brokers call the group
    conditions: list[Condition]
    members: list[Member]
    topics: list[Topic]
    queues: list[Queue]  # sorted by topic, broker and id
    rebalances: list[Rebalance]  # newest first
    looked_at: str | None = None  # when brokers last told how far the group is
    settings: list[Settings] = []  # of each broker that knows the group


class Reason(Struct, frozen=True, rename="camel"):
    """Why a queue has its owner."""

    topic: str
    broker: str
    id: int
    owner: str | None
    why: str


class Reasons(Struct, frozen=True, rename="camel"):
    """`GET /v1/groups/NAMESPACE/NAME/why?queue=TOPIC/BROKER/ID`, or of one queue of each member."""

    strategy: str
    generation: int
    queues: list[Reason]
    last_rebalance: Rebalance | None = None
