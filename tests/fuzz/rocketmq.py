"""Targets: data from RocketMQ's brokers, name servers and producers."""

from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

from fuzz.corpus import BINARY_HEADER, BODIES, FRAMES, JSON_HEADER, MESSAGES, PACKED, a_frame, a_message
from fuzz.mutations import mutate
from fuzz.target import Target, mutated
from rota.brokers.message import MEBIBYTE, MESSAGE_OVERHEAD_BYTES, Message
from rota.brokers.port import ADMIT_ALL
from rota.brokers.rocketmq.wire import fastjson, payloads
from rota.brokers.rocketmq.wire.frames import Decoder, Frame, MalformedFrameError
from rota.brokers.rocketmq.wire.messages import decode_admitted

ADMITTED_BYTES = 16 * MEBIBYTE  # of one input's messages
MOST_PROPERTIES_BYTES = 7 * 2**20  # memory of 65,535 bytes of properties of a batch, and as many of its message
ITEM_OVERHEAD_BYTES = 22  # of a message in a batch: its length, three fields, and the lengths of body and properties
BODY_TYPES: tuple[type[Any], ...] = (
    *(
        payloads.TopicRoute,
        payloads.ClusterInfo,
        payloads.ConsumeStats,
        payloads.TopicStats,
        payloads.ResetOffsets,
        payloads.LockedQueues,
        payloads.ConsumerInfo,
    ),
    *(
        payloads.ConsumerConnection,
        payloads.TopicConfig,
        payloads.GroupConfig,
        payloads.AssignmentResponse,
        dict,
        object,
    ),
)


def check_frames(data: bytes) -> None:
    """Decode frames in one piece and in two; both must give the same."""
    half = len(data) // 2
    assert _decoded([data]) == _decoded([data[:half], data[half:]]), "frames depend on how they are split"


def _decoded(pieces: Sequence[bytes]) -> list[Frame] | None:
    decoder = Decoder()
    frames: list[Frame] = []
    with suppress(MalformedFrameError):
        for piece in pieces:
            frames += decoder.feed(piece)
        assert all(isinstance(value, str) for frame in frames for value in frame.fields.values())
        return frames
    return None


def check_bodies(data: bytes) -> None:
    """Read a body as every type, and its keys as queues."""
    for body_type in BODY_TYPES:
        with suppress(MalformedFrameError):
            body = fastjson.decode_json(data, body_type)
            assert isinstance(body, body_type), f"{type(body)} is no {body_type}"
            for key in getattr(body, "offset_table", {}):
                fastjson.parse_queue(key)


class Limited:
    """Admits messages up to a limit."""

    max_body_bytes = ADMIT_ALL.max_body_bytes

    def __init__(self) -> None:
        self.free_bytes = ADMITTED_BYTES

    def admit(self, memory_bytes: int) -> bool:
        """Whether a message fits."""
        overhead_bytes = MESSAGE_OVERHEAD_BYTES + MOST_PROPERTIES_BYTES
        assert memory_bytes <= self.max_body_bytes + overhead_bytes, "a body is larger than the limit"
        self.free_bytes -= memory_bytes
        return self.free_bytes >= 0


def check_messages(data: bytes) -> None:
    """Decode messages within a limit of memory."""
    with suppress(MalformedFrameError):
        messages, _ = decode_admitted(data, "broker-a", 0, Limited())
        assert sum(message.memory_bytes for message in messages) <= ADMITTED_BYTES, "more than was admitted"
        for message in messages:
            assert _is_complete(message), f"no message: {str(message)[:200]}"


def _is_complete(message: Message) -> bool:
    texts = (message.topic, message.tag, message.id, *message.properties.values())
    return len(message.body) <= ADMIT_ALL.max_body_bytes and all(isinstance(text, str) for text in texts)


# A changed header or compressed body gets correct surroundings, so that the parser reaches it.


def _header(chance: Random) -> bytes:
    kind, header = chance.choice(((0, JSON_HEADER), (1, BINARY_HEADER)))
    return a_frame(mutate(chance, header, FRAMES), b"body", kind)


def _compressed(chance: Random) -> bytes:
    body, flags = chance.choice(PACKED)
    return a_message(mutate(chance, body, MESSAGES), flags) + MESSAGES[0]


def _false_length(chance: Random) -> bytes:
    """Make a batch of one message with a length that leads forwards, nowhere or backwards."""
    length = chance.randint(-60, 20)  # of the body
    more = chance.randint(0, 40)
    item_bytes = ITEM_OVERHEAD_BYTES + length
    item = item_bytes.to_bytes(4, "big", signed=True) + bytes(12) + length.to_bytes(4, "big", signed=True)
    return a_message(item + bytes(more), 0xC0) + MESSAGES[0]


TARGETS = (
    Target("frames", check_frames, (mutated(FRAMES), _header)),
    Target("bodies", check_bodies, (mutated(BODIES),)),
    Target("messages", check_messages, (mutated(MESSAGES), _compressed, _false_length)),
)
