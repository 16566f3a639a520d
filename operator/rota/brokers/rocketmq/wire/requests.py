"""What we ask, as frames; what cannot be asked is a mistake of ours and said before it is sent.

Brokers do not check most of what they are asked: a field that is missing reads as 0 or as nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rota.brokers.rocketmq.wire import payloads
from rota.brokers.rocketmq.wire.codes import Request
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.messages import java_hash, write_properties
from rota.model import Queue
from rota.spec import Subscription
from rota.spec.consumer_settings import tags_of

_COMMIT, _SUSPEND, _SUBSCRIBED = 1, 2, 4  # bits of a pull's system flag
_NEEDED = {  # what may not be empty, by its names in fields and bodies
    "topic": ("topic", "originTopic", "b"),
    "group": ("group", "consumerGroup", "consumer_group", "group_name", "a"),
    "client id": ("clientID", "clientId", "client_id"),
}


def _frame(code: Request, body: Any = None, /, **fields: object) -> Frame:
    _refuse_empty(code, fields)
    if isinstance(body, payloads.Body):
        _refuse_empty(code, msgspec.structs.asdict(body))
    written = {name: _written(value) for name, value in fields.items() if value is not None}
    return Frame(code=code, fields=written, body=b"" if body is None else _bytes(body))


def _refuse_empty(code: Request, asked: Mapping[str, object]) -> None:
    for thing, names in _NEEDED.items():
        if any(asked.get(name) == "" for name in names):
            raise ValueError(f"{code.name}: the {thing} is empty")


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else msgspec.json.encode(body)


def _of(queue: Queue) -> dict[str, object]:
    if queue.id < 0:
        raise ValueError(f"{queue} is no queue: its id is negative")
    return {"topic": queue.topic, "queueId": queue.id, "bname": queue.broker}


# Of name servers.


def route(topic: str) -> Frame:
    """Ask where a topic is."""
    return _frame(Request.GET_ROUTEINFO_BY_TOPIC, topic=topic, acceptStandardJsonOnly=True)


def cluster() -> Frame:
    """Ask for all brokers."""
    return _frame(Request.GET_BROKER_CLUSTER_INFO)


# Membership.


def subscription(wanted: Subscription, version: int) -> payloads.SubscriptionData:
    """Write a subscription; brokers filter by the tags' hashes first."""
    by_tag = wanted.type == "Tag"
    tags = tags_of(wanted) if by_tag else []
    return payloads.SubscriptionData(
        topic=wanted.topic,
        sub_string=wanted.expression.strip(),  # to a broker "* " is a tag, and lets nothing through
        tags_set=tags,
        code_set=[java_hash(tag) for tag in tags],
        sub_version=version,
        expression_type="TAG" if by_tag else "SQL92",
    )


def heartbeat(client_id: str, member: payloads.ConsumerData) -> Frame:
    """Give a sign of life."""
    _refuse_empty(Request.HEART_BEAT, msgspec.structs.asdict(member))
    return _frame(Request.HEART_BEAT, payloads.HeartBeat(client_id=client_id, consumer_data_set=[member]))


def check_client(client_id: str, group: str, data: payloads.SubscriptionData) -> Frame:
    """Ask whether a broker would take a subscription."""
    body = payloads.CheckClient(client_id=client_id, group=group, subscription_data=data)
    return _frame(Request.CHECK_CLIENT_CONFIG, body)


def unregister(client_id: str, group: str) -> Frame:
    """Leave a group."""
    return _frame(Request.UNREGISTER_CLIENT, clientID=client_id, consumerGroup=group)


def client_ids(group: str) -> Frame:
    """Ask for the ids of a group's members."""
    return _frame(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=group)


def connections(group: str) -> Frame:
    """Ask who is online in a group."""
    return _frame(Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup=group)


def running_info(group: str, client_id: str) -> Frame:
    """Ask a member, by its broker, how it is."""
    return _frame(Request.GET_CONSUMER_RUNNING_INFO, consumerGroup=group, clientId=client_id, jstackEnable=False)


def assignment(topic: str, group: str, client_id: str, strategy: str, model: str = "CLUSTERING") -> Frame:
    """Ask which queues a broker would give to a member."""
    body = payloads.AssignmentRequest(
        topic=topic, consumer_group=group, client_id=client_id, strategy_name=strategy, message_model=model
    )
    return _frame(Request.QUERY_ASSIGNMENT, body)


def request_mode(topic: str, group: str, mode: str, share: int = 0) -> Frame:
    """Say whether a group's members pull or pop."""
    body = payloads.RequestMode(topic=topic, consumer_group=group, mode=mode, pop_share_queue_num=share)
    return _frame(Request.SET_MESSAGE_REQUEST_MODE, body)


# Locks.


def lock(group: str, client_id: str, queues: Iterable[Queue]) -> Frame:
    """Ask for locks."""
    return _frame(Request.LOCK_BATCH_MQ, _locks(group, client_id, queues))


def unlock(group: str, client_id: str, queues: Iterable[Queue]) -> Frame:
    """Give locks back."""
    return _frame(Request.UNLOCK_BATCH_MQ, _locks(group, client_id, queues))


def one_broker(queues: Iterable[Queue]) -> str:
    """Return the broker of queues that are locked together."""
    brokers = {queue.broker for queue in queues}
    if len(brokers) != 1:
        raise ValueError(f"Queues of one broker are locked at a time, not of {sorted(brokers)}")
    return brokers.pop()


def _locks(group: str, client_id: str, queues: Iterable[Queue]) -> payloads.LockRequest:
    wanted = [payloads.MessageQueue.of(queue) for queue in queues]
    return payloads.LockRequest(consumer_group=group, client_id=client_id, mq_set=wanted)


# Offsets.


def committed(group: str, queue: Queue) -> Frame:
    """Ask where a group is; without an offset the broker says so, instead of 0."""
    return _frame(Request.QUERY_CONSUMER_OFFSET, consumerGroup=group, setZeroIfNotFound=False, **_of(queue))


def commit(group: str, queue: Queue, offset: int) -> Frame:
    """Say where a group is. Brokers take any offset from anybody."""
    if offset < 0:
        raise ValueError(f"{offset} is no offset to commit for {queue}")
    return _frame(Request.UPDATE_CONSUMER_OFFSET, consumerGroup=group, commitOffset=offset, **_of(queue))


def last(queue: Queue) -> Frame:
    """Ask for the offset that the next message will have."""
    return _frame(Request.GET_MAX_OFFSET, committed=True, **_of(queue))


def first(queue: Queue) -> Frame:
    """Ask for the offset of the oldest message."""
    return _frame(Request.GET_MIN_OFFSET, **_of(queue))


def at(queue: Queue, milliseconds: int) -> Frame:
    """Ask for the offset of the first message of a time or later."""
    return _frame(Request.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=milliseconds, boundaryType="lower", **_of(queue))


def reset(group: str, topic: str, milliseconds: int, *, queue: int = -1, offset: int | None = None) -> Frame:
    """Have a broker set a group's offsets: to a time (-1: to the end), or one queue's to an offset."""
    return _frame(
        Request.INVOKE_BROKER_TO_RESET_OFFSET,
        topic=topic,
        group=group,
        timestamp=milliseconds,
        isForce=True,
        queueId=queue,
        offset=offset,
    )


# Messages.


def pull(
    group: str,
    queue: Queue,
    offset: int,
    data: payloads.SubscriptionData,
    *,
    most: int,
    most_bytes: int,
    wait: float,
    commit: int | None = None,
) -> Frame:
    """Ask for messages; where there are none the broker waits for so long. What is to be committed is so at once."""
    return _frame(
        Request.PULL_MESSAGE,
        consumerGroup=group,
        queueOffset=offset,
        maxMsgNums=most,
        maxMsgBytes=most_bytes,
        sysFlag=_SUBSCRIBED | (_SUSPEND if wait else 0) | (0 if commit is None else _COMMIT),
        commitOffset=commit or 0,
        suspendTimeoutMillis=int(wait * 1000),
        subscription=data.sub_string,
        subVersion=data.sub_version,
        expressionType=data.expression_type,
        **_of(queue),
    )


def send(
    group: str, topic: str, body: bytes, properties: Mapping[str, str], *, broker: str, queue: int, born: int
) -> Frame:
    """Send a message; of queue -1 the broker picks one."""
    fields = {
        "a": group,
        "b": topic,
        "c": "TBW102",
        "d": 4,
        "e": queue,
        "f": 0,
        "g": born,
        "h": 0,
        "i": write_properties(properties),
        "j": 0,
        "k": False,
        "l": 16,
        "m": False,
        "n": broker,
    }
    return _frame(Request.SEND_MESSAGE_V2, body, **fields)


def give_back(
    group: str, topic: str, place: int, *, level: int, attempts: int, identity: str = "", broker: str = ""
) -> Frame:
    """Have a message tried again later by its delay level (0: the longer the more often), or never (-1)."""
    return _frame(
        Request.CONSUMER_SEND_MSG_BACK,
        offset=place,
        group=group,
        delayLevel=level,
        originMsgId=identity or None,
        originTopic=topic,
        unitMode=False,
        maxReconsumeTimes=attempts,
        bname=broker or None,
    )


# Topics, groups, figures.


def consume_stats(group: str, topics: Iterable[str] = ()) -> Frame:
    """Ask how far a group is, with all it reads or with these topics."""
    return _frame(Request.GET_CONSUME_STATS, consumerGroup=group, topicList=";".join(topics) or None)


def topic_stats(topic: str) -> Frame:
    """Ask where a topic's queues begin and end."""
    return _frame(Request.GET_TOPIC_STATS_INFO, topic=topic)


def create_topic(topic: str, queues: int, *, perm: int = 6, write_queues: int | None = None) -> Frame:
    """Make a topic, or change it."""
    return _frame(
        Request.UPDATE_AND_CREATE_TOPIC,
        topic=topic,
        defaultTopic="TBW102",
        readQueueNums=queues,
        writeQueueNums=queues if write_queues is None else write_queues,
        perm=perm,
        topicFilterType="SINGLE_TAG",
        topicSysFlag=0,
        order=False,
    )


def topic_config(topic: str) -> Frame:
    """Ask how a topic is made."""
    return _frame(Request.GET_TOPIC_CONFIG, topic=topic)


def update_group(config: Mapping[str, Any]) -> Frame:
    """Make a group, or change it; all of it is written, so give what was read, changed."""
    return _frame(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, dict(config))


def group_config(group: str) -> Frame:
    """Ask how a group is made."""
    return _frame(Request.GET_SUBSCRIPTIONGROUP_CONFIG, group=group)


def broker_config() -> Frame:
    """Ask for a broker's settings."""
    return _frame(Request.GET_BROKER_CONFIG)


def update_broker_config(changed: Mapping[str, object]) -> Frame:
    """Change some of a broker's settings, where it can while it runs."""
    lines = [f"{name}={_written(value)}" for name, value in changed.items()]
    if odd := next((line for line in lines if len(line.splitlines()) > 1 or line.endswith(("\n", "\r"))), None):
        raise ValueError(f"The setting {odd!r} has a line break in it, which would make it two")
    return _frame(Request.UPDATE_BROKER_CONFIG, "\n".join(lines).encode())
