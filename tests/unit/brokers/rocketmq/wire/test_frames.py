"""Frames and their bytes: both kinds of headers, any splitting, and invalid data."""

import struct
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.brokers.rocketmq.wire.frames import MAX_FRAME_BYTES, Decoder, Frame, MalformedFrameError, encode

LANGUAGES = [
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS"),
    *("RUST", "NODE_JS"),
]

JSON = (
    b'{"code":0,"extFields":{"offset":"12","gone":null},"flag":1,"language":"JAVA","opaque":7,'
    b'"remark":"a \\"b\\"","serializeTypeCurrentRPC":"JSON","version":479}'
)
BINARY = (
    b"\x00\x0b\x00\x01\xdf\x00\x00\x00\x07\x00\x00\x00\x01"  # code 11, JAVA, version 479, opaque 7, flag 1
    b"\x00\x00\x00\x03a b"
    b"\x00\x00\x00\x1b"
    b"\x00\x06offset\x00\x00\x00\x0212"
    b"\x00\x01n\x00\x00\x00\x00"
    b"\x00\x00"  # an empty name
    b"\x00\x00\x00\x00"
)


def a_frame(header: bytes, body: bytes = b"", kind: int = 0) -> bytes:
    return struct.pack(">IB", 4 + len(header) + len(body), kind) + len(header).to_bytes(3, "big") + header + body


def a_binary_header(*, language: int = 0, remark: bytes = b"", block: bytes = b"") -> bytes:
    head = struct.pack(">hBhii", 0, language, 479, 7, 1)
    return head + struct.pack(">i", len(remark)) + remark + struct.pack(">i", len(block)) + block


def read(data: bytes) -> list[Frame]:
    return list(Decoder().feed(data))


# Headers.


def test_frame_with_a_json_header_is_decoded() -> None:
    (frame,) = read(b"\x00\x00\x00\xa2\x00\x00\x00\x9a" + JSON + b"body")
    assert frame == Frame(
        code=0,
        opaque=7,
        flag=1,
        fields={"offset": "12"},  # a null field is omitted
        remark='a "b"',
        body=b"body",
        language="JAVA",
        version=479,
    )
    assert frame.is_response
    assert not frame.is_one_way


def test_frame_with_a_binary_header_is_decoded() -> None:
    (frame,) = read(b"\x00\x00\x00\x3b\x01\x00\x00\x33" + BINARY + b"body")
    assert frame == Frame(
        code=11,
        opaque=7,
        flag=1,
        fields={"offset": "12", "n": "", "": ""},  # Java writes no bytes for null, too
        remark="a b",
        body=b"body",
        language="JAVA",
        version=479,
    )


@pytest.mark.parametrize(
    "header",
    [
        b'{"code":0,"opaque":7}',
        b'{"code":0,"opaque":7,"extFields":null,"remark":null}',
        b' {"opaque" : 7, "extFields": {}, "code":0, "later":{"and":["deeper",1.5,true]}}',
    ],
    ids=["omitted", "null", "empty, and an unknown field"],
)
def test_frame_json_header_may_omit_optional_fields(header: bytes) -> None:
    assert read(a_frame(header)) == [Frame(code=0, opaque=7, language="", version=0)]


@pytest.mark.parametrize(("number", "language"), [*enumerate(LANGUAGES)])
def test_frame_decodes_every_language_number(number: int, language: str) -> None:
    (frame,) = read(a_frame(a_binary_header(language=number), kind=1))
    assert frame.language == language


@pytest.mark.parametrize("number", [14, 127, 128, 255])
def test_frame_decodes_an_unknown_language_number_as_other(number: int) -> None:
    (frame,) = read(a_frame(a_binary_header(language=number), kind=1))
    assert frame.language == "OTHER"


def test_frame_json_header_may_name_any_language() -> None:
    (frame,) = read(a_frame(b'{"code":0,"opaque":1,"language":"COBOL"}'))
    assert frame.language == "COBOL"


def test_frame_binary_header_ignores_bytes_after_its_fields() -> None:
    (frame,) = read(a_frame(a_binary_header(remark="ü".encode()) + b"later", b"body", kind=1))
    assert (frame.remark, frame.body) == ("ü", b"body")


def test_frame_of_a_request_is_encoded_with_a_json_header() -> None:
    frame = Frame(code=34, opaque=7, fields={"k": "v"}, body=b"{}")
    header = (
        b'{"code":34,"opaque":7,"language":"PYTHON","version":479,"extFields":{"k":"v"},'
        b'"serializeTypeCurrentRPC":"JSON"}'
    )
    assert encode(frame) == b"\x00\x00\x00\x75\x00\x00\x00\x6f" + header + b"{}"


def test_frame_reply_has_the_opaque_of_its_request() -> None:
    request = Frame(code=307, opaque=9, fields={"a": "b"}, body=b"request", remark="request")
    response = request.make_response(0, b"{}", "done")
    assert response == Frame(code=0, opaque=9, flag=1, body=b"{}", remark="done")
    assert response.is_response


def test_frame_of_a_one_way_request_is_flagged() -> None:
    request = Frame(code=15, opaque=9, fields={"a": "b"}).as_one_way()
    assert request == Frame(code=15, opaque=9, flag=2, fields={"a": "b"})
    assert request.is_one_way
    assert not request.is_response


# Split frames.

BOTH = a_frame(JSON, b"one") + a_frame(BINARY, b"two", kind=1) + a_frame(JSON)


def test_frame_decoder_reads_several_frames_of_one_chunk() -> None:
    assert [frame.body for frame in read(BOTH)] == [b"one", b"two", b""]


def test_frame_decoder_reads_frames_split_at_any_byte() -> None:
    for split in range(len(BOTH) + 1):
        decoder = Decoder()
        assert [*decoder.feed(BOTH[:split]), *decoder.feed(BOTH[split:])] == read(BOTH), split


def test_frame_decoder_yields_a_frame_with_its_last_byte() -> None:
    decoder = Decoder()
    frames_by_end = {end: [*decoder.feed(bytes([byte]))] for end, byte in enumerate(BOTH, 1)}
    first = len(a_frame(JSON, b"one"))
    second = len(a_frame(BINARY, b"two"))
    assert [end for end, frames in frames_by_end.items() if frames] == [first, first + second, len(BOTH)]


def test_frame_decoder_yields_nothing_without_data() -> None:
    assert read(b"") == []


def test_frame_of_the_maximum_size_is_encoded_and_decoded() -> None:
    header = len(encode(Frame(code=10))) - 8
    body = bytes(MAX_FRAME_BYTES - 8 - header)
    data = encode(Frame(code=10, body=body))
    assert len(data) == MAX_FRAME_BYTES
    (frame,) = read(data)
    assert frame.body == body


def test_frame_over_the_maximum_size_is_not_encoded() -> None:
    header = len(encode(Frame(code=10))) - 8
    with pytest.raises(ValueError, match="A frame of 16,777,217 bytes exceeds RocketMQ's limit of 16,777,216 bytes"):
        encode(Frame(code=10, body=bytes(MAX_FRAME_BYTES - 8 - header + 1)))


# Invalid frames. Each is rejected after exactly these bytes: the decoder waits for no more.

BAD_FRAMES = {
    "over the largest": (b"\x00\xff\xff\xfd", "declares a length of 16,777,217 bytes"),
    "far over the largest": (b"\xff\xff\xff\xff", "declares a length of 4,294,967,299 bytes"),
    "no place for a header": (b"\x00\x00\x00\x03", "declares a length of 7 bytes; allowed are 8 to 16,777,216"),
    "nothing": (b"\x00\x00\x00\x00", "declares a length of 4 bytes"),
    "TLS": (b"\x16\x03\x01\x02\x00", "declares a length of"),
    "HTTP": (b"HTTP/1.1 400 Bad Request", "declares a length of"),
    "another serialization": (
        b"\x00\x00\x00\x10\x02\x00\x00\x02",
        r"unknown serialization 2; supported are 0 \(JSON\) and 1 \(binary\)",
    ),
    "header over the frame": (b"\x00\x00\x00\x10\x00\x00\x00\x0d", "of 20 bytes declares a header of 13 bytes"),
    "no header": (b"\x00\x00\x00\x04\x00\x00\x00\x00", "JSON header cannot be decoded"),
}
BAD_JSON = {
    "cut off": b'{"code":0,"opaque":7',
    "a list": b"[]",
    "no code": b'{"opaque":7}',
    "a text for a number": b'{"code":"0","opaque":7}',
    "a number of 5000 digits": b'{"code":0,"opaque":%b}' % (b"7" * 5000),
    "a number for a text": b'{"code":0,"opaque":7,"extFields":{"a":1}}',
    "no UTF-8": b'{"code":0,"opaque":7,"remark":"\xff"}',
    "half a character": b'{"code":0,"opaque":7,"remark":"\\ud800"}',
    "deeply nested": b'{"code":0,"opaque":7,"later":' + b"[" * 100_000,
    "random": bytes(range(256)),
}
BAD_BINARY = {
    "empty": b"",
    "cut off in its numbers": BINARY[:12],
    "cut off in its remark": BINARY[:19],
    "cut off in its fields": BINARY[:-1],
    "remark of a negative length": BINARY[:13] + b"\xff\xff\xff\xff" + BINARY[17:],
    "remark over the header": BINARY[:13] + b"\x7f\xff\xff\xff" + BINARY[17:],
    "remark is no UTF-8": a_binary_header(remark=b"\xff"),
    "fields of a negative length": BINARY[:20] + b"\xff\xff\xff\xff" + BINARY[24:],
    "fields over the header": BINARY[:20] + b"\x00\x00\x00\x1c" + BINARY[24:],
    "name of a negative length": a_binary_header(block=b"\xff\xff\x00\x00\x00\x00"),
    "name over the fields": a_binary_header(block=b"\x00\x05a\x00\x00\x00\x00") + b"after",
    "value of a negative length": a_binary_header(block=b"\x00\x01a\xff\xff\xff\xff"),
    "value over the fields": a_binary_header(block=b"\x00\x01a\x00\x00\x00\x04b") + b"after",
    "name without a value": a_binary_header(block=b"\x00\x01a"),
    "value is no UTF-8": a_binary_header(block=b"\x00\x01a\x00\x00\x00\x01\xff"),
}


@pytest.mark.parametrize(("data", "error"), BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_frame_decoder_rejects_invalid_frames_as_early_as_possible(data: bytes, error: str) -> None:
    with pytest.raises(MalformedFrameError, match=error):
        read(data)


@pytest.mark.parametrize("header", BAD_JSON.values(), ids=BAD_JSON)
def test_frame_decoder_rejects_an_invalid_json_header(header: bytes) -> None:
    with pytest.raises(MalformedFrameError, match="A frame's JSON header cannot be decoded: "):
        read(a_frame(header))


@pytest.mark.parametrize("header", BAD_BINARY.values(), ids=BAD_BINARY)
def test_frame_decoder_rejects_an_invalid_binary_header(header: bytes) -> None:
    with pytest.raises(MalformedFrameError, match=r"A frame's (binary )?header "):
        read(a_frame(header, kind=1))


def test_frame_decoder_rejects_all_data_after_an_invalid_frame() -> None:
    decoder = Decoder()
    for data in (b"\xff\xff\xff\xff", a_frame(JSON)):
        with pytest.raises(MalformedFrameError):
            list(decoder.feed(data))


def test_frame_decoder_yields_frames_before_an_invalid_one() -> None:
    decoded: list[Frame] = []
    with pytest.raises(MalformedFrameError):
        decoded.extend(Decoder().feed(a_frame(JSON, b"one") + b"HTTP/1.1 400 Bad Request"))
    assert [frame.body for frame in decoded] == [b"one"]


def test_frame_decoder_reports_whether_it_is_inside_a_frame() -> None:
    decoder = Decoder()
    frame = a_frame(JSON)
    states = [decoder.is_inside_frame]
    for piece in (frame[:3], frame[3:-1], frame[-1:]):
        list(decoder.feed(piece))
        states.append(decoder.is_inside_frame)
    assert states == [False, True, True, False]


# Properties.

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FRAMES = st.builds(
    Frame,
    code=st.integers(-(2**31), 2**31 - 1),
    opaque=st.integers(-(2**31), 2**31 - 1),
    flag=st.integers(0, 3),
    fields=st.dictionaries(TEXTS, TEXTS, max_size=5),
    remark=TEXTS,
    body=st.binary(max_size=100),
    language=st.sampled_from(LANGUAGES),
    version=st.integers(0, 2**15 - 1),
)


@given(st.lists(FRAMES, max_size=4), st.lists(st.integers(0, 2000)))
def test_frame_round_trips_through_any_split(frames: list[Frame], positions: list[int]) -> None:
    data = b"".join(map(encode, frames))
    cuts = sorted({0, *(position for position in positions if position < len(data)), len(data)})
    decoder = Decoder()
    assert [frame for start, end in pairwise(cuts) for frame in decoder.feed(data[start:end])] == frames


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x00\x00\x00\x20", b"\x00\x00\x00\x20\x01\x00\x00\x1c"]))
def test_frame_decoder_yields_frames_or_malformed_for_any_bytes(data: bytes, start: bytes) -> None:
    with suppress(MalformedFrameError):
        assert all(isinstance(frame, Frame) for frame in read(start + data))
