"""Reads the lines of journal segments, also of damaged ones.

A segment is a gzip file of lines. A file that is cut off or damaged gives the lines before the damage, and then the
reason why it has no further lines.
"""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 4 * 2**20  # size that is decompressed at once
MAX_LINE_BYTES = 64 * 2**20
GZIP_START = b"\x1f\x8b"

MISSING_REASON = "The segment was removed from the journal before it was read"
EMPTY_REASON = "The segment is empty, so it is no gzip file"
FORMAT_REASON = "The segment is no gzip file"
DAMAGED_REASON = "The segment is damaged: the lines after the damage cannot be read"
TRUNCATED_REASON = "The segment is truncated: its last lines are missing"
LONG_LINE_REASON = f"The segment has a line of more than {MAX_LINE_BYTES // 2**20} MB: it was read up to that line"


class BrokenSegmentError(Exception):
    """A segment cannot be read to its end; the text is the reason for the quarantine."""


class SegmentLine(NamedTuple):
    """A line of a segment, or the reason why the segment cannot be read further."""

    line: bytes | None  # None: the segment has no further lines
    reason: str | None  # None: a line


def iterate_lines(content: bytes | None) -> Iterator[SegmentLine]:
    """Yield the lines of a segment as far as it can be read, then the reason if it cannot be read to its end.

    `content` is None if the journal lacks the segment.
    """
    unfinished_line = b""
    reason: str | None = None
    try:
        for piece in _decompress(content):
            *lines, unfinished_line = (unfinished_line + piece).split(b"\n")
            for line in lines:
                yield SegmentLine(line, None)
            if len(unfinished_line) > MAX_LINE_BYTES:
                reason = LONG_LINE_REASON
                unfinished_line = b""
                break
    except BrokenSegmentError as error:
        reason = str(error)
    if unfinished_line:  # a last line without a line break, or the part of it that can be read
        yield SegmentLine(unfinished_line, None)
    if reason:
        yield SegmentLine(None, reason)


def _decompress(data: bytes | None) -> Iterator[bytes]:
    """Yield the content of a gzip file of one or more members piece by piece."""
    if data is None:
        raise BrokenSegmentError(MISSING_REASON)
    if not data.startswith(GZIP_START):
        raise BrokenSegmentError(FORMAT_REASON if data else EMPTY_REASON)
    while data.startswith(GZIP_START):
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        while not member.eof:
            try:
                piece = member.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise BrokenSegmentError(DAMAGED_REASON) from None
            data = member.unconsumed_tail
            if not piece and not data and not member.eof:
                raise BrokenSegmentError(TRUNCATED_REASON)
            yield piece
        data = member.unused_data
    if data.strip(b"\0"):  # some tools fill the last block with zeros
        raise BrokenSegmentError(DAMAGED_REASON)
