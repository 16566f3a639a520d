"""Messages encoded as CloudEvents: HTTP headers of a single message, and the JSON of a batch."""

import json
from base64 import b64decode
from datetime import datetime
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.brokers.message import Message
from rota.model import Queue
from rota.sidecar.delivery import cloudevents

Q = Queue("orders", "broker-a", 3)
RETRY_QUEUE = Queue("%RETRY%shop", "broker-a", 0)
BORN = 1_763_712_000_123


def a_message(
    body: bytes = b"hello", *, queue: Queue = Q, born: int = BORN, offset: int = 7, **properties: Any
) -> Message:
    return Message(queue, offset, body, {"UNIQ_KEY": "7F01", **properties}, born_ms=born)


def headers(message: Message, attempt: int = 1, generation: int = 42) -> dict[str, str]:
    """Parse the headers as strictly as a server that accepts only printable ASCII."""
    lines = cloudevents.encode_headers(message, attempt, generation).decode("ascii").split("\r\n")
    assert lines.pop() == "", "every line is terminated"
    assert all(line.isprintable() for line in lines)
    pairs = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def events(*messages: tuple[Message, int], generation: int = 42) -> list[dict[str, Any]]:
    decoded = json.loads(cloudevents.encode_batch(messages, generation))
    assert isinstance(decoded, list)
    return decoded


def test_cloudevent_headers_describe_a_message() -> None:
    assert headers(a_message(TAGS="paid", KEYS="17")) == {
        "ce-specversion": "1.0",
        "ce-id": "7F01",
        "ce-source": "/rocketmq/orders",
        "ce-type": "dev.rota.rocketmq.message",
        "ce-time": "2025-11-21T08:00:00.123+00:00",
        "ce-rocketmqtopic": "orders",
        "ce-rocketmqbroker": "broker-a",
        "ce-rocketmqqueue": "3",
        "ce-rocketmqoffset": "7",
        "ce-rocketmqtag": "paid",
        "ce-rocketmqkeys": "17",
        "ce-rotaattempt": "1",
        "ce-rotageneration": "42",
        "content-type": "application/octet-stream",
    }


def test_cloudevent_headers_omit_absent_attributes() -> None:
    attributes = headers(Message(Q, 7, b"", {}))
    assert "ce-rocketmqtag" not in attributes
    assert "ce-rocketmqkeys" not in attributes
    assert "traceparent" not in attributes
    assert attributes["ce-id"] == "orders/broker-a/3@7"


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("paid in full", "paid%20in%20full"),
        ('"paid"', "%22paid%22"),
        ("100%", "100%25"),
        ("a\r\nce-id: forged", "a%0D%0Ace-id:%20forged"),
        ("\x00\t\x7f", "%00%09%7F"),
        ("Zürich €", "Z%C3%BCrich%20%E2%82%AC"),
        ("\N{PACKAGE}", "%F0%9F%93%A6"),
        ("~!#$&'()*+,-./:;<=>?@[\\]^_`{|}", "~!#$&'()*+,-./:;<=>?@[\\]^_`{|}"),
        ("\ud800", "?"),
    ],
    ids=["blank", "quote", "percent", "line end", "control", "non-ASCII", "beyond 16 bits", "allowed", "surrogate"],
)
def test_cloudevent_headers_percent_encode_forbidden_characters(text: str, encoded: str) -> None:
    for name, key in (("ce-rocketmqkeys", "KEYS"), ("ce-rocketmqtag", "TAGS"), ("ce-id", "UNIQ_KEY")):
        assert headers(a_message(**dict[str, Any]({key: text})))[name] == encoded


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_cloudevent_headers_decode_to_the_original_text(text: str) -> None:
    assert unquote(headers(a_message(KEYS=text))["ce-rocketmqkeys"]) == text


TRACES: dict[str, Any] = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": 'a=1 "2", b=50%25',
}


def test_trace_context_is_passed_on_unchanged() -> None:
    attributes = headers(a_message(**TRACES))
    assert {name: attributes[name] for name in TRACES} == TRACES


def test_trace_context_cannot_forge_a_header() -> None:
    attributes = headers(a_message(traceparent="00\r\nce-id: forged", tracestate="ü"))
    assert (attributes["traceparent"], attributes["tracestate"], attributes["ce-id"]) == (
        "00%0D%0Ace-id: forged",
        "%C3%BC",
        "7F01",
    )


def test_cloudevent_of_a_retried_message_has_its_original_topic_and_its_retry_queue() -> None:
    attributes = headers(a_message(queue=RETRY_QUEUE, RETRY_TOPIC="orders"), attempt=3)
    assert (attributes["ce-source"], attributes["ce-rocketmqtopic"], attributes["ce-rotaattempt"]) == (
        "/rocketmq/orders",
        "orders",
        "3",
    )
    assert (attributes["ce-rocketmqbroker"], attributes["ce-rocketmqqueue"]) == ("broker-a", "0")
    assert headers(a_message(queue=RETRY_QUEUE))["ce-rocketmqtopic"] == "%25RETRY%25shop"


@pytest.mark.parametrize("born", [2**62, -(2**62), 253_402_300_800_000])
def test_cloudevent_omits_a_time_that_no_calendar_has(born: int) -> None:
    assert "ce-time" not in headers(a_message(born=born))
    assert "time" not in events((a_message(born=born), 1))[0]


def test_cloudevent_batch_has_each_message_with_its_attempt() -> None:
    first, second = events((a_message(TAGS="paid"), 1), (a_message(b"\x00\xff", offset=8, KEYS="ü \n"), 4))
    assert first == {
        "specversion": "1.0",
        "id": "7F01",
        "source": "/rocketmq/orders",
        "type": "dev.rota.rocketmq.message",
        "time": "2025-11-21T08:00:00.123+00:00",
        "rocketmqtopic": "orders",
        "rocketmqbroker": "broker-a",
        "rocketmqqueue": 3,
        "rocketmqoffset": "7",
        "rocketmqtag": "paid",
        "rotaattempt": 1,
        "rotageneration": "42",
        "datacontenttype": "application/octet-stream",
        "data_base64": "aGVsbG8=",
    }
    assert (b64decode(second["data_base64"]), second["rocketmqkeys"], second["rotaattempt"]) == (b"\x00\xff", "ü \n", 4)


def test_cloudevent_batch_numbers_fit_into_32_bits_or_are_text() -> None:
    [event] = events((a_message(offset=2**40), 1), generation=2**40)
    assert (event["rocketmqoffset"], event["rotageneration"]) == (str(2**40), str(2**40))
    assert all(value < 2**31 for value in event.values() if isinstance(value, int))


def test_cloudevent_batch_has_trace_context_and_the_original_topic() -> None:
    [event] = events((a_message(queue=RETRY_QUEUE, RETRY_TOPIC="orders", **TRACES), 2))
    assert {name: event[name] for name in TRACES} == TRACES
    assert (event["rocketmqtopic"], event["source"]) == ("orders", "/rocketmq/orders")


def test_cloudevent_attribute_names_follow_the_specification() -> None:
    [event] = events((a_message(TAGS="a", KEYS="b", **TRACES), 1))
    names = event.keys() - {"data_base64"}
    assert all(name.isalnum() and name.islower() and name.isascii() for name in names)


def test_cloudevent_time_follows_rfc_3339() -> None:
    assert datetime.fromisoformat(headers(a_message())["ce-time"]).timestamp() == BORN / 1000


def test_cloudevent_batch_has_its_content_type() -> None:
    assert cloudevents.BATCH_HEADERS == b"content-type: application/cloudevents-batch+json\r\n"


def test_cloudevent_reports_damage_of_the_message_body() -> None:
    damaged = Message(Q, 7, b"?", {"UNIQ_KEY": "7F01"}, body_error="its checksum does not match")
    assert headers(damaged)["ce-rocketmqdamage"] == "its%20checksum%20does%20not%20match"
    assert events((damaged, 1))[0]["rocketmqdamage"] == "its checksum does not match"


def test_cloudevent_header_cache_excludes_long_topics() -> None:
    caches = (cloudevents._queue_header_lines, cloudevents._queue_attributes)
    for cache in caches:
        cache.cache_clear()
    broker = "broker-a"
    longest = cloudevents.MAX_CACHED_CHARACTERS - len(broker)
    for length in (longest, longest + 1):
        topic = "t" * length
        message = a_message(queue=Queue(topic, broker, 0))
        assert headers(message)["ce-rocketmqtopic"] == topic
        assert events((message, 1))[0]["rocketmqtopic"] == topic
    assert [cache.cache_info().currsize for cache in caches] == [1, 1]


def test_cloudevent_headers_follow_the_queue_and_the_generation_of_each_message() -> None:
    for queue, generation in ((Q, 4), (Queue("orders", "broker-b", 3), 4), (Q, 5)):
        lines = cloudevents.encode_headers(a_message(queue=queue), 1, generation).decode().splitlines()
        values = dict(line.split(": ") for line in lines)
        shown = [
            values[f"ce-{name}"] for name in ("rocketmqtopic", "rocketmqbroker", "rocketmqqueue", "rotageneration")
        ]
        assert shown == [*map(str, queue), str(generation)]


def test_cloudevent_source_is_a_uri_for_every_topic_name_that_a_broker_accepts() -> None:
    message = a_message(queue=Queue("50%|off", "broker-a", 0))
    (event,) = events((message, 1))
    assert (event["source"], event["rocketmqtopic"]) == ("/rocketmq/50%25%7Coff", "50%|off")
    attributes = headers(message)
    assert unquote(attributes["ce-source"]) == "/rocketmq/50%25%7Coff", "a header's value is escaped once more"
    assert unquote(attributes["ce-rocketmqtopic"]) == "50%|off"
