"""Messages and their bytes: both layouts, all addresses, compressed bodies, batches, and damaged data."""

import string
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rota.brokers.message import MEBIBYTE, MESSAGE_OVERHEAD_BYTES, Message
from rota.brokers.rocketmq.wire import messages as messages_module
from rota.brokers.rocketmq.wire.frames import MalformedFrameError
from rota.brokers.rocketmq.wire.messages import (
    MAX_BATCH_MESSAGES,
    ZSTD_WINDOW_BYTES,
    decode,
    decode_admitted,
    java_hash,
    unpack_body,
    write_properties,
)
from rota.model import Queue

QUEUE = Queue("orders", "broker-a", 2)

V1 = (
    b"\x00\x00\x00\x6f\xda\xa3\x20\xa7\x36\x10\xa6\x86"  # length 111, layout, checksum of "hello"
    b"\x00\x00\x00\x02\x00\x00\x00\x00"  # queue 2, no flag
    b"\x00\x00\x00\x00\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x10\x00"  # offset 7, commit log offset 4096
    b"\x00\x00\x00\x00"  # system flag
    b"\x00\x00\x01\x9a\xa5\x6d\x60\x00\x7f\x00\x00\x01\x00\x00\x1f\x90"  # born 1763712000000, 127.0.0.1:8080
    b"\x00\x00\x01\x9a\xa5\x6d\x60\x05\x7f\x00\x00\x01\x00\x00\x2a\x9f"  # stored 5 ms later, 127.0.0.1:10911
    b"\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00"  # tried once, no transaction
    b"\x00\x00\x00\x05hello"
    b"\x06orders"
    b"\x00\x09TAGS\x01red\x02"
)
V2 = (
    b"\x00\x00\x00\x70\xda\xa3\x20\xab"
    + V1[8:88]
    + b"\x00\x00\x00\x05hello"[4:]
    + b"\x00\x06orders"  # in this layout the length of a topic's name has 16 bits
    + b"\x00\x09TAGS\x01red\x02"
)
HELLO = Message(QUEUE, 7, b"hello", {"TAGS": "red"}, 1, 1_763_712_000_000, 1_763_712_000_005, 4096)


def checksum(body: bytes) -> int:
    return zlib.crc32(body) & 0x7FFFFFFF


def encode_message(
    body: bytes = b"hello",
    properties: bytes = b"TAGS\x01red\x02",
    *,
    topic: bytes = b"orders",
    queue: int = 2,
    offset: int = 7,
    flags: int = 0,
    attempt: int = 1,
    v2: bool = False,
) -> bytes:
    """Encode a message as a broker does."""
    fields = [
        struct.pack(">IIiqqi", checksum(body), queue, 0, offset, 4096, flags),
        struct.pack(">q", 1_763_712_000_000) + bytes(16 if flags & 0x10 else 4) + struct.pack(">i", 8080),
        struct.pack(">q", 1_763_712_000_005) + bytes(16 if flags & 0x20 else 4) + struct.pack(">i", 10911),
        struct.pack(">iqi", attempt, 0, len(body)) + body,
        len(topic).to_bytes(2 if v2 else 1, "big") + topic,
        struct.pack(">h", len(properties)) + properties,
    ]
    data = (b"\xda\xa3\x20\xab" if v2 else b"\xda\xa3\x20\xa7") + b"".join(fields)
    return struct.pack(">i", 4 + len(data)) + data


def encode_batch_item(body: bytes, properties: bytes = b"") -> bytes:
    """Encode a message of a batch."""
    data = struct.pack(">iiii", 0, 0, 0, len(body)) + body + struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", 4 + len(data)) + data


def read(data: bytes) -> list[Message]:
    return decode(data, "broker-a")


def decode_one(data: bytes) -> Message:
    (message,) = read(data)
    return message


# Layouts.


@pytest.mark.parametrize("data", [V1, V2], ids=["a topic's length in 8 bits", "in 16 bits"])
def test_message_is_decoded_in_both_layouts(data: bytes) -> None:
    assert read(data) == [HELLO]


def test_message_writer_of_these_tests_matches_the_sample_bytes() -> None:
    zeros = V1.replace(b"\x7f\x00\x00\x01", bytes(4))
    assert encode_message() == zeros
    assert encode_message(v2=True) == V2.replace(b"\x7f\x00\x00\x01", bytes(4))


@pytest.mark.parametrize("flags", [0, 0x10, 0x20, 0x30], ids=["4 and 4", "6 and 4", "4 and 6", "6 and 6"])
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_message_addresses_of_both_hosts_have_4_or_16_bytes(flags: int, v2: bool) -> None:  # noqa: FBT001 - a case
    assert read(encode_message(flags=flags, v2=v2)) == [HELLO]


def test_message_decoder_reads_consecutive_messages() -> None:
    data = encode_message(offset=7) + encode_message(offset=8, flags=0x30, v2=True) + encode_message(b"", offset=9)
    assert [(message.offset, message.body) for message in read(data)] == [(7, b"hello"), (8, b"hello"), (9, b"")]


def test_message_decoder_returns_nothing_for_empty_data() -> None:
    assert read(b"") == []


def test_message_with_a_long_topic_is_decoded() -> None:
    topic = "%RETRY%" + "g" * 300
    assert decode_one(encode_message(topic=topic.encode(), v2=True)).queue == Queue(topic, "broker-a", 2)
    assert decode_one(encode_message(topic=b"t" * 255)).queue.topic == "t" * 255


def test_message_from_the_retry_topic_has_its_original_topic() -> None:
    message = decode_one(encode_message(topic=b"%RETRY%shop", properties=b"RETRY_TOPIC\x01orders\x02"))
    assert (message.queue.topic, message.topic) == ("%RETRY%shop", "orders")


# Properties.


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"", {}, id="none"),
        pytest.param(b"a\x01b\x02c\x01d\x02", {"a": "b", "c": "d"}, id="two"),
        pytest.param(b"a\x01b\x02c\x01d", {"a": "b", "c": "d"}, id="without the last separator"),
        pytest.param(b"a\x01\x02b\x01c\x02", {"a": "", "b": "c"}, id="an empty value"),
        pytest.param(b"a\x01b\x01c\x02d\x01e\x02", {"a": "b\x01c", "d": "e"}, id="a separator in a value"),
        pytest.param(b"a\x02b\x01c\x02", {"b": "c"}, id="a name alone"),
        pytest.param(b"\x02\x02a\x01b\x02\x02", {"a": "b"}, id="empty pairs"),
        pytest.param(b"a\x01b\x02a\x01c\x02", {"a": "c"}, id="twice the same name"),
        pytest.param('ü "{\n}:=,\x01日本 🚀\x00\x02'.encode(), {'ü "{\n}:=,': "日本 🚀\x00"}, id="odd"),
        pytest.param(b"a\x01\xff\x02b\x01c\x02", {"a": "\ufffd", "b": "c"}, id="no UTF-8"),
    ],
)
def test_message_properties_are_decoded(data: bytes, expected: dict[str, str]) -> None:
    assert decode_one(encode_message(properties=data)).properties == expected


# Compressed bodies.

BODY = b'{"order":1}' * 1000


def compress_stream(body: bytes) -> bytes:
    """Compress as Java does, in a stream, so that the frame does not declare the body's length."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(body) + compressor.flush()


CODECS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "ZLIB of old producers": (0x000, zlib.compress),
    "LZ4": (0x100, lz4.frame.compress),
    "ZSTD": (0x200, zstandard.ZstdCompressor().compress),
    "ZSTD from a stream": (0x200, compress_stream),
    "ZLIB": (0x300, zlib.compress),
}
EACH_CODEC = pytest.mark.parametrize(("kind", "compress"), CODECS.values(), ids=CODECS)


@EACH_CODEC
def test_compression_decompresses_a_body_of_each_codec(kind: int, compress: Callable[[bytes], bytes]) -> None:
    message = decode_one(encode_message(compress(BODY), flags=0x1 | kind))
    assert (message.body, message.body_error) == (BODY, "")


@EACH_CODEC
def test_compression_leaves_a_body_without_the_compressed_flag_unchanged(
    kind: int, compress: Callable[[bytes], bytes]
) -> None:
    assert decode_one(encode_message(compress(BODY), flags=kind)).body == compress(BODY)


@EACH_CODEC
def test_compression_error_marks_one_message_damaged_and_decodes_the_next(
    kind: int, compress: Callable[[bytes], bytes]
) -> None:
    compressed = compress(BODY)
    for broken in (b"", b"hello", compressed[:-1], compressed[: len(compressed) // 2], b"\x00" + compressed):
        message, next_message = read(encode_message(broken, flags=0x1 | kind) + encode_message())
        assert message.body == broken
        assert message.body_error.startswith("it cannot be decompressed: ")
        assert next_message == HELLO


LIMIT = 4 * MEBIBYTE
TOO_LARGE = "it exceeds 4 MiB when decompressed, the limit in spec.delivery.buffer.mebibytesPerMessage"


@EACH_CODEC
@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT])
def test_compression_accepts_a_body_up_to_the_limit(kind: int, compress: Callable[[bytes], bytes], size: int) -> None:
    body, damage = unpack_body(compress(bytes(size)), kind >> 8, LIMIT)
    assert (len(body), damage) == (size, "")


@EACH_CODEC
@pytest.mark.parametrize("size", [LIMIT + 1, 31 * MEBIBYTE])
def test_compression_leaves_a_body_over_the_limit_compressed(
    kind: int, compress: Callable[[bytes], bytes], size: int
) -> None:
    bomb = compress(bytes(size))
    assert unpack_body(bomb, kind >> 8, LIMIT) == (bomb, TOO_LARGE)


@EACH_CODEC
def test_compression_distinguishes_a_truncated_body_from_one_over_the_limit(
    kind: int, compress: Callable[[bytes], bytes]
) -> None:
    compressed = compress(BODY)[:-1]
    body, damage = unpack_body(compressed, kind >> 8, LIMIT)
    assert body == compressed
    assert damage.startswith("it cannot be decompressed: ")


@EACH_CODEC
def test_compression_rejects_a_body_with_data_after_its_first_frame(
    kind: int, compress: Callable[[bytes], bytes]
) -> None:
    for trailing in (compress(b"more"), b"\x00"):
        compressed = compress(BODY) + trailing
        body, damage = unpack_body(compressed, kind >> 8, LIMIT)
        assert body == compressed
        assert damage.startswith("it cannot be decompressed: ")


def test_compression_error_without_a_message_is_named_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_body: bytes, _limit: int) -> bytes:
        raise MemoryError

    monkeypatch.setitem(messages_module._UNPACKERS, 3, fail)
    assert unpack_body(b"hello", 3, LIMIT) == (b"hello", "it cannot be decompressed: MemoryError")


@EACH_CODEC
def test_compression_bomb_takes_at_most_three_times_the_limit_in_memory(
    kind: int, compress: Callable[[bytes], bytes]
) -> None:
    bomb = compress(bytes(64 * MEBIBYTE))
    assert 0 <= peak_memory_of(lambda: unpack_body(bomb, kind >> 8, LIMIT)) <= 3 * LIMIT


def peak_memory_of(run: Callable[[], object]) -> int:
    """Return the growth of the process at its peak, which includes the memory of libraries."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_bytes = memory_status("VmRSS")
    run()
    return memory_status("VmHWM") - before_bytes


def memory_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_compression_error_states_the_limit_in_force() -> None:
    limits = [3 * MEBIBYTE, 7 * MEBIBYTE // 2]
    errors = [unpack_body(zlib.compress(bytes(8 * MEBIBYTE)), 3, limit)[1] for limit in limits]
    assert [error.split(",")[0] for error in errors] == [
        "it exceeds 3 MiB when decompressed",
        "it exceeds 3.5 MiB when decompressed",
    ]


def test_compression_rejects_a_zstd_frame_that_declares_more_than_the_limit() -> None:
    frame = zstandard.ZstdCompressor().compress(b"a")
    assert frame[4:6] == b"\x20\x01"  # a length in one byte: 1
    forged = frame[:4] + b"\xe0" + (2**50).to_bytes(8, "little") + frame[6:]
    assert unpack_body(forged, 2, LIMIT) == (forged, TOO_LARGE)


def a_zstd_window(window_log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(BODY) + compressor.flush()


def test_compression_accepts_a_zstd_window_of_8_mib_and_none_larger() -> None:
    largest = a_zstd_window(23)
    too_large = a_zstd_window(24)
    assert zstandard.get_frame_parameters(largest).window_size == ZSTD_WINDOW_BYTES
    assert unpack_body(largest, 2, LIMIT) == (BODY, "")
    body, damage = unpack_body(too_large, 2, LIMIT)
    assert body == too_large
    assert damage.startswith("it cannot be decompressed: ")
    assert "requires too much memory" in damage


@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_compression_of_an_unknown_codec_marks_the_message_damaged(kind: int) -> None:
    message = decode_one(encode_message(b"hello", flags=0x1 | kind << 8))
    assert message.body_error == f"it has the unknown compression type {kind}"
    assert message.body == b"hello"


def test_message_with_a_wrong_checksum_is_damaged() -> None:
    message, next_message = read(V1.replace(b"hello", b"hellp") + V1)
    assert (message.body, message.body_error) == (b"hellp", "its checksum does not match")
    assert next_message == HELLO


def test_compression_skips_a_body_with_a_wrong_checksum() -> None:
    message = decode_one(encode_message(zlib.compress(b"hello"), flags=0x1).replace(b"x\x9c", b"x\x9d"))
    assert message.body_error == "its checksum does not match"


# Batches.


def summaries(messages: Sequence[Message]) -> list[tuple[int, bytes, Mapping[str, str]]]:
    return [(message.offset, message.body, dict(message.properties)) for message in messages]


def test_batch_is_split_into_messages() -> None:
    items = (
        encode_batch_item(b"one", b"TAGS\x01blue\x02")
        + encode_batch_item(b"", b"KEYS\x01k\x02TAGS\x01green")
        + encode_batch_item(b"three")
    )
    messages = read(encode_message(items, b"TAGS\x01red\x02A\x01b\x02", flags=0xC0) + encode_message(offset=10))
    assert summaries(messages) == [
        (7, b"one", {"TAGS": "blue", "A": "b"}),
        (8, b"", {"TAGS": "green", "A": "b", "KEYS": "k"}),
        (9, b"three", {"TAGS": "red", "A": "b"}),
        (10, b"hello", {"TAGS": "red"}),
    ]
    assert messages[2].tag == "red"
    assert {
        (message.queue, message.reconsume_times, message.born_ms, message.stored_ms, message.commit_log_offset)
        for message in messages
    } == {(QUEUE, 1, 1_763_712_000_000, 1_763_712_000_005, 4096)}


def test_batch_that_is_compressed_is_split_into_messages() -> None:
    messages = read(
        encode_message(zlib.compress(encode_batch_item(b"one") + encode_batch_item(b"two")), b"", flags=0xC1)
    )
    assert summaries(messages) == [(7, b"one", {}), (8, b"two", {})]


@pytest.mark.parametrize("flags", [0, 0x40, 0x80])
def test_batch_requires_both_flag_bits(flags: int) -> None:
    assert [message.body for message in read(encode_message(encode_batch_item(b"one"), flags=flags))] == [
        encode_batch_item(b"one")
    ]


BAD_BATCHES = {
    "no batch": b"hello",
    "cut off": encode_batch_item(b"one") + encode_batch_item(b"two", b"A\x01b\x02")[:-1],
    "cut off in its numbers": encode_batch_item(b"one")[:19],
    "an item of length 0": bytes(4) + encode_batch_item(b"one")[4:],
    "an item one too long": encode_batch_item(b"one")[:3] + b"\x1a" + encode_batch_item(b"one")[4:],
    "an item that leads back to itself": struct.pack(">iiiii", 0, 0, 0, 0, -22) + bytes(22),
    "an item that leads back to the first": encode_batch_item(b"")
    + struct.pack(">iiiii", -22, 0, 0, 0, -44)
    + bytes(44),
    "a body of a negative length": struct.pack(">iiiii", 21, 0, 0, 0, -1) + b"\x00\x00",
    "properties of a negative length": struct.pack(">iiiii", 21, 0, 0, 0, 0) + b"\xff\xff",
    "properties over the batch": struct.pack(">iiiii", 27, 0, 0, 0, 0) + b"\x00\x05",
}


@pytest.mark.parametrize("items", BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_batch_that_is_malformed_is_one_damaged_message_and_the_next_is_decoded(items: bytes) -> None:
    message, next_message = read(encode_message(items, flags=0xC0) + encode_message())
    assert message.body == items
    assert message.body_error.startswith("the batch cannot be split: ")
    assert next_message == HELLO


def test_batch_has_at_most_32767_messages() -> None:
    assert len(read(encode_message(encode_batch_item(b"") * MAX_BATCH_MESSAGES, flags=0xC0))) == MAX_BATCH_MESSAGES
    message = decode_one(encode_message(zlib.compress(encode_batch_item(b"") * (MAX_BATCH_MESSAGES + 1)), flags=0xC1))
    assert message.body_error == "the batch cannot be split: it has more than 32,767 messages"


def test_batch_with_a_wrong_checksum_is_not_split() -> None:
    message = decode_one(encode_message(encode_batch_item(b"one"), flags=0xC0).replace(b"one", b"two"))
    assert (message.body, message.body_error) == (encode_batch_item(b"two"), "its checksum does not match")


# Admission of a pull's messages.


class LimitedAdmission:
    """Admits messages as long as they fit into the free bytes."""

    def __init__(self, free_bytes: int, max_body_bytes: int = LIMIT) -> None:
        self.free_bytes = free_bytes
        self.max_body_bytes = max_body_bytes
        self.requested_bytes: list[int] = []

    def admit(self, memory_bytes: int) -> bool:
        self.requested_bytes.append(memory_bytes)
        self.free_bytes -= memory_bytes
        return self.free_bytes >= 0


def a_compressed_message(size: int, offset: int) -> bytes:
    return encode_message(zstandard.compress(bytes(size)), flags=0x201, offset=offset)


def admitted_offsets(
    data: Sequence[bytes], admission: LimitedAdmission, start: int = 0
) -> tuple[list[int], int | None]:
    """Return the offsets of the admitted messages, and of the first refused one."""
    messages, refused_offset = decode_admitted(b"".join(data), "broker-a", start, admission)
    return [message.offset for message in messages], refused_offset


def test_memory_admission_counts_each_message_with_its_decompressed_size() -> None:
    admission = LimitedAdmission(10 * MEBIBYTE)
    data = [
        a_compressed_message(LIMIT, 7),
        a_compressed_message(LIMIT + 1, 8),
        encode_message(bytes(1000), offset=9),
        V1,
    ]
    assert admitted_offsets(data, admission) == ([7, 8, 9, 7], None)
    compressed_bytes = len(zstandard.compress(bytes(LIMIT + 1)))
    assert admission.requested_bytes == [size + MESSAGE_OVERHEAD_BYTES for size in (LIMIT, compressed_bytes, 1000, 5)]


@pytest.mark.parametrize("admitted_count", range(4))
def test_memory_admission_refusal_ends_the_pull_before_the_message(admitted_count: int) -> None:
    data = [
        a_compressed_message(1000, 7),
        encode_message(bytes(1000), offset=8),
        a_compressed_message(1000, 9),
        encode_message(bytes(1000), offset=10),
    ]
    cost = 1000 + MESSAGE_OVERHEAD_BYTES
    for admission in (LimitedAdmission(admitted_count * cost), LimitedAdmission((admitted_count + 1) * cost - 1)):
        assert admitted_offsets(data, admission) == ([7, 8, 9, 10][:admitted_count], 7 + admitted_count)
        assert len(admission.requested_bytes) == admitted_count + 1  # no later message was read


def test_memory_admission_splits_a_batch_and_the_next_pull_resumes_within_it() -> None:
    batch = encode_message(
        zlib.compress(b"".join(encode_batch_item(b"%d" % number) for number in range(5))), flags=0x3C1, offset=7
    )
    cost = 1 + MESSAGE_OVERHEAD_BYTES
    data = [batch, encode_message(b"x", offset=12)]
    assert admitted_offsets(data, LimitedAdmission(3 * cost)) == ([7, 8, 9], 10)
    assert admitted_offsets(data, LimitedAdmission(2 * cost), 10) == ([10, 11], 12)
    admission = LimitedAdmission(3 * cost)
    assert admitted_offsets(data, admission, 10) == ([10, 11, 12], None)
    assert admission.requested_bytes == [cost] * 3  # messages before the start offset take no memory


def test_memory_admission_of_a_batch_over_the_limit_counts_its_compressed_body() -> None:
    compressed = zlib.compress(encode_batch_item(bytes(1000)) * 5000)
    admission = LimitedAdmission(MEBIBYTE)
    [message], refused_offset = decode_admitted(encode_message(compressed, flags=0x3C1), "broker-a", 0, admission)
    assert (message.body, message.body_error, refused_offset) == (compressed, TOO_LARGE, None)
    assert admission.requested_bytes == [len(compressed) + MESSAGE_OVERHEAD_BYTES]


NAMES = ["".join(pair) for pair in product(string.ascii_letters, repeat=2)]


def properties_of(number: int, value: str = "v") -> bytes:
    return "".join(f"{name}\x01{value}\x02" for name in NAMES[:number]).encode()


@pytest.mark.parametrize(
    ("properties", "properties_bytes"),
    [
        (properties_of(8, "v" * 58), 0),  # an ordinary message: 496 bytes of text
        (properties_of(9), 176),
        (properties_of(2704), 2696 * 176 + 2704 * 5 - 512),
        (b"KEYS\x01" + b"k" * 30_000 + b"\x02", 30_006 - 512),
        (f"KEYS\x01{'k' * 30_000}\U0001f600\x02".encode(), 4 * 30_007 - 512),  # one character widens all
        (b"a\x01b\x02" * 1000, 4000 - 512),  # one property
    ],
)
def test_memory_admission_counts_message_properties(properties: bytes, properties_bytes: int) -> None:
    admission = LimitedAdmission(10 * MEBIBYTE)
    [message], _ = decode_admitted(encode_message(b"x", properties), "broker-a", 0, admission)
    assert message.memory_bytes == 1 + properties_bytes + MESSAGE_OVERHEAD_BYTES
    assert admission.requested_bytes == [message.memory_bytes]


def test_memory_admission_counts_own_and_common_properties_in_a_batch() -> None:
    admission = LimitedAdmission(10 * MEBIBYTE)
    items = (
        encode_batch_item(b"x", properties_of(2000))
        + encode_batch_item(b"y")
        + encode_batch_item(b"z", properties_of(4))
    )
    decode_admitted(encode_message(items, properties_of(7), flags=0xC0), "broker-a", 0, admission)
    text_bytes = 5 * 2007 - 512
    properties_bytes = [1999 * 176 + text_bytes, 0, 3 * 176]
    assert admission.requested_bytes == [1 + size + MESSAGE_OVERHEAD_BYTES for size in properties_bytes]


def test_memory_of_many_properties_does_not_exceed_the_count() -> None:
    data = [encode_message(b"x", properties_of(2704, f"{number:03}"), offset=number) for number in range(20)]
    tracemalloc.start()
    try:
        messages = read(b"".join(data))
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted_bytes = sum(message.memory_bytes for message in messages)
    assert counted_bytes / 2 < taken_bytes < counted_bytes


def test_batch_read_from_an_inner_offset_parses_no_earlier_properties() -> None:
    """The parsed properties of the first message would take far more memory than the whole batch."""
    many_properties = properties_of(2704, "000")
    items = [encode_batch_item(b"x", many_properties), encode_batch_item(b"x"), encode_batch_item(b"x")]
    batch = encode_message(b"".join(items), b"", flags=0xC0, offset=7)
    tracemalloc.start()
    try:
        messages, _ = decode_admitted(batch, "broker-a", 8)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [message.offset for message in messages] == [8, 9]
    assert peak_bytes < 3 * len(batch)


def test_memory_admission_without_a_limit_accepts_all_messages() -> None:
    assert len(read(a_compressed_message(LIMIT, 7) + a_compressed_message(LIMIT, 8))) == 2


# A malformed message makes the whole pull unreadable.


@pytest.mark.parametrize(
    "data", [V1, V2, encode_message(flags=0x30), encode_message(encode_batch_item(b"one"), flags=0xC0)]
)
def test_message_truncated_at_any_byte_is_malformed(data: bytes) -> None:
    for end in range(1, len(data)):
        for previous in (b"", V1):
            with pytest.raises(MalformedFrameError, match="A message at byte "):
                read(previous + data[:end])


@pytest.mark.parametrize("magic", [b"\xda\xa3\x20\xa8", b"\xcb\xd4\x31\x94", bytes(4), b"\xff\xff\xff\xff"])
def test_message_of_an_unknown_layout_is_malformed(magic: bytes) -> None:
    with pytest.raises(
        MalformedFrameError, match=f"A message at byte 111 has the unknown magic number 0x0*{magic.hex().lstrip('0')}"
    ):
        read(V1 + V1[:4] + magic + V1[8:])


@pytest.mark.parametrize("value", [0, 1, 110, 112, 2**31 - 1, -1, -111, -(2**31)])
def test_message_of_a_wrong_total_length_is_malformed(value: int) -> None:
    with pytest.raises(MalformedFrameError, match="A message at byte 0 "):
        read(struct.pack(">i", value) + V1[4:] + bytes(8))


@pytest.mark.parametrize("value", [0, 4, 6, 2**31 - 1, -1, -88, -(2**31)])
def test_message_of_a_wrong_body_length_is_malformed(value: int) -> None:
    with pytest.raises(MalformedFrameError, match="A message at byte 0 "):
        read(V1[:84] + struct.pack(">i", value) + V1[88:])


@pytest.mark.parametrize(
    ("data", "position"),
    [(V1, V1.index(b"\x06orders")), (V1, V1.index(b"\x09TAGS")), (V2, V2.index(b"\x06orders"))],
    ids=["topic in 8 bits", "properties", "topic in 16 bits"],
)
@pytest.mark.parametrize("value", [0, 1, 5, 127, 128, 255])
def test_message_of_a_wrong_topic_or_properties_length_is_malformed(data: bytes, position: int, value: int) -> None:
    with pytest.raises(MalformedFrameError, match="A message at byte 0 "):
        read(data[:position] + bytes([value]) + data[position + 1 :])


def test_message_topic_that_is_not_utf_8_is_malformed() -> None:
    with pytest.raises(MalformedFrameError, match="A message at byte 0 of 111 cannot be decoded: 'utf-8' codec"):
        read(encode_message(topic=b"order\xff"))


# Java's hash of a text.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("tagA", 3_552_231),
        ("TagA", 2_598_919),
        ("polygenelubricants", -(2**31)),
        ("ü", 252),
        ("🚀", 1_773_027),  # two units to Java: 31 * 0xD83D + 0xDE80
    ],
)
def test_filter_tag_hash_matches_java(text: str, expected: int) -> None:
    assert java_hash(text) == expected


# Properties of the whole codec.

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), max_size=10)
TOPICS = st.text(st.sampled_from("%|aZ09_-"), min_size=1, max_size=127)
BODIES = st.binary(max_size=60)


@given(
    topic=TOPICS,
    properties=st.dictionaries(WORDS, WORDS, max_size=5),
    body=BODIES,
    codec=st.sampled_from([(0, bytes), *((1 | kind, compress) for kind, compress in CODECS.values())]),
    hosts=st.sampled_from([0, 0x10, 0x20, 0x30]),
    numbers=st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)),
    v2=st.booleans(),
)
def test_message_round_trips(
    *,
    topic: str,
    properties: dict[str, str],
    body: bytes,
    codec: tuple[int, Callable[[bytes], bytes]],
    hosts: int,
    numbers: tuple[int, int, int],
    v2: bool,
) -> None:
    flags = codec[0] | hosts
    compressed = codec[1](body)
    queue, offset, attempt = numbers
    data = encode_message(
        compressed,
        write_properties(properties).encode(),
        topic=topic.encode(),
        queue=queue,
        offset=offset,
        flags=flags,
        attempt=attempt,
        v2=v2,
    )
    times = (1_763_712_000_000, 1_763_712_000_005, 4096)
    expected_queue = Queue(topic, "broker-a", queue)
    assert read(data * 2) == [Message(expected_queue, offset, body, properties, attempt, *times)] * 2


@given(st.lists(st.tuples(BODIES, st.dictionaries(WORDS, WORDS, max_size=3)), min_size=1, max_size=5))
def test_batch_round_trips(items: list[tuple[bytes, dict[str, str]]]) -> None:
    data = b"".join(encode_batch_item(body, write_properties(properties).encode()) for body, properties in items)
    assert summaries(read(encode_message(data, b"", flags=0xC0))) == [
        (7 + index, *content) for index, content in enumerate(items)
    ]
