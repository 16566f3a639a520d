"""Requests as frames, requests that are rejected, and signatures."""

import base64
import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rota.brokers.rocketmq.brokers import version_name
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import RequestCode
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.signing import Credentials, sign_frame
from rota.model import Queue
from rota.spec import Subscription

QUEUE = Queue("orders", "broker-a", 2)
ALL = requests.subscription(Subscription(topic="orders"), 5)
MEMBER = payloads.ConsumerData(
    group_name="shop",
    consume_type="CONSUME_PASSIVELY",
    message_model="CLUSTERING",
    consume_from_where="CONSUME_FROM_LAST_OFFSET",
    subscription_data_set=[ALL],
)

RequestBuilder = Callable[..., Frame]


def pull(group: str = "shop", queue: Queue = QUEUE, wait_seconds: float = 15.0) -> Frame:
    return requests.pull(group, queue, 100, ALL, max_messages=32, max_bytes=1024, wait_seconds=wait_seconds)


def send(group: str = "rota", topic: str = "orders", **properties: str) -> Frame:
    return requests.send(group, topic, b"body", properties, broker="broker-a", queue_id=-1, born_ms=9)


def send_back_frame(group: str = "shop", topic: str = "orders") -> Frame:
    return requests.send_back(group, topic, 4096, delay_level=0, max_attempts=16)


# One request of each kind.
REQUESTS: dict[RequestCode, Frame] = {
    RequestCode.GET_ROUTEINFO_BY_TOPIC: requests.route("orders"),
    RequestCode.GET_BROKER_CLUSTER_INFO: requests.cluster_info(),
    RequestCode.HEART_BEAT: requests.heartbeat("c1", MEMBER),
    RequestCode.CHECK_CLIENT_CONFIG: requests.check_client("c1", "shop", ALL),
    RequestCode.UNREGISTER_CLIENT: requests.unregister("c1", "shop"),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: requests.client_ids("shop"),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: requests.connections("shop"),
    RequestCode.GET_CONSUMER_RUNNING_INFO: requests.running_info("shop", "c1"),
    RequestCode.QUERY_ASSIGNMENT: requests.assignment("orders", "shop", "c1", "AVG"),
    RequestCode.SET_MESSAGE_REQUEST_MODE: requests.set_request_mode("orders", "shop", "PULL"),
    RequestCode.LOCK_BATCH_MQ: requests.lock("shop", "c1", [QUEUE]),
    RequestCode.UNLOCK_BATCH_MQ: requests.unlock("shop", "c1", [QUEUE]),
    RequestCode.QUERY_CONSUMER_OFFSET: requests.committed_offset("shop", QUEUE),
    RequestCode.UPDATE_CONSUMER_OFFSET: requests.commit("shop", QUEUE, 12),
    RequestCode.GET_MAX_OFFSET: requests.max_offset(QUEUE),
    RequestCode.GET_MIN_OFFSET: requests.min_offset(QUEUE),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: requests.offset_at_time(QUEUE, 9),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: requests.reset_offsets("shop", "orders", -1, queue_id=2, offset=7),
    RequestCode.PULL_MESSAGE: pull(),
    RequestCode.SEND_MESSAGE_V2: send(TAGS="red", KEYS="k"),
    RequestCode.CONSUMER_SEND_MSG_BACK: send_back_frame(),
    RequestCode.GET_CONSUME_STATS: requests.consume_stats("shop", ["a", "b"]),
    RequestCode.GET_TOPIC_STATS_INFO: requests.topic_stats("orders"),
    RequestCode.UPDATE_AND_CREATE_TOPIC: requests.create_topic("orders", 8),
    RequestCode.GET_TOPIC_CONFIG: requests.topic_config("orders"),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: requests.update_group({"groupName": "shop"}),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: requests.group_config("shop"),
    RequestCode.GET_BROKER_CONFIG: requests.broker_config(),
}
EACH_REQUEST = pytest.mark.parametrize(("code", "frame"), REQUESTS.items(), ids=[code.name for code in REQUESTS])


@EACH_REQUEST
def test_request_fields_are_strings_in_java_spelling(code: RequestCode, frame: Frame) -> None:
    assert frame.code == code
    assert not frame.is_response
    assert all(isinstance(value, str) for value in frame.fields.values())
    assert not {"True", "False", "None"} & {*frame.fields.values()}


@EACH_REQUEST
def test_request_body_is_json_or_a_message(code: RequestCode, frame: Frame) -> None:
    if frame.body and code is not RequestCode.SEND_MESSAGE_V2:
        assert isinstance(msgspec.json.decode(frame.body), dict)


def test_request_for_a_route_requires_standard_json() -> None:
    assert requests.route("orders").fields == {"topic": "orders", "acceptStandardJsonOnly": "true"}


def test_request_for_an_offset_disables_the_default_of_0() -> None:
    assert requests.committed_offset("shop", QUEUE).fields == {
        "consumerGroup": "shop",
        "setZeroIfNotFound": "false",
        "topic": "orders",
        "queueId": "2",
        "bname": "broker-a",
    }


# Subscriptions.


@pytest.mark.parametrize(
    ("expression", "tags", "hashes"),
    [
        ("*", [], []),
        ("tagA", ["tagA"], [3_552_231]),
        ("b || a||a ||  || polygenelubricants", ["a", "b", "polygenelubricants"], [97, 98, -(2**31)]),
    ],
)
def test_filter_tags_are_sent_with_their_hashes(expression: str, tags: list[str], hashes: list[int]) -> None:
    subscription = requests.subscription(Subscription(topic="orders", expression=expression), 5)
    assert (subscription.sub_string, subscription.tags_set, subscription.code_set) == (expression, tags, hashes)
    assert (subscription.expression_type, subscription.sub_version) == ("TAG", 5)


def test_filter_star_with_blanks_is_no_tag() -> None:
    subscription = requests.subscription(Subscription(topic="orders", expression=" * "), 5)
    assert (subscription.sub_string, subscription.tags_set, subscription.code_set) == ("*", [], [])


def test_filter_by_sql_has_no_tags() -> None:
    subscription = requests.subscription(Subscription(topic="orders", expression="a > 1 || b", type="SQL92"), 5)
    assert (subscription.sub_string, subscription.tags_set, subscription.code_set) == ("a > 1 || b", [], [])
    assert subscription.expression_type == "SQL92"


def test_heartbeat_has_the_field_names_of_the_protocol() -> None:
    assert msgspec.json.decode(requests.heartbeat("c1", MEMBER).body) == {
        "clientID": "c1",
        "consumerDataSet": [
            {
                "groupName": "shop",
                "consumeType": "CONSUME_PASSIVELY",
                "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
                "unitMode": False,
                "subscriptionDataSet": [
                    {
                        "topic": "orders",
                        "subString": "*",
                        "tagsSet": [],
                        "codeSet": [],
                        "subVersion": 5,
                        "expressionType": "TAG",
                        "classFilterMode": False,
                    }
                ],
            }
        ],
        "producerDataSet": [],
        "heartbeatFingerprint": 0,
        "withoutSub": False,
    }


def test_lock_requests_have_the_field_names_of_the_protocol() -> None:
    body = {
        "consumerGroup": "shop",
        "clientId": "c1",
        "mqSet": [{"topic": "orders", "brokerName": "broker-a", "queueId": 2}],
        "onlyThisBroker": False,
    }
    assert msgspec.json.decode(requests.lock("shop", "c1", [QUEUE]).body) == body
    assert msgspec.json.decode(requests.unlock("shop", "c1", [QUEUE]).body) == body


# Messages.


def test_request_to_pull_carries_its_subscription_and_commits_nothing() -> None:
    assert pull().fields == {
        "consumerGroup": "shop",
        "queueOffset": "100",
        "maxMsgNums": "32",
        "maxMsgBytes": "1024",
        "sysFlag": "6",  # flags: wait, and the frame carries the subscription
        "commitOffset": "0",
        "suspendTimeoutMillis": "15000",
        "subscription": "*",
        "subVersion": "5",
        "expressionType": "TAG",
        "topic": "orders",
        "queueId": "2",
        "bname": "broker-a",
    }


def test_request_to_pull_without_wait_is_not_suspended() -> None:
    fields = pull(wait_seconds=0).fields
    assert (fields["sysFlag"], fields["suspendTimeoutMillis"]) == ("4", "0")


def test_request_to_send_uses_single_letter_field_names() -> None:
    frame = send(TAGS="red", KEYS="k 1")
    assert frame.body == b"body"
    assert frame.fields == {
        "a": "rota",
        "b": "orders",
        "c": "TBW102",
        "d": "4",
        "e": "-1",
        "f": "0",
        "g": "9",
        "h": "0",
        "i": "TAGS\x01red\x02KEYS\x01k 1\x02",
        "j": "0",
        "k": "false",
        "l": "16",
        "m": "false",
        "n": "broker-a",
    }


@pytest.mark.parametrize("properties", [{"a\x01": "b"}, {"a": "b\x02c"}, {"a": "b", "\x02": ""}])
def test_request_to_send_rejects_separators_in_properties(properties: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"Property '.*' contains \\x01 or \\x02"):
        send(**properties)


def test_request_for_consume_stats_lists_topics_in_one_field() -> None:
    assert requests.consume_stats("shop", ["a", "b"]).fields == {"consumerGroup": "shop", "topicList": "a;b"}
    assert requests.consume_stats("shop").fields == {"consumerGroup": "shop"}


# Requests that are rejected because brokers would accept them.

NOWHERE = Queue("", "broker-a", 0)
EMPTY_NAMES: dict[str, tuple[RequestBuilder, tuple[Any, ...], str]] = {
    "route": (requests.route, ("",), "GET_ROUTEINFO_BY_TOPIC: the topic is empty"),
    "commit, topic": (requests.commit, ("shop", NOWHERE, 1), "UPDATE_CONSUMER_OFFSET: the topic is empty"),
    "commit, group": (requests.commit, ("", QUEUE, 1), "UPDATE_CONSUMER_OFFSET: the group is empty"),
    "committed": (requests.committed_offset, ("", QUEUE), "QUERY_CONSUMER_OFFSET: the group is empty"),
    "last": (requests.max_offset, (NOWHERE,), "GET_MAX_OFFSET: the topic is empty"),
    "pull": (pull, ("",), "PULL_MESSAGE: the group is empty"),
    "reset": (requests.reset_offsets, ("", "orders", -1), "INVOKE_BROKER_TO_RESET_OFFSET: the group is empty"),
    "send, group": (send, ("",), "SEND_MESSAGE_V2: the group is empty"),
    "send, topic": (send, ("rota", ""), "SEND_MESSAGE_V2: the topic is empty"),
    "give back": (send_back_frame, ("shop", ""), "CONSUMER_SEND_MSG_BACK: the topic is empty"),
    "unregister": (requests.unregister, ("", "shop"), "UNREGISTER_CLIENT: the client id is empty"),
    "lock, group": (requests.lock, ("", "c1", [QUEUE]), "LOCK_BATCH_MQ: the group is empty"),
    "lock, client": (requests.lock, ("shop", "", [QUEUE]), "LOCK_BATCH_MQ: the client id is empty"),
    "heartbeat, client": (requests.heartbeat, ("", MEMBER), "HEART_BEAT: the client id is empty"),
    "heartbeat, group": (
        requests.heartbeat,
        ("c1", msgspec.structs.replace(MEMBER, group_name="")),
        "HEART_BEAT: the group is empty",
    ),
    "assignment": (requests.assignment, ("", "shop", "c1", "AVG"), "QUERY_ASSIGNMENT: the topic is empty"),
}


@pytest.mark.parametrize(("build", "arguments", "error"), EMPTY_NAMES.values(), ids=EMPTY_NAMES)
def test_request_with_an_empty_name_is_rejected(build: RequestBuilder, arguments: tuple[Any, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        build(*arguments)


def test_request_with_a_negative_queue_or_offset_is_rejected() -> None:
    with pytest.raises(ValueError, match="orders/broker-a/-1 is not a valid queue: its id is negative"):
        pull(queue=Queue("orders", "broker-a", -1))
    with pytest.raises(ValueError, match="Offset -1 cannot be committed for orders/broker-a/2"):
        requests.commit("shop", QUEUE, -1)


# Signatures.


def signature_of(secret: bytes, content: bytes) -> str:
    return base64.b64encode(hmac.new(secret, content, hashlib.sha1).digest()).decode()


def test_signature_covers_all_fields_in_name_order_and_the_body() -> None:
    frame = Frame(code=10, opaque=3, fields={"b": "2", "a": "ü", "Z": "9"}, body=b"\x00body")
    request = sign_frame(frame, Credentials("key", "secret"))
    content = b"key9" + "ü".encode() + b"2" + b"\x00body"  # AccessKey, Z, a, b: capitals come first
    assert request.fields == {**frame.fields, "AccessKey": "key", "Signature": signature_of(b"secret", content)}
    assert (request.code, request.opaque, request.body) == (10, 3, b"\x00body")
    assert "Signature" not in frame.fields


def test_signature_covers_the_security_token() -> None:
    request = sign_frame(Frame(code=10, fields={"topic": "orders"}), Credentials("key", "secret", "token"))
    assert request.fields["SecurityToken"] == "token"
    assert request.fields["Signature"] == signature_of(b"secret", b"keytokenorders")


def test_signature_is_the_same_when_signed_again() -> None:
    credentials = Credentials("key", "secret")
    signed_once = sign_frame(Frame(code=10, fields={"topic": "orders"}, body=b"body"), credentials)
    assert sign_frame(signed_once, credentials) == signed_once


def test_credentials_repr_hides_the_secret() -> None:
    assert "secret" not in repr(Credentials("key", "secret", "token-secret"))


@pytest.mark.parametrize(("name", "value"), [("a\n", 1), ("a", "1\nb=2"), ("a", "1\r"), ("a", "\n1")])
def test_request_to_update_broker_config_rejects_line_breaks(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="contains a line break"):
        requests.update_broker_config({name: value})


def test_request_to_update_broker_config_has_a_line_per_setting() -> None:
    assert requests.update_broker_config({"a": 1, "b": True}).body == b"a=1\nb=true"


@pytest.mark.parametrize("queues", [[], [QUEUE, QUEUE._replace(broker="broker-b")]])
def test_lock_requires_queues_of_exactly_one_broker(queues: list[Queue]) -> None:
    with pytest.raises(ValueError, match="The queues of one request must belong to one broker"):
        requests.require_one_broker(queues)


@pytest.mark.parametrize(
    ("version", "name"),
    [  # as org.apache.rocketmq.common.MQVersion of 5.4.0 has them
        (0, "0"),
        (193, "193"),
        (194, "V3_9_1_SNAPSHOT"),
        (211, "V3_9_9"),
        (213, "V4_0_0"),
        (401, "V4_9_4"),
        (411, "V4_9_9"),
        (413, "V5_0_0"),
        (441, "V5_1_4"),
        (479, "V5_3_3"),
        (492, "V5_4_0_SNAPSHOT"),
        (493, "V5_4_0"),
        (611, "V5_9_9"),
        (612, "612"),
    ],
)
def test_connection_client_version_is_spelled_as_in_rocketmq(version: int, name: str) -> None:
    assert version_name(version) == name
