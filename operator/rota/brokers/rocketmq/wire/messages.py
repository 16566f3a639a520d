"""Decoder of messages, from the bytes that brokers store and send; without I/O.

A pull response's body is a sequence of messages, each with its own length. Two layouts differ in the maximum length of
topic names; addresses have 4 or 16 bytes; bodies may be compressed in one of three formats; a message may be a batch of
others.
"""

import struct
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from rota.brokers.message import MEBIBYTE, Message, extra_properties_bytes, text_bytes
from rota.brokers.port import ADMIT_ALL, Admission
from rota.brokers.rocketmq.wire.frames import MalformedFrameError
from rota.model import Queue

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
MAX_BATCH_MESSAGES: Final = 2**15 - 1  # messages; a broker counts them in 16 bits
ZSTD_WINDOW_BYTES: Final = 8 * MEBIBYTE  # the window that RFC 8878 recommends every decoder to support

_COMPRESSED = 0x1
_IPV6_BORN_FLAG = 0x10
_IPV6_STORE_FLAG = 0x20
_BATCH = 0xC0  # two bits; a batch has both
_COMPRESSION_MASK = 0x700
_PACKED_FLAGS = _COMPRESSED | _BATCH
_NAME_END = "\x01"  # after the name of a property
_PAIR_END = "\x02"  # after its value

# The head of a message: total length, magic, checksum, queue id, (flag), offset, commit log offset, system flag, born
# time, (born host), stored time, (store host), attempts, (prepared transaction), length of the body. Fields in
# parentheses are skipped. Lengths are read as unsigned, so that damaged ones cannot lead backwards. There is one layout
# for each combination of 4- and 16-byte hosts; the two IPv6 bits of the system flag are its index.
_SYSTEM_FLAG_FIELD = 6
_HEAD = struct.Struct(">3Ii4x2qiq8xq8xi8xI")
_HEADS = (
    _HEAD,
    struct.Struct(">3Ii4x2qiq20xq8xi8xI"),  # with a born host of 16 bytes
    struct.Struct(">3Ii4x2qiq8xq20xi8xI"),  # with a store host of 16 bytes
    struct.Struct(">3Ii4x2qiq20xq20xi8xI"),
)
_ITEM = struct.Struct(">I12xI")  # the head of a message in a batch: length, (magic, checksum, flag), body length
_SHORT = struct.Struct(">H")


class _TooLargeError(Exception):
    """An unpacked body exceeds the limit."""


class _MessageReader:
    """Reads the body of one pull response; holds the messages that were read and admitted so far."""

    def __init__(self, data: bytes, broker: str, start_offset: int, admission: Admission) -> None:
        self.data = data
        self.broker = broker
        self.start_offset = start_offset
        self.admission = admission
        self.messages: list[Message] = []
        self.refused_offset: int | None = None

    def admit_message(self, message: Message) -> None:
        """Keep a message if it is admitted. Skip those before the requested offset, as the start of a batch may be."""
        if message.offset < self.start_offset:
            return
        if self.admission.admit(message.memory_bytes):
            self.messages.append(message)
        else:
            self.refused_offset = message.offset


def decode(data: bytes, broker: str) -> list[Message]:
    """Return all messages in a pull response's body; raise MalformedFrameError if any part of it is no message."""
    return decode_admitted(data, broker)[0]


def decode_admitted(
    data: bytes, broker: str, start_offset: int = 0, admission: Admission = ADMIT_ALL
) -> tuple[list[Message], int | None]:
    """Return the admitted messages from an offset on, and the offset of the first refused one or None.

    An unpacked body may be a thousand times larger than the received one. Each message is unpacked and admitted before
    the next one is read, so at most one message is in memory without being admitted.
    """
    reader = _MessageReader(data, broker, start_offset, admission)
    position = 0
    end = len(data)
    try:
        while position < end and reader.refused_offset is None:
            position = _read_message(reader, position)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedFrameError(f"A message at byte {position} of {end} cannot be decoded: {error}") from None
    return reader.messages, reader.refused_offset


def _read_message(reader: _MessageReader, position: int) -> int:
    """Read the message at a position in the data; return the position of the next one."""
    data = reader.data
    head = _HEAD
    fields = head.unpack_from(data, position)
    if fields[_SYSTEM_FLAG_FIELD] & (_IPV6_BORN_FLAG | _IPV6_STORE_FLAG):
        head = _HEADS[(fields[_SYSTEM_FLAG_FIELD] >> 4) & 3]
        fields = head.unpack_from(data, position)
    total, magic, checksum, number, offset, commit_log_offset, flags, born, stored, attempt, length = fields
    start = position + head.size
    body_end = start + length
    if magic == MAGIC_V1:
        topic_length = data[body_end]
        topic_start = body_end + 1
    elif magic == MAGIC_V2:
        (topic_length,) = _SHORT.unpack_from(data, body_end)
        topic_start = body_end + 2
    else:
        raise MalformedFrameError(f"A message at byte {position} has the unknown magic number {magic:#x}")
    topic_end = topic_start + topic_length
    (properties_length,) = _SHORT.unpack_from(data, topic_end)
    end: int = topic_end + 2 + properties_length
    if end != position + total or end > len(data):
        problem = f"A message at byte {position} declares {total} bytes, but its parts have {end - position}"
        raise MalformedFrameError(problem)
    queue = _make_queue(data[topic_start:topic_end], reader.broker, number)
    body = data[start:body_end]
    is_intact = zlib.crc32(body) & 0x7FFFFFFF == checksum
    body_error = "" if is_intact else "its checksum does not match"
    text = data[topic_end + 2 : end].decode(errors="replace")  # invalid UTF-8 is replaced, as Java does
    properties = _parse_properties(text)
    properties_bytes = extra_properties_bytes(len(properties), text_bytes(text))  # beyond an ordinary message's
    message = Message(
        queue, offset, body, properties, attempt, born, stored, commit_log_offset, body_error, properties_bytes
    )
    if flags & _PACKED_FLAGS and not body_error:
        _unpack_message(reader, message, flags, _BatchProperties(properties, text_bytes(text)))
    else:
        reader.admit_message(message)
    return end


def _unpack_message(reader: _MessageReader, message: Message, flags: int, batch_properties: "_BatchProperties") -> None:
    """Unpack a compressed message or a batch; keep its messages up to the first that is not admitted."""
    if flags & _COMPRESSED:
        body, body_error = unpack_body(message.body, (flags & _COMPRESSION_MASK) >> 8, reader.admission.max_body_bytes)
        message = msgspec.structs.replace(message, body=body, body_error=body_error)
    if flags & _BATCH != _BATCH or message.body_error:
        reader.admit_message(message)
        return
    body_error = _batch_error(message.body)
    if body_error:
        reader.admit_message(msgspec.structs.replace(message, body_error=body_error))
        return
    for item in _split_batch(message, batch_properties, reader.start_offset):
        reader.admit_message(item)
        if reader.refused_offset is not None:
            return


@lru_cache(maxsize=4096)  # all messages of a queue share one object
def _make_queue(topic: bytes, broker: str, number: int) -> Queue:
    return Queue(topic.decode(), broker, number)


def _parse_properties(text: str) -> dict[str, str]:
    """Parse properties; the last separator may be missing."""
    properties = {}
    for pair in text.split(_PAIR_END):
        name, separator, value = pair.partition(_NAME_END)
        if separator:
            properties[name] = value
    return properties


def write_properties(properties: Mapping[str, str]) -> str:
    """Encode properties; raise ValueError if one contains a separator."""
    for name, value in properties.items():
        if _NAME_END in name + value or _PAIR_END in name + value:
            raise ValueError(f"Property {name!r} contains \\x01 or \\x02, which are reserved as separators")
    return "".join(f"{name}{_NAME_END}{value}{_PAIR_END}" for name, value in properties.items())


def _batch_error(body: bytes) -> str:
    """Return why a batch cannot be split, or "".

    The producer encoded the batch, so the broker's other messages can be read although this one is damaged.
    """
    try:
        count = sum(1 for _ in islice(_split_items(body), MAX_BATCH_MESSAGES + 1))
    except (struct.error, MalformedFrameError) as error:
        return f"the batch cannot be split: {error}"
    if count > MAX_BATCH_MESSAGES:
        return f"the batch cannot be split: it has more than {MAX_BATCH_MESSAGES:,} messages"
    return ""


def _split_items(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield for each message of a batch the start and end of its body, and the end of the message."""
    position = 0
    while position < len(data):
        total, length = _ITEM.unpack_from(data, position)
        body_start = position + _ITEM.size
        body_end = body_start + length
        (properties_length,) = _SHORT.unpack_from(data, body_end)
        end = body_end + 2 + properties_length
        if end != position + total or end > len(data):
            parts = f"its parts have {end - position}"
            raise MalformedFrameError(f"a message at byte {position} declares {total} bytes, but {parts}")
        yield body_start, body_end, end
        position = end


class _BatchProperties(NamedTuple):
    """The properties that all messages of a batch share, and the memory of their text."""

    properties: dict[str, str]
    text_bytes: int


def _split_batch(batch: Message, batch_properties: _BatchProperties, start_offset: int) -> Iterator[Message]:
    """Yield the messages of a batch from an offset on, with their own properties and those of the batch.

    The messages of a batch share one copy of its properties, which stays in memory as long as any of them does. Each
    message counts the whole copy all the same, because each is delivered to the app with all of these properties.
    """
    data = batch.body
    shared = batch.reconsume_times, batch.born_ms, batch.stored_ms, batch.commit_log_offset
    for offset, (start, body_end, end) in enumerate(_split_items(data), batch.offset):
        if offset < start_offset:
            continue
        text = data[body_end + 2 : end].decode(errors="replace")
        own = _parse_properties(text)
        count = len(own) + len(batch_properties.properties)
        properties_bytes = extra_properties_bytes(count, text_bytes(text) + batch_properties.text_bytes)
        properties = ChainMap(own, batch_properties.properties)
        yield Message(batch.queue, offset, data[start:body_end], properties, *shared, "", properties_bytes)


# Each function unpacks at most one byte more than the limit, to distinguish too large bodies from truncated ones.


def _zlib(body: bytes, limit: int) -> bytes:
    unpacker = zlib.decompressobj()
    return _check_complete(unpacker.decompress(body, limit + 1), limit, unpacker.unused_data, ended=unpacker.eof)


def _lz4(body: bytes, limit: int) -> bytes:
    import lz4.frame  # noqa: PLC0415 - optional: needed only for such messages

    unpacker = lz4.frame.LZ4FrameDecompressor()
    unpacked_body = unpacker.decompress(body, max_length=limit + 1)
    return _check_complete(unpacked_body, limit, unpacker.unused_data, ended=unpacker.eof)


def _zstd(body: bytes, limit: int) -> bytes:
    import zstandard  # noqa: PLC0415 - as above

    size = zstandard.frame_content_size(body)  # -1: the frame does not declare its size
    if size > limit:
        raise _TooLargeError
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
    try:
        unpacked_body = unpacker.decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError:  # the body is too large or damaged
        if len(unpacker.stream_reader(body).read(limit + 1)) > limit:
            raise _TooLargeError from None
        raise
    trailing = b""
    if size < 0:  # `allow_extra_data` has no effect on such frames
        stream = unpacker.decompressobj()
        stream.decompress(body)  # needs no more memory than above: stops at the end of the first frame
        trailing = stream.unused_data
    return _check_complete(unpacked_body, limit, trailing, ended=True)


def _check_complete(body: bytes, limit: int, trailing: bytes | None, *, ended: bool) -> bytes:
    if len(body) > limit:
        raise _TooLargeError
    if not ended:
        raise ValueError("it is truncated")
    if trailing:
        raise ValueError(f"{len(trailing)} bytes follow its end")
    return body


ZLIB: Final = 3  # old producers write 0 for ZLIB
_UNPACKERS: dict[int, Callable[[bytes, int], bytes]] = {0: _zlib, 1: _lz4, 2: _zstd, ZLIB: _zlib}


def unpack_body(body: bytes, compression: int, max_bytes: int) -> tuple[bytes, str]:
    """Unpack a body into at most `max_bytes`; return it and "", or the packed body and the reason of a failure."""
    try:
        return _UNPACKERS[compression](body, max_bytes), ""
    except _TooLargeError:
        size = f"{max_bytes / MEBIBYTE:g} MiB"
        limit = f"it exceeds {size} when decompressed, the limit in spec.delivery.buffer.mebibytesPerMessage"
        return body, limit
    except KeyError:
        return body, f"it has the unknown compression type {compression}"
    except ImportError as error:
        return body, f"it is compressed with {error.name}, which is not installed"
    except Exception as error:  # noqa: BLE001 - each library raises its own; a damaged message must not stop a queue
        return body, f"it cannot be decompressed: {str(error) or type(error).__name__}"


def java_hash(text: str) -> int:
    """Return Java's String.hashCode (UTF-16 units, signed 32 bits), by which brokers filter tags."""
    value = 0
    for (unit,) in struct.iter_unpack("<H", text.encode("utf-16-le")):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value
