"""Remoting frames: encoder and decoder without I/O.

    total (4 bytes) | serialization (1 byte) | header length (3 bytes) | header | body

The total counts the bytes after it. Headers are JSON or in RocketMQ's own binary form, as the sender chooses; this
client sends JSON. `opaque` is the number of a request, which its response repeats. Only the flag distinguishes a
response from a request of the broker: broker and client number their requests separately, so equal numbers occur.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

MAX_FRAME_BYTES: Final = 16 * 2**20  # bytes; servers reject larger frames, too
# The version of RocketMQ that this client claims to be, here 5.3.3. Servers compare it: name servers send standard JSON
# to clients from version 401 on, brokers send requests to clients from 62 on.
PROTOCOL_VERSION: Final = 479

SMALL_PIECE_BYTES = 1024  # received pieces below this are joined at once: each bytes object costs 33 bytes more

# Bits of the flag.
_RESPONSE = 1
_ONE_WAY = 2
# The header's serialization.
_JSON = 0
_BINARY = 1
# Languages of clients; a binary header has the index.
_LANGUAGES = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST",
    "NODE_JS",
)  # fmt: skip
_TOTAL = struct.Struct(">I")
_START = struct.Struct(">II")  # total; serialization (high byte; JSON is 0) and header length
_SERIALIZATION_OFFSET = 4  # the position of this byte in a frame
_HEADER_LENGTH_OFFSET = 5  # the position of these three bytes
_HEAD = struct.Struct(">hBhii")  # start of a binary header: code, language, version, opaque, flag
_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")


class MalformedFrameError(ValueError):
    """The peer sent bytes that cannot be parsed; all later bytes of that connection are unreadable, too."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """A request or a response."""

    code: int
    opaque: int = 0
    flag: int = 0
    fields: Mapping[str, str] = {}
    remark: str = ""
    body: bytes = b""
    language: str = "PYTHON"
    version: int = PROTOCOL_VERSION

    @property
    def is_response(self) -> bool:
        """Whether the frame is the response to a request of this client."""
        return bool(self.flag & _RESPONSE)

    @property
    def is_one_way(self) -> bool:
        """Whether the sender expects no response."""
        return bool(self.flag & _ONE_WAY)

    def make_response(self, code: int, body: bytes = b"", remark: str = "") -> "Frame":
        """Return the response to this request."""
        return Frame(code=code, opaque=self.opaque, flag=_RESPONSE, body=body, remark=remark)

    def as_one_way(self) -> "Frame":
        """Return this request as a one-way request."""
        return msgspec.structs.replace(self, flag=self.flag | _ONE_WAY)


class _Header(msgspec.Struct, kw_only=True, omit_defaults=True):
    code: int
    opaque: int
    flag: int = 0
    language: str = ""
    version: int = 0
    remark: str | None = None
    extFields: dict[str, str | None] | None = None  # noqa: N815 - the protocol's name
    serializeTypeCurrentRPC: str = ""  # noqa: N815 - the protocol's name


_read_header = msgspec.json.Decoder(_Header).decode
_write_header = msgspec.json.Encoder().encode


def encode(frame: Frame) -> bytes:
    """Encode a frame; raise ValueError if it is larger than servers accept."""
    header = _write_header(
        _Header(
            code=frame.code,
            opaque=frame.opaque,
            flag=frame.flag,
            language=frame.language,
            version=frame.version,
            remark=frame.remark or None,
            extFields=dict(frame.fields) or None,
            serializeTypeCurrentRPC="JSON",
        )
    )
    size = _START.size + len(header) + len(frame.body)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"A frame of {size:,} bytes exceeds RocketMQ's limit of {MAX_FRAME_BYTES:,} bytes")
    return b"".join((_START.pack(size - _TOTAL.size, len(header)), header, frame.body))


class Decoder:
    """Incremental decoder: yields frames from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # received bytes; joined only for a whole frame, so a large one is copied once
        self._buffered_bytes = 0  # length of all pieces
        self._frame_bytes = 0  # length of the frame that the pieces begin with; 0: not known yet

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes and yield the complete frames; a malformed one raises `MalformedFrameError` when it is reached."""
        self._buffered_bytes += len(data)
        if self._pieces and len(self._pieces[-1]) < SMALL_PIECE_BYTES:
            self._pieces[-1] += data
        else:
            self._pieces.append(data)
        if self._buffered_bytes < self._frame_bytes:
            return  # the first frame is still incomplete
        data = b"".join(self._pieces)
        position = 0
        while (size := _frame_size(data, position)) and position + size <= len(data):
            header_start = position + _START.size
            serialization = data[position + _SERIALIZATION_OFFSET]
            header_length = int.from_bytes(data[position + _HEADER_LENGTH_OFFSET : header_start])
            header_end = header_start + header_length
            position += size
            header = data[header_start:header_end]
            body = data[header_end:position]
            yield _parse_json_frame(header, body) if serialization == _JSON else _parse_binary_frame(header, body)
        self._pieces = [data[position:]]
        self._buffered_bytes = len(data) - position
        self._frame_bytes = size  # length of the first incomplete frame

    @property
    def is_inside_frame(self) -> bool:
        """Whether the buffer holds an incomplete frame."""
        return self._buffered_bytes > 0

    @property
    def announced_bytes(self) -> int:
        """The length of the incomplete frame; 0 if none is buffered, or if its length has not arrived yet."""
        return self._frame_bytes


def _frame_size(data: bytes, position: int) -> int:
    """Return the length of the frame at a position, or 0 if its first bytes, with the lengths, are incomplete.

    Raise `MalformedFrameError` for impossible lengths as soon as they arrive: the remaining bytes may never come.
    """
    if len(data) < position + _TOTAL.size:
        return 0
    size: int = _TOTAL.size + _TOTAL.unpack_from(data, position)[0]
    if not _START.size <= size <= MAX_FRAME_BYTES:
        problem = f"A frame declares a length of {size:,} bytes; allowed are {_START.size} to {MAX_FRAME_BYTES:,}"
        raise MalformedFrameError(problem)
    if len(data) < position + _START.size:
        return 0
    serialization = data[position + _SERIALIZATION_OFFSET]
    length = int.from_bytes(data[position + _HEADER_LENGTH_OFFSET : position + _START.size])
    if serialization not in {_JSON, _BINARY}:
        supported = "supported are 0 (JSON) and 1 (binary)"
        raise MalformedFrameError(f"A frame's header has the unknown serialization {serialization}; {supported}")
    if _START.size + length > size:
        raise MalformedFrameError(f"A frame of {size:,} bytes declares a header of {length:,} bytes")
    return size


def _parse_json_frame(header: bytes, body: bytes) -> Frame:
    try:
        parsed = _read_header(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrameError(f"A frame's JSON header cannot be decoded: {error}") from None
    fields = {key: value for key, value in (parsed.extFields or {}).items() if value is not None}
    return Frame(
        code=parsed.code,
        opaque=parsed.opaque,
        flag=parsed.flag,
        fields=fields,
        remark=parsed.remark or "",
        body=body,
        language=parsed.language,
        version=parsed.version,
    )


def _parse_binary_frame(header: bytes, body: bytes) -> Frame:
    try:
        code, language, version, opaque, flag = _HEAD.unpack_from(header)
        remark, position = _read_text(header, _HEAD.size, _INT)
        (length,) = _INT.unpack_from(header, position)
        position += _INT.size
        if length < 0 or position + length > len(header):
            raise MalformedFrameError(f"A frame's header of {len(header)} bytes declares {length} bytes of fields")
        block = header[position : position + length]
        position = 0
        fields = {}
        while position < length:
            key, position = _read_text(block, position, _SHORT)
            fields[key], position = _read_text(block, position, _INT)
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrameError(f"A frame's binary header cannot be decoded: {error}") from None
    name = _LANGUAGES[language] if language < len(_LANGUAGES) else "OTHER"
    return Frame(
        code=code, opaque=opaque, flag=flag, fields=fields, remark=remark, body=body, language=name, version=version
    )


def _read_text(data: bytes, position: int, length_format: struct.Struct) -> tuple[str, int]:
    """Return the text at a position, where its length comes first, and the position after it."""
    (length,) = length_format.unpack_from(data, position)
    start = position + length_format.size
    if length < 0 or start + length > len(data):
        problem = f"A frame's binary header has a text of {length} bytes where {len(data) - start} are left"
        raise MalformedFrameError(problem)
    return data[start : start + length].decode(), start + length
