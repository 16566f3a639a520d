"""Encoder of messages as CloudEvents 1.0 over HTTP: one in binary mode, several as a JSON batch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from itertools import starmap
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import msgspec

from rota.brokers.message import Message

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

BATCH_HEADERS = b"content-type: application/cloudevents-batch+json\r\n"
CACHED_QUEUES = 1024
# If topic and broker together are longer, nothing is cached: a producer may have chosen the topic of a retried message.
MAX_CACHED_CHARACTERS = 256

T = TypeVar("T")

_TRACES = ("traceparent", "tracestate")  # W3C's trace context: names of message properties, and of the headers
# Unescaped characters in header values: printable ASCII except space, quote and percent sign.
_UNESCAPED = "".join(map(chr, range(0x21, 0x7F))).translate({ord('"'): None, ord("%"): None})
_PRINTABLE = f'{_UNESCAPED} "%'  # trace context is not percent-decoded, so these stay unescaped
# Most values need no escape, and this check takes a tenth of the time of `quote`.
_has_no_escapes = re.compile(f"[{re.escape(_UNESCAPED)}]*").fullmatch


def encode_headers(message: Message, attempt: int, generation: int) -> bytes:
    """Return the header lines of one message; its body is the request's body."""
    lines = [_look_up(_queue_header_lines, message, generation)]
    lines += starmap(_header_line, _message_attributes(message, attempt).items())
    for name, value in _trace_context(message):
        lines.append(f"{name}: {quote(value, safe=_PRINTABLE, errors='replace')}\r\n")
    lines.append("content-type: application/octet-stream\r\n")
    return "".join(lines).encode()


def encode_batch(messages: Iterable[tuple[Message, int]], generation: int) -> bytes:
    """Return the request body for several messages, each with the number of its attempt."""
    events = []
    for message, attempt in messages:
        attributes = _look_up(_queue_attributes, message, generation)
        event: dict[str, str | int | bytes] = {**attributes, **_message_attributes(message, attempt)}
        event.update(_trace_context(message))
        event["datacontenttype"] = "application/octet-stream"
        event["data_base64"] = message.body  # the encoder writes bytes as base64, without an intermediate copy
        events.append(event)
    return msgspec.json.encode(events)


def _message_attributes(message: Message, attempt: int) -> dict[str, str | int]:
    """Return the attributes that are the message's own."""
    attributes: dict[str, str | int] = {"id": message.id, "rocketmqoffset": str(message.offset), "rotaattempt": attempt}
    with suppress(ValueError, OverflowError, OSError):  # a producer may send any timestamp
        attributes["time"] = _format_time(message.born_ms)
    if message.tag:
        attributes["rocketmqtag"] = message.tag
    if message.keys:
        attributes["rocketmqkeys"] = message.keys
    if message.body_error:
        attributes["rocketmqdamage"] = message.body_error
    return attributes


def _look_up(cached: "_lru_cache_wrapper[T]", message: Message, generation: int) -> T:
    """Call a cached function for the message's queue and topic; if their names are long, without its cache."""
    queue = message.queue
    topic = message.topic
    is_short = len(topic) + len(queue.broker) <= MAX_CACHED_CHARACTERS
    return (cached if is_short else cached.__wrapped__)(topic, queue.broker, queue.id, generation)


@lru_cache(CACHED_QUEUES)
def _queue_attributes(topic: str, broker: str, queue_id: int, generation: int) -> Mapping[str, str | int]:
    """Return the attributes that all messages of a queue share; `topic` is the one that they were sent to.

    The generation is a text, like the offset of a message: both outgrow CloudEvents' Integer, which has 32 bits.
    """
    return {
        "specversion": "1.0",
        "source": f"/rocketmq/{quote(topic, safe='', errors='replace')}",  # a URI reference: topics may contain % and |
        "type": "dev.rota.rocketmq.message",
        "rocketmqtopic": topic,
        "rocketmqbroker": broker,
        "rocketmqqueue": queue_id,
        "rotageneration": str(generation),
    }


@lru_cache(CACHED_QUEUES)
def _queue_header_lines(topic: str, broker: str, queue_id: int, generation: int) -> str:
    attributes = _queue_attributes.__wrapped__(topic, broker, queue_id, generation)  # kept here, in their encoded form
    return "".join(starmap(_header_line, attributes.items()))


def _format_time(milliseconds: int) -> str:
    second, millisecond = divmod(milliseconds, 1000)
    return f"{_format_second(second)}.{millisecond:03d}+00:00"


@lru_cache(16)
def _format_second(second: int) -> str:
    """Return a time without its zone; cached, since most messages of a batch were sent in the same second."""
    return datetime.fromtimestamp(second, UTC).isoformat(timespec="seconds").removesuffix("+00:00")


def _trace_context(message: Message) -> Iterator[tuple[str, str]]:
    for name in _TRACES:
        if value := message.properties.get(name):
            yield name, value


def _header_line(name: str, value: str | int) -> str:
    if isinstance(value, str) and not _has_no_escapes(value):
        value = quote(value, safe=_UNESCAPED, errors="replace")
    return f"ce-{name}: {value}\r\n"
