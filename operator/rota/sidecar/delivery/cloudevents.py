"""Encoder of messages as CloudEvents 1.0 over HTTP: one in binary mode, several as a JSON batch."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import quote

import msgspec

from rota.brokers.message import Message

BATCH_HEADERS = b"content-type: application/cloudevents-batch+json\r\n"
MAX_CACHED_CHARACTERS = 256  # longer values are not cached: producers choose tags, and the cache is never emptied

_TRACES = ("traceparent", "tracestate")  # W3C's trace context: names of message properties, and of the headers
# Unescaped characters in header values: printable ASCII except space, quote and percent sign.
_UNESCAPED = "".join(map(chr, range(0x21, 0x7F))).translate({ord('"'): None, ord("%"): None})
_PRINTABLE = f'{_UNESCAPED} "%'  # trace context is not percent-decoded, so these stay unescaped
# Attributes whose values repeat, so that their encoded form is worth keeping.
_CACHED_ATTRIBUTES = {"specversion", "source", "type", "rocketmqtopic", "rocketmqbroker", "rocketmqtag"}
_TEXT_ATTRIBUTES = ("rocketmqoffset", "rotageneration")  # they outgrow CloudEvents' Integer, which has 32 bits


def encode_headers(message: Message, attempt: int, generation: int) -> bytes:
    """Return the header lines of one message; its body is the request's body."""
    attributes = _attributes(message, attempt, generation)
    lines = [f"ce-{name}: {_encode_value(name, value)}\r\n" for name, value in attributes]
    for name, value in _trace_context(message):
        lines.append(f"{name}: {quote(value, safe=_PRINTABLE, errors='replace')}\r\n")
    lines.append("content-type: application/octet-stream\r\n")
    return "".join(lines).encode()


def encode_batch(messages: Iterable[tuple[Message, int]], generation: int) -> bytes:
    """Return the request body for several messages, each with the number of its attempt."""
    events = []
    for message, attempt in messages:
        event: dict[str, str | int | bytes] = dict(_attributes(message, attempt, generation))
        for name in _TEXT_ATTRIBUTES:
            event[name] = str(event[name])
        event |= dict(_trace_context(message))
        event["datacontenttype"] = "application/octet-stream"
        event["data_base64"] = message.body  # the encoder writes bytes as base64, without an intermediate copy
        events.append(event)
    return msgspec.json.encode(events)


def _attributes(message: Message, attempt: int, generation: int) -> Iterator[tuple[str, str | int]]:
    queue = message.queue
    topic = message.topic
    yield "specversion", "1.0"
    yield "id", message.id
    yield "source", _source(topic)
    yield "type", "dev.rota.rocketmq.message"
    with suppress(ValueError, OverflowError, OSError):  # a producer may send any timestamp
        yield "time", datetime.fromtimestamp(message.born_ms / 1000, UTC).isoformat(timespec="milliseconds")
    yield "rocketmqtopic", topic
    yield "rocketmqbroker", queue.broker
    yield "rocketmqqueue", queue.id
    yield "rocketmqoffset", message.offset
    if message.tag:
        yield "rocketmqtag", message.tag
    if message.keys:
        yield "rocketmqkeys", message.keys
    if message.body_error:
        yield "rocketmqdamage", message.body_error
    yield "rotaattempt", attempt
    yield "rotageneration", generation


@lru_cache(256)
def _source(topic: str) -> str:
    """Return the topic as a URI reference: topic names may contain % and |, which must be escaped."""
    return f"/rocketmq/{quote(topic, safe='', errors='replace')}"


def _trace_context(message: Message) -> Iterator[tuple[str, str]]:
    for name in _TRACES:
        if value := message.properties.get(name):
            yield name, value


def _encode_value(name: str, value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    is_cached = name in _CACHED_ATTRIBUTES and len(value) <= MAX_CACHED_CHARACTERS
    return _quote_value(value) if is_cached else _quote_value.__wrapped__(value)  # the function without its cache


@lru_cache(4096)
def _quote_value(value: str) -> str:
    return quote(value, safe=_UNESCAPED, errors="replace")
