"""Changes that turn valid input into invalid input."""

from collections.abc import Callable, Sequence
from random import Random

LONGEST_BYTES = 2**16  # of one input

_EXTREMES = (0, 1, 2, 3, 4, 7, 8, 20, 22, 127, 128, 255, 2**15 - 1, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, -1)
_TOKENS = (
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b":", b",", b"{{", b"}:", b'"a":', b"0:", b"-1", b"1e999", b"null", b"NaN"),
    *(b" ", b"\\ud800", b"\xff", b"\x00", b"\x01", b"\x02", b"9" * 5000, b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab"),
    *(b"\r\n", b"\r\n\r\n", b"0-131071", b"0-999999999", b"-", b"0"),
)


def mutate(chance: Random, data: bytes, samples: Sequence[bytes]) -> bytes:
    """Return the data with one to four changes; a splice continues with a part of one of the samples."""

    def splice(chance: Random, data: bytes) -> bytes:
        sample = chance.choice(samples)
        return data[: chance.randrange(len(data))] + sample[chance.randrange(len(sample)) :]

    changes: tuple[Callable[[Random, bytes], bytes], ...]
    changes = (_flip, _flip, _number, _number, _cut, _leave_out, _token, _repeat, splice)
    for _ in range(chance.choice((1, 1, 2, 4))):
        data = chance.choice(changes)(chance, data or b"\x00")[:LONGEST_BYTES]
    return data


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
    at = chance.randrange(len(data))
    size = chance.choice((1, 2, 4, 8))
    value: int = chance.choice((*_EXTREMES, len(data), -chance.randint(1, 200)))
    return data[:at] + int(value % 256**size).to_bytes(size, "big") + data[at + size :]


def _token(chance: Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.choice(_TOKENS) * chance.choice((1, 1, 2, 3000)) + data[at:]


def _repeat(chance: Random, data: bytes) -> bytes:
    start, end = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
    return data[:end] + data[start:end] * chance.choice((1, 2, 1000)) + data[end:]
