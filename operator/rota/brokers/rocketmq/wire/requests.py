"""Request frames for name servers and brokers, one function each; invalid arguments raise ValueError.

Brokers do not validate most requests: they read a missing field as 0 or as empty.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rota.brokers.rocketmq.wire import payloads
from rota.brokers.rocketmq.wire.codes import READ_WRITE, RequestCode
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.messages import java_hash, write_properties
from rota.model import Queue
from rota.spec import Subscription
from rota.spec.consumer_settings import tags_of

# Bits of a pull's system flag.
_COMMIT = 1  # the request has a commit offset
_SUSPEND = 2  # without messages, the broker waits before it responds
_SUBSCRIBED = 4  # the request has a subscription

_TEMPLATE_TOPIC = "TBW102"  # brokers take settings of topics that they create by themselves from this topic
_REQUIRED_FIELDS = {  # values that must not be empty, by their names in fields and bodies
    "topic": ("topic", "originTopic", "b"),
    "group": ("group", "consumerGroup", "consumer_group", "group_name", "a"),
    "client id": ("clientID", "clientId", "client_id"),
}


def _frame(code: RequestCode, body: Any = b"", /, **fields: object) -> Frame:
    """Return a request; fields with None are left out, and a body other than bytes is encoded as JSON."""
    _reject_empty(code, fields)
    if isinstance(body, payloads.Body):
        _reject_empty(code, msgspec.structs.asdict(body))
    written: dict[str, str] = {}
    for name, value in fields.items():
        if value is not None:
            written[name] = _encode_value(value)
    return Frame(code=code, fields=written, body=body if isinstance(body, bytes) else msgspec.json.encode(body))


def _reject_empty(code: RequestCode, fields: Mapping[str, object]) -> None:
    for label, names in _REQUIRED_FIELDS.items():
        if "" in map(fields.get, names):
            raise ValueError(f"{code.name}: the {label} is empty")


def _encode_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _queue_fields(queue: Queue) -> dict[str, object]:
    if queue.id < 0:
        raise ValueError(f"{queue} is not a valid queue: its id is negative")
    return {"topic": queue.topic, "queueId": queue.id, "bname": queue.broker}


# Name servers.


def route(topic: str) -> Frame:
    return _frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic, acceptStandardJsonOnly=True)


def cluster_info() -> Frame:
    return _frame(RequestCode.GET_BROKER_CLUSTER_INFO)


# Membership.


def subscription(spec: Subscription, version: int) -> payloads.SubscriptionData:
    """Return a subscription's payload, with the hashes of its tags, by which brokers filter first."""
    is_by_tag = spec.type == "Tag"
    tags = tags_of(spec) if is_by_tag else []
    return payloads.SubscriptionData(
        topic=spec.topic,
        sub_string=spec.expression.strip(),  # a broker takes "* " for a tag, and would deliver nothing
        tags_set=tags,
        code_set=list(map(java_hash, tags)),
        sub_version=version,
        expression_type="TAG" if is_by_tag else "SQL92",
    )


def heartbeat(client_id: str, member: payloads.ConsumerData) -> Frame:
    _reject_empty(RequestCode.HEART_BEAT, msgspec.structs.asdict(member))
    return _frame(RequestCode.HEART_BEAT, payloads.HeartBeat(client_id=client_id, consumer_data_set=[member]))


def check_client(client_id: str, group: str, data: payloads.SubscriptionData) -> Frame:
    """Ask a broker to validate a subscription."""
    body = payloads.CheckClient(client_id=client_id, group=group, subscription_data=data)
    return _frame(RequestCode.CHECK_CLIENT_CONFIG, body)


def unregister(client_id: str, group: str) -> Frame:
    """Leave a group."""
    return _frame(RequestCode.UNREGISTER_CLIENT, clientID=client_id, consumerGroup=group)


def client_ids(group: str) -> Frame:
    return _frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=group)


def connections(group: str) -> Frame:
    return _frame(RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup=group)


def running_info(group: str, client_id: str) -> Frame:
    """Request a member's running info, relayed by its broker."""
    return _frame(RequestCode.GET_CONSUMER_RUNNING_INFO, consumerGroup=group, clientId=client_id, jstackEnable=False)


def assignment(topic: str, group: str, client_id: str, strategy: str) -> Frame:
    """Request the queues that a broker would assign to a member."""
    body = payloads.AssignmentRequest(
        topic=topic, consumer_group=group, client_id=client_id, strategy_name=strategy, message_model="CLUSTERING"
    )
    return _frame(RequestCode.QUERY_ASSIGNMENT, body)


def set_request_mode(topic: str, group: str, mode: str) -> Frame:
    """Set whether a group's members PULL a topic's queues or POP from them."""
    body = payloads.RequestMode(topic=topic, consumer_group=group, mode=mode)
    return _frame(RequestCode.SET_MESSAGE_REQUEST_MODE, body)


# Locks.


def lock(group: str, client_id: str, queues: Iterable[Queue]) -> Frame:
    return _frame(RequestCode.LOCK_BATCH_MQ, _lock_request(group, client_id, queues))


def unlock(group: str, client_id: str, queues: Iterable[Queue]) -> Frame:
    return _frame(RequestCode.UNLOCK_BATCH_MQ, _lock_request(group, client_id, queues))


def require_one_broker(queues: Iterable[Queue]) -> str:
    """Return the broker that all these queues are on; raise ValueError for several brokers, or without queues."""
    brokers = {queue.broker for queue in queues}
    if len(brokers) != 1:
        raise ValueError(f"The queues of one request must belong to one broker, not to {sorted(brokers)}")
    return brokers.pop()


def _lock_request(group: str, client_id: str, queues: Iterable[Queue]) -> payloads.LockRequest:
    mq_set = list(map(payloads.MessageQueue.from_queue, queues))
    return payloads.LockRequest(consumer_group=group, client_id=client_id, mq_set=mq_set)


# Offsets.


def committed_offset(group: str, queue: Queue) -> Frame:
    """Request a group's committed offset; without one, the broker responds QUERY_NOT_FOUND instead of 0."""
    return _frame(
        RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup=group, setZeroIfNotFound=False, **_queue_fields(queue)
    )


def commit(group: str, queue: Queue, offset: int) -> Frame:
    """Commit an offset for a group. Brokers accept any offset from any client."""
    if offset < 0:
        raise ValueError(f"Offset {offset} cannot be committed for {queue}")
    return _frame(RequestCode.UPDATE_CONSUMER_OFFSET, consumerGroup=group, commitOffset=offset, **_queue_fields(queue))


def max_offset(queue: Queue) -> Frame:
    """Request the offset that the next message will have; `committed`: count only messages that can be pulled."""
    return _frame(RequestCode.GET_MAX_OFFSET, committed=True, **_queue_fields(queue))


def min_offset(queue: Queue) -> Frame:
    return _frame(RequestCode.GET_MIN_OFFSET, **_queue_fields(queue))


def offset_at_time(queue: Queue, timestamp_ms: int) -> Frame:
    """Request the offset of the first message that was stored at this time or later."""
    return _frame(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=timestamp_ms, boundaryType="lower", **_queue_fields(queue)
    )


def reset_offsets(group: str, topic: str, timestamp_ms: int, *, queue_id: int = -1, offset: int | None = None) -> Frame:
    """Reset a group's offsets at a broker to a time (-1: to the end); with `offset`, one queue's to that offset."""
    return _frame(
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        topic=topic,
        group=group,
        timestamp=timestamp_ms,
        isForce=True,
        queueId=queue_id,
        offset=offset,
    )


# Messages.


def pull(
    group: str,
    queue: Queue,
    offset: int,
    data: payloads.SubscriptionData,
    *,
    max_messages: int,
    max_bytes: int,
    wait_seconds: float,
    commit_offset: int | None = None,
) -> Frame:
    """Request messages. The broker first stores `commit_offset`; without messages it waits for `wait_seconds`."""
    return _frame(
        RequestCode.PULL_MESSAGE,
        consumerGroup=group,
        queueOffset=offset,
        maxMsgNums=max_messages,
        maxMsgBytes=max_bytes,
        sysFlag=_SUBSCRIBED | (_SUSPEND if wait_seconds else 0) | (_COMMIT if commit_offset is not None else 0),
        commitOffset=commit_offset or 0,
        suspendTimeoutMillis=int(wait_seconds * 1000),
        subscription=data.sub_string,
        subVersion=data.sub_version,
        expressionType=data.expression_type,
        **_queue_fields(queue),
    )


def send(
    group: str, topic: str, body: bytes, properties: Mapping[str, str], *, broker: str, queue_id: int, born_ms: int
) -> Frame:
    """Send a message; for queue -1 the broker chooses the queue."""
    fields = {  # SEND_MESSAGE_V2 has one letter for each field of SEND_MESSAGE
        "a": group,  # producerGroup
        "b": topic,
        "c": _TEMPLATE_TOPIC,  # defaultTopic
        "d": 4,  # defaultTopicQueueNums
        "e": queue_id,
        "f": 0,  # sysFlag
        "g": born_ms,  # bornTimestamp
        "h": 0,  # flag
        "i": write_properties(properties),
        "j": 0,  # reconsumeTimes
        "k": False,  # unitMode
        "l": 16,  # maxReconsumeTimes
        "m": False,  # batch
        "n": broker,  # brokerName
    }
    return _frame(RequestCode.SEND_MESSAGE_V2, body, **fields)


def send_back(
    group: str,
    topic: str,
    commit_log_offset: int,
    *,
    delay_level: int,
    max_attempts: int,
    message_id: str = "",
    broker: str = "",
) -> Frame:
    """Send a message back for redelivery. Delay level 0: the delay grows with each attempt; -1: to the dead letters."""
    return _frame(
        RequestCode.CONSUMER_SEND_MSG_BACK,
        offset=commit_log_offset,
        group=group,
        delayLevel=delay_level,
        originMsgId=message_id or None,
        originTopic=topic,
        unitMode=False,
        maxReconsumeTimes=max_attempts,
        bname=broker or None,
    )


# Topics, groups, statistics.


def consume_stats(group: str, topics: Iterable[str] = ()) -> Frame:
    """Request a group's offsets, of all its topics or of these."""
    return _frame(RequestCode.GET_CONSUME_STATS, consumerGroup=group, topicList=";".join(topics) or None)


def topic_stats(topic: str) -> Frame:
    """Request the offsets of the oldest and of the next message in each queue of a topic."""
    return _frame(RequestCode.GET_TOPIC_STATS_INFO, topic=topic)


def create_topic(topic: str, queues: int, *, perm: int = READ_WRITE) -> Frame:
    """Create or update a topic."""
    return _frame(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        topic=topic,
        defaultTopic=_TEMPLATE_TOPIC,
        readQueueNums=queues,
        writeQueueNums=queues,
        perm=perm,
        topicFilterType="SINGLE_TAG",
        topicSysFlag=0,
        order=False,
    )


def topic_config(topic: str) -> Frame:
    return _frame(RequestCode.GET_TOPIC_CONFIG, topic=topic)


def update_group(config: Mapping[str, Any]) -> Frame:
    """Create or update a group. The broker replaces the whole configuration, so pass the current one with changes."""
    return _frame(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, dict(config))


def group_config(group: str) -> Frame:
    return _frame(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, group=group)


def broker_config() -> Frame:
    return _frame(RequestCode.GET_BROKER_CONFIG)


def update_broker_config(changed: Mapping[str, object]) -> Frame:
    """Update settings of a broker, as far as it supports that at runtime."""
    lines = [f"{name}={_encode_value(value)}" for name, value in changed.items()]
    for line in lines:
        if len(line.splitlines()) > 1 or line.endswith(("\n", "\r")):
            raise ValueError(f"The setting {line!r} contains a line break")
    return _frame(RequestCode.UPDATE_BROKER_CONFIG, "\n".join(lines).encode())
