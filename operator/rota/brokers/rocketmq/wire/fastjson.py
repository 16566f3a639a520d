"""JSON as brokers write it: fastjson takes whole objects and bare numbers for keys, which no JSON parser does.

{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:{...}},"brokerAddrs":{0:"127.0.0.1:10911"}}
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from rota.brokers.rocketmq.wire.frames import Malformed
from rota.model import Queue

T = TypeVar("T")

# Members with proper keys are matched first, as many as there are, so that nothing inside a text is taken for a key.
# Only a key has a colon behind it; only a queue is written as an object key, and that is flat. Nothing is tried
# twice, so that hostile bodies cost no more than others: possessive throughout, a text without an end is one up to
# the end of all, and a number begins at its first digit.
_TEXT = rb'"(?:[^"\\]|\\.)*+"?'
_ODD = re.compile(
    rb'(?:%b\s*+:?[^"{}\[\],]*+,?\s*+)++' % _TEXT
    + rb'|(?P<object>\{(?:%b|[^"{}])*+\})(?=\s*+:)' % _TEXT
    + rb"|(?P<number>(?<!\d)-?\d++)(?=\s*+:)",
    re.DOTALL,
)

# A queue as brokers write it, with names as they take them. Most bodies have no other odd keys, and this is eight times
# as quick. No text can look so, for its quotes are escaped.
_QUEUE = re.compile(rb'\{"brokerName":"([\w.|%-]*+)","queueId":(\d++),"topic":"([\w|%-]*+)"\}(?=:)')
_AS_TEXT = rb'"{\"brokerName\":\"%b\",\"queueId\":%b,\"topic\":\"%b\"}"'


def read(text: bytes, kind: type[T]) -> T:
    """Read a body into a type; keys that are objects become the texts of these objects, see `queue`."""
    try:
        for form in _forms(text):
            try:
                return msgspec.json.decode(form, type=kind, strict=False)
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                continue
        return msgspec.json.decode(_ODD.sub(_proper, text), type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"A body is not the JSON expected: {error}") from None


def _forms(text: bytes) -> Iterator[bytes]:
    """Yield a body as it came, and as it is if only queues are odd keys in it."""
    yield text
    yield _QUEUE.sub(lambda found: _AS_TEXT % found.groups(), text)


def _proper(found: "re.Match[bytes]") -> bytes:
    if found["object"]:
        return msgspec.json.encode(found["object"].decode())
    return b'"%b"' % found["number"] if found["number"] else found[0]


class _Key(msgspec.Struct):
    topic: str
    brokerName: str  # noqa: N815 - the protocol's name
    queueId: int  # noqa: N815 - the protocol's name


_read_key = msgspec.json.Decoder(_Key).decode


def queue(key: str) -> Queue:
    """Read a key that is a queue."""
    try:
        found = _read_key(key)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"{key[:100]!r} is no queue: {error}") from None
    return Queue(found.topic, found.brokerName, found.queueId)


def table(values: Mapping[Queue, Any]) -> msgspec.Raw:
    """Write values by queue, with the queues as object keys: from 5.4 on Java does not read them as texts."""
    write = msgspec.json.encode
    rows = (write(_Key(*queue)) + b":" + write(value) for queue, value in values.items())
    return msgspec.Raw(b"{" + b",".join(rows) + b"}")
