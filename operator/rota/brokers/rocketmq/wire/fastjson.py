"""JSON dialect of brokers (fastjson), which allows objects and bare numbers as keys, unlike standard JSON.

{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:{...}},"brokerAddrs":{0:"127.0.0.1:10911"}}
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from rota.brokers.rocketmq.wire.frames import MalformedFrameError
from rota.model import Queue

T = TypeVar("T")
R = TypeVar("R")

# Matches, in this order:
# - strings with the values behind them, as many as follow: they stay, so nothing inside a string is taken for a key;
# - an object before a colon: a key (a queue, which is a flat object);
# - a number before a colon: a key.
# The pattern never backtracks, so hostile bodies cost no more than others: all quantifiers are possessive, a string
# that is not terminated extends to the end of the body, and a number begins at its first digit.
_TEXT = rb'"(?:[^"\\]|\\.)*+"?'
_NON_STANDARD = re.compile(
    rb'(?:%b\s*+:?[^"{}\[\],]*+,?\s*+)++' % _TEXT
    + rb'|(?P<object>\{(?:%b|[^"{}])*+\})(?=\s*+:)' % _TEXT
    + rb"|(?P<number>(?<!\d)-?\d++)(?=\s*+:)",
    re.DOTALL,
)

# A queue as brokers write it, with the characters that they allow in names. Most bodies have no other non-standard key,
# and this pattern is eight times as fast. No string can match it, because quotes in strings are escaped.
_QUEUE = re.compile(rb'\{"brokerName":"([\w.|%-]*+)","queueId":(\d++),"topic":"([\w|%-]*+)"\}(?=:)')
# The same queue as a string, in which its quotes are escaped.
_AS_TEXT = rb'"{\"brokerName\":\"%b\",\"queueId\":%b,\"topic\":\"%b\"}"'


def decode_json(text: bytes, target_type: type[T]) -> T:
    """Parse a body into a type; object keys become strings, see `parse_queue`; failure raises MalformedFrameError."""
    try:
        for form in _candidate_texts(text):
            try:
                return msgspec.json.decode(form, type=target_type, strict=False)
            except msgspec.ValidationError:  # standard JSON of another type: other keys would not help
                raise
            except msgspec.DecodeError:
                continue
        return msgspec.json.decode(_NON_STANDARD.sub(_to_standard_key, text), type=target_type, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrameError(f"A body cannot be decoded as JSON: {error}") from None


def _candidate_texts(text: bytes) -> Iterator[bytes]:
    """Yield a body unchanged, then with queue keys rewritten to strings: enough if no other keys are non-standard."""
    yield text
    yield _QUEUE.sub(lambda match: _AS_TEXT % match.groups(), text)


def _to_standard_key(match: "re.Match[bytes]") -> bytes:
    if match["object"]:
        return msgspec.json.encode(match["object"].decode())
    return b'"%b"' % match["number"] if match["number"] else match[0]


class _Key(msgspec.Struct):
    topic: str
    brokerName: str  # noqa: N815 - the protocol's name
    queueId: int  # noqa: N815 - the protocol's name


_read_key = msgspec.json.Decoder(_Key).decode


def parse_queue(key: str) -> Queue:
    """Parse a key that is a queue; raise MalformedFrameError if it is none."""
    try:
        fields = _read_key(key)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedFrameError(f"{key[:100]!r} is not a queue: {error}") from None
    return Queue(fields.topic, fields.brokerName, fields.queueId)


def parse_queue_table(table: Mapping[str, T], convert: Callable[[T], R]) -> dict[Queue, R]:
    """Parse the keys of a table, which are queues, and convert its values."""
    return {parse_queue(key): convert(value) for key, value in table.items()}


def encode_queue_table(values: Mapping[Queue, Any]) -> msgspec.Raw:
    """Encode values by queue, with queues as object keys: RocketMQ from 5.4 on does not read string keys."""
    write = msgspec.json.encode
    rows = (write(_Key(*queue)) + b":" + write(value) for queue, value in values.items())
    return msgspec.Raw(b"{" + b",".join(rows) + b"}")
