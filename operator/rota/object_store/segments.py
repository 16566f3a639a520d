"""Names of the journal's segments: immutable files of one hour and one process of the operator."""

import re
from datetime import datetime
from typing import NamedTuple

SUFFIX = ".jsonl.gz"
_MAX_POD_CHARACTERS = 120  # file names have at most 255
# A file's name that is not UTF-8, which a ledger could not store, has surrogates in Python.
_SEGMENT = re.compile(r"date=(\d{4}-\d\d-\d\d)/(\d\d)-[^/\ud800-\udfff]+\.jsonl\.gz", re.ASCII)
_OPERATOR_SEGMENT = re.compile(
    r"date=(\d{4}-\d\d-\d\d)/(\d\d)-([^/]+)-([0-9A-Za-z]+)-(\d{8}T\d{6}Z)-(\d{6,12})\.jsonl\.gz", re.ASCII
)


class SegmentName(NamedTuple):
    """The name of a segment that an operator has written."""

    hour: str  # of its records, in UTC, such as 2026-11-21T08
    pod: str  # name of the operator's pod, or another identity
    uid: str  # of the pod, without dashes
    start: str  # of the operator's process, in UTC, such as 20261121T075812Z
    sequence: int  # of the process' segments

    @property
    def key(self) -> str:
        """The segment's key below the journal's root."""
        date, _, hour = self.hour.partition("T")
        pod = self.pod[:_MAX_POD_CHARACTERS]
        return f"date={date}/{hour}-{pod}-{self.uid}-{self.start}-{self.sequence:06}{SUFFIX}"


def parse_segment(key: str) -> SegmentName | None:
    """Return the parts of a segment's key; None if no operator has given that name."""
    match = _OPERATOR_SEGMENT.fullmatch(key)
    hour = segment_hour(key)
    return SegmentName(hour, match[3], match[4], match[5], int(match[6])) if match and hour else None


def segment_hour(key: str) -> str | None:
    """Return the hour in a segment's key, such as 2026-11-21T08, also if a user named the file; None for other keys."""
    match = _SEGMENT.fullmatch(key)
    if not match:
        return None
    hour = f"{match[1]}T{match[2]}"
    try:
        datetime.fromisoformat(f"{hour}:00")
    except ValueError:  # such as hour 24
        return None
    return hour
