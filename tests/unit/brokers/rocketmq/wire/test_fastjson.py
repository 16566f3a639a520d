"""JSON bodies as brokers write them: keys that no JSON parser accepts, and texts that resemble such keys."""

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.brokers.rocketmq.wire import fastjson, payloads
from rota.brokers.rocketmq.wire.frames import MalformedFrameError
from rota.model import Queue

QUEUE = Queue("t", "b", 2)


def read(text: bytes) -> Any:
    return fastjson.decode_json(text, dict)


# Bodies of brokers and name servers.

ROUTE = (
    b'{"brokerDatas":[{"brokerAddrs":{0:"127.0.0.1:20911",2:"127.0.0.1:20921"},"brokerName":"broker-a",'
    b'"cluster":"DefaultCluster","enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":'
    b'"broker-a","perm":6,"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)
CLUSTER = (
    b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"127.0.0.1:20911"},"brokerName":"broker-a","cluster":'
    b'"DefaultCluster","enableActingMaster":false}},"clusterAddrTable":{"DefaultCluster":["broker-a"]}}'
)
STATS = (
    b'{"consumeTps":0.5,"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:{"brokerOffset":12,'
    b'"consumerOffset":10,"lastTimestamp":1763712000000,"pullOffset":11},{"brokerName":"b","queueId":0,"topic":'
    b'"%RETRY%g"}:{"brokerOffset":0,"consumerOffset":0,"lastTimestamp":0,"pullOffset":0}}}'
)


@pytest.mark.parametrize(
    "text", [ROUTE, ROUTE.replace(b'{0:"', b'{"0":"').replace(b',2:"', b',"2":"')], ids=["numbers", "texts"]
)
def test_fastjson_reads_a_route_with_numeric_or_string_ids(text: bytes) -> None:
    body = fastjson.decode_json(text, payloads.TopicRoute)
    addresses = {0: "127.0.0.1:20911", 2: "127.0.0.1:20921"}
    assert body.broker_datas == [
        payloads.BrokerData(broker_name="broker-a", broker_addrs=addresses, cluster="DefaultCluster")
    ]
    assert body.queue_datas == [
        payloads.QueueData(broker_name="broker-a", read_queue_nums=4, write_queue_nums=4, perm=6)
    ]


def test_fastjson_reads_cluster_info() -> None:
    body = fastjson.decode_json(CLUSTER, payloads.ClusterInfo)
    assert body.broker_addr_table["broker-a"].broker_addrs == {0: "127.0.0.1:20911"}
    assert body.cluster_addr_table == {"DefaultCluster": ["broker-a"]}


def test_fastjson_reads_consume_stats_by_queue() -> None:
    body = fastjson.decode_json(STATS, payloads.ConsumeStats)
    assert body.consume_tps == 0.5
    assert {fastjson.parse_queue(key): stats.consumer_offset for key, stats in body.offset_table.items()} == {
        QUEUE: 10,
        Queue("%RETRY%g", "b", 0): 0,
    }


def test_fastjson_reads_offsets_by_queue() -> None:
    body = fastjson.decode_json(
        b'{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:-1}}', payloads.ResetOffsets
    )
    assert {fastjson.parse_queue(key): offset for key, offset in body.offset_table.items()} == {QUEUE: -1}


def test_fastjson_reads_an_empty_or_missing_table_as_empty() -> None:
    assert fastjson.decode_json(b'{"offsetTable":{}}', payloads.TopicStats) == payloads.TopicStats()
    assert fastjson.decode_json(b"{}", payloads.TopicStats) == payloads.TopicStats()


# Keys that are not strings, and strings that resemble them.

NON_STRING_KEYS = {
    "a number": (b"{0:1}", {"0": 1}),
    "a negative number": (b"{-7:1}", {"-7": 1}),
    "numbers": (b'{1:2,3:4,5:"6:7"}', {"1": 2, "3": 4, "5": "6:7"}),
    "after a text": (b'{"a":"b",1:"c","d":5,6:7}', {"a": "b", "1": "c", "d": 5, "6": 7}),
    "after a list": (b'{"a":[1,2],3:[4,"5",{6:7}]}', {"a": [1, 2], "3": [4, "5", {"6": 7}]}),
    "after null and others": (b'{"a":null,1:true,2:-1.5e3,3:{}}', {"a": None, "1": True, "2": -1500.0, "3": {}}),
    "with blanks": (b'{ 0 : 1 ,\n-1\t: {  {"a" : 1 } : 2 } }', {"0": 1, "-1": {'{"a" : 1 }': 2}}),
    "an object": (b'{{"a":1,"b":"c"}:{"d":2}}', {'{"a":1,"b":"c"}': {"d": 2}}),
    "an empty object": (b"{{}:{}}", {"{}": {}}),
    "objects in objects": (b'{{"a":1}:{{"b":2}:{3:{{}:5}}}}', {'{"a":1}': {'{"b":2}': {"3": {"{}": 5}}}}),
    "braces in a key's text": (b'{{"a":"}{:"}:{"b":"{}:1,2:{"}}', {'{"a":"}{:"}': {"b": "{}:1,2:{"}}),
    "quotes in a key's text": (b'{{"a":"\\"}\\\\"}:1}', {'{"a":"\\"}\\\\"}': 1}),
    "a key as a value": (b'{1:"{\\"a\\":1}:2"}', {"1": '{"a":1}:2'}),
    "a key in a proper key": (b'{"{1:2}:3, 4:":{5:6}}', {"{1:2}:3, 4:": {"5": 6}}),
    "an address": (b'{0:"1:2,3:4","a":"[::1]:10911"}', {"0": "1:2,3:4", "a": "[::1]:10911"}),
    "backslashes": (b'{"a\\\\":1,"\\\\\\"":2,3:4}', {"a\\": 1, '\\"': 2, "3": 4}),
    "no ASCII": ('{"ü":"{1:2}",{"ö":"日本:1"}:2}'.encode(), {"ü": "{1:2}", '{"ö":"日本:1"}': 2}),
}
STANDARD_JSON = [
    b'{"{":"}","1":"2:3","a b":{"c":[{"d":"e"},[],{}]},"\\"1:":-5}',
    b'{"a":"\\u007b1:2\\u007d","b":1.5e-3,"c":null}',
    b' {"a" : [ 1 , 2 ] } ',
]


@pytest.mark.parametrize(("text", "expected"), NON_STRING_KEYS.values(), ids=NON_STRING_KEYS)
def test_fastjson_turns_non_string_keys_into_strings_and_changes_nothing_else(text: bytes, expected: Any) -> None:
    assert read(text) == expected


@pytest.mark.parametrize("text", STANDARD_JSON)
def test_fastjson_reads_standard_json_unchanged(text: bytes) -> None:
    assert read(text) == json.loads(text)


@pytest.mark.parametrize("topic", ["a{b", '}":1', "1:2,{3:", "\\", '\\"', "ü日本", " ", "[]", "\u0000", "🚀"])
def test_fastjson_reads_queue_keys_with_any_topic_name(topic: str) -> None:
    queue = Queue(topic, '{"broker":1}', 3)
    topic_offset = payloads.TopicOffset(min_offset=1, max_offset=2)
    text = msgspec.json.encode(
        {"offsetTable": fastjson.encode_queue_table({queue: topic_offset, QUEUE: topic_offset}), "later": {}}
    )
    table = fastjson.decode_json(text, payloads.TopicStats).offset_table
    assert {fastjson.parse_queue(key): offsets for key, offsets in table.items()} == {
        queue: topic_offset,
        QUEUE: topic_offset,
    }


def test_fastjson_writes_a_table_with_queues_as_keys() -> None:
    encoded = fastjson.encode_queue_table({QUEUE: 7, QUEUE._replace(id=3): {"a": "b"}})
    first = b'{"topic":"t","brokerName":"b","queueId":2}:7'
    assert bytes(encoded) == b"{%b,%b}" % (first, b'{"topic":"t","brokerName":"b","queueId":3}:{"a":"b"}')
    assert bytes(fastjson.encode_queue_table({})) == b"{}"


# Invalid JSON.

INVALID = {
    "nothing": b"",
    "a word": b"SUCCESS",
    "no object": b"[1]",
    "cut off": STATS[:-1],
    "cut off in a key": STATS[:60],
    "cut off in a text": b'{"a":"b',
    "cut off behind a backslash": b'{"a":"b\\',
    "no value": b"{1:}",
    "two values": b"{1:2:3}",
    "a list as a key": b"{[1]:2}",
    "a broken number": b"{1.5:2}",
    "a deep key": b'{{"a":{"b":1}}:2}',
    "no UTF-8": b'{"a":"\xff"}',
    "no UTF-8 in a key": b'{{"a":"\xff"}:1}',
    "no UTF-8 after an odd key": b'{1:2,"a":"\xff"}',
    "half a character": b'{1:"\\ud800"}',
    "random": bytes(range(256)),
}
# Each of these takes quadratic time, or exhausts the stack, if a decoder backtracks at every byte.
HOSTILE = {
    "open braces": b"{" * 500_000,
    "open brackets": b"[" * 500_000,
    "pairs of braces": b"{}" * 500_000,
    "keys": b'"a":' * 200_000,
    "odd keys": b"{1:" * 300_000,
    "object keys": b'{{"a":1}:' * 100_000,
    "quotes": b'"' * 999_999,
    "a text without an end": b'"' + b'\\"' * 500_000,
    "an object key's text without an end": b'{"' + b'\\"' * 500_000,
    "texts that begin objects": b'{"' * 500_000,
    "digits": b"1" * 1_000_000,
    "digits and blanks": b"1" * 500_000 + b" " * 500_000,
    "numbers and blanks": b"1 " * 500_000,
    "minuses": b"-" * 1_000_000,
    "minuses and digits": b"-1" * 500_000,
    "blanks": b" " * 1_000_000,
    "blanks behind braces": b"{{}" + b" " * 1_000_000,
    "commas": b"," * 1_000_000,
    "texts and blanks": b'"a" ' * 250_000,
    "backslashes": b"\\" * 1_000_000,
}


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_fastjson_rejects_invalid_json_as_malformed(text: bytes) -> None:
    with pytest.raises(MalformedFrameError, match="A body cannot be decoded as JSON: "):
        read(text)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_fastjson_rejects_hostile_input_as_malformed(text: bytes) -> None:
    with pytest.raises(MalformedFrameError, match="A body cannot be decoded as JSON: "):
        read(text)


def test_fastjson_rejects_a_body_of_another_type_as_malformed() -> None:
    with pytest.raises(MalformedFrameError, match=r"Expected `int`, got `array` - at `\$.offsetTable\[...\]`"):
        fastjson.decode_json(b'{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:[]}}', payloads.ResetOffsets)


@pytest.mark.parametrize(
    "key",
    ["", "0", "{}", '{"topic":"t","brokerName":"b"}', '{"topic":1,"brokerName":"b","queueId":2}', "[" * 100_000],
    ids=["nothing", "a number", "empty", "no id", "no name", "deep"],
)
def test_fastjson_rejects_a_key_that_is_no_queue_with_a_short_error(key: str) -> None:
    with pytest.raises(MalformedFrameError, match=" is not a queue: ") as raised:
        fastjson.parse_queue(key)
    assert len(str(raised.value)) < 300


# Properties. Texts consist of the characters that a decoder could mistake for syntax.

TEXTS = st.text(st.sampled_from('{}[]":,\\ 1-aü\n'), max_size=8)
FLAT = st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(-99, 99), st.none()), max_size=3)
KEYS = st.one_of(TEXTS, st.integers(-99, 99), FLAT)
BLANKS = st.sampled_from(["", "", " ", "\n\t "])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), TEXTS)


class Pairs(list[tuple[Any, Any]]):
    """An object with keys of any kind."""


VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(st.tuples(KEYS, inner), max_size=3).map(Pairs)),
    max_leaves=15,
)


def encode_value(value: Any, blank: str, *, odd: bool) -> str:
    """Encode a value; keys that are not strings are written as they are if `odd`, otherwise quoted."""
    if isinstance(value, Pairs):
        pairs = [(json.dumps(key), encode_value(inner, blank, odd=odd)) for key, inner in value]
        is_unquoted = [isinstance(key, str) or odd for key, _ in value]
        keys = [key if unquoted else json.dumps(key) for (key, _), unquoted in zip(pairs, is_unquoted, strict=True)]
        members = [f"{blank}{key}{blank}:{blank}{inner}" for key, (_, inner) in zip(keys, pairs, strict=True)]
        return "{" + f"{blank},".join(members) + blank + "}"
    if isinstance(value, list):
        return "[" + f"{blank},".join(encode_value(inner, blank, odd=odd) for inner in value) + "]"
    return json.dumps(value)


@given(VALUES, BLANKS)
def test_fastjson_reads_string_and_non_string_keys_alike(value: Any, blank: str) -> None:
    odd, standard = (encode_value(value, blank, odd=odd).encode() for odd in (True, False))
    assert fastjson.decode_json(odd, object) == msgspec.json.decode(standard) == fastjson.decode_json(standard, object)


@given(st.text(st.sampled_from('{}[]":,\\ 1-a\n')).map(str.encode))
def test_fastjson_reads_any_text_or_rejects_it_as_malformed(text: bytes) -> None:
    with suppress(MalformedFrameError):
        fastjson.decode_json(text, object)


@pytest.mark.parametrize(
    ("mapping", "is_static"), [(None, False), ("null", False), (" {} ", False), ('{"broker-a": {"a": 1}}', True)]
)
def test_route_of_a_static_topic_is_recognized(mapping: str | None, is_static: bool) -> None:  # noqa: FBT001 - a case
    text = "{}" if mapping is None else f'{{"topicQueueMappingByBroker":{mapping}}}'
    assert fastjson.decode_json(text.encode(), payloads.TopicRoute).is_static is is_static


def test_route_with_a_large_mapping_takes_no_more_memory_than_its_text() -> None:
    text = b'{"topicQueueMappingByBroker":{"a":[' + b"[]," * 1_000_000 + b"[]]}}"
    tracemalloc.start()
    fastjson.decode_json(text, payloads.TopicRoute)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 * len(text)
