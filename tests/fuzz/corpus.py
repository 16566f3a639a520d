"""Short samples of what brokers really send: frames, bodies and messages, from which mutations start."""

import struct
import zlib

import lz4.frame
import zstandard

from rota.brokers.rocketmq.wire.frames import Frame, encode

TEXT = b'{"order":1,"lines":[{"sku":"a"},{"sku":"b"}]}' * 4


def a_frame(header: bytes, body: bytes, kind: int) -> bytes:
    """Write a frame around a header of either kind, with correct lengths."""
    return struct.pack(">IB", 4 + len(header) + len(body), kind) + len(header).to_bytes(3, "big") + header + body


def a_message(body: bytes, flags: int = 0, *, v2: bool = False) -> bytes:
    """Write a message around a body, with correct lengths and checksum; flags 0x10 and 0x20: addresses are IPv6."""
    topic = b"%RETRY%shop"
    properties = b"TAGS\x01red\x02UNIQ_KEY\x017F000001\x02RETRY_TOPIC\x01orders\x02"
    data = b"".join(
        (
            b"\xda\xa3\x20\xab" if v2 else b"\xda\xa3\x20\xa7",
            struct.pack(">IIiqqi", zlib.crc32(body) & 0x7FFFFFFF, 2, 0, 7, 4096, flags),
            struct.pack(">q", 1_763_712_000_000) + bytes(20 if flags & 0x10 else 8),
            struct.pack(">q", 1_763_712_000_005) + bytes(20 if flags & 0x20 else 8),
            struct.pack(">iqi", 1, 0, len(body)) + body,
            len(topic).to_bytes(2 if v2 else 1, "big") + topic,
            struct.pack(">h", len(properties)) + properties,
        )
    )
    return struct.pack(">i", 4 + len(data)) + data


def _item(body: bytes, properties: bytes) -> bytes:
    data = struct.pack(">iiii", 0, 0, 0, len(body)) + body + struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", 4 + len(data)) + data


JSON_HEADER = (
    b'{"code":0,"extFields":{"nextBeginOffset":"12","suggestWhichBrokerId":"0","gone":null},"flag":1,"language":'
    b'"JAVA","opaque":7,"remark":"FOUND \\"\\u00fc\\"","serializeTypeCurrentRPC":"JSON","version":479}'
)
BINARY_HEADER = (
    struct.pack(">hBhii", 0, 0, 479, 7, 1)
    + b"\x00\x00\x00\x05FOUND\x00\x00\x00\x1b\x00\x06offset\x00\x00\x00\x0212\x00\x01n\x00\x00\x00\x00"
    + b"\x00\x00\x00\x00\x00\x00"
)
_BATCH = _item(b"one", b"TAGS\x01blue\x02") + _item(b"", b"") + _item(TEXT, b"KEYS\x01k")


def _bomb(blocks: int) -> bytes:
    """Compress blocks of 128 KiB of zeros by ZSTD: the length in 4 bytes, then blocks that repeat one byte."""
    start = b"\x28\xb5\x2f\xfd\xa0" + (blocks * 2**17).to_bytes(4, "little")
    return start + b"\x02\x00\x10\x00" * (blocks - 1) + b"\x03\x00\x10\x00"  # the last


_STREAM = zstandard.ZstdCompressor().compressobj()

# A body of a message, and its flags: 0x001 compressed by LZ4 (0x100), ZSTD (0x200) or zlib (0x300, 0); 0x0C0 a batch.
PACKED: list[tuple[bytes, int]] = [
    (zlib.compress(TEXT), 0x001),
    (lz4.frame.compress(TEXT), 0x101),
    (zstandard.ZstdCompressor().compress(TEXT), 0x201),
    (_STREAM.compress(TEXT) + _STREAM.flush(), 0x201),
    (zlib.compress(TEXT), 0x301),
    (_BATCH, 0x0C0),
    (zlib.compress(_BATCH), 0x3C1),
    (_bomb(600), 0x201),  # over the limit, must not be unpacked
    (zlib.compress(bytes(2**20)), 0x301),
    (zlib.compress(_item(b"", b"") * 2000), 0x3C1),
]
MESSAGES: list[bytes] = [
    a_message(TEXT),
    a_message(TEXT, 0x30, v2=True),
    a_message(b"", 0x10) + a_message(b"", 0x20),
    b"".join(a_message(body, flags) for body, flags in PACKED[:8]),
    a_message(_bomb(256), 0x201) * 24,  # each has the largest size that is unpacked; together they would be 768 MiB
]
BODIES: list[bytes] = [
    (
        b'{"brokerDatas":[{"brokerAddrs":{0:"127.0.0.1:20911"},"brokerName":"broker-a","cluster":"Default"}],'
        b'"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
    ),
    (
        b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"127.0.0.1:20911",-1:"x"},"brokerName":"broker-a"}},'
        b'"clusterAddrTable":{"DefaultCluster":["broker-a"]}}'
    ),
    (
        b'{"consumeTps":0.5,"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t{\\"}:"}:{"brokerOffset":12,'
        b'"consumerOffset":10,"lastTimestamp":1763712000000,"pullOffset":11},{"brokerName":"b","queueId":0,'
        b'"topic":"%RETRY%g"}:{"brokerOffset":0,"consumerOffset":0}}}'
    ),
    (
        b'{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:{"lastUpdateTimestamp":5,"maxOffset":2,'
        b'"minOffset":1}},"topicPutTps":0.0}'
    ),
    b'{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:-1}}',
    b'{"lockOKMQSet":[{"brokerName":"b","queueId":2,"topic":"t"}]}',
    (
        b'{"connectionSet":[{"clientAddr":"127.0.0.1:1","clientId":"c1","language":"JAVA","version":479}],'
        b'"subscriptionTable":{"t":{"codeSet":[3552231],"subString":"tagA","tagsSet":["tagA"]}}}'
    ),
    b'{"messageQueueAssignments":[{"messageQueue":{"brokerName":"b","queueId":-1,"topic":"t"},"mode":"POP"}]}',
    (
        b'{"mqTable":{{"brokerName":"b","queueId":2,"topic":"t"}:{"commitOffset":1}},'
        b'"properties":{"messageModel":"CLUSTERING","consumeFromWhere":"CONSUME_FROM_LAST_OFFSET"},'
        b'"subscriptionSet":[{"expressionType":"TAG","subString":"a || b","topic":"t"}]}'
    ),
]
FRAMES: list[bytes] = [
    encode(Frame(code=40, opaque=3, flag=2, fields={"consumerGroup": "shop"})),
    a_frame(JSON_HEADER, MESSAGES[0], 0),
    a_frame(BINARY_HEADER, BODIES[2], 1),
    a_frame(JSON_HEADER, b"", 0) + a_frame(BINARY_HEADER, b"", 1),
]
