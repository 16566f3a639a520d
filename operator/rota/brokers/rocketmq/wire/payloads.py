"""Payloads: bodies of requests and responses, with the protocol's field names in snake case."""

from typing import Annotated

import msgspec

from rota.brokers.rocketmq.wire.codes import READ_PERMISSION, READ_WRITE
from rota.model import Queue

Long = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # an offset or time, in the range of Java's long

# The protocol's names of a group's settings, by the names in a ConsumerGroup.
MESSAGE_MODELS = {"Clustering": "CLUSTERING", "Broadcasting": "BROADCASTING"}
START_POSITIONS = {
    "Latest": "CONSUME_FROM_LAST_OFFSET",
    "Earliest": "CONSUME_FROM_FIRST_OFFSET",
    "Timestamp": "CONSUME_FROM_TIMESTAMP",
}


class Body(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of all bodies; fields that a class does not declare are ignored."""


class MessageQueue(Body, frozen=True):
    topic: str
    broker_name: str
    queue_id: int

    @classmethod
    def from_queue(cls, queue: Queue) -> "MessageQueue":
        """Convert a queue to the protocol's form."""
        return cls(topic=queue.topic, broker_name=queue.broker, queue_id=queue.id)

    @property
    def queue(self) -> Queue:
        """The queue in Rota's form."""
        return Queue(self.topic, self.broker_name, self.queue_id)


# Responses of name servers.


class BrokerData(Body, frozen=True):
    """A broker and its replicas; the master has id 0."""

    broker_name: str
    broker_addrs: dict[int, str]
    cluster: str = ""


class QueueData(Body, frozen=True):
    """The number of a topic's queues on a broker."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int = 0
    perm: int = READ_WRITE

    @property
    def is_readable(self) -> bool:
        """Whether members may read from any of these queues."""
        return bool(self.perm & READ_PERMISSION) and self.read_queue_nums > 0


class TopicRoute(Body, frozen=True):
    """The route of a topic: its brokers, and its queues on each."""

    broker_datas: list[BrokerData] = []
    queue_datas: list[QueueData] = []
    topic_queue_mapping_by_broker: msgspec.Raw = msgspec.Raw(b"")

    @property
    def addresses(self) -> dict[str, dict[int, str]]:
        """The addresses of all replicas, by broker name and broker id."""
        return {broker.broker_name: broker.broker_addrs for broker in self.broker_datas}

    @property
    def is_static(self) -> bool:
        """Whether the topic is static: its queues are mapped to brokers one by one."""
        return bytes(self.topic_queue_mapping_by_broker).strip() not in {b"", b"null", b"{}"}


class ClusterInfo(Body, frozen=True):
    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}


# Membership: bodies sent to brokers, and their responses.


class SubscriptionData(Body, frozen=True):
    topic: str
    sub_string: str
    tags_set: list[str]
    code_set: list[int]
    sub_version: int
    expression_type: str = "TAG"
    class_filter_mode: bool = False

    @property
    def is_by_tag(self) -> bool:
        """Whether the subscription filters by tags, the only filter that every broker supports."""
        return self.expression_type == "TAG"


class ConsumerData(Body, frozen=True):
    """A member's settings and subscriptions in a group."""

    group_name: str
    consume_type: str
    message_model: str
    consume_from_where: str
    subscription_data_set: list[SubscriptionData]
    unit_mode: bool = False


class HeartBeat(Body, frozen=True):
    client_id: str = msgspec.field(name="clientID")
    consumer_data_set: list[ConsumerData]
    producer_data_set: list[dict[str, str]] = []
    heartbeat_fingerprint: int = 0
    without_sub: bool = False


class CheckClient(Body, frozen=True):
    """Request to validate a subscription."""

    client_id: str
    group: str
    subscription_data: SubscriptionData
    namespace: str = ""


class Peer(Body, frozen=True):
    """A connection of a member of a group."""

    client_id: str
    client_addr: str = ""
    language: str = ""
    version: int = 0


class ConsumerConnection(Body, frozen=True):
    """The online consumers of a group."""

    connection_set: list[Peer] = []


class ClientIdList(Body, frozen=True):
    consumer_id_list: list[str] = []


class LockRequest(Body, frozen=True):
    consumer_group: str
    client_id: str
    mq_set: list[MessageQueue]
    only_this_broker: bool = False


class LockedQueues(Body, frozen=True):
    lock_ok_mq_set: list[MessageQueue] = msgspec.field(name="lockOKMQSet", default=[])


class RequestMode(Body, frozen=True):
    """Whether a group's members pull a topic's queues or pop from them."""

    topic: str
    consumer_group: str
    mode: str
    pop_share_queue_num: int = 0  # in POP mode, how many other members' queues each member pops from; 0: all


class AssignmentRequest(Body, frozen=True):
    """Request for the queues that a broker would assign to a member."""

    topic: str
    consumer_group: str
    client_id: str
    strategy_name: str
    message_model: str


class QueueAssignment(Body, frozen=True):
    """A queue that a broker assigns to a member."""

    message_queue: MessageQueue
    mode: str


class AssignmentResponse(Body, frozen=True):
    """The queues that a broker assigns to a member; None: no new assignment, the member keeps its queues."""

    message_queue_assignments: list[QueueAssignment] | None = None


# Statistics and configuration.


class OffsetWrapper(Body, frozen=True):
    """A group's offsets in a queue."""

    broker_offset: Long
    consumer_offset: Long
    pull_offset: Long = 0
    last_timestamp: Long = 0


class ConsumeStats(Body, frozen=True):
    """A group's offsets at a broker, by queue: a key of any `offset_table` is the JSON of a MessageQueue, as text."""

    offset_table: dict[str, OffsetWrapper] = {}
    consume_tps: float = 0.0


class TopicOffset(Body, frozen=True):
    min_offset: Long
    max_offset: Long
    last_update_timestamp: Long = 0


class TopicStats(Body, frozen=True):
    """The first and last offsets of a topic's queues at a broker."""

    offset_table: dict[str, TopicOffset] = {}


class ResetOffsets(Body, frozen=True):
    """New offsets of a group after a reset, by queue."""

    offset_table: dict[str, Long] = {}


class TopicConfig(Body, frozen=True):
    topic_name: str
    read_queue_nums: int = 0
    write_queue_nums: int = 0
    perm: int = READ_WRITE
    order: bool = False


class GroupConfig(Body, frozen=True):
    """The fields of a group's configuration that Rota reads.

    Never send them as an update: it replaces the whole configuration, which has more fields.
    """

    group_name: str
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_nums: int = 1
    retry_max_times: int = 16


# Responses of a member about itself.


class QueueInfo(Body, frozen=True):
    """A member's progress in one queue: a value in `RunningInfo.mq_table`."""

    commit_offset: int = 0
    cached_msg_min_offset: int = 0
    cached_msg_max_offset: int = 0
    cached_msg_count: int = 0
    cached_msg_size_in_mi_b: int = msgspec.field(name="cachedMsgSizeInMiB", default=0)
    transaction_msg_min_offset: int = 0
    transaction_msg_max_offset: int = 0
    transaction_msg_count: int = 0
    locked: bool = False
    try_unlock_times: int = 0
    last_lock_timestamp: int = 0
    droped: bool = False  # codespell:ignore droped - the protocol's spelling
    last_pull_timestamp: int = 0
    last_consume_timestamp: int = 0


class RunningInfo(Body, frozen=True):
    """A member's running info, which mqadmin and the dashboard show."""

    properties: dict[str, str]
    subscription_set: list[SubscriptionData]
    mq_table: msgspec.Raw  # by queue; the keys are objects, which is not JSON: `fastjson.encode_queue_table`
    mq_pop_table: dict[str, dict[str, str]] = {}
    status_table: dict[str, dict[str, float]] = {}
    user_consumer_info: dict[str, str] = {}
    jstack: str | None = None


class Subscribed(Body, frozen=True):
    """The parts of another consumer's subscription that Rota reads; clients omit null fields."""

    topic: str
    sub_string: str | None = None
    expression_type: str | None = None


class ConsumerInfo(Body, frozen=True):
    """The parts of another consumer's running info that Rota reads."""

    properties: dict[str, str] = {}
    subscription_set: list[Subscribed] = []


class ConsumerStatus(Body, frozen=True):
    """A member's committed offsets."""

    message_queue_table: msgspec.Raw  # by queue, encoded like `RunningInfo.mq_table`
