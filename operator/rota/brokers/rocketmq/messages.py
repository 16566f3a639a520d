"""Messages as a broker stores and sends them: bytes to messages, without I/O.

A body of a pull is messages back to back, each with its own length. Two layouts differ in how long a topic's name may
be; addresses have 4 or 16 bytes; bodies may be compressed in four ways; a message may be a batch of several.
"""

import struct
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import inf
from typing import Final

import msgspec

from rota.brokers import Message
from rota.brokers.rocketmq.frames import Malformed
from rota.model import Queue

V1, V2 = 0xDAA320A7, 0xDAA320AB
LARGEST_BODY: Final = 32 * 2**20  # unpacked; a broker takes 4 MiB by default, packed or not
LARGEST_BATCH: Final = 2**15 - 1  # messages; a broker counts them in 16 bits
ROOM: Final = 32 * 2**20  # bytes that packed bodies and batches of one pull may take; the first one may in any case

_COMPRESSED, _SIX_BORN, _SIX_STORED, _BATCH, _KIND = 0x1, 0x10, 0x20, 0xC0, 0x700
_FOLDED = _COMPRESSED | _BATCH
_ITEM_COST = 1024  # bytes that a message of a batch takes besides its body
_NAME, _PAIR = "\x01", "\x02"  # what ends a property's name, and its value

# Length, magic, checksum, queue, (a flag), offset, place, system flag, born, (its host), stored, (its host),
# attempts, (prepared transaction), length of the body; by which of the two hosts have addresses of 16 bytes. What is
# in brackets is of no use here. No length is signed, so that no damage leads backwards.
_HEADS = [struct.Struct(f">3Ii4x2qiq{born + 4}xq{store + 4}xi8xI") for store in (4, 16) for born in (4, 16)]
_HEAD = _HEADS[0]
_ITEM = struct.Struct(">I12xI")  # of a batch: length, (magic, checksum, flag), length of the body
_SHORT = struct.Struct(">H")


class _Full(Exception):  # noqa: N818 - it says what is so
    """There is no more room."""


class _Room:
    """What is left of it."""

    def __init__(self, size: float) -> None:
        self.left = size


def decode(data: bytes, broker: str) -> list[Message]:
    """Return all messages in a pull's body; what is no message makes all of it unreadable."""
    return prefix(data, broker, inf)[0]


def prefix(data: bytes, broker: str, room: float = ROOM) -> tuple[list[Message], int | None]:
    """Return the first messages in a pull's body that find room, and the offset of the first that does not.

    What is packed may be a thousand times larger than what came; what is left is pulled again, and comes first then.
    """
    found: list[Message] = []
    at, end, left = 0, len(data), _Room(room)
    try:
        while at < end:
            at = _read(data, at, broker, found, left)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise Malformed(f"A message at byte {at} of {end} cannot be read: {error}") from None
    except _Full as full:
        return found, full.args[0]
    return found, None


def _read(data: bytes, at: int, broker: str, found: list[Message], room: _Room) -> int:
    """Read the message at a place, and return where the next one begins."""
    head = _HEAD
    fields = head.unpack_from(data, at)
    if fields[6] & (_SIX_BORN | _SIX_STORED):
        head = _HEADS[(fields[6] >> 4) & 3]
        fields = head.unpack_from(data, at)
    total, magic, checksum, number, offset, place, flags, born, stored, attempt, length = fields
    start = at + head.size
    topic_at = start + length
    if magic == V1:
        topic_length, topic_start = data[topic_at], topic_at + 1
    elif magic == V2:
        (topic_length,), topic_start = _SHORT.unpack_from(data, topic_at), topic_at + 2
    else:
        raise Malformed(f"A message at byte {at} begins with {magic:#x}, which no layout does")
    properties_at = topic_start + topic_length
    (properties_length,) = _SHORT.unpack_from(data, properties_at)
    end: int = properties_at + 2 + properties_length
    if end != at + total or end > len(data):
        raise Malformed(f"A message at byte {at} says that it has {total} bytes; what is in it has {end - at}")
    queue = _queue(data[topic_start:properties_at], broker, number)
    body, damage = data[start:topic_at], ""
    if zlib.crc32(body) & 0x7FFFFFFF != checksum:
        damage = "its checksum does not match"
    properties = read_properties(data[properties_at + 2 : end])
    message = Message(queue, offset, body, properties, attempt, born, stored, place, damage)
    if flags & _FOLDED and not damage:
        found += _unfolded(message, flags, properties, room, first=not found)
    else:
        found.append(message)
    return end


def _unfolded(message: Message, flags: int, properties: dict[str, str], room: _Room, *, first: bool) -> list[Message]:
    """Return what is in a message that is packed or a batch, if there is room for it."""
    if flags & _COMPRESSED:
        body, damage = unpacked(message.body, (flags & _KIND) >> 8)
        message = msgspec.structs.replace(message, body=body, damage=damage)
    items = [message]
    if flags & _BATCH == _BATCH and not message.damage:
        items = _items(message, properties)
    room.left -= len(message.body) + _ITEM_COST * (len(items) - 1)
    if room.left < 0 and not first:
        raise _Full(message.offset)
    return items


@lru_cache(maxsize=4096)
def _queue(topic: bytes, broker: str, number: int) -> Queue:
    return Queue(topic.decode(), broker, number)


def read_properties(data: bytes) -> dict[str, str]:
    """Read properties; the last separator may be missing. What is no UTF-8 is replaced, as Java does."""
    found = {}
    for pair in data.decode(errors="replace").split(_PAIR):
        name, separator, value = pair.partition(_NAME)
        if separator:
            found[name] = value
    return found


def write_properties(properties: Mapping[str, str]) -> str:
    """Write properties; what separates them cannot be in them."""
    odd = next((name for name, value in properties.items() if {_NAME, _PAIR} & {*name, *value}), None)
    if odd is not None:
        raise ValueError(f"The property {odd!r} has a character \\x01 or \\x02 in it, which separate properties")
    return "".join(f"{name}{_NAME}{value}{_PAIR}" for name, value in properties.items())


def _items(batch: Message, common: dict[str, str]) -> list[Message]:
    """Return the messages of a batch; the producer made it, so if it cannot be taken apart only it is damaged."""
    try:
        return list(_apart(batch, common))
    except (struct.error, Malformed) as error:
        return [msgspec.structs.replace(batch, damage=f"it is a batch that cannot be taken apart: {error}")]


def _apart(batch: Message, common: dict[str, str]) -> Iterator[Message]:
    """Yield the messages of a batch; they have its properties in common, besides their own."""
    data, at, offset = batch.body, 0, batch.offset
    while at < len(data):
        if offset - batch.offset == LARGEST_BATCH:
            raise Malformed(f"it has more than {LARGEST_BATCH:,} messages")
        total, length = _ITEM.unpack_from(data, at)
        start = at + _ITEM.size
        (properties_length,) = _SHORT.unpack_from(data, start + length)
        end = start + length + 2 + properties_length
        if end != at + total or end > len(data):
            raise Malformed(f"a message at byte {at} says it has {total} bytes; what is in it has {end - at}")
        properties = ChainMap(read_properties(data[start + length + 2 : end]), common)
        body = data[start : start + length]
        yield Message(batch.queue, offset, body, properties, batch.attempt, batch.born, batch.stored, batch.place)
        at, offset = end, offset + 1


def _zlib(body: bytes) -> bytes:
    packed = zlib.decompressobj()
    return _whole(packed.decompress(body, LARGEST_BODY), ended=packed.eof)


def _lz4(body: bytes) -> bytes:
    import lz4.frame  # noqa: PLC0415 - only who meets such a message needs it

    packed = lz4.frame.LZ4FrameDecompressor()
    return _whole(packed.decompress(body, max_length=LARGEST_BODY), ended=packed.eof)


def _zstd(body: bytes) -> bytes:
    import zstandard  # noqa: PLC0415 - as above

    told = zstandard.frame_content_size(body)  # -1 if it does not tell; if it does, the limit below is read over
    if told > LARGEST_BODY:
        raise ValueError(f"it says that it has {told:,} bytes unpacked; {LARGEST_BODY:,} are the most")
    return zstandard.ZstdDecompressor().decompress(body, max_output_size=LARGEST_BODY)


def _whole(body: bytes, *, ended: bool) -> bytes:
    if not ended:
        raise ValueError(f"it is cut off, or unpacked over {LARGEST_BODY:,} bytes")
    return body


_UNPACK: dict[int, Callable[[bytes], bytes]] = {0: _zlib, 1: _lz4, 2: _zstd, 3: _zlib}


def unpacked(body: bytes, kind: int) -> tuple[bytes, str]:
    """Unpack a body; if that cannot be done it stays as it is, and why is told."""
    try:
        return _UNPACK[kind](body), ""
    except KeyError:
        return body, f"it is compressed in a way of number {kind}, which is not known"
    except ImportError as error:
        return body, f"it is compressed, and {error.name} is not installed to unpack it"
    except Exception as error:  # noqa: BLE001 - each library has its own; a damaged message must not stop a queue
        return body, f"it cannot be unpacked: {error}"


def java_hash(text: str) -> int:
    """Return Java's hash of a text, by which brokers filter tags: over UTF-16 units, in 32 bits, signed."""
    found = 0
    for (unit,) in struct.iter_unpack("<H", text.encode("utf-16-le")):
        found = (31 * found + unit) & 0xFFFFFFFF
    return found - 2**32 if found >= 2**31 else found
