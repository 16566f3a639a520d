"""Names of the journal's segments: immutable files of one hour and one process of the operator."""

import re
from datetime import datetime
from typing import NamedTuple

SUFFIX = ".jsonl.gz"
_MAX_POD_CHARACTERS = 120  # file names have at most 255
# No surrogates, which Python uses for bytes that are not UTF-8: the lake's ledger could not store such a name.
_SEGMENT = re.compile(r"date=(\d{4}-\d\d-\d\d)/(\d\d)-[^/\ud800-\udfff]+\.jsonl\.gz", re.ASCII)
_OPERATOR_SEGMENT = re.compile(
    r"date=(\d{4}-\d\d-\d\d)/(\d\d)-([^/]+)-([0-9A-Za-z]+)-(\d{8}T\d{6}Z)-(\d{6,12})\.jsonl\.gz", re.ASCII
)


class SegmentName(NamedTuple):
    """The name of a segment that an operator has written."""

    hour: str  # UTC hour of the records, such as 2026-11-21T08
    pod: str  # name of the operator's pod, or another identity
    uid: str  # uid of the pod, without dashes
    start: str  # UTC start of the operator's process, such as 20261121T075812Z
    sequence: int  # number of the segment among those of the process

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
