"""One try: a seed makes something like what brokers send; it is read, or `Malformed`, and nothing else happens."""

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from fuzz.corpus import BINARY_HEADER, BODIES, FRAMES, JSON_HEADER, MESSAGES, PACKED, a_frame, a_message
from rota.brokers import ADMIT_ALL, MEBIBYTE, MESSAGE_OVERHEAD_BYTES, Message
from rota.brokers.rocketmq import bodies, fastjson
from rota.brokers.rocketmq.frames import Decoder, Frame, Malformed
from rota.brokers.rocketmq.messages import prefix

LONGEST = 2**16  # bytes of a try
MEMORY = (
    2**27
)  # bytes more than before; the messages of a try may have 16 MiB, and while a body grows there are two of it
ADMITTED_BYTES = 16 * MEBIBYTE  # of one try's messages

Read = Callable[[bytes], None]
Change = Callable[[Random, bytes], bytes]


# What is read, and what must be so of it.


def read_frames(data: bytes) -> None:
    """Read frames at once and in two pieces; both must end in the same."""
    pieces = ([data], [data[: len(data) // 2], data[len(data) // 2 :]])
    whole, parts = (_fed(it) for it in pieces)
    assert whole == parts, "frames depend on how they are split"


def _fed(pieces: Sequence[bytes]) -> list[Frame] | None:
    decoder, found = Decoder(), list[Frame]()
    with suppress(Malformed):
        for piece in pieces:
            found += decoder.feed(piece)
        assert all(isinstance(value, str) for frame in found for value in frame.fields.values())
        return found
    return None


KINDS: tuple[type[Any], ...] = (
    *(bodies.TopicRoute, bodies.ClusterInfo, bodies.ConsumeStats, bodies.TopicStats, bodies.Reset, bodies.Locked),
    *(bodies.ConsumerConnection, bodies.TopicConfig, bodies.GroupConfig, bodies.Assignments, dict, object),
)


def read_bodies(data: bytes) -> None:
    """Read a body as every kind there is, and its keys as queues."""
    for kind in KINDS:
        with suppress(Malformed):
            found = fastjson.read(data, kind)
            assert isinstance(found, kind), f"{type(found)} is no {kind}"
            for key in getattr(found, "offset_table", {}):
                fastjson.queue(key)


MOST_PROPERTIES_BYTES = 7 * 2**20  # memory of 65,535 bytes of properties of a batch, and as many of a message in it


class Limited:
    """Admits messages up to a limit."""

    largest_body_bytes = ADMIT_ALL.largest_body_bytes

    def __init__(self) -> None:
        self.free_bytes = ADMITTED_BYTES

    def admit(self, memory_bytes: int) -> bool:
        """Whether a message fits."""
        besides = MESSAGE_OVERHEAD_BYTES + MOST_PROPERTIES_BYTES
        assert memory_bytes <= self.largest_body_bytes + besides, "a body is larger than the limit"
        self.free_bytes -= memory_bytes
        return self.free_bytes >= 0


def read_messages(data: bytes) -> None:
    """Read messages."""
    with suppress(Malformed):
        found, _ = prefix(data, "broker-a", 0, Limited())
        assert sum(message.memory_bytes for message in found) <= ADMITTED_BYTES, "more than was admitted"
        for message in found:
            assert _whole(message), f"no message: {str(message)[:200]}"


def _whole(message: Message) -> bool:
    texts = (message.topic, message.tag, message.id, *message.properties.values())
    return len(message.body) <= ADMIT_ALL.largest_body_bytes and all(isinstance(text, str) for text in texts)


READERS: Mapping[str, Read] = {"frames": read_frames, "bodies": read_bodies, "messages": read_messages}


# What is done to it.

_EXTREMES = (0, 1, 2, 3, 4, 7, 8, 20, 22, 127, 128, 255, 2**15 - 1, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, -1)
_WORDS = (
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b":", b",", b"{{", b"}:", b'"a":', b"0:", b"-1", b"1e999", b"null"),
    *(b" ", b"\\ud800", b"\xff", b"\x00", b"\x01", b"\x02", b"9" * 5000, b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab"),
)


def _flip(chance: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(chance: Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def _leave_out(chance: Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + data[at + chance.randint(1, 16) :]


def _number(chance: Random, data: bytes) -> bytes:
    at, size = chance.randrange(len(data)), chance.choice((1, 2, 4, 8))
    value: int = chance.choice((*_EXTREMES, len(data), -chance.randint(1, 200)))
    return data[:at] + int(value % 256**size).to_bytes(size, "big") + data[at + size :]


def _word(chance: Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.choice(_WORDS) * chance.choice((1, 1, 2, 3000)) + data[at:]


def _repeat(chance: Random, data: bytes) -> bytes:
    start, end = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
    return data[:end] + data[start:end] * chance.choice((1, 2, 1000)) + data[end:]


def _splice(chance: Random, data: bytes) -> bytes:
    other = chance.choice((*FRAMES, *BODIES, *MESSAGES))
    return data[: chance.randrange(len(data))] + other[chance.randrange(len(other)) :]


_CHANGES: tuple[Change, ...] = (_flip, _flip, _number, _number, _cut, _leave_out, _word, _repeat, _splice)


def _changed(chance: Random, data: bytes) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 4))):
        data = chance.choice(_CHANGES)(chance, data or b"\x00")[:LONGEST]
    return data


def _header(chance: Random) -> bytes:
    kind = chance.randrange(2)
    return a_frame(_changed(chance, BINARY_HEADER if kind else JSON_HEADER), b"body", kind)


def _lies(chance: Random) -> bytes:
    """Make a batch of one that leads to where its length says it does: forwards, nowhere or backwards."""
    length, more = chance.randint(-60, 20), chance.randint(0, 40)
    item = (22 + length).to_bytes(4, "big", signed=True) + bytes(12) + length.to_bytes(4, "big", signed=True)
    return a_message(item + bytes(more), 0xC0) + MESSAGES[0]


def _packed(chance: Random) -> bytes:
    body, flags = chance.choice(PACKED)
    return a_message(_changed(chance, body), flags) + MESSAGES[0]


# What is around a changed header or a packed body is right, so that it is looked at.
_TRIES: tuple[tuple[str, Callable[[Random], bytes]], ...] = (
    ("frames", lambda chance: _changed(chance, chance.choice(FRAMES))),
    ("frames", _header),
    ("bodies", lambda chance: _changed(chance, chance.choice(BODIES))),
    ("messages", lambda chance: _changed(chance, chance.choice(MESSAGES))),
    ("messages", _packed),
    ("messages", _lies),
)


def made(seed: int) -> tuple[str, bytes]:
    """Return what a seed makes, and as what it is read."""
    chance = Random(f"{seed}/try")
    name, make = chance.choice(_TRIES)
    return name, make(chance)


def peak() -> int:
    """Return the most memory that this program has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def broken(seed: int, readers: Mapping[str, Read] = READERS) -> str | None:
    """Try a seed; say what did not hold, and the one line that shows it again."""
    name, data = made(seed)
    before = peak()
    try:
        readers[name](data)
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        told = f"{type(error).__name__}: {error}"
    else:
        more = peak() - before
        if more <= MEMORY:
            return None
        told = f"took {more:,} bytes"
    return f"{name} of {len(data):,} bytes: {told}\n  again: python -m fuzz --seed {seed}"
